"""Runs that a plot or a page compares: their logs, names, styles and training times."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config.readable import pluralize
from mpigossip.runs.summary import SPLIT as PARTS
from mpigossip.store.log import COLUMNS, MEMBER_COLUMNS, SIMULATED, VIRTUAL, Log, read
from mpigossip.store.log_reading import metrics_in, with_nan
from mpigossip.studies.seeds import Bands, alike, differences, joined, settings

POINTS = 1000
"""Largest number of rows that are read for a plot; longer logs are averaged over blocks of
steps."""


@dataclass(frozen=True)
class LoggedRun:
    """One run of a plot: its name, log, colour and line style."""

    name: str
    log: Log
    style: dict[str, Any]
    bands: Bands = field(default_factory=dict)
    """Confidence intervals of the evaluations' metrics, if this run combines several seeds."""
    path: Path = Path()
    """Path of the run, or of the first of several seeds."""

    @property
    def line(self) -> dict[str, Any]:
        """Style of the run without the marker."""
        return self.style | {"marker": None}

    @property
    def last(self) -> int:
        """Number of steps up to the last one in the log; 0 for an empty log."""
        return int(self.log.steps["step"].max(initial=-1)) + 1

    @cached_property
    def epoch_steps(self) -> float:
        """Number of steps per epoch, from the last evaluation; 0 if it is not known."""
        evaluations = self.log.evaluations
        has_epochs = (
            len(evaluations["step"]) and "epoch" in evaluations and evaluations["epoch"][-1] > 0
        )
        return float(evaluations["step"][-1] / evaluations["epoch"][-1]) if has_epochs else 0.0

    @cached_property
    def _clock(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays: numbers of steps done, and the seconds of training up to them.

        The seconds are a mean over nodes. They are NaN if the log has steps without times, like the
        log of a fork.
        """
        step = self.log.steps["step"]
        parts = [over_nodes(np.nanmean, self.log.steps[p]) for p in PARTS if p in self.log.steps]
        if not parts or not len(step):
            return np.zeros(1), np.zeros(1)
        if not any(np.isfinite(part).any() for part in parts):
            return np.zeros(1), np.full(1, np.nan)
        block = np.diff(step, append=step[-1] + (step[1] - step[0] if len(step) > 1 else 1))
        spent = np.concatenate([[0.0], np.cumsum(np.nan_to_num(sum(parts)) * block)])
        return np.append(step, step[-1] + block[-1]), spent

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of the evaluations besides the loss, with "accuracy" first.

        If there are none, as for a custom loop, these are the names of the columns of steps that
        the task or the program has added.
        """
        return metrics_in(self.log.evaluations) or own_columns(self.log)

    def unit(self, name: str) -> str:
        """Return the unit of a column in parentheses, such as " (s)"; "" for a plain number."""
        unit = self.log.units.get(name, "1")
        return "" if unit in ("1", "") else f" ({unit})"

    def seconds(self, steps: np.ndarray) -> np.ndarray:
        """Return the training time at ``steps`` in seconds, without evaluations and checkpoints.

        It is NaN if it is not known.
        """
        return np.interp(steps, *self._clock)

    @property
    def has_virtual_time(self) -> bool:
        """True if all steps in the log have a virtual time, and there is at least one."""
        seconds = self.log.steps.get(VIRTUAL)
        return seconds is not None and len(seconds) > 0 and bool(np.isfinite(seconds).all())

    def virtual_seconds(self, steps: np.ndarray) -> np.ndarray:
        """Return the virtual training time at ``steps`` in seconds, as a mean over nodes.

        The run must have a virtual clock (:attr:`has_virtual_time`).
        """
        rows = self.log.steps["step"]
        spent = self.log.steps[VIRTUAL].mean(1)
        block = (
            rows[1] - rows[0] if len(rows) > 1 else 1
        )  # Number of steps over which a row is averaged.
        done = rows + (1 + block) / 2
        return np.interp(steps, [0.0, *done], [0.0, *spent])


def load(paths: Sequence[Path]) -> list[LoggedRun]:
    """Load runs, and give each a name and a style.

    The name is the end of the path. Runs that differ only in their seed are combined into one,
    whose name consists of the settings by which it differs from the other runs, or otherwise of its
    :func:`description`.

    :param paths: run directories or logs
    :raises StoreError: if there is no log, or if it can't be read
    """
    from mpigossip.studies.drawing import style

    names = short_names([(path if path.is_dir() else path.parent).resolve() for path in paths])
    logs = [read(log_of(path), points=POINTS) for path in paths]
    groups = alike(logs)
    labels = differences([logs[group[0]] for group in groups])
    runs = []
    for k, group in enumerate(groups):
        name = names[group[0]]
        log = logs[group[0]]
        bands: Bands = {}
        if len(group) > 1:
            log, bands = joined([logs[member] for member in group])
            name = f"{labels[k] or description(log)} ({len(group)} seeds)"
        runs.append(LoggedRun(name, log, style(k), bands, paths[group[0]]))
    return runs


def log_of(run: Path) -> Path:
    """Return the path of the log of a run directory; any other path is returned unchanged."""
    return run / "log.h5" if run.is_dir() else run


def short_names(folders: Sequence[Path], longest: int = 32) -> list[str]:
    """Return a short name for each folder, the last parts of its path; only equal folders share it.

    :param folders: paths of run directories
    :param longest: largest number of characters, because a legend must leave room for the axes;
        longer names lose their beginning, or their middle if the names of two folders would become
        equal; if this would make names equal, too, all names stay complete
    """
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    for kept in range(0, longest - 1, longest // 4):
        tail = longest - 1 - kept
        short = [n if len(n) <= longest else f"{n[:kept]}…{n[-tail:]}" for n in names]
        if len(set(short)) == len(set(folders)):
            return short
    return names


def drawable(text: str) -> str:
    """Return a text that matplotlib draws unchanged.

    Matplotlib reads the text between two $ as a formula. It omits legend entries that begin with _,
    so a space is put in front of them.
    """
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def description(log: Log) -> str:
    """Return a description of a run in a few words: algorithm, graph and number of nodes.

    For a training of members, it consists of the algorithm (for a program, the optimizer) and the
    number of places. Nodes that one process has computed are called simulated.
    """
    job_settings = settings(log.job)  # Logs of other programs have no settings, but can be plotted.
    keys = ["algorithm.name", "graph.name"]
    if of_members(log):
        keys = ["loop.optimizer" if "loop.optimizer" in job_settings else "algorithm.name"]
    names = [str(job_settings[key]) for key in keys if key in job_settings]
    word = f"simulated {who(log)}" if is_simulated(log) else who(log)
    return ", ".join([*names, pluralize(log.nodes, word)])


def is_simulated(log: Log) -> bool:
    """Return whether one process has computed several nodes, so that its times are not theirs.

    Logs without an entry about it are recognized by their command. A log has the environment of the
    process that wrote to it last: a run on ranks that was resumed in a simulation counts as
    simulated, and a simulation that was resumed on ranks does not.
    """
    words = log.environment.get("command", "").split()
    simulates = "simulate" in words or "--simulate" in words
    return log.nodes > 1 and (SIMULATED in log.environment or simulates)


def time_note(runs: Sequence[LoggedRun]) -> str:
    """Return a note on the times of simulated runs; "" if no run is simulated.

    The note names the settings of the virtual clock, unless all simulated runs have one.
    """
    simulated = [run for run in runs if is_simulated(run.log)]
    if not simulated:
        return ""
    note = (
        f"{len(simulated)} of {pluralize(len(runs), 'run')} simulated: their times are times of "
        "one process that computes all nodes, and do not compare methods"
    )
    if all(run.has_virtual_time for run in simulated):
        return note
    return f"{note}; for times on a network, set clock.network=1gbit clock.compute_s=0.08"


def who(log: Log) -> str:
    """Return the word for the participant to which a column of the log's arrays (steps, n) belongs.

    It is "place" in a training of members, and otherwise "node".
    """
    return "place" if of_members(log) else "node"


def own_columns(log: Log) -> list[str]:
    """Return the names of the columns of steps that a task or a custom loop has added."""
    return [n for n in log.steps if n not in ("step", VIRTUAL, *COLUMNS, *MEMBER_COLUMNS)]


def of_members(log: Log) -> bool:
    """Return whether the log is from a training of members (`mpigossip join`)."""
    return "time" in log.steps


def over_nodes(function: Callable, values: np.ndarray) -> np.ndarray:
    """Apply a function such as `np.nanmean` to each row of an array (steps, nodes).

    The result is NaN at steps at which no node has a value; NumPy's warning about it is suppressed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return function(with_nan(values), axis=1)


def smooth(values: np.ndarray) -> np.ndarray:
    """Return a moving average of ``values``, in which values that are not finite are ignored.

    The window has about 1/25 of the rows, and is shorter at both ends. The result is NaN where the
    window contains no finite value.
    """
    half = len(values) // 50
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    first = np.maximum(index - half, 0)
    last = np.minimum(index + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def mean_ms(log: Log, part: str) -> float:
    """Return the mean duration of a part of a step, in milliseconds, over all nodes and steps.

    The result is 0 if the log has no values of this part.

    :param log: the log of a run
    :param part: column of the log, such as "compute_s"
    """
    values = log.steps.get(part, np.empty(0))
    finite = values[np.isfinite(values)]
    return 1e3 * float(finite.mean()) if len(finite) else 0.0


def shares(milliseconds: Mapping[str, float]) -> list[str]:
    """Return a text for each part of a step: its name and its fraction of the total time.

    :param milliseconds: mean duration of each part, by its column in the log
    """
    total = sum(milliseconds.values()) or 1.0
    return [f"{PARTS[part]} {100 * mean / total:.0f} %" for part, mean in milliseconds.items()]
