"""Packing of a folder of images or texts into one HDF5 file, as `dataset.py` describes it."""

import io
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import h5py
import numpy as np
from PIL import Image

from mpigossip.config.host import core_count
from mpigossip.store import StoreError, guard, texts
from mpigossip.store.hdf5 import CONTENT_ERRORS, fixed, reading, replacing

FORMAT = "mpigossip-dataset"
VERSION = 3
"""Version of data sets with a tokenizer. Earlier programs would read tokens as bytes."""
PLAIN = 2
"""Version of data sets without a tokenizer."""
VOCABULARY = 4096
"""Default number of entries of a vocabulary."""
SPLITS = ("train", "test")
SAMPLE_FOR_MEAN = 10_000
"""Smallest number of training images from which the mean and the standard deviation are computed.
The images are evenly distributed; if there are fewer, all images are used.
"""
BLOCK = 512
"""Number of files that are decoded at a time, so that packing needs little memory."""
LARGE = 1 << 14
"""Mean size of files, in bytes, above which decoding takes long enough for threads to pay off."""
BUFFER = 1 << 24
"""Size of buffers for reading and writing, in bytes."""

Files = tuple[list[Path], list[int]]
"""Paths of files, and their labels."""


class _Payload(NamedTuple):
    """Result of the check of an image file: its content for the data set, or its problems."""

    data: bytes
    size: tuple[int, int]
    """Height and width in pixels."""
    gray: bool
    """True if the image has no colours; also true if the file has problems."""
    moments: np.ndarray | float
    """Number of pixels of each channel, and sum and sum of squares of their values, which lie
    between 0 and 1, (3, 3); 0: not measured."""
    problems: list[str]


@dataclass(frozen=True)
class _SplitSamples:
    """Encoded samples of the training or test split, with their lengths, checksums and sizes."""

    spool: IO[bytes]
    """File without a name, in the folder of the data set, that collects the samples, because HDF5
    needs the size of a contiguous array before the array is written.
    """
    lengths: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def add(self, data: bytes, size: tuple[int, int] = (0, 0)) -> None:
        """Add an encoded sample, with its height and width in pixels if it is an image."""
        self.spool.write(data)
        self.lengths.append(len(data))
        self.checksums.append(zlib.crc32(data))
        self.sizes.append(size)


@contextmanager
def _open_splits(file: h5py.File) -> Iterator[dict[str, _SplitSamples]]:
    """Return a context manager with an empty collection of samples for each split, by name."""
    folder = Path(file.filename).parent
    with (
        tempfile.TemporaryFile(dir=folder, buffering=BUFFER) as train,
        tempfile.TemporaryFile(dir=folder, buffering=BUFFER) as test,
    ):
        yield {"train": _SplitSamples(train), "test": _SplitSamples(test)}


