"""Packed images: decoding, cache and augmentation.

This module does not import torch, because loading processes import it. Random augmentations follow
from (seed, epoch, sample) alone. Images in batches are (B, C, H, W) uint8. Boxes are (left, top,
right, bottom) in pixels, as in Pillow, and need not be integers.
"""

import io
import math
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from mpigossip.config import JobError
from mpigossip.data.philox import CROP, words
from mpigossip.store.dataset import SPLITS, Dataset, Split, open_dataset

CACHE_LIMIT = 1 << 30
"""Largest size of all decoded images, in bytes, with which `data.cache = "auto"` keeps them."""
PAD = 4
"""Width, in pixels, of the black border that is added before the random crop of "crop-flip"."""
TEST_FRACTION = 224 / 256
"""Fraction of the shorter side that the test crop of "resized-crop" keeps."""
ATTEMPTS = 10
"""Number of random crops of "resized-crop" that are tried before a centred crop is used."""

Box = tuple[float, float, float, float]


def moves(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the augmentations of "crop-flip" for all samples of a data set in an epoch.

    :param samples: number of samples
    :param seed: random seed
    :param epoch: number of the epoch
    :return: (3, samples) uint8; the rows are top and left of the crop, 0 … 8, and whether the image
        is mirrored
    """
    drawn = words(seed, CROP, np.arange(samples, dtype=np.uint64), epoch)
    top, left = drawn[:2] * np.uint64(2 * PAD + 1) >> np.uint64(32)
    return np.stack([top, left, drawn[2] & np.uint64(1)]).astype(np.uint8)


def crop_flip(images: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Pad images by 4 black pixels, crop them to their former size, and mirror some of them.

    ``moved`` determines the crops, and which images are mirrored. This is the protocol for CIFAR of
    He et al., "Deep residual learning" (CVPR 2016), section 4.2.

    :param images: (B, C, H, W) uint8, overwritten
    :param moved: (3, B), the columns of the result of `moves` for these images
    """
    batch, channels, height, width = images.shape
    padded = np.zeros((batch, channels, height + 2 * PAD, width + 2 * PAD), np.uint8)
    padded[:, :, PAD:-PAD, PAD:-PAD] = images
    for row, (top, left, mirrored) in enumerate(moved.T.tolist()):
        crop = padded[row, :, top : top + height, left : left + width]
        images[row] = crop[:, :, ::-1] if mirrored else crop
    return images


def random_box(width: int, height: int, index: int, seed: int, epoch: int) -> tuple[Box, bool]:
    """Draw the crop of "resized-crop", and whether the crop is mirrored.

    The area of the crop is drawn uniformly from 8 % to 100 % of the image, and its aspect ratio
    log-uniformly from 3/4 to 4/3. A crop that does not fit into the image is drawn again. If ten
    draws do not fit into the image, the crop is the largest centred box whose ratio lies within
    these limits (Szegedy et al., "Going deeper with convolutions", CVPR 2015; in the form of Goyal
    et al., 2017).

    :param width: width of the image in pixels
    :param height: height of the image in pixels
    :param index: index of the sample
    :param seed: random seed
    :param epoch: number of the epoch
    :return: the crop, and whether it is mirrored
    """
    low = 3 / 4
    high = 4 / 3
    drawn = words(
        seed, CROP, np.full(ATTEMPTS + 1, index), epoch, np.arange(ATTEMPTS + 1)
    ).T.tolist()
    mirror = drawn[ATTEMPTS][0] % 2 == 1
    for area_word, ratio_word, left_word, top_word in drawn[:ATTEMPTS]:
        area = width * height * (0.08 + 0.92 * area_word / 2**32)
        ratio = math.exp(math.log(low) + math.log(high / low) * ratio_word / 2**32)
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = left_word * (width - w + 1) >> 32
            top = top_word * (height - h + 1) >> 32
            return (left, top, left + w, top + h), mirror
    w = min(width, round(height * high))
    h = min(height, round(width / low))
    left = (width - w) // 2
    top = (height - h) // 2
    return (left, top, left + w, top + h), mirror


def centre_box(width: int, height: int, fraction: float) -> Box:
    """Return the centred square box whose side is ``fraction`` of the image's shorter side."""
    side = min(width, height) * fraction
    left = (width - side) / 2
    top = (height - side) / 2
    return (left, top, left + side, top + side)


def resample(image: Image.Image, box: Box, size: tuple[int, int], mirror: bool) -> np.ndarray:
    """Scale a box of an image bilinearly to ``size`` (height, width); return (C, H, W) uint8."""
    if box != (0, 0, image.width, image.height) or size != (image.height, image.width):
        image = image.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return pixels[:, :, ::-1] if mirror else pixels


class Recipe(NamedTuple):
    """Parameters of `Images`; it is small, so that it can be sent to another process."""

    path: str
    """Path of the packed images."""
    augment: str
    """Value of `data.augment`."""
    image_size: int | None
    """Value of `data.image_size`."""
    cache: str
    """Value of `data.cache`."""


class Images:
    """Decoded batches of a data set of kind "images" or "arrays".

    If images are cached, each image is decoded when it is first requested, and kept in memory. For
    "resized-crop", a training image is kept in its stored size; all others are kept in the size of
    the batch. Neither the cache nor the order of calls changes a batch.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Open the file, and prepare the cache.

        :param recipe: the parameters
        :raises JobError: if the size of the images in a batch is not known
        :raises StoreError: if the file is not a packed data set
        """
        self.recipe = recipe
        self.data: Dataset = open_dataset(recipe.path)
        self.random = recipe.augment == "resized-crop"
        self._ready: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._drawn: tuple[tuple[int, int], np.ndarray] = (-1, -1), np.empty(0)
        try:
            self.size = self._size()
            self.shape = (self.data.channels, *self.size)
            self.cached = self._caches()
            self._original = cache(self._image) if self.cached else self._image
            self._prepare_cache()
        except BaseException:
            self.data.close()
            raise

    def batch(self, split: str, indices: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
        """Return a batch, (B, C, H, W) uint8.

        :param split: "train" or "test"
        :param indices: numbers of the samples
        :param key: (seed, epoch), used only for split "train"
        :raises OSError: if an image can't be decoded
        """
        if split == "train" and self.random:
            out = np.empty((len(indices), *self.shape), np.uint8)
            for row, index in enumerate(indices.tolist()):
                image = self._original(split, index)
                box, mirror = random_box(image.width, image.height, index, *key)
                out[row] = resample(image, box, self.size, mirror)
            return out
        images = self._prepared(split, indices)
        if split == "train" and self.recipe.augment == "crop-flip":
            return crop_flip(images, self._moves(*key)[:, indices])
        return images

    def close(self) -> None:
        self.data.close()

    def _moves(self, seed: int, epoch: int) -> np.ndarray:
        """Return the augmentations of all samples in an epoch, as `moves` draws them.

        One draw for all samples takes 0.1 µs per sample instead of 4 µs.
        """
        if self._drawn[0] != (seed, epoch):
            self._drawn = (seed, epoch), moves(len(self.data.train), seed, epoch)
        return self._drawn[1]

    def _prepare_cache(self) -> None:
        """Allocate the cache, if there is one; if the data set has kind "arrays", read them."""
        if self.data.kind == "arrays":
            self._arrays = {name: self.data.split(name).array() for name in SPLITS}
            self.data.close()
        for name in SPLITS if self.cached else ():
            count = len(self.data.split(name))
            fits = name in self._arrays and self._arrays[name].shape[2:] == self.size
            # With "resized-crop", test images are cropped even if their stored size fits.
            if fits and not self.random:
                self._ready[name] = self._arrays[name], np.ones(count, bool)
            elif name == "test" or not self.random:
                # Zero pages take no memory before they are written, so a node needs memory only for
                # its own samples.
                self._ready[name] = np.zeros((count, *self.shape), np.uint8), np.zeros(count, bool)

    def _prepared(self, split: str, indices: np.ndarray) -> np.ndarray:
        """Return a new array of images without random augmentation."""
        if split not in self._ready:
            return np.stack([self._prepare(split, index) for index in indices.tolist()])
        images, is_ready = self._ready[split]
        if not is_ready.all():
            for index in indices[~is_ready[indices]].tolist():
                images[index] = self._prepare(split, index)
                is_ready[index] = True
        return images[indices]

    def _prepare(self, split: str, index: int) -> np.ndarray:
        """Return one image in the size of a batch, uint8 (C, H, W), without random augmentation.

        With "resized-crop", this is the scaled centre of the image. Otherwise, an image that has
        this size is not changed, and the largest centred square of any other image is scaled.
        """
        image = self._image(split, index)
        fraction = TEST_FRACTION if self.random else 1.0
        box = centre_box(image.width, image.height, fraction)
        if fraction == 1.0 and (image.height, image.width) == self.size:
            box = (0, 0, image.width, image.height)
        return resample(image, box, self.size, False)

    def _image(self, split: str, index: int) -> Image.Image:
        """Decode one image, as grey or RGB like the rest of the data set.

        :param split: "train" or "test"
        :param index: number of the sample
        :raises OSError: if the image can't be decoded, or has another size than the data set states
        """
        if split in self._arrays:
            pixels = self._arrays[split][index]
            return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        try:
            with Image.open(io.BytesIO(self.data.split(split).encoded(index))) as image:
                height, width = self.data.split(split).sizes[index]
                # Check this before decoding, which could need a lot of memory.
                if image.size != (width, height):
                    raise OSError(
                        f"it has {image.width}x{image.height} pixels instead of {width}x{height}"
                    )
                return image.convert("L" if self.data.channels == 1 else "RGB")
        except (OSError, Image.DecompressionBombError) as error:
            raise OSError(
                f"{self.recipe.path}: image {index} of {split} can't be decoded ({error}); "
                "pack the data set again"
            ) from error

    def _size(self) -> tuple[int, int]:
        """Return height and width of the images in a batch; raise JobError if they are unknown."""
        if self.recipe.image_size is not None:
            return self.recipe.image_size, self.recipe.image_size
        if self.random:
            raise JobError(
                'data.augment = "resized-crop" needs the side, in pixels, to which images are '
                "scaled: set data.image_size, for example to 224"
            )
        sizes = np.concatenate([self.data.train.sizes, self.data.test.sizes])
        low = sizes.min(0)
        high = sizes.max(0)
        if (low != high).any():
            raise JobError(
                f"the images of {self.recipe.path} have {low[0]}x{low[1]} to {high[0]}x{high[1]} "
                "pixels: set data.image_size, the side in pixels to which all are scaled"
            )
        return int(low[0]), int(low[1])

    def _caches(self) -> bool:
        """Return whether decoded images are kept in memory."""

        def bytes_of(split: Split, stored: bool) -> int:
            pixels = split.sizes.prod(1).sum() if stored else len(split) * np.prod(self.size)
            return int(pixels) * self.data.channels

        needed = bytes_of(self.data.train, self.random) + bytes_of(self.data.test, False)
        return {"always": True, "never": False}.get(self.recipe.cache, needed <= CACHE_LIMIT)
