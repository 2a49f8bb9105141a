"""One member's place in a training: it joins, claims chunks, publishes rounds, finds its peers."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpigossip.mixing.members.ledger import Ledger
from mpigossip.mixing.members.records import (
    Claim,
    Closed,
    End,
    Record,
    RecordStore,
    Round,
    Start,
    Unusable,
    parse,
)
from mpigossip.store import StoreError

FOLDERS = ("tmp", "places", "chain", "ledger", "models", "closed")
BEHIND = 8
"""Ages that a model may lie behind to be averaged."""
NEWEST = 8
"""Models that a newcomer averages."""
KEEP = 3
"""Models that a place keeps."""
OLD = 4 * BEHIND
"""Ages that a closed place lies behind when its models are removed: nobody begins with them."""
LEASES = 16
"""The longest promise of silence, in leases."""


class Fenced(Exception):
    """Others have closed this place; its round is void, and the member joins anew."""


class TooFarBehind(Exception):
    """This member's model is too old to be averaged; it joins anew."""


class TrainingPlan(NamedTuple):
    """What all members know of the training."""

    chunks: int
    block: int
    """chunks of a claim"""
    lease_s: float
    """seconds of silence that a record promises at least"""


@dataclass
class Chain:
    """What this member knows of another place."""

    promise: float
    seen: float
    """by this member's clock, when the chain was last seen to grow"""
    next: int = 0
    last: Round | None = None
    closed: Closed | None = None

    @property
    def rounds(self) -> int:
        return self.last.round if self.last else 0


