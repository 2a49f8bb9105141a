"""Retries of operations on a shared folder that fail because of its file system.

An error of the file system does not show whether a file exists or is valid. The operation is
therefore repeated until it succeeds, or until it has failed for longer than a lease. The member
then ends with exit code 75, after which batch scripts queue it again. If only the user can correct
the cause, the member ends with a user error instead.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mpigossip.config.errors import STOPPED, Failure
from mpigossip.config.readable import print_note
from mpigossip.store import StoreError

START_S = 10.0
"""Seconds for which an operation may fail at the start, when the lease is not known yet, and after
the member was asked to leave."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0
"""First and longest pause between two attempts, in seconds. Each pause is twice as long as the
previous one, until the longest is reached."""
RIGHTS = "ask its owner for permission to use it (with --shared: `umask 022`)"
SPACE = "free space there, or ask for a larger quota"
REMEDIES = {
    errno.EACCES: RIGHTS,
    errno.EPERM: RIGHTS,
    errno.EROFS: "mount its file system for writing, or name another folder",
    errno.ENOSPC: SPACE,
    errno.EDQUOT: SPACE,
    errno.EFBIG: SPACE,
    errno.ENOTDIR: "remove the file that has the name of a folder",
    errno.ELOOP: "remove the symbolic link",
    errno.ENAMETOOLONG: "name another folder",
    errno.EMFILE: "raise the limit of open files (`ulimit -n 65536`)",
}
"""Errors that last until the user corrects their cause, each with its remedy.

A member that ends by one of these must not be queued again.
"""

T = TypeVar("T")


class FolderUnreachable(Failure):
    """Error of an operation on a training's folder that fails for too long on this host."""

    code = STOPPED


class ForeignFile(PermissionError):
    """Error of a file that belongs to another user, although the folder is not `--shared`."""


def cause(error: BaseException) -> OSError | None:
    """Return the error of the file system that caused an exception; None if there is none.

    The result is None for a `StoreError` about the content of a file, and for an `OSError` without
    an error number, which the HDF5 library raises if the content of a file is invalid.
    """
    failure = error if isinstance(error, OSError) else error.__cause__
    return failure if isinstance(failure, OSError) and failure.errno is not None else None


class Outages:
    """Retries of one member's operations on its folder, in its main and in its writing thread."""

    def __init__(self, report: Callable[[str], None] = print_note, limit_s: float = START_S):
        """Create the object; there is no outage yet.

        :param report: function that prints one line about an outage
        :param limit_s: seconds for which an operation may fail
        """
        self.report = report
        self.limit_s = limit_s
        self.stopping: Callable[[], bool] = lambda: False
        """Function that returns whether the member was asked to leave. If so, an operation may fail
        for `START_S` seconds at most."""
        self.given_up = False
        """True if an operation has failed for too long. All others are then tried only once."""
        self._lock = threading.Lock()
        self._failing = 0
        """Number of threads whose operation fails at present."""
        self._since = 0.0
        """Start of the present outage, by the monotonic clock."""
        self._past = 0.0
        """Total duration of past outages, in seconds."""
        self._reported = float("-inf")
        """Time of the last report, by the monotonic clock."""

    def seconds(self) -> float:
        """Return the total duration of all outages until now, the present one included.

        During an outage, a member can't see what other members publish. It must therefore subtract
        these seconds from the time for which the others seem to be silent.
        """
        with self._lock:
            return self._past + (time.monotonic() - self._since if self._failing else 0.0)

    def retry(self, operation: Callable[[], T], path: Path) -> T:
        """Return the result of ``operation``, which is repeated as long as the file system fails.

        If an error does not come from the file system, it is raised at once.

        :param operation: function that may be called again after any error
        :param path: path for messages, if the error has none
        :raises FolderUnreachable: if the operation fails for longer than the limit
        :raises StoreError: if the operation fails for longer than the limit, and only the user can
            correct the cause
        """
        try:
            return operation()
        except (OSError, StoreError) as error:
            if cause(error) is None:
                raise
            first = error
        with self._outage():
            return self._again(operation, path, first)

    def _again(self, operation: Callable[[], T], path: Path, error: Exception) -> T:
        """Repeat an operation whose first attempt failed with ``error``; return its result."""
        began = time.monotonic()
        pause = FIRST_PAUSE_S
        while True:
            failed = cause(error)
            if failed is None:
                raise error
            limit_s = min(self.limit_s, START_S) if self.stopping() else self.limit_s
            remaining = began + limit_s - time.monotonic()
            if self.given_up or remaining <= 0:
                self.given_up = True
                raise _final(failed, path, limit_s) from error
            self._report(failed, path)
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                return operation()
            except (OSError, StoreError) as next_error:
                error = next_error

    @contextmanager
    def _outage(self) -> Iterator[None]:
        """Return a context manager that measures an outage; outages of two threads may overlap."""
        with self._lock:
            if not self._failing:
                self._since = time.monotonic()
            self._failing += 1
        try:
            yield
        finally:
            with self._lock:
                self._failing -= 1
                if not self._failing:
                    self._past += time.monotonic() - self._since

    def _report(self, error: OSError, path: Path) -> None:
        """Report an outage, at most once in `limit_s` seconds."""
        with self._lock:
            now = time.monotonic()
            due = now - self._reported > self.limit_s
            self._reported = now if due else self._reported
        if due:
            self.report(f"{_describe(error, path)}; trying again for {self.limit_s:g} s")


def _describe(error: OSError, path: Path) -> str:
    """Return a text with the path and the reason of an error; ``path`` is used if it names none."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
    return f"{name}: {error.strerror or error}"


def _final(error: OSError, path: Path, limit_s: float) -> Exception:
    """Return the exception that ends the member; its class decides whether the job is queued again.

    :param error: error of the file system
    :param path: path for the message, if the error has none
    :param limit_s: seconds for which the operation has failed
    """
    text = f"{_describe(error, path)}, for {limit_s:g} s"
    if isinstance(error, ForeignFile):
        return StoreError(f"{text}; give --shared to use the files of other users")
    if error.errno in REMEDIES:
        return StoreError(f"{text}; {REMEDIES[error.errno]}, then start this member again")
    return FolderUnreachable(f"{text}; this member ends, and the same command joins again")
