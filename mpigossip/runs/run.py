"""A whole run: epochs of steps, evaluations, log, checkpoints, and the summary at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch

from mpigossip import config
from mpigossip.cluster.world import World
from mpigossip.config.readable import counted
from mpigossip.engine.measurements import Record
from mpigossip.engine.state import of_rows
from mpigossip.groups.base import Group
from mpigossip.mixing.base import Mixer
from mpigossip.runs.elastic import Kept, go_on
from mpigossip.runs.hooks import Hook
from mpigossip.runs.overview import overview
from mpigossip.runs.progress import Progress, Tally, shares
from mpigossip.runs.saver import Saver
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.manifest import MOST
from mpigossip.training.assemble import Assembly
from mpigossip.training.evaluate import Evaluation, evaluate, norms
from mpigossip.training.snapshot import by_slot, snapshot

IDLE_S = 1e-3
"""Between the exchanges of a node that only waits: they take the core from one that computes."""


def asked_of(manifest: checkpoint.Manifest) -> int:
    """Nodes that a run was started with, of which a checkpoint may have lost some."""
    asked = manifest.meta.get("asked", manifest.n)
    if not isinstance(asked, int) or not manifest.n <= asked <= MOST:
        raise StoreError(
            f"a checkpoint of {manifest.n} nodes says that the run was started with "
            f"{str(asked)[:40]}; use another checkpoint"
        )
    return asked


class Averaging(Protocol):
    """What meets others: a trainer, or the node of a user's own loop."""

    @property
    def mixer(self) -> Mixer:
        """What lies between the nodes."""

    def average(self) -> None:
        """An exchange without a gradient."""


def meet(node: Averaging, world: World, group: Group | None = None) -> None:
    """Wait for all nodes; asynchronous ones that are ahead go on averaging meanwhile.

    ``group``: the slots of a node that lives in several ranks, which go on together.
    """
    if node.mixer.synchronous:
        return  # they meet in what follows
    all_here = world.start_agree(0)
    until = time.monotonic() + world.timeout_s
    while not _over(all_here.ready() or time.monotonic() >= until, group):
        node.average()
        time.sleep(IDLE_S)
    all_here.read()


def _over(here: bool, group: Group | None) -> bool:
    """Whether any of a node's ranks has come to the end of a wait."""
    if group is None:
        return here
    flags = [torch.full((1, 1), float(here), dtype=torch.float64) for _ in group.mine]
    return bool(group.sum_scalars(flags) > 0)


