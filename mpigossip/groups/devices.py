"""From `node.devices` to the devices of this rank's slots, and the group that joins them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from mpigossip.cluster.world import World
from mpigossip.groups.base import Group, Single, Whole
from mpigossip.groups.nccl import Nccl, missing
from mpigossip.groups.threads import Threads

LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Where launchers say which of a host's ranks this is, and how many there are (inner first)."""


def local_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """This rank's place among those of its host, and their number; (0, 1) without a launcher."""
    for place, count in LOCAL:
        # Slurm writes "8", or "8(x3),4" for several hosts: the first stands for all
        ranks = re.match(r"\d+", environ.get(count, ""))
        if environ.get(place, "").isdigit() and ranks:
            return int(environ[place]), int(ranks[0])
    return 0, 1


def slots_of(
    devices: str, environ: Mapping[str, str] = os.environ, visible: int | None = None
) -> tuple[str, ...]:
    """The torch devices of a node's slots, from `node.devices`.

    "auto": the GPUs that torch sees (CUDA_VISIBLE_DEVICES is respected), shared out equally among
    the ranks of this host unless the launcher has done so; one each where there are more ranks
    than GPUs; the CPU where there is none. Numbers are counted among the visible GPUs; one that
    is named twice carries two slots. ``visible``: GPUs that are seen (None: ask torch).
    """
    if devices != "auto":
        return _listed(devices)
    count = torch.cuda.device_count() if visible is None else visible
    if not count:
        return ("cpu",)
    place, ranks = local_rank(environ)
    on_host = environ.get("SLURM_GPUS_ON_NODE", "")
    dealt_out = on_host.isdigit() and int(on_host) > count
    if ranks == 1 or dealt_out:
        return tuple(f"cuda:{k}" for k in range(count))
    if ranks > count:
        return (f"cuda:{place % count}",)
    each = count // ranks
    return tuple(f"cuda:{k}" for k in range(place * each, (place + 1) * each))


def _listed(devices: str) -> tuple[str, ...]:
    kind, _, which = devices.partition(":")
    if kind == "cpu":
        return ("cpu",) * int(which)
    numbers: list[int] = []
    for piece in which.split(","):
        first, _, last = piece.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(f"cuda:{k}" for k in numbers)


def mistakes(
    setting: str, environ: Mapping[str, str] = os.environ, visible: int | None = None
) -> list[str]:
    """Why the slots that `node.devices` asks for can't be had here, with the remedy."""
    devices = slots_of(setting, environ, visible)
    if devices[0] == "cpu":
        return []
    count = torch.cuda.device_count() if visible is None else visible
    says, numbers = f'node.devices = "{setting}"', [int(d.partition(":")[2]) for d in devices]
    if not count:
        return [
            f"{says}: torch {torch.__version__} sees no GPU here; "
            'use node.devices = "cpu:1", or a torch built for this GPU'
        ]
    if max(numbers) >= count:
        shown = environ.get("CUDA_VISIBLE_DEVICES", "unset")
        return [
            f"{says}: GPU {max(numbers)} is asked for, torch sees {count} (0 to {count - 1}; "
            f'CUDA_VISIBLE_DEVICES is {shown}); ask the scheduler for more, or use "auto"'
        ]
    different = len(set(numbers))
    if 1 < different < len(numbers):
        return [f"{says}: name each GPU once, or one GPU for all slots; sums need one or the other"]
    reason = missing() if different > 1 else None
    return [f"{says}: {reason}"] if reason else []


def make_group(
    devices: tuple[str, ...],
    threads: int,
    shard: bool,
    timeout_s: float = 300.0,
    world: World | None = None,
) -> Group:
    """The slots of this node: one; threads on the CPU or on one GPU; GPUs joined by NCCL.

    ``shard`` false: slot 0 updates and exchanges for all. ``timeout_s``: the deadline of NCCL's
    calls. ``world``: where its nodes have several ranks, ``devices`` are only those of this one;
    collective over it. Raises GroupError.
    """
    node = world.nodes.inside if world else None
    first = 0 if node is None else node.rank * len(devices)
    group: Group
    if len(devices) == 1:
        group = Single(devices[0])
    elif len(set(devices)) > 1:
        group = Nccl(devices, threads, timeout_s)
    else:
        group = Threads(len(devices), threads, devices, first)
    if world is not None and node is not None:
        group = _joined(group, node, world, timeout_s)
    return group if shard or group.slots == 1 else Whole(group)


def _joined(here: Group, node: World, world: World, timeout_s: float) -> Group:
    """The slots of this rank with those of the node's others."""
    if here.devices[0] == "cpu":
        from mpigossip.groups.ranks import Ranks  # needs MPI

        return Ranks(here, node)
    from mpigossip.groups.collectives import Collectives
    from mpigossip.groups.process_groups import node_group

    groups = [node_group(world, "nccl", timeout_s) for _ in range(here.slots)]
    return Collectives(here, node, groups)
