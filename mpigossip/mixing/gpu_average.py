"""Exact averages of GPU memory over all nodes, each sum in rank order; used by DeviceWindows.

Rank r sums chunk r of all outboxes and hands it to everyone, so that all hold the same bits and
each moves 2(n−1)/n of a message. Untested on a GPU; the CPU runs the same code in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.aware import raw
from mpigossip.mixing.base import combine
from mpigossip.mixing.memory import current
from mpigossip.mixing.messages import GATHER, SCATTER, wait_all
from mpigossip.mixing.pieces import BySlot, Lane, on
from mpigossip.mixing.shared import SharedHost

CHUNK = 1 << 22
"""Elements that a rank sums at once where chunks travel by messages: n of them are in memory."""
Memory = Sequence[torch.Tensor]


def by_peers(
    host: SharedHost, areas: Sequence[Memory], layout: BySlot, lanes: Sequence[Lane], t: int
) -> None:
    """Through mapped memory of one host; ``areas``: each rank's outboxes, then its results.

    All ranks' outboxes are whole when they say so, and their old results read; a result is
    complete when all have said that they are done.
    """
    host.publish(host.others, t)
    host.await_ready(host.others, t)
    n, rank = host.size, host.rank
    for slot, lane in enumerate(lanes):
        sources = [area[slot] for area in areas]
        targets = [area[slot + len(lanes)] for area in areas]
        with current(lane.device), on(lane.into):
            for dtype, part in layout.of(slot).parts:
                terms = [area[part].view(dtype).chunk(n) for area in sources]
                results = [area[part].view(dtype).chunk(n) for area in targets]
                if rank >= len(terms[0]):  # fewer elements than ranks
                    continue
                rows = [chunks[rank].unsqueeze(0) for chunks in terms]
                mine = results[rank][rank]
                combine([1 / n] * n, rows, mine.unsqueeze(0))
                for other in host.others:
                    results[other][rank].copy_(mine, non_blocking=True)
    for lane in lanes:
        lane.drain()
    host.release(host.others, t)
    host.await_done(host.others, t)


def by_messages(
    comm: MPI.Comm, own: Memory, mixed: Memory, layout: BySlot, lanes, timeout_s: float
) -> None:
    """Through messages from GPU to GPU, where MPI is proven to move them."""
    for slot, lane in enumerate(lanes):
        for dtype, part in layout.of(slot).parts:
            terms, result = own[slot][part].view(dtype), mixed[slot][part].view(dtype)
            _average(comm, terms, result, lane, timeout_s)


def _average(
    comm: MPI.Comm, own: torch.Tensor, out: torch.Tensor, lane: Lane, timeout_s: float
) -> None:
    rank, n = comm.rank, comm.size
    peers = [j for j in range(n) if j != rank]
    width = max(1, min(CHUNK, -(-own.numel() // n)))
    with current(lane.device), on(lane.into):
        scratch = torch.empty(n, width, dtype=own.dtype, device=own.device)
        for begin in range(0, own.numel(), n * width):
            piece = slice(begin, begin + n * width)
            # chunk() may give fewer than n parts: the ranks behind them have nothing to sum
            mine, whole = own[piece].chunk(n), out[piece].chunk(n)
            count = mine[rank].numel() if rank < len(mine) else 0
            lane.drain()  # MPI knows of no stream
            _exchange(
                {j: comm.Irecv(raw(scratch[j, :count]), j, SCATTER) for j in peers if count},
                {j: comm.Isend(raw(mine[j]), j, SCATTER) for j in peers if j < len(mine)},
                timeout_s,
            )
            if count:
                terms = [mine[rank] if j == rank else scratch[j, :count] for j in range(n)]
                rows = [term.unsqueeze(0) for term in terms]
                combine([1 / n] * n, rows, whole[rank].unsqueeze(0))
                lane.drain()
            _exchange(
                {j: comm.Irecv(raw(whole[j]), j, GATHER) for j in peers if j < len(whole)},
                {j: comm.Isend(raw(whole[rank]), j, GATHER) for j in peers if count},
                timeout_s,
            )


def gather(comm: MPI.Comm, codes: Memory, lanes, timeout_s: float) -> list[torch.Tensor]:
    """All ranks' encoded messages: per slot (n, bytes) by rank, on the slot's device."""
    peers, everyone = [j for j in range(comm.size) if j != comm.rank], []
    for own, lane in zip(codes, lanes, strict=True):
        with current(lane.device), on(lane.into):
            all_codes = torch.empty(comm.size, own.numel(), dtype=torch.uint8, device=own.device)
            lane.drain()
            _exchange(
                {j: comm.Irecv(raw(all_codes[j]), j, GATHER) for j in peers},
                {j: comm.Isend(raw(own), j, GATHER) for j in peers},
                timeout_s,
            )
        everyone.append(all_codes)
    return everyone


def _exchange(received: dict, sent: dict, timeout_s: float) -> None:
    say = "global average on GPUs: rank {} doesn't answer".format
    wait_all(received, timeout_s, say)
    wait_all(sent, timeout_s, say)
