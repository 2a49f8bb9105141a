"""Nodes that consist of one rank, of k ranks of a host, or of all its ranks; and racks of hosts.

If a node has k ranks, its slots are distributed over k processes. The ranks with equal local rank
in all nodes are inter-node ranks: they exchange their part of the model with each other, and rank
i of their world is node i.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpigossip.cluster.agreement import Communicator, with_timeout
from mpigossip.cluster.world import Nodes, World
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize

SETTING = "node.ranks_per_node"
VARIABLE = "SLURM_TOPOLOGY_ADDR"
"""Variable of Slurm's topology plugin: switches from the root down and the host, joined by dots."""


class SubWorld(Communicator):
    """Some of a world's ranks, with new rank numbers; it is freed with that world."""

    def __init__(self, world: World, color: int, key: int):
        """Split ``world`` by ``color``, with ranks in the order of ``key``; collective over it."""
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
        raise RuntimeError(f"{SETTING} is of a whole world; these are {self.size} of its ranks")

    def shrink(self) -> None:
        raise RuntimeError(
            f"a rank was lost, and these {self.size} ranks are a part of the world: going on takes "
            f"a world without nodes of several ranks ({SETTING} = 1)"
        )

    def abort(self, code: int = 1) -> None:
        self.world.abort(code)

    def close(self) -> None:
        """Do nothing, because the parent world frees the communicator."""


def isolate_node(world: World) -> World:
    """Return a world of one node that consists of the ranks of this rank's node; collective."""
    nodes = world.nodes
    found = SubWorld(world, nodes.inter_node.rank, nodes.local_rank)
    found.nodes = Nodes((0,) * found.size, SubWorld(world, world.rank, 0), found)
    return found


def group_ranks(world: World, ranks_per_node: int | str) -> Nodes:
    """Group the ranks of each host into nodes; collective.

    :param world: all ranks
    :param ranks_per_node: number of consecutive ranks of a host that form a node; "host": all ranks
        of a host
    :raises JobError: on all ranks, if the ranks of some host cannot be grouped like this
    """
    if ranks_per_node == 1:
        return Nodes.of_ranks(world)
    from mpi4py import MPI

    # Shared memory defines a host, not the host name: containers have names of their own.
    near = with_timeout(world.comm, world.timeout_s).Split_type(MPI.COMM_TYPE_SHARED)
    first = near.bcast(world.rank)
    near.Free()
    every = with_timeout(world.comm, world.timeout_s).allgather(first)
    where = assign_nodes(every, world.hosts, ranks_per_node)
    if max(place for _, place in where) == 0:
        return Nodes.of_ranks(world)
    node, place = where[world.rank]
    column = SubWorld(world, place, node)
    inside = SubWorld(world, node, place)
    column.node_position = place, inside.size
    return Nodes(tuple(node for node, _ in where), column, inside)


def assign_nodes(
    host: Sequence[int], names: Sequence[str], ranks_per_node: int | str
) -> list[tuple[int, int]]:
    """Return the node and the local rank of each rank.

    :param host: number of each rank's host
    :param names: host name of each rank
    :param ranks_per_node: as for :func:`group_ranks`
    :raises JobError: if the number of ranks of some host does not fit
    """
    on = Counter(host)
    called = {number: f"{names[list(host).index(number)]}" for number in on}
    says = f'{SETTING} = "host"' if ranks_per_node == "host" else f"{SETTING} = {ranks_per_node}"
    if ranks_per_node == "host" and len(set(on.values())) > 1:
        most = max(on, key=on.__getitem__)
        least = min(on, key=on.__getitem__)
        raise JobError(
            f"{says}: {called[most]} has {on[most]} ranks and {called[least]} has {on[least]}, "
            "but every node has equally many slots; start as many on each (srun "
            f"--ntasks-per-node={on[least]}, mpirun --map-by ppr:{on[least]}:node)"
        )
    size = on[host[0]] if ranks_per_node == "host" else int(ranks_per_node)
    odd = next((number for number in on if on[number] % size), None)
    if odd is not None:
        whole = on[odd] // size * size
        fitting = f"{whole} or {whole + size}" if whole else f"{size}"
        raise JobError(
            f"{says}: {called[odd]} has {pluralize(on[odd], 'rank')}, no nodes of {size}; start "
            f"{fitting} there, or set {SETTING} to a divisor of {on[odd]}"
        )
    found: list[tuple[int, int]] = []
    seen: Counter[int] = Counter()
    begun: dict[tuple[int, int], int] = {}
    for number in host:
        which, place = divmod(seen[number], size)
        node = begun.setdefault((number, which), len(begun))
        found.append((node, place))
        seen[number] += 1
    return found


# -- racks ---------------------------------------------------------------------------------------


def natural(host: str) -> tuple:
    """Return a sort key that puts n2 before n10."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in re.findall(r"\d+|\D+", host))


def addresses(world: World) -> list[str]:
    """Return the topology address that the scheduler gives each rank, or ""; collective."""
    return world.broadcast(world.gather(os.environ.get(VARIABLE, "")))


def racks(placement: str, hosts: Sequence[str], told: Sequence[str] = ()) -> list[str]:
    """Return the rack of each rank.

    :param placement: "hostnames": the host name without its last number (r12n03 is in rack r12n);
        "scheduler": the switch in the scheduler's address; "file:PATH": a file with lines
        "HOST RACK"
    :param hosts: host name of each rank
    :param told: result of :func:`addresses`, for "scheduler"
    :raises JobError: if the rack of some rank is not known
    """
    short = [host.split(".")[0] for host in hosts]
    if placement == "hostnames":
        return [re.sub(r"\d+\D*$", "", host) or host for host in short]
    if placement == "scheduler":
        return _from_scheduler(told)
    return _from_file(Path(placement.removeprefix("file:")), short)


def _from_scheduler(told: Sequence[str]) -> list[str]:
    missing = [rank for rank, address in enumerate(told) if not address]
    if missing:
        raise JobError(
            f'graph.placement = "scheduler": {VARIABLE} is not set on rank {missing[0]}; Slurm '
            'sets it where its topology plugin is configured; use "hostnames" or "file:PATH"'
        )
    return [address.rpartition(".")[0] or address for address in told]


def _from_file(path: Path, hosts: Sequence[str]) -> list[str]:
    try:
        lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise JobError(f'graph.placement = "file:{path}": it can\'t be read: {error}') from None
    wrong = [" ".join(line) for line in lines if len(line) != 2]
    if wrong:
        raise JobError(
            f'graph.placement = "file:{path}": the line "{wrong[0]}" isn\'t a host and its rack'
        )
    found = dict(lines)
    absent = sorted({host for host in hosts if host not in found}, key=natural)
    if absent:
        raise JobError(
            f'graph.placement = "file:{path}" names no rack of host {absent[0]} '
            f"({len(absent)} missing); add a line: {absent[0]} RACK"
        )
    return [found[host] for host in hosts]
