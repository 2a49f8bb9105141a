"""Going on in a user's own loop where ranks are lost: a job's `run.survive` through this door."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mpigossip.cluster import ulfm
from mpigossip.cluster.agreement import AgreedError
from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.ranks import Alone
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.readable import counted, note
from mpigossip.mixing.base import Mixer
from mpigossip.optim.loop.run import LoopRun
from mpigossip.optim.node import Node
from mpigossip.runs.elastic import Kept, go_on_together
from mpigossip.runs.survive import outlived, tell
from mpigossip.store.checkpoint import NodeState
from mpigossip.training import assemble
from mpigossip.training.snapshot import snapshot

MEETINGS = ("gather", "broadcast", "start_agree", "agree", "together", "barrier")
"""Calls on a world in which its ranks meet."""
Inner = list[dict[str, Any]]
"""The inner optimizer's state, parameter by parameter."""


@dataclass(frozen=True, kw_only=True)
class Whole(NodeState):
    """A node after a whole step, and the inner optimizer's state."""

    inner: Inner


def check_callback(job: Job, on_change: object) -> None:
    """JobError where one of the two is missing that survival in a loop takes."""
    if job.run.survive and not callable(on_change):
        raise JobError(
            [f"survive = True with on_change = {on_change!r}: after a loss the loader is to be "
             "made anew for the nodes that are left, which only the program can; give on_change, "
             "a function of the world that is called then"]
        )  # fmt: skip
    if on_change is not None and not job.run.survive:
        raise JobError(["on_change is called after a loss, with survive = True only; give both"])


class Survival:
    """What lets a loop go on without ranks that are lost; only where MPI can.

    `step()` alone takes a loss in: all survivors return from it, at the last step that all of them
    have done, with the average of what they were then. Where a loss is noticed elsewhere, that is
    left, and the next `step()` takes it in.
    """

    def __init__(self, node: Node, on_change: Callable[[World], object], run: LoopRun | None):
        """``on_change(world)`` is called when the survivors are ready to go on."""
        self._node, self._on_change, self._world, self._run = node, on_change, node.world, run
        self._names, self._hosts = node.world.names, node.world.hosts
        self._kept = Kept()
        self._lost = self._leaving = False

    def keep(self, anew: bool = False) -> None:
        """A step is whole: copy this node to host memory; ``anew``: nothing before it counts."""
        if anew or self._kept.states and self._kept.states[-1].names != self._node.flat.names:
            self._kept = Kept()  # the vector has been laid out again
        self._kept.keep(self._copy)

    def _copy(self, spare: NodeState | None) -> NodeState:
        node = self._node
        numbers = node.engine.numbers() | {"bytes_sent": node.mixer.bytes_sent[0]}
        made = snapshot(node.engine, node.buffers, 0, numbers, spare)
        inner = copied(node.inner, spare.inner if isinstance(spare, Whole) else [])
        return Whole(**vars(made), inner=inner)

    def step(self, work: Callable[[], None]) -> None:
        """``work()``, or what takes in a loss, noticed there or before."""
        if not self._lost:
            with self.noticed():
                work()
        while self._lost:
            outlived(self._world, self._rejoin)
            self._lost = False
            with self.noticed():
                self._on_change(self._world)

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """A loss inside leaves the block; the next step takes it in."""
        try:
            yield
        except Exception as error:
            # before the first step there is nothing to go on from
            if not self._world.lost_by(error) or not self._kept.states:
                raise
            self._lost = True

    def _rejoin(self) -> None:
        """Go on between the survivors; collective over them. Alone where some leave the loop."""
        node, here = self._node, self._world
        ulfm.given_up.append(node.mixer)
        left = bool(here.agree(self._leaving))
        gone = [at for at, name in enumerate(self._names) if name not in here.names]
        lost = [f"rank {self._names[at]} on {self._hosts[at]}" for at in gone]
        if self._leaving:
            lost = [f"{rank} was lost after step {node.engine.index}" for rank in lost]
            if self._run is not None and here.rank == 0:
                text = f"{'; '.join(lost)}; {counted(here.size, 'node')} end the run"
                note(text)
        else:
            lost = self._go_on(Alone() if left else here, left, lost)
        self._names, self._hosts = here.names, here.hosts
        if self._run is not None:
            self._run.go_on(node, lost, left)
        if left and not self._leaving:  # the program's calls on it meet nobody until it leaves, too
            vars(here).update({name: getattr(node.world, name) for name in MEETINGS})

    def _go_on(self, world: World, left: bool, lost: list[str]) -> list[str]:
        """From the last step that all of ``world`` have done; what is said of the ``lost``."""
        node = self._node
        node.among(world, assemble.make_graph(node.job, world.size))
        mine, (numbers,) = self._kept.agree(world)
        told = go_on_together(node.engine, node.buffers, mine, numbers)
        if isinstance(mine, Whole):
            put_back(node.inner, mine.inner)
        means = together(world, node.mixer, node.inner)
        told += [f"averaged: {', '.join(means)}"] if means and not left else []
        node.publish()
        told += ["the others have left their loops"] if left else []
        lines = tell(world, lost, numbers["index"], self._kept.whole_at, told)
        self.keep(anew=True)
        return lines

    def leave(self) -> bool:
        """The run's end, and until all nodes leave; whether what lies between them closes together.

        Where one is lost meanwhile, those that are still in their loops finish them alone, and
        come here. A loop that is left by `exit()` ends at the same step on all nodes.
        """
        waits = self._node.world is self._world
        for name in () if waits else MEETINGS:
            vars(self._world).pop(name, None)
        while True:
            lost = False
            try:
                if self._run is not None:
                    self._leaving = not self._run.stopped
                    self._run.finish()
                self._leaving = True
                if waits:
                    everyone = self._world.start_agree(0)
                    Deadline(float("inf")).wait(everyone.ready, lambda: "")
            except Exception as error:
                if not self._world.lost_by(error):
                    raise
                lost = True
            if lost:
                outlived(self._world, self._rejoin)
            if not lost or self._run is None or self._run.closed:
                return not self._world.diminished
            waits = False


