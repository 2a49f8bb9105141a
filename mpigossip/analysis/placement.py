"""Checks of the binding of each host's ranks to its cores, memory nodes and GPUs.

Every rank describes its host; :func:`judged` compares these descriptions on rank 0.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpigossip.analysis.findings import Finding
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.host import allowed_cores
from mpigossip.config.readable import pluralize

SYSTEM = Path("/")
"""Root of the file system, from which the folders /sys and /proc are read."""
ALL_SEEN = (
    "srun --gpus-per-node=N --gpu-bind=none without --gpus-per-task, and CUDA_VISIBLE_DEVICES "
    "unset: each rank then sees all GPUs of its host and uses its own"
)


@dataclass(frozen=True)
class HostReport:
    """One rank's description of its host."""

    host: str
    own_gpus: tuple[str, ...]
    """Identifier of each of the rank's GPUs, unique on the host, or "" if torch does not report it;
    empty if the slots are CPUs."""
    visible: int
    """Number of GPUs that this process sees."""
    gpu_count: int
    """Number of GPUs of the host, as far as this rank can find out."""
    hidden: str
    """Reason for which the rank does not see all GPUs; "" if it does."""
    cores: tuple[int, ...]
    """Cores that the rank may use."""
    memory: tuple[int, ...]
    """Memory (NUMA) nodes of these cores."""
    near: tuple[int, ...]
    """Memory (NUMA) nodes of the rank's GPUs; empty if the system does not report them."""
    sharing: int
    """Number of ranks between which MPI can share memory, including this one."""


def seen(world: World, slots: Sequence[str]) -> HostReport:
    """Return this rank's description of its host; collective.

    :param world: all ranks
    :param slots: devices of this rank's slots
    """
    from mpi4py import MPI

    shared = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    sharing = shared.size
    shared.Free()
    visible, own_gpus, buses = _gpus(slots)
    cores = tuple(sorted(allowed_cores()))
    slurm_gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    driver = SYSTEM / "proc/driver/nvidia/gpus"
    gpu_count = max(
        visible, len(list(driver.glob("*"))), int(slurm_gpus) if slurm_gpus.isdigit() else 0
    )
    return HostReport(
        world.hosts[world.rank],
        own_gpus,
        visible,
        gpu_count,
        _hidden(visible, gpu_count, os.environ),
        cores,
        memory_of(cores),
        nodes_of(buses),
        sharing,
    )


def _gpus(slots: Sequence[str]) -> tuple[int, tuple[str, ...], list[str]]:
    """Return how many GPUs torch sees, and the identifiers and PCI addresses of the slots' GPUs.

    Addresses that torch does not report are left out.
    """
    import torch

    from mpigossip.cluster.local_devices import gpu_of

    own_gpus = [slot for slot in dict.fromkeys(slots) if slot.startswith("cuda")]
    buses = []
    for slot in own_gpus:
        properties = torch.cuda.get_device_properties(slot)
        parts = [
            getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
        ]
        if None not in parts:
            buses.append("{:04x}:{:02x}:{:02x}.0".format(*parts))
    return torch.cuda.device_count(), tuple(map(gpu_of, own_gpus)), buses


def _hidden(visible: int, gpu_count: int, environ: Mapping[str, str]) -> str:
    """Return the reason why a rank does not see all GPUs of its host; "" if it does.

    :param visible: number of GPUs that the rank sees
    :param gpu_count: number of GPUs of the host
    :param environ: environment variables of the rank
    """
    if visible >= gpu_count:
        return ""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and len(shown.split(",")) < gpu_count:
        return f"CUDA_VISIBLE_DEVICES = {shown}"
    return "a cgroup of its task"


