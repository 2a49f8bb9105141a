"""Run of a job or of a custom training loop: log, checkpoints, stops, summary."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.communicator import CollectiveError
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.config.errors import UserError
from mpigossip.config.readable import pluralize
from mpigossip.engine.measurements import StepMetrics
from mpigossip.runs.hooks import Hook, named_hooks
from mpigossip.runs.node import Node, wait_for_nodes
from mpigossip.runs.printer import Printer, print_line
from mpigossip.runs.progress import Progress, Tally, shares
from mpigossip.runs.recorder import Recorder
from mpigossip.runs.saver import Saver
from mpigossip.runs.snapshot_and_restore import read_manifest, restore, snapshot
from mpigossip.runs.stopper import Stopper, end_of_allocation
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.manifest import MOST
from mpigossip.training.evaluate import Evaluation

IGNORED = 100
"""Number of steps after which a warning is printed if the ranks have agreed to stop, but the loop
of the program continues."""


def nodes_requested(manifest: checkpoint.Manifest) -> int:
    """Return the number of nodes with which the attempt that wrote a checkpoint was started.

    The checkpoint may have fewer nodes, because nodes may have failed.

    :param manifest: manifest of the checkpoint
    :raises StoreError: if the manifest contains no valid number
    """
    count = manifest.meta.get("asked", manifest.n)
    if not isinstance(count, int) or not manifest.n <= count <= MOST:
        raise StoreError(
            f"a checkpoint of {manifest.n} nodes says that the run was started with "
            f"{str(count)[:40]} nodes; resume from another checkpoint"
        )
    return count


class State(Enum):
    """State of a run; each rank keeps its own.

    * :meth:`Run.begin` changes READY to RUNNING.
    * :meth:`Run.finish` and :meth:`Run.abandon` change RUNNING and PARTLY_ENDED to ENDED.
    * :meth:`Run.rejoin`, after a rank failure, changes any state to RUNNING or PARTLY_ENDED, if the
      run of any survivor was in one of these two.

    A run that has agreed to stop early is still RUNNING: see :attr:`Run.stopping`.
    """

    READY = "the log is not open"
    RUNNING = "all nodes are in their loops"
    PARTLY_ENDED = "some nodes have ended their loops; nothing is written until all have"
    ENDED = "nothing more is written"


class Run:
    """One attempt at a run, which writes the run directory: log, checkpoints and summary.

    The record of the last step is kept until :meth:`close_step`, so that a program can add metrics
    to it.

    Synchronous nodes write the log after equal numbers of steps. Asynchronous nodes write it in a
    collective call, which each of them makes after ``log.flush_steps`` of its own steps; they
    continue to exchange while they wait for each other. If a node ends its loop earlier, it takes
    part in these calls until all nodes have ended their loops.
    """

    node: Node
    progress: Progress
    saver: Saver

    def __init__(self, world: World, job: Job, newest: Path | None, resources: ExitStack):
        """Build the hooks, and handle signals until ``resources`` are closed; collective.

        The caller has to set the attribute ``node`` before any other call.

        :param world: ranks of the run
        :param job: the job; its `run.output` names the run directory
        :param newest: checkpoint to continue from; None: start from step 0
        :param resources: context in which files and signal handlers are opened
        """
        self.world = world
        self.job = job
        self.folder = job.run.folder
        self.newest = newest
        self.resources = resources
        self._synchronous = world.comm is None or job.node.mixer == "synchronous"
        self.recorder = Recorder(world)
        self.printer = Printer(world)
        self.hooks: list[Hook] = named_hooks(job.log.hooks, world)
        """Hooks that the job names, and that the caller has added."""
        end = end_of_allocation(job.checkpoint.wall_clock_s)
        # Asynchronous nodes ask whether to stop only when they write the log, so that a lag of
        # several calls would take too long.
        lag = Stopper.LAG if self._synchronous else 1
        self.stopper = resources.enter_context(Stopper(world, self.folder, end, lag))
        self.tally = Tally()
        self._before_s = 0.0
        self.last: StepMetrics | None = None
        """Record of the last step, if it is not yet passed to the hooks; otherwise None."""
        self.figures: dict[int, dict[str, float]] = {}
        """Metrics that the program has logged, by step and name. Metrics with the key -1 belong to
        the next step that is recorded."""
        self._samples: int | None = None
        self._logged: dict[str, float] = {}
        self._states: Sequence[NodeState] = ()
        self._lost: list[str] = []
        self.saved_at: int | None = None
        """Step that needs no other checkpoint: the last one for which a save was attempted, or the
        step of the checkpoint from which the run has resumed exactly. None: no step."""
        self._stop_step: int | None = None
        self.state = State.READY
        self.stopped = False
        """True if the program has left its loop before the last step."""
        self.summary: dict[str, Any] | None = None
        """Summary, once the run has ended; complete on rank 0 only."""

    @property
    def _observers(self) -> tuple[Hook, ...]:
        return self.recorder, self.printer, *self.hooks, self.stopper

    @property
    def begun(self) -> bool:
        """True once the log has been opened."""
        return self.state is not State.READY

    @property
    def is_open(self) -> bool:
        """True if the run has begun and has not ended."""
        return self.state in (State.RUNNING, State.PARTLY_ENDED)

    # -- the beginning ----------------------------------------------------------------------------

    def resume(self) -> int:
        """Restore the node from the newest checkpoint; collective.

        Return the step at which the run continues, 0 without a checkpoint.

        :raises UserError: on all ranks, if the checkpoint is damaged or does not fit the run
        """
        path = self.newest
        self.newest = None
        if path is None:
            return 0
        manifest = read_manifest(path, self.world)
        exact, messages, numbers = restore(self.node, path, manifest)
        with self.world.raise_together(UserError):
            messages = self._remember(manifest) + messages
        if exact and not self.node.mixer.synchronous:
            messages += ["not exactly: messages in flight between nodes are dropped"]
        with torch.no_grad():
            self.node.publish()
        self.take_over(numbers)
        step = self.node.engine.index
        self.saved_at = step if exact else None
        if messages and self.world.rank == 0:
            print_line(f"{path}: {'; '.join(messages)}")
        return step

    def take_over(self, numbers: Mapping[str, Any]) -> None:
        """Continue to count seconds and samples from the numbers of a checkpoint."""
        self.tally.restore(numbers)
        self._before_s = float(numbers["seconds"])

    def _remember(self, manifest: checkpoint.Manifest) -> list[str]:
        count = nodes_requested(manifest)
        lost_at = manifest.meta.get("lost_at", 0)
        lost = "".join(c for c in str(manifest.meta.get("lost", "")) if c.isprintable())
        self._lost = [lost] if lost else []
        if count == manifest.n or not isinstance(lost_at, int):
            return []
        steps = pluralize(manifest.step - lost_at, "step")
        now = self.node.mixer.n
        return [f"{lost}; {steps} since then on {manifest.n} of {count} nodes, now {now}"]

    def begin(self) -> None:
        """Open the log and print the overview, if no earlier call has done so; collective."""
        if self.begun:
            return
        self._open()
        # Allocate the memory of snapshots now: a lack of memory should end the run at its start.
        if self.job.checkpoint.every_steps:
            self._states = snapshot(self.node, {})
        for observer in self._observers:
            observer.start(self.progress, self.node.assembly)

    def _open(self) -> None:
        node = self.node
        self.progress = Progress(
            job=self.job,
            folder=self.folder,
            nodes=node.mixer.n,
            asked=node.mixer.n,
            first_step=node.engine.index,
            seconds_before=self._before_s,
            lost=self._lost,
            about=lambda: node.overview_lines(self.progress),
            **node.progress_fields(),
        )
        self._open_saver()
        if self.saved_at == node.engine.index:
            self.saver.last = checkpoint.folder(self.folder, node.engine.index)
        self.state = State.RUNNING

    def _open_saver(self) -> None:
        text = self.progress.text
        settings = self.job.checkpoint
        self.saver = Saver(self.world, self.folder, text, settings)

    # -- a step -----------------------------------------------------------------------------------

    def record_step(self, record: StepMetrics, samples: int | None = None) -> None:
        """Keep the metrics of a step until :meth:`close_step`, and ask the hooks whether to stop.

        Asynchronous nodes also write the log here, every ``log.flush_steps`` steps.

        :param record: metrics of the step
        :param samples: number of samples of the step over all nodes; None: use the metric
            "samples" that the program logs, which counts the samples of this rank
        """
        self.last = record
        self._samples = samples
        done = record.index + 1
        if self._in_step:
            self.saver.poll(done)
        self.progress.checkpoint = self.saver.last or self.progress.checkpoint
        if self._stop_step is None:
            if self.state is State.RUNNING and self._stops(done):
                self._stop_step = done
        elif done == self._stop_step + IGNORED and self.world.rank == 0:
            self.progress.warn(
                f"all ranks agreed at step {self._stop_step} to stop, but the loop still runs: "
                "test "
                "`optimizer.stopping` after each step, and call optimizer.exit() if it is true"
            )

    def close_step(self) -> None:
        """Pass the last record to the hooks, and write the log every ``log.flush_steps`` steps.

        Writing the log is collective. Asynchronous nodes write it in :meth:`record_step` instead.
        """
        self.hand_over()
        if self._in_step and self.node.engine.index % self.job.log.flush_steps == 0:
            self._same_step("step()")
            self.recorder.flush()

    def hand_over(self) -> None:
        """Pass the metrics of the last step to the hooks; not collective."""
        record = self.last
        self.last = None
        if record is None:
            return
        figures = self.figures.pop(-1, {}) | self.figures.pop(record.index, {})
        if self._samples is None:
            self._samples = int(figures.pop("samples", 0))
            if self._samples:
                self.progress.samples_per_step = self._samples * self.world.size
            record.loss = torch.tensor([figures.get("loss", float("nan"))], dtype=torch.float64)
            record.metrics = figures
        self._logged |= figures
        self.tally.add(record, self._samples)
        for observer in self._observers:
            observer.step(self.progress, record)

    def evaluated(self, result: Evaluation) -> None:
        """Pass the result of an evaluation at the current step to the hooks; collective."""
        self.progress.evaluation = result
        for observer in self._observers:
            observer.evaluation(self.progress, self.node.engine.index, result)

    @property
    def stopping(self) -> bool:
        """True once all ranks have agreed to stop."""
        return self._stop_step is not None

    @property
    def _in_step(self) -> bool:
        """True if all nodes are in their loops, and make the same step."""
        return self._synchronous and self.state is State.RUNNING

    def _stops(self, done: int) -> bool:
        if not self._synchronous:
            return done % self.job.log.flush_steps == 0 and self._round(done)[0]
        return self._wants_stop(done)

    def _wants_stop(self, done: int) -> bool:
        """Return whether any hook wants to stop.

        All hooks are called, even if the first one returns True, because they count the calls.
        """
        return any([observer.wants_stop(done) for observer in self._observers])

    def _round(self, done: int, ended: bool = False) -> tuple[bool, bool]:
        """Write the log together with all other asynchronous nodes; collective.

        :param done: number of steps done, which is passed to the hooks
        :param ended: whether this node has ended its loop
        :return: whether to stop, and whether all nodes have ended their loops
        """
        self.wait_for_nodes("writing the log")
        # The first call starts an agreement, which the second one reads without waiting, because
        # all nodes make these calls now.
        for _ in range(2):
            self.saver.poll(0)
        self.recorder.flush()
        stops = self._wants_stop(done)
        return stops, not self.world.agree(int(not ended))

    def wait_for_nodes(self, call: str) -> None:
        """Wait for all nodes, which have to make the same call; collective.

        :param call: name of the call, for messages
        :raises JobError: on all ranks, if asynchronous nodes are in different calls
        """
        wait_for_nodes(self.node, self.world)
        calls = [call] if self._synchronous else self.world.broadcast(self.world.gather(call))
        if len(set(calls)) > 1:
            some = ", ".join(f"rank {rank} in {name}" for rank, name in enumerate(calls[:8]))
            raise CollectiveError(
                [
                    f"asynchronous nodes are in different calls: {some}; the log is written every "
                    f"{self.job.log.flush_steps} steps (flush_steps): call save() after the same "
                    "number of steps on all nodes"
                ]
            )

    def _same_step(self, call: str) -> int:
        """Check that all ranks have done the same number of steps, and return it; collective.

        Asynchronous nodes may have done different numbers: the largest one is returned.

        :param call: name of this call, for messages
        :raises JobError: on all ranks, if synchronous nodes have done different numbers of steps,
            or make different calls
        """
        index = self.node.engine.index
        if not self._synchronous:
            return self.world.agree(index)
        stands = self.world.broadcast(self.world.gather((index, call)))
        if len(set(stands)) > 1:
            some = ", ".join(f"rank {r} {c} ({what})" for r, (c, what) in enumerate(stands[:8]))
            raise CollectiveError(
                [
                    f"ranks have made different numbers of steps: {some}; synchronous nodes must "
                    "make "
                    "the same steps and calls: give all nodes the same number of batches "
                    '(drop_last=True), or use mixer="asynchronous"'
                ]
            )
        return index

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self) -> None:
        """Copy the state after the current step; a thread writes it as a checkpoint; collective.

        While some nodes have ended their loops, nothing is written.
        """
        # Nodes that have ended their loops can't take part now: `finish` writes the checkpoint.
        if self.state is not State.PARTLY_ENDED:
            self._save()

    def _save(self) -> None:
        self.begin()
        node = self.node
        progress = self.progress
        self.wait_for_nodes("save()")
        index = self._same_step("save()")
        self.hand_over()
        for observer in self._observers:
            observer.flush()
        numbers = self.tally.numbers() | {
            "index": index,
            "seconds": progress.seconds,
            "samples": self.tally.samples,
        }
        extras = [node.extra_state(row, self.world) for row in range(len(node.mixer.local_nodes))]
        self.saver.finish()  # The thread may still read the last snapshot, which is reused.
        self._states = snapshot(node, numbers, self._states)
        rows = (
            node.mixer.local_nodes
            if self.world.comm is None
            else [self.world.nodes.inter_node.rank]
        )
        states = []
        for position, state in enumerate(self._states):
            row = 0 if state.slot is not None else position
            arrays, more = extras[row]
            state.arrays.update(arrays)
            state.numbers.update(more)
            states.append((rows[row], state))
        meta = node.facts | {
            "nodes": progress.nodes,
            "asked": progress.asked,
            "slots": node.group.slots,
            "lost": "; ".join(progress.lost),
            "lost_at": progress.lost_at,
        }
        self.saver.begin(index, states, meta)
        self.saved_at = node.engine.index

    # -- the failure of a rank --------------------------------------------------------------------

    def rejoin(self, lost: Sequence[str], parted: bool) -> None:
        """Continue log, checkpoints and summary with the survivors; collective over them.

        Metrics of the last step that the program has not logged before the failure stay unknown.

        :param lost: for each failed rank, a line with its name and host
        :param parted: whether some nodes have ended their loops, and wait for the others at the end
        """
        node = self.node
        world = self.world
        self._lost.extend(lost)
        if not world.agree(self.is_open):
            return  # On all ranks, the run has either not begun or ended.
        if not self.begun:
            self._open()
        progress = self.progress
        if progress.nodes == progress.asked:
            progress.lost_at = node.engine.index
        self.hand_over()
        self.saver.abandon()
        self.figures.clear()
        self.state = State.PARTLY_ENDED if parted else State.RUNNING
        self.saved_at = None
        self._states = ()
        for name, value in node.progress_fields().items():
            setattr(progress, name, value)
        progress.nodes = world.nodes.count
        progress.seconds_before = progress.seconds
        progress.began = time.perf_counter()
        progress.first_step = -world.agree(-node.engine.index)
        if world.agree(self.stopping):
            self._stop_step = progress.first_step
            # The rank that removes the file STOP may have failed, or rank 0 may not have read the
            # result of the agreement.
            if world.rank == 0:
                self.stopper.remove_stop_file()
        if parted:  # the overview would describe exchanges that no longer take place
            progress.about = tuple
        self._open_saver()
        self.printer = Printer(world)  # Another rank may be rank 0 now, and has to print.
        for observer in self._observers:
            observer.start(progress, node.assembly)

    # -- the end ----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """End the run without the other ranks, after an exception; write nothing more."""
        if self.is_open:
            self.saver.abandon()
            self.state = State.ENDED

    def finish(self) -> None:
        """Save the last step, unless it is saved already, and write the summary; collective.

        If the run has not begun or has ended, nothing is done.

        :raises JobError: if synchronous nodes have made different numbers of steps. Files that
            can't be written raise it, too, unless a setting `on_error` is "continue"
        :raises NonFiniteError: if the state has infinite or NaN values
        """
        if not self.is_open:
            return
        node = self.node
        progress = self.progress
        if not self._synchronous:
            self.hand_over()
            done = node.engine.index
            flush_steps = self.job.log.flush_steps
            while not self._round(done := (done // flush_steps + 1) * flush_steps, ended=True)[1]:
                pass
        index = self._same_step("ending the run")
        if self.world.agree(self.saved_at != node.engine.index):
            self._save()
        self.saver.close()
        summary = self._summary(index)
        with self.world.raise_together(StoreError):
            if "checkpoint" in summary:
                summary["digest"] = checkpoint.digest(Path(summary["checkpoint"]))
        for observer in self._observers:
            observer.stop(progress, summary)
        self.state = State.ENDED
        self.summary = summary

    def _summary(self, index: int) -> dict[str, Any]:
        """Return the summary of the whole run on rank 0, elsewhere {}; collective.

        Metrics that programs log are averaged over the ranks that have logged them.

        :param index: number of steps of the last checkpoint
        """
        node = self.node
        progress = self.progress
        of_rank = self.tally.spent, self.tally.samples, sum(node.mixer.bytes_sent), self._logged
        gathered = self.world.gather(of_rank)
        if gathered is None:
            return {}
        spent, samples, sent, logged = zip(*gathered, strict=True)
        total = samples[0] if node.counts_all else sum(samples)
        summary: dict[str, Any] = {
            "finished": not self.stopped,
            "steps": node.engine.index,
            "nodes": progress.nodes,
            "slots": node.group.slots,
            "seconds": progress.seconds,
            "bytes_sent": sum(sent) / progress.nodes,
        }
        summary |= shares(spent, total) | node.summary(progress)
        names = dict.fromkeys(name for metrics in logged for name in metrics)
        means = {
            name: np.mean([metrics[name] for metrics in logged if name in metrics])
            for name in names
        }
        if means:
            summary["figures"] = ", ".join(f"{name} {mean:.5g}" for name, mean in means.items())
        for name, lines in (("lost", progress.lost), ("warnings", progress.warnings)):
            if lines:
                summary[name] = "; ".join(lines)
        if self.saver.last == checkpoint.folder(self.folder, index):
            summary["checkpoint"] = str(self.saver.last)
        return summary
