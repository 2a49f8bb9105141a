"""`join`: a custom loop as one member of a training that other members join and leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import distributed, nn

from mpigossip.cluster.world import SingleProcess, World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import UserError
from mpigossip.config.readable import print_note
from mpigossip.members.live import POLL_S, FolderExchange, layout
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.members.streamed import StreamedExchange
from mpigossip.optim import arguments, wrappers
from mpigossip.optim.inner import check
from mpigossip.optim.member import LoopMember
from mpigossip.optim.sharded_member import ShardedLoopMember, is_divided, part_of, streams_of
from mpigossip.runs.members.join import LOOP, job_of
from mpigossip.runs.members.ranks import SeveralRanks
from mpigossip.runs.stopper import Stopper, end_of_allocation
from mpigossip.training.assemble import load


@contextmanager
def join(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    chunks: int,
    lease_s: float = 600.0,
    wall_clock_s: float = 0.0,
    shared: bool = False,
    poll_s: float = POLL_S,
    replay: bool = False,
    world: World | None = None,
) -> Iterator[LoopMember]:
    """Return a context manager in which this program is a member of a training in a folder.

    The first member creates the training::

        with mpigossip.join("runs/big", model, optimizer, chunks=2000) as member:
            for chunk in member:
                for inputs, targets in batches(chunk):
                    optimizer.zero_grad()
                    loss = criterion(model(inputs), targets)
                    loss.backward()
                    optimizer.step()
                member.log(loss=loss)

    Each program is one member and needs no launcher, unless it has several ranks (``world``). Break
    the loop over chunks if ``member.stopping`` is true; ``member.finished`` is true if all chunks
    are trained. The first member starts with ``model`` as it is. A later member starts with the
    average of the newest models, and with the averaged optimizer state.

    :param folder: folder of the training, on a file system that all members share, with hard links
    :param model: model whose trained parameters are float32, float16 or bfloat16; their names and
        shapes are equal in all members
    :param optimizer: any torch.optim optimizer except LBFGS
    :param chunks: number of chunks of the whole training; the program decides which data belongs to
        a chunk
    :param lease_s: seconds of silence after which other members take over the chunks of a member;
        at least the duration of five chunks, and equal in all members
    :param wall_clock_s: seconds after which to leave; 0: at the end of the allocation
    :param shared: True to accept files of other users, too
    :param poll_s: seconds between two checks of a member that has nothing to train
    :param replay: True to repeat all chunks of all members in this process, without joining, and
        compare each model with its record. They are bitwise identical if ``model`` is the first
        member's at its start, and if the data and the random numbers of a chunk depend on its
        number and ``progress`` only. A member of several ranks is repeated on equally many
    :param world: result of ``mpigossip.world(ranks_per_node="host")``, whose ranks are one member
        on one host. The model must be in DDP over ``world.node_group()``, or sharded by
        ``fully_shard(model, mesh=world.node_mesh())``; each rank then writes and reads its own
        elements, and never holds the whole model. None: this process is the member
    :raises FolderUnreachable: if the folder's file system fails for more than ten seconds before
        the loop. Inside the loop, the limit is the lease, and the loop ends instead with
        ``finished`` false: exit with code 75, so that a batch script requeues the job
    :raises JobError: if an argument is invalid, if the training in the folder has another model or
        number of chunks, if the folder belongs to something else, or if its file system has no hard
        links
    """
    world = world or SingleProcess()
    folder, disk = Path(folder), RecordStore(Path(folder), shared)
    optimizer = arguments.one_optimizer(optimizer)
    arguments.check(world, model, optimizer)
    inner = wrappers.unwrap(model)
    _check_ranks(world)
    wrappers.check(*((model, optimizer, world) if world.size > 1 else (inner, optimizer)))
    check(inner, optimizer)
    _check_figures(chunks, lease_s)
    job = None
    with world.raise_together(UserError):
        if world.rank == 0:
            job = _job(disk, inner, chunks, replay, is_divided(world, inner))
    job = world.broadcast(job)
    plan = TrainingPlan(chunks, max(1, min(16, chunks // 64)), lease_s)
    place = Place(disk, plan, report=(lambda line: None) if world.rank else print_note)
    streams = streams_of(world, inner)
    part = None if streams is None else part_of(streams, world)
    ranks = SeveralRanks(world, part) if world.size > 1 else None
    with Stopper(world, folder, end_of_allocation(wall_clock_s)) as stopper:
        member: LoopMember
        if streams is None:
            live = FolderExchange(place, stopper.due, poll_s, ranks)
            member = LoopMember(live, folder, job, inner, optimizer, replay, world)
        else:
            live = StreamedExchange(place, stopper.due, poll_s, ranks)
            member = ShardedLoopMember(
                live, folder, job, inner, optimizer, replay, world, streams=streams
            )
        with closing(member):
            yield member


def _check_ranks(world: World) -> None:
    """Raise JobError unless the ranks of the world are one node.

    A world of one rank is rejected if torch.distributed joins processes.
    """
    if world.size > 1 and world.nodes.per_node < world.size:
        raise JobError(
            f"world has {world.size} ranks, which form {world.nodes.count} nodes, but a member is "
            'one node: pass mpigossip.world(ranks_per_node="host"), and start each member by its '
            "own mpirun or srun on one host"
        )
    if world.size > 1:
        return
    if distributed.is_available() and distributed.is_initialized():
        raise JobError(
            f"torch.distributed joins {distributed.get_world_size()} processes here, but a member "
            "is one process with its own model: start the program once for each member, without "
            'init_process_group, or pass world=mpigossip.world(ranks_per_node="host"), whose '
            "ranks are one member with DDP or FSDP2"
        )


def _check_figures(chunks: int, lease_s: float) -> None:
    if not isinstance(chunks, int) or chunks < 1:
        raise JobError(
            f"chunks = {chunks!r}: must be the number of chunks of the whole training, at least 1"
        )
    if not lease_s > 0:
        raise JobError(f"lease_s = {lease_s!r}: must be a positive number of seconds, such as 600")


def _job(disk: RecordStore, model: nn.Module, chunks: int, replay: bool, divided: bool) -> Job:
    """Return the job that describes the training in the folder; create it, except for a replay.

    :param disk: files of the training
    :param model: model of this member
    :param chunks: number of chunks of the whole training
    :param replay: whether recorded chunks are repeated
    :param divided: whether each rank of this member writes its own part of the model
    :raises JobError: if there is nothing to repeat, or if the training in the folder has another
        model or number of chunks
    """
    if replay and not disk.exists(LOOP):
        raise JobError(
            f'"{disk.root}" has no {LOOP}: no program has begun a training there that '
            "could be repeated; pass the folder of a training, or remove replay=True"
        )
    run = {"output": str(disk.root), "name": disk.root.name or "run", "steps": chunks}
    job = load({"run": run, "cadence": {"name": "every", "period": 1}})
    trained = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    parameters = layout([*trained], [*trained.values()])
    return job_of(disk.root, job, disk, LOOP, parameters, divided and not replay)
