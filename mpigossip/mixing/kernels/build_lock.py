"""Lock for a file that one of several processes builds, on one host or on many that share a folder.

The lock is a file next to the one that is built. It is created with ``O_EXCL``, because home
directories on NFS may not support `flock`. Its holder touches it while it builds. If the holder is
killed, the touches end, and a waiting process creates the lock file with the next number. Only the
file with the highest number counts. Exactly one of the waiting processes therefore takes over, and
none of them has to remove the lock of another process.

Two processes may still build at once, if a holder was stopped for longer than `LEASE_S`. This does
no harm, because each of them renames a complete file into place.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path

LEASE_S = 10.0
"""Seconds without a touch after which the holder of a lock counts as killed."""
TOUCH_S = 1.0
"""Seconds between two touches."""


class BuildLock:
    """Lock of one file, as one process sees it: the process may hold it or wait for it."""

    def __init__(self, path: Path):
        """Prepare the lock without acquiring it.

        :param path: the file that is built; the lock files are next to it
        """
        self._path = path
        self._own: Path | None = None
        """Lock file of this process; None if it does not hold the lock."""
        self._seen: tuple[Path, int] | None = None
        """Newest lock file of another process, and the time of its last touch in nanoseconds."""
        self._seen_since = 0.0
        """Time at which this touch was first seen, by this process's monotonic clock."""
        self._tokens: set[str] = set()
        """Random tokens, read from lock files, of the holders that this process has waited for."""

    def acquire(self) -> bool:
        """Try to acquire the lock without waiting; return whether this process holds it now."""
        number, newest = max(self._numbered(), default=(-1, None))
        if newest is not None and self._is_alive(newest):
            return False
        own = self._path.with_name(f"{self._path.name}.lock.{number + 1}")
        try:
            descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(8))
        self._own = own
        return True

    def _numbered(self) -> list[tuple[int, Path]]:
        """Return all lock files of the folder, each with its number."""
        # The folder is listed because NFS then asks the server. A look-up of one name may be
        # answered from a cache of names that do not exist.
        prefix = f"{self._path.name}.lock."
        files = [(file.name.removeprefix(prefix), file) for file in self._path.parent.iterdir()]
        return [(int(number), file) for number, file in files if number.isdigit()]

    def _is_alive(self, newest: Path) -> bool:
        """Return whether the holder has touched its lock file within the last `LEASE_S` seconds.

        The time is measured by this process's clock, from the moment at which it saw the touch.
        """
        try:
            with newest.open() as file:
                self._tokens.add(file.read())
                seen = newest, os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            # The lock was released meanwhile, which the next call will find out.
            return True
        if seen != self._seen:
            self._seen = seen
            self._seen_since = time.monotonic()
        return time.monotonic() - self._seen_since < LEASE_S

    def touch(self) -> None:
        """Touch the lock file if this process holds the lock, to show that it is alive."""
        if self._own is not None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._own)

    def fail(self, reason: str) -> None:
        """Pass the reason why this process could not build to the waiting processes.

        Nothing happens unless this process holds the lock.

        :param reason: message for :meth:`failure`
        """
        if self._own is None:
            return
        with contextlib.suppress(OSError):
            token = self._own.read_text()
            unfinished = self._path.with_name(f"{self._path.name}.{token}")
            unfinished.write_text(f"{token}\n{reason}")
            unfinished.replace(self._failed)

    def failure(self) -> str:
        """Return why the process that this one waited for could not build the file.

        Return an empty string if it has not failed.
        """
        with contextlib.suppress(OSError):
            token, _, reason = self._failed.read_text().partition("\n")
            return reason if token in self._tokens else ""
        return ""

    @property
    def _failed(self) -> Path:
        """Path of the file that contains the reason of the last failure."""
        return self._path.with_name(f"{self._path.name}.failed")

    def release(self) -> None:
        """Release the lock: remove the lock files of killed processes, then this process's own.

        The reason of an earlier failure is removed, too, if the file exists now. Nothing happens
        unless this process holds the lock.
        """
        if self._own is None:
            return
        last = int(self._own.name.rpartition(".")[2])
        for number, file in sorted(self._numbered()):
            if number <= last:
                file.unlink(missing_ok=True)
        if self._path.exists():
            self._failed.unlink(missing_ok=True)
        self._own = None
