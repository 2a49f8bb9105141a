"""Devices of this rank's slots, from `node.devices`, and the group that connects them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from mpigossip.cluster.ranks import Alone
from mpigossip.cluster.world import World
from mpigossip.groups.base import Group, Single, Whole
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
    if different > 1 and not torch.distributed.is_nccl_available():
        return [
            f"{says}: this torch {torch.__version__} has no NCCL (RCCL), which joins several GPUs; "
            "install one that has, or name one GPU"
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

    One slot; threads on the CPU or on one GPU; ranks of a host in shared memory; GPUs by torch's
    process groups. ``shard`` false: slot 0 updates and exchanges for all. ``timeout_s``: limit of a
    call between GPUs. ``world``: if its nodes have several ranks, ``devices`` are those of this
    one; collective over it. ``sums``: the order of sums between GPUs. Raises GroupError.
    """
    node = world.nodes.inside if world else None
    on_gpus = len(set(devices)) > 1 or (node is not None and devices[0] != "cpu")
    if on_gpus:  # kernels that are loaded later would wait for collectives that wait for them
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    first = 0 if node is None else node.rank * len(devices)
    one = len(devices) == 1
    group: Group = Single(devices[0]) if one else Threads(len(devices), threads, devices, first)
    if node is not None:
        from mpigossip.groups.ranks import Ranks  # needs MPI

        group = Ranks(group, node)
    if on_gpus:
        from mpigossip.groups.torch_group import TorchGroup

        group = TorchGroup(group, Alone() if node is None else node, sums, timeout_s)
    return group if shard or group.slots == 1 else Whole(group)
