"""Hooks, which observe a run without changing its results, and the names of hooks in jobs.

To add a hook, write a subclass of `Hook` and add a line to `HOOKS`. A custom hook needs no line.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.user_code import build_checked, import_object, is_user_code
from mpigossip.engine.measurements import StepMetrics
from mpigossip.runs.summary import mean
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import writing
from mpigossip.store.log_export import Events, add_evaluation, tag
from mpigossip.training.evaluate import Evaluation

HOOKS = {"tensorboard": "mpigossip.runs.hooks:TensorBoard"}
"""Hooks that `log.hooks` can name; all others are named as "package.module:factory"."""


class Hook:
    """Observer of a run. Methods that a subclass does not override do nothing.

    Each method is called on all ranks. ``progress`` is the `Progress` of the run.
    """

    def start(self, progress, assembly) -> None:
        """Prepare for the first step, or for the first one after a rank failure.

        :param progress: progress of the run
        :param assembly: parts of the job (model, data, graph); for a custom loop, its `LoopNode`
        """

    def step(self, progress, record: StepMetrics) -> None:
        """Process ``record``, the metrics of the last step.

        In a custom loop, this is called when the next step begins, or at the end of the run.
        """

    def evaluation(self, progress, step: int, result: Evaluation) -> None:
        """Process the ``result`` of an evaluation that was made after ``step`` steps."""

    def wants_stop(self, done: int) -> bool:
        """Return whether the run should end now, after ``done`` steps.

        The result must be equal on all ranks. The method is called after each step, until a hook
        has returned True. If the nodes are asynchronous, it is called only when they write the log.
        """
        return False

    def flush(self) -> None:
        """Write buffered output to disk; called before each checkpoint.

        If the run is resumed from that checkpoint, the output must not lack steps before it.
        """

    def stop(self, progress, summary: dict[str, Any]) -> None:
        """End the observation after the last step; ``summary`` is complete on rank 0 only."""


class TensorBoard(Hook):
    """Hook that writes RUN/tensorboard on rank 0, for ``tensorboard --logdir runs``.

    The metrics of a step are means over the nodes in the process of rank 0: all nodes of a
    simulation, or node 0 under a launcher. The log contains the metrics of all nodes, and
    ``mpigossip log export --tensorboard`` writes their means.
    """

    def __init__(self, world: World):
        self._world: World = world
        self._writer: Events | None = None

    def start(self, progress, assembly) -> None:
        self._progress = progress
        with self._world.raise_together(StoreError):
            if self._world.rank == 0:
                with writing(progress.folder / "tensorboard"):
                    self._writer = Events(progress.folder / "tensorboard", progress.first_step)

    def _write(self, write: Callable[[Events], None]) -> None:
        """Call ``write`` with the open files on rank 0.

        If the disk reports an error, print a warning, and write nothing from then on. Training
        continues, because the log contains all metrics.
        """
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            with suppress(OSError):
                self._writer.close()
            self._writer = None
            text = f"{self._progress.folder / 'tensorboard'} can't be written: {error.strerror}"
            self._progress.warn(
                f"{text}; training continues without it. When there is space again, `mpigossip log "
                f"export {self._progress.folder} --tensorboard FOLDER` writes all metrics"
            )

    def step(self, progress, record: StepMetrics) -> None:
        if self._writer is None:
            return
        per_node = progress.samples_per_step / progress.nodes or np.nan
        values = {
            "loss": float(record.loss.nanmean()),
            "lr": record.lr,
            "gradient_norm": float(record.gradient_norm.mean()),
            "consensus_distance": record.consensus_distance,
            "staleness": float(np.mean(record.staleness)),
            "samples_per_second": per_node / sum(record.seconds.values()),
            "bytes_sent": float(np.mean(record.bytes_sent)),
            **record.seconds,
        }
        logged = {name: mean(value) for name, value in record.metrics.items()}
        counted = {name: logged[name] for name in progress.objective.metrics if name in logged}
        scalars = {tag(n): value for n, value in (values | counted).items() if np.isfinite(value)}
        scalars |= {f"program/{n}": value for n, value in logged.items() if n not in counted}

        def write(writer: Events) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, record.index)

        self._write(write)

    def evaluation(self, progress, step: int, result: Evaluation) -> None:
        figures = result.averaged
        self._write(lambda writer: add_evaluation(writer, step, figures, list(figures)[1:]))

    def flush(self) -> None:
        self._write(Events.flush)

    def stop(self, progress, summary: dict[str, Any]) -> None:
        self._write(Events.close)


def named_hooks(names: Sequence[str], world: World) -> list[Hook]:
    """Build the hooks that `log.hooks` names; collective.

    :param names: names in `HOOKS`, or "package.module:factory"
    :param world: ranks of the run, which each factory gets as its argument
    :raises JobError: on all ranks, if a name is unknown, or if a factory raises an error or returns
        no Hook
    """
    with world.raise_together(JobError):
        return [_build_hook(name, world) for name in names]


def _build_hook(name: str, world: World) -> Hook:
    where = HOOKS.get(name, name)
    if not is_user_code(where):
        raise JobError(
            f'log.hooks: "{name}" must be one of {", ".join(HOOKS)}, or have the form '
            '"package.module:factory"'
        )
    factory = import_object("log.hooks", where, "(world) that returns a Hook")
    return build_checked("log.hooks", name, Hook, factory, world)
