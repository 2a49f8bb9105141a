"""The files of a training in a folder: how they get there, and the records that stand in them.

The one atomic act is the link of a finished file. Records are small JSON objects with a fixed set
of typed fields.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from mpigossip.store import StoreError

LARGEST = 1 << 20
"""Bytes of a record at most."""
TRIES = 3
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
"""A file system's errors that say nothing about the file."""


class Unusable(StoreError):
    """A name that is there and can't be taken for what it should be; says why."""


class Disk:
    """A folder on a file system that all members share; stale listings only hide what is new.

    No locks, no times of files, no renames: a name appears whole by link(2), or not at all.
    """

    def __init__(self, root: Path, shared: bool = False):
        """``shared``: files of other users are taken, too."""
        self.root, self.shared = Path(root), shared

    def path(self, name: str) -> Path:
        """The place of a name; asked for once in each operation of the file system."""
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

    def read(self, name: str) -> bytes | None:
        """Content of a file; None where the name isn't there. Raises Unusable, OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path := self.path(name), flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            if path.is_symlink():
                raise Unusable(f"{path} is a symbolic link; put the file there") from None
            if error.errno in PASSING:  # what is there isn't damaged
                raise
            raise Unusable(f"{path} can't be read: {error.strerror}; ask its owner") from None
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise Unusable(f"{path} is no file")
            if not self.shared and about.st_uid != os.getuid():
                raise Unusable(f"{path} belongs to user {about.st_uid}; --shared takes it")
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

    def _link(self, beside: Path, name: str, content: bytes, tries: int = TRIES) -> bool:
        try:
            self.link(beside, self.path(name))
        except OSError:
            try:
                found = self.read(name)
            except Unusable:
                return False
            if found is not None:
                return found == content
            if tries == 1:
                raise
            return self._link(beside, name, content, tries - 1)
        self.sync(name.rpartition("/")[0])
        return True

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
        with contextlib.suppress(OSError):
            self.path(name).unlink()


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
