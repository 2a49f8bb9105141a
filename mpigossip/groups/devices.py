"""Devices of this rank's slots, from `node.devices`, and the group that connects them."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpigossip.cluster.ranks import SingleProcess
from mpigossip.cluster.world import World
from mpigossip.groups.base import Group, Single, Unsharded
from mpigossip.groups.threads import ThreadGroup

LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of launchers with this rank's number on its host and the number of ranks there; those
of an inner launcher come first."""


VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables by which launchers assign some of the host's GPUs to a rank."""


def local_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this rank's number on its host, and the number of ranks; (0, 1) without a launcher."""
    for number, count in LOCAL:
        # Slurm writes "8", or "8(x3),4" for several hosts; use the number of the first host
        ranks = re.match(r"\d+", environ.get(count, ""))
        if environ.get(number, "").isdigit() and ranks:
            return int(environ[number]), int(ranks[0])
    flux = [environ.get(f"FLUX_{name}", "") for name in ("TASK_LOCAL_ID", "JOB_SIZE", "JOB_NNODES")]
    if all(value.isdigit() for value in flux):
        return int(flux[0]), -(-int(flux[1]) // int(flux[2]))
    return 0, 1


def resolve_auto(
    devices: str,
    ranks_per_node: int | str,
    environ: Mapping[str, str] = os.environ,
    visible: int | None = None,
    on_host: int | None = None,
) -> tuple[str, Any]:
    """Return `node.devices` and `node.ranks_per_node` without "auto", equal on equal hosts.

    * Without a GPU, it is "cpu:1", and each rank is a node.
    * One rank uses all GPUs that torch sees.
    * Several ranks on a host with at least one GPU for each are one node. They divide the GPUs
      among them, unless the launcher has done so.
    * If there are more ranks than GPUs, the ranks share them, and each rank is a node.

    :param devices: value of `node.devices`
    :param ranks_per_node: value of `node.ranks_per_node`
    :param environ: variables of the launcher
    :param visible: number of GPUs that torch sees; None: ask torch
    :param on_host: number of GPUs of the host; None: ask the system
    """
    count = _visible(visible)
    ranks = local_rank(environ)[1]
    is_one_node = False
    if devices == "auto" and not count:
        devices = "cpu:1"
    elif devices == "auto":
        dealt_out = _launcher_assigns(environ, count, ranks, on_host)
        is_one_node = ranks > 1 and (dealt_out or count >= ranks)
        devices = f"gpu:{count if ranks == 1 or dealt_out else max(1, count // ranks)}"
    if ranks_per_node == "auto":
        ranks_per_node = ranks if is_one_node else 1
    return devices, ranks_per_node


def _launcher_assigns(
    environ: Mapping[str, str], count: int, ranks: int, on_host: int | None
) -> bool:
    """Return whether the launcher assigns GPUs to each rank; ``count``: GPUs that torch sees."""
    slurm = environ.get("SLURM_GPUS_ON_NODE", "")
    if slurm.isdigit() and int(slurm) > count:
        return True
    gpus_on_host = _on_host() if on_host is None else on_host
    return any(name in environ for name in VISIBLE) and gpus_on_host >= ranks * count


def _on_host() -> int:
    """Return the number of GPUs of this host, of NVIDIA and AMD, visible or not."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return len([*Path("/dev").glob("nvidia[0-9]*")]) + sum(map(_is_gpu, nodes))


def _is_gpu(gpu_id: Path) -> bool:
    try:
        return gpu_id.read_text().strip() != "0"  # "0" stands for a processor
    except OSError:
        return True  # a GPU that this rank may not use


def slots_of(
    devices: str, environ: Mapping[str, str] = os.environ, visible: int | None = None
) -> tuple[str, ...]:
    """Return the torch devices of this rank's slots.

    "gpu:K" means K of the GPUs that torch sees, chosen by this rank's number on its host, or the
    first K if torch sees no more. The numbers in "cuda:…" refer to the visible GPUs; a number that
    occurs twice gives two slots.

    :param devices: value of `node.devices`
    :param environ: variables of the launcher
    :param visible: number of GPUs that torch sees; None: ask torch
    """
    if devices == "auto":
        devices, _ = resolve_auto(devices, 1, environ, visible)
    kind, _, number = devices.partition(":")
    if kind != "gpu":
        return _parse_devices(devices)
    gpus_per_rank = int(number)
    count = _visible(visible)
    first = local_rank(environ)[0] * gpus_per_rank if count > gpus_per_rank else 0
    return tuple(f"cuda:{(first + k) % max(count, gpus_per_rank)}" for k in range(gpus_per_rank))


def unused_gpus_note(devices: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return a note about GPUs that are unused, or that ranks of this host share; otherwise ""."""
    count = torch.cuda.device_count()
    used = len(set(devices) - {"cpu"})
    ranks = local_rank(environ)[1]
    if used and ranks > count > 0 and not _launcher_assigns(environ, count, ranks, None):
        return f"; {ranks} ranks share {count} GPU{'s' * (count > 1)}"
    return f"; torch sees {count} GPU{'s' * (count > 1)}" if count > used else ""


def _visible(visible: int | None) -> int:
    return torch.cuda.device_count() if visible is None else visible


def _parse_devices(devices: str) -> tuple[str, ...]:
    kind, _, numbers_text = devices.partition(":")
    if kind == "cpu":
        return ("cpu",) * int(numbers_text)
    numbers: list[int] = []
    for piece in numbers_text.split(","):
        first, _, last = piece.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(f"cuda:{k}" for k in numbers)


def device_problems(
    setting: str, environ: Mapping[str, str] = os.environ, visible: int | None = None
) -> list[str]:
    """Return why the slots that `node.devices` requests can't be used, with a remedy for each."""
    devices = slots_of(setting, environ, visible)
    if devices[0] == "cpu":
        return []
    count = _visible(visible)
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
    :param threads: number of torch threads of each slot
    :param shard: False if slot 0 updates and exchanges everything
    :param timeout_s: time limit, in seconds, of a call between GPUs and of a slot that is late
    :param world: world of the run; if its nodes have several ranks, the call is collective over it
    :param sums: order of sums between GPUs: "slots" or "nccl"
    :raises GroupError: if the slots can't work together
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
        from mpigossip.groups.torch_group import TorchGroup

        group = TorchGroup(group, SingleProcess() if node is None else node, sums, timeout_s)
    return group if shard or group.slots == 1 else Unsharded(group)