def pack(
    folder: Path | str,
    out: Path | str,
    *,
    image_size: int | None = None,
    decoded: bool = False,
    text: bool = False,
    tokenizer: str = "byte",
    vocabulary: int = VOCABULARY,
) -> Path:
    """Pack a folder of images or texts into a data set, and return its path.

    Images are read from FOLDER/train/CLASS/* and FOLDER/test/CLASS/* (or FOLDER/val/CLASS/*). Each
    file is decoded once as a check, and stored unchanged unless an option requires otherwise. The
    mean and the standard deviation of the channels, for normalization, are computed from 10,000 to
    20,000 evenly distributed training images, or from all if there are fewer.

    Each file of a text is a document. Its first 90 % are for training, and the rest is for testing.
    The label of a sample is the index of its file.

    While packing, the encoded bytes exist twice on the disk of ``out``. The file appears under its
    name only when it is complete.

    :param folder: folder of images; for text, a file, or a folder whose files are all packed,
        sorted by path
    :param out: file to write
    :param image_size: side in pixels: images whose shorter side is longer are scaled down to it and
        stored as JPEG of quality 95; None: keep all sizes
    :param decoded: store pixels (kind "arrays") instead of image files. This suits small images of
        equal size that many runs use, because no run has to decode them; the batches are the same
    :param text: whether ``folder`` contains text instead of images
    :param tokenizer: tokens of a text: "byte", or "bpe" for a byte-pair encoding that is learned
        from the training text
    :param vocabulary: number of entries of the byte-pair encoding
    :raises StoreError: if options contradict each other, if folders are missing, if files cannot be
        read (the message names the first ten), or if ``out`` cannot be written
    """
    folder = Path(folder)
    out = Path(out)
    if not folder.is_dir() and not (text and folder.is_file()):
        wanted = "text files" if text else "train/CLASS/*.jpg and test/CLASS/*.jpg"
        raise StoreError(f"{folder} is not a folder; name one that contains {wanted}")
    if tokenizer != "byte" and not text:
        raise StoreError(f"--tokenizer {tokenizer!r} is for text only; add --text, or omit it")
    if text and (decoded or image_size is not None):
        option = "--decoded" if decoded else f"--image-size {image_size}"
        raise StoreError(f"{option} is for images only, but --text was given; omit one of them")
    if tokenizer == "byte" and vocabulary != VOCABULARY:
        raise StoreError(
            f"--vocabulary {vocabulary} is for byte-pair encoding only; add --tokenizer bpe"
        )
    if out.is_file() and _is_other_file(out):
        raise StoreError(
            f"{out} exists and is not a data set; choose another name, or remove this file"
        )
    coder = texts.Coder(tokenizer, texts.list_files(folder, out)[0] if text else (), vocabulary)
    if image_size is not None and image_size < 1:
        raise StoreError(f"--image-size {image_size}: must be at least 1 pixel")
    with replacing(out) as new:
        # If the file can't be written, this fails with a shorter message than HDF5's.
        new.touch()
        with h5py.File(new, "w", libver=("v110", "v110")) as file:
            file.attrs.update(
                format=fixed(FORMAT), version=PLAIN, source=fixed(str(folder.resolve()))
            )
            if text:
                _pack_text(folder, file, coder, out)
            else:
                _pack_images(folder, file, image_size, decoded)
    return out


def _is_other_file(path: Path) -> bool:
    """Return whether a file is not a data set, so that it must not be overwritten.

    The result is false for an HDF5 file that can't be opened, because a damaged data set may be
    packed again.
    """
    if not h5py.is_hdf5(path):
        return True
    try:
        with guard.regular(path) as raw, guard.hdf5(raw) as file:
            return not _has_format(file)
    except (*CONTENT_ERRORS, OSError):
        return False


def _has_format(file: h5py.File) -> bool:
    """Return whether the attribute `format` of a file is the format of data sets."""
    try:
        return "format" in file.attrs and guard.attribute(file, "format") == FORMAT
    except CONTENT_ERRORS:
        return False


