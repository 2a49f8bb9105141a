"""What a member exchanged, from the records of a finished or running training: for a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Condition

from mpigossip.mixing.members.live import digest
from mpigossip.mixing.members.place import Place
from mpigossip.mixing.members.records import Closed, End, Round, Start, Version
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState


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
        self.turn, self.failed = Condition(), False
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
        self.script, self.place, self.round = script, place, 1
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
        self.progress, self.round = self.script.rounds[version].progress, self.round + 1
        return 0

    def receive(self) -> NodeState | None:
        """The model of the peer that the next record names."""
        following = Version(self.place, self.round)
        if following not in self.script.wanted:
            return None
        peer = self.script.rounds[following].peer
        return self.script.model(peer[0]) if peer else None
