"""Exchange of a member whose ranks hold, write and read only their own elements of a model.

:class:`~mpigossip.members.live.FolderExchange` reads and writes states that are in memory. This
subclass returns open files instead, and writes from an iterator over pieces, so that a rank never
has a copy of its part in memory.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpigossip.members.live import (
    FolderExchange,
    check_owner,
    commit_checkpoint,
    final_numbers,
    layout,
    note_unreadable,
    rounds_late,
)
from mpigossip.members.outages import FolderUnreachable, cause
from mpigossip.members.place import KEEP, Fenced, TooFarBehind
from mpigossip.members.records import Round, Shard
from mpigossip.store import StoreError, checkpoint, manifest, piecewise
from mpigossip.store.manifest import Entry, Manifest
from mpigossip.store.piecewise import PartSource, StoredModel, WrittenPart

T = TypeVar("T")


VANISHED = (errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN)
"""Errors of reading an open file that last: the file was removed, or the file system of its
descriptor is not mounted any more."""


class ModelVanished(TooFarBehind, StoreError):
    """Error of a model whose files can't be read any more, although they were opened before."""


class PeerModel(NamedTuple):
    """A peer's model to average with, in open files."""

    peer: StoredModel
    """Model of the peer."""
    then: StoredModel | None
    """This member's own model of the same age, see `live.correct_for_age`; None: not late."""
    late: int
    """Result of `live.rounds_late`."""

    def close(self) -> None:
        """Close the files of both models."""
        self.peer.close()
        if self.then is not None:
            self.then.close()


class WritePart(NamedTuple):
    """Command of rank 0 to write this rank's part of a model of the final checkpoint."""

    folder: Path
    """Folder of the checkpoint."""
    node: int
    """Index of the model in the checkpoint."""
    version: Round
    """Record of the round that has published the model, which is open on all ranks."""
    steps: int
    """Number of steps of the whole training."""


