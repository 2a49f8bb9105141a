"""Assignment of ranks to nodes, and of hosts to racks.

A node consists of one rank, of k ranks of a host, or of all ranks of a host. If a node has k ranks,
its slots are distributed over k processes. The ranks with equal local rank in all nodes are
inter-node ranks: they exchange their shard of the model with each other, and rank i of their world
belongs to node i.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpigossip.cluster.communicator import Communicator, with_timeout
from mpigossip.cluster.world import Nodes, World
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize

SETTING = "node.ranks_per_node"
VARIABLE = "SLURM_TOPOLOGY_ADDR"
"""Variable of Slurm's topology plugin: switches from the root down and the host, joined by dots."""


class SubWorld(Communicator):
    """Some of a world's ranks, with new rank numbers; it is freed with that world."""

    def __init__(self, world: World, color: int, key: int):
        """Split ``world`` as MPI_Comm_split does; collective over ``world``.

        :param world: world to split
        :param color: number that is equal on the ranks of the same new world
        :param key: number that orders the ranks of the new world
        """
        comm = with_timeout(world.comm, world.timeout_s).Split(color, key)
        members = comm.allgather(world.rank)
        super().__init__(comm, tuple(world.hosts[rank] for rank in members), world.timeout_s)
        self.world = world
        self.original_ranks = tuple(members)
        self.launched = world.launched
        self.fault_tolerant = world.fault_tolerant
        self.resources = world.resources
        self.nodes = Nodes.of_ranks(self)
        world.resources.callback(comm.Free)
        world.resources.callback(self.drain_agreements)

    def group_into_nodes(self, ranks_per_node: int | str) -> None:
        raise RuntimeError(
            f"{SETTING} applies to the world of all ranks, but this world has only {self.size} of "
            "them: call group_into_nodes() of the world that mpigossip.world() returns"
        )

    def shrink(self) -> None:
        raise RuntimeError(
            f"a rank has failed, and these {self.size} ranks are a part of the world: only a world "
            f"without nodes of several ranks ({SETTING} = 1) can continue"
        )

    def abort(self, code: int = 1) -> None:
        self.world.abort(code)

    def close(self) -> None:
        """Do nothing, because the parent world frees the communicator."""


def isolate_node(world: World) -> World:
    """Return a world whose only node is the node of this rank; collective.

    Its ranks are the ranks of that node.
    """
    nodes = world.nodes
    isolated = SubWorld(world, nodes.inter_node.rank, nodes.local_rank)
    isolated.nodes = Nodes((0,) * isolated.size, SubWorld(world, world.rank, 0), isolated)
    return isolated


def group_ranks(world: World, ranks_per_node: int | str) -> Nodes:
    """Group the ranks of each host into nodes; collective.

    :param world: all ranks
    :param ranks_per_node: number of consecutive ranks of a host that form a node; "host": all ranks
        of a host
    :raises JobError: on all ranks, if the ranks of some host cannot be grouped like this
    :raises WaitTimeoutError: if some rank does not call this in time
    """
    if ranks_per_node == 1:
        return Nodes.of_ranks(world)
    from mpi4py import MPI

    # Shared memory defines a host, not the host name: containers have names of their own.
    host_comm = with_timeout(world.comm, world.timeout_s).Split_type(MPI.COMM_TYPE_SHARED)
    first = host_comm.bcast(world.rank)
    host_comm.Free()
    host_numbers = with_timeout(world.comm, world.timeout_s).allgather(first)
    positions = assign_nodes(host_numbers, world.hosts, ranks_per_node)
    if max(local_rank for _, local_rank in positions) == 0:
        return Nodes.of_ranks(world)
    node, local_rank = positions[world.rank]
    inter_node = SubWorld(world, local_rank, node)
    intra_node = SubWorld(world, node, local_rank)
    inter_node.node_position = local_rank, intra_node.size
    return Nodes(tuple(node for node, _ in positions), inter_node, intra_node)


