"""Group of slots that exchange by a torch process group, which uses NCCL between GPUs.

Each slot is a rank of the process group, and is a thread or a process. On CPUs, the group uses gloo
and serves tests only, because threads and shared memory are faster there. It has not been tested on
several GPUs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from mpigossip.cluster.captures import between_captures, observe_captures
from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.cluster.process_groups import (
    REMEDY,
    GroupRank,
    close_groups,
    is_gpu,
    launch_lock,
    open_groups,
    start_transfers,
)
from mpigossip.cluster.world import World
from mpigossip.groups.base import Group, GroupError, end_job, profiled
from mpigossip.mixing.combine import weighted_sum

T = TypeVar("T")

BUCKET = 1 << 24
"""Number of elements that a slot receives at once for a sum in slot order. The memory for them is
allocated twice, so that the next bucket is transferred while one is summed."""
BUCKET_ALIGN = 512
"""Number of elements of which the part of a bucket from each slot is a multiple, so that the kernel
of the sum can load four elements at once."""
EVERY_S = 0.5
"""Seconds between two checks of the watchdog."""
GRACE_S = 4.0
"""Seconds for which the watchdog waits until the training thread raises the failure itself.

If the training thread hangs, the watchdog then ends the job. The time is less than
`cluster.process.LEAVE_S`, after which a rank that waits for this one in vain ends the job."""


class TorchGroup:
    """Group of the L slots of a node as ranks of one torch process group.

    On GPUs, a call does not wait until the data has arrived: the current stream of the device
    waits.
    """

    def __init__(self, host: Group, node: World, order: str = "slots", timeout_s: float = 300.0):
        """Open the process group and load its kernels; collective over ``node``.

        :param host: group of the same slots for all small or rare calls; this group closes it
        :param node: ranks of the node; for threads, this process alone
        :param order: order of sums. "slots": slots exchange chunks and add them in slot order, so
            that the result is bitwise identical to the result on CPUs; "nccl": the order
            that NCCL chooses
        :param timeout_s: time limit of each call in seconds. On GPUs, a call that takes longer ends
            the job; on CPUs, it raises WaitTimeoutError
        :raises Failure: if the slots can't be connected
        :raises JobError: if an environment variable makes NCCL hang
        """
        self.slots = self.segments = host.slots
        self.local_slots = host.local_slots
        self.devices = host.devices
        self.run = self.on_shards = host.run
        self.sum_scalars = host.sum_scalars
        self.works = host.works
        self.to_first = host.to_first
        self._host = host
        self._order = order
        self._timeout_s = timeout_s
        self._barrier: Callable[[str], None] | None = (
            host.barrier.wait if node.size > 1 else None  # type: ignore[attr-defined]
        )
        self._on_gpus = is_gpu(self.devices[0])
        self._failed = False
        self._calls, self._begun_calls = 0, [0] * len(self.local_slots)
        """Number of calls so far, and number of the last call that each local slot has begun."""
        self._works: list[tuple[str, Any]] = []
        self._scratch = [torch.empty(0)] * len(self.local_slots)
        group_ranks = [
            GroupRank("inside the node", slot, self.slots, device)
            for slot, device in zip(self.local_slots, self.devices, strict=True)
        ]
        self._groups = open_groups(node, group_ranks, timeout_s)
        self._watchdog = Watchdog(timeout_s, REMEDY, device=self.devices[0])
        if self._on_gpus:
            self._watchdog.start()
        full = self.zeros(1, self.slots)
        for array in full:  # one at a time, because loading a kernel waits for the device
            weighted_sum(
                [1 / self.slots] * self.slots, [array] * self.slots, torch.empty_like(array)
            )
        self._synchronize()
        self.all_gather(self.reduce_scatter_mean(full), full)  # loads NCCL's kernels
        self._synchronize()

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        return [torch.zeros(rows, columns, device=device) for device in self.devices]

    @profiled("sum inside the node")
    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Average ``full`` over all slots; return each local slot's shard, a part of its own array.

        :param full: for each local slot an array (rows, P), which is overwritten
        :raises GroupError: if P is not a multiple of the number of slots, or if the sum fails
        """
        if full[0].shape[1] % self.slots:
            raise GroupError(
                f"{full[0].shape[1]} elements can't be split into {self.slots} equal shards; pad "
                "the vector"
            )
        shards = [
            a.chunk(self.slots, dim=1)[s] for s, a in zip(self.local_slots, full, strict=True)
        ]
        self._reserve(*shards[0].shape)

        def reduce(k: int) -> None:
            if self._order == "slots":
                self._sum(k, full[k], shards[k])
                return
            for row, shard in zip(full[k], shards[k], strict=True):  # in place
                self._wait(k, self._groups[k]._reduce_scatter_base(shard, row))
            shards[k].mul_(1 / self.slots)

        self._run_collective("reduce-scatter", reduce)
        return shards

    @profiled("gather inside the node")
    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        def gather(k: int) -> None:
            for row, shard in zip(full[k], shards[k], strict=True):
                self._wait(k, self._groups[k]._allgather_base(row, shard))

        self._run_collective("all-gather", gather)

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        self._run_collective(
            "broadcast", lambda k: self._wait(k, self._groups[k].broadcast(full[k], 0))
        )

    def close(self) -> None:
        """Wait for all calls, then release process group and slots; collective."""
        if not self._failed:
            self._synchronize()  # the watchdog limits this wait
        self._watchdog.close()
        close_groups(self._groups, self.devices, self._failed)
        self._groups = []
        self._scratch = []
        self._host.close()

    def _sum(self, k: int, array: torch.Tensor, out: torch.Tensor) -> None:
        """Average the shard of the k-th local slot over all slots, in slot order, into ``out``.

        ``array`` is the whole array of this slot; the other slots receive their shards of it. While
        a bucket of the shard is summed, the next one is transferred.
        """
        rows, width = out.shape
        step = self._bucket_width(width)
        memories = self._scratch[k].split(self.slots * step)
        waiting: list[Callable[[], None]] = []
        number = 0
        for row in range(rows):
            for begin in range(0, width, step):
                columns = slice(begin, min(begin + step, width))
                memory = memories[number % 2].view(self.slots, step)
                received = memory[:, : columns.stop - begin]
                waiting.append(self._start_bucket(k, array[row], columns, received, out[row]))
                number += 1
                if len(waiting) == 2:
                    waiting.pop(0)()
        for sum_bucket in waiting:
            sum_bucket()

    def _start_bucket(
        self,
        k: int,
        row: torch.Tensor,
        columns: slice,
        received: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[[], None]:
        """Start to send and receive a bucket; return a function that waits for it and sums it.

        :param k: index of the slot among the local slots
        :param row: whole array of this slot, (P,)
        :param columns: columns of a shard that the bucket contains
        :param received: memory for the bucket of each slot, (slots, columns)
        :param out: shard of this slot, (P/slots,), which is a part of ``row``
        """
        own = self.local_slots[k]
        shards = row.chunk(self.slots)
        others = [s for s in range(self.slots) if s != own]
        device = torch.device(self.devices[k])
        received[own].copy_(shards[own][columns])  # the sum is written over it
        works = start_transfers(
            self._groups[k],
            device,
            [(s, shards[s][columns]) for s in others],
            [(s, received[s]) for s in others],
        )

        def sum_bucket() -> None:
            for work in works:
                self._wait(k, work)
            terms = list(received.split(1))
            weighted_sum([1 / self.slots] * self.slots, terms, out[None, columns])

        return sum_bucket

    def _bucket_width(self, width: int) -> int:
        """Return the number of columns of a shard of ``width`` columns that a bucket contains."""
        whole = BUCKET // self.slots // BUCKET_ALIGN * BUCKET_ALIGN
        return min(width, max(BUCKET_ALIGN, whole))

    def _reserve(self, rows: int, width: int) -> None:
        """Allocate memory for the elements that other slots send, before any slot launches a call.

        An allocation may wait for the device, and therefore for calls of other slots.

        :param rows: number of rows of a shard
        :param width: number of columns of a shard
        """
        step = self._bucket_width(width)
        buckets = rows * -(-width // step) if step else 0
        elements = min(2, buckets) * self.slots * step
        if self._order == "slots" and self._scratch[0].numel() < elements:
            self._scratch = [torch.empty(elements, device=device) for device in self.devices]

    def _run_collective(self, call: str, work: Callable[[int], None]) -> None:
        """Call ``work`` in every slot's thread, after all ranks of the node have arrived.

        No other thread may call CUDA until all slots have launched: a call that waits for the
        device would also wait for the launches of the other slots.

        :param call: name of the collective, for messages
        :param work: function of the index of a local slot that launches the slot's part
        :raises GroupError: if the collective fails
        :raises WaitTimeoutError: if a rank or slot does not arrive in time
        """
        self._call = f"{call} over the node's slots"
        self._works = []
        if self._barrier is not None:
            self._barrier(self._call)
        self._calls += 1
        try:
            self._watchdog.check()
            if self._on_gpus:
                self._watchdog.track(self._call, self._launched(self._calls))
            with launch_lock if self._on_gpus else nullcontext():
                self.run(work)
        except (RuntimeError, TimeoutError) as error:
            self._failed = True
            self._watchdog.forget()
            if isinstance(error, GroupError | TimeoutError):
                raise
            devices = ", ".join(self.devices)
            reason = str(error).splitlines()[0]
            raise GroupError(f"{self._call} failed on {devices}: {reason}; {REMEDY}") from error
        if self._on_gpus:
            self._watchdog.track(self._call, self._works)

    def _launched(self, calls: int) -> list[tuple[str, Any]]:
        slots = zip(self.local_slots, self.devices, range(len(self.local_slots)), strict=True)
        return [
            (
                f"{device} (slot {slot} did not arrive)",
                SimpleNamespace(is_completed=lambda k=k: self._begun_calls[k] >= calls),
            )
            for slot, device, k in slots
        ]

    def _wait(self, k: int, work: Any) -> None:
        """Make the current stream of the slot's device wait for ``work``.

        On CPUs, this thread waits.

        :param k: index of the slot among the local slots
        :param work: work object of torch
        :raises WaitTimeoutError: if it takes longer than the time limit on CPUs
        :raises RuntimeError: if the call has failed
        """
        self._begun_calls[k] = self._calls
        if self._on_gpus:
            self._works.append((self.devices[k], work))
            work.wait()
            return
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError:
            if time.monotonic() - began < self._timeout_s:
                raise
            raise WaitTimeoutError(
                f"{self._describe_late()} (waited {self._timeout_s:g} s)"
            ) from None

    def _describe_late(self) -> str:
        missing = [
            s
            for s, begun in zip(self.local_slots, self._begun_calls, strict=True)
            if begun < self._calls
        ]
        names = ", ".join(map(str, missing)) or "of another process"
        return f"{self._call}: slot {names} of this node did not arrive"

    def _synchronize(self) -> None:
        for device in self.devices if self._on_gpus else ():
            torch.cuda.synchronize(device)


class Watchdog:
    """Thread that detects that a collective of the slots has failed or takes too long.

    :meth:`check` then raises an error. If it is not called within `GRACE_S`, the thread ends the
    job.
    """

    def __init__(
        self,
        timeout_s: float,
        remedy: str,
        end: Callable[[str], None] | None = None,
        device: str = "cpu",
    ):
        """Prepare the thread; :meth:`start` starts it.

        :param timeout_s: time limit of a collective, in seconds
        :param remedy: remedy in the messages
        :param end: function that ends the job with a message; None: :func:`end_job`
        :param device: device that is current in the thread
        """
        self._device = device
        self.timeout_s = timeout_s
        self._remedy = remedy
        self._end = end or end_job
        self._calls: deque[tuple[str, float, Sequence[tuple[str, Any]]]] = deque()
        self._failure = ""
        self._stop = threading.Event()
        self._noticed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpigossip-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def track(self, call: str, works: Sequence[tuple[str, Any]]) -> None:
        """Watch a collective that has begun.

        :param call: description of the collective, for messages
        :param works: device and torch's work object of each slot
        """
        self._calls.append((call, time.monotonic(), works))

    def forget(self) -> None:
        """Forget all calls so far, because the training thread raises their failure itself."""
        self._calls = deque()

    def check(self) -> None:
        """Raise GroupError if a collective has failed or is late."""
        if self._failure:
            self._noticed.set()
            raise GroupError(self._failure)

    def look(self, now: float) -> str:
        """Return the message of a failure, or "" if no collective has failed or is late.

        ``now`` is the time by `time.monotonic`, in seconds.
        """
        calls = self._calls
        while calls:
            call, began, works = calls[0]
            open_devices = []
            for device, work in works:
                try:
                    if not work.is_completed():
                        open_devices.append(device)
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    return f"{device} was lost during {call}: {reason}; {self._remedy}"
            if open_devices:
                if now - began <= self.timeout_s:
                    return ""
                devices = ", ".join(sorted({*open_devices}))
                limit = f"{self.timeout_s:g} s (node.timeout_s)"
                return f"{call} is not done on {devices} after {limit}; {self._remedy}"
            calls.popleft()
        return ""

    def _watch(self) -> None:
        if is_gpu(self._device):
            observe_captures()
            torch.cuda.set_device(self._device)
        while not self._stop.wait(EVERY_S):
            with between_captures() as may_query:  # on some AMD GPUs, a query ends a capture
                if may_query:
                    self._failure = self.look(time.monotonic())
            if self._failure:
                # the vector is invalid, so training must not continue and save it
                if not self._noticed.wait(GRACE_S) and not self._stop.is_set():
                    self._end(self._failure)
                return

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * EVERY_S)
