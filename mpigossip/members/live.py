"""Exchange of a member through the folder: in each round, it publishes its model and reads one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from mpigossip.members.outages import FolderUnreachable, cause
from mpigossip.members.pace import peer_weight
from mpigossip.members.place import KEEP, LEASES, NEWEST, Fenced, Place, TooFarBehind
from mpigossip.members.records import Round
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.manifest import Entry

POLL_S = 2.0
"""Seconds after which a member that waits for a chunk reads the folder again."""

MEASURED_ROUNDS = 5
"""Number of the last rounds whose median is the measured time of a chunk."""


class NoModel(StoreError):
    """Error if there is no undamaged model with which a member could start."""


class StopRequested(Exception):
    """The member was asked to stop."""


def digest(state: NodeState) -> str:
    """Return the SHA-256 of a model's arrays and their names, in the order of the names."""
    sha = hashlib.sha256()
    for name, array in sorted(state.stored().items()):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def layout(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Return a digest of 16 characters of the names and shapes of a model's parameters."""
    text = repr((tuple(names), tuple(map(tuple, shapes))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounds_late(own: Sequence[int], age: int) -> int:
    """Return the number of a member's last rounds that are newer than a peer's model.

    :param own: ages of the models of the member's last rounds, oldest first
    :param age: age of the peer's model
    :return: at most ``len(own) - 1``, so that it is an index into ``own`` from its end
    """
    return max(0, min(sum(own_age > age for own_age in own), len(own) - 1))


def correct_for_age(state: NodeState, now: NodeState, then: NodeState, late: int) -> NodeState:
    """Return a peer's late model, corrected so that it can be averaged with the present own model.

    If a model that is l rounds old were averaged like a new one, it would hold back the training.
    The member therefore computes x ← x + ½ (x_j − x_i) / (1 + l), where x_j is the peer's model
    and x_i is the own model of the same age. The division is necessary because the difference is
    l rounds old and does not yet include the effect of the averages since then: without it, the
    difference would grow.

    :param state: the peer's model x_j
    :param now: the own model x at present
    :param then: the own model x_i, as old as ``state``
    :param late: result l of :func:`rounds_late`; 0: ``state`` is returned unchanged
    """
    if not late:
        return state
    step = (state.parameters - then.parameters) / np.float32(1 + late)
    return replace(state, parameters=now.parameters + step)


def read_model(
    place: Place, version: Round, failures: list[Exception] | None = None
) -> NodeState | None:
    """Return a model, or None if it is missing, incomplete or damaged.

    Damage is reported once per file.

    :param place: place of the member that reads
    :param version: record of the round that published the model
    :param failures: list to which errors of the file system are added. They do not show that the
        model is damaged, so the caller can read it again. None: they are reported like damage
    """
    disk = place.disk
    name = f"models/{version.file}"
    try:
        owner = os.lstat(disk.path(name)).st_uid
        if not disk.shared and owner != os.getuid():
            raise StoreError(f"it belongs to user {owner}; give --shared to use it")
        entry = Entry(
            version.place, version.file, version.bytes, version.checksum, version.parameters
        )
        state = checkpoint.read_state(disk.root / "models", entry, version.parameters, version.step)
        if digest(state) != version.digest:
            raise StoreError("it is not the model that its record describes")
        if place.layout not in ("", layout(state.names, state.shapes)):
            raise StoreError("its parameters differ from those of this member's model")
        return state
    except (StoreError, OSError) as error:
        missing = error if isinstance(error, FileNotFoundError) else error.__context__
        if isinstance(missing, FileNotFoundError):
            if failures is not None and disk.exists(name):
                failures.append(missing)
            return None
        if failures is not None and cause(error) is not None:
            failures.append(error)
        else:
            # The text after the semicolon is a remedy for checkpoints, which does not help here.
            place.report_once(name, str(error).partition(";")[0])
        return None


class FolderExchange:
    """Exchange of a member through the folder, which holds its own and its peers' models.

    Models are written in a background thread while the next round is trained.
    """

    def __init__(self, place: Place, stopping: Callable[[], bool], poll_s: float = POLL_S):
        """Start the thread that writes models.

        :param place: place of this member
        :param stopping: function that returns whether the member was asked to leave
        :param poll_s: seconds after which a member without work reads the folder again
        """
        self.place = place
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
        now = time.monotonic()
        if not self._stop_seen and now - self._looked_at >= self.poll_s:
            self._looked_at, self._stop_seen = now, self.place.disk.sees("STOP")
        return self._leave_requested() or self._stop_seen

    @contextlib.contextmanager
    def stay(self) -> Iterator[None]:
        """Return a context manager for one stay, which leaves the place if the block fails.

        If other members have closed the place, or if its model has become too old, the block ends
        without an error, and the caller has to join again. If the place was closed, the member may
        be silent for twice as many leases in its next stay, but at most for `LEASES`.
        """
        place = self.place
        try:
            yield
        except Fenced:
            self.promises = min(2 * self.promises, LEASES)
            place.report(
                f"place {place.number} was silent for too long and was closed; joining again"
            )
        except TooFarBehind:
            place.report(f"place {place.number} fell behind the others; joining again")
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
            models must have the parameter layout that it names
        :return: models, empty if the member starts from the seed
        :raises Fenced: if other members have closed the new place
        :raises NoModel: if there are models, but all of them are damaged
        """
        self.place.layout = about.get("layout", "")
        self.place.join(self.promises)
        inputs, states = self._current(self.place.beginnings, NEWEST)
        self.place.start(inputs, about)
        self._last_models: list[tuple[int, NodeState]] = []
        return states

    def _current(
        self, choose: Callable[[], list[Round]], limit: int
    ) -> tuple[list[Round], list[NodeState]]:
        """Read models like :meth:`newest`, from the versions that ``choose`` returns.

        If no model can be read, ``choose`` is called again, because newer versions may have
        replaced the first ones meanwhile.
        """
        versions = choose()
        while True:
            try:
                return self.newest(versions, limit)
            except NoModel:
                previous = versions
                versions = choose()
                if versions == previous:
                    raise

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

    def readable(self, versions: list[Round], limit: int) -> tuple[list[Round], list[NodeState]]:
        """Return the first ``limit`` versions that can be read, and their models.

        A model is skipped only if it was removed or is damaged. If the file system fails for
        one of them, all are read again, for at most one lease.

        :param versions: versions in the order of preference
        :param limit: largest number of models to read
        :raises StoreError: if no model can be read
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
            state = read_model(self.place, version, failures) if len(states) < limit else None
            if state is not None:
                states[version] = state
        return states

    def _no_model(self, count: int, failures: list[Exception]) -> Exception:
        """Return the error to raise if no model can be read.

        An error of the file system takes precedence, because the reading is then repeated.
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
            if self.stopping():
                raise StopRequested
            time.sleep(self.poll_s)

    @property
    def chunks(self) -> int:
        """Number of consecutive chunks to train, from the one that :meth:`chunk` returned last."""
        return self.place.chunks

    def round_seconds(self) -> float:
        """Return the seconds since the last chunk was claimed, without outages of the folder."""
        return self.place.now() - self._chunk_time

    def send(self, state: NodeState) -> int:
        """Publish this round's model in the background; return its size in bytes.

        The call first waits until the model of the previous round is published.

        :raises Fenced: if other members have closed this place
        """
        place = self.place
        seconds = self.round_seconds() / place.chunks
        self._chunk_seconds = [*self._chunk_seconds[1 - MEASURED_ROUNDS :], seconds]
        place.chunk_s = statistics.median(self._chunk_seconds)
        self.written()
        draft = place.draft(int(state.numbers["index"]))
        claim = place.remaining
        saved = replace(state, arrays={})
        self._last_models = [*self._last_models[1 - KEEP :], (draft.age, saved)]

        def work() -> None:
            entry = place.disk.retry(lambda: self._write(draft, state), "models")
            if entry is None:
                place.fenced = True
                return
            place.publish(
                draft,
                claim == 0,
                file=entry.file,
                bytes=entry.bytes,
                checksum=entry.checksum,
                parameters=entry.parameters,
                digest=digest(state),
            )

        self._written = self._writer.submit(work)
        return sum(array.nbytes for array in state.stored().values())

    def _write(self, draft: Round, state: NodeState) -> Entry | None:
        """Write a model under a new name; return None if other members have closed the place.

        They also remove files of a place that was closed long ago, even unfinished ones. Writing
        then fails for a reason that is no outage of the file system.
        """
        disk = self.place.disk
        path = disk.path(f"models/{draft.place:06d}-{secrets.token_hex(8)}.h5")
        try:
            entry = checkpoint.write_state(path, draft.place, state)
            disk.share(path)
        except (StoreError, OSError) as error:
            disk.discard(path)
            if self.place.closed_by_others(draft):
                return None
            if isinstance(cause(error), FileNotFoundError):
                disk.make("models")
            raise
        return entry

    def written(self) -> None:
        """Wait until the model in the background is published.

        :raises Fenced: if other members have closed this place
        """
        if self._written is not None:
            written = self._written
            self._written = None
            written.result()
        if self.place.fenced:
            raise Fenced

    def receive(self) -> NodeState | None:
        """Return a peer's model to average with; None if no peer has a new one.

        A late model is corrected by :func:`correct_for_age`.

        :raises TooFarBehind: if this member's model is too old to be averaged
        """
        for version in self.place.peers():
            state = read_model(self.place, version)
            if state is not None:
                self.place.took(version)
                self.peer_weight = peer_weight(self.place.chunks, version.chunks)
                rounds = rounds_late([age for age, _ in self._last_models], version.age)
                return correct_for_age(
                    state, self._last_models[-1][1], self._last_models[-1 - rounds][1], rounds
                )
        return None

    def leave(self) -> None:
        """Publish the model in the background, then close the place unless others have done so."""
        if self.place.number < 0:
            return
        with contextlib.suppress(Fenced):
            self.written()
            self.place.leave()

    def close(self) -> None:
        """Stop the thread that writes models."""
        self._writer.shutdown()
