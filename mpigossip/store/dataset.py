"""Data sets in one HDF5 file: open, check, show.

Layout (version 2, with a tokenizer 3)::

    /                attributes: format, version, kind ("images" | "arrays" | "text"), source,
                     licence, channels, scale (the stored value that means 1.0), mean, std,
                     checksum (of classes)
    /classes         names, one per label (text: one per file)
    /train, /test    each with the attribute checksum (of its small arrays) and
        labels       (N,) int64
        bytes        (B,) uint8: all encoded images (or texts), one after the other
        offsets      (N + 1,) int64: sample i is bytes[offsets[i]:offsets[i + 1]]
        sizes        (N, 2) int64, height and width in pixels        (kind "images")
        checksums    (N,) uint32, CRC-32 of each sample's bytes
        images       (N, channels, height, width) uint8, in place of bytes (kind "arrays")
    /tokenizer       uint8, the text of a tokenizer: bytes are then tokens, two little-endian each
    /lengths         (V,) int64, the bytes of text that a token stands for; the attribute tokenizer
                     is kind, V and a checksum of the text

Texts have a fixed length. What HDF5 doesn't check itself is compared with a checksum: nothing
damaged is taken for data.

One contiguous byte array with offsets takes the place of HDF5's variable-length elements: those
live in heaps that cost several disk accesses each and h5py's global lock for every sample, while
a contiguous array has one address in the file, so that a sample is one ``pread`` from any thread
or process.
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
from mpigossip.store.hdf5 import WRONG
from mpigossip.store.packing import FORMAT, PLAIN, SPLITS, VERSION, checksum_of, pack
from mpigossip.store.texts import BYTES, MOST, Tokenizer

__all__ = ["Dataset", "Split", "open_dataset", "pack", "show"]

KINDS = ("images", "arrays", "text")
ARRAYS = ("labels", "offsets", "sizes", "checksums")
CHANNELS = 1 << 10
SIDE = 1 << 16  # pixels of an image
SCALE = 255  # of what is stored in bytes


class Contradiction(ValueError):
    """A part of a data set that doesn't go with another."""


def require(true: Any, message: str) -> None:
    """Contradiction with this message unless ``true``."""
    if not true:
        raise Contradiction(message)


@dataclass(frozen=True)
class Split:
    """The train or the test half of a data set."""

    labels: np.ndarray
    """(N,) int64."""
    offsets: np.ndarray | None
    """(N + 1,) int64, first byte of each sample; None for kind "arrays"."""
    sizes: np.ndarray | None
    """(N, 2) int64, height and width in pixels; None for text."""
    file: io.FileIO
    start: int
    """Offset of the payload in the file, in bytes."""
    array_shape: tuple[int, ...]
    """(N, C, H, W) for kind "arrays", (B,) otherwise."""
    checksums: np.ndarray
    """(N,) uint32 of each sample's bytes."""

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, index: int) -> bytes:
        """Return the encoded bytes of one sample (kinds "images" and "text")."""
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
        """Return the whole payload: (N, C, H, W) uint8, or (B,) uint8 for encoded data."""
        flat = np.frombuffer(self._read(0, math.prod(self.array_shape)), np.uint8)
        ends = np.arange(len(self) + 1) * (len(flat) // len(self))
        ends = ends if self.offsets is None else self.offsets
        for index in range(len(self)):
            self._check(index, flat[ends[index] : ends[index + 1]])
        return flat.reshape(self.array_shape)

    def _read(self, offset: int, size: int) -> bytes:
        pieces = []
        got = 0
        while got < size:  # Linux gives at most 2 GiB per call
            place = self.start + offset + got
            piece = os.pread(self.file.fileno(), min(size - got, 1 << 30), place)
            if not piece:
                raise StoreError(
                    f"{self.file.name} became shorter while it was read: no bytes at "
                    f"{place}; pack it again"
                )
            pieces.append(piece)
            got += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True)
