"""Run a study's jobs side by side, one process each; finished ones are not repeated."""

import os
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from mpigossip import config
from mpigossip.cluster.process import end_with
from mpigossip.config.errors import Failure, JobError, NonFiniteError
from mpigossip.config.readable import print_safe
from mpigossip.runs.lock import lock
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import replacing, writing
from mpigossip.store.log import VIRTUAL, Log, read
from mpigossip.studies.grid import Cell
from mpigossip.training import assemble

LOST = 3
"""Exit code of a run whose loss became no number."""
OUTPUT = "output.txt"
"""Beside the log: what a run printed."""
DIVERGED = "diverged.txt"
"""Beside the log of a run whose loss became no number: why it can't be finished."""
COLUMNS = ("bytes_sent", "consensus_distance", "kind", "loss", "mixed_distance", VIRTUAL)
DERIVED: dict[str, Callable[[Log], float]] = {
    "train_loss": lambda log: float(np.nanmean(_last(log.steps["loss"]))),
    "spread": lambda log: float(np.nanmean(log.steps["consensus_distance"])),
    "exchanges": lambda log: float((log.steps["kind"] > 0).mean(1).sum()),
}
"""Figures of a run besides those of its summary: training loss of the last twentieth of the steps,
mean consensus distance, steps with an exchange."""
WINDOWS = 20
NOISE = 1.1
"""Parts of a run whose training losses are compared, and how much of a rise is noise."""
LEAVE_S = 20.0
"""Seconds that runs have to write their checkpoints when the study is stopped."""


