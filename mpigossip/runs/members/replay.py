"""`mpigossip replay`: all members of a training once more in this process, bitwise."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.config.readable import note
from mpigossip.mixing.members.live import Past, digest
from mpigossip.mixing.members.place import Place
from mpigossip.mixing.members.records import Closed, Disk, End, Round, Start, Version
from mpigossip.runs.members.join import JOB, job_there, none_there, plan_of
from mpigossip.runs.members.member import Member
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from mpigossip.training.assemble import Assembly, assemble


class Differs(Exception):
    """A round whose model has another digest than its record says."""


class Script:
    """All chains of a folder, and the models of the rounds that were repeated so far.

    A model is kept until nobody needs it any more. ``turn``: one place computes at a time.
    """

    def __init__(self, place: Place):
        """``place``: a reader of the folder, which joins nothing."""
        self.starts: dict[int, Start] = {}
        self.rounds: dict[Version, Round] = {}
        self.models: dict[Version, NodeState] = {}
        self.turn, self.failed = threading.Condition(), False
        for number in place.numbers("places"):
            self._read_chain(place, number)
        end = place.ended()
        self.end: tuple[Version, ...] = end.versions if isinstance(end, End) else ()

    def _read_chain(self, place: Place, number: int) -> None:
        for index in range(place.refresh(number).next):
            found = place.record(number, index)
            if isinstance(found, Start):
                self.starts[number] = found
            elif isinstance(found, Round):
                self.rounds[found.version] = found
            elif not isinstance(found, Closed):
                raise StoreError(
                    f"chain/{number:06d}/{index:06d} is missing or damaged: rounds that depend on "
                    "it can't be repeated; --place and --rounds choose others"
                )

    def inputs(self, version: Version) -> tuple[Version, ...]:
        """The versions that a round depends on."""
        if version.round == 1:
            return self.starts[version.place].inputs
        before = Version(version.place, version.round - 1)
        return (before, *self.rounds[version].peer)

    def needed(self, wanted: Iterable[Version]) -> set[Version]:
        """These versions and all that they depend on."""
        found: set[Version] = set()
        open_ = list(wanted)
        while open_:
            version = open_.pop()
            if version not in found:
                if version not in self.rounds:
                    raise StoreError(f"place {version.place} has no round {version.round}")
                found.add(version)
                open_ += self.inputs(version)
        return found

    def choose(self, wanted: set[Version]) -> None:
        """Repeat these; every one of them is kept as often as it is needed."""
        self.wanted = wanted
        self.uses = Counter(
            one
            for version in wanted
            for one in self.inputs(version)
            if one.place != version.place or version.round == 1
        )
        self.uses.update(one for one in self.end if one in wanted)

    def model(self, version: Version) -> NodeState:
        """A model, when it has been repeated; call with ``turn`` held."""
        self.turn.wait_for(lambda: self.failed or version in self.models)
        if self.failed:
            raise Differs("another place failed")
        self.uses[version] -= 1
        return self.models[version] if self.uses[version] else self.models.pop(version)

    def repeated(self, version: Version, state: NodeState) -> None:
        """Keep a model; raises Differs where its record says another one."""
        if digest(state) != self.rounds[version].digest:
            raise Differs(
                f"round {version.round} of place {version.place} is another model than its record "
                f"chain/{version.place:06d}/{version.round:06d} says"
            )
        if self.uses[version]:
            self.models[version] = state
            self.turn.notify_all()


class Scripted:
    """The exchange of one place, as its records say."""

    def __init__(self, script: Script, place: int):
        """Begin before round 1."""
        self.script, self.place, self.round, self._past = script, place, 1, Past()
        starts = [script.rounds[one] for one in script.starts[place].inputs]
        self.progress = max((one.progress for one in starts), default=0)

    def begin(self) -> list[NodeState]:
        """The models that the member began with."""
        return [self.script.model(one) for one in self.script.starts[self.place].inputs]

    def chunk(self) -> tuple[int, int] | None:
        """The round's chunk and the progress before it."""
        version = Version(self.place, self.round)
        if version not in self.script.wanted:
            return None
        return self.script.rounds[version].chunk, self.progress

    def send(self, state: NodeState) -> int:
        """Compare the model with its record."""
        version = Version(self.place, self.round)
        self.script.repeated(version, state)
        record, self.round = self.script.rounds[version], self.round + 1
        self.progress = record.progress
        self._past.sent(record.age, state)
        return 0

    def receive(self) -> NodeState | None:
        """The model of the peer that the next record names."""
        following = Version(self.place, self.round)
        if following not in self.script.wanted:
            return None
        for peer in self.script.rounds[following].peer:
            return self._past.met(self.script.rounds[peer].age, self.script.model(peer))
        return None


def replay(folder: Path, place: int | None = None, rounds: tuple[int, int] | None = None) -> str:
    """Repeat a training from its records; what was compared. Raises Differs, StoreError, JobError.

    ``place`` and ``rounds`` (first, last): only these, and what they depend on.
    """
    disk = Disk(folder, shared=True)
    if not disk.exists(JOB):
        raise JobError([none_there(disk)])
    job, made = job_there(disk), list[Assembly]()
    with Alone() as world:

        def member() -> Member:
            made.append(assemble(job, world, 1))
            return Member(made[-1])

        try:
            first = member()
            script = Script(Place(disk, plan_of(made[0]), tell=note))
            low, high = rounds or (1, 1 << 60)
            wanted = [one for one in script.rounds
                      if place in (None, one.place) and low <= one.round <= high]  # fmt: skip
            if not wanted:
                there = [one.round for one in script.rounds if place in (None, one.place)]
                most = f"at most {max(there)} rounds" if there else "no rounds"
                who = "they have" if place is None else f"place {place} has"
                raise JobError(
                    [f'"{folder}" has {len(script.starts)} places, from 0; {who} {most}']
                )
            script.choose(script.needed(wanted))
            repeat(script, member, [first])
        finally:
            for one in made:
                one.close()
    places = len({one.place for one in script.wanted})
    found = f"{len(script.wanted)} rounds of {places} places repeated: every digest is equal"
    if script.end and script.wanted.issuperset(script.end):
        sha = hashlib.sha256()
        for version in script.end:
            sha.update(script.models[version].parameters.tobytes())
        found += f"\ndigest {sha.hexdigest()}"
    return found


def repeat(script: Script, new: Callable[[], Any], spare: list | None = None) -> None:
    """Each place in a thread, one computing at a time; members of places that ended go on.

    Raises what the first of them raises.
    """
    spare, errors = spare or [], list[BaseException]()
    waiting, threads = {one.place for one in script.wanted}, list[threading.Thread]()

    def work(place: int, member: Any) -> None:
        with script.turn:
            try:
                exchange = Scripted(script, place)
                member.begin(exchange.begin())
                member.train(exchange)
            except BaseException as error:
                errors.append(error)
                script.failed = True
            spare.append(member)
            script.turn.notify_all()

    with script.turn:
        while waiting and not script.failed:
            for place in sorted(waiting):
                if all(one in script.models for one in script.starts[place].inputs):
                    waiting.discard(place)
                    member = spare.pop() if spare else new()
                    threads.append(threading.Thread(target=work, args=(place, member)))
                    threads[-1].start()
            if waiting:
                script.turn.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
