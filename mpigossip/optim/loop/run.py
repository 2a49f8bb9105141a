"""A user's own loop as a run: log, live line, checkpoints, lock and stopping, as a job has them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.agreement import AgreedError
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import Mistake
from mpigossip.config.readable import counted
from mpigossip.engine.measurements import Record
from mpigossip.optim.loop import about
from mpigossip.optim.loop import state as loop_state
from mpigossip.optim.node import Node
from mpigossip.runs.hooks import named_hooks
from mpigossip.runs.launch import newest
from mpigossip.runs.lock import locked
from mpigossip.runs.printer import Printer, say
from mpigossip.runs.progress import Progress, Tally, shares
from mpigossip.runs.recorder import COLUMNS, Recorder
from mpigossip.runs.run import meet
from mpigossip.runs.saver import Saver
from mpigossip.runs.stopper import Stopper, end_of_allocation
from mpigossip.runs.survive import lock_anew
from mpigossip.store import StoreError, checkpoint

OWN = COLUMNS.keys() - {"loss", "lr", "gradient_norm"} | {"step", "node"}
"""Columns that a program can't fill: they are measured."""
IGNORED = 100
"""Steps after a stop was agreed on without a look at it, until that is said."""


class LoopRun:
    """What the run of a job is to its trainer, for the node of a user's loop.

    Between two steps the last record waits for what the program says of it; it goes to the log
    with the next step, or with a checkpoint. Synchronous nodes write at equal steps. Asynchronous
    ones may differ in steps: one that ends waits, and takes part in writing until all have ended.
    """

    def __init__(self, world: World, job: Job):
        """Collective. JobError where the folder is another program's, or a job's."""
        self.world, self.job, self.folder = world, job, job.run.folder
        world.resources.enter_context(locked(self.folder, world, "run"))
        self._there = newest(self.folder, world)
        with world.together(Mistake):
            if self._there is not None:
                loop_state.check_door(self._there)
        self._together = world.comm is None or job.node.mixer == "synchronous"
        every = job.log.flush_steps
        end = end_of_allocation(job.checkpoint.wall_clock_s)
        lag = Stopper.LAG if self._together else every
        self._recorder = Recorder(world, 1, by_itself=False)
        self._stopper = Stopper(world, self.folder, end, lag)
        world.resources.enter_context(self._stopper)
        self._hooks = [self._recorder, Printer(world)]
        self._hooks += [*named_hooks(job.log.hooks, world), self._stopper]
        self._node: Node | None = None
        self._tally, self._before_s = Tally(), 0.0
        self._last: Record | None = None
        self._figures: dict[int, dict[str, float]] = {}
        self._shown: dict[str, float] = {}
        self._saved_at: int | None = None
        self._asked_at: int | None = None
        self._names, self._lost, self._lost_at = world.names, list[str](), 0
        self._parted = False
        """some are at the end, the others come to it alone: nothing is written until then"""
        self.keeps: dict[str, Any] = {}
        """what else a checkpoint takes: objects with state_dict() or get_state()"""
        self.closed = False
        self.stopped = False
        """the loop is left before its end"""

    # -- a step -----------------------------------------------------------------------------------

    def begin(self, node: Node) -> None:
        """Before the first step, or what comes earlier: open the log, say what begins."""
        if self._node is not None:
            return
        if self._there is not None:
            with self.world.together(Mistake):
                self._go_on_from_elsewhere(node, self._there)
        self._open(node)
        for hook in self._hooks:
            hook.start(self.progress, node)

    def _go_on_from_elsewhere(self, node: Node, path: Path) -> None:
        """The program has loaded a state of its own; JobError for one older than the folder's."""
        manifest, step = checkpoint.read_manifest(path), node.engine.index
        if step < manifest.step or manifest.n != node.mixer.n:
            loaded = f"a state of step {step} was loaded" if step else "nothing was loaded"
            raise JobError(
                [f'run: "{self.folder}" holds a run that has {path.name} as its newest checkpoint, '
                 f"of {counted(manifest.n, 'node')}, and {loaded}: call optimizer.resume() to go "
                 "on from there, or name another folder"]
            )  # fmt: skip
        numbers = checkpoint.read_node(path, node.mixer.rows[0]).numbers
        self._tally.restore(numbers)
        self._before_s = float(numbers["seconds"])
        self._saved_at = step if step == manifest.step else None

    def _open(self, node: Node) -> None:
        self._node, job = node, self.job
        self.progress = Progress(
            job=job, folder=self.folder, nodes=node.mixer.n, asked=node.mixer.n,
            steps_per_epoch=0, total_steps=job.run.steps or 0, samples_per_step=0,
            text=about.settings(job, node), first_step=node.engine.index,
            seconds_before=self._before_s, about=lambda: about.screen(job, node, self.world),
            lost=self._lost,
        )  # fmt: skip
        self._saver = Saver(self.world, self.folder, self.progress.text, job.checkpoint)

    def before(self, node: Node) -> None:
        """A step begins: nothing more is said of the last one."""
        self.begin(node)
        self._hand_over()
        if self._meets and node.engine.index % self.job.log.flush_steps == 0:
            self._same_step("step()")
            self._recorder.flush()

    def after(self, record: Record) -> None:
        """A step was made: its record waits; whether to stop is asked."""
        assert self._node is not None
        self._last, done = record, record.index + 1
        if self._meets:
            self._saver.poll(done)
        self.progress.checkpoint = self._saver.last or self.progress.checkpoint
        if self._asked_at is None:
            self._asked_at = done if not self._parted and self._stops(done) else None
        elif done == self._asked_at + IGNORED and self.world.rank == 0:
            self.progress.warn(
                f"a stop was agreed on at step {self._asked_at}, and the loop goes on: look at "
                "optimizer.stopping after each step, and call optimizer.exit()"
            )

    def _stops(self, done: int) -> bool:
        """Whether all ranks have agreed to stop by now."""
        if not self._together:
            return done % self.job.log.flush_steps == 0 and self._round(done)[0]
        return any([hook.wants_stop(done) for hook in self._hooks])

    @property
    def _meets(self) -> bool:
        """Whether nodes are at equal steps, and all in their loops."""
        return self._together and not self._parted

    def _round(self, done: int, ended: bool = False) -> tuple[bool, bool]:
        """Where asynchronous nodes meet: the log is written. Whether to stop; whether all ended."""
        self._meet("the log's writing")
        for _ in range(2):  # all are here: asked and answered at once
            self._saver.poll(0)
        self._recorder.flush()
        stops = any([hook.wants_stop(done) for hook in self._hooks])
        return stops, not self.world.agree(int(not ended))

    def _meet(self, call: str) -> None:
        """All nodes are here, in the same call; else JobError on all of them. Collective."""
        assert self._node is not None
        meet(self._node, self.world)
        calls = [call] if self._together else self.world.broadcast(self.world.gather(call))
        if len(set(calls)) > 1:
            some = ", ".join(f"rank {rank} in {one}" for rank, one in enumerate(calls[:8]))
            raise AgreedError(
                [f"asynchronous nodes meet in different calls: {some}; the log is written every "
                 f"{self.job.log.flush_steps} steps (flush_steps): let all nodes call save() after "
                 "equally many"]
            )  # fmt: skip

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self._asked_at is not None

    def listen(self) -> None:
        """Take the signals again."""
        self._stopper.listen()

    def log(self, *said: int | Mapping[str, Any]) -> None:
        """Figures of this node for a step: the last one made, or the one at hand."""
        figures = {k: v for one in said if isinstance(one, Mapping) for k, v in one.items()}
        step = next((one for one in said if not isinstance(one, Mapping)), None)
        done = self._node.engine.index if self._node else None
        open_steps = [] if done is None else [done - 1] * (self._last is not None) + [done]
        at = step if step is not None else open_steps[0] if open_steps else None
        if at is not None and open_steps and at not in open_steps:
            raise JobError(
                [f"log: step {at} is not open: {done} steps are made, counted from 0 by "
                 f"optimizer.step(), and {' or '.join(map(str, open_steps))} can be logged (a step "
                 "is written when the next begins, and by save(): log before that)"]
            )  # fmt: skip
        of_step = self._figures.setdefault(-1 if at is None else at, {})
        for name, value in figures.items():
            wrong = "is measured already" if name in OWN else ""
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                wrong = "is no name of a column, which has letters, digits, _, . and -"
            if wrong:
                raise JobError([f'log: "{name}" {wrong}; give the figure another name'])
            of_step[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)

    def _hand_over(self) -> None:
        record, self._last = self._last, None
        if record is None:
            return
        figures = self._figures.pop(-1, {}) | self._figures.pop(record.index, {})
        samples = int(figures.pop("samples", 0))
        if samples:
            self.progress.samples_per_step = samples * self.world.size
        record.figures = figures
        record.loss = torch.tensor([figures.get("loss", float("nan"))], dtype=torch.float64)
        self._shown |= figures
        self._tally.add(record, samples)
        for hook in self._hooks:
            hook.step(self.progress, record)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, node: Node) -> None:
        """Take a snapshot of the present step; it is written while training goes on. Collective."""
        if not self._parted:  # else at the end
            self._save(node)

    def _save(self, node: Node) -> None:
        self.begin(node)
        node.not_serving("save()")
        self._meet("save()")
        index = self._same_step("save()")
        self._hand_over()
        for hook in self._hooks:
            hook.flush()
        numbers = node.engine.numbers() | self._tally.numbers() | {
            "index": index, "shift": 0, "seconds": self.progress.seconds,
            "local_steps": node.engine.counts[0],
            "samples": self._tally.samples, "bytes_sent": node.mixer.bytes_sent[0],
        }  # fmt: skip
        with self.world.together(JobError):
            state, own = loop_state.snapshot(node, self.keeps, numbers)
        whole = loop_state.of_node(state, own, node, numbers)
        progress = self.progress
        meta = {"door": "loop", "nodes": progress.nodes, "asked": progress.asked,
                "slots": node.world.nodes.per_node, "lost": "; ".join(progress.lost),
                "lost_at": self._lost_at}  # fmt: skip
        self._saver.finish()
        self._saver.begin(index, [(self.world.nodes.column.rank, one) for one in whole], meta)
        self._saved_at = node.engine.index

    def _same_step(self, call: str) -> int:
        """The steps made, equal on all ranks or JobError; asynchronous: the most that one made."""
        assert self._node is not None
        index = self._node.engine.index
        if not self._together:
            return self.world.agree(index)
        stands = self.world.broadcast(self.world.gather((index, call)))
        if len(set(stands)) > 1:
            some = ", ".join(f"rank {r} {c} ({what})" for r, (c, what) in enumerate(stands[:8]))
            raise AgreedError(
                [f"ranks have made different numbers of steps: {some}; synchronous nodes take "
                 "equally many, and meet in the same calls: give all as many batches (drop_last), "
                 'or use mixer="asynchronous"']
            )  # fmt: skip
        return index

    def resume(self, node: Node) -> int:
        """Put the node to where the folder's newest checkpoint stands; its step, 0 without one."""
        path, self._there = self._there, None
        if self._node is not None:
            raise JobError(["resume() comes before the first step, and before save() and log()"])
        if path is None:
            return 0
        node.begin_anew()
        with self.world.together(Mistake):
            told, numbers = loop_state.restore(node, path, self.keeps)
        with torch.no_grad():
            node.publish()
        self._tally.restore(numbers)
        self._before_s = float(numbers["seconds"])
        self._saved_at = None if self.world.agree(bool(told)) else node.engine.index
        if told and self.world.rank == 0:
            say(f"{path}: {'; '.join(told)}")
        return node.engine.index

    # -- the loss of a rank -----------------------------------------------------------------------

    def go_on(self, node: Node, lost: Sequence[str], parted: bool) -> None:
        """Log, checkpoints and lock are the survivors' from here on; collective over them.

        ``lost``: who, a line each. ``parted``: some are at the end of their loops, where the others
        come to them. Figures that the program hadn't said yet of the step before are unknown.
        """
        if not self._lost:
            self._lost_at = node.engine.index
        self._lost += lost
        if not self.world.agree(self._node is not None and not self.closed):
            return  # nobody has begun, or all are through
        if self._node is None:
            self._open(node)
        self._hand_over()
        self._saver.abandon()
        self._figures.clear()
        self.closed, self._parted, self._saved_at = False, parted, None
        progress, world = self.progress, self.world
        progress.nodes, progress.seconds_before = world.nodes.count, progress.seconds
        progress.began, progress.first_step = time.perf_counter(), -world.agree(-node.engine.index)
        if world.agree(self.stopping):
            self._asked_at = progress.first_step
        if parted:  # of which some exchange with nobody any more
            progress.about = tuple
        lock_anew(self.folder, self._names, world)
        self._names = world.names
        self._saver = Saver(world, self.folder, progress.text, self.job.checkpoint)
        anew = [Printer(world) if isinstance(hook, Printer) else hook for hook in self._hooks]
        self._hooks = anew
        for hook in anew:
            hook.start(progress, node)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Save the last step, write the summary; collective. After an error: nothing of that."""
        if self.closed:
            return
        node = self._node
        # exit() may be called where the program handles an exception of its own
        if (sys.exception() is not None and not self.stopped) or node is None:
            self.closed = True
            if node is not None:
                self._saver.abandon()
            return
        if not self._together:
            self._hand_over()
            done, every = node.engine.index, self.job.log.flush_steps
            while not self._round(done := (done // every + 1) * every, ended=True)[1]:
                pass
        self._same_step("the end of the loop")
        if self.world.agree(self._saved_at != node.engine.index):
            self._save(node)
        self._saver.close()
        summary = self._summary(node)
        with self.world.together(StoreError):
            if "checkpoint" in summary:
                summary["digest"] = checkpoint.digest(self._saver.last)
        for hook in self._hooks:
            hook.stop(self.progress, summary)
        self.closed = True

    def _summary(self, node: Node) -> dict[str, Any]:
        """As a job's; figures as the program last said them, mean over nodes that did."""
        mine = self._tally.spent, self._tally.samples, node.mixer.bytes_sent[0], self._shown
        gathered = self.world.gather(mine)
        if gathered is None:
            return {}
        spent, samples, sent, shown = zip(*gathered, strict=True)
        summary: dict[str, Any] = {
            "finished": not self.stopped, "steps": node.engine.index, "nodes": self.progress.nodes,
            "slots": node.world.nodes.per_node, "seconds": self.progress.seconds,
            "bytes_sent": sum(sent) / self.progress.nodes,
        }  # fmt: skip
        summary |= shares(spent, sum(samples))
        names = dict.fromkeys(name for one in shown for name in one)
        means = {name: np.mean([one[name] for one in shown if name in one]) for name in names}
        if means:
            summary["figures"] = ", ".join(f"{name} {mean:.5g}" for name, mean in means.items())
        for name, lines in (("lost", self._lost), ("warnings", self.progress.warnings)):
            if lines:
                summary[name] = "; ".join(lines)
        if self._saver.last is not None:
            summary["checkpoint"] = str(self._saver.last)
        return summary
