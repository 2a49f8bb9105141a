"""Helpers around h5py: text and arrays without pickle or heap, errors as StoreError, fsync."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpigossip.store import StoreError

# HDF5 1.10 and later read this; unlike the earliest format it has checksums on all metadata.
LIBVER = ("v110", "v110")

WRONG = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""Exceptions of Python and h5py over content that isn't as expected."""

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk rejects (full, read-only, quota) into StoreError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        remedy = "free space there or name another place (a run: run.output)"
        if getattr(error, "errno", None) in FORBIDDEN:
            remedy = "ask its owner for the right to, or name another place (a run: run.output)"
        elif not Path(path).parent.exists():
            remedy = "make its folder first"
        raise StoreError(f"{path} can't be written: {_reason(error)}; {remedy}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` with the same suffix; what was written there becomes `path` at the end.

    Readers see the old file or the new one, never a half, also after a power failure; after an
    error nothing is left. Raises StoreError where writing fails.
    """
    path = Path(path)
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with writing(path):
            yield beside
            sync(beside)
            beside.replace(path)
            with suppress(OSError):  # a folder that may not be read
                sync(path.parent)
    finally:
        with suppress(OSError):  # whoever may not write there may not look there either
            beside.unlink(missing_ok=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what HDF5 or a wrong content says about `path` into StoreError."""
    try:
        yield
    except StoreError:
        raise
    except PermissionError as err:
        raise StoreError(f"{path} can't be read: {err.strerror}; ask its owner for it") from err
    except (*WRONG, OSError) as err:
        raise StoreError(
            f"{path} doesn't hold what this program writes: {_reason(err)}; use another copy"
        ) from err


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and "HDF5" not in error.strerror:
        return error.strerror
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return " ".join(text.split()) or type(error).__name__


def new(path: Path) -> int:
    """A descriptor of a new, empty file; what a symbolic link of that name points to is spared."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


class _Sink(io.FileIO):
    """A file for HDF5 to write to that never fails: the first error is kept in `error`.

    The HDF5 library can't give a file up when the disk is full: it stays open, each object of it
    fails again when it is freed, and the process may crash at exit (seen with h5py 3.16, 2026-11).
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        done = 0
        while self.error is None and done < len(data):
            try:
                done += super().write(data[done:])
            except OSError as error:
                self.error = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return 0


@contextmanager
def create(path: Path, **settings: Any) -> Iterator[h5py.File]:
    """A new HDF5 file; afterwards it is whole in the page cache (`sync` brings it to the disk).

    StoreError where writing fails.
    """
    with writing(path), _Sink(new(path), "w+") as sink:
        try:
            with h5py.File(path, "w", "fileobj", LIBVER, fileobj=sink, **settings) as file:
                yield file
        finally:
            if sink.error is not None:
                raise sink.error


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems, such as SMB's, have no fsync of folders
        if error.errno not in {errno.EINVAL, errno.ENOTSUP} or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def fixed(text: str) -> np.ndarray:
    """A text of fixed length as attributes take it: outside HDF5's heap, which has no checksum."""
    data = text.encode(errors="surrogateescape")
    return np.array(data, h5py.string_dtype("utf-8", max(len(data), 1)))


def worded(text: str, most: int) -> np.ndarray | str:
    """The same up to so many bytes; longer ones go to the heap, which needs a checksum of ours.

    HDF5 keeps an attribute above 4 kB by itself where there are more than eight, above 64 kB
    always: under a kind of B-tree that `guard` lets nobody use.
    """
    return fixed(text) if len(text.encode(errors="surrogateescape")) <= most else text


def write_text(group: h5py.Group, name: str, text: str) -> None:
    """A dataset of one UTF-8 text of fixed length: any size, and outside HDF5's unchecked heap."""
    data = fixed(text)
    group.create_dataset(name, data=data, dtype=data.dtype)
