"""`join`: a custom loop as one member of a training that other members join and leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import distributed, nn

from mpigossip.cluster.world import SingleProcess, World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import UserError
from mpigossip.config.readable import print_note
from mpigossip.engine.sharded import fully_sharded, gather_full, local_shard, part_like, reshard
from mpigossip.members.live import POLL_S, FolderExchange, StopRequested, layout
from mpigossip.members.outages import FolderUnreachable
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.mixing.combine import weighted_sum
from mpigossip.optim import arguments, wrappers
from mpigossip.optim.inner import check
from mpigossip.optim.node import loop_text
from mpigossip.optim.run_directory import check_names
from mpigossip.optim.state import read_optimizer, write_optimizer
from mpigossip.runs.members.join import LOOP, about, check_lease, job_of, ranks_fact, result
from mpigossip.runs.members.member import average
from mpigossip.runs.members.ranks import SeveralRanks
from mpigossip.runs.members.replay import ReplayLog, wanted_of
from mpigossip.runs.recorder import FIGURE, environment
from mpigossip.runs.snapshot_and_restore import plain, put_buffers
from mpigossip.runs.stopper import Stopper, end_of_allocation
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.store.log import COLUMNS, MEMBER_COLUMNS, LogWriter
from mpigossip.training.assemble import load

T = TypeVar("T")


class LoopMember:
    """Iterator over the chunks of a member, which averages with another member after each chunk.

    The average is x ← ½ (x + x_j) with the model x_j of the other member. If x_j belongs to an
    earlier round, :func:`~mpigossip.members.live.correct_for_age` changes it first.

    Iterating yields the numbers of the chunks, and publishes the model after each. The iteration
    ends if all chunks are trained; then the model is their average (see ``finished``). It also ends
    if this member is asked to leave: by a signal, the file STOP, or the end of the allocation. A
    chunk that is not finished is trained by other members.
    """

    def __init__(
        self,
        live: FolderExchange,
        folder: Path,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        replay: bool,
        world: World,
    ):
        """Prepare to train with the arguments that `join` has checked; collective.

        :param live: exchange with the other members
        :param folder: folder of the training
        :param job: job in the folder
        :param model: model of this member
        :param optimizer: optimizer of this member
        :param replay: repeat recorded chunks instead of training
        :param world: ranks of this member
        """
        self._world = world
        self._live = live
        self._folder = folder
        self._chunks = self._repeat() if replay else self._train()
        self._model = model
        self._optimizer = optimizer
        self._done = 0
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._seed = self._capture()
        self._figures = dict[str, float]()
        # Members average after the local step.
        gossip = replace(job.algorithm, name="dsgd", options={"style": "atc"})
        self._job = loop_text(replace(job, algorithm=gossip), model, optimizer, self._trained)
        self.finished = False
        """True if all chunks of the training are trained."""
        self.progress = 0
        """Progress of this model's history, from 0 to chunks − 1: a learning rate may follow it."""

    def close(self) -> None:
        """Leave the training; other members train a chunk that was started but not finished."""
        self._chunks.close()
        self._live.close()

    def __iter__(self) -> Iterator[int]:
        return self._chunks

    @property
    def stopping(self) -> bool:
        """True if this member was asked to leave; the iteration then ends at the next chunk.

        If the member has several ranks, all of them have to read this attribute together.
        """
        return self._live.stopping()

    def log(self, **figures: float | torch.Tensor) -> None:
        """Add metrics of the chunk to the member's log; "loss" and "lr" are as in a job.

        If the member has several ranks, the log contains the metrics of rank 0.
        """
        check_names(figures, ("step", "node", "steps", "evaluations", "summary"))
        self._figures |= {
            name: float(torch.as_tensor(value).detach()) for name, value in figures.items()
        }

    def _train(self) -> Generator[int]:
        live = self._live
        place = self._live.place
        names = self._seed.names
        shapes = self._seed.shapes
        device = self._device
        try:
            while not live.ended():
                if live.stopping():
                    return
                with live.stay():
                    facts = about(names, shapes, [str(device)])
                    states = live.begin(facts | ranks_fact(self._world.size))
                    place.report(
                        f"place {place.number} of {self._folder}: {place.plan.chunks:,} chunks "
                        "for all members in total"
                    )
                    self._put(average(states or [self._seed]))
                    live.decide(self._open_log)
                    self._done = 0
                    while (claimed := live.chunk()) is not None:
                        chunk, progress = claimed
                        self.progress = min(progress, place.plan.chunks - 1)
                        began = time.perf_counter()
                        peer = place.peer
                        number = place.round
                        yield chunk
                        self._done += 1
                        self._figures |= {
                            "compute_s": time.perf_counter() - began,
                            "chunk": chunk,
                            "round": number,
                            "time": time.time(),
                            "history": place.age,
                            "peer": peer.place if peer else np.nan,
                        }
                        live.decide(self._append_row)
                        self._exchange()
                        if self._done == 2:
                            live.decide(self._check_lease)
                        if live.stopping():
                            raise StopRequested
            meta: dict[str, Number] = {"slots": 1, "door": "loop"}
            states = result(live, self._folder, place.plan.chunks, self._job, meta)
        except StopRequested:
            return
        except FolderUnreachable as error:
            # The program then exits with code 75, as if it had been asked to leave.
            place.report(str(error))
            return
        self._put(average(states))
        self.finished = True

    def _repeat(self) -> Generator[int]:
        replay_log = ReplayLog(self._live.place, ranks=self._world.size)
        for version in replay_log.repeating(wanted_of(replay_log, None, None)):
            models, peer, progress = replay_log.take_inputs(version)
            self._put(average(models or [self._seed]))
            if version.round > 1:
                self._average_with(models[0], peer)
            self.progress = min(progress, self._live.place.plan.chunks - 1)
            yield replay_log.round(version).chunk
            replay_log.check(version, self._capture())
        self.finished = bool(replay_log.end)
        if self.finished:
            self._put(average([replay_log.models[key] for key in replay_log.end]))
        self._live.place.report(replay_log.summary())

    def _exchange(self) -> None:
        """Publish the model, and average it with another member's model, if there is one."""
        state = self._capture()
        self._live.send(state)
        self._average_with(state, self._live.receive())

    def _average_with(self, state: NodeState, other: NodeState | None) -> None:
        if other is not None:
            rows = [torch.from_numpy(s.parameters).reshape(1, -1) for s in (state, other)]
            self._put_parameters(weighted_sum((0.5, 0.5), rows, torch.empty_like(rows[0]))[0])

    # -- the model as arrays ----------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(iter(self._trained.values())).device

    def _buffers(self) -> dict[str, torch.Tensor]:
        stored = self._model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self._model.named_buffers() if name in stored}

    def _capture(self) -> NodeState:
        """Return the whole model with the state of the optimizer; collective.

        All ranks take over the buffers of rank 0.
        """
        arrays = {f"buffers/0/{name}": plain(b).copy() for name, b in self._buffers().items()}
        arrays = self._world.broadcast(arrays)
        text = write_optimizer(self._optimizer, self._model, arrays)
        values = [plain(gather_full(p.detach()).float()).ravel() for p in self._trained.values()]
        shapes = tuple(tuple(p.shape) for p in self._trained.values())
        numbers: dict[str, Number] = {"index": self._done, "local_steps": self._done, "torch": text}
        state = NodeState(np.concatenate(values), tuple(self._trained), shapes, arrays, numbers)
        if self._world.rank:
            put_buffers({0: self._buffers()}, state)
        return state

    def _put(self, state: NodeState) -> None:
        """Restore a model with its buffers and the optimizer's state; ranks take their shards."""
        self._put_parameters(torch.from_numpy(state.parameters))
        put_buffers({0: self._buffers()}, state)
        saved, _ = read_optimizer(
            self._optimizer, self._model, str(state.numbers["torch"]), state.arrays
        )
        # keep the learning rates and settings of this program
        now = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": saved["state"], "param_groups": now})

    @torch.no_grad()
    def _put_parameters(self, values: torch.Tensor) -> None:
        reshard(fully_sharded(self._model))
        parts = values.split([p.numel() for p in self._trained.values()])
        for p, part in zip(self._trained.values(), parts, strict=True):
            local_shard(p).copy_(local_shard(part_like(p, part.view(p.shape))))

    # -- its log ----------------------------------------------------------------------------------

    def _open_log(self) -> None:
        self._live.place.disk.make("logs")
        self._writer = self._retry(self._new_writer)

    def _append_row(self) -> None:
        writer = self._writer
        self._retry(partial(writer.append, self._row(writer)))

    def _check_lease(self) -> None:
        check_lease(self._live.place.plan.lease_s, self._live.round_seconds())

    def _new_writer(self) -> LogWriter:
        folder = self._folder / "logs" / f"{self._live.place.number:06d}"
        # Do not create the folders above it, which are missing if the file system is unmounted.
        folder.mkdir(exist_ok=True)
        return LogWriter(
            folder / "log.h5",
            nodes=1,
            job=self._job,
            columns=COLUMNS | MEMBER_COLUMNS,
            environment=environment(),
        )

    def _row(self, writer: LogWriter) -> dict[str, np.ndarray]:
        """Return the log's row of the chunk, after adding missing columns to the log."""
        figures = self._figures
        self._figures = {}
        new = {name: FIGURE for name in figures if name not in writer.columns}
        self._retry(lambda: writer.widen(new))
        return {
            name: np.full((1, 1), figures.get(name, column.unknown))
            for name, column in writer.columns.items()
        }

    def _retry(self, write: Callable[[], T]) -> T:
        """Write to the log; try again if the file system of the folder fails."""
        disk = self._live.place.disk
        number = self._live.place.number
        return disk.retry(write, f"logs/{number:06d}/log.h5")


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
    :param model: model with float32, float16 or bfloat16 parameters, equal in all members
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
        ``fully_shard(model, mesh=world.node_mesh())``. The whole model is gathered on each rank to
        publish it. None: this process is the member
    :raises FolderUnreachable: if the folder's file system fails for more than ten seconds before
        the loop. Inside the loop, the limit is the lease, and the loop ends instead with
        ``finished`` false: exit with code 75, so that a batch script requeues the job
    :raises JobError: if the model or ``chunks`` differ from the folder's, if the folder belongs to
        something else, or if its file system has no hard links
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
            job = _job(disk, inner, chunks, replay)
    job = world.broadcast(job)
    plan = TrainingPlan(chunks, max(1, min(16, chunks // 64)), lease_s)
    place = Place(disk, plan, report=(lambda line: None) if world.rank else print_note)
    ranks = SeveralRanks(world, None) if world.size > 1 else None
    with Stopper(world, folder, end_of_allocation(wall_clock_s)) as stopper:
        live = FolderExchange(place, stopper.due, poll_s, ranks)
        with closing(LoopMember(live, folder, job, inner, optimizer, replay, world)) as member:
            yield member


def _check_ranks(world: World) -> None:
    """Raise JobError unless all ranks of the world are one node, and torch.distributed has them."""
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


def _job(disk: RecordStore, model: nn.Module, chunks: int, replay: bool) -> Job:
    """Return the job that describes the training in the folder; create it, except for a replay.

    :param disk: files of the training
    :param model: model of this member
    :param chunks: number of chunks of the whole training
    :param replay: whether recorded chunks are repeated
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
    return job_of(disk.root, job, disk, LOOP, layout([*trained], [*trained.values()]))
