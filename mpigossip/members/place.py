"""Place of a member in a training: joining, claiming chunks, publishing rounds, finding peers."""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mpigossip.members.ledger import Ledger
from mpigossip.members.pace import chunks_of_round
from mpigossip.members.records import (
    KEPT,
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
"""Largest difference in age between two models that are averaged, in rounds of the largest length.
The age of a model is a Lamport clock, which counts chunks (see `Round.age`): a model with a greater
age is newer."""
NEWEST = 8
"""Largest number of models whose average a new member starts with."""
KEEP = 3
"""Number of models that a place keeps: it removes older ones."""
OLD = 4 * BEHIND
"""Difference in age from the newest model, in rounds of the largest length, at which the models of
a closed place are removed: no member starts with them any more."""
NOTED_SILENCE_S = 5.0
"""Silence, in seconds, of a place that other members wait for, after which they report the wait."""
ROUNDS_PER_LEASE = 5
"""Smallest number of rounds that a lease has to last."""
LEASES = 16
"""Largest number of leases for which a member may be silent."""


class Fenced(Exception):
    """Error of a place that other members have closed; its round is void, and it joins again."""


class TooFarBehind(Exception):
    """Error of a member whose model is too old to be averaged; the member has to join again."""


class TrainingPlan(NamedTuple):
    """Facts about the training that all members share."""

    chunks: int
    """Number of chunks in the whole training."""
    block: int
    """Number of chunks that are claimed at once."""
    lease_s: float
    """Lease, in seconds: the time for which a member may be silent, unless it has promised a
    multiple of it."""
    keep_every: int = 0
    """Number K: the model of every K-th round of a place is never removed; 0: the models of all
    older rounds are removed."""
    longest: int = 1
    """Largest number of chunks that a member trains in a round."""


@dataclass
class Chain:
    """Summary of the records of another place, as far as this member has read them."""

    promise: float
    """Longest silence, in seconds, that the newest usable record of the place allows."""
    seen: float
    """Time at which the chain was last seen to grow, by this member's clock."""
    next: int = 0
    """Number of the first record that has not been seen yet."""
    last: Round | None = None
    """Newest usable round; None: no round has been seen."""
    closed: Closed | None = None
    """Closing record; None: the chain is open."""

    @property
    def rounds(self) -> int:
        """Number of rounds up to the newest usable one."""
        return self.last.round if self.last else 0


class Place:
    """The protocol between members, from the point of view of one place.

    A member that joins gets a place, whose number is never used again. In each round it trains one
    chunk or several, publishes its model, and averages it with the model of one other place, its
    peer.

    All records of a place form its chain: record 0 names the models that the member started with,
    record k is its round k, and a closing record ends the chain.

    Clocks and random numbers decide which chunks a member claims, and which peers are present.
    The records contain these decisions, so that a replay needs neither clocks nor random numbers.
    """

    claim: Claim | None
    """Claim whose chunks this member trains; None before the first one."""
    number = -1
    """Number of this place; -1: this object only reads and has not joined."""
    fenced = False
    """True if other members have closed this place; only the rank that decides knows this."""
    layout = ""
    """Digest of the parameter layout that models must have; "": any layout is accepted."""

    def __init__(
        self,
        disk: RecordStore,
        plan: TrainingPlan,
        *,
        now: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
        report: Callable[[str], None] = print,
    ):
        """Prepare to read the folder; it is not changed before :meth:`join`.

        :param disk: folder of the training, which contains `job.toml`
        :param plan: facts about the training that all members share
        :param now: monotonic clock, in seconds
        :param chance: generator of random choices; None: a new one
        :param report: function that prints one line, for example about a file that is unusable
        """
        self.disk = disk
        self.plan = plan
        self.report = report
        # Outages of the folder are subtracted, because they must not count as silence of others.
        self.now = lambda: now() - disk.outages.seconds()
        self.chance = chance or random.Random()
        self.chains: dict[int, Chain] = {}
        self._reported: set[str] = set()
        self.ledger = Ledger(disk, plan.chunks, plan.block, self.chance)
        self._claimed_at: dict[str, float] = {}
        self._awaited: dict[int, float] = {}
        self._end_listed = False

    # -- joining ----------------------------------------------------------------------------------

    def join(self, promises: int = 1) -> None:
        """Create a place with a number that was never used before.

        :param promises: number of leases for which this place may be silent between two records; at
            most `LEASES`
        """
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
        self.remaining = 0
        self.chunks = 1
        self.chunk_s = 0.0
        self._chunk_s_of: dict[int, float] = {}
        self._own: set[str] = set()
        self.peer: Round | None = None
        self.averaged: dict[int, int] = {}
        self.files: list[list[str]] = []
        self.fenced = False

    def beginnings(self) -> list[Round]:
        """Return the newest versions to start with, by descending age.

        Only the records of the last 64 present places are read. If none of these places has
        published a model, the records of the closed places with the newest models are read instead.
        Versions that are more than :attr:`behind` ages older than the newest version are left out.
        If there is no model yet, the list is empty.
        """
        rounds = [self.refresh(place).last for place in self.present()[-64:]]
        if not any(rounds):
            ages = self._closed()
            newest = sorted(ages, key=lambda place: -ages[place])[: 2 * NEWEST]
            rounds = [self.refresh(place).last for place in newest]
        return self._newest_usable(rounds)

    def before(self, versions: Sequence[Round]) -> list[Round]:
        """Return, for each of ``versions``, the previous round of its place, if it can be read."""
        records = [
            self.record(version.place, version.round - 1, listed=True)
            for version in versions
            if version.round > 1
        ]
        return [version for version in records if isinstance(version, Round)]

    def start(self, inputs: Sequence[Round], about: dict[str, str]) -> None:
        """Publish record 0, which names the models that this member starts with.

        :param inputs: versions whose average the member starts with; empty: it starts with a model
            that is initialized from the seed
        :param about: facts on which the exact values of the model depend, such as the versions of
            packages and the processor
        :raises Fenced: if other members have closed this place
        """
        versions = tuple(version.version for version in inputs)
        record = Start(place=self.number, inputs=versions, promise=self.promise, about=about)
        self.age = max((version.age for version in inputs), default=0)
        self.progress = max((version.progress for version in inputs), default=0)
        if not self.disk.publish(record_name(self.number, 0), record.encode()):
            raise Fenced
        self.round = 1

    # -- what others do ---------------------------------------------------------------------------

    def present(self) -> list[int]:
        """Return the places, in order, that are not known to be closed or silent for too long."""
        present = {place for place in self.numbers("places") if not self.absent(place)}
        present -= self._closed().keys()
        # A stale listing may lack this member's own place.
        return sorted(present | ({self.number} - {-1}))

    def absent(self, place: int) -> bool:
        """Return whether a place is known to be closed, or silent for longer than it promised."""
        chain = self.chains.get(place)
        if chain is None or place == self.number:
            return False
        return chain.closed is not None or self.now() - chain.seen > chain.promise

    def refresh(self, place: int) -> Chain:
        """Read the records that a place has published since the last call; return its chain.

        Only the newest records are read, back to the first one that is usable. If reading raises
        an exception, the chain stays as it was.
        """
        chain = self.chains.setdefault(place, Chain(self.plan.lease_s, self.now()))
        numbers = [] if chain.closed else self.numbers(f"chain/{place:06d}")
        if numbers and numbers[-1] >= chain.next:
            new = []
            for number in range(numbers[-1], chain.next - 1, -1):
                new.append(self.record(place, number, listed=True))
                if isinstance(new[-1], Round | Start):
                    break
            chain.next = numbers[-1] + 1
            chain.seen = self.now()
            for record in new:
                if isinstance(record, Closed):
                    chain.closed = record
                elif isinstance(record, Round | Start):
                    chain.promise = record.promise
                    chain.last = record if isinstance(record, Round) else chain.last
        return chain

    def record(
        self, place: int, number: int, listed: bool = False
    ) -> Start | Round | Closed | Record | None:
        """Read a record of a chain.

        :param place: number of the place
        :param number: number of the record in its chain
        :param listed: whether the record must exist, as in :meth:`RecordStore.read`
        :return: the record. If it does not exist, None. If it is unusable or belongs to another
            place or round, an object of the base class `Record`
        """
        name = record_name(place, number)
        record = self.read(name, Start, Round, Closed, listed=listed)
        is_right = (
            getattr(record, "round", 0) == number and getattr(record, "place", place) == place
        )
        if record is not None and not is_right:
            self.report_once(name, "belongs to another place or round")
            return Record(place=place)
        # A reader that does not know the plan, such as a report, has a plan without chunks.
        if self.plan.chunks and getattr(record, "chunks", 1) > self.plan.longest:
            self.report_once(name, f"has a round of more than {self.plan.longest} chunks")
            return Record(place=place)
        return record

    def fence(self, place: int) -> None:
        """Close a silent place, unless it publishes its next record first.

        The closing record takes the name of the next record of the place, so only one of the two
        records is published. The chain is then read again, and shows which record was published.
        """
        chain = self.chains[place]
        record = Closed(place=place, round=chain.next, why="silent", by=self.number)
        self.disk.make(f"chain/{place:06d}")
        if self.disk.publish(record_name(place, chain.next), record.encode()):
            self.report(
                f"place {place} has been silent for longer than its lease: it is closed, "
                "and its chunks can be claimed again"
            )
            self._hint_closed(place, chain.last.age if chain.last else 0)
        self.refresh(place)

    def peers(self) -> Iterator[Round]:
        """Iterate over the versions of peers to average with in this round, best first.

        The caller takes the first version whose model can be read. :func:`peer_order` determines
        the order of places. A version is never averaged twice, and a version that is more than
        ``behind`` ages older than this place's model is skipped.

        :raises TooFarBehind: if this place's model is more than ``behind`` ages older than a
            candidate
        """
        for place in peer_order(self.present(), self.number, self.round):
            version = self.refresh(place).last
            if version is None or self.absent(place):
                continue
            if version.age > self.age + self.behind:
                raise TooFarBehind
            is_new = version.round > self.averaged.get(place, 0)
            if is_new and version.age + self.behind >= self.age:
                yield version

    def took(self, version: Round) -> None:
        """Store the version that this member averages with in the current round, for its record."""
        self.peer = version
        self.averaged[version.place] = version.round

    # -- chunks -----------------------------------------------------------------------------------

    def chunk(self) -> int | None:
        """Return the next chunk to train; claim a block if the last claim is used up.

        The result is None if nothing can be claimed now.
        """
        if not self.remaining:
            self._awaited.clear()
            claimed = self.ledger.claim(self)
            if claimed is None:
                return None
            self.claim_name, self.claim, self.remaining = claimed
            self._claim_end = self.claim.chunk + self.remaining
            self._own.add(self.claim_name)
            self._remove_old()
        self.chunks = min(self._chunks_of_round(), self.remaining)
        return self._next_chunk

    @property
    def _next_chunk(self) -> int:
        """Number of the first chunk of the claim that this place has not trained."""
        return self._claim_end - self.remaining

    def _chunks_of_round(self) -> int:
        """Return the number of chunks that the next round should train.

        If members may differ, one more present place is read per round, each in turn, because the
        peers of a place are only a few of all places.
        """
        if self.plan.longest == 1:
            return 1
        places = [place for place in self.present() if place != self.number]
        if places:
            place = places[self.round % len(places)]
            # Its chain is not refreshed: a place that is read so rarely would seem to be silent.
            numbers = self.numbers(f"chain/{place:06d}")
            newest = self.record(place, numbers[-1], listed=True) if numbers else None
            if isinstance(newest, Round):
                self._chunk_s_of[place] = newest.chunk_s
        longest = self.plan.longest
        if self.chunk_s:
            longest = min(longest, int(self.promise / (ROUNDS_PER_LEASE * self.chunk_s)))
        others = [self._chunk_s_of.get(place, 0.0) for place in places]
        return chunks_of_round(self.chunk_s, others, longest)

    def trained(self, name: str, claim: Claim, count: int) -> tuple[int, bool]:
        """Return the number of a claim's trained chunks, and whether no further one can follow.

        If the claim is incomplete and its place has been silent for longer than it promised, the
        place is closed.

        :param name: name of the claim in the ledger
        :param claim: content of the claim
        :param count: number of chunks that the claim covers
        """
        # A claim may have been published although the file system reported an error. Then this
        # place does not train its chunks, and the claim is void as soon as the place has passed the
        # first round of the claim.
        if claim.place == self.number:
            return 0, name not in self._own and claim.first < self.round
        chain = self.refresh(claim.place)
        since = max(chain.seen, self._claimed_at.setdefault(name, self.now()))
        missing = _trained_chunks(chain, name, claim, count) < count
        if missing and chain.closed is None:
            self._awaited[claim.place] = since
            if self.now() - since > chain.promise:
                self.fence(claim.place)
        done = _trained_chunks(chain, name, claim, count)
        if done:
            first = self.record(claim.place, claim.first, listed=True)
            if not isinstance(first, Round) or first.claim != name or first.chunk != claim.chunk:
                return 0, True
        return done, chain.closed is not None

    def report_wait(self) -> None:
        """Report, once for each place, that this member waits for the chunks of silent places.

        The waiting member calls this method after :meth:`chunk` has returned None. Silence that is
        shorter than `NOTED_SILENCE_S` is not reported, because each training ends with short waits.
        """
        for place, since in self._awaited.items():
            silence = self.now() - since
            chain = self.chains[place]
            name = f"wait for place {place}"
            is_noted = name in self._reported
            if is_noted or chain.closed is not None or silence < NOTED_SILENCE_S:
                continue
            self._reported.add(name)
            self.report(
                f"all chunks are claimed; waiting for chunks of place {place}, which has been "
                f"silent for {silence:.0f} s and is closed after {chain.promise:.0f} s"
            )

    # -- publishing -------------------------------------------------------------------------------

    def draft(self, step: int) -> Round:
        """Return the record of the round that ends now, without the fields that describe its model.

        The call advances the counters of this place to the next round.

        :param step: step count that is stored with the model
        """
        chunk = self._next_chunk
        peer = self.peer
        self.age = self.chunks + max(self.age, peer.age if peer else 0)
        self.progress = max(self.progress, chunk + self.chunks, peer.progress if peer else 0)
        draft = Round(
            place=self.number,
            round=self.round,
            claim=self.claim_name,
            chunk=chunk,
            chunks=self.chunks,
            chunk_s=self.chunk_s,
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
        self.remaining = self.remaining - self.chunks
        self.peer = None
        return draft

    def model_name(self, draft: Round, rank: int | None = None) -> str:
        """Return a new name for the model of a round, which other users can't guess.

        :param draft: result of :meth:`draft`
        :param rank: rank whose part of the model the file holds; None: the file holds a whole model
        """
        every = self.plan.keep_every
        part = "" if rank is None else f"-{rank:04d}"
        end = KEPT if every and draft.round % every == 0 else ".h5"
        return f"{draft.place:06d}-{secrets.token_hex(8)}{part}{end}"

    def publish(self, draft: Round, done: bool, **model: Any) -> None:
        """Publish a round whose model has been written; called in the thread that wrote it.

        If other members have closed this place, the round is void, and ``fenced`` is set.

        :param draft: result of :meth:`draft`
        :param done: whether this is the last round of its claim
        :param model: fields of the record that describe the model's file
        """
        record = replace(draft, **model)
        if not self.disk.publish(record_name(record.place, record.round), record.encode()):
            self.fenced = True
            return
        self.files.append([shard.file for shard in record.files])
        while len(self.files) > KEEP:
            for file in self.files.pop(0):
                if not file.endswith(KEPT):
                    self.disk.remove(f"models/{file}")
        if done:
            self.ledger.finish(record.claim)

    def closed_by_others(self, draft: Round) -> bool:
        """Return whether other members have published a record under the name of this round."""
        return self.disk.exists(record_name(draft.place, draft.round))

    def _remove_old(self) -> None:
        """Remove the models of closed places that are too old to start with, except kept ones.

        The newest model of such a place is more than `OLD` rounds of the largest length older than
        the model of this place.
        """
        oldest = self.age - OLD * self.plan.longest
        old = {f"{place:06d}" for place, age in self._closed().items() if age < oldest}
        for name in self.disk.names("models") if old else ():
            if name.partition("-")[0] in old and not name.endswith(KEPT):
                self.disk.remove(f"models/{name}")

    def leave(self) -> None:
        """Close the chain of this place, so that other members may claim its untrained chunks."""
        # If the model of the last round has not been published, the name of that round is free, and
        # the closing record has to take it. Otherwise it takes the next name.
        for number in range(max(self.round - 1, 0), self.round + 1):
            record = Closed(place=self.number, round=number, why="left", by=self.number)
            if self.disk.publish(record_name(self.number, number), record.encode()):
                self._hint_closed(self.number, self.age)
                return

    # -- the end ----------------------------------------------------------------------------------

    def endings(self) -> list[Round]:
        """Return the versions whose average may be the result, by descending age.

        :raises StoreError: if there is no usable record
        """
        for place in [*[*self._closed()][-64:], *self.present()]:
            self.refresh(place)
        versions = self._newest_usable([chain.last for chain in self.chains.values()])
        # An END without models could not be undone.
        if not versions:
            raise StoreError(
                f"{self.disk.root}: all chunks are trained, but no record in chain/ "
                "can be read; copy the records back, or start in a new folder"
            )
        return versions

    def end(self, versions: Sequence[Round]) -> None:
        """Publish END, which names ``versions``, whose average is the result of the training.

        This member has to have read all of them.
        """
        names = tuple(sorted(version.version for version in versions))
        self.disk.publish("END", End(place=self.number, versions=names).encode())
        self._end_listed = True

    def ended(self) -> End | None:
        """Return the record END, or None if the training has not ended.

        :raises Unusable: if END exists but can't be read as a record
        """
        self._end_listed = self._end_listed or self.disk.exists("END")
        if not self._end_listed:
            return None
        return parse(self.disk.read("END", listed=True), f"{self.disk.root}/END", End)

    @property
    def behind(self) -> int:
        """Largest difference in age between two models that are averaged, in chunks."""
        return BEHIND * self.plan.longest

    def _newest_usable(self, versions: Iterable[Round | None]) -> list[Round]:
        """Return the versions that may be averaged with the newest one, by descending age."""
        usable = sorted(
            (version for version in versions if version),
            key=lambda version: (-version.age, version.place),
        )
        return [version for version in usable if version.age + self.behind >= usable[0].age]

    # -- names ------------------------------------------------------------------------------------

    def numbers(self, folder: str) -> list[int]:
        """Return the numbers that are names of files in a folder, in ascending order."""
        return [int(name) for name in self.disk.names(folder) if re.fullmatch(r"\d{6,15}", name)]

    def _closed(self) -> dict[int, int]:
        """Return the places that the folder `closed` names, each with the age of its newest model.

        An empty file there, such as 000007.000345, shows that place 7 is closed, and that the age
        of its newest model is 345.
        """
        names = self.disk.names("closed")
        hints = [name for name in names if re.fullmatch(r"\d{6,15}\.\d{6,15}", name)]
        return {int(place): int(age) for place, age in (name.split(".") for name in hints)}

    def _hint_closed(self, place: int, age: int) -> None:
        self.disk.mark(f"closed/{place:06d}.{age:06d}")

    def read(self, name: str, *kinds: type[Record], listed: bool = False) -> Any:
        """Read a record by its name.

        :param name: name in the folder
        :param kinds: classes that the record may have
        :param listed: whether the name must exist, as in :meth:`RecordStore.read`
        :return: the record. If it does not exist, None. If it is unusable, which is reported once,
            an object of the base class `Record`
        """
        try:
            content = self.disk.read(name, listed)
            return None if content is None else parse(content, name, *kinds)
        except Unusable as error:
            self.report_once(name, str(error).removeprefix(f"{name} "))
            return Record(place=0)

    def report_once(self, name: str, text: str) -> None:
        """Report that a file is unusable and therefore ignored; report each file only once."""
        if name not in self._reported:
            self._reported.add(name)
            self.report(f"{name}: {text}; it is ignored")


def peer_order(places: Sequence[int], place: int, round_: int) -> Iterator[int]:
    """Iterate over the places with which a place may average before a round, best first.

    The order follows the one-peer exponential graph over the m present places: the first place is
    at offset 2^(round mod ⌈log2 m⌉), and up to three more places follow at the offsets of the next
    rounds.

    :param places: numbers of the present places, in ascending order
    :param place: the place that averages, one of ``places``
    :param round_: number of the round
    """
    position = places.index(place)
    turns = max(1, (len(places) - 1).bit_length())
    for turn in range(min(turns, 4)):
        peer = places[(position + (1 << (round_ + turn) % turns)) % len(places)]
        if peer != place:
            yield peer


def record_name(place: int, number: int) -> str:
    """Return the name of a record in the chain of a place."""
    return f"chain/{place:06d}/{number:06d}"


def _trained_chunks(chain: Chain, name: str, claim: Claim, count: int) -> int:
    """Return how many chunks of a claim the rounds of a chain have trained.

    A place claims the next chunks only after it has trained all chunks of a claim.

    :param chain: chain of the place that made the claim
    :param name: name of the claim in the ledger
    :param claim: content of the claim
    :param count: number of chunks that the claim covers
    """
    last = chain.last
    if last is None or last.round < claim.first:
        return 0
    if last.claim != name:
        return count
    return max(0, min(last.chunk + last.chunks - claim.chunk, count))
