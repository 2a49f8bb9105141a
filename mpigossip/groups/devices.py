"""Devices of this rank's slots, from `node.devices`, and the group that connects them."""

import os
from collections.abc import Mapping, Sequence

import torch

from mpigossip.cluster.local_devices import (
    VISIBLE,
    launcher_assigns,
    local_rank,
    slots_of,
    visible_gpus,
)
from mpigossip.cluster.world import SingleProcess, World
from mpigossip.groups.base import Group, Single, Unsharded
from mpigossip.groups.threads import ThreadGroup


def unused_gpus_note(devices: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return a note about GPUs that are unused, or that ranks of this host share; otherwise ""."""
    count = torch.cuda.device_count()
    used = len(set(devices) - {"cpu"})
    ranks = local_rank(environ)[1]
    if used and ranks > count > 0 and not launcher_assigns(environ, count, ranks, None):
        return f"; {ranks} ranks share {count} GPU{'s' * (count > 1)}"
    return f"; torch sees {count} GPU{'s' * (count > 1)}" if count > used else ""


def device_problems(
    setting: str, environ: Mapping[str, str] = os.environ, visible: int | None = None
) -> list[str]:
    """Return the reasons why the slots that `node.devices` requests can't be used, with remedies.

    :param setting: value of `node.devices`
    :param environ: environment variables
    :param visible: number of GPUs; None: ask torch
    """
    devices = slots_of(setting, environ, visible)
    if devices[0] == "cpu":
        return []
    count = visible_gpus(visible)
    text = f'node.devices = "{setting}"'
    numbers = [int(d.partition(":")[2]) for d in devices]
    if not count:
        return [
            f"{text}: torch {torch.__version__} sees no GPU here; "
            'use node.devices = "cpu:1", or a torch built for this GPU'
        ]
    if max(numbers) >= count:
        name = next((name for name in VISIBLE if name in environ), VISIBLE[0])
        shown = environ.get(name, "unset")
        return [
            f"{text}: GPU {max(numbers)} is requested, but torch sees {count} (0 to {count - 1}; "
            f'{name} is {shown}); ask the scheduler for more, or use "auto"'
        ]
    different = len(set(numbers))
    if 1 < different < len(numbers):
        return [f"{text}: name each GPU once, or one GPU for all slots; sums need one or the other"]
    if different > 1 and not torch.distributed.is_nccl_available():
        return [
            f"{text}: this torch {torch.__version__} has no NCCL (RCCL), which connects several "
            "GPUs; install a build with it, or name one GPU"
        ]
    return []


def make_group(
    devices: tuple[str, ...],
    threads: int,
    shard: bool,
    timeout_s: float = 300.0,
    world: World | None = None,
    sums: str = "slots",
) -> Group:
    """Connect the slots of this node.

    The group is a single slot, threads on the CPU or on one GPU, ranks of a host in shared memory,
    or GPUs in a torch process group.

    :param devices: devices of this rank's slots
    :param threads: number of torch threads of each slot but the first of this rank, in whose thread
        the number is not changed
    :param shard: False if slot 0 updates and exchanges everything
    :param timeout_s: time limit, in seconds, of a call between GPUs and of waits for a late slot
    :param world: world of the run; if its nodes have several ranks, the call is collective over it.
        None: the node is in this process
    :param sums: order of sums between GPUs: "slots" or "nccl"
    :raises GroupError: if the slots can't work together
    :raises JobError: if an environment variable makes NCCL hang
    :raises Failure: if a torch process group can't connect the slots
    """
    node = world.nodes.intra_node if world else None
    on_gpus = len(set(devices)) > 1 or (node is not None and devices[0] != "cpu")
    if on_gpus:  # loading a kernel later would wait for collectives, which would wait for it
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    first = 0 if node is None else node.rank * len(devices)
    count = len(devices)
    group: Group = Single(devices[0])
    if count > 1:
        group = ThreadGroup(count, threads, devices, first, timeout_s)
    if node is not None:
        from mpigossip.groups.ranks import RankGroup  # needs MPI

        group = RankGroup(group, node)
    if on_gpus:
        from mpigossip.groups.nccl_inside_node import TorchGroup

        group = TorchGroup(group, SingleProcess() if node is None else node, sums, timeout_s)
    return group if shard or group.slots == 1 else Unsharded(group)
