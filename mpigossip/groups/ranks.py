"""Slots in several processes of one host, which sum in shared memory in the order of slots.

Bitwise identical to one rank with a thread for each slot (:mod:`.threads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, numbers
from mpigossip.cluster.world import World
from mpigossip.groups.barrier import CAPACITY, Barrier, SharedMemory
from mpigossip.groups.base import Group, GroupError, added, phase
from mpigossip.mixing.combine import combine

T = TypeVar("T")

SUMMED = 1 << 16
"""Columns that are summed at once, in the cache, before they overwrite a term of the sum."""
SENT = 1 << 30
"""Bytes of one message: MPI counts them in 32 bits."""
TAG = 31


class Ranks:
    """The L slots of a node of k ranks on CPUs; each rank runs its own as ``inner`` does."""

    def __init__(self, inner: Group, node: World):
        """``node``: its ranks, with equally many slots each; collective. ``inner`` is closed here.

        What is reduced and gathered must be arrays of :meth:`zeros`.
        """
        own = inner.slots
        self.slots = self.segments = own * node.size
        self.mine = range(own * node.rank, own * (node.rank + 1))
        self.devices = inner.devices
        self._inner, self._node, self.barrier = inner, node, Barrier(node)
        self._memory: list[SharedMemory] = []
        self._closed = False
        self._everyone: dict[int, list[torch.Tensor]] = {}
        """the arrays of all slots, by the address of the first one here"""

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        """Arrays in memory that the node's ranks share; collective."""
        own = len(self.mine)
        memory = SharedMemory(self._node.comm, 4 * own * rows * columns)
        self._memory.append(memory)
        found: list[torch.Tensor] = []
        for piece in memory.arrays:
            found += piece.view(torch.float32).view(own, rows, columns).unbind(0)
        here = found[self.mine.start : self.mine.stop]
        self._everyone[here[0].data_ptr()] = found
        self.barrier.wait("new arrays")  # all of them are zero
        return here

    def _all(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The arrays of all slots, where those here are ``full`` or their first rows."""
        found = self._everyone.get(full[0].data_ptr())
        if found is None or found[0].shape[1] != full[0].shape[1]:
            raise GroupError("only arrays that the group made itself are seen by its other ranks")
        return [array[: len(full[0])] for array in found]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """``[work(k) for every slot mine[k]]``, all at once."""
        return self._inner.run(work)

    on_shards = run

    @phase("sum inside the node")
    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Slot l sums its columns over all slots, into those of its own array."""
        everyone = self._all(full)
        self.barrier.wait("the slots' gradients")  # all of them are whole
        columns = [array.chunk(self.slots, dim=1) for array in everyone]
        self.run(lambda k: self._sum([parts[self.mine[k]] for parts in columns], self.mine[k]))
        return [columns[slot][slot] for slot in self.mine]

    def _sum(self, terms: Sequence[torch.Tensor], slot: int) -> None:
        """The mean of all slots' ``terms``, (rows, p), written over that of ``slot``."""
        weights = [1 / self.slots] * self.slots
        scratch = torch.empty(len(terms[0]), min(SUMMED, terms[0].shape[1]))
        for at in range(0, terms[0].shape[1], SUMMED):
            pieces = [term[:, at : at + SUMMED] for term in terms]
            # a sum may only be formed in its first two terms
            out = scratch[:, : pieces[0].shape[1]]
            pieces[slot].copy_(combine(weights, pieces, out))

    @phase("gather inside the node")
    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Each slot fetches the others' shards into its own array."""
        everyone = self._all(full)
        parts = [array.chunk(self.slots, dim=1) for array in everyone]
        for slot, shard in zip(self.mine, shards, strict=True):
            if parts[slot][slot].data_ptr() != shard.data_ptr():
                parts[slot][slot].copy_(shard)
        self.barrier.wait("the slots' shards")  # all of them are whole

        def fetch(k: int) -> None:
            slot = self.mine[k]
            for other in range(self.slots):
                if other != slot:
                    parts[slot][other].copy_(parts[other][other])

        self.run(fetch)
        self.barrier.wait("the node's vector")  # nobody reads a shard any more

    def reduce_mean(self, full: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean in slot 0's array, which is returned; each slot sums a part of it."""
        everyone = self._all(full)
        self.barrier.wait("the slots' gradients")
        columns = [array.chunk(self.slots, dim=1) for array in everyone]
        weights = [1 / self.slots] * self.slots

        def sum_part(k: int) -> None:
            slot = self.mine[k]
            if slot < len(columns[0]):  # chunk() of fewer columns than slots gives fewer parts
                combine(weights, [parts[slot] for parts in columns], columns[0][slot])

        self.run(sum_part)
        self.barrier.wait("the node's mean")
        return everyone[0]

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Each slot fetches slot 0's array."""
        everyone = self._all(full)
        self.barrier.wait("slot 0's vector")
        self.run(lambda k: full[k].copy_(everyone[0]) if self.mine[k] else None)
        self.barrier.wait("the node's vector")

    def sum_scalars(self, per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum in slot order, of what every rank shows the others; the same bits on all."""
        shape, own = per_slot[0].shape, len(per_slot)
        flat = torch.stack([values.double().cpu().reshape(-1) for values in per_slot])
        each, pieces = max(1, CAPACITY // own), []
        for at in range(0, flat.shape[1], each):
            shown = self.barrier.gather(flat[:, at : at + each].reshape(-1))
            pieces.append(added([row for rank in shown for row in rank.view(own, -1)]))
        return torch.cat(pieces).view(shape)

    def works(self) -> None:
        """Whoever waits for this rank counts the limit anew."""
        self.barrier.works()

    def to_first(self, per_slot: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The arrays of all slots in the node's first rank, by messages; None elsewhere."""
        own = [values.detach().cpu().contiguous() for values in per_slot]
        comm, here = self._node.comm, len(own)
        if comm.rank:
            self._settle([comm.Isend(piece, 0, TAG) for one in own for piece in _pieces(one)], [0])
            return None
        found = [*own, *(torch.empty_like(own[0]) for _ in range(self.slots - here))]
        # messages between two ranks stay in order
        requests = [
            comm.Irecv(piece, slot // here, TAG)
            for slot in range(here, self.slots)
            for piece in _pieces(found[slot])
        ]
        self._settle(requests, range(1, comm.size))
        return found

    def _settle(self, requests: list[MPI.Request], ranks: Iterable[int]) -> None:
        """Wait for messages with these ranks of the node."""
        Deadline(self._node.timeout_s).wait(
            lambda: MPI.Request.Testall(requests),
            lambda: "not all ranks of this node have sent their slots",
            whom=lambda: numbers(self._node.comm, ranks),
        )

    def close(self) -> None:
        """End the slots here, free the shared memory; collective, once."""
        if self._closed:
            return
        self._closed = True
        self._inner.close()
        self.barrier.wait("closing")
        self._everyone = {}
        for memory in self._memory:
            memory.free()
        self._memory = []
        self.barrier.close()


class Apart(Ranks):
    """Slots that never hold the whole vector: the model itself gathers what it needs of it."""

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Nothing: forward passes gather."""


def _pieces(values: torch.Tensor) -> list[np.ndarray]:
    """The bytes of an array in pieces that MPI can send at once."""
    flat = values.reshape(-1).view(torch.uint8).numpy()
    return [flat[at : at + SENT] for at in range(0, len(flat), SENT)]
