"""TensorBoard's files, written while a run goes on."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpigossip.cluster.world import World
from mpigossip.engine.step import Record
from mpigossip.runs.hooks import Hook
from mpigossip.store import StoreError
from mpigossip.store.log_export import TENSORBOARD, add_evaluation, events
from mpigossip.training.evaluate import Evaluation


class TensorBoard(Hook):
    """Writes RUN/tensorboard while the run goes on, on rank 0: ``tensorboard --logdir runs``.

    Figures of a step are those of the nodes in this process (node 0 under a launcher); the log has
    them of all nodes, and ``mpigossip log export --tensorboard`` brings their means.
    """

    def __init__(self, world: World):
        """``world``: whose rank 0 writes."""
        self._world, self._writer = world, None

    def start(self, progress, assembly) -> None:
        """Open the files; StoreError on every rank where TensorBoard isn't installed."""
        with self._world.together(StoreError):
            if self._world.rank == 0:
                self._writer = events(progress.folder / "tensorboard", progress.first_step)

    def step(self, progress, record: Record) -> None:
        """The figures of a step."""
        if self._writer is None:
            return
        per_node = progress.samples_per_step / progress.nodes or np.nan
        found = {
            "loss": float(record.loss.mean()),
            "lr": record.lr,
            "gradient_norm": float(record.gradient_norm.mean()),
            "consensus_distance": record.consensus_distance,
            "staleness": float(np.mean(record.staleness)),
            "samples_per_second": per_node / sum(record.seconds.values()),
            "bytes_sent": float(np.mean(record.bytes_sent)),
            **record.seconds,
        }
        for name, value in record.figures.items():
            self._writer.add_scalar(f"program/{name}", value, record.index)
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
