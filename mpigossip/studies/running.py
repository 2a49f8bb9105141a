"""Runner of the jobs of a study, which starts a process for each run that is not finished."""

import os
import runpy
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from mpigossip import config
from mpigossip.cluster.process import end_with
from mpigossip.config.errors import Failure, JobError, NonFiniteError
from mpigossip.config.host import core_count
from mpigossip.config.readable import abbreviate, format_duration, pluralize, print_note, print_safe
from mpigossip.runs.lock import lock
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import replacing, writing
from mpigossip.store.log import VIRTUAL, Log, read
from mpigossip.studies.grid import Cell
from mpigossip.training import assemble

LOST = 3
"""Exit code of a run whose loss became NaN or infinite."""
OUTPUT = "output.txt"
"""File in the folder of a run with the output of its process."""
DIVERGED = "diverged.txt"
"""File in the folder of a run whose loss became NaN or infinite, with the error message."""
COLUMNS = ("bytes_sent", "consensus_distance", "kind", "loss", "mixed_distance", VIRTUAL)
"""Columns that are read from a log. Others are not, because a study keeps the logs of all runs."""
DERIVED: dict[str, Callable[[Log], float]] = {
    "train_loss": lambda log: float(np.nanmean(_last(log.steps["loss"]))),
    "spread": lambda log: float(np.nanmean(log.steps["consensus_distance"])),
    "exchanges": lambda log: float((log.steps["kind"] > 0).mean(1).sum()),
}
"""Metrics of a run that are computed from its log: training loss of the last twentieth of the
steps, mean consensus distance, and mean number of steps with an exchange per node.
"""
WINDOWS = 20
"""Number of parts into which a run is divided to detect that its training loss rises again."""
NOISE = 1.1
"""Factor by which a training loss may rise without counting as diverged, because of noise."""
LEAVE_S = 20.0
"""Seconds that runs have for writing their checkpoints if the study is stopped."""


