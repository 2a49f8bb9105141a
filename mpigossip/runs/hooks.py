"""Hooks: observers of a run, which never change its numbers, and those that a job can name.

A new hook is a subclass of `Hook` and a line of `HOOKS`; a user's own needs no line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.own_parts import imported, is_own, made
from mpigossip.engine.measurements import Record
from mpigossip.training.evaluate import Evaluation

HOOKS = {"tensorboard": "mpigossip.runs.tensorboard:TensorBoard"}
"""The hooks that `log.hooks` knows by name; all others it names as "package.module:factory"."""


class Hook:
    """Observer of a run; methods that a subclass doesn't override do nothing."""

    def start(self, progress, assembly) -> None:
        """Before the first step."""

    def step(self, progress, record: Record) -> None:
        """After each step."""

    def evaluation(self, progress, step: int, found: Evaluation) -> None:
        """After each evaluation."""

    def wants_stop(self, done: int) -> bool:
        """Return whether the run should end at this step boundary; equal on all ranks.

        Asynchronous nodes ask where they write the log.
        """
        return False

    def flush(self) -> None:
        """Write to disk what must not be older than the checkpoint that follows."""

    def stop(self, progress, summary: dict[str, Any]) -> None:
        """After the last step; the summary is complete on rank 0 only."""


def named_hooks(names: Sequence[str], world: World) -> list[Hook]:
    """Return the hooks of these names, each made with the world. Collective; JobError."""
    with world.together(JobError):
        return [_made(name, world) for name in names]


def _made(name: str, world: World) -> Hook:
    where = HOOKS.get(name, name)
    if not is_own(where):
        raise JobError(
            [f'log.hooks: "{name}" is none of {", ".join(HOOKS)} and not of the form '
             '"package.module:factory"']
        )  # fmt: skip
    factory = imported("log.hooks", where, "(world) that returns a Hook")
    return made("log.hooks", name, Hook, factory, world)
