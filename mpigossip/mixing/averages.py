"""Exact averages over all ranks by messages, summed in rank order: the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from mpi4py import MPI

from mpigossip.cluster.world import World
from mpigossip.mixing.base import Common, Layout
from mpigossip.mixing.combine import combine
from mpigossip.mixing.notifications import called, everybody, wait_all

AVERAGE = 21
SHARE = 1 << 18
"""Elements that a rank sums at once in an exact average: n times as many are in memory."""


Swap = Callable[[dict[int, torch.Tensor], dict[int, torch.Tensor]], float]
"""Brings arrays to other ranks, and theirs here; contiguous, by rank. Seconds waited."""


def average(
    comm: MPI.Comm,
    own: torch.Tensor,
    out: torch.Tensor,
    timeout_s: float,
    *,
    share: int = SHARE,
    room: Callable[[int], torch.Tensor] | None = None,
    swap: Swap | None = None,
) -> float:
    """``out = (Σ_j own_j) / n`` over the ranks of ``comm``, in rank order; seconds waited.

    ``own`` and ``out`` are contiguous arrays (p,) of equal dtype. Piece by piece a
    reduce-scatter (rank r sums chunk r in rank order) and an all-gather: each rank sends
    2(n−1)/n of the vector, and all ranks hold the same bits. Arrays on a GPU need ``room(count)``,
    memory there that others may write, and ``swap``, which knows what still computes there.
    """
    rank, n = comm.rank, comm.size
    swap = swap or partial(swapped, comm, timeout_s)
    waited, peers = 0.0, [j for j in range(n) if j != rank]
    most = max(1, min(share, -(-own.numel() // n)))
    scratch = (room(n * most) if room else torch.empty(n * most, dtype=own.dtype)).view(n, most)
    for begin in range(0, own.numel(), n * most):
        piece = slice(begin, begin + n * most)
        # chunk() may give fewer than n parts: the ranks behind them have nothing to sum
        mine, whole = own[piece].chunk(n), out[piece].chunk(n)
        width = mine[rank].numel() if rank < len(mine) else 0
        # everyone's chunk `rank` comes here, and this rank's other chunks go to those who sum them
        sent = {j: mine[j] for j in peers if j < len(mine)}
        waited += swap(sent, {j: scratch[j, :width] for j in peers if width})
        if width:
            terms = [mine[rank] if j == rank else scratch[j, :width] for j in range(n)]
            rows = [term.unsqueeze(0) for term in terms]
            combine([1 / n] * n, rows, whole[rank].unsqueeze(0))
        # the sum goes to everyone, and theirs come straight into the result
        sent = {j: whole[rank] for j in peers if width}
        waited += swap(sent, {j: whole[j] for j in peers if j < len(whole)})
    return waited


def average_message(
    comm: MPI.Comm, layout: Layout, message: torch.Tensor, result: torch.Tensor, timeout_s: float
) -> float:
    """The exact average of messages, uint8 as the layout says; seconds waited."""
    waited = 0.0
    for dtype, part in layout.parts:
        own, out = message[part].view(dtype), result[part].view(dtype)
        waited += average(comm, own, out, timeout_s)
    return waited


def gather(comm: MPI.Comm, own: torch.Tensor, everyone: torch.Tensor, swap: Swap) -> float:
    """Fill ``everyone``, (n, bytes) by rank, with all ranks' ``own``, uint8; seconds waited.

    The row of this rank is left as it is.
    """
    peers = [j for j in range(comm.size) if j != comm.rank]
    return swap({j: own for j in peers}, {j: everyone[j] for j in peers})


def raw(memory: torch.Tensor) -> MPI.buffer:
    """The bytes of a contiguous array as a buffer for MPI calls, wherever they lie."""
    return MPI.buffer.fromaddress(memory.data_ptr(), memory.numel() * memory.element_size())


def swapped(
    comm: MPI.Comm, timeout_s: float, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]
) -> float:
    """Bring arrays to other ranks and theirs here, by rank, by MPI's messages; seconds waited."""

    def say(rank: int) -> str:
        return f"global average: {called(comm, rank)} doesn't answer"

    received = {j: comm.Irecv(raw(memory), j, AVERAGE) for j, memory in into.items()}
    sent = {j: comm.Isend(raw(memory), j, AVERAGE) for j, memory in out.items()}
    waited = wait_all(received, timeout_s, say, comm=comm)
    return waited + wait_all(sent, timeout_s, say, comm=comm)


class OfRank(Common):
    """What the mixers between ranks have: rank i is node i; exact averages, off the hot path."""

    def __init__(self, graph, layout: Layout, world: World, timeout_s: float):
        """Collective over ``world``; ``graph.n`` must be its size."""
        if graph.n != world.size:
            raise ValueError(f"a graph of {graph.n} nodes can't run on {world.size} ranks")
        odd = [w for w in layout.widths if layout.dtype.itemsize * layout.vectors * w % 8]
        if layout.scalars and odd:
            raise ValueError(
                f"{layout.vectors} vectors of {odd[0]} {layout.dtype} are no whole number of 8 "
                "bytes, and scalars (float64) stand behind them: pad the vectors to an even width"
            )
        super().__init__(graph, layout, range(world.rank, world.rank + 1))
        self.rank, self._comm, self._timeout_s = world.rank, world.duplicate(), timeout_s
        self._comm.timeout_s = timeout_s
        self._beside = world.beside

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Exact average over nodes of x (1, p), summed in node order: (p,), equal bits."""
        own = x[0].contiguous().cpu()
        out = torch.empty_like(own)
        average(self._comm, own, out, self._timeout_s)
        return out.to(x.device)

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """Average over nodes of small float64 values (1, k), in node order: (k,)."""
        own, n = values.contiguous().cpu(), self.n
        rows = torch.empty(n, own.shape[1], dtype=own.dtype)
        request = self._comm.Iallgather(own.numpy(), rows.numpy())
        say = "average of scalars: a rank is late"
        wait_all({0: request}, self._timeout_s, lambda _: say, everybody)
        return combine([1 / n] * n, list(rows.split(1)), torch.empty_like(own))[0]

    def _average_whole(self, comm: MPI.Comm, message: torch.Tensor, result: torch.Tensor) -> float:
        """The exact average of messages, uint8 as the layout says; seconds waited."""
        return average_message(comm, self.layout, message, result, self._timeout_s)
