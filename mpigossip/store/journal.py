"""Updates of HDF5 files that are safe against crashes, by a write-ahead journal.

HDF5 has no journal: if a process is killed between two writes of the HDF5 library, readers reject
the file. In this module, the library writes to an `Overlay`, which keeps changed pages in memory.
`transaction` then writes these pages to `FILE.pending`, after that to the file itself, and removes
`FILE.pending`. If the process is killed before `FILE.pending` is complete, the file is unchanged;
if it is killed later, `recover` writes the pages again. The number of bytes written is a small
multiple of the number of bytes changed, however long the file is.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py

from mpigossip.store import guard
from mpigossip.store.hdf5 import LIBVER, new, sync, writing

PAGE = 4096
SMALL = 1 << 26
"""Largest size, in bytes, of a file that is copied to memory for reading."""
TRIES = 20
"""Largest number of attempts to read a file while another process writes to it."""
SLACK = 1 << 25
"""Largest number of bytes by which a valid journal extends its file beyond the pages in it."""
MAGIC = b"mpigossip pages\n"


class Overlay(io.RawIOBase):
    """File object for h5py's driver "fileobj", which keeps changed pages in memory."""

    def __init__(self, path: Path, change: tuple[int, Mapping[int, bytes]] | None = None) -> None:
        """Open a file for reading.

        :param path: existing file, which this object never changes
        :param change: size of the file in bytes, and changed pages by page number, as from a
            journal; None: the file is unchanged
        :raises OSError: if the file cannot be opened
        :raises StoreError: if it is not a regular file
        """
        self.file = guard.regular(path)
        self.stored = os.fstat(self.file.fileno()).st_size
        """Number of bytes at the beginning of the file on disk that are still valid."""
        self.size, pages = change or (self.stored, {})
        self.stored = min(self.stored, self.size)
        self.pages = {number: bytearray(page) for number, page in pages.items()}
        """Changed pages, by page number."""
        self.position = 0

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def _page(self, number: int) -> bytes | bytearray:
        page = self.pages.get(number)
        if page is not None:
            return page
        start = number * PAGE
        length = max(0, min(PAGE, self.stored - start))
        return os.pread(self.file.fileno(), length, start).ljust(PAGE, b"\0")

    def _spans(self, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Split the next ``length`` bytes into spans at page boundaries, and advance the position.

        :return: for each span, the page number, the first byte and the end within the page, and the
            offset in the data
        """
        done = 0
        while done < length:
            number, start = divmod(self.position, PAGE)
            count = min(PAGE - start, length - done)
            yield number, start, start + count, done
            self.position += count
            done += count

    def readinto(self, data: Any) -> int:
        """Read bytes into ``data``, up to the end of the file; return the number of bytes."""
        length = max(0, min(len(data), self.size - self.position))
        for number, start, stop, offset in self._spans(length):
            data[offset : offset + stop - start] = self._page(number)[start:stop]
        return length

    def write(self, data: Any) -> int:
        """Write ``data`` to pages in memory; return the number of bytes."""
        for number, start, stop, offset in self._spans(len(data)):
            if number not in self.pages:
                self.pages[number] = bytearray(self._page(number))
            self.pages[number][start:stop] = data[offset : offset + stop - start]
        self.size = max(self.size, self.position)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file; bytes that are cut off are zero if the file grows again.

        :param size: size in bytes; None: the position in the file
        :return: the size in bytes
        """
        size = self.position if size is None else size
        if size < self.size:
            last, start = divmod(size, PAGE)
            self.pages = {number: page for number, page in self.pages.items() if number <= last}
            if last in self.pages:
                self.pages[last][start:] = bytes(PAGE - start)
            self.stored = min(self.stored, size)
        self.size = size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, with the same arguments as for any file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position


def pending(path: Path) -> Path:
    """Return the path of the journal, which contains changes until they are written to ``path``."""
    return path.with_name(path.name + ".pending")


@contextmanager
def transaction(path: Path) -> Iterator[h5py.File]:
    """Return a context manager in which an HDF5 file is open for changes.

    At the beginning, the transaction of a process that was killed is completed. At the end of the
    block, all changes are applied together. If the block raises an exception, none is applied.

    :param path: existing HDF5 file
    :raises StoreError: if writing fails
    """
    with writing(path):
        recover(path)
        overlay = Overlay(path)
        with overlay, h5py.File(path, "r+", "fileobj", LIBVER, fileobj=overlay) as file:
            yield file
        _write_journal(pending(path), overlay.size, overlay.pages)
        _apply(path, overlay.size, overlay.pages)


class Stamp(NamedTuple):
    """Properties of a file that change if the file or its journal is written."""

    modified: int
    """Time of the last change of the file, in nanoseconds since 1970."""
    size: int
    """Size of the file in bytes."""
    pending: bool
    """True if the file has a journal."""


def stamp(path: Path) -> Stamp:
    """Return the current stamp of a file."""
    status = path.stat()
    return Stamp(status.st_mtime_ns, status.st_size, pending(path).exists())


@contextmanager
def consistent(path: Path, **allowed: Any) -> Iterator[tuple[h5py.File, dict[str, Any]]]:
    """Return a context manager for reading a file, including changes in its journal.

    The journal contains changes if the process that wrote them was killed. A file of at most
    `SMALL` bytes is copied to memory; if a run still writes to it, up to `TRIES` attempts are made
    to copy it between two writes. A larger file may change while it is read. The caller can detect
    this, because the :func:`stamp` of the file then changes.

    :param path: HDF5 file
    :param allowed: further arguments of `guard.opened`
    :raises OSError: if the file cannot be read
    :raises ValueError: if `guard` rejects the file
    """
    file: Any
    for _ in range(TRIES):
        before = stamp(path)
        change = _read_journal(path)
        file = guard.regular(path) if change is None else Overlay(path, change)
        if before.size > SMALL:
            break
        with file:
            file = io.BytesIO(file.readall())
        if stamp(path) == before:
            break
        time.sleep(0.005)
    with file, guard.opened(file, **allowed) as opened:
        yield opened


def recover(path: Path) -> bool:
    """Complete the transaction of a killed process; return whether there was such a transaction.

    A journal that is incomplete is removed without being applied, and so is one whose file is gone.
    """
    change = _read_journal(path)
    if change is not None and path.exists():
        _apply(path, *change)
    pending(path).unlink(missing_ok=True)
    return change is not None


def _write_journal(journal: Path, size: int, pages: Mapping[int, bytes | bytearray]) -> None:
    numbers = sorted(pages)
    body = struct.pack(f"<QQ{len(numbers)}Q", size, len(numbers), *numbers)
    body += b"".join(pages[number] for number in numbers)
    with os.fdopen(new(journal), "wb") as file:
        file.write(MAGIC + hashlib.sha256(body).digest() + body)
    sync(journal)
    sync(journal.parent)


def _read_journal(path: Path) -> tuple[int, dict[int, bytes]] | None:
    """Return size and pages of the file from its journal; None if there is no valid journal."""
    try:
        with guard.regular(pending(path), follow=False) as file:
            data = file.readall()
    except FileNotFoundError:
        return None
    head = len(MAGIC) + hashlib.sha256().digest_size
    if (
        not data.startswith(MAGIC)
        or data[len(MAGIC) : head] != hashlib.sha256(data[head:]).digest()
    ):
        return None
    size, count = struct.unpack_from("<QQ", data, head)
    first = head + 16 + 8 * count
    if len(data) != first + count * PAGE:
        return None
    numbers = struct.unpack_from(f"<{count}Q", data, head + 16)
    last = max(numbers, default=0)
    stored = path.stat().st_size if path.exists() else 0
    if last * PAGE >= size or size > stored + count * PAGE + SLACK:
        return None
    return size, {n: data[first + k * PAGE : first + (k + 1) * PAGE] for k, n in enumerate(numbers)}


def _apply(path: Path, size: int, pages: Mapping[int, bytes | bytearray]) -> None:
    """Write the pages to the file ``path``, flush this file to the disk, and remove the journal.

    :param path: file to change
    :param size: new size of the file in bytes
    :param pages: changed pages, by page number
    """
    with path.open("r+b", buffering=0) as file:
        # Readers that use HDF5 lock the file, too, and must not stop the run by keeping it open.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(size)
        for number in sorted(pages):
            page = memoryview(pages[number])[: max(0, size - number * PAGE)]
            done = 0
            while done < len(page):
                done += os.pwrite(file.fileno(), page[done:], number * PAGE + done)
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.fsync(file.fileno())
    pending(path).unlink()
