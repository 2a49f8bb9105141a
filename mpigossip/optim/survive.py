"""Custom loops after a rank failure: the end of a loop, and the torch optimizer's state."""

from __future__ import annotations

import copy
from typing import Any

import torch

from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.mixing.base import Mixer
from mpigossip.runs.survive import COLLECTIVE, Survival

Inner = list[dict[str, Any]]
"""A torch optimizer's state, parameter by parameter."""


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


class LoopSurvival(Survival):
    """Survival of a custom loop, whose nodes may leave it at different times."""

    def leave(self) -> None:
        """End the run, and wait until all nodes have left their loops.

        Where one is lost meanwhile, those that are still in their loops finish them alone, and
        come here. A loop that is left by `exit()` ends at the same step on all nodes.
        """
        waits = self._node.world is self._world
        for name in () if waits else COLLECTIVE:
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
                self._outlive()
            if not lost or self._run is None or self._run.closed:
                return
            waits = False


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied(optimizer: torch.optim.Optimizer, spare: Inner) -> Inner:
    """Copy the optimizer's state to host memory, to that of ``spare`` where it fits."""
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
    """Restore the optimizer's state from a copy; keys added since then go."""
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


def average_state(world: World, mixer: Mixer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Average state that is shaped like its parameter and that all nodes have; return its names.

    As a job's momentum and moments are. Collective.
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
