"""Changes to an HDF5 file that a kill can't tear apart.

HDF5 has no journal of its own: killed between two of its writes, it leaves a file that readers
refuse. So the library works on an `Overlay` that keeps changed pages in memory; `transaction`
writes these pages to `FILE.pending` first, then to the file, then removes `FILE.pending`. Killed
before the first is complete, the file is as it was; killed later, `recover` writes the pages again.
What is written is a small multiple of what has changed, however long the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import h5py

from mpigossip.store.hdf5 import LIBVER, sync, writing

PAGE = 4096
MAGIC = b"mpigossip pages\n"


class Overlay:
    """A file as h5py's "fileobj" driver wants one: changes stay in `pages`, by page number."""

    def __init__(self, path: Path, change: tuple[int, Mapping[int, bytes]] | None = None) -> None:
        self.file = path.open("rb", buffering=0)
        self.stored = os.fstat(self.file.fileno()).st_size  # bytes of the file that still count
        self.size, pages = change or (self.stored, {})
        self.stored = min(self.stored, self.size)
        self.pages = {number: bytearray(page) for number, page in pages.items()}
        self.position = 0

    def _page(self, number: int) -> bytes | bytearray:
        page = self.pages.get(number)
        if page is not None:
            return page
        start = number * PAGE
        length = max(0, min(PAGE, self.stored - start))
        return os.pread(self.file.fileno(), length, start).ljust(PAGE, b"\0")

    def _spans(self, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Page, first and last byte in it, place in the data; moves the position on."""
        done = 0
        while done < length:
            number, start = divmod(self.position, PAGE)
            count = min(PAGE - start, length - done)
            yield number, start, start + count, done
            self.position += count
            done += count

    def readinto(self, data: memoryview) -> int:
        """Fill `data` as far as the file goes."""
        length = max(0, min(len(data), self.size - self.position))
        for number, start, stop, at in self._spans(length):
            data[at : at + stop - start] = self._page(number)[start:stop]
        return length

    def write(self, data: memoryview) -> int:
        """Change pages in memory."""
        for number, start, stop, at in self._spans(len(data)):
            if number not in self.pages:
                self.pages[number] = bytearray(self._page(number))
            self.pages[number][start:stop] = data[at : at + stop - start]
        self.size = max(self.size, self.position)
        return len(data)

    def truncate(self, size: int) -> int:
        """Set the size; what is cut off reads as zeros should the file grow again."""
        if size < self.size:
            last, start = divmod(size, PAGE)
            self.pages = {number: page for number, page in self.pages.items() if number <= last}
            if last in self.pages:
                self.pages[last][start:] = bytes(PAGE - start)
            self.stored = min(self.stored, size)
        self.size = size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        """As of any file."""
        return self.position

    def flush(self) -> None:
        """Nothing reaches the disk before `transaction` ends."""


def pending(path: Path) -> Path:
    """The file beside `path` that holds changes until they are in it."""
    return path.with_name(path.name + ".pending")


@contextmanager
def transaction(path: Path) -> Iterator[h5py.File]:
    """The HDF5 file for reading and writing: all changes are made at the end, or none.

    StoreError where the disk refuses them; an exception inside leaves the file as it was.
    """
    with writing(path):
        recover(path)
        overlay = Overlay(path)
        with overlay.file, h5py.File(path, "r+", "fileobj", LIBVER, fileobj=overlay) as file:
            yield file
        _write_journal(pending(path), overlay.size, overlay.pages)
        _apply(path, overlay.size, overlay.pages)


@contextmanager
def consistent(path: Path) -> Iterator[h5py.File]:
    """The HDF5 file for reading, with changes that a killed writer left pending."""
    change = _read_journal(pending(path))
    if change is None:
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
        return
    overlay = Overlay(path, change)
    with overlay.file, h5py.File(path, "r", "fileobj", fileobj=overlay) as file:
        yield file


def recover(path: Path) -> bool:
    """Finish what a killed writer began; True where there was something to do."""
    journal = pending(path)
    change = _read_journal(journal)
    if change is not None and path.exists():
        _apply(path, *change)
    journal.unlink(missing_ok=True)
    return change is not None


def _write_journal(journal: Path, size: int, pages: Mapping[int, bytes | bytearray]) -> None:
    numbers = sorted(pages)
    body = struct.pack(f"<QQ{len(numbers)}Q", size, len(numbers), *numbers)
    body += b"".join(pages[number] for number in numbers)
    with journal.open("wb") as file:
        file.write(MAGIC + hashlib.sha256(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())
    sync(journal.parent)


def _read_journal(journal: Path) -> tuple[int, dict[int, bytes]] | None:
    """Size and pages, or None where the journal is missing or incomplete."""
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return None
    head = len(MAGIC) + hashlib.sha256().digest_size
    if (
        not data.startswith(MAGIC)
        or data[len(MAGIC) : head] != hashlib.sha256(data[head:]).digest()
    ):
        return None
    size, count = struct.unpack_from("<QQ", data, head)
    numbers = struct.unpack_from(f"<{count}Q", data, head + 16)
    first = head + 16 + 8 * count
    return size, {n: data[first + k * PAGE :][:PAGE] for k, n in enumerate(numbers)}


def _apply(path: Path, size: int, pages: Mapping[int, bytes | bytearray]) -> None:
    """Write the pages into the file, bring it to the disk, drop the journal."""
    with path.open("r+b", buffering=0) as file:
        # HDF5's readers lock, too; one that keeps the file open doesn't stop a run.
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
