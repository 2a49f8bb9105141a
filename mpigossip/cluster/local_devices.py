"""Devices of this rank: the slots of a node, and the GPU that is current before MPI starts."""

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpigossip.config.errors import JobError
from mpigossip.config.readable import print_note_once

if TYPE_CHECKING:
    import torch

LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Environment variables of launchers: the number of this rank on its host, and the number of ranks
of the host. If a launcher starts another one, the variables of the inner launcher come first."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables by which launchers assign some of the host's GPUs to a rank."""

_ranks_have_own_gpus = False
"""True if each rank sees GPUs that no other rank of its host sees; known when MPI runs."""


def local_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this rank's number on its host, from 0, and the number of ranks of the host.

    Without variables of a launcher, the result is (0, 1).
    """
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

    A value other than "auto" is not changed. If `node.devices` is given, the automatic
    `node.ranks_per_node` is 1. If both are automatic:

    * Without a GPU, the devices are "cpu:1", and each rank is a node.
    * If a host has one rank, this rank uses all GPUs that torch sees.
    * If a host has several ranks and at least one GPU for each, these ranks are one node. They
      divide the GPUs among them, unless the launcher has done so.
    * If there are more ranks than GPUs, the ranks share the GPUs, and each rank is a node.

    If `node.ranks_per_node` is given, an automatic `node.devices` is chosen in the same way.

    :param devices: value of `node.devices`
    :param ranks_per_node: value of `node.ranks_per_node`
    :param environ: variables of the launcher
    :param visible: number of GPUs that torch sees; None: ask torch
    :param on_host: number of GPUs of the host; None: ask the system
    :raises JobError: if `devices` is "auto" and the host has Intel GPUs, but none that can be used
    """
    count = visible_gpus(visible)
    ranks = local_rank(environ)[1]
    is_one_node = False
    if devices == "auto" and not count:
        if visible is None:
            check_other_accelerators()
        devices = "cpu:1"
    elif devices == "auto":
        is_one_node = ranks > 1 and (
            count >= ranks or launcher_assigns(environ, count, ranks, on_host)
        )
        devices = f"gpu:{gpus_per_rank(environ, count, ranks, on_host)}"
    if ranks_per_node == "auto":
        ranks_per_node = ranks if is_one_node else 1
    return devices, ranks_per_node


def gpus_per_rank(environ: Mapping[str, str], count: int, ranks: int, on_host: int | None) -> int:
    """Return the number of GPUs that each rank of the host uses.

    The ranks divide the GPUs that torch sees, unless the launcher has divided them. If there are
    more ranks than GPUs, each rank uses one GPU and shares it with others.

    :param environ: variables of the launcher
    :param count: number of GPUs that torch sees
    :param ranks: number of ranks of the host
    :param on_host: number of GPUs of the host; None: ask the system
    """
    assigned = launcher_assigns(environ, count, ranks, on_host)
    return count if ranks == 1 or assigned else max(1, count // ranks)


def launcher_assigns(
    environ: Mapping[str, str], count: int, ranks: int, on_host: int | None
) -> bool:
    """Return whether each rank of the host sees different GPUs.

    Launchers set variables that say so. A container may show one GPU to each rank without a
    variable; this is known only after MPI has started (:func:`compare_gpus`).

    :param environ: variables of the launcher
    :param count: number of GPUs that torch sees
    :param ranks: number of ranks of the host
    :param on_host: number of GPUs of the host; None: ask the system
    """
    if _ranks_have_own_gpus:
        return True
    slurm = environ.get("SLURM_GPUS_ON_NODE", "")
    if slurm.isdigit() and int(slurm) > count:
        return True
    gpus_on_host = _on_host() if on_host is None else on_host
    return any(name in environ for name in VISIBLE) and gpus_on_host >= ranks * count


def gpu_of(device: str) -> str:
    """Return the UUID of the GPU ``device``, such as "cuda:0"; "" if torch does not report it."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def seen_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this rank sees; () if it has not used CUDA yet."""
    if "torch" not in sys.modules:
        return ()
    import torch

    if not torch.cuda.is_initialized():
        return ()
    return tuple(gpu_of(f"cuda:{k}") for k in range(torch.cuda.device_count()))


def compare_gpus(hosts: Sequence[str], gpus_by_rank: Sequence[Sequence[str]]) -> None:
    """Store whether the ranks of each host see different GPUs, for :func:`launcher_assigns`.

    The stored value is False if no host has several ranks, or if the GPUs of a rank are not known.

    :param hosts: host name of each rank of the world
    :param gpus_by_rank: result of :func:`seen_gpus` on each rank of the world
    """
    global _ranks_have_own_gpus
    seen = Counter(
        (host, gpu)
        for host, gpus in zip(hosts, gpus_by_rank, strict=True)
        for gpu in set(gpus) or {""}
    )
    has_gpus = all(gpus and all(gpus) for gpus in gpus_by_rank)
    several = len(set(hosts)) < len(hosts)
    _ranks_have_own_gpus = several and has_gpus and max(seen.values()) == 1


def check_other_accelerators() -> None:
    """Reject a host with Intel GPUs; on a Mac, print a note that its GPU is not used.

    Callers call this if torch sees no GPU that this package can use, and the devices are automatic.

    :raises JobError: if torch sees Intel GPUs (XPU)
    """
    import torch

    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        raise JobError(
            f'node.devices = "auto": torch sees {xpu.device_count()} Intel GPUs (XPU), which '
            'mpigossip does not support; to train on CPUs, use node.devices = "cpu:1" or, in a '
            'custom loop, torch.device("cpu") instead of world.device()'
        )
    if torch.backends.mps.is_available():
        print_note_once("training runs on the CPU: mpigossip does not use the GPU of a Mac (MPS)")


def check_device_type(device: "torch.device") -> None:
    """Reject parameters on a device that is neither a CPU nor a GPU of NVIDIA or AMD.

    :param device: device of the parameters
    :raises JobError: if the device has any other type, such as "xpu" or "mps"
    """
    if device.type not in ("cpu", "cuda"):
        raise JobError(
            f"the parameters are on {device}: mpigossip trains on CPUs and on GPUs of NVIDIA and "
            'AMD ("cuda"); move the model there with model.to("cpu")'
        )


def first_device(
    index: int,
    ranks: int,
    environ: Mapping[str, str] = os.environ,
    visible: int | None = None,
    on_host: int | None = None,
) -> str:
    """Return the device of a rank that uses one device: the first of its GPUs, or "cpu".

    :param index: number of this rank among the ranks of its host
    :param ranks: number of ranks of this host
    :param environ: variables of the launcher
    :param visible: number of GPUs that torch sees; None: ask torch
    :param on_host: number of GPUs of the host; None: ask the system
    """
    count = visible_gpus(visible)
    if not count:
        return "cpu"
    return f"cuda:{index * gpus_per_rank(environ, count, ranks, on_host) % count}"


def make_current_before_mpi(devices: str = "auto") -> str:
    """Create the CUDA context of this rank's first GPU; call it before MPI starts.

    MPI libraries choose network cards, and allocate GPU memory, by the device that is current in
    ``MPI_Init``. Without this call, all ranks of a host would use GPU 0 and the cards near it. A
    program that has used CUDA before keeps its device. If the variable CUDA_MODULE_LOADING is not
    set, it is set to EAGER, except on a host without GPUs if torch is not imported yet.

    :param devices: value of `node.devices`; "auto" in a custom loop
    :return: the device; "" if this rank uses none, or the program has chosen one
    """
    if "torch" not in sys.modules and not _on_host():
        return ""  # do not import torch on hosts without GPUs
    import torch

    # A kernel that is loaded at its first launch would wait for collectives, which wait for it. The
    # variable has an effect only before the first call of CUDA, which may be MPI's.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        return ""
    device = slots_of(devices)[0]
    if device == "cpu" or int(device.partition(":")[2]) >= visible_gpus():
        return ""  # an invalid setting is reported when all ranks are running
    with contextlib.suppress(RuntimeError):  # reported where the device is used first
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)
    return device


