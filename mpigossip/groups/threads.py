"""Slots in threads with memory that all of them access: on the CPU, or several on one GPU."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mpigossip.groups.base import Group, phase
from mpigossip.mixing.combine import combine

T = TypeVar("T")

GRACE_S = 10.0
"""Seconds in which the other slots may end their work once one has failed."""


class Threads(Group):
    """L slots on this machine's cores or on one GPU; slot 0 runs in the calling thread."""

    def __init__(
        self,
        slots: int,
        threads: int = 1,
        devices: Sequence[str] | None = None,
        first: int = 0,
    ):
        """``threads``: torch's threads in each slot (they are set per thread).

        ``first``: what the first slot is called, where other ranks of the node have some, too.
        ``devices``: one a slot, None for the CPU. Sums over slots need memory that all of them
        reach, which is one device.
        """
        self.slots = self.segments = slots
        self.mine = range(slots)
        self._first = first
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
        while (given := self._work[slot - 1].get()) is not None:
            work, done = given
            try:
                done.put((slot, work(slot), None))
            except BaseException as error:  # noqa: BLE001 - raised again where run() was called
                done.put((slot, None, error))

    def run(self, work: Callable[[int], T]) -> list[T]:
        """``work(slot)`` on all slots at once; the first failure by slot is raised here.

        Others may then take `GRACE_S` more: one that hangs isn't waited for.
        """
        done: queue.SimpleQueue = queue.SimpleQueue()
        for inbox in self._work:
            inbox.put((work, done))
        results: list = [None] * self.slots
        errors: dict[int, BaseException] = {}
        try:
            results[0] = work(0)
        except BaseException as error:  # noqa: BLE001 - the other slots are waited for first
            errors[0] = error
        for _ in self._threads:
            try:
                slot, results[slot], failure = done.get(timeout=GRACE_S if errors else None)
            except queue.Empty:
                break
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

    @phase("sum inside the node")
    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Slot l sums its columns over all slots, into those of slot 0's array."""
        columns = [array.chunk(self.slots, dim=1) for array in full]
        weights = [1 / self.slots] * self.slots

        def sum_part(slot: int) -> None:
            combine(weights, [parts[slot] for parts in columns], columns[0][slot])

        self.run(sum_part)
        return list(columns[0])

    @phase("gather inside the node")
    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        def fetch(slot: int) -> None:
            for other, part in enumerate(full[slot].chunk(self.slots, dim=1)):
                if part.data_ptr() != shards[other].data_ptr():
                    part.copy_(shards[other])

        self.run(fetch)

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        self.run(lambda slot: full[slot].copy_(full[0]) if slot else None)

    def works(self) -> None:
        """All slots are here."""

    def close(self) -> None:
        for inbox in self._work:
            inbox.put(None)
        for thread in self._threads:
            thread.join(GRACE_S)
        self._threads, self._work, self.slots = [], [], 0
