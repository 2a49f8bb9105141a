"""Group of slots in several ranks of one host, which sum arrays in shared memory, in slot order.

The result is bitwise identical to the result of one rank with a thread per slot
(:mod:`.threads`).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_shared
from mpigossip.cluster.deadline import Deadline, world_ranks
from mpigossip.cluster.world import World
from mpigossip.groups.base import RANKS_LIMIT, Group, GroupError, profiled, sum_in_order
from mpigossip.mixing.combine import weighted_sum

SUM_COLUMNS = 1 << 16
"""Number of elements that are summed at once. Their sum is computed in the cache and then written
over one of the terms."""
MESSAGE_BYTES = 1 << 30
"""Largest number of bytes of a message, because MPI counts them in 32 bits."""
TAG = 31
LINE = 64
"""Bytes of a cache line: each rank writes to separate lines."""
CAPACITY = 4096
"""Largest number of float64 values of a rank in one call of :meth:`Barrier.gather`."""


class SharedMemory:
    """Arrays of equal size, one for each rank of a host, that all of its ranks can access."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int):
        """Allocate arrays of ``nbytes`` bytes, of which each rank zeroes its own; collective."""
        self._comm = comm
        (self.window, memory) = open_shared(comm, nbytes)
        self.arrays = [torch.frombuffer(buffer, dtype=torch.uint8)[:nbytes] for buffer in memory]
        self.arrays[comm.rank].zero_()  # by the owner: a page is placed near the first writer

    def free(self) -> None:
        """Free the shared window; collective over the ranks of the node."""
        self.arrays = []
        close_window(self.window, self._comm)


class Barrier:
    """Barrier of a node's ranks in shared memory."""

    def __init__(self, node: World):
        self._node = node
        self._shared = SharedMemory(node.comm, LINE + 2 * 8 * CAPACITY)
        self._arrived, self._working = (
            [array[offset : offset + 8].numpy().view(np.int64) for array in self._shared.arrays]
            for offset in (0, 8)
        )
        self._values = [
            array[LINE:].view(torch.float64).view(2, CAPACITY) for array in self._shared.arrays
        ]
        self._count = 0
        self.is_waiting = False
        """True while this rank waits for others in :meth:`wait`."""
        node.barrier()  # waits until all memory is zeroed

    def wait(self, purpose: str) -> None:
        """Wait for all ranks of the node; afterwards, their earlier writes are visible.

        :param purpose: description of the wait, for the error message
        :raises WaitTimeoutError: if a rank is late by twice the node's time limit; this time starts
            again whenever a rank arrives, or a late rank reports that it is working
        """
        node = self._node
        window = self._shared.window
        self._count += 1
        window.Sync()
        self._arrived[node.rank][0] = self._count
        window.Sync()

        def missing() -> list[int]:
            return [rank for rank, count in enumerate(self._arrived) if count[0] < self._count]

        def describe_late() -> str:
            late_ranks = world_ranks(node.comm, missing())
            return f"{purpose}: rank {', '.join(map(str, late_ranks))} of this node did not arrive"

        deadline = Deadline(RANKS_LIMIT * node.timeout_s)
        last_signs = [-1]

        def all_arrived() -> bool:
            awaited = missing()
            signs = [int(self._working[rank][0]) for rank in awaited]
            if signs != last_signs:
                last_signs[:] = signs
                deadline.renew()
            return not awaited

        self.is_waiting = True
        try:
            deadline.wait(
                all_arrived, describe_late, awaited_ranks=lambda: world_ranks(node.comm, missing())
            )
        finally:
            self.is_waiting = False
        window.Sync()

    def works(self) -> None:
        """Report that this rank is alive, during a long piece of work."""
        self._working[self._node.rank][0] += 1

    def gather(self, values: Sequence[float] | torch.Tensor) -> list[torch.Tensor]:
        """Return the values of all ranks, a float64 array for each rank; collective.

        :param values: at most `CAPACITY` numbers; their number is equal on all ranks
        :raises WaitTimeoutError: as :meth:`wait`
        """
        count = len(values)
        # This half of the memory was last used two barriers ago. All ranks have read it, because
        # they have reached the last barrier.
        half = self._count % 2
        self._values[self._node.rank][half, :count] = torch.as_tensor(values, dtype=torch.float64)
        self.wait("sums over the node's slots")
        return [values_of_rank[half, :count].clone() for values_of_rank in self._values]

    def close(self) -> None:
        self._arrived = []
        self._working = []
        self._values = []
        self._shared.free()


