"""The files of a training in a folder: how they get there, and the records that stand in them.

The one atomic act is the link of a finished file. Records are small JSON objects with a fixed set
of typed fields.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpigossip.mixing.members.outages import FolderUnreachable, ForeignFile, Outages
from mpigossip.store import StoreError

T = TypeVar("T")

LARGEST = 1 << 20
"""Bytes of a record at most."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""Errors of link(2) on a file system without hard links."""
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of fsync(2) on a file system that cannot bring a folder to the disk."""
NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of chmod(2) on a file system without permissions of its own."""
READABLE = 0o444


class Unusable(StoreError):
    """A name that is there and can't be taken for what it should be; says why."""


class RecordStore:
    """A folder on a file system that all members share; stale listings only hide what is new.

    No locks, no times of files, no renames: a name appears whole by link(2), or not at all.

    `Outages` repeats each operation that the file system fails. No error of it is an answer: a
    name "isn't there" only if it was never listed, and a content is "unusable" only if it was read.
    """

    def __init__(self, root: Path, shared: bool = False):
        """``shared``: files of other users are taken, too."""
        self.root = Path(root)
        self.shared = shared
        self.outages = Outages()
        self._identity: tuple[int, int] | None = None
        """Device and inode of the folder, once it was seen."""
        self._known: set[str] = set()
        """Folders that have been there; no member removes one."""
        self._unwanted: list[Path] = []
        """Files that are to be removed; an outage prevented that."""

    def path(self, name: str) -> Path:
        """The place of a name; asked for once in each operation of the file system."""
        return self.root / name

    def retry(self, operation: Callable[[], T], name: str = "") -> T:
        """As `Outages.retry`, with the name of a file in this folder."""
        return self.outages.retry(operation, self.root / name)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, ascending; none where it isn't there."""
        return self.retry(lambda: self._names(folder), folder)

    def _names(self, folder: str) -> list[str]:
        try:
            found = sorted(path.name for path in self.path(folder).iterdir())
        except FileNotFoundError:
            self._check_root()
            if folder in self._known:
                raise
            return []
        except NotADirectoryError:
            if folder:
                raise
            return []  # a file in the place of the training: whoever begins one reports it
        self._known.add(folder)
        if self._identity is None:
            self._check_root()
        return found

    def _check_root(self) -> None:
        """Raise OSError if the folder has vanished or is another one, as if it is unmounted.

        The mount point that remains is an empty folder, in which nothing may be created. A folder
        that is mounted again may have other numbers, but it has the names that were seen before.
        """
        if not self._known:
            return
        about = self.root.stat()
        identity = about.st_dev, about.st_ino
        if self._identity not in (None, identity):
            seen = {folder.partition("/")[0] for folder in self._known} - {""}
            if seen and seen.isdisjoint(path.name for path in self.root.iterdir()):
                raise OSError(
                    errno.ENOTCONN, "an empty folder has its name; mount it again", str(self.root)
                )
        self._identity = identity

    def exists(self, name: str) -> bool:
        """Return whether a name is listed.

        It is not looked up: NFS then hides a name for half a minute if it is created afterwards.
        """
        folder, _, last = name.rpartition("/")
        return last in self.names(folder)

    def sees(self, name: str) -> bool:
        """Return whether a name in the folder itself is listed now; an error counts as no."""
        try:
            return name in self._names("")
        except OSError:
            return False

    def read(self, name: str, listed: bool = False) -> bytes | None:
        """Content of a file; None where the name isn't there. Raises Unusable.

        ``listed``: the name is there, because it was listed or follows from another one. If it
        can't be opened all the same, that is an error of the file system.
        """
        try:
            return self.retry(lambda: self._read(name, listed), name)
        except FolderUnreachable as error:
            if isinstance(error.__cause__, FileNotFoundError) and not self.exists(name):
                raise StoreError(
                    f"{self.root / name} was removed, although later files depend on it; copy it "
                    "back, or begin a new folder"
                ) from error
            raise

    def _read(self, name: str, listed: bool) -> bytes | None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path := self.path(name), flags)
        except FileNotFoundError:
            if listed:
                raise
            self._check_root()
            return None
        except OSError:
            _check_kind(path)
            raise
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise Unusable(f"{path} is no file")
            if not self.shared and about.st_uid != os.getuid():
                raise ForeignFile(errno.EPERM, f"it belongs to user {about.st_uid}", str(path))
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(LARGEST + 1)
        finally:
            os.close(descriptor)
        if len(content) > LARGEST:
            raise Unusable(f"{path} has more than {LARGEST} bytes")
        return content

    def publish(self, name: str, content: bytes) -> bool:
        """Give a name to a content, on disk; False where the name has another one.

        The reply of a link may be lost: after an error only what stands under the name decides.
        """
        return self.retry(lambda: self.publish_once(name, content), name)

    def publish_once(self, name: str, content: bytes) -> bool:
        """As `publish`, in a single attempt. Raises OSError if the file system fails."""
        beside = self._write_beside(content)
        try:
            won = self._link(beside, name, content)
        finally:
            self.discard(beside)
        if won:
            self.sync(name.rpartition("/")[0])
        return won

    def _write_beside(self, content: bytes) -> Path:
        """Write a new file in tmp/, and bring it to the disk."""
        beside = self.path(f"tmp/{secrets.token_hex(8)}")
        try:
            file = beside.open("xb")
        except FileNotFoundError:  # tools that copy or purge folders drop empty ones
            self._make("tmp")
            file = beside.open("xb")
        try:
            with file:
                file.write(content)
                file.flush()
                self._share(file.fileno())
                os.fsync(file.fileno())
        except OSError:
            self.discard(beside)
            raise
        return beside

    def _link(self, beside: Path, name: str, content: bytes) -> bool:
        failed = None
        try:
            self.link(beside, self.path(name))
        except OSError as error:
            failed = error
        if failed is None:
            return True
        try:
            found = self._read(name, listed=isinstance(failed, FileExistsError))
        except Unusable:
            return False
        if found is None:
            if isinstance(failed, FileNotFoundError) and self._make(name.rpartition("/")[0]):
                return self._link(beside, name, content)
            raise failed
        return found == content

    def link(self, beside: Path, path: Path) -> None:
        """Give a finished file a second name, in one step."""
        os.link(beside, path)

    def share(self, path: Path) -> None:
        """Make a file readable for other users if the folder is shared, whatever the umask."""
        if self.shared:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                self._share(descriptor)
            finally:
                os.close(descriptor)

    def _share(self, descriptor: int) -> None:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if self.shared and mode & READABLE != READABLE:
            _change_mode(descriptor, mode | READABLE)

    def open_to_others(self, folder: Path) -> None:
        """Give a new folder the permissions of the training's own if that is shared."""
        if self.shared:
            _change_mode(folder, stat.S_IMODE(self.root.stat().st_mode))

    def sync(self, folder: str) -> None:
        """Bring a folder's names to the disk."""
        descriptor = os.open(self.path(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise
        finally:
            os.close(descriptor)

    def begin(self, folders: Iterable[str]) -> None:
        """Make the folder itself, those above it, and these in it."""
        self.retry(lambda: self.root.mkdir(parents=True, exist_ok=True))
        for folder in folders:
            self.make(folder)

    def make(self, folder: str) -> None:
        """Make a folder, and those between it and the training's own, which has to be there.

        If the training's folder is shared, the new ones get its permissions, whatever the umask:
        other users then may add names to them if they may add names to the training's folder.
        """
        self.retry(lambda: self._make(folder), folder)

    def _make(self, folder: str) -> bool:
        """Return whether the folder wasn't there."""
        self._check_root()
        made = False
        one = self.root
        wanted = self.path(folder)
        for part in wanted.relative_to(self.root).parts:
            one /= part
            try:
                one.mkdir()
            except FileExistsError:
                # `Path.is_dir` alone would take an error of the file system for an answer.
                mode = os.lstat(one).st_mode
                if not (stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and one.is_dir())):
                    raise StoreError(f"{one} is no folder; move it away") from None
                continue
            self.open_to_others(one)
            made = True
        self._known.add(folder)
        return made

    def remove(self, name: str) -> None:
        """Remove a file that nobody needs; after an error again with the next one."""
        self.discard(self.path(name))

    def discard(self, path: Path) -> None:
        """Remove a file by its path, as `remove` does."""
        unwanted = [*self._unwanted, path]
        self._unwanted = []
        for one in unwanted:
            try:
                one.unlink()
            except (FileNotFoundError, PermissionError):
                continue
            except OSError:
                self._unwanted.append(one)


def _check_kind(path: Path) -> None:
    """Raise Unusable if a name that can't be opened is no regular file; an error says nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        raise Unusable(f"{path} is a symbolic link; put the file there") from None
    if not stat.S_ISREG(mode):
        raise Unusable(f"{path} is no file") from None


def _change_mode(file: int | Path, mode: int) -> None:
    try:
        os.fchmod(file, mode) if isinstance(file, int) else file.chmod(mode)
    except OSError as error:
        if error.errno not in NO_MODES:
            raise


# -- records -------------------------------------------------------------------------------------


MOST = 1 << 53
"""Whole numbers stay below."""
FILE = r"\d{6}-[0-9a-f]{16}\.h5"
"""Names of model files."""


class Version(NamedTuple):
    """A model: that of a place after a round."""

    place: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """What all records have; ``nonce`` makes each content its own."""

    place: int
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """As JSON, with the class as its kind."""
        return json.dumps({"kind": type(self).__name__.lower(), **asdict(self)}).encode()


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """Round 0 of a chain: the models whose average the member began with (none: the seed)."""

    inputs: tuple[Version, ...]
    promise: float
    about: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Round(Record):
    """A published round: averaged with ``peer``, trained ``chunk``, model in ``file``.

    ``age`` is a Lamport clock, ``progress`` the chunks that its history has reached, ``promise``
    the seconds of silence at most until the next record. ``checksum`` is of the file's bytes,
    ``digest`` of its arrays.
    """

    round: int
    claim: str
    chunk: int
    peer: tuple[Version, ...]
    age: int
    progress: int
    promise: float
    step: int
    file: str
    bytes: int
    checksum: str
    parameters: int
    digest: str

    @property
    def version(self) -> Version:
        """Its name for others."""
        return Version(self.place, self.round)


@dataclass(frozen=True, kw_only=True)
class Closed(Record):
    """The end of a chain: "left" by itself, or silent for longer than it promised."""

    round: int
    why: str
    by: int


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """Rounds of a place from ``first`` on train the chunks from ``chunk`` to their block's end."""

    first: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class End(Record):
    """All chunks are trained; the result is the average of these versions."""

    versions: tuple[Version, ...]


KINDS: dict[str, type[Record]] = {
    cls.__name__.lower(): cls for cls in (Start, Round, Closed, Claim, End)
}


def parse(content: bytes, name: str, *kinds: type[Record]) -> Any:
    """The record of one of these kinds; raises Unusable."""
    try:
        found = json.loads(content)
        cls = KINDS[found.pop("kind")]
        if cls not in kinds:
            raise ValueError(f'it is of kind "{cls.__name__.lower()}"')
        types = {one.name: one.type for one in fields(cls)}
        if found.keys() != types.keys():
            raise ValueError("it lacks fields or has others")
        made = cls(**{key: _typed(found[key], str(types[key]), key) for key in types})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"{name} is no record: {str(error)[:100]}") from None
    if isinstance(made, Round) and not re.fullmatch(FILE, made.file, re.ASCII):
        raise Unusable(f"{name} names {made.file[:40]!r} as its model")
    return made


def _typed(value: Any, kind: str, name: str) -> Any:
    """A field's value as its type; ValueError where it is another."""
    if kind == "int" and type(value) is int and 0 <= value < MOST:
        return value
    if kind == "float" and type(value) in (int, float) and 0 <= value < MOST:
        return float(value)
    if kind == "str" and isinstance(value, str) and value.isprintable():
        return value
    if kind.startswith("tuple") and isinstance(value, list) and len(value) <= 1024:
        return tuple(Version(*(_typed(one, "int", name) for one in pair)) for pair in value)
    if kind.startswith("dict") and isinstance(value, dict) and len(value) <= 64:
        return {_typed(k, "str", name): _typed(v, "str", name) for k, v in value.items()}
    raise ValueError(f'"{name}" is {str(value)[:40]!r}')
