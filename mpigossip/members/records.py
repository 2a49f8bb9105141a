"""Files of a training in a folder: how they are published, and the records that they contain.

The only atomic operation is link(2), which gives a finished file its name. Records are small JSON
objects with a fixed set of typed fields.
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

from mpigossip.members.outages import FolderUnreachable, ForeignFile, Outages
from mpigossip.store import StoreError

T = TypeVar("T")

LARGEST = 1 << 20
"""Largest size of a record, in bytes."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""Errors of link(2) on a file system without hard links."""
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of fsync(2) on a file system that cannot write a folder to stable storage."""
NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of chmod(2) on a file system that does not store permissions."""
READABLE = 0o444
"""Permission bits of a file that all users may read."""


class Unusable(StoreError):
    """Error of a file that exists, but whose content or kind is invalid; the message says why."""


class RecordStore:
    """A folder on a file system that all members share.

    There are no locks and no renames, and times of files are not used. A name appears with its
    whole content by link(2), or not at all, and its content never changes. A stale listing can
    therefore only lack new names.

    That each chunk is trained exactly once needs two fsyncs per name: of the content before the
    link, so that a name never has an incomplete content, and of the folder after it, so that a name
    that others have seen is still there after a crash of the server. Models are flushed in the same
    way before their record appears, so that the work of a published round is not lost. Hints
    (:meth:`mark`) need no fsync. Removing temporary files and old models only saves space.

    If the file system fails, `Outages` repeats the operation, because such an error does not show
    whether the file exists or is valid. A file counts as missing only if its name was never listed,
    and as unusable only if its kind or content was examined and is invalid.
    """

    def __init__(self, root: Path, shared: bool = False):
        """Prepare to use a folder, which need not exist yet.

        :param root: folder of the training
        :param shared: whether files of other users are accepted, and new files are made readable
            for them
        """
        self.root = Path(root)
        self.shared = shared
        self.outages = Outages()
        self._identity: tuple[int, int] | None = None
        """Device and inode of the folder; None until it was listed."""
        self._known: set[str] = set()
        """Folders that are known to have existed. No member ever removes a folder."""
        self._unwanted: list[Path] = []
        """Files that still have to be removed, because an outage has prevented their removal."""

    def path(self, name: str) -> Path:
        """Return the path of a file in this folder.

        Each operation on a file calls this method once, so that a test can make operations fail.

        :param name: name of the file, relative to the folder
        """
        return self.root / name

    def retry(self, operation: Callable[[], T], name: str = "") -> T:
        """Call :meth:`Outages.retry`, with the name of a file in this folder."""
        return self.outages.retry(operation, self.root / name)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder in ascending order; none if the folder does not exist."""
        return self.retry(lambda: self._names(folder), folder)

    def _names(self, folder: str) -> list[str]:
        try:
            names = sorted(path.name for path in self.path(folder).iterdir())
        except FileNotFoundError:
            self._check_root()
            if folder in self._known:
                raise
            return []
        except NotADirectoryError:
            if folder:
                raise
            # The training's "folder" is a file. `begin` reports this error.
            return []
        self._known.add(folder)
        if self._identity is None:
            self._check_root()
        return names

    def _check_root(self) -> None:
        """Check that the folder exists, and was not replaced because of an unmount.

        After an unmount, the mount point remains as an empty folder, in which nothing may be
        created. A folder that is mounted again may have another device or inode number, but it
        contains the names that were listed before.

        :raises OSError: if the folder does not exist, or is such a mount point
        """
        if not self._known:
            return
        about = self.root.stat()
        identity = about.st_dev, about.st_ino
        if self._identity not in (None, identity):
            seen = {folder.partition("/")[0] for folder in self._known} - {""}
            if seen and seen.isdisjoint(path.name for path in self.root.iterdir()):
                raise OSError(
                    errno.ENOTCONN,
                    "the folder is not mounted, and an empty folder has its name; mount it again",
                    str(self.root),
                )
        self._identity = identity

    def exists(self, name: str) -> bool:
        """Return whether a name is in the listing of its folder.

        The name is not looked up, because NFS would then hide it for half a minute if it is created
        soon afterwards.
        """
        folder, _, last = name.rpartition("/")
        return last in self.names(folder)

    def sees(self, name: str) -> bool:
        """Return whether a name is in the listing of the training's folder, without retries.

        If the file system fails, the result is False.
        """
        try:
            return name in self._names("")
        except OSError:
            return False

    def read(self, name: str, listed: bool = False) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        :param name: name in the folder
        :param listed: whether the name must exist, because it was listed or because another file
            depends on it. If such a name is not found, the file system is at fault, and the
            operation is repeated
        :raises Unusable: if the name is not a regular file, or the file is larger than `LARGEST`
        :raises StoreError: if a listed name was removed, or the file belongs to another user in a
            folder that is not shared
        :raises FolderUnreachable: if the file system fails for too long
        """
        try:
            return self.retry(lambda: self._read(name, listed), name)
        except FolderUnreachable as error:
            if isinstance(error.__cause__, FileNotFoundError) and not self.exists(name):
                raise StoreError(
                    f"{self.root / name} was removed, although later files depend on it; copy it "
                    "back, or start in a new folder"
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
                raise Unusable(f"{path} is not a regular file")
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
        """Publish a file; return False if the name already has another content.

        When this method returns, the file is on stable storage. A network file system may report an
        error although it has linked the file. After an error, the result therefore depends only on
        the content that the name has.
        """
        return self.retry(lambda: self.publish_once(name, content), name)

    def publish_once(self, name: str, content: bytes) -> bool:
        """Publish a file like :meth:`publish`, in a single attempt.

        :raises OSError: if the file system fails
        """
        temporary = self._write_temporary(content)
        try:
            linked = self._link(temporary, name, content)
        finally:
            self.discard(temporary)
        if linked:
            self.sync(name.rpartition("/")[0])
        return linked

    def _write_temporary(self, content: bytes) -> Path:
        """Write a new file in tmp/ and flush it to stable storage; return its path."""
        temporary = self.path(f"tmp/{secrets.token_hex(8)}")
        try:
            file = temporary.open("xb")
        except FileNotFoundError:
            # Tools that copy or purge folders remove empty ones.
            self._make("tmp")
            file = temporary.open("xb")
        try:
            with file:
                file.write(content)
                file.flush()
                self._share(file.fileno())
                os.fsync(file.fileno())
        except OSError:
            self.discard(temporary)
            raise
        return temporary

    def _link(self, temporary: Path, name: str, content: bytes) -> bool:
        """Link a finished file to its name; return whether the name now has this content."""
        failed = None
        try:
            self.link(temporary, self.path(name))
        except OSError as error:
            failed = error
        if failed is None:
            return True
        try:
            existing = self._read(name, listed=isinstance(failed, FileExistsError))
        except Unusable:
            return False
        if existing is None:
            if isinstance(failed, FileNotFoundError) and self._make(name.rpartition("/")[0]):
                return self._link(temporary, name, content)
            raise failed
        return existing == content

    def link(self, temporary: Path, path: Path) -> None:
        """Give a finished file a second name, atomically."""
        os.link(temporary, path)

    def mark(self, name: str) -> None:
        """Create an empty file that is only a hint, and do not flush it to stable storage.

        If it is lost in a crash of the server, members read the records from which it follows.
        """
        self.retry(lambda: self._mark(name), name)

    def _mark(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path(name), flags, 0o666)
        except FileExistsError:
            return
        except FileNotFoundError:
            if not self._make(name.rpartition("/")[0]):
                raise
            self._mark(name)
            return
        try:
            self._share(descriptor)
        finally:
            os.close(descriptor)

    def share(self, path: Path) -> None:
        """Make a file readable for other users if the folder is shared, in spite of the umask."""
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
        """Give a new folder the permissions of the training's folder, if the training is shared."""
        if self.shared:
            _change_mode(folder, stat.S_IMODE(self.root.stat().st_mode))

    def sync(self, folder: str) -> None:
        """Flush the names in a folder to stable storage."""
        descriptor = os.open(self.path(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise
        finally:
            os.close(descriptor)

    def begin(self, folders: Iterable[str]) -> None:
        """Create the training's folder with its parents, and ``folders`` in it."""
        self.retry(lambda: self.root.mkdir(parents=True, exist_ok=True))
        for folder in folders:
            self.make(folder)

    def make(self, folder: str) -> None:
        """Create a folder and its parents within the training's folder, which has to exist.

        If the training's folder is shared, the new folders get its permissions, in spite of the
        umask: users who may create files in the training's folder may then also create files in the
        new folders.
        """
        self.retry(lambda: self._make(folder), folder)

    def _make(self, folder: str) -> bool:
        """Create a folder like :meth:`make`, without retries; return whether it was missing."""
        self._check_root()
        is_new = False
        created = self.root
        target = self.path(folder)
        for part in target.relative_to(self.root).parts:
            created /= part
            try:
                created.mkdir()
            except FileExistsError:
                # `Path.is_dir` alone would return False after an error of the file system.
                mode = os.lstat(created).st_mode
                if not (stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and created.is_dir())):
                    raise StoreError(
                        f"{created} is not a folder, but members need a folder of this name; move "
                        "the file away"
                    ) from None
                continue
            self.open_to_others(created)
            is_new = True
        self._known.add(folder)
        return is_new

    def remove(self, name: str) -> None:
        """Remove a file that no member needs; after most errors, the next call tries again."""
        self.discard(self.path(name))

    def discard(self, path: Path) -> None:
        """Remove a file as :meth:`remove` does, given its path instead of its name."""
        unwanted = [*self._unwanted, path]
        self._unwanted = []
        for file in unwanted:
            try:
                file.unlink()
            except (FileNotFoundError, PermissionError):
                continue
            except OSError:
                self._unwanted.append(file)


def _check_kind(path: Path) -> None:
    """Check that a path, which can't be opened, is a regular file.

    If the file system fails, so that this can't be determined, return without an error.

    :raises Unusable: if the path is not a regular file
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        raise Unusable(f"{path} is a symbolic link; put the file there") from None
    if not stat.S_ISREG(mode):
        raise Unusable(f"{path} is not a regular file") from None


def _change_mode(file: int | Path, mode: int) -> None:
    """Change the permissions of a path or descriptor, if the file system has permissions."""
    try:
        os.fchmod(file, mode) if isinstance(file, int) else file.chmod(mode)
    except OSError as error:
        if error.errno not in NO_MODES:
            raise


# -- records -------------------------------------------------------------------------------------


MOST = 1 << 53
"""Upper limit, exclusive, of the numbers in a record."""
FILE = r"\d{6}-[0-9a-f]{16}(-\d{4})?(\.kept)?\.h5"
"""Regular expression for the names of model files; the name of a shard contains the rank."""
KEPT = ".kept.h5"
"""End of the names of models that are never removed, see `TrainingPlan.keep_every`."""


class Version(NamedTuple):
    """Name of a model: the place that trained it, and the round after which it was published."""

    place: int
    round: int


class Shard(NamedTuple):
    """Description of a file with the part of a model that one rank of a member holds."""

    file: str
    """Name of the file in `models`."""
    bytes: int
    """Size of the file, in bytes."""
    checksum: str
    """Checksum of the bytes of the file."""
    first: int
    """Index of the first element of the part in the flat parameters of the model."""
    parameters: int
    """Number of elements of the part."""
    digest: str
    """SHA-256 of the arrays in the file."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base class of all records.

    ``place`` is the place of the member that wrote the record; in a `Closed` record, it is the
    place that was closed. The random ``nonce`` makes the content of each record unique.
    """

    place: int
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """Return the record as JSON, with the name of the class as its kind."""
        values = {k: v for k, v in asdict(self).items() if k not in OPTIONAL or v != OPTIONAL[k]}
        return json.dumps({"kind": type(self).__name__.lower(), **values}).encode()


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """Record 0 of a chain, which names the models and facts with which the member started."""

    inputs: tuple[Version, ...]
    """Models whose average the member started with; empty: its model came from the seed."""
    promise: float
    """Seconds within which the member has to publish its next record."""
    about: dict[str, str]
    """Facts on which the bits of the model depend, such as versions and processor."""


@dataclass(frozen=True, kw_only=True)
class Round(Record):
    """A published round, in which a member has trained one chunk or several."""

    round: int
    claim: str
    """Name of the claim that contains the chunks."""
    chunk: int
    """Number of the first chunk."""
    chunks: int = 1
    """Number of chunks that were trained, one after the other."""
    chunk_s: float = 0.0
    """Seconds that the member needs for a chunk, as measured in its last rounds; 0: unknown."""
    peer: tuple[Version, ...]
    """Model with which the member has averaged its own before this round; empty: none."""
    age: int
    """Lamport clock: ``chunks`` + the larger of the ages of the member's previous model and of its
    peer."""
    progress: int
    """Largest number of a chunk (plus 1) that this model, or a model averaged into it, was trained
    on. It determines the learning rate."""
    promise: float
    """Seconds within which the member has to publish its next record."""
    step: int
    """Step count that is stored with the model."""
    file: str
    """Name of the model's file in `models`; with `shards`, the file of the first one."""
    bytes: int
    """Size of all files of the model together, in bytes."""
    checksum: str
    """Checksum of the bytes of `file`."""
    parameters: int
    """Number of elements of all parameters of the model."""
    digest: str
    """SHA-256 of the arrays in the file; with `shards`, of the text of their digests."""
    shards: tuple[Shard, ...] = ()
    """Files of the model in the order of the ranks, if the member has several ranks."""

    @property
    def version(self) -> Version:
        """Name of this round's model."""
        return Version(self.place, self.round)

    @property
    def began(self) -> int:
        """Age at the beginning of the round."""
        return self.age - self.chunks

    @property
    def files(self) -> tuple[Shard, ...]:
        """Descriptions of the model's files; a member of one rank writes one file."""
        whole = Shard(self.file, self.bytes, self.checksum, 0, self.parameters, self.digest)
        return self.shards or (whole,)


@dataclass(frozen=True, kw_only=True)
class Closed(Record):
    """Last record of a chain: the place has left, or was silent for too long and was closed."""

    round: int
    why: str
    """Reason: "left" or "silent"."""
    by: int
    """Number of the place that closed it."""


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """Claim of a place to the chunks from ``chunk`` to the end of their block.

    The place trains them in order, one or several per round, from round ``first`` on.
    """

    first: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class End(Record):
    """Record of the end of a training: all chunks are trained; it names the models to average."""

    versions: tuple[Version, ...]
    """Models that are averaged."""


OPTIONAL = {"shards": (), "chunks": 1, "chunk_s": 0.0}
"""Defaults of the fields that a record does not contain if they have these values. Earlier versions
do not know these fields, and reject records that contain them."""
KINDS: dict[str, type[Record]] = {
    cls.__name__.lower(): cls for cls in (Start, Round, Closed, Claim, End)
}


def parse(content: bytes, name: str, *kinds: type[Record]) -> Any:
    """Return the record that ``content`` encodes.

    :param content: content of the file
    :param name: name of the file, for messages
    :param kinds: classes that the record may have
    :raises Unusable: if it is no valid record of one of these classes
    """
    try:
        values = json.loads(content)
        cls = KINDS[values.pop("kind")]
        if cls not in kinds:
            raise ValueError(f'its kind "{cls.__name__.lower()}" is not allowed here')
        types = {record_field.name: record_field.type for record_field in fields(cls)}
        if not types.keys() - OPTIONAL.keys() <= values.keys() <= types.keys():
            raise ValueError("some of its fields are missing or unknown")
        record = cls(**{key: _typed(values[key], str(types[key]), key) for key in values})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"{name} is not a record: {str(error)[:100]}") from None
    if isinstance(record, Round) and not record.chunks:
        raise Unusable(f"{name}: its round trained no chunk")
    for file in record.files if isinstance(record, Round) else ():
        if not re.fullmatch(FILE, file.file, re.ASCII):
            raise Unusable(f"{name}: its model has an invalid name, {file.file[:40]!r}")
    if isinstance(record, Round):
        _check_order(record, name)
    return record


def _check_order(record: Round, name: str) -> None:
    """Check that the files of a model contain all of its elements, in the order of the record.

    Some readers use `Shard.first`, and others join the files in this order.

    :raises Unusable: if they do not
    """
    end = 0
    for file in record.files:
        if file.first != end:
            break
        end += file.parameters
    else:
        if end == record.parameters:
            return
    ranges = ", ".join(f"{f.first} to {f.first + f.parameters - 1}" for f in record.files[:4])
    raise Unusable(
        f"{name}: its files contain the elements {ranges}{', …' * (len(record.files) > 4)} of a "
        f"model with {record.parameters}, which do not follow one another"
    )


def _typed(value: Any, kind: str, name: str) -> Any:
    """Return a JSON value as an object of the type of its field.

    :param value: value in the JSON object
    :param kind: annotation of the field
    :param name: name of the field, for messages
    :raises ValueError: if the value does not fit the type of the field, is negative or too large
    """
    if kind == "int" and type(value) is int and 0 <= value < MOST:
        return value
    if kind == "float" and type(value) in (int, float) and 0 <= value < MOST:
        return float(value)
    if kind == "str" and isinstance(value, str) and value.isprintable():
        return value
    if kind.startswith("tuple[Shard") and isinstance(value, list) and len(value) <= 1024:
        return tuple(_shard(fields) for fields in value)
    if kind.startswith("tuple") and isinstance(value, list) and len(value) <= 1024:
        return tuple(Version(*(_typed(number, "int", name) for number in pair)) for pair in value)
    if kind.startswith("dict") and isinstance(value, dict) and len(value) <= 64:
        return {_typed(k, "str", name): _typed(v, "str", name) for k, v in value.items()}
    raise ValueError(f'its field "{name}" has the invalid value {str(value)[:40]!r}')


def _shard(values: Any) -> Shard:
    """Return the description of a model's file that a list of its fields encodes.

    :raises ValueError: if a field is missing or has another type
    """
    texts = ("file", "checksum", "digest")
    kinds = ["str" if name in texts else "int" for name in Shard._fields]
    if not isinstance(values, list) or len(values) != len(kinds):
        raise ValueError(f'its field "shards" has the invalid entry {str(values)[:40]!r}')
    return Shard(*(_typed(v, k, "shards") for v, k in zip(values, kinds, strict=True)))
