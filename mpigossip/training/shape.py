"""Slots (devices or groups of threads) of the nodes of a job."""

from dataclasses import replace

import torch

from mpigossip.cluster.local_devices import gpu_of, slots_of
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.groups import devices
from mpigossip.groups.base import Group


def ranks_of(job: Job, world: World | None = None) -> int:
    """Return the number of ranks per node: in the world if it has ranks, otherwise in the job.

    Without ranks, `node.ranks_per_node` = "host" counts as one rank per node.

    :param job: the job
    :param world: world of the run; None: not known
    """
    if world is not None and world.comm is not None:
        return world.nodes.per_node
    setting = job.node.ranks_per_node
    return setting if isinstance(setting, int) else 1


def local_devices(job: Job, world: World) -> tuple[str, ...]:
    """Return the device of each local slot.

    These are the slots of this rank, or all slots of a node if nodes are simulated.

    :param job: the job
    :param world: world of the run
    """
    slots = slots_of(job.node.devices)
    return slots * ranks_of(job, world) if world.comm is None else slots


def slots(job: Job, world: World | None = None) -> int:
    """Return the number L of slots per node.

    :param job: the job
    :param world: world that determines the number of ranks per node; None: the job determines it
    """
    return len(slots_of(job.node.devices)) * ranks_of(job, world)


def with_ranks(job: Job, ranks: int) -> Job:
    """Return the job with ``ranks`` ranks per node if `node.ranks_per_node` is "host".

    A job with another value of this setting is returned unchanged.
    """
    setting = job.node.ranks_per_node
    return replace(
        job, node=replace(job.node, ranks_per_node=ranks if setting == "host" else setting)
    )


def assumed(job: Job) -> str:
    """Return a note for the user if the number of ranks per host is assumed, otherwise ""."""
    if job.node.ranks_per_node != "host":
        return ""
    return (
        'node.ranks_per_node = "host": assuming one rank per host; set the number, as in '
        "node.ranks_per_node=4"
    )


def explained(problems: list[str], world: World) -> list[str]:
    """Return the messages; those about the graph also explain the number of nodes.

    The explanation is added if nodes have several ranks, since ranks and nodes then differ.

    :param problems: error messages about a job
    :param world: ranks of the run
    """
    per = world.nodes.per_node
    origin = f" ({world.size} ranks, {per} per node: node.ranks_per_node)"
    return [
        text + origin if per > 1 and text.startswith("graph.name") else text for text in problems
    ]


def check_alike(job: Job, world: World) -> None:
    """Check that all ranks have the same number and kind of slots; collective.

    Nothing is checked if each node has a single rank.

    :param job: the job
    :param world: all ranks, grouped into nodes
    :raises JobError: on all ranks, if the slots of ranks differ, or if two slots of a host have the
        same GPU
    """
    if world.nodes.per_node == 1:
        return
    slots_by_rank = world.broadcast(world.gather(slots_of(job.node.devices)))
    counts = [len(slots) for slots in slots_by_rank]
    kinds = [slots[0].split(":")[0] for slots in slots_by_rank]
    if len(set(counts)) > 1:
        largest = counts.index(max(counts))
        smallest = counts.index(min(counts))
        raise JobError(
            f'node.devices = "{job.node.devices}": rank {largest} on {world.hosts[largest]} has '
            f"{max(counts)} slots, rank {smallest} on {world.hosts[smallest]} has {min(counts)}; "
            "all ranks need the same number: name the devices, or let the scheduler give each rank "
            "the same number of GPUs"
        )
    # Slots on GPUs use NCCL for sums, and slots on CPUs use shared memory, so all must be alike.
    if len(set(kinds)) > 1:
        cpu = kinds.index("cpu")
        gpu = kinds.index("cuda")
        raise JobError(
            f'node.devices = "{job.node.devices}": rank {gpu} on {world.hosts[gpu]} has a GPU, '
            f"rank {cpu} on {world.hosts[cpu]} detects none; every rank needs one if nodes have "
            'several ranks: let the scheduler give each rank a GPU, or use node.devices = "cpu:1"'
        )
    if kinds[0] == "cuda":
        _check_gpus(job, world, slots_by_rank[world.rank])


def _check_gpus(job: Job, world: World, local_slots: tuple[str, ...]) -> None:
    """Check that slots of a host have different GPUs, as NCCL requires; collective.

    A rank that sees only its own GPU calls it cuda:0, so GPUs are compared by their identifiers. A
    GPU without an identifier is not compared.

    :param job: the job, for the message
    :param world: all ranks
    :param local_slots: devices of the slots of this rank
    :raises JobError: on all ranks, if two slots of a host have the same GPU
    """
    owners: dict[tuple[str, str], int] = {}
    gpus_by_rank = world.broadcast(world.gather([gpu_of(slot) for slot in local_slots]))
    for rank, gpus in enumerate(gpus_by_rank):
        for gpu in filter(None, gpus):
            other = owners.setdefault((world.hosts[rank], gpu), rank)
            if other != rank or gpus.count(gpu) > 1:
                pair = f"ranks {other} and {rank}" if other != rank else f"two slots of rank {rank}"
                raise JobError(
                    f'node.devices = "{job.node.devices}": {pair} on {world.hosts[rank]} have '
                    f"the same GPU ({gpu}), but NCCL needs a separate GPU for each slot; start "
                    "one rank for each GPU, let the scheduler give each rank its own GPU, or use "
                    "node.ranks_per_node = 1"
                )


def make_group(job: Job, world: World) -> Group:
    """Return the group of the slots of this node; collective over the ranks of the node.

    The number of threads that torch uses in this process is set to `node.threads`.
    """
    torch.set_num_threads(job.node.threads)
    node = job.node
    return devices.make_group(
        local_devices(job, world), node.threads, node.shard, node.timeout_s, world, node.sums
    )
