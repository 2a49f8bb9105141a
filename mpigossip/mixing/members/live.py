"""Exchange of a member through the folder: models in the background, one peer a round."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from mpigossip.mixing.members.outages import FolderUnreachable, cause
from mpigossip.mixing.members.place import KEEP, LEASES, NEWEST, Fenced, Place, TooFarBehind
from mpigossip.mixing.members.records import Round
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.manifest import Entry

POLL_S = 2.0
"""Between two looks of a member that has nothing to train."""


class NoModel(StoreError):
    """None of the models that a member may begin with is there and undamaged."""


class StopRequested(Exception):
    """The member was asked to stop."""


def digest(state: NodeState) -> str:
    """SHA-256 of a model's arrays, by their names."""
    sha = hashlib.sha256()
    for name, array in sorted(state.stored().items()):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def layout(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Names and shapes of a model's parameters as a short digest."""
    text = repr((tuple(names), tuple(map(tuple, shapes))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounds_late(own: Sequence[int], age: int) -> int:
    """By how many of its last rounds, of these ages, a member sees a model of this age late."""
    return max(0, min(sum(one > age for one in own), len(own) - 1))


def correct_for_age(state: NodeState, now: NodeState, then: NodeState, late: int) -> NodeState:
    """A peer's late model x_j, moved to where its mean with the own one is right.

    Averaged as if it were new, a model of l rounds ago would hold everybody back. So
    x ← x + ½ (x_j − x_i) / (1 + l), with the own model x_i that is as old as the peer's x_j.
    Whoever sees a difference l rounds late hasn't seen yet what l averages have made of it:
    undivided, it would grow.
    """
    if not late:
        return state
    step = (state.parameters - then.parameters) / np.float32(1 + late)
    return replace(state, parameters=now.parameters + step)


def read_model(
    place: Place, version: Round, failures: list[Exception] | None = None
) -> NodeState | None:
    """A model, complete and undamaged; None where it isn't, which is said once.

    ``failures``: collects errors of the file system, which say nothing about the model.
    """
    disk = place.disk
    name = f"models/{version.file}"
    try:
        owner = os.lstat(disk.path(name)).st_uid
        if not disk.shared and owner != os.getuid():
            raise StoreError(f"it belongs to user {owner}; --shared takes it")
        entry = Entry(
            version.place, version.file, version.bytes, version.checksum, version.parameters
        )
        found = checkpoint.read_state(disk.root / "models", entry, version.parameters, version.step)
        if digest(found) != version.digest:
            raise StoreError("it is another model than its record says")
        if place.layout not in ("", layout(found.names, found.shapes)):
            raise StoreError("it has other parameters than this member's model")
        return found
    except (StoreError, OSError) as error:
        missing = error if isinstance(error, FileNotFoundError) else error.__context__
        if isinstance(missing, FileNotFoundError):
            if failures is not None and disk.exists(name):
                failures.append(missing)
            return None
        if failures is not None and cause(error) is not None:
            failures.append(error)
        else:
            place.tell_once(name, str(error).partition(";")[0])  # its remedies are checkpoints'
        return None


class FolderExchange:
    """A member's models and those of its peers in the folder's `models`."""

    def __init__(self, place: Place, stopping: Callable[[], bool], poll_s: float = POLL_S):
        """``stopping``: whether to leave, asked while there is nothing to train."""
        self.place = place
        self.poll_s = poll_s
        self.promises = 1
        self._asked = stopping
        self._stop_seen = False
        self._looked = float("-inf")
        self._chunk_time = 0.0
        place.disk.outages.stopping = stopping
        self._writer = ThreadPoolExecutor(1, "models")
        self._written: Future | None = None

    def stopping(self) -> bool:
        """Return whether this member was asked to leave, or the folder lists the file STOP."""
        now = time.monotonic()
        if not self._stop_seen and now - self._looked >= self.poll_s:
            self._looked, self._stop_seen = now, self.place.disk.sees("STOP")
        return self._asked() or self._stop_seen

    @contextlib.contextmanager
    def stay(self) -> Iterator[None]:
        """Context manager of one stay; it ends without error if others close or pass the place."""
        place = self.place
        try:
            yield
        except Fenced:
            self.promises = min(2 * self.promises, LEASES)
            place.report(
                f"place {place.number} was silent for too long and was closed; joining anew"
            )
        except TooFarBehind:
            place.report(f"place {place.number} fell behind the others; joining anew")
            self.leave()
        except BaseException:
            # an outage that has ended this stay must not hide behind the errors of leaving
            over = place.disk.outages.given_up
            with contextlib.suppress(*(FolderUnreachable, StoreError) if over else ()):
                self.leave()
            raise

    def begin(self, about: dict[str, str]) -> list[NodeState]:
        """Take a place; the models whose average the member begins with, none: the seed's."""
        self.place.layout = about.get("layout", "")
        self.place.join(self.promises)
        inputs, states = self._current(self.place.beginnings, NEWEST)
        self.place.start(inputs, about)
        self._own: list[tuple[int, NodeState]] = []
        return states

    def _current(
        self, wanted: Callable[[], list[Round]], most: int
    ) -> tuple[list[Round], list[NodeState]]:
        """As `newest`, for versions that are looked up again if they were removed meanwhile."""
        versions = wanted()
        while True:
            try:
                return self.newest(versions, most)
            except NoModel:
                before = versions
                versions = wanted()
                if versions == before:
                    raise

    def newest(self, versions: list[Round], most: int) -> tuple[list[Round], list[NodeState]]:
        """As `readable`; where none of them can be read, earlier rounds of the same places."""
        return self.place.disk.retry(lambda: self._newest(versions, most), "models")

    def _newest(self, versions: list[Round], most: int) -> tuple[list[Round], list[NodeState]]:
        failures: list[Exception] = []
        for _ in range(KEEP):
            found = self._undamaged(versions, most, failures)
            if found or not versions:
                return [*found], [*found.values()]
            versions = self.place.before(versions) or versions
        raise self._no_model(len(versions), failures)

    def readable(self, versions: list[Round], most: int) -> tuple[list[Round], list[NodeState]]:
        """Return the first ``most`` versions that can be read, and their models.

        A model is passed over only if it was removed or is damaged. If the file system fails for
        one of them, all are read again, until a lease is over.

        :raises StoreError: if no model can be read
        """
        return self.place.disk.retry(lambda: self._readable(versions, most), "models")

    def _readable(self, versions: list[Round], most: int) -> tuple[list[Round], list[NodeState]]:
        failures: list[Exception] = []
        found = self._undamaged(versions, most, failures)
        # An error says nothing about a model. It must not change which models are averaged.
        if failures and len(found) < min(most, len(versions)):
            raise failures[0]
        if versions and not found:
            raise self._no_model(len(versions), failures)
        return [*found], [*found.values()]

    def _undamaged(
        self, versions: list[Round], most: int, failures: list[Exception]
    ) -> dict[Round, NodeState]:
        found: dict[Round, NodeState] = {}
        for version in versions:
            state = read_model(self.place, version, failures) if len(found) < most else None
            if state is not None:
                found[version] = state
        return found

    def _no_model(self, count: int, failures: list[Exception]) -> Exception:
        """Return the error of no model: one of the file system, after which to try again, first."""
        text = f"{self.place.disk.root}: none of {count} models can be read; "
        text += "copy one back to models/, or begin a new folder"
        return failures[0] if failures else NoModel(text)

    def chunk(self) -> tuple[int, int] | None:
        """The next chunk, and how far the learning rate is; None once the training has ended.

        Waits while others train the last chunks. Raises Fenced, Leaving.
        """
        while True:
            if not self.place.left:
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

    def round_seconds(self) -> float:
        """Return the seconds since the last chunk was claimed, without outages of the folder."""
        return self.place.now() - self._chunk_time

    def send(self, state: NodeState) -> int:
        """Publish this round's model in the background; its bytes. Waits for the one before."""
        self.written()
        place = self.place
        draft = place.draft(int(state.numbers["index"]))
        claim = place.left
        kept = replace(state, arrays={})
        self._own = [*self._own[1 - KEEP :], (draft.age, kept)]

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
        """Write a model under a new name; None if it is of no use, as others closed the place.

        They remove the files of a place that they closed long ago, unfinished ones, too. Writing
        then fails, but not because of the disk.
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
        """Wait for the model that is being published; raises Fenced."""
        if self._written is not None:
            written = self._written
            self._written = None
            written.result()
        if self.place.fenced:
            raise Fenced

    def receive(self) -> NodeState | None:
        """The model to average with, None where nobody has a new one; raises Behind."""
        for version in self.place.peers():
            state = read_model(self.place, version)
            if state is not None:
                self.place.took(version)
                rounds = rounds_late([age for age, _ in self._own], version.age)
                return correct_for_age(state, self._own[-1][1], self._own[-1 - rounds][1], rounds)
        return None

    def leave(self) -> None:
        """Publish what is being written, and close the place if others haven't."""
        if self.place.number < 0:
            return
        with contextlib.suppress(Fenced):
            self.written()
            self.place.leave()

    def close(self) -> None:
        self._writer.shutdown()
