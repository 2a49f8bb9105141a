"""The contract of a group of slots inside a node, and the group of a single slot."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator that shows a phase of a step in torch's profiler, and costs nothing without one."""

    def decorated(work: Callable[P, T]) -> Callable[P, T]:
        @wraps(work)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            if not torch.autograd._profiler_enabled():
                return work(*args, **kwargs)
            with record_function(f"mpigossip: {name}"):
                return work(*args, **kwargs)

        return named

    return decorated


class GroupError(RuntimeError):
    """The slots of a node can't work together: device, call and remedy are named."""


def end_job(text: str) -> None:
    """End the job from a thread: the hook of an open world aborts all ranks, else this process."""
    try:
        raise GroupError(text)
    except GroupError as error:
        args = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(args))
    sys.stderr.flush()
    os._exit(1)


class Group(Protocol):
    """The L slots of a node. ``full``: per slot an array (rows, P); shard l: columns l·P/L on.

    All lists run over the slots that live in this process, ``mine``: all of them, or those of one
    of the node's ranks. Calls are collective over these. ``segments`` is the number of shards that
    are updated and exchanged: L, or 1 where slot 0 does it for all (:class:`Whole`). Work on a GPU
    goes to the device's default stream. What has a body here is right where all slots are in this
    process.
    """

    slots: int
    """of the node: L"""
    local_slots: range
    """those that live here"""
    segments: int
    """of the node"""
    devices: tuple[str, ...]
    """of the slots that live here"""

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Per slot an array (rows, columns) on its device that the other slots can reach."""
        return [torch.zeros(rows, columns, device=device) for device in self.devices]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """``[work(k) for every slot mine[k]]``, all at once."""

    def on_shards(self, work: Callable[[int], T]) -> list[T]:
        """``[work(k) for the k-th of the shards here]``, each where the shard is."""

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Shard l of the mean over slots, summed in slot order; contents of full are used up.

        Arrays and result may be changed by others until the next call of any method here.
        """

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Copy every slot's shard into all of ``full``; the shards may be views of it."""

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Copy slot 0's array into those of all slots."""
        return

    def sum_scalars(self, per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum over slots, in slot order, of small float64 arrays (rows, k)."""
        return sum_in_order(per_slot)

    def works(self) -> None:
        """Tell the node's other processes, if any, that this one is at work."""
        return

    def to_first(self, per_slot: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The arrays of all slots, in slot order, in the node's first process; None elsewhere.

        Equal shapes and types; those of other processes are copies on the CPU.
        """
        return list(per_slot)

    def close(self) -> None:
        """Release threads and communicators."""
        return


def local_shards(group: Group) -> range:
    """The shards that live in this process."""
    return range(1) if group.segments == 1 else group.local_slots


def shard_views(
    full: Sequence[torch.Tensor], segments: int | None = None, here: range | None = None
) -> list[torch.Tensor]:
    """Shard l as columns of slot l's own array: views (rows, P/segments) of ``full``.

    ``segments``: 1 where slot 0 has it all; None for one a slot. ``here``: the shards that live in
    this process; None: all.
    """
    segments = len(full) if segments is None else segments
    here = range(segments) if here is None else here
    return [array.chunk(segments, dim=1)[s] for s, array in zip(here, full, strict=False)]


def sum_in_order(per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in the order given, where the first term is."""
    total = per_slot[0]
    for term in per_slot[1:]:
        total = total + term.to(total.device)
    return total


class Single(Group):
    """One slot: nothing to exchange, and the shard is the whole vector."""

    slots = segments = 1
    local_slots = range(1)

    def __init__(self, device: str = "cpu"):
        self.devices = (device,)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)

    def run(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)]

    on_shards = run

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(full)

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Nothing where the shard is the array, as in training."""
        if shards[0].data_ptr() != full[0].data_ptr():
            full[0].copy_(shards[0])


class Unsharded:
    """Slots whose vectors aren't cut (``node.shard = false``): slot 0 updates and exchanges all.

    For methods that aren't elementwise, and as the reference of the sharded step: the gradients
    are averaged into slot 0, which alone keeps the optimizer's state, and its parameters are
    copied to the others.
    """

    segments = 1

    def __init__(self, inner: Group):
        self._inner = inner
        self.slots = inner.slots
        self.local_slots = inner.local_slots
        self.devices = inner.devices
        self.zeros = inner.zeros
        self.works = inner.works
        self.to_first = inner.to_first
        self.run = inner.run
        self.broadcast = inner.broadcast

    def on_shards(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)]

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._inner.all_gather(self._inner.reduce_scatter_mean(full), full)
        return [full[0]]

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Copy slot 0's vector, the only shard, to the other slots."""
        if shards[0].data_ptr() != full[0].data_ptr():
            full[0].copy_(shards[0])
        self.broadcast(full)

    def sum_scalars(self, per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum_in_order(per_slot)

    def close(self) -> None:
        self._inner.close()