class Dataset(AbstractContextManager):
    """An open data set; a context manager. Each process opens its own."""

    path: Path
    kind: str
    classes: tuple[str, ...]
    channels: int
    scale: float
    """The stored value that means 1.0: 255 for images."""
    mean: np.ndarray
    """(channels,) float64, of values divided by scale."""
    std: np.ndarray
    attributes: dict[str, str]
    """source, licence and whatever else the file says of itself in words."""
    train: Split
    test: Split
    tokenizer: Tokenizer = BYTES
    """of a text: what its bytes are"""

    def tokens(self, name: str) -> np.ndarray:
        """The tokens of a half of a text, all documents joined: (T,) uint8 or uint16.

        StoreError for one that the tokenizer doesn't have.
        """
        found = self.split(name).array().view("<u2" if self.tokenizer.text else np.uint8)
        if found.size and int(found.max()) >= len(self.tokenizer.lengths):
            raise StoreError(
                f"{self.path}: {name} has the token {found.max()}, and the tokenizer "
                f"{self.tokenizer.name} none above {len(self.tokenizer.lengths) - 1}; pack it again"
            )
        return found

    def split(self, name: str) -> Split:
        """Return the split called "train" or "test"."""
        return {"train": self.train, "test": self.test}[name]

    def close(self) -> None:
        """Close the file; what was read stays valid. A second call does nothing."""
        self.train.file.close()

    def __exit__(self, *_) -> None:
        self.close()


def open_dataset(path: Path | str) -> Dataset:
    """Open and check a data set.

    Raises StoreError, in one paragraph, for a file that is missing, isn't HDF5, isn't a data
    set, is cut short, contradicts itself (labels out of range, offsets that go backwards), or
    holds what `guard` rejects.
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
        if not isinstance(error, (*WRONG, OSError)):
            raise
        found = isinstance(error, Contradiction)
        words = "can't be used" if found else "lacks a piece or has a damaged one"
        if isinstance(error, OSError):
            cut = "truncated" in str(error)
            words = "is cut short" if cut else "can't be opened as an HDF5 file"
        raise StoreError(
            f"the data set {path} {words}: {error}; copy or pack it again, with: mpigossip data "
            "pack FOLDER OUT.h5"
        ) from error


def _read(raw: io.FileIO, path: Path) -> Dataset:
    """Read and check everything but the payload."""
    size = os.fstat(raw.fileno()).st_size
    with guard.hdf5(raw) as file:
        named = "format" in file.attrs and guard.attribute(file, "format") == FORMAT
        require(named, f'it has no attribute format = "{FORMAT}", so no pack made it')
        version = guard.attribute(file, "version")
        known = isinstance(version, int) and PLAIN <= version <= VERSION
        require(known, f"its version is {version}, this program reads {PLAIN} to {VERSION}")
        found = guard.look(file, size)
        return _content(raw, path, guard.attributes(file), found)


def _content(raw: io.FileIO, path: Path, facts: dict[str, Any], found: dict[str, Any]) -> Dataset:
    """The data set of these attributes and arrays, if they go together."""
    kind = facts["kind"]
    channels = facts["channels"]
    require(kind in KINDS, f"its kind is {kind!r}, not one of {', '.join(KINDS)}")
    stored = guard.array(found, "classes", "S", 1)
    right = zlib.crc32(stored.tobytes()) == facts["checksum"]
    require(right, "the names of its classes are damaged")
    names = [name.decode(errors="replace") for name in stored.tolist()]
    classes = tuple(guard.printable(name, "classes") for name in names)
    count = isinstance(channels, int) and 1 <= channels <= CHANNELS
    require(count, f"channels = {channels}, not a number from 1 to {CHANNELS}")
    mean = np.array(facts["mean"], float)
    std = np.array(facts["std"], float)
    numbers = np.concatenate([mean.ravel(), std.ravel(), [facts["scale"]]])
    whole = mean.shape == std.shape == (channels,) and np.isfinite(numbers).all()
    whole = whole and (std > 0).all() and 0 < facts["scale"] <= SCALE
    limits = f"{channels} numbers, std above 0, and scale from 0 to {SCALE}"
    require(whole, f"mean {mean} and std {std} should be {limits}")
    splits = {}
    for name in SPLITS:
        group = {key: found[f"{name}/{key}"] for key in ARRAYS if f"{name}/{key}" in found}
        right = checksum_of(group) == guard.attribute(found[name], "checksum")
        require(right, f"the labels or offsets of {name} are damaged: their checksum differs")
        splits[name] = _split(name, found, facts, len(classes), raw)
    tokenizer = _tokenizer(found, facts) if "tokenizer" in found else BYTES
    odd = [n for n in SPLITS if kind == "text" and (splits[n].offsets % tokenizer.width).any()]
    require(not odd, f"documents of {', '.join(odd)} end in the middle of a token")
    words = {key: value for key, value in facts.items() if isinstance(value, str)}
    scale = float(facts["scale"])
    return Dataset(
        path, kind, classes, channels, scale, mean, std, words, **splits, tokenizer=tokenizer
    )


def _tokenizer(found: dict[str, Any], facts: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a text, if it is the one that the file names."""
    stored = guard.array(found, "tokenizer", "u", 1)
    lengths = guard.array(found, "lengths", "<i8", 1)
    few = len(lengths) <= MOST and len(lengths) > 0 and int(lengths.min()) > 0
    require(few, f"its tokenizer has {len(lengths)} tokens, not 1 to {MOST} of at least one byte")
    made = Tokenizer(lengths, stored.tobytes())
    named = facts.get("tokenizer")
    require(made.name == named, f"its tokenizer is {made.name}, and not {named}, as it says")
    return made


