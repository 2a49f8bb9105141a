"""One round between hosts, piece by piece: encoded, put, announced, taken in and summed.

Pieces are the courier's unit: while one is on the wire, those that came in are summed. The wire
therefore is hardly ever idle, and little is left to do when the last piece is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, numbers
from mpigossip.mixing.plan import SMALLEST, Piece
from mpigossip.mixing.push import ARRIVING, ROOM, PushWindow
from mpigossip.mixing.tokens import wait_all


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


class Stream:
    """One round of pushes and arrivals as the courier runs it; :meth:`run` does all of it."""

    def __init__(
        self,
        push: PushWindow,
        pieces: Sequence[Piece],
        message: torch.Tensor,
        targets: Sequence[tuple[int, int]],
        sources: Sequence[int],
        count: int,
        prepare: Callable[[Piece], None],
        add: Callable[[Piece], None],
        ready: Callable[[Piece], bool] = lambda piece: True,
    ):
        """``prepare`` is called before a piece is put, ``add`` when it is in from all sources.

        ``pieces`` in the order in which all ranks send them; ``ready``: whether one may be sent.
        """
        self._push, self._pieces, self._message, self._count = push, pieces, message, count
        self._targets, self._readers = targets, [rank for rank, _ in targets]
        self._prepare, self._add, self._ready = prepare, add, ready
        self._arrived = dict.fromkeys(sources, 0)
        self._prepared = self._sent = self._added = 0
        self._flying: list[MPI.Request] = []
        self._full = list(self._readers)

    def begin(self) -> None:
        """What of :meth:`run` can be done at once."""
        self._moved()

    def run(self) -> None:
        """Send and take in all pieces; LateError where nothing moves until the deadline."""
        while not self._over:
            Deadline(self._push.timeout_s).wait(
                self._moved, self._late, self._rest,
                lambda: numbers(self._push.comm, self._awaited()),
            )  # fmt: skip

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
        return self._push.courier.rest([*filter(None, self._flying), *self._push.awaited()])

    def _send(self) -> bool:
        # a reader frees the place of this round when it has summed round t - 2: without its token
        # the put would overwrite what it still reads
        self._full = [rank for rank in self._full if not self._push.room(rank, self._count)]
        if self._full or self._sent == len(self._pieces):
            return False
        if self._prepared == self._sent:
            if not self._ready(self._pieces[self._sent]):
                return False
            piece = self._pieces[self._prepared]
            # encoded here and not before: while it is, the piece before is on the wire
            self._prepare(piece)
            self._prepared += 1
            self._flying = self._push.put_at_once(
                self._message, piece.sent, self._targets, self._count
            )
        # a flush of what still flies would spin, on the core that others compute on
        if not MPI.Request.Testall(self._flying):
            return False
        # flushed, then told: a token may overtake what isn't in the reader's memory yet
        self._push.sent(self._readers, self._number(self._sent))
        self._sent += 1
        return True

    def _take_in(self) -> bool:
        # from each source the token of its next piece; the sources needn't be equally far
        moved, many = False, len(self._pieces)
        for rank, there in self._arrived.items():
            if there < many and self._push.arrived(rank, self._number(there)):
                self._arrived[rank] += 1
                moved = True
        return moved

    def _number(self, index: int) -> int:
        """What says that the piece sent as the ``index``-th is there."""
        return self._count * len(self._pieces) + self._pieces[index].number

    def _add_one(self) -> bool:
        # one at a time, so that between two the next piece can go out; the sum is written over an
        # inbox place, and the own piece must have been encoded, so all of them are there
        if self._added == min([self._prepared, *self._arrived.values()]):
            return False
        self._push.sync()
        self._add(self._pieces[self._added])
        self._added += 1
        return True

    def _awaited(self) -> list[int]:
        """The ranks that have no room, else those whose pieces are missing, else the readers."""
        missing = [rank for rank, there in self._arrived.items() if there < len(self._pieces)]
        return sorted(self._full) or sorted(missing) or sorted(self._readers)

    def _late(self) -> str:
        number = self._count * len(self._pieces)
        rank = self._awaited()[0]
        if self._full:
            return self._push.late(rank, number, ROOM)
        if self._arrived.get(rank, len(self._pieces)) < len(self._pieces):
            return self._push.late(rank, number, ARRIVING)
        return f"a put to ranks {self._readers} doesn't complete (round {self._count})"
