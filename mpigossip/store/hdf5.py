"""Helpers for h5py: texts of fixed length, error messages, and safe replacement of files."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpigossip.store import StoreError

LIBVER = ("v110", "v110")
"""Version of the file format, which HDF5 1.10 and later can read. Unlike the earliest version, it
has checksums for all metadata.
"""

CONTENT_ERRORS = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""Exceptions that Python and h5py raise if the content of a file is not as expected."""

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of the operating system if the user may not write a file."""

STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders with symbolic links to open files, such as /dev/stdout."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Return a context manager that converts errors of writing ``path`` to StoreError.

    The errors are OSError, and RuntimeError, which HDF5 raises.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        remedy = "free space there or name another path (run.output of a job)"
        if getattr(error, "errno", None) in FORBIDDEN:
            remedy = "ask its owner for permission, or name another path (run.output of a job)"
        elif not Path(path).parent.exists():
            remedy = "make its folder first"
        raise StoreError(f"{path} can't be written: {_reason(error)}; {remedy}") from error


def check_replaceable(path: Path) -> None:
    """Check that :func:`replacing` would replace a regular file, or create one.

    A folder can't be replaced. A pipe or a device, such as /dev/stdout, would be replaced by a
    regular file, which never reaches its reader.

    :raises StoreError: if ``path`` is a folder, a pipe or a device, or can't be accessed
    """
    with writing(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return
    if stat.S_ISDIR(mode):
        raise StoreError(f"{path} can't be written: it is a folder; name a file in it")
    if not stat.S_ISREG(mode) or (path.is_symlink() and path.parent in STREAMS):
        raise StoreError(
            f"{path} can't be written: it is a pipe or a device, which a file would replace; name "
            "a regular file"
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Return a context manager for a temporary path, whose file replaces ``path`` at the end.

    Readers see either the complete old file or the complete new file, even after a power failure.
    If the block raises an error, the temporary file is removed.

    :param path: file to replace; the temporary path has the same folder and suffix
    :raises StoreError: if writing fails, or if ``path`` is a folder, a pipe or a device
    """
    path = Path(path)
    check_replaceable(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with writing(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
            # The folder may not be readable, and can then not be opened for fsync.
            with suppress(OSError):
                sync(path.parent)
    finally:
        # Without permission to write, the folder may not be readable either.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Return a context manager that converts errors of reading ``path`` to StoreError.

    Errors of the operating system, and errors due to invalid content (`CONTENT_ERRORS`), are
    converted.
    """
    try:
        yield
    except StoreError:
        raise
    except PermissionError as err:
        raise StoreError(
            f"{path} can't be read: {err.strerror}; ask its owner for permission"
        ) from err
    except (*CONTENT_ERRORS, OSError) as err:
        raise StoreError(
            f"{path} can't be used: {_reason(err)}; use another copy of this file"
        ) from err


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and "HDF5" not in error.strerror:
        return error.strerror
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return " ".join(text.split()) or type(error).__name__


def new(path: Path) -> int:
    """Create a file, or empty an existing one, and return its descriptor for reading and writing.

    :raises OSError: if this fails, or if the path is a symbolic link
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


class _Sink(io.FileIO):
    """File object for HDF5 that stores the first error of writing in `error` instead of raising it.

    The HDF5 library cannot close a file after an error such as a full disk: the file stays open,
    each of its objects fails again when it is freed, and the process can crash at exit (observed
    with h5py 3.16).
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
    """Return a context manager that creates an HDF5 file for writing.

    At its end, the complete file is in the page cache; call `sync` to write it to the disk.

    :param path: file to create
    :param settings: further arguments of `h5py.File`
    :raises StoreError: if writing fails
    """
    with writing(path), _Sink(new(path), "w+") as sink:
        try:
            with h5py.File(path, "w", "fileobj", LIBVER, fileobj=sink, **settings) as file:
                yield file
        finally:
            if sink.error is not None:
                raise sink.error


def sync(path: Path) -> None:
    """Write the cached content of a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # Some file systems, such as SMB, cannot fsync a folder.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP} or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def fixed(text: str) -> np.ndarray:
    """Convert a text to a scalar array of fixed length, which can be stored as an attribute.

    A text of variable length would be stored in HDF5's heap, which has no checksum.
    """
    data = text.encode(errors="surrogateescape")
    return np.array(data, h5py.string_dtype("utf-8", max(len(data), 1)))


def attribute_text(text: str, max_bytes: int) -> np.ndarray | str:
    """Convert a text of at most ``max_bytes`` bytes by :func:`fixed`; return longer texts as str.

    HDF5 stores a str in its heap, for which this package adds its own checksum. Attributes of fixed
    length cannot be longer: HDF5 stores attributes above 64 kB, and above 4 kB if there are more
    than eight attributes, in a kind of B-tree that `guard` rejects.
    """
    return fixed(text) if len(text.encode(errors="surrogateescape")) <= max_bytes else text


def write_text(group: h5py.Group, name: str, text: str) -> None:
    """Write a text as a dataset of fixed length.

    Unlike an attribute, a dataset can have any size. Unlike a text of variable length, it is not
    stored in HDF5's heap. The checksum of the whole file covers its bytes.
    """
    data = fixed(text)
    group.create_dataset(name, data=data, dtype=data.dtype)