class RankGroup:
    """Group of the L slots of a node that has several ranks.

    Each rank runs its own slots by an inner group. The slots access each other's arrays in shared
    memory. On GPUs, a `TorchGroup` uses this group for small or rare calls.
    """

    starts_means = False

    def __init__(self, inner: Group, node: World):
        """Connect the ranks of ``node``; collective.

        Only arrays that :meth:`zeros` has returned can be reduced and gathered.

        :param inner: group of this rank's slots, equally many on all ranks; this group closes it
        :param node: world of the node's ranks
        """
        local_count = inner.slots
        self.slots = self.segments = local_count * node.size
        self.local_slots = range(local_count * node.rank, local_count * (node.rank + 1))
        self.devices = inner.devices
        self._inner = inner
        self._node = node
        self.barrier = Barrier(node)
        self.run = self.on_shards = inner.run
        self.works = self.barrier.works
        self._memory: list[SharedMemory] = []
        self._closed = False
        self._all_arrays: dict[int, list[torch.Tensor]] = {}
        """Arrays of all slots, by the address of the first local one."""

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        local_count = len(self.local_slots)
        memory = SharedMemory(self._node.comm, 4 * local_count * rows * columns)
        self._memory.append(memory)
        arrays: list[torch.Tensor] = []
        for piece in memory.arrays:
            arrays += piece.view(torch.float32).view(local_count, rows, columns).unbind(0)
        local_arrays = arrays[self.local_slots.start : self.local_slots.stop]
        self._all_arrays[local_arrays[0].data_ptr()] = arrays
        self.barrier.wait("new arrays")  # until all of them are zeroed
        return local_arrays

    def _all(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the arrays of all slots; ``full`` are the local arrays or their first rows.

        :raises GroupError: if :meth:`zeros` has not returned these arrays
        """
        arrays = self._all_arrays.get(full[0].data_ptr())
        if arrays is None or arrays[0].shape[1] != full[0].shape[1]:
            raise GroupError(
                "this array is not in shared memory, so other ranks can't access it: allocate it "
                "by zeros() of this group"
            )
        return [array[: len(full[0])] for array in arrays]

    @profiled("sum inside the node")
    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let each slot average its shard over all slots, and write the result to its own array."""
        all_arrays = self._all(full)
        self.barrier.wait("the slots' gradients")  # until all of them are complete
        columns = [array.chunk(self.slots, dim=1) for array in all_arrays]
        self.run(
            lambda k: self._sum(
                [parts[self.local_slots[k]] for parts in columns], self.local_slots[k]
            )
        )
        return [columns[slot][slot] for slot in self.local_slots]

    def _sum(self, terms: Sequence[torch.Tensor], slot: int) -> None:
        """Compute the mean of ``terms`` (rows, p) of all slots and write it over one of them."""
        weights = [1 / self.slots] * self.slots
        width = min(SUM_COLUMNS, terms[0].shape[1])
        scratch = torch.empty(len(terms[0]), width, dtype=torch.float32)
        for begin in range(0, terms[0].shape[1], SUM_COLUMNS):
            pieces = [term[:, begin : begin + SUM_COLUMNS] for term in terms]
            # weighted_sum may only write over one of its first two terms
            out = scratch[:, : pieces[0].shape[1]]
            pieces[slot].copy_(weighted_sum(weights, pieces, out))

    @profiled("gather inside the node")
    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        all_arrays = self._all(full)
        parts = [array.chunk(self.slots, dim=1) for array in all_arrays]
        for slot, shard in zip(self.local_slots, shards, strict=True):
            if parts[slot][slot].data_ptr() != shard.data_ptr():
                parts[slot][slot].copy_(shard)
        self.barrier.wait("the slots' shards")  # until all of them are complete

        def fetch(k: int) -> None:
            slot = self.local_slots[k]
            for other in range(self.slots):
                if other != slot:
                    parts[slot][other].copy_(parts[other][other])

        self.run(fetch)
        self.barrier.wait("the node's vector")  # until no rank reads a shard any more

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        all_arrays = self._all(full)
        self.barrier.wait("slot 0's vector")
        self.run(lambda k: full[k].copy_(all_arrays[0]) if self.local_slots[k] else None)
        self.barrier.wait("the node's vector")

    def sum_scalars(self, per_slot: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all slots of the node, in slot order; all ranks get the same bits."""
        shape = per_slot[0].shape
        local_count = len(per_slot)
        flat = torch.stack([values.double().cpu().reshape(-1) for values in per_slot])
        width = max(1, CAPACITY // local_count)
        pieces = []
        for begin in range(0, flat.shape[1], width):
            gathered = self.barrier.gather(flat[:, begin : begin + width].reshape(-1))
            pieces.append(
                sum_in_order([row for rank in gathered for row in rank.view(local_count, -1)])
            )
        return torch.cat(pieces).view(shape)

    def to_first(self, per_slot: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        local_arrays = [values.detach().cpu().contiguous() for values in per_slot]
        comm = self._node.comm
        local_count = len(local_arrays)
        if comm.rank:
            self._wait_for(
                [comm.Isend(piece, 0, TAG) for array in local_arrays for piece in _pieces(array)],
                [0],
            )
            return None
        arrays = [
            *local_arrays,
            *(torch.empty_like(local_arrays[0]) for _ in range(self.slots - local_count)),
        ]
        # messages between two ranks arrive in the order in which they were sent
        requests = [
            comm.Irecv(piece, slot // local_count, TAG)
            for slot in range(local_count, self.slots)
            for piece in _pieces(arrays[slot])
        ]
        self._wait_for(requests, range(1, comm.size))
        return arrays

    def _wait_for(self, requests: list[MPI.Request], ranks: Iterable[int]) -> None:
        Deadline(self._node.timeout_s).wait(
            lambda: MPI.Request.Testall(requests),
            lambda: "not all ranks of this node have sent their slots",
            awaited_ranks=lambda: world_ranks(self._node.comm, ranks),
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._inner.close()
        self.barrier.wait("closing")
        self._all_arrays = {}
        for memory in self._memory:
            memory.free()
        self._memory = []
        self.barrier.close()


class NeverGathered(RankGroup):
    """Group of slots that hold only their shards, because the model itself gathers parameters."""

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Do nothing: the forward pass gathers the parameters itself."""


def _pieces(values: torch.Tensor) -> list[np.ndarray]:
    """Return the bytes of an array in pieces that MPI can send at once."""
    flat = values.reshape(-1).view(torch.uint8).numpy()
    return [flat[begin : begin + MESSAGE_BYTES] for begin in range(0, len(flat), MESSAGE_BYTES)]
