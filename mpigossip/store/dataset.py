"""Reader of data sets that are packed into one HDF5 file.

Layout (version 2, with a tokenizer 3)::

    /                attributes: format, version, kind ("images" | "arrays" | "text"), source,
                     licence, channels, scale (the stored value that means 1.0), mean, std,
                     checksum (of classes); tokenizer (of a text in tokens of two bytes)
    /classes         names, one per label (text: one per file)
    /train, /test    each with the attribute checksum (of its small arrays) and the datasets
        labels       (N,) int64
        bytes        (B,) uint8: all encoded images (or texts), one after the other
        offsets      (N + 1,) int64: sample i is bytes[offsets[i]:offsets[i + 1]]
        sizes        (N, 2) int64, height and width in pixels        (kind "images")
        checksums    (N,) uint32, CRC-32 of each sample's bytes
        images       (N, channels, height, width) uint8, in place of bytes (kind "arrays")
    /tokenizer       uint8, the text of a tokenizer: the bytes of a sample are then tokens of two
                     bytes each, little-endian
    /lengths         (V,) int64, the number of bytes of text that each token stands for; the
                     attribute tokenizer of the root consists of kind, V and a checksum of the text

All attributes that are texts have a fixed length. Everything that HDF5 does not check itself has a
checksum, with which readers compare it, so that damaged bytes are detected.

Samples of different lengths are stored in one contiguous byte array with offsets, and not as
elements of variable length. HDF5 stores such elements in heaps, so that reading a sample would take
several disk accesses and h5py's global lock. A contiguous array has one offset in the file, so that
any thread or process can read a sample by a single ``pread``.
"""

import io
import math
import os
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.store import StoreError, guard
from mpigossip.store.hdf5 import CONTENT_ERRORS
from mpigossip.store.packing import FORMAT, PLAIN, SPLITS, VERSION, checksum_of, pack
from mpigossip.store.texts import BYTES, MAX_ENTRIES, Tokenizer

__all__ = ["Dataset", "Split", "describe", "open_dataset", "pack"]

KINDS = ("images", "arrays", "text")
ARRAYS = ("labels", "offsets", "sizes", "checksums")
CHANNELS = 1 << 10
SIDE = 1 << 16
"""Largest height and width of an image in pixels."""
SCALE = 255
"""Largest stored value that may stand for 1.0, which is the largest value of a byte."""


class Contradiction(ValueError):
    """Error for a data set whose arrays and attributes contradict each other."""


def require(condition: Any, message: str) -> None:
    """Raise Contradiction with the text ``message`` unless ``condition`` is true."""
    if not condition:
        raise Contradiction(message)


@dataclass(frozen=True)
class Split:
    """Training or test samples of a data set."""

    labels: np.ndarray
    """Labels, (N,) int64."""
    offsets: np.ndarray | None
    """Offset of each sample in the payload (all encoded samples), followed by the length of the
    payload, (N + 1,) int64, in bytes; None for the kind "arrays".
    """
    sizes: np.ndarray | None
    """Height and width of each image in pixels, (N, 2) int64; None for text."""
    file: io.FileIO
    """Open file of the data set."""
    start: int
    """Offset of the payload, which contains all samples, in the file, in bytes."""
    array_shape: tuple[int, ...]
    """Shape of the payload: (N, C, H, W) for the kind "arrays", otherwise (B,), its bytes."""
    checksums: np.ndarray
    """CRC-32 of the bytes of each sample, (N,) uint32."""

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, index: int) -> bytes:
        """Return the encoded bytes of a sample, for the kinds "images" and "text".

        :param index: index of the sample
        :raises StoreError: if the sample is damaged, or the file has become shorter
        """
        begin = int(self.offsets[index])
        end = int(self.offsets[index + 1])
        data = self._read(begin, end - begin)
        self._check(index, data)
        return data

    def _check(self, index: int, data: Any) -> None:
        if zlib.crc32(data) != self.checksums[index]:
            raise StoreError(
                f"{self.file.name}: sample {index} is damaged: its checksum differs; copy or pack "
                "the data set again"
            )

    def array(self) -> np.ndarray:
        """Return all samples as one array of uint8.

        :return: array of shape (N, C, H, W) for the kind "arrays", otherwise (B,), the bytes of all
            samples
        :raises StoreError: if a sample is damaged, or the file has become shorter
        """
        flat = np.frombuffer(self._read(0, math.prod(self.array_shape)), np.uint8)
        ends = np.arange(len(self) + 1) * (len(flat) // len(self))
        ends = ends if self.offsets is None else self.offsets
        for index in range(len(self)):
            self._check(index, flat[ends[index] : ends[index + 1]])
        return flat.reshape(self.array_shape)

    def _read(self, offset: int, size: int) -> bytes:
        pieces = []
        got = 0
        while got < size:  # Linux reads at most 2 GiB per call
            position = self.start + offset + got
            piece = os.pread(self.file.fileno(), min(size - got, 1 << 30), position)
            if not piece:
                raise StoreError(
                    f"{self.file.name} became shorter while it was read: it has no byte at "
                    f"offset {position}; pack it again"
                )
            pieces.append(piece)
            got += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True)
