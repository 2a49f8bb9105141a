"""torch.distributed beside MPI: one process group a node, of the ranks that MPI has started."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from mpigossip.cluster.world import World
from mpigossip.config import JobError


def joined(world: World, backend: str, timeout_s: float) -> None:
    """Start torch.distributed over all ranks, unless the program has; collective.

    Where it runs already, its ranks must be the world's, in the same order; else JobError.
    """
    if dist.is_initialized():
        with world.together(JobError):
            if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
                raise JobError(
                    [f"torch.distributed has {dist.get_world_size()} ranks and calls this one "
                     f"{dist.get_rank()}, MPI has {world.size} and calls it {world.rank}: start "
                     "it with rank=world.rank and world_size=world.size, or leave it to "
                     "world.node_group()"]
                )  # fmt: skip
        return
    limit = timedelta(seconds=timeout_s)
    host = "127.0.0.1" if len(set(world.hosts)) == 1 else socket.gethostname()
    store, place = None, None
    if world.rank == 0:
        store = dist.TCPStore(host, 0, world.size, True, limit, wait_for_workers=False)
        place = host, store.port
    host, port = world.broadcast(place)
    if store is None:
        store = dist.TCPStore(host, port, world.size, False, limit)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=limit
    )
    # not earlier than MPI, which it needs to go together
    world.resources.callback(dist.destroy_process_group)


def node_group(world: World, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """The process group of this rank's node, in which its ranks have their places; collective."""
    joined(world, backend, timeout_s)
    nodes, found = world.nodes, None
    # every rank takes part in making every group, also those that it isn't in
    for node in range(nodes.count):
        ranks = [rank for rank, of in enumerate(nodes.of) if of == node]
        limit = timedelta(seconds=timeout_s)
        made = dist.new_group(ranks, timeout=limit, backend=backend)
        found = made if nodes.of[world.rank] == node else found
    assert found is not None, "every rank is in a node"
    return found
