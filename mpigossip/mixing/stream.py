"""One round piece by piece, over every route: encoded, put, announced, taken in and summed.

Pieces are the courier's unit: while one is on the wire, those that came in are summed. The wire
therefore is hardly ever idle, and little is left to do when the last piece is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, numbers
from mpigossip.mixing.host.shared import SharedHost
from mpigossip.mixing.notifications import ARRIVING, ROOM, Signals, wait_all
from mpigossip.mixing.plan import SMALLEST, Piece
from mpigossip.mixing.progress_thread import Courier


def measured_rate(comm: MPI.Comm, nbytes: int, timeout_s: float) -> float:
    """Bytes a second of the wire to the next rank: collective, equal on all ranks.

    Infinite, and not measured, where a message of ``nbytes`` bytes is a single piece anyway.
    """
    if comm.size == 1 or nbytes <= SMALLEST:
        return float("inf")
    out, into = np.zeros(SMALLEST, np.uint8), np.empty(SMALLEST, np.uint8)
    for _ in range(2):  # the first opens connections
        comm.Barrier()
        began = time.perf_counter()
        pending = {
            0: comm.Irecv(into, (comm.rank - 1) % comm.size),
            1: comm.Isend(out, (comm.rank + 1) % comm.size),
        }
        wait_all(
            pending,
            timeout_s,
            lambda _: "measuring the wire: a neighbour doesn't answer",
            comm=comm,
        )
        slowest = comm.allreduce(time.perf_counter() - began, MPI.MAX)
    return SMALLEST / slowest


class Route(Protocol):
    """One way to some of the neighbours, and from them here; numbers are those of `Signals`.

    MPI's puts, in host or GPU memory, and NCCL fill inboxes. The mixer frees an inbox's place by
    ``signals.free``.
    """

    signals: Signals
    """Whether there is room for a piece, and whether one is there."""

    def put(
        self, areas: Sequence[torch.Tensor], span: slice, targets: Sequence[tuple[int, int]],
        number: int,
    ) -> Sequence[MPI.Request]:  # fmt: skip
        """Begin to bring a stretch of every area of the own message to ``(rank, place)`` of each.

        The areas aren't written again until the requests are complete.
        """

    def sent(self, targets: Sequence[tuple[int, int]], number: int) -> None:
        """Complete it at each target and tell it so, unless :meth:`put` has."""

    def sync(self, number: int) -> None:
        """After the signal: what has come is seen by reads that begin now."""

    def inbox(self, count: int, place: int, area: int) -> torch.Tensor:
        """An area, uint8, of what the ``place``-th source sent in the ``count``-th round."""

    def close(self) -> None:
        """Free all; collective. The memory must not be used any more."""


@dataclass
class Reach:
    """How a rank gets to the others: what a mixer opens, and what its slots exchange through."""

    comm: MPI.Intracomm
    rank: int
    n: int
    timeout_s: float
    host: SharedHost | None = None
    """to those on this host, where they aren't pushed to, too"""
    places: Mapping[int, int] = field(default_factory=dict)
    """of those ranks on this host, this one among them"""
    push: Any = None
    """to all others: a `Route` with inboxes"""
    courier: Courier | Any = None
    """the thread of what isn't done by the one that trains"""
    first: int = 0
    """The first round of kind GOSSIP."""
    waited: float = 0.0
    """Seconds that the thread which trains has waited for the courier."""

    def near(self, nodes: Iterable[int]) -> list[int]:
        """The places on this host of those of ``nodes`` that are read in place."""
        return [self.places[j] for j in nodes if j in self.places]

    def count(self, t: int) -> int:
        """What inboxes call a round."""
        return t - self.first

    def wait(self, ticket: Future, what: str) -> None:
        """Wait until the courier has done it."""
        self.waited += self.courier.wait(ticket, what)


@dataclass(eq=False, slots=True)
class Leg:
    """A route's part in a round."""

    route: Route
    areas: Sequence[torch.Tensor]
    """what is sent"""
    count: int
    """the round, as the route's signals count"""
    targets: Sequence[tuple[int, int]]
    """ranks of the route, and places at them"""
    sources: Sequence[int]