def assign_nodes(
    host: Sequence[int], names: Sequence[str], ranks_per_node: int | str
) -> list[tuple[int, int]]:
    """Return the node and the local rank of each rank.

    :param host: for each rank, a number that identifies its host
    :param names: host name of each rank
    :param ranks_per_node: as for :func:`group_ranks`
    :raises JobError: if ``ranks_per_node`` does not divide the number of ranks of some host, or if
        it is "host" and hosts have different numbers of ranks
    """
    ranks_on = Counter(host)
    host_names: dict[int, str] = {}
    for number, name in zip(host, names, strict=True):
        host_names.setdefault(number, name)
    setting = f'{SETTING} = "host"' if ranks_per_node == "host" else f"{SETTING} = {ranks_per_node}"
    if ranks_per_node == "host" and len(set(ranks_on.values())) > 1:
        largest = max(ranks_on, key=ranks_on.__getitem__)
        smallest = min(ranks_on, key=ranks_on.__getitem__)
        raise JobError(
            f"{setting}: {host_names[largest]} has {ranks_on[largest]} ranks and "
            f"{host_names[smallest]} has {ranks_on[smallest]}, but all nodes need the same number; "
            f"start the same number on each host (srun --ntasks-per-node={ranks_on[smallest]}, "
            f"mpirun --map-by ppr:{ranks_on[smallest]}:node)"
        )
    size = ranks_on[host[0]] if ranks_per_node == "host" else int(ranks_per_node)
    misfit = next((number for number in ranks_on if ranks_on[number] % size), None)
    if misfit is not None:
        fewer = ranks_on[misfit] // size * size
        fitting = f"{fewer} or {fewer + size}" if fewer else f"{size}"
        raise JobError(
            f"{setting}: {host_names[misfit]} has {pluralize(ranks_on[misfit], 'rank')}, which "
            f"can't form nodes of {size} ranks; start {fitting} there, or set {SETTING} to a "
            f"divisor of {ranks_on[misfit]}"
        )
    positions: list[tuple[int, int]] = []
    ranks_seen: Counter[int] = Counter()
    node_numbers: dict[tuple[int, int], int] = {}
    for number in host:
        group, local_rank = divmod(ranks_seen[number], size)
        node = node_numbers.setdefault((number, group), len(node_numbers))
        positions.append((node, local_rank))
        ranks_seen[number] += 1
    return positions


# -- racks ---------------------------------------------------------------------------------------


def natural(host: str) -> tuple:
    """Return a sort key by which host name n2 comes before n10."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in re.findall(r"\d+|\D+", host))


def addresses(world: World) -> list[str]:
    """Return each rank's topology address from Slurm, "" if it has none; collective."""
    return world.broadcast(world.gather(os.environ.get(VARIABLE, "")))


def racks(
    placement: str, hosts: Sequence[str], scheduler_addresses: Sequence[str] = ()
) -> list[str]:
    """Return the rack of each rank.

    :param placement: "hostnames": the host name without its last number (r12n03 is in rack r12n);
        "scheduler": the switch in the scheduler's address; "file:PATH": a file with lines
        "HOST RACK"
    :param hosts: host name of each rank; the text from the first dot on is ignored
    :param scheduler_addresses: result of :func:`addresses`, for "scheduler"
    :raises JobError: if the rack of some rank is not known, or if the file cannot be read or has
        another format
    """
    short = [host.split(".")[0] for host in hosts]
    if placement == "hostnames":
        return [re.sub(r"\d+\D*$", "", host) or host for host in short]
    if placement == "scheduler":
        return _from_scheduler(scheduler_addresses)
    # Path.expanduser would raise an error if a user in ~user is not known.
    path = os.path.expanduser(placement.removeprefix("file:"))  # noqa: PTH111
    return _from_file(Path(path), short)


def _from_scheduler(scheduler_addresses: Sequence[str]) -> list[str]:
    missing = [rank for rank, address in enumerate(scheduler_addresses) if not address]
    if missing:
        raise JobError(
            f'graph.placement = "scheduler": {VARIABLE} is not set on rank {missing[0]}; Slurm '
            'sets it if its topology plugin is configured; use "hostnames" or "file:PATH"'
        )
    return [address.rpartition(".")[0] or address for address in scheduler_addresses]


def _from_file(path: Path, hosts: Sequence[str]) -> list[str]:
    try:
        lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise JobError(
            f'graph.placement = "file:{path}": this file can\'t be read as text ({error}); name a '
            "file with one line HOST RACK for each host"
        ) from None
    invalid_lines = [" ".join(line) for line in lines if len(line) != 2]
    if invalid_lines:
        raise JobError(
            f'graph.placement = "file:{path}": the line "{invalid_lines[0]}" must consist of two '
            "words, a host and its rack: HOST RACK"
        )
    rack_of = dict(lines)
    missing = sorted({host for host in hosts if host not in rack_of}, key=natural)
    if missing:
        raise JobError(
            f'graph.placement = "file:{path}" names no rack of host {missing[0]} '
            f"({len(missing)} missing); add a line: {missing[0]} RACK"
        )
    return [rack_of[host] for host in hosts]
