"""Read and validate logs, also while a run writes; average over steps where asked."""

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
"""The groups of a log, and the column that numbers the rows of each."""
COLUMNS = 1 << 10  # of a group
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
"""Entries of a summary that are texts, those of every finished run, and those that are numbers."""


@dataclass(frozen=True)
class Log:
    """A log in memory.

    `steps` holds "step" (steps,) and the columns (steps, nodes); `evaluations` holds "step"
    (evaluations,) and its columns (evaluations,) or (evaluations, nodes).
    """

    job: str
    nodes: int
    steps: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]
    units: dict[str, str]
    summary: dict[str, Any]
    environment: dict[str, str]


def read(path: Path, columns: Collection[str] | None = None, points: int | None = None) -> Log:
    """Read a log, also of a run that is going on or was killed.

    `columns` are those of the steps to read, all by default. With `points`, blocks of consecutive
    steps are averaged (what isn't known left out) so that at most that many rows come back.
    """
    path = Path(path)
    if not path.is_file() and (members := sorted(path.parent.glob("logs/*/log.h5"))):
        wanted = columns and [*columns, "history"]
        return _beside_one_another([read(one, wanted) for one in members])
    if not path.is_file():
        raise StoreError(f"{path} doesn't exist: a log is the file log.h5 in the folder of a run")
    for _ in range(TRIES):  # a run that writes meanwhile can spoil one reading, seldom two
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


def _beside_one_another(logs: list[Log]) -> Log:
    """The logs of members that joined a training at different times: a column each.

    A row for each number of steps in a model's history, NaN where a member had none of it.
    """
    last = max(logs, key=lambda log: (len(log.summary), len(log.steps["step"])))
    at = [log.steps.get("history", log.steps["step"][:, None])[:, 0] for log in logs]
    at = [np.nan_to_num(rows).astype(np.int64) for rows in at]
    step = np.unique(np.concatenate(at))
    steps: dict[str, np.ndarray] = {"step": step}
    for name in last.steps.keys() - {"step"}:
        steps[name] = np.full((len(step), len(logs)), np.nan)
        for member, log in enumerate(logs):
            if name in log.steps:
                steps[name][np.searchsorted(step, at[member]), member] = log.steps[name][:, 0]
    # one model was tested, which all have at the end
    single = {"step", "consensus_distance"}
    tested = {
        name: np.full((len(values), len(logs)), np.nan) if values.ndim == 2 else values
        for name, values in last.evaluations.items()
        if name not in single
    } | {"step": np.full(len(last.evaluations["step"]), step[-1] + 1 if len(step) else 0)}
    summary = dict(last.summary)
    if "finished" in summary:
        sent = [float(log.summary["bytes_sent"]) for log in logs if "finished" in log.summary]
        times = steps.get("time", step)  # by the members' clocks
        times = times[np.isfinite(times)]
        summary |= {"nodes": len(logs), "bytes_sent": sum(sent) / len(sent)}
        if len(times):
            summary["seconds"] = float(np.ptp(times))
            tested["seconds"] = np.full(len(tested["step"]), summary["seconds"])
    return replace(last, nodes=len(logs), steps=steps, evaluations=tested, summary=summary)


def _read(path: Path, wanted: Collection[str] | None, points: int | None) -> Log:
    with opened(path) as (facts, found):
        steps = dict(columns(found, "steps"))
        block = max(1, -(-len(steps["step"]) // points)) if points else 1
        chosen = [n for n in steps if n not in ("step", "node") and (not wanted or n in wanted)]
        evaluations = dict(columns(found, "evaluations"))
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
            summary=_typed(guard.sealed(found["summary"])),
            environment=_typed(json.loads(facts["environment"]), str),
        )


def _typed(found: Any, default: type = object) -> dict[str, Any]:
    """A table of a log whose known entries are there and of their types, others of `default`."""
    if not isinstance(found, dict) or "finished" in found and not found.keys() >= NEEDED:
        raise ValueError("its summary or environment lacks entries")
    kinds = dict.fromkeys(TEXTS, str) | dict.fromkeys(NUMBERS, int | float)
    kinds |= dict.fromkeys(str(found.get("metrics", "")).split(), int | float)
    for name, value in found.items():
        if not isinstance(value, kinds.get(name, default)):
            raise ValueError(f'its entry "{name}" is a {type(value).__name__}')
    return found


def metrics_in(evaluations: Collection[str]) -> list[str]:
    """The metrics that evaluations hold, by name, accuracy first: what nodes have of their own."""
    found = {name for name in evaluations if f"local_{name}" in evaluations or name == "accuracy"}
    return sorted(found - {"loss"}, key=lambda name: (name != "accuracy", name))


@contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Attributes and arrays of a log that is sound, with what a killed writer left pending."""
    with reading(path), consistent(path, tables=True, again="steps") as (file, found):
        if "format" not in file.attrs or guard.attribute(file, "format", long=True) != FORMAT:
            raise ValueError("it isn't a log")
        for group, index in INDEX.items():
            _check(dict(columns(found, group)), group, index)
        if not isinstance(found.get("summary"), h5py.Group):
            raise ValueError('its group "summary" is missing')
        yield guard.sealed(file), found


def columns(found: dict[str, Any], group: str) -> list[tuple[str, h5py.Dataset]]:
    """The columns of a group by name."""
    below = [path for path in found if path.startswith(group + "/")]
    if len(below) > COLUMNS:
        raise ValueError(f"{len(below)} columns are too many: at most {COLUMNS}")
    return [(p.removeprefix(group + "/"), guard.dataset(found, p)) for p in sorted(below)]


def _check(have: dict[str, h5py.Dataset], group: str, index: str) -> None:
    """Columns have a row for each ascending step, and a place for each node."""
    for scale in (index, "node"):
        data = have.get(scale)
        if data is None or data.ndim != 1 or data.dtype.kind != "i":
            raise ValueError(f'"{group}/{scale}" is no column of whole numbers')
        values = data[()]
        if (np.diff(values) <= 0).any() or (values[:1] < 0).any():
            raise ValueError(f'"{group}/{scale}" doesn\'t ascend from 0 or later')
    if group == "steps" and "loss" not in have:
        raise ValueError('its column "steps/loss" is missing')
    rows = len(have[index])
    nodes = len(have["node"])
    for name, data in have.items():
        right = [(rows,), (rows, nodes)] if group == "evaluations" else [(rows, nodes)]
        if name not in (index, "node") and (data.shape not in right or data.dtype.kind not in "fi"):
            raise ValueError(f'"{group}/{name}" is {data.dtype} {data.shape}, not of {right[-1]}')


def with_nan(values: np.ndarray) -> np.ndarray:
    """Values with NaN where integers have −1 for what isn't known."""
    if values.dtype.kind != "i" or not (values < 0).any():
        return values
    return np.where(values < 0, np.nan, values)


def _blocks(data: h5py.Dataset, block: int) -> np.ndarray:
    """The rows of `data`, or means over `block` rows at a time, read piece by piece."""
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
        with warnings.catch_warnings():  # of blocks without a value
            warnings.simplefilter("ignore", RuntimeWarning)
            pieces.append(np.nanmean(piece.reshape(-1, block, piece.shape[1]), axis=1))
    return np.concatenate(pieces)