def memory_of(cores: Sequence[int], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the memory (NUMA) nodes of cores; empty if the system does not report them.

    :param cores: numbers of the cores
    :param system: root of the file system
    """
    top = system / "sys/devices/system/cpu"
    nodes = {
        int(node.name.removeprefix("node"))
        for core in cores
        for node in (top / f"cpu{core}").glob("node[0-9]*")
    }
    return tuple(sorted(nodes))


def nodes_of(buses: Sequence[str], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the memory (NUMA) nodes of PCI devices; empty if the system does not report them.

    :param buses: addresses of the devices, such as "0000:3b:00.0"
    :param system: root of the file system
    """
    nodes = set()
    for bus in buses:
        try:
            nodes.add(int((system / f"sys/bus/pci/devices/{bus}/numa_node").read_text("utf-8")))
        except (OSError, ValueError):
            continue
    return tuple(sorted(nodes - {-1}))


def all_tests(world: World, slots: Sequence[str], ranks_per_node: int | str) -> list[Finding]:
    """Return all findings about nodes and hosts, complete on rank 0 only; collective.

    :param world: all ranks, which are grouped into nodes as a side effect
    :param slots: devices of this rank's slots
    :param ranks_per_node: value of `node.ranks_per_node`
    """
    nodes_finding = nodes(world, ranks_per_node)
    reports = world.gather(seen(world, slots))
    return (
        [nodes_finding]
        if reports is None
        else [nodes_finding, *judged(reports, world.nodes.per_node)]
    )


def nodes(world: World, ranks_per_node: int | str) -> Finding:
    """Group the ranks into nodes; return the same finding on the nodes on all ranks; collective."""
    data = {"ranks_per_node": ranks_per_node}
    try:
        world.group_into_nodes(ranks_per_node)
    except JobError as error:
        text = f"{pluralize(world.size, 'rank')} can't be grouped into nodes"
        return Finding("nodes", text, "wrong", "; ".join(error.messages), data)
    grouping = world.nodes
    per = "one rank each" if grouping.per_node == 1 else f"{grouping.per_node} ranks each"
    return Finding("nodes", f"{pluralize(grouping.count, 'node')}: {per}", data=data)


def judged(reports: Sequence[HostReport], per_node: int) -> list[Finding]:
    """Return the findings on memory, GPUs and cores that follow from all ranks' descriptions.

    :param reports: descriptions by all ranks
    :param per_node: number of ranks per node
    """
    return [_memory(reports, per_node), _devices(reports, per_node), _numa(reports)]


def _hosts(reports: Sequence[HostReport]) -> dict[str, list[int]]:
    """Return the ranks of each host, by its name."""
    ranks_by_host: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks_by_host.setdefault(report.host, []).append(rank)
    return ranks_by_host


def _memory(reports: Sequence[HostReport], per_node: int) -> Finding:
    """Check that the ranks of a host can share memory.

    Averages in a node, and exchanges between neighbours on the same host, use shared memory.
    """
    largest = max(report.sharing for report in reports)
    text = f"MPI shares memory between at most {pluralize(largest, 'rank')}"
    data = {"sharing": [report.sharing for report in reports]}
    for host, ranks in _hosts(reports).items():
        if per_node > 1 and reports[ranks[0]].sharing < len(ranks):
            remedy = (
                f"{pluralize(len(ranks), 'rank')} on {host}, but rank {ranks[0]} shares "
                f"memory with {reports[ranks[0]].sharing} only: each task has an IPC namespace or "
                "a /dev/shm of its own; start the tasks of a host in one container, or without "
                "namespaces of their own"
            )
            return Finding("shared", text, "wrong", remedy, data)
    return Finding("shared", text, data=data)


def _devices(reports: Sequence[HostReport], per_node: int) -> Finding:
    """Check that the ranks of a host share no GPU, each see all GPUs, and leave no GPU idle."""
    data = {"visible": [p.visible for p in reports], "there": [p.gpu_count for p in reports]}
    if not any(report.gpu_count for report in reports):
        return Finding("gpus", "none on these hosts", data=data)
    hosts = _hosts(reports)
    used = {
        host: {gpu for rank in ranks for gpu in reports[rank].own_gpus}
        for host, ranks in hosts.items()
    }
    text = "; ".join(
        f"{host}: {pluralize(len(ranks), 'rank')} on {len(used[host])} of "
        f"{pluralize(max(reports[rank].gpu_count for rank in ranks), 'GPU')}"
        for host, ranks in list(hosts.items())[:4]
    )
    for host, ranks in hosts.items():
        count = sum(len(reports[rank].own_gpus) for rank in ranks)
        if "" not in used[host] and len(used[host]) < count:
            level = "wrong" if per_node > 1 else "note"
            remedy = (
                f"{pluralize(len(ranks), 'rank')} on {host} share "
                f"{pluralize(len(used[host]), 'GPU')}, "
                "which NCCL does not support: start one rank per GPU"
            )
            return Finding("gpus", text, level, remedy, data)
        first = reports[ranks[0]]
        if len(ranks) > 1 and first.hidden:
            remedy = (
                f"rank {ranks[0]} on {host} sees {first.visible} of {first.gpu_count} GPUs "
                f"({first.hidden}): MPI and NCCL may not reach what a rank can't see, and then "
                f"use host memory; {ALL_SEEN}"
            )
            return Finding("gpus", text, "note", remedy, data)
        if "" not in used[host] and len(used[host]) < max(reports[r].gpu_count for r in ranks):
            remedy = f"GPUs of {host} are idle: start one rank per GPU, or one rank that uses all"
            return Finding("gpus", text, "note", remedy, data)
    return Finding("gpus", text, data=data)


def _numa(reports: Sequence[HostReport]) -> Finding:
    """Check that the cores of each rank are on the same memory (NUMA) node as its GPUs."""
    far = [
        rank
        for rank, report in enumerate(reports)
        if report.near and report.memory and not set(report.near) & set(report.memory)
    ]
    count = len({node for report in reports for node in report.memory})
    text = f"cores on {pluralize(count, 'memory node')}" if count else "not reported by the system"
    data = {"cores": [p.memory for p in reports], "gpus": [p.near for p in reports]}
    if far:
        first = reports[far[0]]
        remedy = (
            f"rank {far[0]} on {first.host} has its cores on memory node "
            f"{', '.join(map(str, first.memory))}, its GPU on {', '.join(map(str, first.near))} "
            f"({pluralize(len(far), 'rank')} in all): srun --cpu-bind=none, or --distribution and "
            "--cpu-bind=cores in the order of the GPUs"
        )
        return Finding("numa", text, "note", remedy, data)
    return Finding("numa", text, data=data)
