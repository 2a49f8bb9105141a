"""Points of the grid of a study, with labels and settings, and the reader of study files."""

import inspect
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config import Job, JobError, packaged
from mpigossip.config.structure import structure
from mpigossip.config.toml import BadValue, near, show, write
from mpigossip.training import assemble

Axis = Sequence[Any] | Mapping[str, str]
"""Axis of a grid: a list of values of a setting, or a dict from labels to settings, which are
separated by spaces.
"""


RESERVED = {"nodes", "lr", "seeds", "diverged", "late", "loss", "accuracy", "MB", "train_loss"}
"""Names that an axis must not have, because columns of the table have them."""
TYPES: Mapping[str, Any] = {
    "job": str,
    "settings": tuple[str, ...],
    "judge": str,
    "larger": bool,
    "output": str,
    "processes": int,
    "skip": bool,
    "partial": bool,
}
"""Types of the values in a study file, by key, except for grid, nodes, seeds and rates."""


@dataclass(frozen=True)
class Cell:
    """Point of a grid."""

    labels: tuple[tuple[str, str], ...]
    """Pairs of the name of an axis and the label that the point has on it."""
    settings: tuple[str, ...]
    """Settings of the point, which override the settings of the job."""
    nodes: int
    """Number of nodes."""

    @property
    def name(self) -> str:
        """Name of the point for its folder, which consists of its labels and number of nodes."""
        words = [label for _, label in self.labels] + [f"n{self.nodes}"]
        return "_".join(re.sub(r"[^\w.+-]+", "-", word) for word in words)

    def label(self, axis: str) -> str:
        """Return the label of the point on the axis ``axis`` of the grid, which may be "nodes"."""
        return str(self.nodes) if axis == "nodes" else dict(self.labels)[axis]


def cells_of(
    job: Path,
    grid: Mapping[str, Axis],
    nodes: Sequence[int],
    common: Sequence[str],
    skip: bool,
) -> tuple[list[Cell], dict[str, str]]:
    """Return the points of a grid, and the points that are left out.

    :param job: path of a job file, or name of an example
    :param grid: axes by name
    :param nodes: numbers of nodes
    :param common: settings of all points
    :param skip: whether to leave out points whose settings cannot be combined
    :return: points of the study; and the reason why each other point is left out, by its name
    :raises JobError: if the grid or a setting is not valid, or if the settings of a point (with
        ``skip``, of all points) cannot be combined; the message then lists these points
    """
    if not nodes or min(nodes) < 1:
        raise JobError(f"nodes = {list(nodes)}: must be whole numbers of at least 1")
    axes = [_points(axis, values) for axis, values in grid.items()]
    cells = []
    incompatible = {}
    for n, point in itertools.product(nodes, itertools.product(*axes)):
        labels = tuple(label for label, _ in point)
        point_settings = [setting for _, settings in point for setting in settings]
        cell = Cell(labels, (*common, *point_settings), n)
        point_job = _job_of(job, cell, common)
        if problems := assemble.mistakes(point_job, n):
            incompatible[cell.name] = "; ".join(problems)
        else:
            cells.append(cell)
    if incompatible and (not skip or not cells):
        raise JobError([f"{name}: {why}" for name, why in incompatible.items()])
    if len({cell.name for cell in cells}) < len(cells):
        raise JobError("grid: two points have the same labels: use different labels")
    return cells, incompatible


def _job_of(job: Path, cell: Cell, common: Sequence[str]) -> Job:
    """Return the job of a point.

    :param job: path of a job file, or name of an example
    :param cell: the point
    :param common: settings of all points
    :raises JobError: if a setting is wrong; the message begins with the name of the point, unless
        all points have this error
    """
    try:
        return assemble.load(job, cell.settings)
    except JobError as error:
        try:
            assemble.load(job, common)
        except JobError as error_of_all:
            if {*error.messages} <= {*error_of_all.messages}:
                raise
        raise JobError([f"{cell.name}: {message}" for message in error.messages]) from None


