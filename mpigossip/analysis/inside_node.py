"""Test and time sums between the slots of a node, in each order that `node.sums` has."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from mpigossip.cluster.process_groups import is_gpu
from mpigossip.cluster.world import World
from mpigossip.groups.base import Group, GroupError
from mpigossip.groups.devices import make_group

ORDERS = "slots", "nccl"
REPEATS = 3


def tested(
    devices: Sequence[str], timeout_s: float, world: World | None = None, elements: int = 1 << 22
) -> dict[str, float]:
    """Seconds of averaging so many elements a slot by each order; collective over ``world``.

    Empty for a node of one slot. Raises GroupError or Failure where slots can't be connected or
    give wrong numbers.
    """
    several = len(devices) > 1 or (world is not None and world.nodes.per_node > 1)
    found = {}
    for order in (ORDERS if is_gpu(devices[0]) else ORDERS[:1]) if several else ():
        group = make_group(tuple(devices), 1, True, timeout_s, world, order)
        try:
            found[order] = _averaged(group, elements)
        finally:
            group.close()
    return found


def rate(slots: int, elements: int, seconds: float) -> float:
    """Bytes a second out of each slot: reduce-scatter and all-gather each send (L - 1)/L."""
    return 2 * (slots - 1) * 4 * elements / seconds


def _averaged(group: Group, elements: int) -> float:
    full = group.zeros(1, elements * group.slots)
    seconds = []
    for _ in range(REPEATS):  # the first opens connections
        _fill(group, full)
        begin = time.perf_counter()
        group.all_gather(group.reduce_scatter_mean(full), full)
        _wait(group)
        seconds.append(time.perf_counter() - begin)
    for device, array in zip(group.devices, full, strict=True):
        if not bool((array == (group.slots - 1) / 2).all()):
            raise GroupError(f"sums over the node's slots gave wrong numbers on {device}")
    return min(seconds)


def _fill(group: Group, full: Sequence[torch.Tensor]) -> None:
    for slot, array in zip(group.mine, full, strict=True):
        array.fill_(float(slot))
    _wait(group)


def _wait(group: Group) -> None:
    for device in group.devices:
        if is_gpu(device):
            torch.cuda.synchronize(device)
