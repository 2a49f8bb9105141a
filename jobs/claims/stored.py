"""Functions that read stored runs, and that find contradictions between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from designs import SEARCH, STUDIES, Cell, best_rate

Line = dict[str, Any]
"""Run in the form in which `run_queue.py` writes it."""


def read(path: Path) -> list[Line]:
    """Return the lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def faults(runs: Sequence[Line]) -> list[str]:
    """Describe each contradiction between stored runs, such as a run that is stored twice.

    :param runs: all stored runs
    :return: one sentence for each contradiction
    """
    designs = {(c.study, c.nodes, key(c.labels)): c for make in STUDIES.values() for c in make()}
    problems = list[str]()
    seen = dict[str, Line]()
    for line in runs:
        name = describe(line)
        cell = designs.get((line["study"], line["nodes"], key(line["cell"])))
        if (line["seed"] == SEARCH) != (line["level"] == "search"):
            problems.append(
                f"{name}: the seed {SEARCH} belongs to the level search, and to no other level"
            )
        if cell is not None:
            method = cell.methods.get(line["method"], "?").split()
            if not {*method, f"run.seed={line['seed']}", f"schedule.lr={line['lr']!r}"} <= {
                *line["settings"]
            }:
                problems.append(
                    f"{name}: the settings lack the method, the seed or the learning rate"
                )
        marks = [name, *([line["digest"]] if line.get("digest") else [])]
        for mark in marks:
            other = seen.setdefault(mark, line)
            if other is not line:
                problems.append(f"{name}: the same run is also stored as {describe(other)}")
    figures: dict[str, Line] = {}
    for line in runs:
        if line["figures"] and line["figures"].get("loss") is not None:
            other = figures.setdefault(str(line["figures"]["loss"]) + str(line["nodes"]), line)
            if other is not line and other["figures"]["accuracy"] == line["figures"]["accuracy"]:
                problems.append(f"{describe(line)}: the metrics equal those from {describe(other)}")
    return problems


def finals(runs: Sequence[Line], cell: Cell, method: str, level: str) -> dict[int, Line]:
    """Return the runs of a method with one level, at the rate that its search implies, by seed.

    The result is empty if no search run of the method has metrics.

    :param runs: stored runs
    :param cell: cell of the study
    :param method: label of the method
    :param level: label of the fraction of the best learning rate
    """
    matching = [
        r
        for r in runs
        if (r["study"], r["nodes"], key(r["cell"])) == (cell.study, cell.nodes, key(cell.labels))
        and r["method"] == method
    ]
    tried = [r for r in matching if r["level"] == "search" and r["figures"]]
    if not tried:
        return {}
    rate = float(f"{best_rate(tried, cell.metric) * cell.levels[level]:.3g}")
    return {r["seed"]: r for r in matching if r["level"] == level and r["lr"] == rate}


def key(labels: dict[str, str]) -> str:
    """Return labels as a text in a fixed order, so that equal labels give equal texts."""
    return json.dumps(labels, sort_keys=True)


def describe(line: Line) -> str:
    """Describe a stored run: study, nodes, labels, method, level, learning rate and seed."""
    cell = ", ".join(f"{k} {v}" for k, v in line["cell"].items())
    return (
        f"{line['study']}, n = {line['nodes']}, {cell}, {line['method']}, {line['level']}, "
        f"lr {line['lr']:g}, seed {line['seed']}"
    )
