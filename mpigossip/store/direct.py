"""Write large arrays of an HDF5 file with O_DIRECT, computing the checksum in the same pass.

HDF5 lays the file out and leaves room; the bytes then go from memory to the disk past the page
cache (O_DIRECT), block by block, each into the CRC-32 while it is in the processor's cache. The
way through the page cache costs three more copies, and fresh pages for as many bytes.
"""

import errno
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

LARGE = 1 << 20
"""Bytes from which an array is worth it; smaller ones are HDF5's business."""
BLOCK = 1 << 22
PAGE = 4096
LAYOUT = {"alignment_threshold": LARGE, "alignment_interval": PAGE}
"""For the file: large arrays begin where O_DIRECT can write. Any HDF5 reader reads it."""


class Part(NamedTuple):
    """Bytes that belong to a place in the file."""

    offset: int
    data: memoryview


def pages(size: int) -> np.ndarray:
    """So many bytes that begin at a page, as O_DIRECT needs them; arrays elsewhere are copied."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, size, private), np.uint8)


def reserve(group: h5py.Group, name: str, array: np.ndarray) -> Part:
    """A contiguous dataset of the array's kind without its bytes, which `fill` is to write."""
    flat = np.ascontiguousarray(array)
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_layout(h5py.h5d.CONTIGUOUS)
    made.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    made.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    data = group.create_dataset(name, shape=flat.shape, dtype=flat.dtype, dcpl=made)
    return Part(data.id.get_offset(), flat.reshape(-1).view(np.uint8).data)


def fill(path: Path, parts: Sequence[Part]) -> str:
    """Write the parts into a file that is otherwise whole, fsync it; CRC-32 of all its bytes.

    As 8 hexadecimal digits. OSError where writing fails.
    """
    buffered = os.open(path, os.O_RDWR)
    direct = _open_direct(path)
    try:
        value = 0
        at = 0
        for part in sorted(parts, key=lambda one: one.offset):
            value = crc(buffered, at, part.offset, value)
            value = _write(buffered, direct, part, value)
            at = part.offset + len(part.data)
        value = crc(buffered, at, os.fstat(buffered).st_size, value)
        os.fsync(buffered)
        return f"{value:08x}"
    finally:
        os.close(buffered)
        if direct is not None:
            os.close(direct)


def _open_direct(path: Path) -> int | None:
    """None where the system or the file system has no such way."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None


def _write(buffered: int, direct: int | None, part: Part, value: int) -> int:
    """The part to its place; the checksum behind it. What is no whole page goes by the cache."""
    aligned = np.frombuffer(part.data, np.uint8).ctypes.data % PAGE == 0
    block = pages(BLOCK).data
    for start in range(0, len(part.data), BLOCK):
        piece = part.data[start : start + BLOCK]
        if not aligned:
            block[: len(piece)] = piece
            piece = block[: len(piece)]
        value = zlib.crc32(piece, value)
        whole = len(piece) - len(piece) % PAGE if part.offset % PAGE == 0 else 0
        done = 0 if direct is None else _direct(direct, piece[:whole], part.offset + start)
        while done < len(piece):
            done += os.pwrite(buffered, piece[done:], part.offset + start + done)
    return value


def _direct(direct: int, pages: memoryview, offset: int) -> int:
    """Return how many bytes were written; 0 where the file system has no O_DIRECT."""
    if not pages:
        return 0
    try:
        return os.pwrite(direct, pages, offset)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return 0


def crc(descriptor: int, start: int, end: int, value: int = 0) -> int:
    """The CRC-32 ``value`` continued over bytes that are in the file."""
    buffer = memoryview(bytearray(1 << 19))  # small enough to stay in the cache
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            raise OSError(errno.EIO, f"the file ends at {start} of {end} bytes")
        value = zlib.crc32(buffer[:count], value)
        start += count
    return value
