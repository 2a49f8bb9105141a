"""Lock for a file that one of several processes builds, on one host or on many that share a folder.

The lock is a file next to the one that is built, made with ``O_EXCL``: home directories on NFS may
have no `flock`. Its holder touches it while it builds. If a holder is killed, the touching ends,
and a waiting process makes the lock file with the next number. The file with the highest number
counts, so exactly one of the waiting processes takes over, and no process removes the lock of
another one. If two processes should build anyway (a holder was stopped for longer than `LEASE_S`),
each renames a complete file into place.
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
    """The lock of one file, as seen by this process."""

    def __init__(self, path: Path):
        """Keep where the lock files belong; ``path``: the file that is built."""
        self._path = path
        self._own: Path | None = None
        self._seen: tuple[Path, int] | None = None
        """newest lock file of another process and the time of its last touch"""
        self._seen_since = 0.0
        self._tokens: set[str] = set()
        """tokens of the holders that this process waited for"""

    def acquire(self) -> bool:
        """Return whether this process holds the lock now; does not wait."""
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
        """Return the lock files with their numbers."""
        # Listing the folder makes NFS look at the server; a look at one name may be answered from
        # a cache of names that do not exist.
        prefix = f"{self._path.name}.lock."
        found = [(file.name.removeprefix(prefix), file) for file in self._path.parent.iterdir()]
        return [(int(number), file) for number, file in found if number.isdigit()]

    def _is_alive(self, newest: Path) -> bool:
        """Return whether the holder has touched its lock file within `LEASE_S`, by this clock."""
        try:
            with newest.open() as file:
                self._tokens.add(file.read())
                seen = newest, os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:  # it was released meanwhile: the next call looks again
            return True
        if seen != self._seen:
            self._seen = seen
            self._seen_since = time.monotonic()
        return time.monotonic() - self._seen_since < LEASE_S

    def touch(self) -> None:
        """Show that the holder of the lock, this process, is alive."""
        if self._own is not None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._own)

    def fail(self, reason: str) -> None:
        """Leave the reason why the holder, this process, could not build, to those that wait."""
        if self._own is None:
            return
        with contextlib.suppress(OSError):
            token = self._own.read_text()
            unfinished = self._path.with_name(f"{self._path.name}.{token}")
            unfinished.write_text(f"{token}\n{reason}")
            unfinished.replace(self._failed)

    def failure(self) -> str:
        """Return the reason that a holder has left which this process waited for, or ""."""
        with contextlib.suppress(OSError):
            token, _, reason = self._failed.read_text().partition("\n")
            return reason if token in self._tokens else ""
        return ""

    @property
    def _failed(self) -> Path:
        return self._path.with_name(f"{self._path.name}.failed")

    def release(self) -> None:
        """Remove the lock file of this process, after those that killed processes have left."""
        if self._own is None:
            return
        last = int(self._own.name.rpartition(".")[2])
        for number, file in sorted(self._numbered()):
            if number <= last:
                file.unlink(missing_ok=True)
        if self._path.exists():
            self._failed.unlink(missing_ok=True)
        self._own = None