def _split(
    name: str, found: dict[str, Any], facts: dict[str, Any], classes: int, raw: io.FileIO
) -> Split:
    """One split, if its arrays go together and with what the file says of itself."""

    def read(part: str, ndim: int) -> np.ndarray:
        return guard.array(found, f"{name}/{part}", "iu", ndim).astype(np.int64)

    kind = facts["kind"]
    labels = read("labels", 1)
    payload = guard.dataset(found, f"{name}/{'images' if kind == 'arrays' else 'bytes'}")
    start = payload.id.get_offset()
    shape = payload.shape
    require(payload.dtype == np.uint8, f"{payload.name} holds {payload.dtype}, not uint8")
    require(start is not None, f"{payload.name} is not stored contiguously")
    offsets = sizes = None
    if kind == "arrays":
        fits = len(shape) == 4 and shape[:2] == (len(labels), facts["channels"]) and min(shape) > 0
        require(fits, f"{payload.name} of shape {shape} doesn't go with {len(labels)} labels")
        sizes = np.tile(np.array(shape[2:], np.int64), (len(labels), 1))
    else:
        offsets = read("offsets", 1)
        fits = len(shape) == 1 and len(offsets) == len(labels) + 1
        require(fits, f"{name} has {len(offsets)} offsets for {len(labels)} labels, not one more")
        right = offsets[0] == 0 and offsets[-1] == payload.size and (np.diff(offsets) >= 0).all()
        require(right, f"the offsets of {name} don't climb from 0 to {payload.size}")
    if kind == "images":
        sizes = read("sizes", 2)
        fits = sizes.shape == (len(labels), 2) and (sizes > 0).all() and (sizes <= SIDE).all()
        require(fits, f"{name} lacks heights and widths from 1 to {SIDE} for some image")
    checksums = guard.array(found, f"{name}/checksums", "<u4", 1)
    require(len(checksums) == len(labels), f"{name} has {len(checksums)} checksums")
    require(len(labels) > 0, f"{name} has no samples")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    first = f"; the first is {labels[wrong[0]]}, of sample {wrong[0]}" if len(wrong) else ""
    require(not first, f"{len(wrong)} labels of {name} are not in 0 … {classes - 1}{first}")
    return Split(labels, offsets, sizes, raw, start, shape, checksums)


def show(path: Path | str) -> str:
    """Return what a data set holds, in a few lines for a person."""
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
                each = data.tokenizer.lengths[tokens].mean() if tokens.size else 0.0
                line += f", {tokens.size} tokens of {each:.2f} bytes"
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
