"""What the ranks of a node write for each other: where each has come to, and small numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.cluster.deadline import Deadline, numbers
from mpigossip.cluster.world import World

LINE = 64
"""Bytes of a cache line: what each rank writes has lines of its own."""
PAGE = 4096
"""Bytes that the memory of a rank is a multiple of."""
ROOM = 4096
"""Float64 values that a rank can show at once."""


class Shared:
    """An equal piece of one host's memory for each of its ranks, reached by all; collective."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int):
        """Zeroed pieces of ``nbytes`` bytes, each beginning on a page of its own."""
        room = -(-nbytes // PAGE) * PAGE
        self._comm, self.window = comm, open_window(MPI.Win.Allocate_shared, room, comm)
        self.pieces = [
            torch.frombuffer(self.window.Shared_query(rank)[0], dtype=torch.uint8)[:nbytes]
            for rank in range(comm.size)
        ]
        self.pieces[comm.rank].zero_()  # by whom it belongs to: there the pages lie

    def free(self) -> None:
        """Give the memory back; collective. It must not be used any more."""
        self.pieces = []
        close_window(self.window, self._comm)


class Board:
    """Meetings of the ranks of a node, through memory alone."""

    def __init__(self, node: World):
        """``node``: its ranks; collective."""
        self._node, self._shared = node, Shared(node.comm, LINE + 2 * 8 * ROOM)
        self._come, self._works = (
            [piece[at : at + 8].numpy().view(np.int64) for piece in self._shared.pieces]
            for at in (0, 8)
        )
        self._shown = [piece[LINE:].view(torch.float64).view(2, ROOM) for piece in
                       self._shared.pieces]  # fmt: skip
        self._count = 0
        node.barrier()  # nobody reads what isn't zeroed yet

    def meet(self, what: str) -> None:
        """Wait until all ranks of the node have come; what they wrote before is then seen.

        LateError at the time limit of the node, which counts anew while who is awaited works.
        """
        node, window = self._node, self._shared.window
        self._count += 1
        window.Sync()
        self._come[node.rank][0] = self._count
        window.Sync()

        def missing() -> list[int]:
            return [rank for rank, count in enumerate(self._come) if count[0] < self._count]

        def late() -> str:
            world = numbers(node.comm, missing())
            return f"{what}: rank {', '.join(map(str, world))} of this node didn't come"

        deadline, heard = Deadline(2 * node.timeout_s), [-1]

        def come() -> bool:
            awaited = missing()
            signs = [int(self._works[rank][0]) for rank in awaited]
            if signs != heard:
                heard[:] = signs
                deadline.renew()
            return not awaited

        deadline.wait(come, late, whom=lambda: numbers(node.comm, missing()))
        window.Sync()

    def works(self) -> None:
        """This rank is at a long piece of work, and still alive."""
        self._works[self._node.rank][0] += 1

    def show(self, values: Sequence[float] | torch.Tensor) -> list[torch.Tensor]:
        """What each rank shows, at most `ROOM` float64 values, by rank; equally many of each."""
        count = len(values)
        # the half of the meeting before last: who still reads that hasn't come to the last one
        half = self._count % 2
        self._shown[self._node.rank][half, :count] = torch.as_tensor(values, dtype=torch.float64)
        self.meet("sums over the node's slots")
        return [shown[half, :count].clone() for shown in self._shown]

    def close(self) -> None:
        """Give the memory back; collective."""
        self._come, self._works, self._shown = [], [], []
        self._shared.free()
