"""What a run says while it goes: one live line on a terminal, plain lines in a batch log."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from mpigossip.training.evaluate import Evaluation
from mpigossip.training.hooks import Hook
from mpigossip.training.loop import Record

INTERVAL_S = 0.2
"""Seconds between refreshes of the live line."""


class Printer(Hook):
    """Speaks for the whole run on rank 0; silent elsewhere."""

    def __init__(self, world, stream: TextIO | None = None):
        """Lines go to ``stream``, standard output if None."""
        self._speaks = world.rank == 0
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._shown = 0.0
        self._length = 0

    def start(self, progress, assembly) -> None:
        """Say what begins."""
        if not self._speaks:
            return
        trainer, job = assembly.trainer, progress.job
        flat = trainer.replicas.flat
        self._line(
            f"{job.run.name}: {progress.nodes} nodes x {trainer.group.slots} slots, "
            f"{job.model.name} with {flat.count:,} parameters, {job.algorithm.name} on "
            f"{job.graph.name}, {progress.total_steps} steps, {progress.steps_per_epoch} an epoch"
        )
        if progress.first_step:
            self._line(f"going on at step {progress.first_step}")

    def step(self, progress, record: Record) -> None:
        """Refresh the live line now and then."""
        now = time.monotonic()
        if not (self._speaks and self._live) or now - self._shown < INTERVAL_S:
            return
        self._shown = now
        done = record.index + 1
        rate = (done - progress.first_step) / max(time.perf_counter() - progress.began, 1e-9)
        left = (progress.total_steps - done) / rate
        text = (
            f"step {done}/{progress.total_steps}  loss {record.loss.mean():.4f}  "
            f"{rate * progress.samples_per_step:,.0f} samples/s  {_clock(left)} left"
        )
        self._stream.write("\r" + text.ljust(self._length))
        self._stream.flush()
        self._length = len(text)

    def evaluation(self, progress, step: int, found: Evaluation) -> None:
        """One line an evaluation."""
        if self._speaks:
            self._line(
                f"epoch {progress.epoch(step):6.2f}  step {step:7d}  "
                f"test loss {found.loss:.4f}  accuracy {found.accuracy:.4f}  "
                f"(nodes {found.mean_local_accuracy:.4f})  "
                f"consensus distance {found.consensus_distance:.2e}  {_clock(progress.seconds)}"
            )

    def stop(self, progress, summary: dict[str, Any]) -> None:
        """The summary block, the digest last."""
        if self._speaks:
            self._line(describe(summary))

    def _line(self, text: str) -> None:
        clear = "\r" + " " * self._length + "\r" if self._length else ""
        self._stream.write(f"{clear}{text}\n")
        self._stream.flush()
        self._length = 0


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


SPLIT = {"compute_s": "compute", "node_s": "node", "exchange_s": "exchange", "idle_s": "idle"}


def describe(summary: dict[str, Any]) -> str:
    """The summary block as text."""
    state = "finished" if summary["finished"] else "stopped, to be resumed"
    lines = [
        f"run        {state} at step {summary['steps']} ({summary['epochs']:.2f} epochs), "
        f"{summary['nodes']} nodes x {summary['slots']} slots"
    ]
    if "accuracy" in summary:
        lines.append(
            f"accuracy   {summary['accuracy']:.4f} (averaged model), "
            f"test loss {summary['loss']:.4f}"
        )
    spent = {name: summary[key] for key, name in SPLIT.items() if key in summary}
    total = sum(spent.values())
    if total:
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in spent.items())
        lines.append(f"time       {summary['seconds']:.1f} s; steps {total:.1f} s: {shares}")
        lines.append(f"speed      {summary['samples_per_second']:,.0f} samples/s over all nodes")
    lines.append(f"sent       {size(summary['bytes_sent'])} a node")
    if "checkpoint" in summary:
        lines.append(f"checkpoint {summary['checkpoint']}")
        lines.append(f"digest     {summary['digest']}")
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError("unreachable")
