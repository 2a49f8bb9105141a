"""Check how the ranks of each host are bound to its cores, memory nodes and GPUs.

Every rank describes its host; :func:`judged` compares these descriptions on rank 0.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpigossip.analysis.findings import Finding
from mpigossip.cluster.cores import allowed
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize

SYSTEM = Path("/")
ALL_SEEN = (
    "srun --gpus-per-node=N --gpu-bind=none without --gpus-per-task, and CUDA_VISIBLE_DEVICES "
    "unset: each rank sees all GPUs of its host and takes its own"
)


@dataclass(frozen=True)
class Place:
    """One rank's description of its host."""

    host: str
    mine: tuple[str, ...]
    """Identifiers of its GPUs among all GPUs of the host; empty on the CPU."""
    visible: int
    """Number of GPUs that this process sees."""
    there: int
    """Number of GPUs that the host is known to have."""
    hidden: str
    """Reason for which the rank does not see all GPUs; "" if it does."""
    cores: tuple[int, ...]
    """Cores that the rank may use."""
    memory: tuple[int, ...]
    """Memory nodes of these cores."""
    near: tuple[int, ...]
    """Memory nodes of its GPUs, if the system reports them."""
    sharing: int
    """Number of ranks that MPI shares memory with, including this one."""


def seen(world: World, slots: Sequence[str]) -> Place:
    """Return the description of this rank's host; collective."""
    from mpi4py import MPI

    near = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    sharing = near.size
    near.Free()
    visible, mine, buses = _gpus(slots)
    cores = tuple(sorted(allowed()))
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    driver = SYSTEM / "proc/driver/nvidia/gpus"
    there = max(visible, len(list(driver.glob("*"))), int(given) if given.isdigit() else 0)
    return Place(
        world.hosts[world.rank],
        mine,
        visible,
        there,
        _hidden(visible, there, os.environ),
        cores,
        memory_of(cores),
        nodes_of(buses),
        sharing,
    )


