"""Packed images, decoded, cached and augmented. No torch here: decoding processes import it."""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image

from mpigossip.config import JobError
from mpigossip.data.augment import TEST_FRACTION, centre_box, crop_flip, moves, random_box, resample
from mpigossip.store.dataset import SPLITS, Dataset, Split, open_dataset

CACHE_LIMIT = 1 << 30
"""Bytes of decoded images up to which `data.cache = "auto"` keeps them."""


class Recipe(NamedTuple):
    """All that an `Images` is made from; small, so that it can be sent to another process."""

    path: str
    augment: str
    image_size: int | None
    cache: str


class Images:
    """Decoded batches of a data set of kind "images" or "arrays".

    With `cache`, an image is decoded when it is first asked for and kept: for "resized-crop" as
    it was stored, else as it goes into a batch. The bytes of a batch depend on neither the cache
    nor the order of calls. Safe to use from several threads.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.data: Dataset = open_dataset(recipe.path)
        self.random = recipe.augment == "resized-crop"
        self._ready: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._stored: dict[int, Image.Image] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._drawn: tuple[tuple[int, int], np.ndarray] = (-1, -1), np.empty(0)
        try:
            self.size = self._size()
            self.shape = (self.data.channels, *self.size)
            self.cached = self._caches()
            self._prepare_cache()
        except BaseException:
            self.data.close()
            raise

    def batch(self, split: str, indices: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
        """Return (B, C, H, W) uint8; key is (seed, epoch), used for split "train" alone."""
        if split == "train" and self.random:
            out = np.empty((len(indices), *self.shape), np.uint8)
            for row, index in enumerate(indices.tolist()):
                image = self._original(index)
                box, mirror = random_box(image.width, image.height, index, *key)
                out[row] = resample(image, box, self.size, mirror)
            return out
        images = self._prepared(split, indices)
        if split == "train" and self.recipe.augment == "crop-flip":
            return crop_flip(images, self._moves(*key)[:, indices])
        return images

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self.data.close()

    def _moves(self, seed: int, epoch: int) -> np.ndarray:
        """Return the changes of an epoch: drawn at once, 0.1 µs a sample in place of 4."""
        if self._drawn[0] != (seed, epoch):
            self._drawn = (seed, epoch), moves(len(self.data.train), seed, epoch)
        return self._drawn[1]

    def _prepare_cache(self) -> None:
        """Make room for decoded images; arrays are read whole."""
        if self.data.kind == "arrays":
            self._arrays = {name: self.data.split(name).array() for name in SPLITS}
            self.data.close()
        for name in SPLITS if self.cached else ():
            count = len(self.data.split(name))
            fits = name in self._arrays and self._arrays[name].shape[2:] == self.size
            if fits and not self.random:  # of which tests see the middle, whatever the pack
                self._ready[name] = self._arrays[name], np.ones(count, bool)
            elif name == "test" or not self.random:
                # Pages of zeros take memory only once written: a node pays for its own samples.
                self._ready[name] = np.zeros((count, *self.shape), np.uint8), np.zeros(count, bool)

    def _prepared(self, split: str, indices: np.ndarray) -> np.ndarray:
        """Return a new array of images as they are without random changes."""
        if split not in self._ready:
            return np.stack([self._prepare(split, index) for index in indices.tolist()])
        images, known = self._ready[split]
        if not known.all():
            for index in indices[~known[indices]].tolist():
                images[index] = self._prepare(split, index)
                known[index] = True
        return images[indices]

    def _prepare(self, split: str, index: int) -> np.ndarray:
        """Return one image at the batch's size: whole where it fits, else its middle."""
        image = self._image(split, index)
        fraction = TEST_FRACTION if self.random else 1.0
        box = centre_box(image.width, image.height, fraction)
        if fraction == 1.0 and (image.height, image.width) == self.size:
            box = (0, 0, image.width, image.height)
        return resample(image, box, self.size, False)

    def _original(self, index: int) -> Image.Image:
        """Return a training image as it was stored."""
        image = self._stored.get(index)
        if image is None:
            image = self._image("train", index)
            if self.cached:
                self._stored[index] = image
        return image

    def _image(self, split: str, index: int) -> Image.Image:
        """Decode one image, as gray or RGB like the rest of the data set."""
        if split in self._arrays:
            pixels = self._arrays[split][index]
            return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        try:
            with Image.open(io.BytesIO(self.data.split(split).encoded(index))) as image:
                height, width = self.data.split(split).sizes[index]
                if image.size != (width, height):  # before it is decoded into so much memory
                    raise OSError(f"{image.size} pixels in place of {(int(width), int(height))}")
                return image.convert("L" if self.data.channels == 1 else "RGB")
        except (OSError, Image.DecompressionBombError) as error:
            raise OSError(
                f"{self.recipe.path}: image {index} of {split} is damaged ({error}); "
                "pack the data set again"
            ) from error

    def _size(self) -> tuple[int, int]:
        """Return height and width of a batch."""
        if self.recipe.image_size is not None:
            return self.recipe.image_size, self.recipe.image_size
        if self.random:
            raise JobError(
                [
                    'data.augment = "resized-crop" needs a side in pixels to scale to: '
                    "set data.image_size, for example to 224"
                ]
            )
        sizes = np.concatenate([self.data.train.sizes, self.data.test.sizes])
        low, high = sizes.min(0), sizes.max(0)
        if (low != high).any():
            raise JobError(
                [
                    f"the images of {self.recipe.path} are of {low[0]}x{low[1]} to "
                    f"{high[0]}x{high[1]} pixels: set data.image_size, the side in pixels "
                    "that all are brought to"
                ]
            )
        return int(low[0]), int(low[1])

    def _caches(self) -> bool:
        """Return whether decoded images are kept."""

        def bytes_of(split: Split, stored: bool) -> int:
            pixels = split.sizes.prod(1).sum() if stored else len(split) * np.prod(self.size)
            return int(pixels) * self.data.channels

        needed = bytes_of(self.data.train, self.random) + bytes_of(self.data.test, False)
        return {"always": True, "never": False}.get(self.recipe.cache, needed <= CACHE_LIMIT)
