"""Reader of logs, which validates a log and can read it while a run is still writing to it."""

import json
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpigossip.store import StoreError, guard
from mpigossip.store.hdf5 import reading
from mpigossip.store.journal import SMALL, TRIES, consistent, stamp

FORMAT = "mpigossip log 1"
INDEX = {"steps": "step", "evaluations": "at_step"}
"""Name of the column that numbers the rows, for each group of a log."""
FORK = "fork.json"
"""Name of the file with the arguments and the result of a fork of members, in its folder."""
COLUMNS = 1 << 10
"""Largest number of columns of a group."""
TEXTS = ("metrics", "figures", "lost", "warnings", "checkpoint", "digest")
NEEDED = {"steps", "nodes", "slots", "seconds", "bytes_sent"}
NUMBERS = (
    *NEEDED,
    "finished",
    "epochs",
    "loss",
    "samples_per_second",
    "compute_s",
    "node_s",
    "exchange_s",
    "idle_s",
)
"""Entries of a summary. TEXTS are strings, NUMBERS are numbers, and the summary of each finished
run has all entries in NEEDED.
"""


@dataclass(frozen=True)
class Log:
    """Content of a log.

    `steps` holds "step", of shape (steps,), and the columns, of shape (steps, nodes). `evaluations`
    holds "step", of shape (evaluations,), and its columns, of shape (evaluations,) or (evaluations,
    nodes).
    """

    job: str
    """Complete job, as TOML."""
    nodes: int
    """Number of nodes; if logs of members were joined, number of members."""
    steps: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]
    units: dict[str, str]
    """Unit of each column that was read, by name."""
    summary: dict[str, Any]
    """Entries of the summary by name; empty until the run ends."""
    environment: dict[str, str]
    """Facts about machine and software, by name."""


def read(path: Path, columns: Collection[str] | None = None, points: int | None = None) -> Log:
    """Read a log; its run may still be writing to it, or may have been killed.

    :param path: log.h5 in a run directory. If there is no such file because members have trained
        there, their logs are read and joined, with one column for each member
    :param columns: columns of the steps to read; None: all columns
    :param points: largest number of rows to return. If there are more, blocks of consecutive steps
        are averaged, leaving out unknown values; "step" is the first step of each block. None: all
        rows are returned, as always if logs of members are joined
    :raises StoreError: if there is no log, or it is damaged
    """
    path = Path(path)
    if not path.is_file() and (members := sorted(path.parent.glob("logs/*/log.h5"))):
        wanted = columns and [*columns, "history"]
        return _join_members([read(member, wanted) for member in members])
    if not path.is_file():
        _reject_fork(path.parent)
        raise StoreError(f"{path} doesn't exist: name a run directory that contains a log.h5")
    # If a run has written to the log meanwhile, try again.
    for _ in range(TRIES):
        before = stamp(path)
        try:
            log = _read(path, columns, points)
        except StoreError:
            if stamp(path) == before:
                raise
        else:
            if before.size <= SMALL or stamp(path) == before:
                return log
        time.sleep(0.02)
    return _read(path, columns, points)


def _reject_fork(folder: Path) -> None:
    """Raise StoreError if a folder holds a fork of a training, which has no logs."""
    try:
        text = (folder / FORK).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    try:
        run = guard.printable(json.loads(text)["run"], "run")
    except (ValueError, KeyError, TypeError, RecursionError):
        run = "RUN"
    raise StoreError(
        f"{folder} is a fork, which has no logs: its loss and metrics are in {FORK}, and "
        f"`mpigossip log show {run}` shows the recorded training"
    )