class Dataset(AbstractContextManager):
    """Open data set, which is a context manager. Each process has to open the data set itself."""

    path: Path
    kind: str
    """Kind of the data set: "images", "arrays" or "text"."""
    classes: tuple[str, ...]
    """Name for each label; for text, the name of each file."""
    channels: int
    """Number of channels of an image; 1 for text."""
    scale: float
    """Stored value that stands for 1.0, which is 255 for images."""
    mean: np.ndarray
    """Mean of each channel, (channels,) float64, of values divided by `scale`."""
    std: np.ndarray
    """Standard deviation of each channel, (channels,) float64, of values divided by `scale`."""
    attributes: dict[str, str]
    """All attributes of the file that are strings, such as source and licence."""
    train: Split
    test: Split
    tokenizer: Tokenizer = BYTES
    """Tokenizer of a text; not used for images."""

    def tokens(self, name: str) -> np.ndarray:
        """Return the tokens of a split of a text, with all documents joined.

        :param name: "train" or "test"
        :return: array of shape (T,), uint8 for bytes, otherwise uint16
        :raises StoreError: if a sample is damaged, or a token is not in the tokenizer's vocabulary
        """
        tokens = self.split(name).array().view("<u2" if self.tokenizer.text else np.uint8)
        if tokens.size and int(tokens.max()) >= len(self.tokenizer.lengths):
            raise StoreError(
                f"{self.path}: {name} has the token {tokens.max()}, but the last of the tokenizer "
                f"{self.tokenizer.name} is {len(self.tokenizer.lengths) - 1}; pack it again"
            )
        return tokens

    def split(self, name: str) -> Split:
        """Return the samples of the split ``name``, which is "train" or "test"."""
        return {"train": self.train, "test": self.test}[name]

    def close(self) -> None:
        """Close the file. Arrays that were read before stay valid; a second call does nothing."""
        self.train.file.close()

    def __exit__(self, *_) -> None:
        self.close()


