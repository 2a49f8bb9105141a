"""Hooks that a job names in `log.hooks`: TensorBoard, and those of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpigossip.config.named import imported, is_own
from mpigossip.config import JobError
from mpigossip.store import StoreError
from mpigossip.store.export import TENSORBOARD, add_evaluation, events
from mpigossip.training.evaluate import Evaluation
from mpigossip.runs.hooks import Hook
from mpigossip.training.loop import Record


class TensorBoard(Hook):
    """Writes RUN/tensorboard while the run goes on, on rank 0: ``tensorboard --logdir runs``.

    Figures of a step are those of the nodes in this process (node 0 under a launcher); the log has
    them of all nodes, and ``mpigossip log export --tensorboard`` brings their means.
    """

    def __init__(self, world):
        """``world``: whose rank 0 writes."""
        self._world, self._writer = world, None

    def start(self, progress, assembly) -> None:
        """Open the files; StoreError on every rank where TensorBoard isn't installed."""
        self._per_node = progress.samples_per_step / progress.nodes
        with self._world.together(StoreError):
            if self._world.rank == 0:
                self._writer = events(progress.folder / "tensorboard", progress.first_step)

    def step(self, progress, record: Record) -> None:
        """The figures of a step."""
        if self._writer is None:
            return
        found = {
            "loss": float(record.loss.mean()),
            "lr": record.lr,
            "gradient_norm": float(record.gradient_norm.mean()),
            "consensus_distance": record.consensus_distance,
            "staleness": float(np.mean(record.staleness)),
            "samples_per_second": self._per_node / sum(record.seconds.values()),
            "bytes_sent": float(np.mean(record.bytes_sent)),
            **record.seconds,
        }
        for name, tag in TENSORBOARD.items():
            if np.isfinite(found[name]):
                self._writer.add_scalar(tag, found[name], record.index)

    def evaluation(self, progress, step: int, found: Evaluation) -> None:
        """The figures of an evaluation."""
        if self._writer is not None:
            add_evaluation(self._writer, step, {"loss": found.loss, "accuracy": found.accuracy})

    def flush(self) -> None:
        """Put on disk what is in memory."""
        if self._writer is not None:
            self._writer.flush()

    def stop(self, progress, summary: dict[str, Any]) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


HOOKS = {"tensorboard": TensorBoard}
"""Hooks by name; all others are named "package.module:factory"."""


def own_hooks(names: Sequence[str], world) -> list[Hook]:
    """The hooks of these names, each made with the world. Collective; raises JobError."""
    with world.together(JobError):
        return [_hook(name, world) for name in names]


def _hook(name: str, world) -> Hook:
    if name in HOOKS:
        return HOOKS[name](world)
    if not is_own(name):
        raise JobError(
            [f'log.hooks: "{name}" is none of {", ".join(HOOKS)} and not of the form '
             '"package.module:factory"']
        )  # fmt: skip
    made = imported("log.hooks", name, "(world) that returns a Hook")(world)
    if not isinstance(made, Hook):
        raise JobError(
            [f'log.hooks: "{name}" returned {type(made).__name__}; it should return a '
             "mpigossip.runs.hooks.Hook"]
        )  # fmt: skip
    return made