class Run:
    """Drives a trainer from its present step to the last, and keeps what is worth keeping."""

    def __init__(self, assembly: Assembly, world: World, hooks: Sequence[Hook]):
        """``world``: of :mod:`mpigossip.cluster.ranks`; hooks watch and never steer."""
        self.assembly, self.trainer, self.world = assembly, assembly.trainer, world
        self.hooks = hooks
        self.tally = Tally()
        """of all nodes' samples"""
        job, trainer = assembly.job, assembly.trainer
        kept = job.checkpoint
        self.saver = Saver(world, job.run.folder, config.dump(job), kept)
        self.names, self.hosts = world.names, world.hosts
        self.kept = Kept()
        """where the run is to outlive losses"""
        self.saved: list[NodeState] = []
        """the last snapshot for a checkpoint"""
        self.rejoined = False
        self.doubted: set[str] = set()
        """figures of an evaluation of which it was said that they are no numbers"""
        slots = trainer.group.slots
        self.progress = Progress(
            job=job,
            folder=job.run.folder,
            nodes=trainer.mixer.n,
            asked=trainer.mixer.n,
            steps_per_epoch=assembly.steps_per_epoch,
            total_steps=assembly.total_steps,
            samples_per_step=trainer.mixer.n * slots * job.data.batch * job.algorithm.accumulate,
            objective=trainer.replicas.objective,
            text=config.dump(job),
            about=lambda: overview(self.progress, assembly, world),
        )

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.trainer.index >= self.progress.total_steps

    def train(self) -> dict[str, Any]:
        """Run to the last step, or until a hook asks to stop; the summary, on rank 0."""
        self.begin()
        stopped = False
        while not self.finished and not stopped:
            stopped = self.took(self.trainer.step())
        return self.end()

    def begin(self) -> None:
        """What comes before the first step."""
        progress, trainer = self.progress, self.trainer
        progress.first_step, progress.began = trainer.index, time.perf_counter()
        self._keep()
        if progress.job.checkpoint.every_steps:  # a lack of memory for it shows at once
            self.saved = self._states([])
        for hook in self.hooks:
            hook.start(progress, self.assembly)
        if self.rejoined:  # the loss may have come before what belongs behind this step
            self._between_steps(False)
        elif self.finished:  # only its summary is missing
            self._evaluate()
            self.saver.last = checkpoint.folder(progress.folder, trainer.index)

    def took(self, record: Record) -> bool:
        """What follows a step; whether a hook asks to stop."""
        self._keep()
        engine, nodes = self.trainer.engine, self.progress.nodes
        rested = len(engine.cadence.resting(record.index - engine.born, range(nodes)))
        self.tally.add(record, self.progress.samples_per_step * (nodes - rested) // nodes)
        for hook in self.hooks:
            hook.step(self.progress, record)
        stopped = any([hook.wants_stop(self.trainer.index) for hook in self.hooks])
        self._between_steps(stopped)
        return stopped

    def end(self) -> dict[str, Any]:
        """What comes behind the last step: the summary, on rank 0."""
        self.saver.close()
        summary = self._summary()
        with self.world.together(StoreError):
            if "checkpoint" in summary:
                summary["digest"] = checkpoint.digest(Path(summary["checkpoint"]))
        for hook in self.hooks:
            hook.stop(self.progress, summary)
        return summary

    def _keep(self) -> None:
        if self.world.survives:
            self.kept.keep(lambda spare: self._states([spare] if spare else [])[0])

    def _between_steps(self, stopped: bool) -> None:
        done, job = self.trainer.index, self.progress.job
        self.saver.poll(done)
        self.progress.checkpoint = self.saver.last or self.progress.checkpoint
        last = done == self.progress.total_steps
        epoch, over = divmod(done - self.progress.shift, self.progress.steps_per_epoch)
        every, steps = job.run.evaluate_every, job.run.evaluate_steps
        due = over == 0 and every and epoch % every == 0
        if last or due or (steps and done % steps == 0):
            self._evaluate()
        if (
            last
            or stopped
            or (job.checkpoint.every_steps and done % job.checkpoint.every_steps == 0)
        ):
            self.save()

    def _evaluate(self) -> None:
        meet(self.trainer, self.world, self.trainer.group)
        trainer = self.trainer
        begin, count = trainer.index - trainer.shift, self.progress.job.run.recalibrate
        shown = range(begin, begin + count if norms(trainer.replicas.modules[0][0]) else begin)
        self.progress.evaluation = evaluate(
            trainer.replicas,
            trainer.mixer,
            self.assembly.loader,
            [trainer.settings.batches(step) for step in shown],
        )
        self._doubt(self.progress.evaluation)
        for hook in self.hooks:
            hook.evaluation(self.progress, trainer.index, self.progress.evaluation)

    def _doubt(self, found: Evaluation) -> None:
        """Say on rank 0, once each, what of the averaged model is no number."""
        for name, value in found.averaged.items():
            if self.world.rank or math.isfinite(value) or name in self.doubted:
                continue
            self.doubted.add(name)
            nodes = [int(i) for i in found.share[name].isfinite().logical_not().nonzero()]
            first = f", on node {self.trainer.mixer.rows[nodes[0]]} first" if nodes else ""
            self.progress.warn(
                f'the test\'s "{name}" is {value} at step {self.trainer.index}{first}: a sum that '
                "isn't a number, or a count of 0 over the whole test set"
            )

    def _summary(self) -> dict[str, Any]:
        """What a person wants to know at the end; complete on rank 0 only. Collective."""
        progress, trainer = self.progress, self.trainer
        mine = (self.tally.spent, trainer.mixer.bytes_sent)
        gathered = self.world.gather(mine)
        if gathered is None:
            return {}
        summary: dict[str, Any] = {
            "finished": self.finished,
            "steps": trainer.index,
            "epochs": progress.epoch(trainer.index),
            "nodes": progress.nodes,
            "slots": trainer.group.slots,
            "seconds": progress.seconds,
            "bytes_sent": sum(b for _, sent in gathered for b in sent) / progress.nodes,
        }
        summary |= shares([spent for spent, _ in gathered], self.tally.samples)
        if progress.evaluation:
            metrics = trainer.replicas.objective.metrics
            summary |= {name: progress.evaluation.averaged[name] for name in (*metrics, "loss")}
            summary["metrics"] = " ".join(metrics)
        for name, lines in (("lost", progress.lost), ("warnings", progress.warnings)):
            if lines:
                summary[name] = "; ".join(lines)
        if self.saver.last == checkpoint.folder(progress.folder, trainer.index):
            summary["checkpoint"] = str(self.saver.last)
        return summary

    # -- checkpoints --------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """The counters of a checkpoint."""
        trainer = self.trainer
        return trainer.engine.numbers() | {
            "shift": trainer.shift,
            "seconds": self.progress.seconds,
            "samples": self.tally.samples,
        }

    def save(self) -> None:
        """Take a snapshot of the present step; it is written while training goes on."""
        meet(self.trainer, self.world, self.trainer.group)
        for hook in self.hooks:
            hook.flush()
        trainer = self.trainer
        progress = self.progress
        meta = {
            "nodes": progress.nodes,
            "asked": progress.asked,
            "slots": trainer.group.slots,
            "steps_per_epoch": progress.steps_per_epoch,
            "lost": "; ".join(progress.lost),
            "lost_at": progress.lost_at,
        }
        self.saver.finish()  # and so the last snapshot can be overwritten
        self.saved = self._states(self.saved)
        rows = trainer.mixer.rows
        here = [rows[0 if one.slot is not None else row] for row, one in enumerate(self.saved)]
        self.saver.begin(trainer.index, list(zip(here, self.saved, strict=True)), meta)

    @property
    def _by_slot(self) -> bool:
        """Whether each slot of a node writes a file of its own."""
        engine = self.trainer.engine
        large = sum(not of_rows(parts[0]) for parts in engine.parts().values())
        nbytes = 4 * self.trainer.replicas.flat.count * (1 + large)
        limit = self.progress.job.checkpoint.one_file_gb
        # a permuted parameter can't be put in order by slots that have a part of it each
        able = self.world.nodes.per_node > 1 and self.trainer.replicas.flat.by_index
        return able and nbytes > 1e9 * limit

    def _states(self, spare: Sequence[NodeState]) -> list[NodeState]:
        """A copy of every node that lives here, in the memory of an earlier one.

        Collective over a node; nothing but in its first process, or of the slots here each.
        """
        trainer, numbers, sent = self.trainer, self.numbers(), self._sent()
        if self._by_slot:
            own = numbers | self._own(0, sent[0])
            return by_slot(trainer.engine, trainer.replicas.buffers(0), own, spare)
        states = [
            snapshot(
                trainer.engine,
                trainer.replicas.buffers(row),
                row,
                numbers | self._own(row, sent[row]),
                one,
            )  # fmt: skip
            for row, one in zip_longest(range(len(trainer.mixer.rows)), spare)
        ]
        return [state for state in states if state is not None]

    def _sent(self) -> list[int]:
        """Bytes that each node here has sent, by all of its ranks."""
        group = self.trainer.group
        own = torch.tensor(self.trainer.mixer.bytes_sent, dtype=torch.float64).unsqueeze(1)
        each = [torch.zeros_like(own) if place else own for place in range(len(group.mine))]
        return [int(total) for total in group.sum_scalars(each)[:, 0]]

    def _own(self, row: int, sent: int) -> dict[str, float]:
        """What one node has counted."""
        precision, counts = self.trainer.settings.precision, self.trainer.engine.counts
        own = {"bytes_sent": sent, "local_steps": counts[row]}
        return own | self.tally.numbers() | precision.numbers(row)

    def resume(self, path: Path) -> list[str]:
        """Put every node to where the checkpoint stands; what to tell the user.

        To the bit with equal nodes and slots, else from the exact average.
        """
        numbers, told = go_on(self.trainer, path, self.progress.steps_per_epoch)
        self.count_from(float(numbers["seconds"]))
        self.tally.restore(numbers)
        self.progress.checkpoint, manifest = path, checkpoint.read_manifest(path)
        asked, lost_at = asked_of(manifest), manifest.meta.get("lost_at", 0)
        lost = "".join(c for c in str(manifest.meta.get("lost", "")) if c.isprintable())
        self.progress.lost = [lost] if lost else []
        if asked > manifest.n and isinstance(lost_at, int):
            steps = counted(manifest.step - lost_at, "step")
            now = self.progress.nodes
            told.insert(
                0, f"{lost}; {steps} since then on {manifest.n} of {asked} nodes, now {now}"
            )
        return told + self.assembly.loader.note(self.trainer.index - self.trainer.shift)

    def count_from(self, seconds: float) -> None:
        """Take the steps that are left from where the trainer stands, after so many seconds."""
        self.progress.seconds_before = seconds
        self.progress.shift = self.trainer.shift
        whole = self.assembly.steps_per_epoch * self.progress.job.run.epochs + self.trainer.shift
        asked = self.progress.job.run.steps
        self.progress.total_steps = whole if asked is None else min(whole, asked)
