"""Shared memory of a node's ranks: a barrier, and the exchange of small values through it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.cluster.deadline import Deadline, numbers
from mpigossip.cluster.world import World

LINE = 64
"""Bytes of a cache line: each rank writes into lines of its own."""
PAGE = 4096
"""Bytes of a page: the memory of each rank begins on one."""
CAPACITY = 4096
"""Float64 values that a rank can give at once."""


class SharedMemory:
    """Equal arrays of bytes, one for each rank of a host, that all of them can access."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int):
        """Allocate zeroed arrays of ``nbytes`` bytes; collective."""
        rounded = -(-nbytes // PAGE) * PAGE
        self._comm, self.window = comm, open_window(MPI.Win.Allocate_shared, rounded, comm)
        self.arrays = [
            torch.frombuffer(self.window.Shared_query(rank)[0], dtype=torch.uint8)[:nbytes]
            for rank in range(comm.size)
        ]
        self.arrays[comm.rank].zero_()  # by its owner: pages lie near who touches them first

    def free(self) -> None:
        """Free the memory, which must no longer be used; collective."""
        self.arrays = []
        close_window(self.window, self._comm)


class Barrier:
    """A barrier of a node's ranks through memory alone."""

    def __init__(self, node: World):
        """``node``: its ranks; collective."""
        self._node, self._shared = node, SharedMemory(node.comm, LINE + 2 * 8 * CAPACITY)
        self._arrived, self._working = (
            [array[at : at + 8].numpy().view(np.int64) for array in self._shared.arrays]
            for at in (0, 8)
        )
        self._values = [
            array[LINE:].view(torch.float64).view(2, CAPACITY) for array in self._shared.arrays
        ]
        self._count = 0
        node.barrier()  # until all memory is zeroed

    def wait(self, purpose: str) -> None:
        """Wait for all ranks of the node; what they wrote before is then visible.

        LateError after twice the node's time limit, which restarts while a late rank reports that
        it is working.
        """
        node, window = self._node, self._shared.window
        self._count += 1
        window.Sync()
        self._arrived[node.rank][0] = self._count
        window.Sync()

        def missing() -> list[int]:
            return [rank for rank, count in enumerate(self._arrived) if count[0] < self._count]

        def late() -> str:
            world = numbers(node.comm, missing())
            return f"{purpose}: rank {', '.join(map(str, world))} of this node didn't come"

        deadline, heard = Deadline(2 * node.timeout_s), [-1]

        def all_arrived() -> bool:
            awaited = missing()
            signs = [int(self._working[rank][0]) for rank in awaited]
            if signs != heard:
                heard[:] = signs
                deadline.renew()
            return not awaited

        deadline.wait(all_arrived, late, whom=lambda: numbers(node.comm, missing()))
        window.Sync()

    def works(self) -> None:
        """Report that this rank is alive, in a long piece of work."""
        self._working[self._node.rank][0] += 1

    def gather(self, values: Sequence[float] | torch.Tensor) -> list[torch.Tensor]:
        """Return the values of each rank by rank: at most `CAPACITY` float64, equally many."""
        count = len(values)
        # the half of the barrier before last: who still reads it hasn't come to the last one
        half = self._count % 2
        self._values[self._node.rank][half, :count] = torch.as_tensor(values, dtype=torch.float64)
        self.wait("sums over the node's slots")
        return [given[half, :count].clone() for given in self._values]

    def close(self) -> None:
        """Free the memory; collective."""
        self._arrived, self._working, self._values = [], [], []
        self._shared.free()
