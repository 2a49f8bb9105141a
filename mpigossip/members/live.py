"""Exchange of a member through the folder: it publishes its model and reads a peer's each round."""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpigossip.members.outages import FolderUnreachable, cause
from mpigossip.members.pace import peer_weight
from mpigossip.members.parts import Part, cut, joined
from mpigossip.members.place import KEEP, LEASES, NEWEST, Fenced, Place, TooFarBehind
from mpigossip.members.records import RecordStore, Round, Shard
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.manifest import MANIFEST, Entry, Number

T = TypeVar("T")

POLL_S = 2.0
"""Seconds after which a member that waits for a chunk reads the folder again."""

MEASURED_ROUNDS = 5
"""Number of the last rounds whose median is the measured time of a chunk."""


class NoModel(StoreError):
    """Error of a member that finds models to start with, none of which can be read."""


class StopRequested(Exception):
    """Exception that ends the stay of a member that was asked to stop."""


def digest(state: NodeState) -> str:
    """Return the SHA-256 of the arrays of ``state`` and their names, in the order of the names."""
    sha = hashlib.sha256()
    for name, array in sorted(state.stored().items()):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def layout(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Return a digest of 16 characters of the names and shapes of a model's parameters."""
    text = repr((tuple(names), tuple(map(tuple, shapes))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounds_late(own: Sequence[int], began: int) -> int:
    """Return by how many of a member's own rounds a peer's model is late.

    The beginnings of rounds are compared, because a member that trains more chunks in a round
    than its peer ends the round with a larger age.

    :param own: ages at which the member's last rounds began (`Round.began`), oldest first
    :param began: age at which the peer's round began
    :return: number of ages in ``own`` that are greater than ``began``; at most ``len(own) - 1``, so
        that it is an index into ``own`` from its end
    """
    return max(0, min(sum(own_began > began for own_began in own), len(own) - 1))


def correct_for_age(state: NodeState, now: NodeState, then: NodeState, late: int) -> NodeState:
    """Return a peer's late model, corrected so that it can be averaged with the member's model x.

    If a model that is l rounds old were averaged like a new one, it would hold back the training.
    The member therefore computes x ← x + ½ (x_j − x_i) / (1 + l), where x_j is the peer's model,
    and x_i is the model that the member itself had when it was as old as x_j. The difference x_j −
    x_i does not include the effect of the averages of the last l rounds. Without the division, the
    differences between models would therefore grow.

    :param state: the peer's model x_j
    :param now: the member's present model x
    :param then: the member's earlier model x_i, as old as ``state``
    :param late: result l of :func:`rounds_late`; 0: ``state`` is returned unchanged
    """
    if not late:
        return state
    step = (state.parameters - then.parameters) / np.float32(1 + late)
    return replace(state, parameters=now.parameters + step)


def digest_of_shards(shards: Sequence[Shard]) -> str:
    """Return the digest of a model in several files: the SHA-256 of the text of their digests."""
    return hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()


def read_model(
    place: Place,
    version: Round,
    failures: list[Exception] | None = None,
    part: Part | None = None,
) -> NodeState | None:
    """Return a model or a part of it, or None if it is missing, incomplete or damaged.

    A damaged file is reported once.

    :param place: place of the member that reads
    :param version: record of the round that published the model
    :param failures: list to which errors of the file system are added. Such an error does not show
        that the model is damaged, so the caller can read it again. None: these errors are reported
        as damage
    :param part: part of the model to return; only the files that contain elements of it are read.
        None: the whole model
    """
    shards = version.files
    wanted = [n for n in range(len(shards)) if part is None or part.needs(n, len(shards))]
    name = f"models/{version.file}"
    states = []
    try:
        for shard in (shards[n] for n in wanted):
            name = f"models/{shard.file}"
            states.append(_read_shard(place, version, shard))
        if part is None:
            return states[0] if len(shards) == 1 else joined(states)
        if len(shards) == part.ranks:
            return states[0]
        return cut(joined(states), part, shards[wanted[0]].first)
    except (StoreError, OSError) as error:
        note_unreadable(place, name, error, failures)
        return None


def note_unreadable(
    place: Place, name: str, error: Exception, failures: list[Exception] | None
) -> None:
    """Report that a file of a model is damaged, or add an error of the file system to a list.

    A file that was removed is not reported.

    :param place: place of the member that reads
    :param name: name of the file in the folder
    :param error: error that occurred when the file was read
    :param failures: list to which errors of the file system are added; None: these errors are
        reported as damage
    """
    missing = error if isinstance(error, FileNotFoundError) else error.__context__
    if isinstance(missing, FileNotFoundError):
        if failures is not None and place.disk.exists(name):
            failures.append(missing)
    elif failures is not None and cause(error) is not None:
        failures.append(error)
    else:
        # The text after the semicolon is a remedy for checkpoints, which does not help here.
        place.report_once(name, str(error).partition(";")[0])


def check_owner(disk: RecordStore, shard: Shard) -> None:
    """Raise StoreError if a model's file belongs to another user, in a folder that is not shared.

    :param disk: folder of the training
    :param shard: description of the file
    """
    owner = os.lstat(disk.path(f"models/{shard.file}")).st_uid
    if not disk.shared and owner != os.getuid():
        raise StoreError(f"it belongs to user {owner}; give --shared to use files of other users")


def _read_shard(place: Place, version: Round, shard: Shard) -> NodeState:
    """Read one file of a model, and compare it with the record of the model's round.

    :param place: place of the member that reads
    :param version: record of the round that published the model
    :param shard: description of the file in this record
    :raises StoreError: if the file is damaged, or belongs to another user or model
    """
    disk = place.disk
    check_owner(disk, shard)
    entry = Entry(version.place, shard.file, shard.bytes, shard.checksum, shard.parameters)
    state = checkpoint.read_state(disk.root / "models", entry, version.parameters, version.step)
    if digest(state) != shard.digest:
        raise StoreError("its digest differs from the digest in the record of its round")
    if place.layout not in ("", layout(state.names, state.shapes)):
        raise StoreError(
            "its parameters have other names or shapes than the parameters of this member's model"
        )
    return state


def write_checkpoint(
    disk: RecordStore,
    folder: Path,
    steps: int,
    states: Sequence[NodeState],
    job: str,
    meta: dict[str, Number],
) -> Path:
    """Write models as a checkpoint and return its path; others can read it in a shared folder.

    :param disk: folder of the training as a record store
    :param folder: path of the same folder
    :param steps: number of steps of the whole training
    :param states: the models, one for each node of the checkpoint
    :param job: text of the job
    :param meta: entries of the checkpoint's manifest
    """

    def write(temporary: Path) -> list[Entry]:
        return [
            checkpoint.write_node(
                temporary, node, replace(state, numbers=final_numbers(state.numbers, steps))
            )
            for node, state in enumerate(states)
        ]

    return commit_checkpoint(disk, folder, steps, write, job, meta)


def final_numbers(numbers: dict[str, Number], steps: int) -> dict[str, Number]:
    """Return the numbers of a model in the final checkpoint.

    :param numbers: numbers of the model, as its member has published them
    :param steps: number of steps of the whole training
    """
    local = min(steps, int(numbers["local_steps"]))
    return numbers | {"index": steps, "bytes_sent": 0, "local_steps": local}


def commit_checkpoint(
    disk: RecordStore,
    folder: Path,
    steps: int,
    write: Callable[[Path], list[Entry]],
    job: str,
    meta: dict[str, Number],
) -> Path:
    """Begin a checkpoint, let its files be written, give it its name, and return its path.

    :param disk: folder of the training as a record store
    :param folder: path of the same folder
    :param steps: number of steps of the whole training
    :param write: function that writes the files into a folder, and returns their entries
    :param job: text of the job
    :param meta: entries of the checkpoint's manifest
    """
    disk.make("checkpoints")
    temporary = checkpoint.begin(folder, steps)
    disk.open_to_others(temporary)
    entries = write(temporary)
    for entry in entries:
        disk.share(temporary / entry.file)
    path = checkpoint.commit(temporary, folder, steps, entries, job, meta)
    disk.share(path / MANIFEST)
    return path


class ReadCheckpoint(NamedTuple):
    """Command of rank 0 to read this rank's parts of the models of a checkpoint."""

    folder: Path
    """Folder of the checkpoint."""


class OneRank:
    """Collective decisions of a member that has one rank, so that nothing has to be sent.

    `mpigossip.runs.members.ranks.SeveralRanks` has the same methods for a member of several ranks.
    """

    rank = 0
    """Number of this rank; rank 0 alone uses names and records of the folder."""
    part: Part | None = None
    """Part of the model that this rank reads and writes; None: each rank reads whole models, and
    only rank 0 writes them."""
    outage_s = 0.0
    """Seconds for which the file system may fail while a rank writes its part."""

    def decide(self, work: Callable[[], T], place: Place, read: Callable[[Any], Any]) -> T:
        """Return the result of ``work()``, which only rank 0 calls, on all ranks; collective.

        :param work: function that returns a small value that can be pickled. All ranks raise its
            exceptions. It may call :meth:`ask`
        :param place: place of the member; the other ranks copy its counters from rank 0
        :param read: function that the other ranks call with the command that rank 0 passes to
            :meth:`ask`
        """
        return work()

    def ask(self, command: Any, read: Callable[[Any], T]) -> list[T]:
        """Call ``read(command)`` on all ranks; return the results in rank order.

        Only rank 0 calls this method, in the ``work`` of :meth:`decide`. The other ranks then call
        the function ``read`` that they have passed to :meth:`decide`.

        :param command: value that is sent to all ranks; it can be pickled
        :param read: function that rank 0 calls with ``command``
        """
        return [read(command)]

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and an empty list on other ranks; collective.

        The thread that writes models calls this method.
        """
        return [value]

    def agree(self, flag: bool) -> bool:
        """Return whether the flag of any rank is true; collective."""
        return flag

    def waited_for(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which other ranks wait for this rank without a limit."""
        return contextlib.nullcontext()


class FolderExchange:
    """Exchange of a member with its peers, through the files of their models in the folder.

    Models are written in a background thread while the next round is trained.

    If a member has several ranks, each rank has such an object, and all ranks call its methods
    together. Rank 0 alone decides, reads and writes records, and uses the place. Each rank reads
    and writes its part of the models.
    """

    def __init__(
        self,
        place: Place,
        stopping: Callable[[], bool],
        poll_s: float = POLL_S,
        ranks: OneRank | None = None,
    ):
        """Start the thread that writes models.

        :param place: place of this member
        :param stopping: function that returns whether the member was asked to leave
        :param poll_s: seconds after which a member without work reads the folder again
        :param ranks: ranks of the member; None: one rank
        """
        self.place = place
        self.ranks = ranks or OneRank()
        self._read_states: dict[Round, NodeState] = {}
        """States that this rank has read in the present decision."""
        self._stored: list[Any] = []
        """States that this rank has read from a checkpoint."""
        self._last_models: list[tuple[int, NodeState]] = []
        """For each of the last rounds, the age at which it began, and the model after it."""
        self.poll_s = poll_s
        self.promises = 1
        """Longest silence, in leases, that this member promises for its next stay."""
        self._leave_requested = stopping
        self._stop_seen = False
        self._looked_at = float("-inf")
        self._chunk_time = 0.0
        self._chunk_seconds: list[float] = []
        """Seconds per chunk in each of the last rounds."""
        self.peer_weight = 0.5
        """Weight of the model that :meth:`receive` returned last, see `pace.peer_weight`."""
        place.disk.outages.stopping = stopping
        self._writer = ThreadPoolExecutor(1, "models")
        self._written: Future | None = None

    def stopping(self) -> bool:
        """Return whether this member was asked to leave, or the folder contains a file STOP."""
        return self.ranks.agree(self._stopping())

    def _stopping(self) -> bool:
        """Return whether this rank was asked to leave, or sees a file STOP in the folder."""
        now = time.monotonic()
        looks = self.ranks.rank == 0 and not self._stop_seen
        if looks and now - self._looked_at >= self.poll_s:
            self._looked_at, self._stop_seen = now, self.place.disk.sees("STOP")
        return self._leave_requested() or self._stop_seen

    def decide(self, work: Callable[[], T]) -> T:
        """Return the result of ``work()``, which only rank 0 calls, on all ranks; collective."""
        self._read_states = {}
        return self.ranks.decide(work, self.place, self._read_part)

    def ended(self) -> bool:
        """Return whether the training has ended."""
        return self.decide(lambda: self.place.ended() is not None)

    def _read(self, version: Round, failures: list[Exception] | None = None) -> NodeState | None:
        """Read a model by :func:`read_model` on all ranks; return the part of this rank.

        If any rank can't read its part, return None.
        """
        answers = self.ranks.ask((version, failures is not None), self._read_part)
        for _, errors, lines in answers:
            for line in lines:
                self.place.report(line)
            if failures is not None:
                failures += errors
        return self._read_states.get(version) if all(was_read for was_read, *_ in answers) else None

    def open_model(self, version: Round, failures: list[Exception] | None) -> Any:
        """Return this rank's part of a model; None, as in :func:`read_model`, if it is unusable."""
        return read_model(self.place, version, failures, self.ranks.part)

    def _read_part(self, command: Any) -> Any:
        """Read the part of this rank.

        :param command: record of the round whose model is read, and whether to return errors of the
            file system; or a `ReadCheckpoint`
        :return: whether the part was read, errors of the file system, and lines that rank 0 has to
            report; or the result of :meth:`_read_stored`
        """
        if isinstance(command, ReadCheckpoint):
            return self._read_stored(command.folder)
        version, keeps_failures = command
        lines: list[str] = []
        report = self.place.report
        if self.ranks.rank:
            self.place.report = lines.append
        failures: list[Exception] | None = [] if keeps_failures else None
        try:
            state = self.open_model(version, failures)
        finally:
            self.place.report = report
        if state is not None:
            self._read_states[version] = state
        return state is not None, [cause(error) or error for error in failures or ()], lines

    def local_parts(self, versions: Sequence[Round]) -> list[NodeState]:
        """Return this rank's parts of the models ``versions``, read in the last decision."""
        states = self._read_states
        self._read_states = {}
        return [states[version] for version in versions]

    @contextlib.contextmanager
    def stay(self) -> Iterator[None]:
        """Return a context manager for one stay; if its block fails, it leaves the place.

        If other members have closed the place, or if its model has become too old, the block ends
        without an error, and the caller has to join again. If the place was closed, the number of
        leases for which the member may be silent doubles in its next stay, up to `LEASES`.
        """
        place = self.place
        try:
            yield
        except Fenced:
            self.promises = min(2 * self.promises, LEASES)
            place.report(
                f"place {place.number} was silent for too long and was closed; joining again"
            )
        except TooFarBehind as error:
            reason = str(error) or f"place {place.number} fell behind the others"
            place.report(f"{reason}; joining again")
            self.leave()
        except BaseException:
            # If an outage has ended this stay, leaving fails, too. Its error must not replace the
            # first one.
            is_over = place.disk.outages.given_up
            with contextlib.suppress(*(FolderUnreachable, StoreError) if is_over else ()):
                self.leave()
            raise

    def begin(self, about: dict[str, str]) -> list[NodeState]:
        """Join with a new place; return the models whose average the member starts with.

        :param about: facts for the first record, see :func:`~mpigossip.runs.members.join.about`;
            models must have the parameter layout that these facts name
        :return: the models; an empty list if the member starts with a model that is initialized
            from the seed
        :raises Fenced: if other members have closed the new place
        :raises NoModel: if there are models, but none of them can be read
        :raises StopRequested: if the member is asked to leave while it waits for a readable model
        """
        self.place.layout = about.get("layout", "")
        self.limit_outages()

        def work() -> list[Round]:
            self.place.join(self.promises)
            inputs, _ = self._current(self.place.beginnings, NEWEST)
            self.place.start(inputs, about)
            return inputs

        states = self.local_parts(self.decide(work))
        self._last_models = []
        return states

    def limit_outages(self) -> None:
        """Let operations of this rank fail for at most one lease, and let others wait as long."""
        lease_s = self.place.plan.lease_s
        self.place.disk.outages.limit_s = lease_s
        self.ranks.outage_s = lease_s

    def _current(
        self, choose: Callable[[], list[Round]], limit: int
    ) -> tuple[list[Round], list[NodeState]]:
        """Read models like :meth:`newest`, from the versions that ``choose`` returns.

        If no model can be read, ``choose`` is called again, because newer versions may have
        replaced the first versions in the meantime. A stale listing may hide the newer versions for
        a while. If a place that is not closed has removed its models, ``choose`` is therefore
        called again for at most one lease.

        :param choose: function that returns versions in the order of preference
        :param limit: largest number of models to read
        :raises StopRequested: if the member is asked to leave while it waits
        """
        place = self.place
        deadline = place.now() + place.plan.lease_s
        versions = choose()
        while True:
            try:
                return self.newest(versions, limit)
            except NoModel:
                previous = versions
                versions = choose()
                waits = place.now() < deadline and any(map(self._is_replaced, versions))
                if not versions or (versions == previous and not waits):
                    raise
            if versions == previous:
                if self._stopping():
                    raise StopRequested
                time.sleep(self.poll_s)

    def _is_replaced(self, version: Round) -> bool:
        """Return whether a file of this model was removed, although its place is not closed.

        :param version: record of the round that published the model
        """
        listed = all(self.place.disk.exists(f"models/{shard.file}") for shard in version.files)
        return not listed and self.place.refresh(version.place).closed is None

    def newest(self, versions: list[Round], limit: int) -> tuple[list[Round], list[NodeState]]:
        """Read models like :meth:`readable`; if none can be read, try earlier rounds of the places.

        :param versions: versions in the order of preference
        :param limit: largest number of models to read
        :return: the versions that were read, and their models
        :raises NoModel: if none of the models that the places have kept can be read
        """
        return self.place.disk.retry(lambda: self._newest(versions, limit), "models")

    def _newest(self, versions: list[Round], limit: int) -> tuple[list[Round], list[NodeState]]:
        failures: list[Exception] = []
        for _ in range(KEEP):
            states = self._undamaged(versions, limit, failures)
            if states or not versions:
                return [*states], [*states.values()]
            versions = self.place.before(versions) or versions
        raise self._no_model(len(versions), failures)

    def write_result(
        self,
        folder: Path,
        steps: int,
        versions: list[Round],
        states: list[NodeState],
        job: str,
        meta: dict[str, Number],
    ) -> None:
        """Write the final checkpoint; only rank 0 calls this, in the ``work`` of a decision.

        :param folder: folder of the training
        :param steps: number of steps of the whole training
        :param versions: records of the rounds whose models are the nodes of the checkpoint
        :param states: these models, as :meth:`readable` has returned them
        :param job: text of the job
        :param meta: entries of the checkpoint's manifest
        """
        if self.ranks.part is not None:
            read = (read_model(self.place, version) for version in versions)
            states = [state for state in read if state is not None]
        disk = self.place.disk
        disk.retry(lambda: write_checkpoint(disk, folder, steps, states, job, meta), "checkpoints")

    def read_checkpoint(self, path: Path) -> list[Any]:
        """Return this rank's parts of the models of a checkpoint; collective.

        If the file system fails for any rank, all ranks read again.

        :param path: folder of the checkpoint
        """

        def read() -> None:
            for error in self.ranks.ask(ReadCheckpoint(path), self._read_part):
                if error is not None:
                    raise error

        self.decide(lambda: self.place.disk.retry(read, "checkpoints"))
        states = self._stored
        self._stored = []
        return states

    def _read_stored(self, path: Path) -> Exception | None:
        """Read this rank's parts of the models of a checkpoint; return the error if that fails."""
        self._stored = []
        try:
            self._stored = self.stored(path)
        except (OSError, StoreError, ValueError, LookupError) as error:
            return cause(error) or error
        return None

    def stored(self, path: Path) -> list[NodeState]:
        """Return this rank's parts of the models of a checkpoint.

        :param path: folder of the checkpoint
        """
        manifest = checkpoint.read_manifest(path)
        states = [checkpoint.read_node(path, node, manifest) for node in range(manifest.n)]
        part = self.ranks.part
        return states if part is None else [cut(state, part) for state in states]

    def readable(self, versions: list[Round], limit: int) -> tuple[list[Round], list[NodeState]]:
        """Return the first ``limit`` versions that can be read, and their models.

        A model is skipped only if it was removed or is damaged. If the file system fails for
        one of them, all are read again, for at most one lease.

        :param versions: versions in the order of preference
        :param limit: largest number of models to read
        :raises StoreError: if there are versions, but no model can be read
        """
        return self.place.disk.retry(lambda: self._readable(versions, limit), "models")

    def _readable(self, versions: list[Round], limit: int) -> tuple[list[Round], list[NodeState]]:
        failures: list[Exception] = []
        states = self._undamaged(versions, limit, failures)
        # An error of the file system says nothing about a model, so it must not change which
        # models are averaged.
        if failures and len(states) < min(limit, len(versions)):
            raise failures[0]
        if versions and not states:
            raise self._no_model(len(versions), failures)
        return [*states], [*states.values()]

    def _undamaged(
        self, versions: list[Round], limit: int, failures: list[Exception]
    ) -> dict[Round, NodeState]:
        states: dict[Round, NodeState] = {}
        for version in versions:
            state = self._read(version, failures) if len(states) < limit else None
            if state is not None:
                states[version] = state
        return states

    def _no_model(self, count: int, failures: list[Exception]) -> Exception:
        """Return the exception to raise if no model can be read.

        If there is an error of the file system, return this error, so that the caller reads the
        models again. Otherwise, return a :class:`NoModel`.

        :param count: number of models that the member has tried to read
        :param failures: errors of the file system, see :func:`read_model`
        """
        text = f"{self.place.disk.root}: none of {count} models can be read; "
        text += "copy one back to models/, or start in a new folder"
        return failures[0] if failures else NoModel(text)

    def chunk(self) -> tuple[int, int] | None:
        """Return the first chunk to train and the progress; None after the end of the training.

        The progress is a number of chunks, which determines the learning rate. If no chunk can be
        claimed because other members train the last ones, the call waits. When all chunks are done,
        it publishes the record END.

        :raises Fenced: if other members have closed this place
        :raises StopRequested: if the member is asked to leave while it waits
        """
        return self.decide(self._chunk)

    def _chunk(self) -> tuple[int, int] | None:
        while True:
            if not self.place.remaining:
                self.written()
            chunk = self.place.chunk()
            if chunk is not None:
                self._chunk_time = self.place.now()
                return chunk, self.place.progress
            if self.place.ended():
                return None
            if self.place.ledger.finished:
                versions, _ = self._current(self.place.endings, 64)
                self.place.end(versions)
                continue
            if self._stopping():
                raise StopRequested
            self.place.report_wait()
            time.sleep(self.poll_s)

    @property
    def chunks(self) -> int:
        """Number of consecutive chunks to train, from the one that :meth:`chunk` returned last."""
        return self.place.chunks

    def round_seconds(self) -> float:
        """Return the seconds since the last chunk was claimed, without outages of the folder."""
        return self.place.now() - self._chunk_time

    def _measure_chunk(self) -> None:
        """Set the place's seconds per chunk to the median of the last `MEASURED_ROUNDS` rounds.

        If all rounds have one chunk, nothing is measured, so that records stay as they were in
        earlier versions.
        """
        if self.place.plan.longest == 1:
            return
        # A subtracted outage may make a short time negative.
        seconds = max(0.0, self.round_seconds()) / self.place.chunks
        self._chunk_seconds = [*self._chunk_seconds[1 - MEASURED_ROUNDS :], seconds]
        self.place.chunk_s = statistics.median(self._chunk_seconds)

    def send(self, state: NodeState) -> int:
        """Publish the model of this round in the background; return its size in bytes.

        The call first waits until the model of the previous round is published.

        :raises Fenced: if other members have closed this place
        """
        draft, claim = self._draft(int(state.numbers["index"]))
        saved = replace(state, arrays={}, pieces={})
        self._last_models = [*self._last_models[1 - KEEP :], (draft.began, saved)]
        self._publish(draft, claim, lambda: self._shard(draft, state))
        return sum(array.nbytes for array in state.stored().values())

    def _draft(self, step: int) -> tuple[Round, int]:
        """Wait until the previous round is published; return the record of the present round.

        :param step: number of steps of the model
        :return: the record, without its model; and the chunks that remain of the claim
        """
        place = self.place
        if self.ranks.rank:
            self.written()

        def prepare() -> tuple[Round, int]:
            self._measure_chunk()
            self.written()
            return place.draft(step), place.remaining

        return self.decide(prepare)

    def _publish(
        self, draft: Round, claim: int, shard: Callable[[], Shard | Exception | None]
    ) -> None:
        """Publish a round in the background, after the files of its model are written.

        :param draft: record of the round, without its model
        :param claim: number of chunks that remain of the claim
        :param shard: function that returns the description of this rank's file, as :meth:`_shard`
            does
        """
        place = self.place

        def work() -> None:
            if self.ranks.rank and self.ranks.part is None:
                return
            written = self.ranks.collect(shard())
            if self.ranks.rank:
                return
            shards = [shard for shard in written if isinstance(shard, Shard)]
            errors = [error for error in written if isinstance(error, Exception)]
            # Members that have closed a place remove its files, even unfinished ones. The cause of
            # another rank's error is not sent, so that its kind does not show this.
            if errors and not self._is_closed(draft):
                raise errors[0]
            if len(shards) < len(written):
                place.fenced = True
                return
            several = len(shards) > 1
            place.publish(
                draft,
                claim == 0,
                file=shards[0].file,
                bytes=sum(shard.bytes for shard in shards),
                checksum=shards[0].checksum,
                parameters=sum(shard.parameters for shard in shards),
                digest=digest_of_shards(shards) if several else shards[0].digest,
                shards=tuple(shards) if several else (),
            )

        self._written = self._writer.submit(work)

    def _is_closed(self, draft: Round) -> bool:
        """Return whether other members have closed the place; False if this can't be determined."""
        try:
            return self.place.closed_by_others(draft)
        except (FolderUnreachable, StoreError, OSError):
            return False

    def _shard(self, draft: Round, state: NodeState) -> Shard | Exception | None:
        """Write the part of this rank to a file; return the description of the file for the record.

        If writing fails, return the exception instead of raising it, because rank 0 waits for a
        result of each rank. If other members have closed the place, return None.

        :param draft: record of the round, without its model
        :param state: part of the model that this rank holds
        """
        try:
            entry = self.place.disk.retry(lambda: self._write(draft, state), "models")
        except Exception as error:  # noqa: BLE001
            return error
        if entry is None:
            return None
        part = self.ranks.part
        first = part.first if part else 0
        return Shard(
            entry.file, entry.bytes, entry.checksum, first, entry.parameters, digest(state)
        )

    def _write(self, draft: Round, state: NodeState) -> Entry | None:
        """Write a model under a new name; return None if other members have closed the place.

        Some time after members have closed a place, they remove its files, even unfinished files.
        Writing then fails, although there is no outage of the file system.

        :param draft: record of the round, without its model
        :param state: the model, or the part of it that this rank holds
        """
        disk = self.place.disk
        rank = self.ranks.rank if self.ranks.part else None
        path = disk.path(f"models/{self.place.model_name(draft, rank)}")
        try:
            entry = checkpoint.write_state(path, draft.place, state)
            disk.share(path)
        except (StoreError, OSError) as error:
            disk.discard(path)
            if self.ranks.rank == 0 and self.place.closed_by_others(draft):
                return None
            # The other ranks do not know whether an empty folder is the mount point of a file
            # system that is not mounted. Rank 0 writes a file at the same time.
            if self.ranks.rank == 0 and isinstance(cause(error), FileNotFoundError):
                disk.make("models")
            raise
        return entry

    def written(self) -> None:
        """Wait until the model that is being written in the background is published.

        :raises Fenced: if other members have closed this place
        """
        if self._written is not None:
            written = self._written
            self._written = None
            written.result()
        if self.place.fenced:
            raise Fenced

    def receive(self) -> NodeState | None:
        """Return a peer's model to average with; None if no peer has a new model.

        If the peer's model is late, :func:`correct_for_age` has corrected it.

        :raises TooFarBehind: if this member's model is too old to be averaged
        """

        def find() -> Round | None:
            for version in self.place.peers():
                if self._read(version) is not None:
                    self.place.took(version)
                    return version
            return None

        version = self.decide(find)
        if version is None:
            return None
        (state,) = self.local_parts([version])
        self.peer_weight = peer_weight(self.chunks, version.chunks)
        rounds = rounds_late([began for began, _ in self._last_models], version.began)
        return correct_for_age(
            state, self._last_models[-1][1], self._last_models[-1 - rounds][1], rounds
        )

    def leave(self) -> None:
        """Wait until the last model is published, then close the place unless others have done so.

        This is not collective: ranks other than 0 only wait until their part is written.
        """
        if self.place.number < 0:
            return
        with contextlib.suppress(Fenced):
            self.written()
            if self.ranks.rank == 0:
                self.place.leave()

    def close(self) -> None:
        """Stop the thread that writes models."""
        self._writer.shutdown()
