"""A study from a file: the arguments of :func:`mpigossip.study` as TOML."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpigossip.config import JobError, removed
from mpigossip.config.toml import near


def arguments(path: Path, study: Callable, more: Sequence[str] = ()) -> dict[str, Any]:
    """What a file says for the function; a job may lie beside the file, too.

    ``more``: keys that somebody else reads. JobError with every mistake.
    """
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        remedy = "a study is a TOML file with job, grid, nodes, seeds"
        raise JobError([f"{path} doesn't exist: {remedy}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError([f"{path} is no TOML: {error}"]) from None
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
        raise JobError([f"{path}: grid = {grid!r}: needs to be a table, [grid], an axis a line"])
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