def _join_members(logs: list[Log]) -> Log:
    """Join the logs of members that trained at different times, with one column for each member.

    The number of a row is the number of steps that a model has made since the training began. If a
    member has no entry with this number, its entry is NaN.
    """
    last = max(logs, key=lambda log: (len(log.summary), len(log.steps["step"])))
    row_steps = [log.steps.get("history", log.steps["step"][:, None])[:, 0] for log in logs]
    row_steps = [np.nan_to_num(rows).astype(np.int64) for rows in row_steps]
    step = np.unique(np.concatenate(row_steps))
    steps: dict[str, np.ndarray] = {"step": step}
    for name in sorted(last.steps.keys() - {"step"}):
        steps[name] = np.full((len(step), len(logs)), np.nan)
        for member, log in enumerate(logs):
            if name in log.steps:
                steps[name][np.searchsorted(step, row_steps[member]), member] = log.steps[name][
                    :, 0
                ]
    # The evaluations are of the final model, which is the same for all members.
    single = {"step", "consensus_distance"}
    evaluations = {
        name: np.full((len(values), len(logs)), np.nan) if values.ndim == 2 else values
        for name, values in last.evaluations.items()
        if name not in single
    } | {"step": np.full(len(last.evaluations["step"]), step[-1] + 1 if len(step) else 0)}
    summary = dict(last.summary)
    if "finished" in summary:
        sent = [float(log.summary["bytes_sent"]) for log in logs if "finished" in log.summary]
        # The members measured these times by different clocks, so the duration is approximate.
        times = steps.get("time", step)
        times = times[np.isfinite(times)]
        summary |= {"nodes": len(logs), "bytes_sent": sum(sent) / len(sent)}
        if len(times):
            summary["seconds"] = float(np.ptp(times))
            evaluations["seconds"] = np.full(len(evaluations["step"]), summary["seconds"])
    return replace(last, nodes=len(logs), steps=steps, evaluations=evaluations, summary=summary)