def _gpus(slots: Sequence[str]) -> tuple[int, tuple[str, ...], list[str]]:
    """Return the number of GPUs that torch sees, the slots' GPUs, and their PCI addresses."""
    import torch

    from mpigossip.training.shape import gpu_of

    mine = [slot for slot in dict.fromkeys(slots) if slot.startswith("cuda")]
    buses = []
    for slot in mine:
        about = torch.cuda.get_device_properties(slot)
        parts = [getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None not in parts:
            buses.append("{:04x}:{:02x}:{:02x}.0".format(*parts))
    return torch.cuda.device_count(), tuple(map(gpu_of, mine)), buses


def _hidden(visible: int, there: int, environ: Mapping[str, str]) -> str:
    if visible >= there:
        return ""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and len(shown.split(",")) < there:
        return f"CUDA_VISIBLE_DEVICES = {shown}"
    return "a cgroup of its task"


def memory_of(cores: Sequence[int], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the memory nodes of ``cores``; empty if the system does not report them."""
    top = system / "sys/devices/system/cpu"
    found = {
        int(node.name.removeprefix("node"))
        for core in cores
        for node in (top / f"cpu{core}").glob("node[0-9]*")
    }
    return tuple(sorted(found))


def nodes_of(buses: Sequence[str], system: Path = SYSTEM) -> tuple[int, ...]:
    """Return the memory nodes of PCI devices; empty if the system does not report them."""
    found = set()
    for bus in buses:
        try:
            found.add(int((system / f"sys/bus/pci/devices/{bus}/numa_node").read_text("utf-8")))
        except (OSError, ValueError):
            continue
    return tuple(sorted(found - {-1}))


def all_tests(world: World, slots: Sequence[str], ranks_per_node: int | str) -> list[Finding]:
    """Return all findings about nodes and hosts; collective, complete on rank 0."""
    found = nodes(world, ranks_per_node)
    places = world.gather(seen(world, slots))
    return [found] if places is None else [found, *judged(places, world.nodes.per_node)]


def nodes(world: World, ranks_per_node: int | str) -> Finding:
    """Group the ranks into nodes and report the nodes; collective, equal on all ranks."""
    data = {"ranks_per_node": ranks_per_node}
    try:
        world.group_into_nodes(ranks_per_node)
    except JobError as error:
        text = f"{pluralize(world.size, 'rank')} make no nodes"
        return Finding("nodes", text, "wrong", "; ".join(error.messages), data)
    made = world.nodes
    per = "each rank is one" if made.per_node == 1 else f"{made.per_node} ranks each"
    return Finding("nodes", f"{pluralize(made.count, 'node')}: {per}", data=data)


def judged(places: Sequence[Place], per_node: int) -> list[Finding]:
    """Return the findings on hosts if each node has ``per_node`` ranks."""
    return [_memory(places, per_node), _devices(places, per_node), _numa(places)]


def _hosts(places: Sequence[Place]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place.host, []).append(rank)
    return found


def _memory(places: Sequence[Place], per_node: int) -> Finding:
    """Check that the ranks of a host share memory.

    Sums inside a node, and exchanges of neighbours on a host, use shared memory.
    """
    most = max(place.sharing for place in places)
    text = f"MPI shares memory between {pluralize(most, 'rank')} at most"
    data = {"sharing": [place.sharing for place in places]}
    for host, ranks in _hosts(places).items():
        if per_node > 1 and places[ranks[0]].sharing < len(ranks):
            remedy = (
                f"{pluralize(len(ranks), 'rank')} on {host}, of which rank {ranks[0]} shares "
                f"memory with {places[ranks[0]].sharing} only: each task has an IPC namespace or "
                "a /dev/shm of its own; start the tasks of a host in one container, or without "
                "namespaces of their own"
            )
            return Finding("shared", text, "wrong", remedy, data)
    return Finding("shared", text, data=data)


def _devices(places: Sequence[Place], per_node: int) -> Finding:
    """Check that each rank has GPUs of its own and sees all others, and that no GPU is idle."""
    data = {"visible": [p.visible for p in places], "there": [p.there for p in places]}
    if not any(place.there for place in places):
        return Finding("gpus", "none on these hosts", data=data)
    hosts = _hosts(places)
    used = {
        host: {gpu for rank in ranks for gpu in places[rank].mine} for host, ranks in hosts.items()
    }
    text = "; ".join(
        f"{host}: {pluralize(len(ranks), 'rank')} on {len(used[host])} of "
        f"{pluralize(max(places[rank].there for rank in ranks), 'GPU')}"
        for host, ranks in list(hosts.items())[:4]
    )
    for host, ranks in hosts.items():
        count = sum(len(places[rank].mine) for rank in ranks)
        if "" not in used[host] and len(used[host]) < count:
            level = "wrong" if per_node > 1 else "note"
            remedy = (
                f"{pluralize(len(ranks), 'rank')} on {host} share "
                f"{pluralize(len(used[host]), 'GPU')}, "
                "which NCCL can't join: start a rank for each GPU"
            )
            return Finding("gpus", text, level, remedy, data)
        one = places[ranks[0]]
        if len(ranks) > 1 and one.hidden:
            remedy = (
                f"rank {ranks[0]} on {host} sees {one.visible} of {one.there} GPUs "
                f"({one.hidden}): MPI and NCCL may not reach what a rank can't see, and go through "
                f"host memory then; {ALL_SEEN}"
            )
            return Finding("gpus", text, "note", remedy, data)
        if "" not in used[host] and len(used[host]) < max(places[r].there for r in ranks):
            remedy = f"GPUs of {host} are idle: start a rank for each, or one rank that takes all"
            return Finding("gpus", text, "note", remedy, data)
    return Finding("gpus", text, data=data)


def _numa(places: Sequence[Place]) -> Finding:
    """Check that the cores of each rank are on the memory node of its GPUs."""
    far = [
        rank
        for rank, place in enumerate(places)
        if place.near and place.memory and not set(place.near) & set(place.memory)
    ]
    count = len({node for place in places for node in place.memory})
    text = f"cores on {pluralize(count, 'memory node')}" if count else "the system doesn't tell"
    data = {"cores": [p.memory for p in places], "gpus": [p.near for p in places]}
    if far:
        first = places[far[0]]
        remedy = (
            f"rank {far[0]} on {first.host} has its cores on memory node "
            f"{', '.join(map(str, first.memory))} and its GPU on {', '.join(map(str, first.near))} "
            f"({pluralize(len(far), 'rank')} so): srun --cpu-bind=none, or --distribution and "
            "--cpu-bind=cores in the order of the GPUs"
        )
        return Finding("numa", text, "note", remedy, data)
    return Finding("numa", text, data=data)