def _points(axis: str, values: Axis) -> list[tuple[tuple[str, str], list[str]]]:
    """Return, for each value of an axis, the pair (axis, label) and the settings for the value.

    :param axis: name of the axis, which is a setting if ``values`` is a list
    :param values: values of the setting, or settings by label
    :raises JobError: if the name or the values are not valid
    """
    if axis in RESERVED:
        raise JobError(f'grid: "{axis}" is a column of the table: use another name for the axis')
    if isinstance(values, str) or not hasattr(values, "__len__") or not len(values):
        raise JobError(f"grid: {axis} = {values!r}: must be a list of values, or settings by label")
    if isinstance(values, Mapping):
        return [((axis, str(label)), words.split()) for label, words in values.items()]
    if "." not in axis:
        raise JobError(
            f'grid: "{axis}" is not a setting (section.key); an axis with another name needs the '
            f'settings of each label: {{"{axis}": {{"A": "algorithm.name=dsgd"}}}}'
        )
    return [((axis, _plain(value)), [f"{axis}={_plain(value)}"]) for value in values]


def _plain(value: Any) -> str:
    """Return a value, which may be a NumPy scalar, as in "section.key=value"; a string as it is."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return value
    try:
        return write(value)
    except BadValue:
        return show(value)  # The check of the job then rejects the setting.


def arguments(path: Path, study: Callable, more: Sequence[str] = ()) -> dict[str, Any]:
    """Read a study file, and return its values by key.

    :param path: TOML file, or name of an example; its `job` may be relative to its folder
    :param study: function whose parameters are the valid keys
    :param more: further valid keys
    :return: values by key, which are arguments of ``study`` and values of the further keys
    :raises JobError: if the file cannot be read or has invalid keys; the message lists all invalid
        keys
    """
    try:
        path = packaged.given(path)
        values = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        problem = "is a folder" if path.is_dir() else "doesn't exist"
        remedy = "name a TOML file with job, grid, nodes and seeds"
        raise JobError(f"{path} {problem}: {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(
            f"{path} is not valid TOML: {error}; correct this line of the file"
        ) from None
    if "job" not in values and isinstance(values.get("run"), dict):
        raise JobError(
            f"{path} describes a job, and not a study: train it by `mpigossip simulate`, or name "
            "it by the key job of a study file"
        )
    valid_keys = {*inspect.signature(study).parameters, *more}
    problems = [
        f"{path}: {key} is unknown; {near(key, valid_keys)}" for key in values.keys() - valid_keys
    ]
    if "job" not in values:
        problems.append(f"{path}: job is missing: set it to the job file of all runs")
    if problems:
        raise JobError(problems)
    grid = values.get("grid", {})
    if not isinstance(grid, dict):
        raise JobError(
            f"{path}: grid = {grid!r}: must be a table, [grid], with one line for each axis"
        )
    _check_types(path, values)
    # A folder may have the name of an example.
    relative = path.parent / values["job"]
    job = relative if relative.is_file() else Path(values["job"])
    return values | {"job": job, "grid": _axes(grid)}


def _check_types(path: Path, values: Mapping[str, Any]) -> None:
    """Check the types of those values of a study file that :func:`study` does not check itself.

    :param path: the study file, for messages
    :param values: values by key
    :raises JobError: if a value has another type; the message lists all problems
    """
    problems: list[str] = []
    for key in TYPES.keys() & values.keys():
        try:
            structure(values[key], TYPES[key], key)
        except JobError as error:
            problems += [f"{path}: {message}" for message in error.messages]
    if problems:
        raise JobError(sorted(problems))


def _axes(grid: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of a grid by name, given the nested tables of a TOML file.

    TOML reads `algorithm.name = […]` as a table `algorithm` with the key `name`.
    """
    axes: dict[str, Any] = {}
    for axis, values in grid.items():
        if isinstance(values, dict) and not all(isinstance(v, str) for v in values.values()):
            axes |= {f"{axis}.{key}": value for key, value in values.items()}
        else:
            axes[axis] = values
    return axes
