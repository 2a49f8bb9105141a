"""Slots on GPUs in several ranks: they sum by NCCL through torch.distributed.

Untested on GPUs: CI runs it over gloo on CPUs. Sums are in NCCL's order: equal to the CPU's within
rounding. What goes through the host, small sums and checkpoints, is as in :mod:`.ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mpigossip.cluster.world import World
from mpigossip.groups.base import Group, GroupError
from mpigossip.groups.ranks import Ranks


class Collectives(Ranks):
    """The L slots of a node of k ranks, each with L / k devices.

    A rank's own slots are joined by ``inner``, then the slots of equal place in all ranks by a
    process group of theirs. That waits for the device's current stream and is waited for by it; the
    host doesn't wait. A call that isn't done in time is ended by torch's own watchdog.
    """

    def __init__(self, inner: Group, node: World, groups: Sequence[dist.ProcessGroup]):
        """``inner``: this rank's slots; ``groups``: one each, of the node's ranks by place."""
        places = {dist.get_rank(group) for group in groups}
        if len(groups) != inner.slots or places != {node.rank}:
            raise GroupError(
                f"{inner.slots} slots in rank {node.rank} of a node, in {len(groups)} process "
                f"groups that call it {places}: each slot needs one, of the node's ranks in order"
            )
        super().__init__(inner, node)
        self._groups = groups

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        """New arrays on the devices."""
        return self._inner.zeros(rows, columns)

    def _blocks(self, full: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The columns of each rank's slots, in the arrays of the slots here."""
        cut = [array.chunk(self._node.size, dim=1) for array in full]
        return [[parts[rank] for parts in cut] for rank in range(self._node.size)]

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each slot's columns of the mean, in those of its own array."""
        terms = [self._inner.reduce_scatter_mean(block) for block in self._blocks(full)]
        own = terms[self._node.rank]
        for k, group in enumerate(self._groups):
            for row, mine in enumerate(own[k]):
                # in place: the result lies where this rank's own term was
                if len(full) == 1:
                    dist.reduce_scatter_tensor(mine, full[0][row], group=group)
                else:
                    dist.reduce_scatter(mine, [term[k][row] for term in terms], group=group)
        return [part.mul_(1 / self._node.size) for part in own]

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Every slot's shard into the arrays here; in place where a shard is a view of its own."""
        places = [array.chunk(self.slots, dim=1) for array in full]
        for k, group in enumerate(self._groups):
            for row, mine in enumerate(shards[k]):
                if len(full) == 1:
                    dist.all_gather_into_tensor(full[0][row], mine, group=group)
                else:
                    into = [part[row] for part in places[k][k :: len(full)]]
                    dist.all_gather(into, mine, group=group)
        for rank, block in enumerate(self._blocks(full)):
            first = rank * len(full)
            self._inner.all_gather([place[first + k] for k, place in enumerate(places)], block)

    def reduce_mean(self, full: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean over slots, in the array of the first one here."""
        mean = self._inner.reduce_mean(full)
        dist.all_reduce(mean, group=self._groups[0])
        return mean.mul_(1 / self._node.size)

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Slot 0's array into those here."""
        dist.broadcast(full[0], group=self._groups[0], group_src=0)
        self._inner.broadcast(full)