def _read(path: Path, wanted: Collection[str] | None, points: int | None) -> Log:
    with opened(path) as (facts, objects):
        steps = dict(columns(objects, "steps"))
        block = max(1, -(-len(steps["step"]) // points)) if points else 1
        chosen = [n for n in steps if n not in ("step", "node") and (not wanted or n in wanted)]
        evaluations = dict(columns(objects, "evaluations"))
        return Log(
            job=facts["job"],
            nodes=len(steps["node"]),
            steps={name: _blocks(steps[name], block) for name in ("step", *chosen)},
            evaluations={"step": evaluations["at_step"][()]}
            | {n: d[()] for n, d in evaluations.items() if n not in ("at_step", "node")},
            units={
                name: guard.attribute(data, "units", long=True)
                for name, data in (evaluations | {n: steps[n] for n in ("step", *chosen)}).items()
                if name not in ("at_step", "node")
            },
            summary=_typed(guard.sealed(objects["summary"])),
            environment=_typed(json.loads(facts["environment"]), str),
        )


def _typed(entries: Any, default: type = object) -> dict[str, Any]:
    """Check the types of the entries of a summary or environment, and return the entries.

    Entries named in `TEXTS` must be strings. Entries named in `NUMBERS`, and metrics, must be
    numbers. All others must have the type ``default``.

    :param entries: value that should be a dict of the entries, by name
    :param default: type of entries with other names
    :raises ValueError: if an entry has another type, or the summary of a finished run lacks one of
        the entries in `NEEDED`
    """
    if not isinstance(entries, dict) or "finished" in entries and not entries.keys() >= NEEDED:
        raise ValueError(
            "its summary or environment is no table, or the summary of the finished run lacks one "
            f"of {', '.join(sorted(NEEDED))}"
        )
    kinds = dict.fromkeys(TEXTS, str) | dict.fromkeys(NUMBERS, int | float)
    kinds |= dict.fromkeys(str(entries.get("metrics", "")).split(), int | float)
    for name, value in entries.items():
        if not isinstance(value, kinds.get(name, default)):
            raise ValueError(f'its entry "{name}" has the invalid type {type(value).__name__}')
    return entries


def metrics_in(evaluations: Collection[str]) -> list[str]:
    """Return the names of the metrics in the evaluations, with "accuracy" first.

    A metric NAME is a column with a second column "local_NAME", which has the values of the nodes'
    own models. "accuracy" is always a metric, and "loss" never.
    """
    metrics = {name for name in evaluations if f"local_{name}" in evaluations or name == "accuracy"}
    return sorted(metrics - {"loss"}, key=lambda name: (name != "accuracy", name))


@contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return a context manager that opens and checks a log.

    It yields the attributes of the log, and its arrays and groups by path. Changes in the journal
    of a process that was killed are included.

    :raises StoreError: if the log cannot be read or is damaged
    """
    with reading(path), consistent(path, tables=True, again="steps") as (file, objects):
        if "format" not in file.attrs or guard.attribute(file, "format", long=True) != FORMAT:
            raise ValueError("it is an HDF5 file, but not the log of a run")
        for group, index in INDEX.items():
            _check(dict(columns(objects, group)), group, index)
        if not isinstance(objects.get("summary"), h5py.Group):
            raise ValueError('its group "summary" is missing')
        yield guard.sealed(file), objects


def columns(objects: dict[str, Any], group: str) -> list[tuple[str, h5py.Dataset]]:
    """Return pairs (name, dataset) of the columns of a group, sorted by name.

    :raises ValueError: if there are more than `COLUMNS` columns
    """
    paths = [path for path in objects if path.startswith(group + "/")]
    if len(paths) > COLUMNS:
        raise ValueError(f"{len(paths)} columns are too many: at most {COLUMNS} are allowed")
    return [(p.removeprefix(group + "/"), guard.dataset(objects, p)) for p in sorted(paths)]


def _check(datasets: dict[str, h5py.Dataset], group: str, index: str) -> None:
    """Check that the steps of a group ascend, and that its columns have the right shapes.

    :param datasets: columns of the group, by name
    :param group: "steps" or "evaluations"
    :param index: name of the column that numbers the rows
    :raises ValueError: if this is not so
    """
    for scale in (index, "node"):
        data = datasets.get(scale)
        if data is None or data.ndim != 1 or data.dtype.kind != "i":
            raise ValueError(f'"{group}/{scale}" is not a column of integers')
        values = data[()]
        if (np.diff(values) <= 0).any() or (values[:1] < 0).any():
            raise ValueError(f'"{group}/{scale}" must ascend and have no negative numbers')
    if group == "steps" and "loss" not in datasets:
        raise ValueError('its column "steps/loss" is missing')
    rows = len(datasets[index])
    nodes = len(datasets["node"])
    for name, data in datasets.items():
        valid = [(rows,), (rows, nodes)] if group == "evaluations" else [(rows, nodes)]
        if name not in (index, "node") and (data.shape not in valid or data.dtype.kind not in "fi"):
            raise ValueError(
                f'"{group}/{name}" has the type {data.dtype} and the shape {data.shape}, not '
                f"numbers of the shape {valid[-1]}"
            )


def with_nan(values: np.ndarray) -> np.ndarray:
    """Replace −1, which marks unknown entries of integer columns, by NaN."""
    if values.dtype.kind != "i" or not (values < 0).any():
        return values
    return np.where(values < 0, np.nan, values)


def _blocks(data: h5py.Dataset, block: int) -> np.ndarray:
    """Return the means of ``data`` over blocks of ``block`` rows; only few rows are in memory.

    For the column "step", return the first value of each block.
    """
    if block == 1 or len(data) == 0:
        return data[()]
    if data.name.endswith("/step"):
        return data[::block]
    pieces = []
    stride = block * max(1, (1 << 24) // (block * data.shape[1] * 8))
    for start in range(0, len(data), stride):
        piece = with_nan(data[start : start + stride]).astype(np.float64)
        short = -len(piece) % block
        piece = np.pad(piece, ((0, short), (0, 0)), constant_values=np.nan)
        with warnings.catch_warnings():  # nanmean warns about blocks without a value
            warnings.simplefilter("ignore", RuntimeWarning)
            pieces.append(np.nanmean(piece.reshape(-1, block, piece.shape[1]), axis=1))
    return np.concatenate(pieces)
