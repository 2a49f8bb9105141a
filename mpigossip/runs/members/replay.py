"""`mpigossip replay`: rounds of a training once more in this process, bitwise."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mpigossip.cluster.ranks import SingleProcess
from mpigossip.config import Job, JobError
from mpigossip.config.readable import pluralize, print_note
from mpigossip.mixing.members.live import correct_for_age, digest, read_model, rounds_late
from mpigossip.mixing.members.place import KEEP, Place, record_name
from mpigossip.mixing.members.records import Closed, End, RecordStore, Round, Start, Version
from mpigossip.runs.members.join import JOB, about, job_there, none_there, plan_of
from mpigossip.runs.members.member import Member
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from mpigossip.training.assemble import assemble

BITS = ("mpigossip", "torch", "processor", "machine", "threads")
"""What a model's bits may depend on, as a first record has it."""
TOLD = 100
"""From so many rounds on each tenth of them is told."""


class ReplayMismatch(Exception):
    """A round whose model has another digest than its record says."""


class ReplayLog:
    """All chains of a folder, and the models that are needed still."""

    def __init__(self, place: Place):
        """``place``: a reader of the folder, which joins nothing."""
        self.place = place
        self.stored = 0
        self.starts: dict[int, Start] = {}
        self.rounds: dict[Version, Round | None] = {}
        """None: its record can't be used"""
        self.models: dict[Version, NodeState] = {}
        for number in place.numbers("places"):
            for index in range(place.refresh(number).next):
                found = place.record(number, index)  # not listed, if a record is missing before it
                if isinstance(found, Start):
                    self.starts[number] = found
                elif not isinstance(found, Closed):
                    known = found if isinstance(found, Round) else None
                    self.rounds[Version(number, index)] = known
        end = place.ended()
        self.end: tuple[Version, ...] = end.versions if isinstance(end, End) else ()

    def check_complete(self) -> None:
        """Check that each chunk is in exactly one round, if the training has ended.

        A listing may be older than the end, and then lack rounds or whole places.

        :raises StoreError: if a chunk is missing, or is in several rounds
        """
        chunks = self.place.plan.chunks
        rounds: dict[int, list[Version]] = {chunk: [] for chunk in range(chunks)}
        for version, record in self.rounds.items():
            if record is not None:
                rounds.setdefault(record.chunk, []).append(version)
        trained = sum(map(bool, rounds.values()))
        twice = [chunk for chunk, versions in rounds.items() if len(versions) > 1]
        if twice:
            names = ", ".join(record_name(*version) for version in rounds[twice[0]])
            raise StoreError(
                f"{self.place.disk.root}: chunk {twice[0]} was trained more than once, in {names}: "
                "use a copy of the folder without the wrong record"
            )
        if trained == chunks:
            return
        # Record 0 of a chain trains no chunk: its place may have ended before its first round.
        for version, record in self.rounds.items():
            if record is None and version.round:
                self.round(version)
        missing = [chunk for chunk, versions in rounds.items() if not versions]
        if not self.end:
            self.place.report(
                f"the training has not ended: {trained} of {chunks} chunks are trained"
            )
            return
        numbers = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise StoreError(
            f"{self.place.disk.root}: the training has ended, but no record of {len(missing)} of "
            f"its {chunks} chunks is listed here (chunks {numbers}): wait until this host renews "
            "its listing of chain/, or copy the missing records there, and replay again"
        )

    def round(self, version: Version) -> Round:
        """Its record; StoreError where that can't be used."""
        found = self.rounds.get(version)
        if found is None:
            raise StoreError(
                f"{record_name(*version)} is missing or damaged: rounds that "
                "depend on it can't be repeated; --place and --rounds choose others"
            )
        return found

    def inputs(self, version: Version) -> tuple[Version, ...]:
        """Versions that it depends on: its last, the peer's, the own as old as that."""
        if version.round == 1:
            if version.place not in self.starts:
                self.round(Version(version.place, 0))
            return self.starts[version.place].inputs
        own = [Version(version.place, r) for r in range(1, version.round)][-KEEP:]
        ages = [self.round(one).age for one in own]
        peers = self.round(version).peer[:1]
        return (
            own[-1],
            *(v for p in peers for v in (p, own[-1 - rounds_late(ages, self.round(p).age)])),
        )

    def choose(self, wanted: Iterable[Version]) -> list[Version]:
        """These and what they depend on that isn't stored any more, in an order to repeat them."""
        found = set[Version]()
        wanted = set(wanted)
        open_ = [*wanted]
        while open_:
            version = open_.pop()
            if version in found or version in self.models:
                continue
            state = None if version in wanted else read_model(self.place, self.round(version))
            if state is not None:
                self.models[version] = state
            else:
                found.add(version)
                open_ += self.inputs(version)
        self.stored = len(self.models)
        self.uses = Counter(one for version in found for one in self.inputs(version))
        self.uses.update(one for one in self.end if one in found)
        return sorted(found, key=lambda one: (self.round(one).age, one))

    def repeating(self, wanted: Iterable[Version]) -> Iterator[Version]:
        """Iterate over these and what they depend on, and tell how far that is."""
        order = self.order = self.choose(wanted := set(wanted))
        more = len(order) - len(wanted)
        tell = self.place.report
        depend = f" and {pluralize(more, 'round')} that they depend on" if more else ""
        tell(f"repeating {pluralize(len(wanted), 'round')}{depend}")
        for index, version in enumerate(order):
            if len(order) >= TOLD and index % (len(order) // 10) == 0 < index:
                tell(f"{index} of {len(order)} rounds are equal")
            yield version

    def given(self, version: Version) -> tuple[list[NodeState], NodeState | None, int]:
        """Own last model (those of the beginning), the peer's as the member took it, progress."""
        inputs = self.inputs(version)
        if missing := [one for one in inputs if one not in self.models]:
            raise StoreError(f"{record_name(*version)} depends on {missing[0]}, which is later")
        models = [self.models[one] for one in inputs]
        for one in inputs:
            self.uses[one] -= 1
            if not self.uses[one]:
                del self.models[one]
        first = version.round == 1
        known = max((self.round(one).progress for one in inputs[: None if first else 1]), default=0)
        if first or len(models) == 1:
            return models, None, known
        late_by = inputs[0].round - inputs[2].round
        return models[:1], correct_for_age(models[1], models[0], models[2], late_by), known

    def check(self, version: Version, state: NodeState) -> None:
        """Keep a model as long as it is needed; raises Differs where the record names another."""
        if digest(state) != self.round(version).digest:
            raise ReplayMismatch(
                f"round {version.round} of place {version.place} is another model than "
                f"its record {record_name(*version)} says{self._unlike(version.place)}"
            )
        if self.uses[version]:
            self.models[version] = state

    def _unlike(self, place: int) -> str:
        """Return where the place's machine and versions were others than here."""
        start = self.starts.get(place)
        here = about((), (), [])
        was = start.about if start else {}
        unlike = [
            f"{key} {was[key]}, here {here[key]}"
            for key in BITS
            if key in was and was[key] != here[key]
        ]
        return f"; it was made with {', '.join(unlike)}" if unlike else ""

    def told(self) -> str:
        """What `repeating` has compared."""
        order = self.order
        rounds = pluralize(len(order), "round")
        places = len({one.place for one in order})
        found = f"{rounds} of {pluralize(places, 'place')} repeated: every digest is equal"
        if self.stored:
            found += f"\nbegun with {pluralize(self.stored, 'model')} that models/ still has"
        if self.end and set(order).issuperset(self.end):
            sha = hashlib.sha256()
            for version in self.end:
                sha.update(self.models[version].parameters.tobytes())
            found += f"\ndigest {sha.hexdigest()}"
        return found


class ReplayExchange:
    """The exchange of one round, as its record says."""

    sent: NodeState

    def __init__(self, peer: NodeState | None, chunk: int, progress: int):
        self._peer = peer
        self._next = (chunk, progress)

    def chunk(self) -> tuple[int, int] | None:
        """The round's chunk and the progress before it, once."""
        found = self._next
        self._next = None
        return found

    def send(self, state: NodeState) -> int:
        """Keep what the member would publish."""
        self.sent = state
        return 0

    def receive(self) -> NodeState | None:
        """The peer's model, once."""
        found = self._peer
        self._peer = None
        return found


def repeat(script: ReplayLog, wanted: Iterable[Version], member: Any) -> str:
    """Repeat rounds and what they depend on by one `Member`; what was compared. Raises Differs."""
    for version in script.repeating(wanted):
        models, peer, progress = script.given(version)
        exchange = ReplayExchange(peer, script.round(version).chunk, progress)
        if version.round == 1:
            member.begin(models)
        else:
            member.resume(models[0], version.round - 1, exchange)
        member.train(exchange)
        script.check(version, exchange.sent)
    return script.told()


def wanted_of(
    script: ReplayLog, place: int | None, rounds: tuple[int, int] | None
) -> list[Version]:
    """The rounds that are asked for; JobError where there are none.

    Where all are asked for, all must be there: see `Script.check_complete`.
    """
    low, high = rounds or (1, 1 << 60)
    found = [
        one for one in script.rounds if place in (None, one.place) and low <= one.round <= high
    ]
    if not found:
        there = [one.round for one in script.rounds if place in (None, one.place)]
        most = f"at most {max(there)} rounds" if there else "no rounds"
        who = "they have" if place is None else f"place {place} has"
        raise JobError(
            f'"{script.place.disk.root}" has {len(script.starts)} places, from 0; {who} {most}'
        )
    if place is None and rounds is None:
        script.check_complete()
        # A record that can't be used is needed by no chunk then.
        return [one for one in found if script.rounds[one] is not None]
    return found


def replay(
    folder: Path,
    place: int | None = None,
    rounds: tuple[int, int] | None = None,
    job: Job | None = None,
) -> str:
    """Repeat a training from its records; what was compared. Raises Differs, StoreError, JobError.

    ``place`` and ``rounds`` (first, last): only these, and what they depend on: models that are
    stored still, rounds else. ``job``: one's own copy, without which no code that the folder
    names is run.
    """
    disk = RecordStore(folder, shared=True)
    if not disk.exists(JOB):
        raise JobError(none_there(disk))
    with SingleProcess() as world:
        assembly = assemble(job_there(disk, job, command="replay"), world, 1)
        try:
            script = ReplayLog(Place(disk, plan_of(assembly), report=print_note))
            return repeat(script, wanted_of(script, place, rounds), Member(assembly))
        finally:
            assembly.close()
