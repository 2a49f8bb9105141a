"""Group of slots that exchange by a torch process group, which uses NCCL between GPUs.

Each slot is a rank of the process group, and is a thread or a process. On CPUs, the group uses gloo
and serves tests only, because threads and shared memory are faster there. It has not been tested on
several GPUs.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

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
from mpigossip.groups.base import RANKS_LIMIT, Group, GroupError, end_job, profiled
from mpigossip.mixing.combine import weighted_sum

T = TypeVar("T")

SUM_BUCKET = 1 << 24
"""Number of elements that a slot receives at once for a sum in slot order: a sum bucket. An average
of a parameter bucket takes one sum bucket or several. The memory for a sum bucket is allocated
twice, so that the next one is transferred while one is summed."""
SUM_BUCKET_ALIGN = 512
"""Number of elements of which the part of a sum bucket from each slot is a multiple, so that the
kernel of the sum can load four elements at once."""
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
        # If a process has several GPUs, an allocation in the backward pass of one slot could wait
        # for a kernel of NCCL that waits for another slot. On CPUs, a sum would take cores from the
        # backward pass.
        self.starts_means = self._on_gpus and len(self.local_slots) == 1 < self.slots
        self._failed = False
        self._calls, self._begun_calls = 0, [0] * len(self.local_slots)
        """Number of calls so far, and number of the last call that each local slot has begun."""
        self._works: list[tuple[str, Any]] = []
        self._side: torch.cuda.Stream | None = None
        """Stream of averages that are computed while the current stream continues."""
        self._scratch = [torch.empty(0, dtype=torch.float32)] * len(self.local_slots)
        group_ranks = [
            GroupRank("inside the node", slot, self.slots, device)
            for slot, device in zip(self.local_slots, self.devices, strict=True)
        ]
        self._groups = open_groups(node, group_ranks, timeout_s)
        waits = (lambda: host.barrier.is_waiting) if node.size > 1 else None  # type: ignore[attr-defined]
        self._watchdog = Watchdog(timeout_s, REMEDY, device=self.devices[0], waits_for_ranks=waits)
        if self._on_gpus:
            self._watchdog.start()
        full = self.zeros(1, self.slots)
        for array in full:  # one at a time, because loading a kernel waits for the device
            weighted_sum(
                [1 / self.slots] * self.slots, [array] * self.slots, torch.empty_like(array)
            )
        self._synchronize()
        self.all_gather(self.reduce_scatter_mean(full), full)  # loads NCCL's kernels
        if self.starts_means:
            self._open_connections()
        self._synchronize()

    def _open_connections(self) -> None:
        """Average and gather zeros, so that NCCL connects all pairs of slots now.

        Otherwise, NCCL would open connections and allocate their memory in the first backward pass.
        The k-th range lies in the shard of slot k, to which all slots send.
        """
        slots = self.slots
        full = self.zeros(1, slots * slots)
        ranges = [slice(k * slots, (k + 1) * slots) for k in range(slots)]
        self.reserve(1, slots)
        for columns in ranges:
            self.start_mean(full, columns)
        self.finish_means(full)
        for works in self.start_gather(full, ranges):
            self.finish_gather(works)

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        dtype = torch.float32
        return [torch.zeros(rows, columns, dtype=dtype, device=d) for d in self.devices]

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

        self._run_collective("reduce-scatter", lambda k: self._reduce(k, full[k], shards[k]))
        return shards

    def _reduce(self, k: int, array: torch.Tensor, out: torch.Tensor) -> None:
        """Average the k-th local slot's part of arrays of all slots.

        :param k: index of the slot among the local slots
        :param array: array (rows, columns) of this slot
        :param out: part of ``array`` for this slot, (rows, columns / slots), which is overwritten
        """
        if self._order == "slots":
            self._sum(k, array, out)
            return
        for row, part in zip(array, out, strict=True):  # in place
            self._wait(k, self._groups[k]._reduce_scatter_base(part, row))
        out.mul_(1 / self.slots)

    def reserve(self, rows: int, columns: int) -> None:
        """Allocate the memory of :meth:`start_mean`, whose earlier calls must have finished.

        :param rows: number of rows
        :param columns: largest number of elements per row of a call
        """
        self._reserve(rows, columns // self.slots)

    @profiled("sum inside the node")
    def start_mean(self, full: Sequence[torch.Tensor], columns: slice) -> None:
        """Start to average a range of elements over all slots; the current stream continues.

        Slot s averages the s-th of L equal pieces of the columns, as `reduce_scatter_mean` does,
        and sends the mean to the slots whose shards contain it. All ranks start the same ranges in
        the same order, and call :meth:`finish_means` before the next call of another method. The
        columns must not be accessed until then. Call :meth:`reserve` before. This rank does not
        wait for the others here. As at the barriers of other calls, a rank may be late by twice the
        time limit.

        :param full: array (rows, P) of the only local slot
        :param columns: range whose length is a multiple of the number of slots
        :raises GroupError: if the transfers fail
        """
        part = full[0][:, columns]
        piece = part.chunk(self.slots, dim=1)[self.local_slots[0]]
        self._calls += 1
        self._works = []
        self._call = "reduce-scatter over the node's slots, which waits for all of them,"
        with (
            self._errors_named(),
            launch_lock if self._on_gpus else nullcontext(),
            self._on_side_stream(),
        ):
            self._watchdog.check()
            self._reduce(0, part, piece)
            for row in full[0]:
                self._send_to_owners(row, columns)
        if self._on_gpus:
            self._watchdog.track(self._call, self._works, all_arrived=False)

    @profiled("sum inside the node")
    def finish_means(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let the current stream wait for all averages that have started; return the local shard.

        :param full: the array that was passed to :meth:`start_mean`
        """
        if self._barrier is not None:
            self._barrier("reduce-scatter over the node's slots")
        self._watchdog.note_arrival()
        with self._errors_named():
            self._watchdog.check()
        if self._side is not None:
            torch.cuda.current_stream(self.devices[0]).wait_stream(self._side)
        return [full[0].chunk(self.slots, dim=1)[self.local_slots[0]]]

    def fail(self) -> None:
        """State that ranks may have started different calls, so that :meth:`close` aborts them."""
        self._failed = True
        self._watchdog.forget()

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Return a context manager in which work is launched on a separate stream.

        The work follows all earlier work of the current stream.
        """
        if not self._on_gpus:
            yield
            return
        device = torch.device(self.devices[0])
        if self._side is None:
            self._side = torch.cuda.Stream(device, priority=-1)
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            yield

    def _send_to_owners(self, row: torch.Tensor, columns: slice) -> None:
        """Send averaged pieces to the slots whose shards contain them, and receive such pieces.

        :param row: array (P,) of the only local slot
        :param columns: range of elements of which each slot has averaged a piece
        """
        own = self.local_slots[0]
        width = len(row) // self.slots
        step = (columns.stop - columns.start) // self.slots

        def overlap(piece: int, shard: int) -> torch.Tensor:
            """Return the elements of a slot's piece that lie in a slot's shard."""
            begin = columns.start + piece * step
            return row[max(begin, shard * width) : min(begin + step, (shard + 1) * width)]

        others = [slot for slot in range(self.slots) if slot != own]
        sent = [(slot, part) for slot in others if len(part := overlap(own, slot))]
        received = [(slot, part) for slot in others if len(part := overlap(slot, own))]
        if sent or received:
            device = torch.device(self.devices[0])
            for work in start_transfers(self._groups[0], device, sent, received):
                self._wait(0, work)

    @profiled("gather inside the node")
    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        def gather(k: int) -> None:
            for row, shard in zip(full[k], shards[k], strict=True):
                self._wait(k, self._groups[k]._allgather_base(row, shard))

        self._run_collective("all-gather", gather)

    @profiled("gather inside the node")
    def start_gather(
        self, full: Sequence[torch.Tensor], ranges: Sequence[slice]
    ) -> list[list[Any]]:
        """Start to copy the shards of all slots to every slot's array, range by range.

        The current stream continues. All ranks pass equal ranges. The result holds torch's work
        objects of each range, for :meth:`finish_gather`.

        :param full: array (rows, P) of the only local slot, which contains its shard
        :param ranges: ranges of elements, in the order in which they are gathered
        :raises GroupError: if the transfers fail
        """
        self._call = "all-gather over the node's slots"
        if self._barrier is not None:
            self._barrier(self._call)
        self._calls += 1
        with self._errors_named(), launch_lock if self._on_gpus else nullcontext():
            self._watchdog.check()
            works = [self._start_broadcasts(full[0], columns) for columns in ranges]
        if self._on_gpus:
            of_all = [work for of_range in works for work in of_range]
            self._watchdog.track(self._call, [(self.devices[0], work) for work in of_all])
        return works

    def finish_gather(self, works: Sequence[Any]) -> None:
        """Let the current stream wait for a range of :meth:`start_gather`; on CPUs, wait."""
        with self._errors_named():
            self._watchdog.check()
            for work in works:
                self._wait(0, work)

    def _start_broadcasts(self, array: torch.Tensor, columns: slice) -> list[Any]:
        """Start to copy a range of elements from the slots whose shards contain these elements."""
        width = array.shape[1] // self.slots
        works = []
        for owner in range(columns.start // width, (columns.stop - 1) // width + 1):
            begin = max(columns.start, owner * width)
            end = min(columns.stop, (owner + 1) * width)
            works += [self._groups[0].broadcast(row[begin:end], owner) for row in array]
        return works

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
        a sum bucket of the shard is summed, the next one is transferred.
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
        """Start to send and receive a sum bucket; return a function that waits for it and sums it.

        :param k: index of the slot among the local slots
        :param row: whole array of this slot, (P,)
        :param columns: range of elements of a shard that the sum bucket contains
        :param received: memory for the sum bucket of each slot, (slots, columns)
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
        """Return the number of elements that a sum bucket contains of each slot's shard."""
        whole = SUM_BUCKET // self.slots // SUM_BUCKET_ALIGN * SUM_BUCKET_ALIGN
        return min(width, max(SUM_BUCKET_ALIGN, whole))

    def _reserve(self, rows: int, width: int) -> None:
        """Allocate memory for the elements that other slots send, before any slot launches a call.

        An allocation may wait for the device, and therefore for calls of other slots.

        :param rows: number of rows of a shard
        :param width: number of elements of a shard
        """
        step = self._bucket_width(width)
        buckets = rows * -(-width // step) if step else 0
        elements = min(2, buckets) * self.slots * step
        if self._order == "slots" and self._scratch[0].numel() < elements:
            dtype = torch.float32
            self._scratch = [torch.empty(elements, dtype=dtype, device=d) for d in self.devices]

    def _run_collective(self, call: str, work: Callable[[int], None]) -> None:
        """Call ``work`` in every slot's thread, after all ranks of the node have arrived.

        No other thread may call CUDA until all slots have launched: a call that waits for the
        device would also wait for the launches of the other slots.

        :param call: name of the collective, for messages
        :param work: function that is called with the index of a local slot and launches its part
        :raises GroupError: if the collective fails
        :raises WaitTimeoutError: if a rank or slot does not arrive in time
        """
        self._call = f"{call} over the node's slots"
        self._works = []
        if self._barrier is not None:
            self._barrier(self._call)
        self._calls += 1
        with self._errors_named():
            self._watchdog.check()
            if self._on_gpus:
                self._watchdog.track(self._call, self._launched(self._calls))
            with launch_lock if self._on_gpus else nullcontext():
                self.run(work)
        if self._on_gpus:
            self._watchdog.track(self._call, self._works)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Return a context manager that names devices, call and remedy in errors of a collective.

        :raises GroupError: if the collective fails
        """
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self._failed = True
            self._watchdog.forget()
            if isinstance(error, GroupError | TimeoutError):
                raise
            devices = ", ".join(self.devices)
            reason = str(error).splitlines()[0]
            raise GroupError(f"{self._call} failed on {devices}: {reason}; {REMEDY}") from error

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


class TrackedCall(NamedTuple):
    """Collective of the slots that the watchdog observes."""

    name: str
    began: float
    """Time at which its limit begins, by `time.monotonic`, in seconds."""
    works: Sequence[tuple[str, Any]]
    """Device and torch's work object of each slot."""
    all_arrived: bool
    """True if all ranks of the node had arrived at that time."""


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
        waits_for_ranks: Callable[[], bool] | None = None,
    ):
        """Prepare the thread; :meth:`start` starts it.

        :param timeout_s: time limit of a collective, in seconds
        :param remedy: remedy in the messages
        :param end: function that ends the job with a message; None: :func:`end_job`
        :param device: device that is current in the thread
        :param waits_for_ranks: function that returns whether the training thread is waiting for the
            other ranks of the node; None: it never does
        """
        self._device = device
        self._waits_for_ranks = waits_for_ranks or (lambda: False)
        self._last_wait = -math.inf
        """Time, by `time.monotonic`, at which the training thread was last seen waiting so."""
        self.timeout_s = timeout_s
        self._remedy = remedy
        self._end = end or end_job
        self._calls: deque[TrackedCall] = deque()
        self._failure = ""
        self._stop = threading.Event()
        self._noticed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpigossip-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def track(
        self, call: str, works: Sequence[tuple[str, Any]], *, all_arrived: bool = True
    ) -> None:
        """Watch a collective that has begun.

        :param call: description of the collective, for messages
        :param works: device and torch's work object of each slot
        :param all_arrived: whether all ranks of the node have arrived at this call. Otherwise, the
            call may take `RANKS_LIMIT` time limits, as a wait at the node's barrier may. They start
            again while the training thread waits there, because the barrier has its own limit
        """
        self._calls.append(TrackedCall(call, time.monotonic(), works, all_arrived))

    def note_arrival(self) -> None:
        """State that all ranks of the node have arrived at all calls so far."""
        now = time.monotonic()
        self._calls = deque(
            call if call.all_arrived else call._replace(began=now, all_arrived=True)
            for call in [*self._calls]
        )

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
        if self._waits_for_ranks():
            self._last_wait = now
        calls = self._calls
        while calls:
            call = calls[0]
            open_devices = []
            for device, work in call.works:
                try:
                    if not work.is_completed():
                        open_devices.append(device)
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    return f"{device} was lost during {call.name}: {reason}; {self._remedy}"
            if open_devices:
                began = call.began if call.all_arrived else max(call.began, self._last_wait)
                factor = 1 if call.all_arrived else RANKS_LIMIT
                limit_s = factor * self.timeout_s
                if now - began <= limit_s:
                    return ""
                devices = ", ".join(sorted({*open_devices}))
                setting = "node.timeout_s" if factor == 1 else f"{factor} x node.timeout_s"
                limit = f"{limit_s:g} s ({setting})"
                return f"{call.name} is not done on {devices} after {limit}; {self._remedy}"
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