class StreamedExchange(FolderExchange):
    """Exchange through the folder, by pieces of files; each rank has its part (`OneRank.part`).

    Methods that return states in the base class return a `StoredModel` of the files with the
    elements of this rank. The caller has to close it.
    """

    _read_states: dict[Round, Any]
    _last_models: list[tuple[int, Any]]
    """For each of the last rounds, the age at which it began, and its number."""

    def decide(self, work: Callable[[], T]) -> T:
        self._close_read()
        return super().decide(work)

    def _close_read(self) -> None:
        for model in self._read_states.values():
            model.close()
        self._read_states = {}

    def local_parts(self, versions: Sequence[Round]) -> list[Any]:
        models = [self._read_states.pop(version) for version in versions]
        self._close_read()
        return models

    @property
    def own(self) -> tuple[int, int]:
        """Index of the first element of this rank's part, and the index after the last."""
        part = self.ranks.part
        assert part is not None
        return part.first, part.first + part.count

    def attempt(self, operation: Callable[[], T]) -> T:
        """Return the result of reading open files, which is repeated if the file system fails.

        In the meantime, the other ranks wait for this rank without a limit.

        :raises ModelVanished: if a file was removed, or belongs to a file system that was unmounted
        """
        try:
            return operation()
        except (OSError, StoreError) as error:
            failed = cause(error)
            if failed is None:
                raise
            if failed.errno in VANISHED:
                raise ModelVanished(str(error)) from error
        with self.ranks.waited_for():
            return self.place.disk.retry(operation, "models")

    def _after_failure(self, draft: Round, error: Exception) -> None:
        """Prepare to repeat an operation on this rank's new file.

        Ranks other than 0 create no folder: they do not know whether an empty folder is the mount
        point of a file system that is not mounted. Rank 0 writes a file at the same time.

        :param draft: record of the round
        :param error: error of the operation
        :raises Fenced: if other members have closed this place. Some time later, they remove its
            files, even unfinished ones
        """
        is_missing = isinstance(cause(error), FileNotFoundError)
        is_first = self.ranks.rank == 0
        if (is_missing or is_first) and self.place.closed_by_others(draft):
            raise Fenced
        if is_missing and is_first:
            self.place.disk.make("models")

    def _repeated(self, draft: Round, operation: Callable[[], T]) -> T:
        """Return the result of an operation on this rank's new file; repeat it if that fails.

        In the meantime, the other ranks wait for this rank without a limit.

        :param draft: record of the round
        :param operation: function that may be called again after any error
        :raises Fenced: if other members have closed this place
        """
        try:
            return operation()
        except (OSError, StoreError) as error:
            if cause(error) is None:
                raise
            first = error

        def again() -> T:
            try:
                return operation()
            except (OSError, StoreError) as error:
                self._after_failure(draft, error)
                raise

        with self.ranks.waited_for():
            self._after_failure(draft, first)
            return self.place.disk.retry(again, "models")

    def open_model(self, version: Round, failures: list[Exception] | None) -> StoredModel | None:
        disk = self.place.disk
        name = f"models/{version.file}"
        model = None
        shards = overlapping([(s, s.first, s.parameters) for s in version.files], *self.own)

        def note_name(file: str) -> None:
            nonlocal name
            name = f"models/{file}"

        try:
            for shard in shards:
                note_name(shard.file)
                check_owner(disk, shard)
            files = [(entry_of(version, shard), shard.first) for shard in shards]
            length = version.parameters
            model = StoredModel(disk.root / "models", files, length, version.step, note_name)
            for index, shard in enumerate(shards):
                note_name(shard.file)
                model.check(index, shard.digest)
            note_name(version.file)
            if self.place.layout not in ("", layout(model.names, model.shapes)):
                raise StoreError(
                    "its parameters have other names or shapes than the parameters of this "
                    "member's model"
                )
        except (StoreError, OSError) as error:
            if model is not None:
                model.close()
            note_unreadable(self.place, name, error, failures)
            return None
        return model

    def stored(self, path: Path) -> list[Any]:
        content = checkpoint.read_manifest(path)
        models: list[StoredModel] = []
        try:
            for node in range(content.n):
                models.append(self._open_stored(path, content, node))
                for index in range(models[-1].count):
                    models[-1].digest(index)  # raises an error if values are not finite
        except BaseException:
            for model in models:
                model.close()
            raise
        return models

    def _open_stored(self, path: Path, content: Manifest, node: int) -> StoredModel:
        """Open this rank's files of a model of a checkpoint."""
        entries = content.of(node)
        firsts = accumulate((entry.parameters for entry in entries), initial=0)
        files = [(e, first, e.parameters) for e, first in zip(entries, firsts, strict=False)]
        length = sum(entry.parameters for entry in entries)
        begins = {entry: first for entry, first, _ in files}
        opened = [(entry, begins[entry]) for entry in overlapping(files, *self.own)]
        return StoredModel(path, opened, length, content.step)

    def _read_part(self, command: Any) -> Any:
        if not isinstance(command, WritePart):
            return super()._read_part(command)
        model = self._read_states[command.version]
        path = command.folder / manifest.name(command.node, self.ranks.rank)
        numbers = final_numbers(model.numbers, command.steps)
        try:
            source = piecewise.source_of(model, *self.own, numbers)
            if self.ranks.rank:
                source = source._replace(arrays={})
            return piecewise.write(path, command.node, self.ranks.rank, source).entry()
        except piecewise.DamagedPart as error:
            return OSError(errno.EIO, str(error), str(path))  # all files are then written again
        except (OSError, StoreError, ValueError, LookupError) as error:
            return cause(error) or error

    def write_result(
        self,
        folder: Path,
        steps: int,
        versions: list[Round],
        states: list[Any],
        job: str,
        meta: dict[str, Any],
    ) -> None:
        disk = self.place.disk

        def write(temporary: Path) -> list[Entry]:
            entries: list[Entry] = []
            for node, version in enumerate(versions):
                command = WritePart(temporary, node, version, steps)
                for answer in self.ranks.ask(command, self._read_part):
                    if isinstance(answer, Exception):
                        raise answer
                    entries.append(answer)
            return entries

        disk.retry(lambda: commit_checkpoint(disk, folder, steps, write, job, meta), "checkpoints")

    def send(self, source: PartSource) -> int:  # type: ignore[override]
        """Write this rank's part, then publish the model in the background; return its bytes.

        The elements are written before this method returns, because the next step changes them.
        Flushing them to stable storage, and the record, follow in the background.

        :raises Fenced: if other members have closed this place
        """
        draft, claim = self._draft(int(source.numbers["index"]))
        self._last_models = [*self._last_models[1 - KEEP :], (draft.began, draft.round)]
        written = self._write_pieces(draft, source)
        self._publish(draft, claim, lambda: self._flush(draft, written))
        return source.nbytes

    def _write_pieces(self, draft: Round, source: PartSource) -> WrittenPart | Exception:
        """Write this rank's part; return the exception if that fails; collective.

        :raises TimeoutError: if another rank does not send its elements
        """
        disk = self.place.disk
        rank = self.ranks.rank
        name = f"models/{self.place.model_name(draft, rank)}"

        def attempt(operation: Callable[[Path], T]) -> T:
            return self._repeated(draft, lambda: operation(disk.path(name)))

        path = disk.root / name
        try:
            return piecewise.write(path, draft.place, rank, source, attempt)
        except TimeoutError:
            # It is an error of a wait for other ranks: errors of the file system are StoreErrors.
            raise
        except (OSError, StoreError, ValueError, FolderUnreachable, Fenced) as error:
            # Rank 0 waits for a result of each rank.
            disk.discard(path)
            return error

    def _flush(self, draft: Round, written: WrittenPart | Exception) -> Shard | Exception | None:
        """Flush a file to stable storage; return its description, as :meth:`_shard` does.

        The file system reports only once that it has lost bytes of a file. After any error, the
        file is therefore copied, its bytes are compared, and the copy is flushed instead.
        """
        if isinstance(written, Exception):
            return None if isinstance(written, Fenced) else written
        disk = self.place.disk
        is_intact = written.is_intact
        part = written

        def flush() -> Entry:
            nonlocal is_intact, part
            if not is_intact:
                name = f"models/{self.place.model_name(draft, self.ranks.rank)}"
                part = written._replace(path=disk.root / name)
            is_intact = False
            try:
                path = disk.path(f"models/{part.path.name}")
                if part.path != written.path:
                    part = written.copy(path)
                entry = part.entry()
                disk.share(path)
            except BaseException:
                if part.path != written.path:
                    disk.discard(part.path)
                raise
            return entry

        entry: Entry | None = None
        try:
            entry = self._repeated(draft, flush)
        except Fenced:
            return None
        except piecewise.DamagedPart as error:
            text = f"{error}; this member ends, and the same command joins again"
            return FolderUnreachable(text)
        except Exception as error:  # noqa: BLE001 - rank 0 waits for a result of each rank
            return error
        finally:
            if entry is None or part.path != written.path:
                disk.discard(written.path)
        begin, _ = self.own
        return Shard(
            entry.file, entry.bytes, entry.checksum, begin, entry.parameters, written.digest
        )

    def receive(self) -> Any:
        """Return a `PeerModel` to average with; None if no peer has a new model.

        :raises TooFarBehind: if this member's model is too old to be averaged
        """
        place = self.place
        began = [age for age, _ in self._last_models]

        def find() -> tuple[Round, Round | None, int] | None:
            for version in place.peers():
                late = rounds_late(began, version.began)
                own: Round | None = None
                if late:
                    number = self._last_models[-1 - late][1]
                    record = place.record(place.number, number, listed=True)
                    if not isinstance(record, Round) or not self._read_own(record):
                        continue
                    own = record
                if self._read(version) is not None:
                    place.took(version)
                    return version, own, late
            return None

        chosen = self.decide(find)
        if chosen is None:
            return None
        version, own, late = chosen
        peer, *then = self.local_parts([version] if own is None else [version, own])
        return PeerModel(peer, then[0] if then else None, late)

    def _read_own(self, version: Round) -> bool:
        """Read a model of this member; repeat this if the file system fails.

        A peer's model can be skipped after such an error, but this model is compared with the
        models of all late peers.

        :param version: record of one of this place's last rounds
        :return: whether the model was read; False if it is damaged or was removed
        """

        def read() -> bool:
            failures: list[Exception] = []
            was_read = self._read(version, failures) is not None
            if failures and not was_read:
                raise failures[0]
            return was_read

        return self.place.disk.retry(read, "models")


def entry_of(version: Round, shard: Shard) -> Entry:
    """Return the entry of a file of a model, by which it is read."""
    return Entry(version.place, shard.file, shard.bytes, shard.checksum, shard.parameters)


def overlapping(files: Sequence[tuple[T, int, int]], begin: int, end: int) -> list[T]:
    """Return the files that contain elements of a range.

    The first file is always returned for a range that begins with element 0, because it has the
    small arrays, and at least one file is returned, because each has the names of the parameters.

    :param files: files in the order of their elements, with the index of the first element and the
        number of elements
    :param begin: index of the first element of the range
    :param end: index after the last element
    """
    wanted = [
        file
        for index, (file, first, count) in enumerate(files)
        if (first < end and begin < first + count) or (index == 0 and begin == 0)
    ]
    return wanted or [files[-1][0]]
