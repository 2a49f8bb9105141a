"""Training of a job: its node, its evaluations, and the loop over steps."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip import config
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.engine.measurements import StepMetrics
from mpigossip.runs.hooks import Hook
from mpigossip.runs.node import Arrays, Numbers
from mpigossip.runs.overview import overview
from mpigossip.runs.printer import print_line
from mpigossip.runs.progress import Progress
from mpigossip.runs.run import Run
from mpigossip.runs.summary import describe
from mpigossip.runs.survive import Survival
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import Manifest, NodeState, Number
from mpigossip.store.log import read
from mpigossip.training.assemble import Assembly, assemble, load
from mpigossip.training.evaluate import Evaluation, evaluate, norms

PARTITION_KEY = "partition"
NUMPY_KEY = "numpy"
"""Keys of a checkpoint's manifest: the digest of the partition of the samples over nodes, and the
version of NumPy whose random numbers were used for this partition."""
NOT_OF_PARTITION = {"batch", "augment", "image_size", "workers", "cache"}
"""Settings of `[data]` on which the partition does not depend."""


class JobNode:
    """Local nodes of a job; they implement the protocol :class:`mpigossip.runs.node.Node`."""

    counts_all = True

    def __init__(self, assembly: Assembly, world: World):
        self.job = assembly.parts.job
        self.world = world
        self._doubted: set[str] = set()
        """Names of the metrics about whose infinite or NaN value a warning was printed."""
        self._take(assembly)

    def _take(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.trainer = assembly.trainer
        self.engine = assembly.engine
        self.mixer = self.engine.mixer
        self.group = self.engine.group
        self.facts: dict[str, Any] = {"steps_per_epoch": assembly.steps_per_epoch}
        if assembly.partition:
            self.facts |= {PARTITION_KEY: assembly.partition, NUMPY_KEY: np.__version__}

    @property
    def shift(self) -> int:
        return self.trainer.shift

    @property
    def total_steps(self) -> int:
        """Number of steps after which the job ends."""
        last_step = self.assembly.steps_per_epoch * self.job.run.epochs + self.shift
        return last_step if self.job.run.steps is None else min(last_step, self.job.run.steps)

    @property
    def finished(self) -> bool:
        """True if the job has made all of its steps."""
        return self.engine.index >= self.total_steps

    def average(self) -> None:
        self.trainer.average()

    def buffers(self, row: int) -> Sequence[Mapping[str, torch.Tensor]]:
        return self.trainer.replicas.buffers(row)

    def extra_state(
        self, row: int, world: World
    ) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
        return {}, {**self.trainer.precision.numbers(row)}

    def restore_extra_state(self, row: int, saved: NodeState, mean: Arrays | None) -> list[str]:
        if mean is None:
            self.trainer.precision.restore(row, saved.numbers)
        if row:
            return []
        return self.assembly.loader.note(self.engine.index - self.shift)

    def resumes_exactly(self, manifest: Manifest, first: NodeState) -> bool:
        """Return whether the nodes of the checkpoint had the same number of slots."""
        return manifest.meta["slots"] == self.group.slots

    def check_saved(self, manifest: Manifest, path: Path) -> None:
        """Check that the settings assign the same samples to each node as at the checkpoint.

        The check compares digests of the partition, which assigns samples to nodes. It is skipped
        if the number of nodes, the seed or the settings of the data have changed, because the
        partition may then differ. It is also skipped for checkpoints of earlier versions, which
        contain no digest.

        :param manifest: manifest of the checkpoint
        :param path: folder of the checkpoint
        :raises StoreError: if the settings are equal, but the partition differs
        """
        saved = manifest.meta.get(PARTITION_KEY)
        partition = self.facts.get(PARTITION_KEY)
        if not saved or not partition or saved == partition or manifest.n != self.mixer.n:
            return
        if _partition_settings(load(manifest.job, resolve=False)) != _partition_settings(self.job):
            return
        drawn_by = str(manifest.meta.get(NUMPY_KEY))[:40]
        installed = np.__version__
        if drawn_by == installed:
            cause = (
                "the samples or labels of this data have changed; restore the data of the start of "
                "the run"
            )
        else:
            cause = (
                f"the partition was drawn by NumPy {drawn_by}, but NumPy {installed} is installed: "
                f"run `pip install numpy=={drawn_by}`, or restore the data if they have changed"
            )
        raise StoreError(
            f'data.partition = "{self.job.data.partition}": the samples of data.source = '
            f'"{self.job.data.source}" are not distributed over the nodes as they were when {path} '
            f"was saved; {cause}"
        )

    def restore_counters(self, numbers: Numbers, facts: Mapping[str, Any]) -> None:
        """Restore the counters, so that the current epoch continues where it was interrupted.

        If the number of steps per epoch has changed since the checkpoint, `shift` is set such that
        the number of epochs done stays the same.
        """
        trainer = self.trainer
        before = int(facts["steps_per_epoch"])
        self.engine.restore_counters(numbers)
        trainer.shift = int(numbers["shift"])
        now = self.assembly.steps_per_epoch
        if before != now:
            done = (self.engine.index - trainer.shift) / before
            trainer.shift = self.engine.index - round(done * now)
        self.engine.shift = trainer.shift

    def publish(self) -> None:
        replicas = self.trainer.replicas
        self.group.all_gather(replicas.x, replicas.full)

    def rebuild(self, world: World) -> None:
        self.assembly.abandon()
        self.world = world
        self._take(assemble(self.job, world, world.size))

    def copy_step_extras(self, spare: Any) -> None:
        """Copy nothing: the batches and random numbers of a job follow from the number of the step.

        With fp16, the loss scale follows from the overflows of earlier steps. It is not copied
        either: `rebuild` sets it to its initial value, from which it adapts again.
        """

    def restore_step_extras(self, saved: Any, world: World) -> list[str]:
        """Restore nothing, because :meth:`copy_step_extras` copies nothing."""
        return []

    def close(self, together: bool) -> None:
        if together:
            self.assembly.close()
        elif self.world.shrunk:
            self.assembly.abandon()

    def progress_fields(self) -> dict[str, Any]:
        return {
            "steps_per_epoch": self.assembly.steps_per_epoch,
            "total_steps": self.total_steps,
            "samples_per_step": self._samples(self.mixer.n),
            "objective": self.trainer.replicas.objective,
            "text": config.dump(self.job),
            "shift": self.shift,
        }

    def _samples(self, nodes: int) -> int:
        return nodes * self.group.slots * self.job.data.batch * self.job.algorithm.accumulate

    def samples(self, record: StepMetrics) -> int:
        """Return the number of samples of a step, over all nodes that were not idle."""
        nodes = self.mixer.n
        engine = self.engine
        idle = engine.cadence.idle_nodes(record.index - engine.state_start, range(nodes))
        return self._samples(nodes - len(idle))

    def overview_lines(self, progress: Progress) -> Sequence[tuple[str, str]]:
        return overview(progress, self.assembly, self.world)

    def summary(self, progress: Progress) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "finished": self.finished,
            "epochs": progress.epoch(self.engine.index),
        }
        if progress.evaluation:
            metrics = self.trainer.replicas.objective.metrics
            summary |= {name: progress.evaluation.averaged[name] for name in (*metrics, "loss")}
            summary["metrics"] = " ".join(metrics)
        return summary

    # -- evaluation -------------------------------------------------------------------------------

    def to_evaluate(self) -> bool:
        """Return whether the job evaluates after the current step; it does after its final step."""
        done = self.engine.index
        section = self.job.run
        epoch, over = divmod(done - self.shift, self.assembly.steps_per_epoch)
        due = over == 0 and section.evaluate_every and epoch % section.evaluate_every == 0
        steps = section.evaluate_steps
        return self.finished or bool(due or (steps and done % steps == 0))

    def evaluate(self, run: Run) -> None:
        """Evaluate the averaged model and each node's own model; collective over all nodes."""
        run.wait_for_nodes("an evaluation")
        trainer = self.trainer
        modules = self.trainer.replicas.modules
        begin = self.engine.index - self.shift
        count = self.job.run.recalibrate
        steps = range(begin, begin + count if norms(modules[0][0]) else begin)
        batches = [trainer.batches(step) for step in steps]
        result = evaluate(trainer.replicas, self.mixer, self.assembly.loader, batches)
        self._doubt(result, run.progress)
        run.evaluated(result)

    def _doubt(self, result: Evaluation, progress: Progress) -> None:
        """Warn on rank 0, once per metric, if the averaged model's value is infinite or NaN."""
        for name, value in result.averaged.items():
            if self.world.rank or math.isfinite(value) or name in self._doubted:
                continue
            self._doubted.add(name)
            nodes = [int(i) for i in result.share[name].isfinite().logical_not().nonzero()]
            first = f", on node {self.mixer.local_nodes[nodes[0]]} first" if nodes else ""
            progress.warn(
                f'the test metric "{name}" is {value} at step {self.engine.index}{first}: its sum '
                "is "
                "not finite, or its count over the whole test set is 0; check the model's outputs "
                "and the metric"
            )


