"""Groups: a group connects the slots of a node, which average gradients and gather parameters.

The module defines the interface, the group of a single slot, and a group without shards.
"""

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

RANKS_LIMIT = 2
"""Number of time limits for which ranks of a node wait for each other. It is more than 1, because
the awaited rank may itself be waiting for another node, and should report that first."""


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that shows a phase of a step in torch's profiler.

    It costs very little while no profiler runs.
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
    """Error of slots that can't work together; the message contains a remedy."""


def end_job(text: str) -> None:
    """End the job from any thread, with the error message ``text``.

    If a world is open, all of its ranks are aborted; otherwise, only this process ends.
    """
    try:
        raise GroupError(text)
    except GroupError as error:
        args = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(args))
    sys.stderr.flush()
    os._exit(1)


class Group(Protocol):
    """Interface of the group of the L slots of a node.

    A parameter ``full`` holds for each slot an array (rows, P), such as its gradient, and a
    parameter ``shards`` holds for each slot its shard, an array (rows, P/L). Shard l has the
    columns l · P/L to (l + 1) · P/L − 1 of the whole array. Lists have an element for each slot of
    this process (``local_slots``): these are all slots of the node, or the slots of one rank.
    Calls are collective over the ranks of the node, except :meth:`works`. On a GPU, work is
    launched on the default stream of the device. The methods that are implemented here are right if
    all slots are in this process.
    """

    slots: int
    """Number of slots of the node, L."""
    local_slots: range
    """Slots of this process."""
    segments: int
    """Number of shards of the node that are updated and exchanged: L, or 1 if slot 0 updates and
    exchanges everything (:class:`Unsharded`)."""
    devices: tuple[str, ...]
    """Devices of the slots of this process."""
    starts_means: bool = False
    """True if gradients can be averaged in parts while the backward pass continues."""

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Return for each slot a zeroed float32 array (rows, columns), which all calls accept."""
        dtype = torch.float32  # the program may have set another default
        return [torch.zeros(rows, columns, dtype=dtype, device=d) for d in self.devices]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work(k)`` for all slots of this process at the same time; return the results.

        k is the index of the slot in ``local_slots``.
        """

    def on_shards(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work(k)`` for the k-th shard of this process, for all k; return the results.

        Each call is made in the thread of the slot that updates the shard.
        """

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return for each slot its shard of the mean over slots; this overwrites ``full``.

        The sum is in slot order, unless NCCL chooses the order. Other slots may still read the
        arrays until the next call of any method, so the caller may only change the shards.
        """

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Copy the shards of all slots to every slot's array in ``full``.

        The shards may be views of these arrays.
        """

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Copy slot 0's array to the arrays of all slots."""
        return

    def sum_scalars(self, per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of small float64 arrays (rows, k) over slots, in slot order."""
        return sum_in_order(per_slot)

    def works(self) -> None:
        """Report to the other processes of the node, if any, that this process is still working.

        Their waits for this process then start their time limit again.
        """
        return

    def to_first(self, per_slot: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the arrays of all slots, in slot order, in the node's first process.

        All other processes return None. The arrays must have equal shapes and dtypes; arrays
        of other processes are copies on the CPU.
        """
        return list(per_slot)

    def close(self) -> None:
        """Release threads and communicators."""
        return


def local_shards(group: Group) -> range:
    """Return the numbers of the shards that this process updates and exchanges."""
    return range(1) if group.segments == 1 else group.local_slots


def shard_views(
    full: Sequence[torch.Tensor], segments: int | None = None, local: range | None = None
) -> list[torch.Tensor]:
    """Return for each slot its shard, as a view (rows, P/segments) of the slot's array in ``full``.

    :param full: for each slot an array (rows, P)
    :param segments: number of shards; 1 if slot 0 has all elements; None: one shard for each slot
    :param local: shards of this process; None: all shards
    """
    segments = len(full) if segments is None else segments
    local = range(segments) if local is None else local
    return [array.chunk(segments, dim=1)[s] for s, array in zip(local, full, strict=False)]


def sum_in_order(per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the arrays, in the given order, on the device of the first one."""
    total = per_slot[0]
    for term in per_slot[1:]:
        total = total + term.to(total.device)
    return total


class Single(Group):
    """Group of one slot, which exchanges nothing, and whose shard is the whole array."""

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
    """Group of slots whose parameters are not sharded (``node.shard = false``).

    The gradients of all slots are averaged in slot 0. It keeps the only state of the optimizer,
    updates and exchanges all parameters, and copies them to the other slots. Algorithms that are
    not elementwise need this, and tests compare the sharded step with it.
    """

    segments = 1
    starts_means = False

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
