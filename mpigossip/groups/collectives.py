"""Slots on GPUs, one a rank: they sum by NCCL through torch.distributed.

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
    """The L slots of a node of L ranks, each with one device.

    The process group waits for the device's current stream and is waited for by it; the host
    doesn't wait. A call that isn't done in time is ended by torch's own watchdog.
    """

    def __init__(self, inner: Group, node: World, group: dist.ProcessGroup):
        """``inner``: this rank's slot; ``group``: of the node's ranks, by their places."""
        if inner.slots != 1 or dist.get_rank(group) != node.rank:
            raise GroupError(
                f"{inner.slots} slots in rank {node.rank} of a node, {dist.get_rank(group)} in its "
                'process group: one GPU a rank is joined by NCCL; use node.devices = "auto"'
            )
        super().__init__(inner, node)
        self._group = group

    def zeros(self, rows: int, columns: int) -> list[torch.Tensor]:
        """A new array on the device."""
        return self._inner.zeros(rows, columns)

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This slot's columns of the mean, in those of its own array."""
        (array,) = full
        (slot,) = self.mine
        part = array.chunk(self.slots, dim=1)[slot]
        for row in range(len(array)):
            # in place: the result lies where this slot's own term was
            dist.reduce_scatter_tensor(part[row], array[row], group=self._group)
        return [part.mul_(1 / self.slots)]

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Every slot's shard into this one's array; in place where the shard is a view of it."""
        for row in range(len(full[0])):
            dist.all_gather_into_tensor(full[0][row], shards[0][row], group=self._group)

    def reduce_mean(self, full: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean over slots, in this slot's own array."""
        dist.all_reduce(full[0], group=self._group)
        return full[0].mul_(1 / self.slots)

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Slot 0's array into this one."""
        dist.broadcast(full[0], group=self._group, group_src=0)
