"""Exact averages of GPU memory over all nodes, each sum in rank order; used by `DeviceSlots`.

Rank r sums chunk r of all outboxes and hands it to everyone, so that all hold the same bits and
each moves 2(n−1)/n of a message. Untested on a GPU; the CPU runs the same code in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing import averages
from mpigossip.mixing.averages import average
from mpigossip.mixing.device.memory import Kept, current
from mpigossip.mixing.device.nccl import NcclPush
from mpigossip.mixing.device.push import BySlot, DevicePush, Lane, on

SHARE = 1 << 24
"""Bytes that are averaged at once by messages; more than on the CPU, as a GPU takes long to be told
to begin."""
Memory = Sequence[torch.Tensor]
Push = DevicePush | NcclPush


def rooms(devices: Sequence[torch.device], share: int) -> dict[tuple, int]:
    """What averages by messages need on every slot's device, for pieces of ``share`` bytes."""
    found = {(on, use): share for on in devices for use in ("piece", "average")}
    return found | {(on, f"chunks {slot}"): share for slot, on in enumerate(devices)}


def pieces(n: int, largest: int) -> int:
    """Bytes of a piece where the largest message has so many; an element a rank at least."""
    return max(min(SHARE, largest), 8 * n)


def mean_by_messages(
    push: Push, slot: int, own: torch.Tensor, out: torch.Tensor, lane: Lane, kept: Kept,
    share: int,
) -> None:  # fmt: skip
    """``out`` = the average of all ranks' ``own`` (p,), from GPU to GPU of a slot.

    Begun, not waited for, as :func:`by_messages` and :func:`gather` are.
    """
    step = share // own.element_size()
    for at in range(0, own.numel(), step):
        piece, averaged = own[at : at + step], out[at : at + step]
        uses = ("piece", "average")
        sent, mixed = (kept.room(lane.device, u, len(piece), own.dtype) for u in uses)
        with current(lane.device), on(lane.into):
            sent.copy_(piece)
            _average(push, slot, sent, mixed, kept, share)
            averaged.copy_(mixed)


def by_messages(
    push: Push,
    own: Memory,
    mixed: Memory,
    layout: BySlot,
    lanes,
    kept: Kept,
    share: int,
) -> None:
    """Through messages from GPU to GPU, by MPI where it is proven to move them, or by NCCL."""
    for slot, lane in enumerate(lanes):
        with current(lane.device), on(lane.into):
            for dtype, part in layout.of(slot).parts:
                terms, result = own[slot][part].view(dtype), mixed[slot][part].view(dtype)
                _average(push, slot, terms, result, kept, share)


def _average(
    push: Push,
    slot: int,
    own: torch.Tensor,
    out: torch.Tensor,
    kept: Kept,
    share: int,
) -> None:
    def room(count: int) -> torch.Tensor:
        return kept.room(own.device, f"chunks {slot}", count, own.dtype)

    comm, timeout_s = push.signals.comm, push.signals.timeout_s
    each = share // own.element_size() // comm.size
    average(comm, own, out, timeout_s, share=each, room=room, swap=push.swap(slot))


def mean_through(
    comm: MPI.Comm, through: Memory, own: torch.Tensor, out: torch.Tensor, timeout_s: float
) -> None:
    """``out`` = the average of all ranks' ``own`` (p,), piece by piece through host memory.

    ``through``: memory there for a piece and for its average, locked where that can be.
    """
    step = through[0].numel() // own.element_size()
    with current(own.device):
        for at in range(0, own.numel(), step):
            piece, averaged = own[at : at + step], out[at : at + step]
            sent, mixed = (memory.view(own.dtype)[: len(piece)] for memory in through)
            sent.copy_(piece, non_blocking=True)
            _begun(own.device)
            average(comm, sent, mixed, timeout_s)
            averaged.copy_(mixed, non_blocking=True)
            _begun(own.device)


def _begun(device: torch.device) -> None:
    """Wait for the copy that was begun: MPI knows no stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def gather(push: Push, codes: Memory, lanes, kept: Kept) -> list[torch.Tensor]:
    """All ranks' encoded messages: per slot (n, bytes) by rank, on the slot's device."""
    everyone, comm = [], push.signals.comm
    for slot, (own, lane) in enumerate(zip(codes, lanes, strict=True)):
        with current(lane.device), on(lane.into):
            room = kept.room(own.device, f"codes {slot}", comm.size * own.numel(), torch.uint8)
            everyone.append(room.view(comm.size, own.numel()))
            averages.gather(comm, own, everyone[-1], push.swap(slot))
    return everyone
