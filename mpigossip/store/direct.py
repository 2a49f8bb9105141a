"""Writer for large arrays of an HDF5 file, which uses O_DIRECT and computes a checksum.

HDF5 determines the layout of the file and reserves space for the arrays. Their bytes are then
written from memory to the disk in blocks, without the page cache (O_DIRECT), and each block is
added to the CRC-32 while it is in the processor's cache. Writing through the page cache would need
three more copies, and new pages for all bytes.
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
"""Size, in bytes, from which an array is written with O_DIRECT; HDF5 writes smaller arrays."""
BLOCK = 1 << 22
"""Number of bytes that are written at a time."""
PAGE = 4096
"""Number to which O_DIRECT requires addresses, offsets and sizes to be multiples, in bytes."""
LAYOUT = {"alignment_threshold": LARGE, "alignment_interval": PAGE}
"""Settings of the HDF5 file, so that large arrays begin at page boundaries, as O_DIRECT requires.
Any HDF5 library can read the file.
"""


class PendingWrite(NamedTuple):
    """Bytes that will be written, and their offset in the file."""

    offset: int
    data: memoryview


def pages(size: int) -> np.ndarray:
    """Return a uint8 array of ``size`` bytes that begins at a page boundary.

    O_DIRECT can write such memory; arrays at other addresses have to be copied first.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, size, private), np.uint8)


def reserve(group: h5py.Group, name: str, array: np.ndarray) -> PendingWrite:
    """Create a contiguous dataset for an array without writing its bytes.

    :param group: group of the new dataset
    :param name: name of the new dataset
    :param array: array with the shape, type and bytes of the dataset
    :return: bytes and offset, to be passed to :func:`fill` when the file is closed
    """
    flat = np.ascontiguousarray(array)
    data = allocate(group, name, flat.shape, flat.dtype)
    return PendingWrite(data.id.get_offset(), flat.reshape(-1).view(np.uint8).data)


def allocate(group: h5py.Group, name: str, shape: tuple[int, ...], dtype: np.dtype) -> h5py.Dataset:
    """Create a contiguous dataset whose space in the file is reserved, but not written.

    :param group: group of the new dataset
    :param name: name of the new dataset
    :param shape: shape of the dataset
    :param dtype: type of its elements
    """
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return group.create_dataset(name, shape=shape, dtype=dtype, dcpl=creation)


def fill(path: Path, parts: Sequence[PendingWrite]) -> str:
    """Write the bytes of all reserved datasets to a file that is otherwise complete, and fsync it.

    :param path: file to write to
    :param parts: results of :func:`reserve`
    :return: CRC-32 of all bytes of the file, as 8 hexadecimal digits
    :raises OSError: if writing fails
    """
    buffered = os.open(path, os.O_RDWR)
    direct = _open_direct(path)
    try:
        value = 0
        position = 0
        for part in sorted(parts, key=lambda part: part.offset):
            value = crc(buffered, position, part.offset, value)
            value = _write(buffered, direct, part, value)
            position = part.offset + len(part.data)
        value = crc(buffered, position, os.fstat(buffered).st_size, value)
        os.fsync(buffered)
        return f"{value:08x}"
    finally:
        os.close(buffered)
        if direct is not None:
            os.close(direct)


def _open_direct(path: Path) -> int | None:
    """Open a file with O_DIRECT; return None if the system or file system does not support it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None


def _write(buffered: int, direct: int | None, part: PendingWrite, value: int) -> int:
    """Write one part; return the CRC-32 of the bytes before it and of the part.

    O_DIRECT writes whole pages only, so the remaining bytes are written through the page cache.

    :param buffered: descriptor of the file for the page cache
    :param direct: descriptor of the file with O_DIRECT; None: all bytes go through the page cache
    :param part: bytes and offset
    :param value: CRC-32 of the bytes before the part
    """
    aligned = np.frombuffer(part.data, np.uint8).ctypes.data % PAGE == 0
    block = pages(BLOCK).data
    for start in range(0, len(part.data), BLOCK):
        piece = part.data[start : start + BLOCK]
        if not aligned:
            block[: len(piece)] = piece
            piece = block[: len(piece)]
        value = zlib.crc32(piece, value)
        aligned_size = len(piece) - len(piece) % PAGE if part.offset % PAGE == 0 else 0
        done = 0 if direct is None else _direct(direct, piece[:aligned_size], part.offset + start)
        while done < len(piece):
            done += os.pwrite(buffered, piece[done:], part.offset + start + done)
    return value


def _direct(direct: int, pages: memoryview, offset: int) -> int:
    """Write whole pages with O_DIRECT; return the number of bytes written.

    :param direct: descriptor of the file with O_DIRECT
    :param pages: bytes to write, a multiple of `PAGE`
    :param offset: offset of the first byte in the file
    :return: number of bytes, which may be smaller; 0 if the file system does not support O_DIRECT
    """
    if not pages:
        return 0
    try:
        return os.pwrite(direct, pages, offset)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return 0


def crc(descriptor: int, start: int, end: int, value: int = 0) -> int:
    """Continue the CRC-32 ``value`` over the bytes of a file from ``start`` up to ``end``.

    :raises OSError: if the file ends before ``end``
    """
    buffer = memoryview(bytearray(1 << 19))  # A buffer of this size stays in the processor's cache.
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {start}, but must have {end} bytes")
        value = zlib.crc32(buffer[:count], value)
        start += count
    return value
