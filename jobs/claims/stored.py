"""Read stored runs, and find what can't be true of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from designs import SEARCH, STUDIES, Cell, best_rate

Line = dict[str, Any]
"""A run, as `run_queue.py` writes it."""


def read(path: Path) -> list[Line]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def faults(runs: Sequence[Line]) -> list[str]:
    """What can't be true of honest runs: one run under two names, a seed used twice."""
    designs = {(c.study, c.nodes, key(c.labels)): c for make in STUDIES.values() for c in make()}
    wrong = list[str]()
    seen = dict[str, Line]()
    for line in runs:
        name = called(line)
        cell = designs.get((line["study"], line["nodes"], key(line["cell"])))
        if (line["seed"] == SEARCH) != (line["level"] == "search"):
            wrong.append(f"{name}: the search's seed is reported, or a reported one searched with")
        if cell is not None:
            own = cell.methods.get(line["method"], "?").split()
            if not {*own, f"run.seed={line['seed']}", f"schedule.lr={line['lr']!r}"} <= {
                *line["settings"]
            }:
                wrong.append(f"{name}: its settings are of another run")
        marks = [name, *([line["digest"]] if line.get("digest") else [])]
        for mark in marks:
            other = seen.setdefault(mark, line)
            if other is not line:
                wrong.append(f"{name}: the same run stands there as {called(other)}")
    figures: dict[str, Line] = {}
    for line in runs:
        if line["figures"] and line["figures"].get("loss") is not None:
            other = figures.setdefault(str(line["figures"]["loss"]) + str(line["nodes"]), line)
            if other is not line and other["figures"]["accuracy"] == line["figures"]["accuracy"]:
                wrong.append(f"{called(line)}: the figures of {called(other)}")
    return wrong


def finals(runs: Sequence[Line], cell: Cell, method: str, level: str) -> dict[int, Line]:
    """The reported runs of a method by their seed; of another rate than the search's, none."""
    mine = [
        r
        for r in runs
        if (r["study"], r["nodes"], key(r["cell"])) == (cell.study, cell.nodes, key(cell.labels))
        and r["method"] == method
    ]
    tried = [r for r in mine if r["level"] == "search" and r["figures"]]
    if not tried:
        return {}
    rate = float(f"{best_rate(tried) * cell.levels[level]:.3g}")
    return {r["seed"]: r for r in mine if r["level"] == level and r["lr"] == rate}


def key(labels: dict[str, str]) -> str:
    """Labels in one order."""
    return json.dumps(labels, sort_keys=True)


def called(line: Line) -> str:
    """A run in words."""
    cell = ", ".join(f"{k} {v}" for k, v in line["cell"].items())
    return (
        f"{line['study']}, n = {line['nodes']}, {cell}, {line['method']}, {line['level']}, "
        f"lr {line['lr']:g}, seed {line['seed']}"
    )