def _last(values: np.ndarray) -> np.ndarray:
    return values[-max(1, len(values) // WINDOWS) :]


Key = tuple[Cell, float | None, int]
"""A run: its point, learning rate (None: the job's) and seed."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run: its log, None where its loss became no number."""

    log: Log | None

    @property
    def diverged(self) -> bool:
        """Return whether the loss became no number."""
        return self.log is None

    @property
    def late(self) -> bool:
        """Return whether it learnt and then lost over half of that, though its loss is a number.

        By the training loss, mean over nodes and a twentieth of the steps: overfitting leaves it.
        """
        if self.log is None or len(self.log.steps["loss"]) < WINDOWS:
            return False
        loss = np.nanmean(self.log.steps["loss"], axis=1)
        first, *_, last = means = [float(part.mean()) for part in np.array_split(loss, WINDOWS)]
        return last > max((first + min(means)) / 2, NOISE * min(means))

    def last(self, name: str) -> float:
        """A figure of the averaged model at the end; NaN where it diverged."""
        if self.log is None:
            return float("nan")
        return DERIVED[name](self.log) if name in DERIVED else float(self.log.summary[name])

    def curve(self, name: str) -> np.ndarray:
        """A figure at each evaluation: a metric, "loss", "consensus_distance", "step", "epoch".

        "train_loss" is the mean of the steps since the evaluation before.
        """
        if name == "train_loss":
            return self._trained()
        if name not in self.log.evaluations:
            raise JobError(f'y = "{name}": the logs have no such figure at evaluations')
        values = np.asarray(self.log.evaluations[name], float)
        return values if values.ndim == 1 else values.mean(1)

    def _trained(self) -> np.ndarray:
        """Mean training loss of the steps since the evaluation before; NaN without steps."""
        steps = self.log.steps["step"]
        loss = np.nanmean(self.log.steps["loss"], axis=1)
        ends = np.searchsorted(steps, self.log.evaluations["step"])
        parts = [loss[low:high] for low, high in pairwise([0, *ends])]
        return np.array([part.mean() if len(part) else np.nan for part in parts])

    def so_far(self, name: str) -> np.ndarray:
        """A column that counts from the beginning, before each evaluation, mean over nodes."""
        total = self.log.steps[name].mean(1)
        at = np.searchsorted(self.log.steps["step"], self.log.evaluations["step"]) - 1
        return np.where(at >= 0, total[np.maximum(at, 0)], 0.0)


class Missing(Failure):
    """Runs aren't there and none may be started; the message lists their commands."""


class Runner:
    """Does runs of one job under a folder."""

    def __init__(self, job: Path, folder: Path, processes: int | None = None):
        """``processes``: how many at once, None for one a core that this process may use."""
        self.job = job
        self.folder = folder
        self.processes = len(os.sched_getaffinity(0)) if processes is None else processes

    def place(self, key: Key) -> Path:
        """The folder of a run."""
        cell, rate, seed = key
        return self.folder / cell.name / ("" if rate is None else f"lr-{rate:g}") / f"seed-{seed}"

    def settings(self, key: Key) -> list[str]:
        """Settings of the job that a run replaces."""
        cell, rate, seed = key
        own = [] if rate is None else [f"schedule.lr={rate!r}"]
        return [*cell.settings, *own, f"run.seed={seed}", f"run.output={self.place(key)}"]

    def fill(self, wanted: Sequence[Key]) -> dict[Key, RunResult]:
        """Do what isn't there yet, and read all of it. Failure, after the others, if one fails.

        Without processes: Missing.
        """
        there = {key: self._found(key) for key in wanted}
        missing = [key for key, found in there.items() if found is None]
        if missing:
            said = f"{self.folder}: {len(missing)} of {len(wanted)} runs are missing"
            if self.processes < 1:
                words = (["mpigossip", "simulate", str(self.job), *self.words(k)] for k in missing)
                raise Missing("\n".join([said, *map(shlex.join, words)]))
            print_safe(
                f"{said}; up to {self.processes} at once, output in {OUTPUT} of each", flush=True
            )
            with lock(self.folder, "output"), writing(self.folder):
                failed = self._do(missing)
            if failed:
                raise Failure("\n".join(failed))
        return {key: found or self._read(key) for key, found in there.items()}

    def _found(self, key: Key) -> RunResult | None:
        """Result of a finished run of this very job."""
        place = self.place(key)
        if not (place / "log.h5").exists():
            return None
        job = assemble.load(self.job, self.settings(key))
        try:
            log = read(place / "log.h5", COLUMNS)
        except StoreError:
            return None  # killed while it began: the run mends it, or says what is wrong
        if log.job and config.as_dict(assemble.load(log.job)) != config.as_dict(job):
            return None  # the run rejects it, with what differs
        if (place / DIVERGED).exists():
            return RunResult(None)
        return RunResult(log) if log.summary.get("finished") else None

    def _read(self, key: Key) -> RunResult:
        found = self._found(key)
        if found is None:
            raise Failure(f"{self.place(key)}: its run has ended, but its log is not complete")
        return found

    def _do(self, keys: Sequence[Key]) -> list[str]:
        waiting = list(keys)[::-1]
        running = dict[Key, tuple[subprocess.Popen, float]]()
        failed = []
        try:
            while waiting or running:
                while waiting and len(running) < self.processes:
                    key = waiting.pop()
                    running[key] = self._start(key), time.monotonic()
                for key, (process, began) in list(running.items()):
                    if process.poll() is not None:
                        del running[key]
                        failed += self._ended(key, process.returncode)
                        done = len(keys) - len(waiting) - len(running)
                        spent = time.monotonic() - began
                        print_safe(
                            f"[{done}/{len(keys)}] {self.place(key)}: {spent:.1f} s", flush=True
                        )
                time.sleep(0.02)
        finally:
            self._stop([process for process, _ in running.values()])
        return failed

    def words(self, key: Key) -> list[str]:
        """Words that follow the job in the command of a run."""
        return ["--nodes", str(key[0].nodes), *self.settings(key)]

    def _start(self, key: Key) -> subprocess.Popen:
        """A simulation of the job that ends where this process does; what it prints is kept."""
        place = self.place(key)
        place.mkdir(parents=True, exist_ok=True)
        child = [sys.executable, "-c", f"import {__name__} as r; r.child()", str(os.getpid())]
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        with (place / OUTPUT).open("a") as output:
            return subprocess.Popen(
                [*child, "simulate", str(self.job), *self.words(key)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def _ended(self, key: Key, code: int) -> list[str]:
        """Mark a run that diverged; what another one that didn't finish says."""
        place = self.place(key)
        lines = (place / OUTPUT).read_text(errors="replace").strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("mpigossip:")), "")
        if code == LOST:
            with replacing(place / DIVERGED) as beside:
                beside.write_text(said + "\n")
        elif code:
            with TemporaryFile(dir=place) as probe:
                probe.write(bytes(1 << 16))  # on a full disk the run couldn't say what is wrong
            last = said or (lines[-1] if lines else "nothing was printed")
            return [f"{place} ended with code {code}: {last} ({place / OUTPUT} has all of it)"]
        return []

    def _stop(self, processes: Sequence[subprocess.Popen]) -> None:
        """End what still runs: each writes a checkpoint, from which it goes on another time."""
        for process in processes:
            process.terminate()
        until = time.monotonic() + LEAVE_S
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def child() -> None:
    """Run a command of `mpigossip` that ends when its study, of process id argv[1], is killed.

    It would go on writing where the study's next call does. On Linux; elsewhere it ends by itself.
    """
    end_with(int(sys.argv.pop(1)))
    NonFiniteError.code = LOST
    runpy.run_module("mpigossip", run_name="__main__")
