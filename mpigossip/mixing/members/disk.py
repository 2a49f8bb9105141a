"""File operations of a training in a folder; the one atomic act is the link of a finished file."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

LARGEST = 1 << 20
"""Bytes of a record at most."""
TRIES = 3


class Unusable(Exception):
    """A name that is there and can't be taken for what it should be; says why."""


class Disk:
    """A folder on a file system that all members share; stale listings only hide what is new.

    No locks, no times of files, no renames: a name appears whole by link(2), or not at all.
    ``operations`` counts calls of the file system.
    """

    def __init__(self, root: Path, shared: bool = False):
        """``shared``: files of other users are taken, too."""
        self.root, self.shared, self.operations = Path(root), shared, 0

    def path(self, name: str) -> Path:
        """The place of a name; one operation."""
        self.operations += 1
        return self.root / name

    def names(self, folder: str) -> list[str]:
        """Names in a folder, ascending; none where it isn't there."""
        try:
            return sorted(path.name for path in self.path(folder).iterdir())
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Return whether a name is there."""
        return os.path.lexists(self.path(name))

    def read(self, name: str, most: int = LARGEST) -> bytes | None:
        """Content of a file; None where the name isn't there. Raises Unusable, OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path := self.path(name), flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            if path.is_symlink():
                raise Unusable(f"{path} is a symbolic link") from None
            raise Unusable(f"{path} can't be read: {error.strerror}") from None
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise Unusable(f"{path} is no file")
            if not self.shared and about.st_uid != os.getuid():
                raise Unusable(f"{path} belongs to user {about.st_uid}; --shared takes it")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most + 1)
        finally:
            os.close(descriptor)
        if len(content) > most:
            raise Unusable(f"{path} has more than {most} bytes")
        return content

    def publish(self, name: str, content: bytes) -> bool:
        """Give a name to a content, on disk; False where the name has another one.

        The reply of a link may be lost: after an error only what stands under the name decides.
        Raises OSError where the file system takes nothing.
        """
        beside = self.path(f"tmp/{secrets.token_hex(8)}")
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            return self._link(beside, name, content)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def _link(self, beside: Path, name: str, content: bytes) -> bool:
        for attempt in range(TRIES):
            try:
                self.link(beside, self.path(name))
            except OSError:
                try:
                    found = self.read(name)
                except Unusable:
                    return False
                if found is None and attempt + 1 == TRIES:
                    raise
                if found is None:
                    continue
                return found == content
            self.sync(name.rpartition("/")[0])
            return True
        raise AssertionError("unreachable")

    def link(self, beside: Path, path: Path) -> None:
        """Give a finished file a second name, in one step."""
        os.link(beside, path)

    def sync(self, folder: str) -> None:
        """Bring a folder's names to the disk."""
        descriptor = os.open(self.path(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make(self, folder: str) -> None:
        """A folder and those above it."""
        self.path(folder).mkdir(parents=True, exist_ok=True)

    def remove(self, name: str) -> None:
        """Remove a name, if it is there."""
        with contextlib.suppress(OSError):
            self.path(name).unlink()