def _pack_images(folder: Path, file: h5py.File, image_size: int | None, decoded: bool) -> None:
    classes, lists = _find(folder)
    gray = True
    moments = np.zeros((3, 3))
    problems = list[str]()
    with _open_splits(file) as splits:
        for name, (files, _) in lists.items():
            every = max(1, len(files) // SAMPLE_FOR_MEAN) if name == "train" else 0
            for payload in _checked(files, image_size, every):
                splits[name].add(payload.data, payload.size)
                gray &= payload.gray
                moments += payload.moments
                problems += payload.problems
        if problems:
            total = sum(len(files) for files, _ in lists.values())
            more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise StoreError(
                f"{len(problems)} of {total} files can't be read as images: "
                f"{'; '.join(problems[:10])}{more}. Fix or remove them and pack again"
            )
        side = _one_size([s for split in splits.values() for s in split.sizes]) if decoded else None
        for name, (_, labels) in lists.items():
            group = file.create_group(name)
            if side:
                _write_decoded(group, labels, splits[name], gray, side)
            else:
                group["sizes"] = np.array(splits[name].sizes, np.int64)
                _write_split(group, labels, splits[name])
    _write_facts(file, "arrays" if decoded else "images", classes, moments[:1] if gray else moments)


def _find(folder: Path) -> tuple[list[str], dict[str, Files]]:
    """Return the names of the classes, and the image files of each split with their labels.

    :raises StoreError: if a folder is missing, or training and test classes do not match
    """
    train = folder / "train"
    test = folder / "test"
    if not test.is_dir():
        test = folder / "val"
    for needed in (train, test):
        if not needed.is_dir():
            raise StoreError(
                f"{folder} has no folder {needed.name}/; it needs train/CLASS/* and test/CLASS/* "
                "(or val/CLASS/*)"
            )
    classes = sorted(path.name for path in _visible(train) if path.is_dir())
    if not classes:
        raise StoreError(
            f"{train} contains no folders; create one folder for each class, with the name of the "
            "class"
        )
    unknown = sorted({path.name for path in _visible(test) if path.is_dir()} - set(classes))
    if unknown:
        raise StoreError(
            f"{test} has classes that {train} lacks: {', '.join(unknown[:10])}; add these folders "
            "there, or remove them here"
        )
    lists = {}
    for name, split in zip(SPLITS, (train, test), strict=True):
        lists[name] = _image_files(split, classes)
        if not lists[name][0]:
            raise StoreError(f"{split} contains no images; add some to the folders of its classes")
    return classes, lists


def _write_facts(file: h5py.File, kind: str, classes: Sequence[str], moments: np.ndarray) -> None:
    """Write the kind, the class names and the normalization of a data set.

    :param file: file of the data set
    :param kind: "images", "arrays" or "text"
    :param classes: name for each label
    :param moments: number of pixels of each channel, and sum and sum of squares of their values
        divided by 255, (channels, 3), from which the mean and the standard deviation are computed
    """
    count, total, squares = moments.T
    mean = total / count
    # Do not divide a constant channel by its standard deviation 0.
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    std = np.where(std > 1e-6, std, 1.0)
    names = np.array([fixed(name) for name in classes])
    file["classes"] = names
    file.attrs.update(
        kind=fixed(kind),
        channels=len(moments),
        scale=255.0,
        mean=mean,
        std=std,
        checksum=zlib.crc32(names.tobytes()),
    )


def checksum_of(group: Mapping[str, h5py.Dataset]) -> int:
    """Return the CRC-32 of the small arrays of a split, which HDF5 does not check itself."""
    value = 0
    for name in ("labels", "offsets", "sizes", "checksums"):
        if name in group:
            value = zlib.crc32(np.ascontiguousarray(group[name][()]).tobytes(), value)
    return value


def _write_split(group: h5py.Group, labels: Sequence[int], split: _SplitSamples) -> None:
    """Write labels, offsets, checksums and encoded bytes of the samples of a split."""
    offsets = np.concatenate([[0], np.cumsum(split.lengths, dtype=np.int64)])
    group["labels"] = np.array(labels, np.int64)
    group["offsets"] = offsets
    group["checksums"] = np.array(split.checksums, np.uint32)
    group.attrs["checksum"] = checksum_of(group)
    target = group.create_dataset("bytes", (int(offsets[-1]),), np.uint8)
    split.spool.seek(0)
    position = 0
    while piece := split.spool.read(BUFFER):
        target[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
        position += len(piece)


def _one_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width that all images have, in pixels.

    :raises StoreError: if the images differ in size
    """
    ordered = sorted(set(sizes))
    if len(ordered) > 1:
        raise StoreError(
            f"--decoded stores images of one size, but these have {len(ordered)} sizes, from "
            f"{ordered[0][0]}x{ordered[0][1]} to {ordered[-1][0]}x{ordered[-1][1]} pixels; omit "
            "--decoded"
        )
    return ordered[0]


def _write_decoded(
    group: h5py.Group,
    labels: Sequence[int],
    split: _SplitSamples,
    gray: bool,
    side: tuple[int, int],
) -> None:
    """Write labels and checksums of a split's samples, and all pixels as one contiguous array.

    :param group: group of the split in the data set's file
    :param labels: label of each sample
    :param split: the encoded images
    :param gray: whether all images of the data set are grey, so that one channel is stored
    :param side: height and width of each image in pixels
    """
    shape = (len(labels), 1 if gray else 3, *side)
    target = group.create_dataset("images", shape, np.uint8)
    checksums = np.empty(len(labels), np.uint32)
    split.spool.seek(0)
    for begin in range(0, len(labels), BLOCK):
        lengths = split.lengths[begin : begin + BLOCK]
        block = np.empty((len(lengths), *shape[1:]), np.uint8)
        for row, length in enumerate(lengths):
            with Image.open(io.BytesIO(split.spool.read(length))) as image:
                pixels = np.asarray(image.convert("L" if gray else "RGB"))
            block[row] = pixels if gray else pixels.transpose(2, 0, 1)
            checksums[begin + row] = zlib.crc32(block[row])
        target[begin : begin + len(block)] = block
    group["labels"] = np.array(labels, np.int64)
    group["checksums"] = checksums
    group.attrs["checksum"] = checksum_of(group)


def _visible(folder: Path) -> list[Path]:
    with reading(folder):
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return sorted(paths, key=lambda path: path.name)


def _image_files(folder: Path, classes: Sequence[str]) -> Files:
    """Return the image files of a split and their labels, sorted by class and name."""
    pairs = [
        (path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in _visible(folder / name)
        if path.is_file()
    ]
    return [path for path, _ in pairs], [label for _, label in pairs]


def _checked(files: Sequence[Path], image_size: int | None, every: int) -> Iterator[_Payload]:
    """Iterate over the checked image files, in order.

    :param files: image files
    :param image_size: largest length of the shorter side in pixels; None: no limit
    :param every: the pixels of each ``every``-th file are measured; 0: of no file
    """

    def check(item: tuple[int, Path]) -> _Payload:
        return _check(item[1], image_size, every > 0 and item[0] % every == 0)

    # For small files, threads were four times slower, because they waited for Python's global lock.
    if sum(path.stat().st_size for path in files[:BLOCK]) < LARGE * len(files[:BLOCK]):
        yield from map(check, enumerate(files))
        return
    with ThreadPoolExecutor(core_count()) as pool:
        for begin in range(0, len(files), BLOCK):
            yield from pool.map(check, enumerate(files[begin : begin + BLOCK], begin))


def _check(path: Path, image_size: int | None, measured: bool) -> _Payload:
    """Decode an image file, scale it down if it is too large, and measure its pixels.

    If this fails, the result contains the error as a problem.

    :param path: image file
    :param image_size: largest length of the shorter side in pixels; None: no limit
    :param measured: whether to measure the pixels
    """
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            # Pillow would clip pixels of more than 8 bits instead of scaling them, so that almost
            # the entire image would become white.
            if image.mode[0] in "IF":
                raise ValueError(
                    f"its mode {image.mode} has more than 8 bits per channel; save it with 8 bits"
                )
            gray = image.mode in ("1", "L")
            if image_size is not None and min(image.size) > image_size:
                image, data = _smaller(image, image_size)
            size = (image.height, image.width)
            moments = _moments(image) if measured else 0.0
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return _Payload(b"", (0, 0), True, 0.0, [f"{path} ({error})"])
    return _Payload(data, size, gray, moments, [])


def _moments(image: Image.Image) -> np.ndarray:
    """Return the number of pixels, and the sum and sum of squares of their values divided by 255.

    :return: array of shape (3, 3), with a row for each channel
    """
    histogram = np.array(image.convert("RGB").histogram(), np.float64).reshape(3, 256)
    values = np.arange(256) / 255
    return histogram @ np.stack([np.ones(256), values, values**2], axis=1)


def _smaller(image: Image.Image, shorter: int) -> tuple[Image.Image, bytes]:
    """Scale an image down so that its shorter side has ``shorter`` pixels.

    :return: the image, and the image as JPEG bytes
    """
    ratio = shorter / min(image.size)
    size = (max(shorter, round(image.width * ratio)), max(shorter, round(image.height * ratio)))
    small = image.convert("L" if image.mode in ("1", "L") else "RGB")
    small = small.resize(size, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=95)
    return small, buffer.getvalue()


def _pack_text(where: Path, file: h5py.File, coder: texts.Coder, out: Path) -> None:
    """Write all files of a text: the first 90 % of each to train, and the rest to test."""
    files, names = texts.list_files(where, out)
    with _open_splits(file) as splits:
        for path in files:
            for split, part in zip(splits.values(), coder.encode_splits(path), strict=True):
                split.add(part)
        for name, split in splits.items():
            if not any(split.lengths):
                raise StoreError(
                    f"{where} contains too little text: the first 90 % of each file, rounded down, "
                    f"are for training, and {name} would be empty; pack a longer text"
                )
            _write_split(file.create_group(name), range(len(files)), split)
    _write_facts(file, "text", names, np.array([[1.0, 0.0, 1.0]]))
    if coder.tokenizer.text:
        file["tokenizer"] = np.frombuffer(coder.tokenizer.text, np.uint8)
        file["lengths"] = coder.tokenizer.lengths
        file.attrs.update(version=VERSION, tokenizer=fixed(coder.tokenizer.name))
