"""The exact average over all ranks by messages, summed in rank order: the same bits everywhere."""

from __future__ import annotations

import torch
from mpi4py import MPI

from mpigossip.mixing.base import combine
from mpigossip.mixing.tokens import wait_all

SCATTER, GATHER = 21, 22
PIECE = 1 << 18
"""Elements of a chunk in the exact average: n of them are in memory at once."""


def average(comm: MPI.Comm, own: torch.Tensor, out: torch.Tensor, timeout_s: float) -> float:
    """``out = (Σ_j own_j) / n`` over the ranks of ``comm``, in rank order; seconds waited.

    ``own`` and ``out`` are contiguous CPU arrays (p,) of equal dtype. Piece by piece a
    reduce-scatter (rank r sums chunk r in rank order) and an all-gather: each rank sends
    2(n−1)/n of the vector, and all ranks hold the same bits.
    """
    rank, n = comm.rank, comm.size
    waited = 0.0
    scratch = torch.empty(n, max(1, min(PIECE, -(-own.numel() // n))), dtype=own.dtype)
    for begin in range(0, own.numel(), n * scratch.shape[1]):
        piece = slice(begin, begin + n * scratch.shape[1])
        mine, whole = own[piece].chunk(n), out[piece].chunk(n)
        # chunk() may give fewer than n parts: the ranks behind them have nothing to sum
        peers = [j for j in range(n) if j != rank]
        width = mine[rank].numel() if rank < len(mine) else 0
        received = {j: comm.Irecv(scratch[j, :width].numpy(), j, SCATTER) for j in peers if width}
        sent = {j: comm.Isend(mine[j].numpy(), j, SCATTER) for j in peers if j < len(mine)}
        waited += _settle(received, sent, timeout_s)
        if width:
            terms = [mine[rank] if j == rank else scratch[j, :width] for j in range(n)]
            rows = [term.unsqueeze(0) for term in terms]
            combine([1 / n] * n, rows, whole[rank].unsqueeze(0))
        received = {j: comm.Irecv(whole[j].numpy(), j, GATHER) for j in peers if j < len(whole)}
        sent = {j: comm.Isend(whole[rank].numpy(), j, GATHER) for j in peers if width}
        waited += _settle(received, sent, timeout_s)
    return waited


def mean(comm: MPI.Comm, x: torch.Tensor, timeout_s: float) -> torch.Tensor:
    """Exact average over ranks of x (1, p), summed in rank order: (p,), equal bits."""
    own = x[0].contiguous().cpu()
    out = torch.empty_like(own)
    average(comm, own, out, timeout_s)
    return out.to(x.device)


def mean_scalars(comm: MPI.Comm, values: torch.Tensor, timeout_s: float) -> torch.Tensor:
    """Average over ranks of small float64 values (1, k), in rank order: (k,)."""
    own, n = values.contiguous().cpu(), comm.size
    rows = torch.empty(n, own.shape[1], dtype=own.dtype)
    request = comm.Iallgather(own.numpy(), rows.numpy())
    wait_all({0: request}, timeout_s, lambda _: "average of scalars: a rank is late")
    return combine([1 / n] * n, list(rows.split(1)), torch.empty_like(own))[0]


def gather(comm: MPI.Comm, own: torch.Tensor, timeout_s: float) -> tuple[torch.Tensor, float]:
    """All ranks' encoded messages, uint8 (n, bytes) by rank, and the seconds waited."""
    everyone = torch.empty(comm.size, own.numel(), dtype=torch.uint8)
    everyone[comm.rank].copy_(own)
    peers = [j for j in range(comm.size) if j != comm.rank]
    received = {j: comm.Irecv(everyone[j].numpy(), j, GATHER) for j in peers}
    sent = {j: comm.Isend(own.numpy(), j, GATHER) for j in peers}
    return everyone, _settle(received, sent, timeout_s)


def _settle(received: dict, sent: dict, timeout_s: float) -> float:
    say = "global average: rank {} doesn't answer".format
    return wait_all(received, timeout_s, say) + wait_all(sent, timeout_s, say)
