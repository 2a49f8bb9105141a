"""Interface of a group, which is all slots of a node, and the group of a single slot."""

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
    """Return a decorator that shows a phase of a step in torch's profiler.

    It costs nothing while no profiler runs.
    """

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
    """Error of slots that can't work together; the message names device, call and remedy."""


def end_job(text: str) -> None:
    """End the job from a thread: abort all ranks of an open world, otherwise this process."""
    try:
        raise GroupError(text)
    except GroupError as error:
        args = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(args))
    sys.stderr.flush()
    os._exit(1)


class Group(Protocol):
    """The L slots of a node.

    ``full`` holds for each slot an array (rows, P); shard l is the columns from l·P/L on. All lists
    run over the slots of this process, ``local_slots``: all slots of the node, or those of one of
    its ranks. Calls are collective over the ranks of the node. ``segments`` is the number of shards
    that are updated and exchanged: L, or 1 if slot 0 does it for all slots (:class:`Unsharded`).
    Work on a GPU is launched on the default stream of the device. Methods with a body here are
    right if all slots are in this process.
    """

    slots: int
    """Number of slots of the node, L."""
    local_slots: range
    """Slots of this process."""
    segments: int
    """Number of shards of the node that are updated and exchanged."""
    devices: tuple[str, ...]
    """Devices of the slots of this process."""

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Return for each slot a zeroed array (rows, columns) that the other slots can access."""
        return [torch.zeros(rows, columns, device=device) for device in self.devices]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return ``[work(k) for every slot local_slots[k]]``, all called at the same time."""

    def on_shards(self, work: Callable[[int], T]) -> list[T]:
        """Return ``[work(k) for the k-th local shard]``, each called where the shard is."""

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return shard l of the mean over slots, summed in slot order; this overwrites ``full``.

        Other slots may change the arrays and the result until the next call of any method.
        """

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Copy every slot's shard to all arrays of ``full``; the shards may be views of them."""

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Copy slot 0's array to the arrays of all slots."""
        return

    def sum_scalars(self, per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum small float64 arrays (rows, k) over slots, in slot order."""
        return sum_in_order(per_slot)

    def works(self) -> None:
        """Report to the other processes of the node, if any, that this one is working."""
        return

    def to_first(self, per_slot: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the arrays of all slots, in slot order, in the node's first process.

        All other processes return None. The arrays must have equal shapes and dtypes; those of
        other processes are copies on the CPU.
        """
        return list(per_slot)

    def close(self) -> None:
        """Release threads and communicators."""
        return


def local_shards(group: Group) -> range:
    """Return the shards of this process."""
    return range(1) if group.segments == 1 else group.local_slots


def shard_views(
    full: Sequence[torch.Tensor], segments: int | None = None, local: range | None = None
) -> list[torch.Tensor]:
    """Return shard l as columns of slot l's own array: views (rows, P/segments) of ``full``.

    :param full: for each slot an array (rows, P)
    :param segments: number of shards; 1 if slot 0 has all columns; None: one shard for each slot
    :param local: shards of this process; None: all
    """
    segments = len(full) if segments is None else segments
    local = range(segments) if local is None else local
    return [array.chunk(segments, dim=1)[s] for s, array in zip(local, full, strict=False)]


def sum_in_order(per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum in the given order, on the device of the first term."""
    total = per_slot[0]
    for term in per_slot[1:]:
        total = total + term.to(total.device)
    return total


class Single(Group):
    """Group of one slot, which has nothing to exchange and whose shard is the whole vector."""

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
        """Do nothing if the shard is the array itself, as in training; otherwise copy it."""
        if shards[0].data_ptr() != full[0].data_ptr():
            full[0].copy_(shards[0])


class Unsharded:
    """Group of slots whose vectors are not sharded (``node.shard = false``).

    Slot 0 updates and exchanges everything. This serves algorithms that aren't elementwise, and as
    the reference of the sharded step. The gradients are averaged into slot 0, which alone keeps the
    state of the optimizer, and its parameters are copied to the other slots.
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
