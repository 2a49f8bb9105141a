"""Neighbours on the same host: their outboxes are read in place through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.mixing.combine import combine
from mpigossip.mixing.notifications import ARRIVING, Tokens

READY, DONE, REDUCED, HALF = 1, 2, 3, 4
ALIGN = 4096
"""Bytes that each area begins at a multiple of: a page, so that whole cache lines are written."""


def rounded(nbytes: int) -> int:
    """Bytes of an area for so many."""
    return -(-nbytes // ALIGN) * ALIGN


class SharedHost:
    """The window memory of all ranks of one host: an outbox and a result area a rank.

    A round: the owner fills its outbox and says READY to its readers; a reader sums and says
    DONE; the owner waits for DONE before it writes again. ``Win.Sync`` stands between memory
    and tokens. READY also says that the owner's result area is free: two ranks that average
    with each other write one half each of one result, and both read it there.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int, timeout_s: float):
        """``comm``: the ranks of this host (collective); ``nbytes``: of one message."""
        self.size, self.rank = comm.size, comm.rank
        self.others = [rank for rank in range(comm.size) if rank != comm.rank]
        room = rounded(nbytes)
        self._window = open_window(MPI.Win.Allocate_shared, 2 * room, comm)
        self._tokens = Tokens(comm, timeout_s)
        areas = [self._area(rank) for rank in range(comm.size)]
        self.outboxes = [area[:nbytes] for area in areas]
        self._results = [area[room : room + nbytes] for area in areas]
        self.own, self.result = self.outboxes[self.rank], self._results[self.rank]
        self._halves: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    def _area(self, rank: int) -> torch.Tensor:
        memory, _ = self._window.Shared_query(rank)
        return torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def waited(self) -> float:
        """Seconds spent waiting for tokens."""
        return self._tokens.waited

    def publish(self, readers: Sequence[int], t: int) -> None:
        """Say to the readers that the outbox of round t is whole."""
        self._window.Sync()
        self._tell(readers, READY, t)

    def await_ready(self, sources: Sequence[int], t: int) -> None:
        """Wait until the sources' outboxes of round t are whole."""
        self._await(sources, READY, t, ARRIVING)
        self._window.Sync()

    def release(self, sources: Sequence[int], t: int) -> None:
        """Say to the sources that their outboxes were read."""
        self._tell(sources, DONE, t)

    def await_done(self, readers: Sequence[int], t: int) -> None:
        """Wait until the readers of round t are done with the outbox."""
        self._await(readers, DONE, t, "waiting for a neighbour to have read the model")

    def _tell(self, ranks: Sequence[int], tag: int, t: int) -> None:
        self._tokens.send(ranks, tag, t)

    def _await(self, ranks: Sequence[int], tag: int, t: int, what: str) -> None:
        self._tokens.wait(ranks, tag, t, what)

    def average_pair(
        self, parts: Sequence[tuple[torch.dtype, slice]], weight: float, partner: int, t: int
    ) -> torch.Tensor:
        """``weight · (own + partner's)`` in one result area, uint8, for both; each does one half.

        The partner does the same at the same time: half of the arithmetic, and what is read and
        written is less than for an average in place. :meth:`leave_pair` when it was read.
        """
        if partner not in self._halves:
            self._halves[partner] = self._half(parts, partner)
        # the partner's outbox is whole, and so it has left its old result: this half may be written
        self.await_ready([partner], t)
        for own, theirs, out in self._halves[partner]:
            combine([weight] * 2, [own, theirs], out)
        # the partner's half of the same result comes last: what is returned is whole
        self._window.Sync()
        self._tell([partner], HALF, t)
        self.await_half(partner, t)
        return self._results[min(self.rank, partner)]

    def _half(
        self, parts: Sequence[tuple[torch.dtype, slice]], partner: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """What this rank sums of a pair's: own outbox, the partner's, the result of both."""
        found = []
        for dtype, part in parts:
            count = (part.stop - part.start) // dtype.itemsize
            middle = count // 2 // 16 * 16  # a cache line belongs to one of the two
            half = slice(0, middle) if self.rank < partner else slice(middle, count)
            areas = (self.own, self.outboxes[partner], self._results[min(self.rank, partner)])
            if half.start < half.stop:
                views = (area[part].view(dtype)[half].unsqueeze(0) for area in areas)
                found.append(tuple(views))
        return found

    def leave_pair(self, partner: int, t: int) -> None:
        """The average was read here; its area's owner waits until it was by both."""
        if self.rank > partner:
            self._tell([partner], DONE, t)
        else:
            self.await_done([partner], t)

    def await_half(self, partner: int, t: int) -> None:
        """Wait until the partner has written its half, and so is done with the outbox."""
        self._await([partner], HALF, t, "waiting for a neighbour's half of the average")
        self._window.Sync()

    def average(self, parts: Sequence[tuple[torch.dtype, slice]], t: int) -> None:
        """Exact average of all outboxes into every rank's result area, in rank order.

        Rank r sums chunk r and writes it to all results: one pass over the memory.
        """
        # all outboxes are whole, and nobody reads an old result any more: chunks may be written
        self.await_ready(self.others, t)
        for dtype, part in parts:
            sources = [area[part].view(dtype).chunk(self.size) for area in self.outboxes]
            targets = [area[part].view(dtype).chunk(self.size) for area in self._results]
            if self.rank >= len(targets[0]):
                continue
            mine = targets[self.rank][self.rank]
            rows = [chunks[self.rank].unsqueeze(0) for chunks in sources]
            copies = [targets[rank][self.rank].unsqueeze(0) for rank in self.others]
            combine([1 / self.size] * self.size, rows, mine.unsqueeze(0), *copies)
        # every rank has written its chunk into this rank's result, and left this rank's outbox
        self._window.Sync()
        self._tell(self.others, REDUCED, t)
        self._await(self.others, REDUCED, t, "global average")
        self._window.Sync()

    def close(self) -> None:
        """Free window and communicator; collective. The memory must not be used any more."""
        self.outboxes, self._results, self.own, self.result = [], [], None, None
        self._halves = {}
        close_window(self._window, self._tokens.comm)
        self._tokens.close()


def open_host(
    comm: MPI.Intracomm, nbytes: int, timeout_s: float
) -> tuple[SharedHost | None, dict[int, int]]:
    """Shared memory of this host's ranks, and their places in it by rank; none for one alone."""
    on_host: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        if on_host.size == 1 < comm.size:
            return None, {}
        places = {rank: place for place, rank in enumerate(on_host.allgather(comm.rank))}
        return SharedHost(on_host, nbytes, timeout_s), places
    finally:
        on_host.Free()
