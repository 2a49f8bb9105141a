"""Who exchanges with a rank in a round, and in which pieces its message travels; without MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from mpigossip.mixing.base import Kind, Layout, is_average, traffic
from mpigossip.mixing.wire import CHUNK, Stretch

KEPT = 128
"""Rounds of which it is kept who exchanges with whom; more are asked for anew."""
SMALLEST = 1 << 20
"""Bytes of the smallest piece. Each is flushed by itself, which costs a way there and back."""
PIECE_S = 0.04
"""Seconds on the wire from which a piece is long enough for that not to be felt."""


@dataclass
class Exchange:
    """Who exchanges with this rank in the round at hand; ranks in the graph's order.

    ``partner``: the rank on this host that averages with this one alone, both by halves.
    ``far``: those of the sources that push to this rank. ``targets``: rank and place in its inbox
    of the readers that are pushed to.
    """

    kind: Kind
    t: int
    number: int
    """of exchanges of all kinds since the run's beginning"""
    average: bool
    nbytes: int
    sources: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    readers: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    partner: int | None = None
    targets: tuple[tuple[int, int], ...] = ()
    ticket: Future | None = None
    rest: Callable[[], None] | None = None
    """What is left to do of an exchange without a ticket."""
    finished: bool = False

    def at(self, t: int, number: int) -> Exchange:
        """This plan for another round of the same kind, begun anew."""
        now = object.__new__(Exchange)  # dataclasses.replace takes as long as a small sum
        now.__dict__ |= self.__dict__
        now.t, now.number = t, number
        return now


class Plans:
    """The exchanges of one rank as its graph says; asking it takes longer than a small message."""

    def __init__(
        self,
        graph,
        layout: Layout,
        rank: int,
        near: Sequence[frozenset[int]] = (),
        *,
        halves: bool = False,
    ):
        """``near``: for each rank those that it reads in place, itself too; unset: none at all.

        ``halves``: pairs on one host average by halves.
        """
        self.graph, self.rank, self._layout = graph, rank, layout
        self._rounds = range(graph.period or 0)
        self._near, self._halves = near, halves
        self._kept: dict[tuple[Kind, int], Exchange] = {}

    def of(self, kind: Kind, t: int) -> Exchange:
        """A plan like that of round t."""
        period = self.graph.period
        key = kind, t % period if period else t
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = self._plan(*key)
        return self._kept[key]

    def _plan(self, kind: Kind, t: int) -> Exchange:
        graph, layout, rank = self.graph, self._layout, self.rank
        nbytes = traffic(graph, kind, t, rank, layout.sent_bytes, layout.raw_bytes)
        if kind is not Kind.GOSSIP or is_average(graph, t):
            return Exchange(kind, t, t, kind is not Kind.LOCAL, nbytes)
        nodes, weights, own = graph.neighbours(t, rank)
        now = Exchange(kind, t, t, average=False, nbytes=nbytes)
        now.sources, now.weights = tuple(map(int, nodes)), (float(own), *map(float, weights))
        now.readers = tuple(map(int, graph.receivers(t, rank)))
        now.far = tuple(self._far(rank, now.sources))
        # a reader's places are numbered by those of its in-neighbours that push to it
        now.targets = tuple(
            (reader, self._far(reader, graph.neighbours(t, reader)[0]).index(rank))
            for reader in self._far(rank, now.readers)
        )
        now.partner = self._partner(now) if self._halves else None
        return now

    def _far(self, rank: int, nodes: Iterable) -> list[int]:
        """Those of ``nodes`` that ``rank`` doesn't share memory with."""
        near = self._near[rank] if self._near else ()
        return [int(j) for j in nodes if int(j) not in near]

    def _partner(self, now: Exchange) -> int | None:
        """The other of a pair on this host whose two averages are the same one."""
        if len(now.sources) != 1 or now.readers != now.sources or now.far:
            return None
        (other,), (own, weight) = now.sources, now.weights
        sources, weights, theirs = self.graph.neighbours(now.t, other)
        same = len(sources) == 1 and sources[0] == self.rank and weights[0] == theirs == own
        alone = [int(j) for j in self.graph.receivers(now.t, other)] == [self.rank]
        return other if own == weight and same and alone else None

    @property
    def places(self) -> int:
        """In-neighbours that push to this rank in one round, at most."""
        graph = self.graph
        if graph.period is None:
            return graph.degree
        rounds = [t for t in self._rounds if not is_average(graph, t)]
        pushers = (self._far(self.rank, graph.neighbours(t, self.rank)[0]) for t in rounds)
        return max(map(len, pushers), default=0)

    @property
    def pushed_only(self) -> bool:
        """Whether in every round somebody pushes to this rank: the sum is formed in the inbox."""
        rounds = [self.graph.neighbours(t, self.rank)[0] for t in self._rounds]
        averages = any(is_average(self.graph, t) for t in self._rounds)
        return bool(rounds) and all(map(len, rounds)) and not averages


@dataclass(frozen=True)
class Piece:
    """A stretch of the message that is put, announced and summed at once."""

    sent: slice
    """bytes of the message as sent"""
    stretches: tuple[Stretch, ...]
    number: int
    """from the beginning of the message; what is told of it when it was put"""


def cut(layout: Layout, size: int) -> list[Piece]:
    """The message in pieces of about ``size`` bytes as sent, the scalars with the last one."""
    pieces: list[Piece] = []
    stretches: list[Stretch] = []
    begin = end = 0
    for slot, part, whole in layout.stretches:
        scalar = part >= layout.vectors
        if end - begin >= size and not scalar:
            pieces.append(Piece(slice(begin, end), tuple(stretches), len(pieces)))
            stretches, begin = [], end
        for at in range(0, whole.stop, CHUNK):
            if at and end - begin >= size:
                pieces.append(Piece(slice(begin, end), tuple(stretches), len(pieces)))
                stretches, begin = [], end
            columns = slice(at, min(at + CHUNK, whole.stop))
            if stretches and stretches[-1][:2] == (slot, part):
                columns = slice(stretches.pop()[2].start, columns.stop)
            stretches.append((slot, part, columns))
            width = min(CHUNK, whole.stop - at)
            end += 8 if scalar else layout.vector_bytes(width)
    return [*pieces, Piece(slice(begin, end), tuple(stretches), len(pieces))]


def piece_size(nbytes: int, rate: float) -> int:
    """Bytes of a piece of a message of ``nbytes`` bytes on a wire of ``rate`` bytes a second.

    About what it moves in ``PIECE_S``, but at most an eighth of the message, so that there is
    something to sum while the rest travels. They divide the message
    evenly: a short last one would wait for as many ways there and back.
    """
    wanted = max(SMALLEST, min(nbytes / 8, rate * PIECE_S))
    return max(1, -(-nbytes // max(1, round(nbytes / wanted))))