def _last(values: np.ndarray) -> np.ndarray:
    """Return the last twentieth of the rows of an array, but at least one row."""
    return values[-max(1, len(values) // WINDOWS) :]


def _settings_of(job: config.Job) -> dict[str, Any]:
    """Return the settings of a job by "section.key", without `run.output`.

    The output is left out, because a folder of complete runs may be copied or moved.
    """
    return {
        f"{section}.{key}": value
        for section, values in config.as_dict(job).items()
        for key, value in values.items()
        if (section, key) != ("run", "output")
    }


Key = tuple[Cell, float | None, int]
"""Key of a run: point of the grid, learning rate (None: the rate of the job), and seed."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run of a study."""

    log: Log | None
    """Log of the run; None: the loss became NaN or infinite, or the run is missing."""
    missing: bool = False
    """True if the run is not complete, in the table of an incomplete study."""

    @property
    def diverged(self) -> bool:
        """True if the loss became NaN or infinite."""
        return self.log is None and not self.missing

    @property
    def late(self) -> bool:
        """True if the training loss stayed finite, but rose again by over half of its decrease.

        The training loss is averaged over all nodes and over each twentieth of the steps.
        Overfitting is not detected, because it does not increase the training loss. The value is
        false for runs with fewer than 20 logged steps.
        """
        if self.log is None or len(self.log.steps["loss"]) < WINDOWS:
            return False
        loss = np.nanmean(self.log.steps["loss"], axis=1)
        first, *_, last = means = [float(part.mean()) for part in np.array_split(loss, WINDOWS)]
        return last > max((first + min(means)) / 2, NOISE * min(means))

    def last(self, name: str) -> float:
        """Return the final value of a metric of the run, or NaN if it diverged or is missing.

        :param name: name of an entry of the log's summary, or a name in `DERIVED`
        """
        if self.log is None:
            return float("nan")
        return DERIVED[name](self.log) if name in DERIVED else float(self.log.summary[name])

    def curve(self, name: str) -> np.ndarray:
        """Return the values of a metric at each evaluation, averaged over nodes.

        :param name: a metric, "loss", "consensus_distance", "step", "epoch", or "train_loss", the
            mean over the steps since the previous evaluation
        :raises JobError: if the log has no such metric
        """
        if name == "train_loss":
            return self._trained()
        if name not in self.log.evaluations:
            names = ", ".join([*self.log.evaluations, "train_loss"])
            raise JobError(
                f'y = "{name}": the evaluations have no such metric; choose one of {names}'
            )
        values = np.asarray(self.log.evaluations[name], float)
        return values if values.ndim == 1 else values.mean(1)

    def _trained(self) -> np.ndarray:
        """Return the mean training loss before each evaluation, since the previous one, or NaN."""
        steps = self.log.steps["step"]
        loss = np.nanmean(self.log.steps["loss"], axis=1)
        ends = np.searchsorted(steps, self.log.evaluations["step"])
        parts = [loss[low:high] for low, high in pairwise([0, *ends])]
        return np.array([part.mean() if len(part) else np.nan for part in parts])

    def so_far(self, name: str) -> np.ndarray:
        """Return the value of a cumulative column of the log before each evaluation.

        Values are averaged over nodes. Before the first step, the value is 0.

        :param name: name of the column
        :raises KeyError: if the log does not have this column
        """
        total = self.log.steps[name].mean(1)
        index = np.searchsorted(self.log.steps["step"], self.log.evaluations["step"]) - 1
        return np.where(index >= 0, total[np.maximum(index, 0)], 0.0)


class Missing(Failure):
    """Error if runs are missing but must not be started; its message has commands to start them."""


class Runner:
    """Runner of a job with different settings, whose run directories are in one folder."""

    def __init__(self, job: Path, folder: Path, processes: int | None = None):
        """Prepare a runner.

        :param job: path of a job file, or name of an example
        :param folder: folder of all runs
        :param processes: number of simultaneous runs; None: one for each core that this process may
            use; 0: no run is started
        """
        self.job = job
        self.folder = folder
        self.processes = core_count() if processes is None else processes

    def run_directory(self, key: Key) -> Path:
        """Return the path of the run directory of the run ``key``."""
        cell, rate, seed = key
        return self.folder / cell.name / ("" if rate is None else f"lr-{rate:g}") / f"seed-{seed}"

    def settings(self, key: Key) -> list[str]:
        """Return the settings "section.key=value" by which the run ``key`` overrides the job."""
        cell, rate, seed = key
        rate_setting = [] if rate is None else [f"schedule.lr={rate!r}"]
        return [
            *cell.settings,
            *rate_setting,
            f"run.seed={seed}",
            f"run.output={self.run_directory(key)}",
        ]

    def fill(self, wanted: Sequence[Key], about: str = "") -> dict[Key, RunResult]:
        """Simulate the missing runs, and read the results of all runs.

        :param wanted: keys of the runs
        :param about: text on these runs, and on runs that follow, after the number of missing runs
        :raises Failure: if a run fails, after all other runs have ended
        :raises Missing: if runs are missing and ``processes`` is 0
        :raises JobError: if another study fills the same folder
        :raises OSError: if the disk of a failed run is full
        """
        results = {key: self._find_result(key) for key in wanted}
        missing = [key for key, result in results.items() if result is None]
        if missing:
            summary = f"{self.folder}: {len(missing)} of {len(wanted)} runs are missing"
            summary += self._reasons(missing) + about
            if self.processes < 1:
                words = (
                    ["mpigossip", "simulate", str(self.job), *self.run_arguments(k)]
                    for k in missing
                )
                raise Missing("\n".join([summary, *map(shlex.join, words)]))
            print_safe(
                f"{summary}; up to {self.processes} run at once, with output in {OUTPUT} of each",
                flush=True,
            )
            with lock(self.folder, "output"), writing(self.folder):
                failed = self._do(missing)
            if failed:
                raise Failure("\n".join(failed))
        return {key: result or self._read(key) for key, result in results.items()}

    def complete(self, wanted: Sequence[Key]) -> dict[Key, RunResult]:
        """Return the results of the runs that are complete, without starting others."""
        results = {key: self._find_result(key) for key in wanted}
        return {key: result for key, result in results.items() if result is not None}

    def _reasons(self, missing: Sequence[Key]) -> str:
        """Return the reasons why runs with a log count as missing, in brackets; "" without any."""
        counts = Counter(filter(None, map(self._reason, missing)))
        return f" ({'; '.join(f'{n} {reason}' for reason, n in counts.items())})" if counts else ""

    def _reason(self, key: Key) -> str:
        """Return the reason why a missing run with a log is not complete; "" if it has no log."""
        log_file = self.run_directory(key) / "log.h5"
        if not log_file.exists():
            return ""
        try:
            log = read(log_file, COLUMNS)
        except StoreError:
            return "with an unreadable log"
        if not log.job:
            return "not finished"
        wanted = _settings_of(assemble.load(self.job, self.settings(key)))
        logged = _settings_of(assemble.load(log.job))
        different = [name for name in wanted | logged if wanted.get(name) != logged.get(name)]
        if not different:
            return "not finished"
        return f"with other settings: {abbreviate(different)}"

    def _find_result(self, key: Key) -> RunResult | None:
        """Return the result of a run.

        The result is None if there is no readable log, if the run is not finished, or if the log
        belongs to a job with other settings.
        """
        folder = self.run_directory(key)
        if not (folder / "log.h5").exists():
            return None
        job = assemble.load(self.job, self.settings(key))
        try:
            log = read(folder / "log.h5", COLUMNS)
        except StoreError:
            return None  # the run was killed at its start: start it again
        if log.job and _settings_of(assemble.load(log.job)) != _settings_of(job):
            # When this run is started again, it reports which settings are different.
            return None
        if (folder / DIVERGED).exists():
            return RunResult(None)
        return RunResult(log) if log.summary.get("finished") else None

    def _read(self, key: Key) -> RunResult:
        """Return the result of a run whose process has ended.

        :raises Failure: if the run has no result
        """
        result = self._find_result(key)
        if result is None:
            raise Failure(
                f"{self.run_directory(key)}: the run has ended, but its log is not complete; "
                "remove this folder, and start the study again"
            )
        return result

    def _do(self, keys: Sequence[Key]) -> list[str]:
        """Run a process for each key, at most ``processes`` at a time; return all error messages.

        If this function raises an error or is interrupted, all processes are stopped.

        :raises OSError: if the disk of a failed run is full
        """
        waiting = list(keys)[::-1]
        running = dict[Key, tuple[subprocess.Popen, float]]()
        failed = []
        durations: list[float] = []
        try:
            while waiting or running:
                while waiting and len(running) < self.processes:
                    key = waiting.pop()
                    running[key] = self._start(key), time.monotonic()
                for key, (process, start) in list(running.items()):
                    if process.poll() is not None:
                        del running[key]
                        failed += self._ended(key, process.returncode)
                        done = len(keys) - len(waiting) - len(running)
                        now = time.monotonic()
                        durations.append(now - start)
                        ages = [now - begin for _, begin in running.values()]
                        left = remaining_time(durations, ages, len(waiting), self.processes)
                        print_safe(
                            f"[{done}/{len(keys)}] {self.run_directory(key)}: {now - start:.1f} s"
                            + (f"; about {format_duration(left)} remain" if left else ""),
                            flush=True,
                        )
                time.sleep(0.02)
        except KeyboardInterrupt:
            done = len(keys) - len(waiting) - len(running)
            print_note(
                f"{self.folder}: stopped after {done} of {pluralize(len(keys), 'missing run')}; "
                "the same command continues"
            )
            raise
        finally:
            self._stop([process for process, _ in running.values()])
        return failed

    def run_arguments(self, key: Key) -> list[str]:
        """Return the arguments after the job in the command that starts a run."""
        return ["--nodes", str(key[0].nodes), *self.settings(key)]

    def _start(self, key: Key) -> subprocess.Popen:
        """Start the process of a run, which ends if this process ends; a file gets its output."""
        folder = self.run_directory(key)
        folder.mkdir(parents=True, exist_ok=True)
        child = [sys.executable, "-c", f"import {__name__} as r; r.child()", str(os.getpid())]
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        with (folder / OUTPUT).open("a") as output:
            return subprocess.Popen(
                [*child, "simulate", str(self.job), *self.run_arguments(key)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def _ended(self, key: Key, code: int) -> list[str]:
        """Handle the end of a run's process, and return error messages.

        If the loss of the run became NaN or infinite, the run is marked as diverged, and there is
        no message.

        :param key: the run
        :param code: exit code of its process
        :raises OSError: if the disk of the run is full, which can be the reason why the run failed
        """
        folder = self.run_directory(key)
        lines = (folder / OUTPUT).read_text(errors="replace").strip().splitlines()
        message = next((line for line in reversed(lines) if line.startswith("mpigossip:")), "")
        if code == LOST:
            with replacing(folder / DIVERGED) as temporary:
                temporary.write_text(message + "\n")
        elif code:
            with TemporaryFile(dir=folder) as probe:
                # If the disk is full, the run could not write its error message. This write then
                # fails, too.
                probe.write(bytes(1 << 16))
            reason = message or (lines[-1] if lines else "nothing was printed")
            return [f"{folder} ended with code {code}: {reason} (see {folder / OUTPUT})"]
        return []

    def _stop(self, processes: Sequence[subprocess.Popen]) -> None:
        """Stop the processes of all runs; each can write a checkpoint, to resume its run later.

        Processes that have not ended after `LEAVE_S` seconds are killed.
        """
        for process in processes:
            process.terminate()
        until = time.monotonic() + LEAVE_S
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def remaining_time(
    durations: Sequence[float], ages: Sequence[float], waiting: int, processes: int
) -> float:
    """Estimate the remaining time of a study in seconds, from the mean duration of its last runs.

    Earlier runs are left out, because the load of the machine may have changed.

    :param durations: duration of each run that has ended, in seconds, at least one
    :param ages: time since the start of each run in progress, in seconds
    :param waiting: number of runs that are not started
    :param processes: largest number of simultaneous runs
    """
    recent = durations[-max(4, 2 * processes) :]
    mean = sum(recent) / len(recent)
    work = waiting * mean + sum(max(mean - age, 0.0) for age in ages)
    return work / max(1, min(processes, waiting + len(ages)))


def child() -> None:
    """Run a command of `mpigossip` in a process that ends if the process of its study is killed.

    ``sys.argv[1]`` is the process ID of the study. If the process did not end, it would continue to
    write to its folder while the next call of the study writes to the same folder. This works on
    Linux only; on other systems, the command runs to its end.
    """
    end_with(int(sys.argv.pop(1)))
    NonFiniteError.code = LOST
    runpy.run_module("mpigossip", run_name="__main__")
