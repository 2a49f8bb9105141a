"""Random changes of training images, deterministic from (seed, epoch, sample). No torch here.

Images in batches are (B, C, H, W) uint8. Boxes are (left, top, right, bottom) in pixels, as
Pillow has them, and may lie between pixels.
"""

import math

import numpy as np
from PIL import Image

from mpigossip.data.philox import CROP, words

PAD = 4
"""Black pixels around an image before the random crop of "crop-flip"."""
TEST_FRACTION = 224 / 256
"""Part of the shorter side that the test crop of "resized-crop" keeps."""
ATTEMPTS = 10

Box = tuple[float, float, float, float]


def moves(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Draw the changes of "crop-flip" for all samples of a data set: (3, samples) uint8.

    Rows: top and left of the crop, 0 … 8, and whether the image is mirrored.
    """
    drawn = words(seed, CROP, np.arange(samples, dtype=np.uint64), epoch)
    top, left = drawn[:2] * np.uint64(2 * PAD + 1) >> np.uint64(32)
    return np.stack([top, left, drawn[2] & np.uint64(1)]).astype(np.uint8)


def crop_flip(images: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Pad by 4 black pixels, crop at random to the size before, mirror every second one.

    images: (B, C, H, W) uint8, overwritten; moved: (3, B), columns of `moves`. The protocol for
    CIFAR of He et al., "Deep residual learning" (CVPR 2016), section 4.2.
    """
    batch, channels, height, width = images.shape
    padded = np.zeros((batch, channels, height + 2 * PAD, width + 2 * PAD), np.uint8)
    padded[:, :, PAD:-PAD, PAD:-PAD] = images
    for row, (top, left, mirrored) in enumerate(moved.T.tolist()):
        crop = padded[row, :, top : top + height, left : left + width]
        images[row] = crop[:, :, ::-1] if mirrored else crop
    return images


def random_box(width: int, height: int, index: int, seed: int, epoch: int) -> tuple[Box, bool]:
    """Draw the crop of "resized-crop" and whether it is mirrored.

    Area uniform in 8 % to 100 % of the image, aspect ratio log-uniform in 3/4 to 4/3, ten
    attempts, else the largest box in the middle whose ratio lies within these limits (Szegedy et
    al., "Going deeper with convolutions", CVPR 2015; the form used by Goyal et al., 2017).
    """
    low, high = 3 / 4, 4 / 3
    drawn = words(
        seed, CROP, np.full(ATTEMPTS + 1, index), epoch, np.arange(ATTEMPTS + 1)
    ).T.tolist()
    mirror = drawn[ATTEMPTS][0] % 2 == 1
    for area_word, ratio_word, left_word, top_word in drawn[:ATTEMPTS]:
        area = width * height * (0.08 + 0.92 * area_word / 2**32)
        ratio = math.exp(math.log(low) + math.log(high / low) * ratio_word / 2**32)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = left_word * (width - w + 1) >> 32, top_word * (height - h + 1) >> 32
            return (left, top, left + w, top + h), mirror
    w, h = min(width, round(height * high)), min(height, round(width / low))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h), mirror


def centre_box(width: int, height: int, fraction: float) -> Box:
    """Return the square in the middle whose side is `fraction` of the shorter side."""
    side = min(width, height) * fraction
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def resample(image: Image.Image, box: Box, size: tuple[int, int], mirror: bool) -> np.ndarray:
    """Scale the box of an image to `size` (height, width), bilinearly: (C, H, W) uint8."""
    if box != (0, 0, image.width, image.height) or size != (image.height, image.width):
        image = image.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return pixels[:, :, ::-1] if mirror else pixels