def open_dataset(path: Path | str) -> Dataset:
    """Open a data set and check everything except the samples themselves.

    :param path: file written by :func:`pack`
    :raises StoreError: if the file is missing, can't be read, is not HDF5, is not a data set, is
        cut short, contradicts itself (by labels out of range or descending offsets, for example),
        or contains something that `guard` rejects
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise StoreError(
            f"the data set {path} {what}; make one with: mpigossip data pack FOLDER {path}"
        )
    try:
        raw = guard.regular(path)
    except OSError as error:
        raise StoreError(
            f"the data set {path} can't be read: {error.strerror}; ask its owner for it"
        ) from error
    try:
        return _read(raw, path)
    except BaseException as error:
        raw.close()
        if not isinstance(error, (*CONTENT_ERRORS, OSError)):
            raise
        invalid = isinstance(error, Contradiction)
        problem = "can't be used" if invalid else "is incomplete or damaged"
        if isinstance(error, OSError):
            truncated = "truncated" in str(error)
            problem = "is truncated" if truncated else "can't be opened as an HDF5 file"
        raise StoreError(
            f"the data set {path} {problem}: {error}; copy or pack it again, with: mpigossip data "
            "pack FOLDER OUT.h5"
        ) from error


def _read(raw: io.FileIO, path: Path) -> Dataset:
    """Return the data set in an open file, after checking everything except the samples."""
    size = os.fstat(raw.fileno()).st_size
    with guard.hdf5(raw) as file:
        is_dataset = "format" in file.attrs and guard.attribute(file, "format") == FORMAT
        require(is_dataset, f'it has no attribute format = "{FORMAT}", so it is not a data set')
        version = guard.attribute(file, "version")
        readable = isinstance(version, int) and PLAIN <= version <= VERSION
        require(readable, f"its version is {version}, but this program reads {PLAIN} to {VERSION}")
        objects = guard.check_objects(file, size)
        return _content(raw, path, guard.attributes(file), objects)


def _content(raw: io.FileIO, path: Path, facts: dict[str, Any], objects: dict[str, Any]) -> Dataset:
    """Build a data set from a file's attributes and arrays.

    :param raw: open file, from which samples are read later
    :param path: path of the file
    :param facts: attributes of the root group, by name
    :param objects: arrays and groups of the file, by path
    :raises Contradiction: if attributes and arrays do not match
    """
    kind = facts["kind"]
    channels = facts["channels"]
    require(kind in KINDS, f"its kind is {kind!r}, not one of {', '.join(KINDS)}")
    stored = guard.array(objects, "classes", "S", 1)
    intact = zlib.crc32(stored.tobytes()) == facts["checksum"]
    require(intact, "the names of its classes are damaged")
    names = [name.decode(errors="replace") for name in stored.tolist()]
    classes = tuple(guard.printable(name, "classes") for name in names)
    valid = isinstance(channels, int) and 1 <= channels <= CHANNELS
    require(valid, f"channels = {channels}: must be a whole number from 1 to {CHANNELS}")
    mean = np.array(facts["mean"], float)
    std = np.array(facts["std"], float)
    numbers = np.concatenate([mean.ravel(), std.ravel(), [facts["scale"]]])
    consistent = mean.shape == std.shape == (channels,) and np.isfinite(numbers).all()
    consistent = consistent and (std > 0).all() and 0 < facts["scale"] <= SCALE
    limits = f"have {channels} numbers, std above 0, and scale from 0 to {SCALE}"
    require(consistent, f"mean {mean} and std {std} must {limits}")
    splits = {}
    for name in SPLITS:
        group = {key: objects[f"{name}/{key}"] for key in ARRAYS if f"{name}/{key}" in objects}
        intact = checksum_of(group) == guard.attribute(objects[name], "checksum")
        require(intact, f"the labels or offsets of {name} are damaged: their checksum differs")
        splits[name] = _split(name, objects, facts, len(classes), raw)
    tokenizer = _tokenizer(objects, facts) if "tokenizer" in objects else BYTES
    uneven = [n for n in SPLITS if kind == "text" and (splits[n].offsets % tokenizer.width).any()]
    require(not uneven, f"documents of {', '.join(uneven)} end in the middle of a token")
    texts = {key: value for key, value in facts.items() if isinstance(value, str)}
    scale = float(facts["scale"])
    return Dataset(
        path, kind, classes, channels, scale, mean, std, texts, **splits, tokenizer=tokenizer
    )


def _tokenizer(objects: dict[str, Any], facts: dict[str, Any]) -> Tokenizer:
    """Read the tokenizer of a text.

    :raises Contradiction: if a length is not valid, or if an attribute states another name of the
        tokenizer
    """
    stored = guard.array(objects, "tokenizer", "u", 1)
    lengths = guard.array(objects, "lengths", "<i8", 1)
    valid = len(lengths) <= MAX_ENTRIES and len(lengths) > 0 and int(lengths.min()) > 0
    require(
        valid,
        f"its tokenizer has {len(lengths)} tokens; it must have 1 to {MAX_ENTRIES}, each of at "
        "least one byte",
    )
    tokenizer = Tokenizer(lengths, stored.tobytes())
    name = facts.get("tokenizer")
    require(
        tokenizer.name == name,
        f"its tokenizer is {tokenizer.name}, but its attribute tokenizer is {name}",
    )
    return tokenizer


def _split(
    name: str, objects: dict[str, Any], facts: dict[str, Any], classes: int, raw: io.FileIO
) -> Split:
    """Build a split from the arrays and attributes of its group.

    :param name: "train" or "test"
    :param objects: arrays and groups of the file, by path
    :param facts: attributes of the root group, by name
    :param classes: number of classes
    :param raw: open file, from which samples are read later
    :raises Contradiction: if they contradict each other
    """

    def read(part: str, ndim: int) -> np.ndarray:
        return guard.array(objects, f"{name}/{part}", "iu", ndim).astype(np.int64)

    kind = facts["kind"]
    labels = read("labels", 1)
    payload = guard.dataset(objects, f"{name}/{'images' if kind == 'arrays' else 'bytes'}")
    start = payload.id.get_offset()
    shape = payload.shape
    require(payload.dtype == np.uint8, f"{payload.name} contains {payload.dtype}, not uint8")
    require(start is not None, f"{payload.name} is not stored contiguously")
    offsets = sizes = None
    if kind == "arrays":
        fits = len(shape) == 4 and shape[:2] == (len(labels), facts["channels"]) and min(shape) > 0
        require(fits, f"{payload.name} of shape {shape} does not match {len(labels)} labels")
        sizes = np.tile(np.array(shape[2:], np.int64), (len(labels), 1))
    else:
        offsets = read("offsets", 1)
        fits = len(shape) == 1 and len(offsets) == len(labels) + 1
        require(
            fits,
            f"{name} has {len(offsets)} offsets for {len(labels)} labels; it must have "
            f"{len(labels) + 1}",
        )
        fits = offsets[0] == 0 and offsets[-1] == payload.size and (np.diff(offsets) >= 0).all()
        require(fits, f"the offsets of {name} don't ascend from 0 to {payload.size}")
    if kind == "images":
        sizes = read("sizes", 2)
        fits = sizes.shape == (len(labels), 2) and (sizes > 0).all() and (sizes <= SIDE).all()
        require(fits, f"some image of {name} has no height and width from 1 to {SIDE} pixels")
    checksums = guard.array(objects, f"{name}/checksums", "<u4", 1)
    require(
        len(checksums) == len(labels),
        f"{name} has {len(checksums)} checksums for {len(labels)} samples",
    )
    require(len(labels) > 0, f"{name} has no samples")
    invalid = np.flatnonzero((labels < 0) | (labels >= classes))
    first = f"; the first is {labels[invalid[0]]}, of sample {invalid[0]}" if len(invalid) else ""
    require(not first, f"{len(invalid)} labels of {name} are not in 0 … {classes - 1}{first}")
    return Split(labels, offsets, sizes, raw, start, shape, checksums)


def describe(path: Path | str) -> str:
    """Return a few lines that describe the content of a data set.

    :raises StoreError: as :func:`open_dataset`; for a text with a tokenizer, also if a sample is
        damaged
    """
    with open_dataset(path) as data:
        lines = [
            f"{data.path}: {data.kind}, {len(data.classes)} "
            + ("files" if data.kind == "text" else "classes")
        ]
        lines += [
            f"  {key:<9} {value}"
            for key, value in data.attributes.items()
            if key not in ("format", "kind")
        ]
        for name in SPLITS:
            split = data.split(name)
            stored = math.prod(split.array_shape)
            line = f"  {name:<9} {len(split)} samples, {stored / 1e6:.1f} MB"
            if data.tokenizer.text:
                tokens = data.tokens(name)
                mean = data.tokenizer.lengths[tokens].mean() if tokens.size else 0.0
                line += f", {tokens.size} tokens of {mean:.2f} bytes"
            if split.sizes is not None:
                low = split.sizes.min(0)
                high = split.sizes.max(0)
                line += f", {low[0]}x{low[1]}"
                line += "" if (low == high).all() else f" to {high[0]}x{high[1]}"
                counts = np.bincount(split.labels, minlength=len(data.classes))
                line += f" pixels, {counts.min()} to {counts.max()} per class"
            lines.append(line)
        if data.kind != "text":
            lines.append(f"  mean      {np.round(data.mean, 4)}, std {np.round(data.std, 4)}")
        names = ", ".join(data.classes[:10]) + (", …" if len(data.classes) > 10 else "")
        lines.append(f"  {'files' if data.kind == 'text' else 'classes':<9} {names}")
    return "\n".join(lines)