def end(node: Node, run: LoopRun | None, survival: Survival | None) -> None:
    """The end of a loop: of its run, and of what lies between nodes where all come to it."""
    try:
        if survival is not None:
            together = survival.leave()
        else:
            together = True
            if run is not None:
                run.finish()
    except BaseException as error:
        node.close(together=isinstance(error, AgreedError))
        raise
    node.close(together)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied(optimizer: torch.optim.Optimizer, spare: Inner) -> Inner:
    """The optimizer's state in host memory, in that of ``spare`` where it fits."""
    found: Inner = []
    for at, p in enumerate(_parameters(optimizer)):
        before = spare[at] if at < len(spare) else {}
        now = optimizer.state.get(p, {})
        found.append({key: _copied(value, before.get(key)) for key, value in now.items()})
    return found


def _copied(value: Any, spare: Any) -> Any:
    if not torch.is_tensor(value):
        return copy.deepcopy(value)
    if torch.is_tensor(spare) and spare.shape == value.shape and spare.dtype == value.dtype:
        return spare.copy_(value)
    return value.detach().to("cpu", copy=True)


def put_back(optimizer: torch.optim.Optimizer, kept: Inner) -> None:
    """Undo what the optimizer's state has learnt since it was copied."""
    for p, values in zip(_parameters(optimizer), kept, strict=True):
        now = optimizer.state[p]
        for key in now.keys() - values.keys():
            del now[key]
        for key, value in values.items():
            if torch.is_tensor(value):
                now[key].copy_(value)
            else:
                now[key] = copy.deepcopy(value)
        if not now:
            del optimizer.state[p]


def together(world: World, mixer: Mixer, optimizer: torch.optim.Optimizer) -> list[str]:
    """State that is shaped like its parameter, and that all nodes have, becomes their average.

    So do momentum and moments of a job. Its names are returned. Collective.
    """
    mine = {
        (at, key): value
        for at, p in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(p, {}).items()
        if torch.is_tensor(value) and value.is_floating_point() and value.shape == p.shape
    }
    gathered = world.gather(set(mine))
    names = world.broadcast(gathered and sorted(set.intersection(*gathered)))
    for name in names:
        value = mine[name]
        value.copy_(mixer.mean(value.reshape(1, -1).double()).view(value.shape))
    return sorted({key for _, key in names})
