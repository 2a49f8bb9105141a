"""Read a study's file and make the points of its grid: labels, settings, compatibility."""

import inspect
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config import JobError, packaged, removed
from mpigossip.config.toml import near, show
from mpigossip.training import assemble

Axis = Sequence[Any] | Mapping[str, str]
"""Values of a setting, or what each label stands for: settings with spaces between."""


RESERVED = {"nodes", "lr", "seeds", "diverged", "late", "loss", "accuracy", "MB", "train_loss"}


@dataclass(frozen=True)
class Cell:
    """One point: its label on each axis, the settings that it means, and the number of nodes."""

    labels: tuple[tuple[str, str], ...]
    settings: tuple[str, ...]
    nodes: int

    @property
    def name(self) -> str:
        """Its labels and nodes, as a folder can be called."""
        words = [label for _, label in self.labels] + [f"n{self.nodes}"]
        return "_".join(re.sub(r"[^\w.+-]+", "-", word) for word in words)

    def label(self, axis: str) -> str:
        """Label on an axis, "nodes" among them."""
        return str(self.nodes) if axis == "nodes" else dict(self.labels)[axis]


def cells_of(
    job: Path,
    grid: Mapping[str, Axis],
    nodes: Sequence[int],
    common: Sequence[str],
    skip: bool,
) -> tuple[list[Cell], dict[str, str]]:
    """All points, and those left out with the reason; JobError with every mistake at once."""
    if not nodes or min(nodes) < 1:
        raise JobError(f"nodes = {list(nodes)}: a study needs whole numbers of at least 1")
    axes = [_points(axis, values) for axis, values in grid.items()]
    cells = []
    unfit = {}
    for n, point in itertools.product(nodes, itertools.product(*axes)):
        labels = tuple(label for label, _ in point)
        own = [setting for _, settings in point for setting in settings]
        cell = Cell(labels, (*common, *own), n)
        made = assemble.load(job, cell.settings)  # what is wrong by itself is wrong everywhere
        if found := assemble.mistakes(made, n):
            unfit[cell.name] = "; ".join(found)
        else:
            cells.append(cell)
    if unfit and (not skip or not cells):
        raise JobError([f"{name}: {why}" for name, why in unfit.items()])
    if len({cell.name for cell in cells}) < len(cells):
        raise JobError("two points of the grid have the same labels; give each its own")
    return cells, unfit


def _points(axis: str, values: Axis) -> list[tuple[tuple[str, str], list[str]]]:
    """Label and settings of each value."""
    if axis in RESERVED:
        raise JobError(f'grid: "{axis}" is a column of the table; call the axis something else')
    if isinstance(values, str) or not hasattr(values, "__len__") or not len(values):
        raise JobError(
            f"grid: {axis} = {values!r}: an axis is a list of values, or labels with settings"
        )
    if isinstance(values, Mapping):
        return [((axis, str(label)), words.split()) for label, words in values.items()]
    if "." not in axis:
        raise JobError(
            f'grid: "{axis}" is no setting (section.key); under a name of your own each label '
            f'needs what it stands for: {{"{axis}": {{"A": "algorithm.name=dsgd"}}}}'
        )
    return [((axis, _plain(value)), [f"{axis}={_plain(value)}"]) for value in values]


def _plain(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str) else show(value)


def arguments(path: Path, study: Callable, more: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments of :func:`mpigossip.study`, from a file; a job may lie beside the file, too.

    ``more``: keys that somebody else reads. JobError with every mistake.
    """
    try:
        path = packaged.given(path)
        given = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        what = "is a folder" if path.is_dir() else "doesn't exist"
        remedy = "a study is a TOML file with job, grid, nodes, seeds"
        raise JobError(f"{path} {what}: {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is no TOML: {error}") from None
    known = {*inspect.signature(study).parameters, *more}
    wrong = [
        f"{path}: {removed.of_argument(key) or f'{key} is unknown; {near(key, known)}'}"
        for key in given.keys() - known
    ]
    if "job" not in given:
        wrong.append(f"{path}: job is missing: the job file that all runs begin with")
    if wrong:
        raise JobError(wrong)
    grid = given.get("grid", {})
    if not isinstance(grid, dict):
        raise JobError(f"{path}: grid = {grid!r}: needs to be a table, [grid], an axis a line")
    beside = path.parent / str(given["job"])
    job = beside if beside.exists() else Path(given["job"])
    return given | {"job": job, "grid": _axes(grid)}


def _axes(grid: Mapping[str, Any]) -> dict[str, Any]:
    """`algorithm.name = […]`, to TOML a table in a table, as the axis that it means."""
    found: dict[str, Any] = {}
    for axis, values in grid.items():
        if isinstance(values, dict) and not all(isinstance(v, str) for v in values.values()):
            found |= {f"{axis}.{key}": value for key, value in values.items()}
        else:
            found[axis] = values
    return found
