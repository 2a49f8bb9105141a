"""Group of slots that are threads of one process: slots on the CPU, or several slots on one GPU."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mpigossip.cluster.deadline import PauseExtension, WaitTimeoutError
from mpigossip.groups.base import Group, end_job, profiled
from mpigossip.mixing.combine import weighted_sum

T = TypeVar("T")

SLOT_FRACTION = 0.8
"""Fraction of the time limit after which a late slot is reported. It is less than 1, so that the
error names the slot before another rank that waits for this one reaches the time limit."""
GRACE_S = 10.0
"""Seconds for which the other slots may continue their work after one of them has failed."""


class ThreadGroup(Group):
    """Group of slots in threads, on the cores of this host or on one GPU.

    If the slots are on several GPUs, a `TorchGroup` uses this group to run their threads, and
    computes the sums itself. Slot 0 runs in the thread that calls the methods.
    """

    def __init__(
        self,
        slots: int,
        threads: int = 1,
        devices: Sequence[str] | None = None,
        first: int = 0,
        timeout_s: float = 300.0,
    ):
        """Start a thread for each slot but the first.

        :param slots: number of slots
        :param threads: number of torch threads of each slot but the first, in whose thread the
            number is not changed
        :param devices: device of each slot; None: the CPU. The sums of this group need memory that
            all slots can access, so all must be on the same device unless a `TorchGroup` sums
        :param first: number of the first slot in the node, for messages, if other ranks of the node
            have slots, too
        :param timeout_s: time limit in seconds; a slot is late if it takes longer than
            ``SLOT_FRACTION * timeout_s`` after the end of the slot that ended before it
        """
        self.slots = self.segments = slots
        self.local_slots = range(slots)
        self._first = first
        self._limit = min(SLOT_FRACTION * timeout_s, threading.TIMEOUT_MAX)
        self._open: Any = None
        """Queue of the results of the current :meth:`run`; None if slot 0 has done its work."""
        self.devices = tuple(devices) if devices is not None else ("cpu",) * slots
        self._work: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(slots - 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(slot, threads), daemon=True)
            for slot in range(1, slots)
        ]
        self._make_current(0)
        for thread in self._threads:
            thread.start()

    def _make_current(self, slot: int) -> None:
        if self.devices[slot].startswith("cuda"):
            torch.cuda.set_device(self.devices[slot])

    def _serve(self, slot: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._make_current(slot)
        inbox = self._work[slot - 1]
        while (task := self._next_work(slot, inbox)) is not None:
            work, done = task
            try:
                done.put((slot, work(slot), None))
            except BaseException as error:  # noqa: BLE001 - raised again where run() was called
                done.put((slot, None, error))

    def _next_work(self, slot: int, inbox: queue.SimpleQueue) -> tuple | None:
        """Wait for the next work of a slot and return it, or None if the slot has to end.

        Slot 0 runs in the main thread, which can't observe itself: slot 1 ends the job if it is
        late.
        """
        extension = PauseExtension()
        while True:
            before = self._open
            try:
                return _next(inbox, self._limit)
            except queue.Empty:
                if slot == 1 and before and before is self._open and not extension.extends():
                    end_job(self._late(0))

    def _late(self, slot: int) -> str:
        name = f"slot {self._first + slot} of this node, on {self.devices[slot]}"
        return (
            f"{name}, has not finished (waited {self._limit:g} s after the others): increase "
            "node.timeout_s if its work takes longer"
        )

    def _take(self, done: queue.SimpleQueue, failed: bool) -> Any:
        """Wait until a slot has ended its work; return its entry in the queue.

        A pause of a rank extends the time limit.

        :param done: queue of the results of all slots
        :param failed: whether a slot has failed; the time limit is then `GRACE_S`
        :raises queue.Empty: if the time limit is reached
        """
        extension = PauseExtension()
        while True:
            try:
                return _next(done, GRACE_S if failed else self._limit)
            except queue.Empty:
                if failed or not extension.extends():
                    raise

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call ``work(slot)`` on all slots at once; return the results in slot order.

        If ``work`` raises exceptions, the exception of the lowest slot is raised. After a failure,
        the other slots may take `GRACE_S` seconds more.

        :param work: function that is called with the number of a slot of this group
        :raises WaitTimeoutError: if a slot does not finish in time; the message names the slot
        """
        done: queue.SimpleQueue = queue.SimpleQueue()
        self._open, missing = done, {*range(1, self.slots)}
        for inbox in self._work:
            inbox.put((work, done))
        results: list = [None] * self.slots
        errors: dict[int, BaseException] = {}
        try:
            results[0] = work(0)
        except BaseException as error:  # noqa: BLE001 - raised after waiting for the other slots
            errors[0] = error
        self._open = None
        while missing:
            try:
                slot, results[slot], failure = self._take(done, bool(errors))
            except queue.Empty:
                slot = min(missing)
                errors = errors or {slot: WaitTimeoutError(self._late(slot))}
                break
            missing.discard(slot)
            if failure is not None:
                errors[slot] = failure
        if errors:
            slot = min(errors)
            errors[slot].add_note(
                f"in slot {self._first + slot} of this node, on {self.devices[slot]}"
            )
            raise errors[slot]
        return results

    on_shards = run

    @profiled("sum inside the node")
    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let each slot average its shard over all slots, and write it to slot 0's array."""
        columns = [array.chunk(self.slots, dim=1) for array in full]
        weights = [1 / self.slots] * self.slots

        def sum_part(slot: int) -> None:
            weighted_sum(weights, [parts[slot] for parts in columns], columns[0][slot])

        self.run(sum_part)
        return list(columns[0])

    @profiled("gather inside the node")
    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        def fetch(slot: int) -> None:
            for other, part in enumerate(full[slot].chunk(self.slots, dim=1)):
                if part.data_ptr() != shards[other].data_ptr():
                    part.copy_(shards[other])

        self.run(fetch)

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        self.run(lambda slot: full[slot].copy_(full[0]) if slot else None)

    def close(self) -> None:
        for inbox in self._work:
            inbox.put(None)
        until = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._threads = []
        self._work = []
        self.slots = 0


def _next(entries: queue.SimpleQueue, limit_s: float) -> tuple | None:
    """Wait at most ``limit_s`` seconds for the next entry of a queue and return it.

    The wait has two parts, because the process may have been suspended during the first one.

    :param entries: queue
    :param limit_s: time limit in seconds
    :return: the entry; None if it tells a slot to end
    :raises queue.Empty: if no entry arrives
    """
    try:
        return entries.get(timeout=0.9 * limit_s)
    except queue.Empty:
        return entries.get(timeout=0.1 * limit_s)
