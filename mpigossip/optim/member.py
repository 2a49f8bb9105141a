"""Member of a custom loop, which :func:`mpigossip.join` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.engine.sharded import fully_sharded, gather_full, local_shard, part_like, reshard
from mpigossip.members.folder_rate import describe_slow_folder, seconds_per_round
from mpigossip.members.live import FolderExchange, StopRequested
from mpigossip.members.outages import FolderUnreachable
from mpigossip.members.place import TooFarBehind
from mpigossip.mixing.combine import weighted_sum
from mpigossip.optim.node import loop_text
from mpigossip.optim.run_directory import check_names
from mpigossip.optim.state import read_optimizer, write_optimizer
from mpigossip.runs.members.join import about, check_lease, ranks_fact, result
from mpigossip.runs.members.member import average
from mpigossip.runs.members.replay import ReplayLog, wanted_of
from mpigossip.runs.recorder import FIGURE, environment
from mpigossip.runs.snapshot_and_restore import plain, put_buffers
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.store.log import COLUMNS, MEMBER_COLUMNS, LogWriter

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
        self._names = tuple(self._trained)
        self._shapes = tuple(tuple(p.shape) for p in self._trained.values())
        self._keep_seed()
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
        names = self._names
        shapes = self._shapes
        device = self._device
        folder_s = None
        try:
            while not live.ended():
                if live.stopping():
                    return
                if folder_s is None:
                    folder_s = live.decide(lambda: seconds_per_round(place.disk))
                with live.stay():
                    facts = about(names, shapes, [str(device)])
                    states = live.begin(facts | ranks_fact(self._world.size))
                    place.report(
                        f"place {place.number} of {self._folder}: {place.plan.chunks:,} chunks "
                        "for all members in total"
                    )
                    self._begin(states)
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
                            live.decide(partial(self._check_round, folder_s))
                        if live.stopping():
                            raise StopRequested
            meta: dict[str, Number] = {"slots": 1, "door": "loop"}
            self._begin(result(live, self._folder, place.plan.chunks, self._job, meta))
        except StopRequested:
            return
        except (FolderUnreachable, TooFarBehind) as error:
            # The program then exits with code 75, as if it had been asked to leave.
            place.report(str(error))
            return
        self.finished = True

    def _keep_seed(self) -> None:
        """Keep the program's first model, for a stay that starts without any other model."""
        self._seed: Any = self._capture()

    def _begin(self, states: Sequence[Any]) -> None:
        """Start from the average of models; if there are none, from the program's first model."""
        self._put(average(states or [self._seed]))

    def _repeat(self) -> Generator[int]:
        self._live.limit_outages()
        replay_log = ReplayLog(self._live.place, ranks=self._world.size)
        for version in replay_log.repeating(wanted_of(replay_log, None, None)):
            models, peer, progress = replay_log.take_inputs(version)
            self._begin(models)
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

    def _buffer_arrays(self) -> dict[str, np.ndarray]:
        return {f"buffers/0/{name}": plain(b).copy() for name, b in self._buffers().items()}

    def _capture(self) -> NodeState:
        """Return the whole model with the state of the optimizer; collective.

        All ranks take over the buffers of rank 0.
        """
        arrays = self._world.broadcast(self._buffer_arrays())
        text = write_optimizer(self._optimizer, self._model, arrays)
        values = [plain(gather_full(p.detach()).float()).ravel() for p in self._trained.values()]
        numbers: dict[str, Number] = {"index": self._done, "local_steps": self._done, "torch": text}
        state = NodeState(np.concatenate(values), self._names, self._shapes, arrays, numbers)
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

    def _check_round(self, folder_s: float) -> None:
        """Check that five rounds fit into a lease, by the second round; hint if it is short.

        :param folder_s: result of :func:`~mpigossip.members.folder_rate.seconds_per_round`
        """
        place = self._live.place
        seconds = self._live.round_seconds()
        check_lease(place.plan.lease_s, seconds)
        if hint := describe_slow_folder(folder_s, seconds):
            place.report(hint)

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