class Place:
    """The protocol, for one place; ``chance`` and ``now`` choose nothing that replay needs.

    ``tell`` is given a line about each name that can't be used, once.
    """

    claim: Claim | None
    number = -1
    """of who only reads"""
    layout = ""
    """of models that are taken; "": any"""

    def __init__(
        self,
        disk: RecordStore,
        plan: TrainingPlan,
        *,
        now: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
        report: Callable[[str], None] = print,
    ):
        """``disk``: the run's folder, in which `job.toml` stands."""
        self.disk = disk
        self.plan = plan
        self.report = report
        # an outage of the folder is no silence of the other members
        self.now = lambda: now() - disk.outages.seconds()
        self.chance = chance or random.Random()
        self.chains: dict[int, Chain] = {}
        self._told: set[str] = set()
        self.ledger = Ledger(disk, plan.chunks, plan.block, self.chance)
        self._claimed_at: dict[str, float] = {}
        self._end_listed = False

    # -- joining ----------------------------------------------------------------------------------

    def join(self, promises: int = 1) -> None:
        """Take a number that nobody has had; ``promises``: leases that a record promises."""
        self.disk.outages.limit_s = self.plan.lease_s
        places = self.numbers("places")
        stride = 1
        number = places[-1] + 1 if places else 0
        while not self.disk.publish(f"places/{number:06d}", Record(place=number).encode()):
            number += self.chance.randint(1, stride)
            stride *= 2
        self.disk.make(f"chain/{number:06d}")
        self.number = number
        self.promise = min(promises, LEASES) * self.plan.lease_s
        self.round = 0
        self.age = 0
        self.progress = 0
        self.claim = None
        self.claim_name = ""
        self.left = 0
        self._own: set[str] = set()
        self.peer: Round | None = None
        self.averaged: dict[int, int] = {}
        self.files: list[str] = []
        self.fenced = False

    def beginnings(self) -> list[Round]:
        """Versions to begin with, the furthest first: of present places, else of closed ones."""
        found = [self.refresh(place).last for place in self.present()[-64:]]
        if not any(found):
            ages = self._closed()
            furthest = sorted(ages, key=lambda place: -ages[place])[: 2 * NEWEST]
            found = [self.refresh(place).last for place in furthest]
        return _furthest(found)

    def before(self, versions: Sequence[Round]) -> list[Round]:
        """The same places' versions of one round earlier."""
        found = [
            self.record(one.place, one.round - 1, listed=True) for one in versions if one.round > 1
        ]
        return [one for one in found if isinstance(one, Round)]

    def start(self, inputs: Sequence[Round], about: dict[str, str]) -> None:
        """Say which models this member has begun with; raises Fenced."""
        versions = tuple(one.version for one in inputs)
        record = Start(place=self.number, inputs=versions, promise=self.promise, about=about)
        self.age = max((one.age for one in inputs), default=0)
        self.progress = max((one.progress for one in inputs), default=0)
        if not self.disk.publish(record_name(self.number, 0), record.encode()):
            raise Fenced
        self.round = 1

    # -- what others do ---------------------------------------------------------------------------

    def present(self) -> list[int]:
        """Places that aren't known to be closed or silent, ascending."""
        there = {place for place in self.numbers("places") if not self.absent(place)}
        there -= self._closed().keys()
        return sorted(there | ({self.number} - {-1}))  # a stale listing may lack the own one

    def absent(self, place: int) -> bool:
        """Return whether a place is known as closed, or as silent for longer than it promised."""
        chain = self.chains.get(place)
        if chain is None or place == self.number:
            return False
        return chain.closed is not None or self.now() - chain.seen > chain.promise

    def refresh(self, place: int) -> Chain:
        """Look for what a place has published since the last look: its newest records.

        An exception of reading them leaves the chain as it was.
        """
        chain = self.chains.setdefault(place, Chain(self.plan.lease_s, self.now()))
        numbers = [] if chain.closed else self.numbers(f"chain/{place:06d}")
        if numbers and numbers[-1] >= chain.next:
            new = []
            # back to a round that can be used
            for number in range(numbers[-1], chain.next - 1, -1):
                new.append(self.record(place, number, listed=True))
                if isinstance(new[-1], Round | Start):
                    break
            chain.next = numbers[-1] + 1
            chain.seen = self.now()
            for found in new:
                if isinstance(found, Closed):
                    chain.closed = found
                elif isinstance(found, Round | Start):
                    chain.promise = found.promise
                    chain.last = found if isinstance(found, Round) else chain.last
        return chain

    def record(
        self, place: int, number: int, listed: bool = False
    ) -> Start | Round | Closed | Record | None:
        """A record of a chain; None where it isn't there, a bare Record where it is damaged.

        ``listed``: as in `Disk.read`.
        """
        name = record_name(place, number)
        found = self.read(name, Start, Round, Closed, listed=listed)
        right = getattr(found, "round", 0) == number and getattr(found, "place", place) == place
        if found is not None and not right:
            self.tell_once(name, "is of another place or round")
            return Record(place=place)
        return found

    def fence(self, place: int) -> None:
        """Close a silent place, unless it publishes first; either way this member learns it."""
        chain = self.chains[place]
        record = Closed(place=place, round=chain.next, why="silent", by=self.number)
        self.disk.make(f"chain/{place:06d}")
        if self.disk.publish(record_name(place, chain.next), record.encode()):
            self.report(
                f"place {place} has been silent for longer than it promised: it is closed, "
                "and its chunks are claimed anew"
            )
            self._hint_closed(place, chain.last.age if chain.last else 0)
        self.refresh(place)

    def peers(self) -> Iterator[Round]:
        """Versions to average with in the coming round, the first one that can be read.

        One-peer exponential over the sorted present places: offset 2^(round mod ⌈log2 m⌉), then
        the next ones; a version is averaged once. Raises Behind.
        """
        places = self.present()
        here = places.index(self.number)
        m = len(places)
        turns = max(1, (m - 1).bit_length())
        for turn in range(min(turns, 4)):
            place = places[(here + (1 << (self.round + turn) % turns)) % m]
            if place == self.number:
                continue
            version = self.refresh(place).last
            if version is None or self.absent(place):
                continue
            if version.age > self.age + BEHIND:
                raise TooFarBehind
            if version.round > self.averaged.get(place, 0) and version.age + BEHIND >= self.age:
                yield version

    def took(self, version: Round) -> None:
        """This version was averaged."""
        self.peer = version
        self.averaged[version.place] = version.round

    # -- chunks -----------------------------------------------------------------------------------

    def chunk(self) -> int | None:
        """The next chunk to train; None where none can be claimed now."""
        if not self.left:
            claimed = self.ledger.claim(self)
            if claimed is None:
                return None
            self.claim_name, self.claim, self.left = claimed
            self._own.add(self.claim_name)
            self._remove_old()
        return self.claim.chunk + self.round - self.claim.first

    def trained(self, name: str, claim: Claim, count: int) -> tuple[int, bool]:
        """Published rounds of a claim, and whether no more will come; closes a silent place."""
        if claim.place == self.number:  # one whose reply was lost is nobody's
            return 0, name not in self._own and claim.first < self.round
        chain = self.refresh(claim.place)
        since = max(chain.seen, self._claimed_at.setdefault(name, self.now()))
        missing = chain.rounds - claim.first + 1 < count
        if missing and chain.closed is None and self.now() - since > chain.promise:
            self.fence(claim.place)
        done = min(max(chain.rounds - claim.first + 1, 0), count)
        if done:
            first = self.record(claim.place, claim.first, listed=True)
            if not isinstance(first, Round) or first.claim != name or first.chunk != claim.chunk:
                return 0, True
        return done, chain.closed is not None

    # -- publishing -------------------------------------------------------------------------------

    def draft(self, step: int) -> Round:
        """The record of the round that ends now, without its model; counts the round."""
        chunk = self.claim.chunk + self.round - self.claim.first
        peer = self.peer
        self.age = 1 + max(self.age, peer.age if peer else 0)
        self.progress = max(self.progress, chunk + 1, peer.progress if peer else 0)
        made = Round(
            place=self.number,
            round=self.round,
            claim=self.claim_name,
            chunk=chunk,
            peer=(peer.version,) if peer else (),
            age=self.age,
            progress=self.progress,
            promise=self.promise,
            step=step,
            file="",
            bytes=0,
            checksum="",
            parameters=0,
            digest="",
        )
        self.round = self.round + 1
        self.left = self.left - 1
        self.peer = None
        return made

    def publish(self, draft: Round, done: bool, **model: Any) -> None:
        """Give a round its model and its name; sets ``fenced`` where others closed this place.

        ``done``: it is the last of its claim. In the thread that has written the model.
        """
        record = replace(draft, **model)
        if not self.disk.publish(record_name(record.place, record.round), record.encode()):
            self.fenced = True
            return
        self.files.append(record.file)
        while len(self.files) > KEEP:
            self.disk.remove(f"models/{self.files.pop(0)}")
        if done:
            self.ledger.finish(record.claim)

    def closed_by_others(self, draft: Round) -> bool:
        """Return whether a round can't be published, because its name is in the listing already."""
        return self.disk.exists(record_name(draft.place, draft.round))

    def _remove_old(self) -> None:
        """Remove models of places that were closed long ago."""
        old = {f"{place:06d}" for place, age in self._closed().items() if age + OLD < self.age}
        for name in self.disk.names("models") if old else ():
            if name.partition("-")[0] in old:
                self.disk.remove(f"models/{name}")

    def leave(self) -> None:
        """Close the own chain: what is claimed and not trained is others'."""
        # the last round's own name where its model could not be written, or isn't yet
        for number in range(max(self.round - 1, 0), self.round + 1):
            record = Closed(place=self.number, round=number, why="left", by=self.number)
            if self.disk.publish(record_name(self.number, number), record.encode()):
                self._hint_closed(self.number, self.age)
                return

    # -- the end ----------------------------------------------------------------------------------

    def endings(self) -> list[Round]:
        """Versions whose average may be the result, the furthest first."""
        for place in [*[*self._closed()][-64:], *self.present()]:
            self.refresh(place)
        found = _furthest([chain.last for chain in self.chains.values()])
        if not found:  # an END without models couldn't be taken back
            raise StoreError(
                f"{self.disk.root}: all chunks are trained, and no record in chain/ "
                "can be read; copy them back, or begin a new folder"
            )
        return found

    def end(self, versions: Sequence[Round]) -> None:
        """Link the end, whose versions this member has read."""
        named = tuple(sorted(one.version for one in versions))
        self.disk.publish("END", End(place=self.number, versions=named).encode())
        self._end_listed = True

    def ended(self) -> End | None:
        """The end, if it is there; raises Unusable."""
        self._end_listed = self._end_listed or self.disk.exists("END")
        if not self._end_listed:
            return None
        return parse(self.disk.read("END", listed=True), f"{self.disk.root}/END", End)

    # -- names ------------------------------------------------------------------------------------

    def numbers(self, folder: str) -> list[int]:
        """Numbers among the names of a folder, ascending."""
        return [int(name) for name in self.disk.names(folder) if re.fullmatch(r"\d{6,15}", name)]

    def _closed(self) -> dict[int, int]:
        """Ages at which places were closed, as far as hints say."""
        names = self.disk.names("closed")
        found = [name for name in names if re.fullmatch(r"\d{6,15}\.\d{6,15}", name)]
        return {int(place): int(age) for place, age in (name.split(".") for name in found)}

    def _hint_closed(self, place: int, age: int) -> None:
        self.disk.publish(f"closed/{place:06d}.{age:06d}", b"")

    def read(self, name: str, *kinds: type[Record], listed: bool = False) -> Any:
        """A record; None where it isn't there, a bare Record where it can't be used.

        ``listed``: as in `Disk.read`.
        """
        try:
            content = self.disk.read(name, listed)
            return None if content is None else parse(content, name, *kinds)
        except Unusable as error:
            self.tell_once(name, str(error).removeprefix(f"{name} "))
            return Record(place=0)

    def tell_once(self, name: str, text: str) -> None:
        """Say once that a name can't be used."""
        if name not in self._told:
            self._told.add(name)
            self.report(f"{name}: {text}; passed over")


def record_name(place: int, number: int) -> str:
    """Name of a record of a chain."""
    return f"chain/{place:06d}/{number:06d}"


def _furthest(versions: Iterable[Round | None]) -> list[Round]:
    """Those that can be averaged with the furthest, that first."""
    found = sorted((one for one in versions if one), key=lambda one: (-one.age, one.place))
    return [one for one in found if one.age + BEHIND >= found[0].age]
