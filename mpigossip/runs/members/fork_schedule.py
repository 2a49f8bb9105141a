"""Schedule of a fork: which place trains which chunk in each round, and with which peer.

A fork repeats a recorded training up to a round, the cut, and continues with one thing changed. In
the recorded training, the speed of the members determined which models were averaged. The schedule
of a fork must not depend on speed, because a fork has to be repeatable. Its time is therefore the
Lamport clock in the records (`Round.age`): a recorded round takes as many units of time as it has
advanced this clock, which is more than 1 if its member was slower than others.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpigossip.members.place import BEHIND, NEWEST, peer_order
from mpigossip.members.records import Round, Start, Version


class Turn(NamedTuple):
    """Scheduled round of a place. Turns are sorted by time, then by place.

    The time of a turn is the time at which its round ends, in units of `Round.age`.
    """

    time: float
    place: int
    chunk: int
    recorded: Version | None
    """Recorded round that trained this chunk, whose peer is kept; None: the schedule chooses a
    peer."""
    chunks: int = 1
    """Number of consecutive chunks that the round trains, from ``chunk`` on."""


class Change(NamedTuple):
    """Settings of a fork on which its schedule depends."""

    without: int | None = None
    """Place whose models and rounds are left out after the cut; None: no place."""
    graph: str | None = None
    """Name of the graph by which peers are chosen; None: the peers in the records are kept."""
    seed: int = 0
    """Seed of the graph "random-matching"."""
    behind: int = BEHIND
    """Largest difference in age between two models that are averaged (`Place.behind`)."""


def recorded_turns(rounds: Iterable[Round]) -> list[Turn]:
    """Return the sorted turns of the recorded ``rounds``."""
    return sorted(
        Turn(record.age, record.place, record.chunk, record.version, record.chunks)
        for record in rounds
    )


def rescaled_turns(
    rounds: Mapping[Version, Round], began: Mapping[int, int], old: int, new: int, steps: int
) -> tuple[list[Turn], list[list[int]], list[int]]:
    """Distribute the steps of recorded rounds over rounds with another number of steps.

    Each place trains its own recorded steps in their order. A new round takes new/old times as long
    as the recorded rounds with the same steps. The last steps of each place, if they are too few
    for a round, are joined to chunks without a turn.

    :param rounds: the recorded rounds, by version
    :param began: for each place, the time at which its first round in ``rounds`` began, in units of
        `Round.age`
    :param old: number of steps of a recorded chunk
    :param new: number of steps of a round of the fork
    :param steps: number of the first step that no recorded chunk contains; the last chunk is
        completed from there
    :return: the turns, the steps of each chunk, and the chunks without a turn
    """
    turns: list[Turn] = []
    chunks: list[list[int]] = []
    rest: list[int] = []
    for place, began_at in sorted(began.items()):
        records = [rounds[version] for version in sorted(rounds) if version.place == place]
        own: list[int] = []
        times: list[float] = [began_at]  # The time at which each chunk was trained.
        for record in records:
            own += range(record.chunk * old, (record.chunk + record.chunks) * old)
            last = times[-1]
            per_chunk = (record.age - last) / record.chunks
            times += [last + count * per_chunk for count in range(1, record.chunks + 1)]
        for end in range(new, len(own) + 1, new):
            before = (end - 1) // old
            part = end / old - before
            time = times[before] + part * (times[before + 1] - times[before])
            turns.append(Turn(time, place, len(chunks), None))
            chunks.append(own[end - new : end])
        rest += own[len(own) // new * new :]
    unassigned = list(range(len(chunks), len(chunks) + -(-len(rest) // new)))
    rest += range(steps, steps + -len(rest) % new)
    chunks += [rest[first : first + new] for first in range(0, len(rest), new)]
    return sorted(turns), chunks, unassigned


class ForkSchedule:
    """Schedule of a fork; the constructor decides on all rounds, in the order of time.

    If a place is left out, other places train its chunks in additional rounds: each chunk goes to
    the place with the fewest additional rounds so far, before the next turn of that place.
    """

    def __init__(
        self,
        rounds: Mapping[Version, Round],
        starts: Mapping[int, Start],
        past: Iterable[Version],
        turns: Sequence[Turn],
        unassigned: Iterable[int],
        ends: Sequence[Version],
        change: Change,
        progress: Sequence[int] | None = None,
    ):
        """Build the schedule.

        :param rounds: all usable recorded rounds
        :param starts: first records of all places
        :param past: versions of the rounds up to the cut, which stay as they are
        :param turns: rounds to schedule, sorted
        :param unassigned: chunks that the present places train at the end
        :param ends: recorded versions whose average was the result
        :param change: settings on which the schedule depends
        :param progress: for each chunk, the progress of a model that was trained on it, in recorded
            chunks; None: the number of the chunk + 1
        :raises ValueError: if only the place that is left out has trained
        """
        self.change = change
        self.recorded = rounds
        self.recorded_starts = starts
        self.rounds = {version: rounds[version] for version in past}
        """Rounds of the fork. Rounds after the cut have no model yet."""
        self.starts = {v.place: starts[v.place] for v in past if v.place in starts}
        """First record of each place of the fork."""
        self.unassigned = deque(unassigned)
        self.progress = progress
        self._version_of = {version: version for version in self.rounds}
        self._done: dict[int, list[tuple[tuple[float, int], Round]]] = defaultdict(list)
        self._averaged: dict[tuple[int, int], int] = {}
        self._extra: Counter[int] = Counter()
        self._left = Counter(t.place for t in turns if t.place != change.without)
        for version, record in sorted(self.rounds.items()):
            self._done[version.place].append(((record.age, version.place), record))
            for peer in record.peer:
                self._averaged[version.place, peer.place] = peer.round
        for turn in turns:
            self._take(turn)
        places = [v.place for v in ends if v.place != change.without]
        self._finish(places, turns[-1].time if turns else 0)
        self.end = tuple(self._done[place][-1][1].version for place in places or self._ended())
        """Versions whose average is the result."""

    def _take(self, turn: Turn) -> None:
        if turn.place == self.change.without:
            self.unassigned.extend(range(turn.chunk, turn.chunk + turn.chunks))
            return
        place = turn.place
        # With another number of steps, all chunks without a turn follow at the end.
        while self.change.without is not None and self.unassigned and self._has_fewest(place):
            self._extra[place] += 1
            self._train(Turn(turn.time, place, self.unassigned.popleft(), None))
        self._train(turn)
        self._left[place] -= 1

    def _has_fewest(self, place: int) -> bool:
        """Return whether no other place with rounds left has fewer additional rounds."""
        present = [p for p, turns in self._left.items() if turns and self._done[p]]
        return all(self._extra[place] <= self._extra[other] for other in present)

    def _ended(self) -> list[int]:
        """Return a list with the place whose model is the result of a fork without recorded result.

        A fork has no recorded result if the record END names only the place that is left out. The
        result is then the newest model of another place.

        :raises ValueError: if no other place has trained
        """
        without = self.change.without
        done = [p for p, versions in self._done.items() if versions and p != without]
        if not done:
            raise ValueError
        return [max(done, key=lambda place: self._done[place][-1][0])]

    def _finish(self, places: list[int], time: float) -> None:
        """Add rounds for the chunks without a turn, to the places that were present at the end.

        :param places: places that were present at the end; if empty, the place of :meth:`_ended`
        :param time: time at which the last turn ends
        """
        places = places or (self._ended() if self.unassigned else [])
        for place in places:
            self._left[place] += len(self.unassigned)
        for index, chunk in enumerate(self.unassigned):
            time += not index % len(places)
            self._train(Turn(time, places[index % len(places)], chunk, None))
        self.unassigned.clear()

    def _train(self, turn: Turn) -> None:
        """Add the round of a turn to the fork, after the last round of the same place."""
        place = turn.place
        done = self._done[place]
        peer = None
        number = done[-1][1].round + 1 if done else 1
        inputs = [done[-1][1]] if done else self._start(turn)
        age = max((record.age for record in inputs), default=0)
        progress = max((record.progress for record in inputs), default=0)
        if done:
            peer = self._peer(turn, number, *done[-1])
        trained = self.progress[turn.chunk] if self.progress else turn.chunk + turn.chunks
        version = Version(place, number)
        template = (
            self.recorded[turn.recorded] if turn.recorded else next(iter(self.recorded.values()))
        )
        self.rounds[version] = record = replace(
            template,
            place=place,
            round=number,
            chunk=turn.chunk,
            chunks=turn.chunks,
            peer=(peer.version,) if peer else (),
            age=turn.chunks + max(age, peer.age if peer else 0),
            progress=max(progress, trained, peer.progress if peer else 0),
        )
        if turn.recorded:
            self._version_of[turn.recorded] = version
        if peer:
            self._averaged[place, peer.place] = peer.round
        done.append(((turn.time, place), record))

    def _start(self, turn: Turn) -> list[Round]:
        """Set the first record of a turn's place; return the rounds from whose models it starts.

        The list is empty if the place starts from the model that the seed initializes.
        """
        start = self.recorded_starts[turn.place]
        inputs: list[Round] = []
        if self.progress is None:
            others = [v for v in start.inputs if v.place != self.change.without]
            inputs = [self.rounds[self._version_of[version]] for version in others]
        if start.inputs and not inputs:
            done = {p: v[-1][1] for p, v in self._done.items() if v and p != self.change.without}
            present = [record for place, record in done.items() if self._left[place]]
            newest = sorted(present or done.values(), key=lambda r: (-r.age, r.place))
            oldest = newest[0].age - self.change.behind
            inputs = [record for record in newest if record.age >= oldest][:NEWEST]
        self.starts[turn.place] = replace(start, inputs=tuple(r.version for r in inputs))
        return inputs

    def _peer(self, turn: Turn, number: int, since: tuple[float, int], own: Round) -> Round | None:
        """Return the round whose model a place averages with before a round; None if there is none.

        :param turn: the round before which the place averages
        :param number: number of this round in the fork
        :param since: time and place of the previous round of the place
        :param own: record of the previous round of the place
        """
        if turn.recorded is not None and self.change.graph is None:
            peers = self.recorded[turn.recorded].peer
            if not peers:
                return None
            if peers[0].place != self.change.without:
                return self.rounds[self._version_of[peers[0]]]
        for place in self._order(turn.place, number):
            seen = [record for time, record in self._done[place] if time <= since]
            version = seen[-1] if seen else None
            if version is None or abs(version.age - own.age) > self.change.behind:
                continue
            if version.round > self._averaged.get((turn.place, place), 0):
                return version
        return None

    def _order(self, place: int, number: int) -> Iterator[int]:
        """Iterate over the peers of a place in a round, in the order of preference."""
        present = {p for p, turns in self._left.items() if turns and self._done[p]}
        places = sorted(present | {place})
        if self.change.graph != "random-matching":
            return peer_order(places, place, number)
        others = [other for other in places if other != place]
        chance = random.Random(f"{self.change.seed} {place} {number}")
        return iter(chance.sample(others, min(4, len(others))))