def _partition_settings(job: Job) -> tuple[dict[str, Any], int]:
    """Return the settings of `[data]` on which the partition of the data depends, and the seed."""
    data = config.as_dict(job)["data"]
    return {key: data[key] for key in data.keys() - NOT_OF_PARTITION}, job.run.seed


def train(node: JobNode, newest: Path | None = None, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """Train until the last step of the job, or until all ranks agree to stop; collective.

    If ``newest`` is the checkpoint of the last step, and the log contains the summary, nothing is
    trained, and this summary is printed and returned.

    :param node: the node of this process
    :param newest: checkpoint to continue from; None: start from step 0
    :param hooks: hooks in addition to those that the job names
    :return: the summary on rank 0, elsewhere {}
    """
    with ExitStack() as resources:
        run = Run(node.world, node.job, newest, resources)
        run.node = node
        run.hooks += hooks
        if newest is not None:
            run.resume()
            summary = _summary_of(run.folder, node.world) if node.finished else None
            if summary is not None:
                return summary if node.world.rank == 0 else {}
        try:
            return _steps(node, run)
        except BaseException:
            run.abandon()
            raise


def _steps(node: JobNode, run: Run) -> dict[str, Any]:
    """Make the steps, evaluations and checkpoints of a job, and end its run; return the summary."""
    interval = node.job.checkpoint.every_steps

    def between(_: Any = None) -> None:
        done = node.engine.index
        if node.to_evaluate():
            node.evaluate(run)
        if interval and done % interval == 0 and run.saved_at != done:
            run.save()

    def begin() -> None:
        run.begin()
        if node.finished:
            between()

    def step() -> None:
        record = node.trainer.step()
        survival.keep()
        run.record_step(record, node.samples(record))
        run.close_step()
        between()

    survival = Survival(node, run, between)
    survival.keep()
    survival.step(begin)
    while run.summary is None:  # repeated after a failure in `finish`, too
        survival.step(run.finish if node.finished or run.stopping else step)
    return run.summary


def _summary_of(folder: Path, world: World) -> dict[str, Any] | None:
    """Return the summary of a finished run from its log, and print it again.

    Return None if the log has no summary of a finished run, as after a kill before the summary.
    Collective.

    :raises JobError: on all ranks, if the log can't be read
    """
    summary = None
    with world.raise_together(StoreError):
        if world.rank == 0:
            saved = read(folder / "log.h5").summary
            if saved.get("finished"):
                summary = saved
                print_line(f"{folder}: the training has ended already\n{describe(summary)}")
    return world.broadcast(summary)