class Stream:
    """One round of pushes and arrivals as the courier runs it; :meth:`run` does all of it."""

    def __init__(
        self,
        leg: Leg,
        pieces: Sequence[Piece],
        timeout_s: float,
        rest: Callable[[Iterable[MPI.Request]], bool],
        prepare: Callable[[Piece], None],
        add: Callable[[Piece], None],
    ):
        """``prepare`` is called before a piece is put, ``add`` when it is in from all sources.

        ``rest``: waits until a request is complete, as the courier does.
        """
        self._leg, self._pieces, self._timeout_s = leg, pieces, timeout_s
        self._prepare, self._add, self._wait = prepare, add, rest
        self._arrived = dict.fromkeys(leg.sources, 0)
        self._prepared = self._sent = self._added = 0
        self._flying: list[MPI.Request] = []
        self._full = [rank for rank, _ in leg.targets]

    def begin(self) -> None:
        """What of :meth:`run` can be done at once."""
        self._moved()

    def run(self) -> None:
        """Send and take in all pieces; LateError where nothing moves until the deadline."""
        while not self._over:
            Deadline(self._timeout_s).wait(self._moved, self._late, self._rest, self._whom)

    @property
    def _over(self) -> bool:
        many = len(self._pieces)
        return self._sent == many and all(count == many for count in (self._added, self._prepared))

    def _moved(self) -> bool:
        """Do what can be done now without waiting; whether there was anything."""
        sent, came = self._send(), self._take_in()
        return self._add_one() or sent or came

    def _rest(self) -> bool:
        """Until there may be something to do."""
        return self._wait([*filter(None, self._flying), *self._leg.route.signals.awaited()])

    def _send(self) -> bool:
        # a reader frees the place of this round when it has summed round t - 2: without its token
        # the put would overwrite what it still reads
        leg = self._leg
        self._full = [rank for rank in self._full if not leg.route.signals.room(rank, leg.count)]
        if self._full or self._sent == len(self._pieces):
            return False
        piece = self._pieces[self._sent]
        if self._prepared == self._sent:
            # encoded here and not before: while it is, the piece before is on the wire
            self._prepare(piece)
            self._prepared += 1
            number = self._number(self._sent)
            self._flying = [*leg.route.put(leg.areas, piece.sent, leg.targets, number)]
        # a flush of what still flies would spin, on the core that others compute on
        if not MPI.Request.Testall(self._flying):
            return False
        # flushed, then told: a token may overtake what isn't in the reader's memory yet
        leg.route.sent(leg.targets, self._number(self._sent))
        self._sent += 1
        return True

    def _take_in(self) -> bool:
        # from each source the token of its next piece; the sources needn't be equally far
        moved, many = False, len(self._pieces)
        for rank, there in self._arrived.items():
            if there < many and self._leg.route.signals.arrived(rank, self._number(there)):
                self._arrived[rank] += 1
                moved = True
        return moved

    def _number(self, index: int) -> int:
        """What says that the piece sent as the ``index``-th is there."""
        return self._leg.count * len(self._pieces) + self._pieces[index].number

    def _add_one(self) -> bool:
        # one at a time, so that between two the next piece can go out; the sum is written over an
        # inbox place, and the own piece must have been encoded, so all of them are there
        if self._added == min([self._prepared, *self._arrived.values()]):
            return False
        self._leg.route.sync(self._number(self._added))
        self._add(self._pieces[self._added])
        self._added += 1
        return True

    def _awaited(self) -> list[int]:
        """Who has no room, else those whose pieces are missing, else the readers."""
        missing = [source for source, there in self._arrived.items() if there < len(self._pieces)]
        return self._full or missing or [rank for rank, _ in self._leg.targets]

    def _whom(self) -> list[int]:
        return sorted(numbers(self._leg.route.signals.comm, self._awaited()))

    def _late(self) -> str:
        awaited, signals = self._awaited(), self._leg.route.signals
        rank = min(awaited)
        if self._full:
            return signals.late(rank, self._number(0), ROOM)
        if (there := self._arrived.get(rank, len(self._pieces))) < len(self._pieces):
            return signals.late(rank, self._number(there), ARRIVING)
        return f"a put to ranks {awaited} doesn't complete (round {self._leg.count})"