def _on_host() -> int:
    """Return the number of NVIDIA and AMD GPUs of this host, whether torch sees them or not."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return len([*Path("/dev").glob("nvidia[0-9]*")]) + sum(map(_is_gpu, nodes))


def _is_gpu(gpu_id: Path) -> bool:
    """Return whether this file of AMD's driver describes a GPU rather than a CPU."""
    try:
        return gpu_id.read_text().strip() != "0"  # "0" stands for a processor
    except OSError:
        return True  # a GPU that this rank may not use


def slots_of(
    devices: str, environ: Mapping[str, str] = os.environ, visible: int | None = None
) -> tuple[str, ...]:
    """Return the torch devices of this rank's slots.

    "gpu:K" means K of the GPUs that torch sees. The local rank on the host selects them: rank i of
    the host gets the GPUs from i·K on, and after the last GPU those from 0 on. If torch sees at
    most K GPUs, each rank gets the numbers 0 to K − 1; this function does not check that these GPUs
    exist. The numbers in "cuda:…" refer to the visible GPUs; a number that occurs twice gives two
    slots. "auto" is resolved as by :func:`resolve_auto` for one rank per node.

    :param devices: value of `node.devices`
    :param environ: variables of the launcher
    :param visible: number of GPUs that torch sees; None: ask torch
    """
    if devices == "auto":
        devices, _ = resolve_auto(devices, 1, environ, visible)
    kind, _, number = devices.partition(":")
    if kind != "gpu":
        return _parse_devices(devices)
    slots = int(number)
    count = visible_gpus(visible)
    first = local_rank(environ)[0] * slots if count > slots else 0
    return tuple(f"cuda:{(first + k) % max(count, slots)}" for k in range(slots))


def visible_gpus(visible: int | None = None) -> int:
    """Return ``visible``, or the number of GPUs that torch sees if it is None."""
    if visible is not None:
        return visible
    import torch

    return torch.cuda.device_count()


def _parse_devices(devices: str) -> tuple[str, ...]:
    """Return the torch devices in a value such as "cpu:2" or "cuda:0,2-3"."""
    kind, _, numbers_text = devices.partition(":")
    if kind == "cpu":
        return ("cpu",) * int(numbers_text)
    numbers: list[int] = []
    for piece in numbers_text.split(","):
        first, _, last = piece.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(f"cuda:{k}" for k in numbers)
