"""Claims on training: studies of `jobs/claims/*.toml`, judged by differences of paired seeds.

A file holds the arguments of `mpigossip.study` with an axis "method", and besides: `common`, the
rate of a second table in which all methods have the same; `seconds` of a run on a quiet core, for
the estimate; `equal_traffic`, of two methods the one whose "{period}" shall spend what the other
does; `[[row]]` tables. A row has `claim`, `source`, `expected`; `at`, labels of other axes;
`order`, methods of which each is ahead of the next by `by` (0), or, with `alike`, within so much of
the first; `figures` it is judged by (unset: what chose the rates), and `share`: so much of the
next one's figure; `reaches`: a training loss, bytes until it. Without `order` nothing is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from table import Row

import mpigossip
from mpigossip.analysis.seeds import interval
from mpigossip.analysis.study import Study
from mpigossip.analysis.study.file import arguments
from mpigossip.analysis.study.grid import Cell, cells_of
from mpigossip.analysis.study.results import lost
from mpigossip.cluster.ranks import Alone
from mpigossip.config.errors import Failure
from mpigossip.graphs.files import save
from mpigossip.graphs.search import search
from mpigossip.runs.summary import number
from mpigossip.training import assemble

SEEDS = 5
"""Pairs of seeds that a verdict needs."""
TRIES = 8
"""Rates that a search tries, about."""
COMMON = "The same at one common rate"
REHEARSAL = ["data.source=digits", "run.epochs=1"]
OWN_KEYS = ("row", "common", "seconds", "equal_traffic")


class Protocol:
    """One of the files."""

    def __init__(self, path: Path, options):
        """``options``: the command line."""
        self.name, self.options = path.stem, options
        given = arguments(path, mpigossip.study, OWN_KEYS)
        self.own = {key: given.pop(key, None) for key in OWN_KEYS}
        self.lacks = "{data}" in str(given) and not (options.data or options.rehearse)
        self.given = given | {
            "output": options.runs / f"{self.name}{'-rehearsal' * options.rehearse}",
            "processes": options.workers,
        }
        if options.rehearse:
            settings = [*given.get("settings", ()), *REHEARSAL]
            self.given |= {"seeds": 2, "rates": None, "settings": settings}

    def tables(self) -> Iterator[tuple[str, Study]]:
        """The studies at each method's own rate, and at the common one."""
        given = _filled(self.given, {"{data}": str(self.options.data)})
        if "{searched}" in str(given):
            given = _filled(given, {"{searched}": self._searched(given["nodes"])})
        common = self.own["common"]
        for table in ("", COMMON)[: 1 + bool(common)]:
            rates = given | ({"rates": [common]} if table else {})
            yield table, mpigossip.study(**rates | {"grid": self._grid(rates)})

    def _searched(self, nodes: int) -> str:
        """The file of a searched graph."""
        file = self.options.runs / f"searched-{nodes}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            save(search(nodes, degree=4, evaluations=20_000, seed=0), file)
        return str(file)

    def _grid(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The grid, with the period of equal traffic: the largest that spends no less."""
        grid, pair = dict(given["grid"]), self.own["equal_traffic"]
        if not pair:
            return grid
        methods, (first, second) = dict(grid["method"]), pair
        alone = mpigossip.study(**given | {"grid": {"method": {first: methods[first]}}})
        runs = alone.ended(alone.cells[0])
        if not runs:
            raise Failure(f"{alone.folder}: all runs of {first} diverged")
        used = np.mean([run.last("exchanges") / len(run.log.steps["step"]) for run in runs])
        period = str(max(1, int(1 / used)))
        words = methods.pop(second).replace("{period}", period)
        return grid | {"method": methods | {f"{second}, period {period}": words}}

    def rows(self) -> Iterator[Row]:
        """The rows of all tables; where runs are missing, what they lack."""
        try:
            if self.lacks:
                raise Failure("it needs --data")
            for table, study in self.tables():
                study.plot(out=study.folder / f"curves{'-common' * bool(table)}.png")
                for row in self.own["row"]:
                    said, holds = measured(study, row)
                    yield self._row(row, said, holds, table, "order" in row)
        except Failure as error:
            for row in self.own["row"]:
                yield self._row(row, f"not run: {error}", None, "", False)

    def _row(self, row, said: str, holds: bool | None, table: str, judged: bool) -> Row:
        claim, source, expected = row["claim"], row["source"], row.get("expected", "as measured")
        return Row(claim, source, expected, said, holds, judged, table)

    def estimate(self) -> tuple[int, float]:
        """Runs of the whole, about, and hours that they take on so many cores."""
        given = _filled(self.given, {"file:{searched}": "ring", "{period}": "4"})
        nodes = given["nodes"] if isinstance(given["nodes"], list) else [given["nodes"]]
        cells, _ = cells_of(given["job"], given["grid"], nodes, given.get("settings", []), False)
        seeds = SEEDS * (1 + bool(self.own["common"]))
        runs = len(cells) * (TRIES * bool(given.get("rates")) + seeds)
        return runs, runs * self.own["seconds"] / self.options.workers / 3600


def _filled(value: Any, places: Mapping[str, str]) -> Any:
    """Nested values with placeholders replaced."""
    if isinstance(value, Mapping):
        return {key: _filled(one, places) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, places) for one in value]
    for place, text in places.items():
        value = value.replace(place, text) if isinstance(value, str) else value
    return value


def measured(study: Study, row: Mapping[str, Any]) -> tuple[str, bool | None]:
    """What a row says of each method and between them, and whether its claim holds."""
    at = {axis: str(label) for axis, label in row.get("at", {}).items()}
    cells = {
        cell.label("method").split(", period")[0]: cell
        for cell in study.cells
        if all(cell.label(axis) == label for axis, label in at.items())
    }
    shares = dict.fromkeys(row.get("figures", [study.judge]), 1.0) | row.get("share", {})
    order = row.get("order", [])
    words = [_method(study, cells[name], shares, row) for name in order or cells]
    pairs = [(order[0], name) for name in order[1:]] if "alike" in row else [*pairwise(order)]
    verdicts = []
    for figure, share in shares.items():
        for first, second in pairs:
            apart = study.apart(cells[first], cells[second], figure, share)
            verdicts.append(judged(apart, row.get("by", 0.0), row.get("alike")))
            part = "" if share == 1 else f"{share:g} of "
            words.append(f"{first} ahead of {part}{second} in {figure} by {_interval(apart)}")
    holds = False if False in verdicts else None if None in verdicts else True
    return "; ".join(words), holds


def judged(apart: Sequence[float], by: float = 0.0, alike: float | None = None) -> bool | None:
    """Whether so many differences show it: their 95 % interval lies where it has to, or beyond.

    None where it lies on both sides, or there are fewer than SEEDS.
    """
    if len(apart) < SEEDS:
        return None
    (mean,), (half,) = interval(np.asarray(apart, float).reshape(-1, 1))
    low, high = mean - half, mean + half
    if alike is not None:
        within, beyond = -alike <= low and high <= alike, low > alike or high < -alike
    else:
        within, beyond = low >= by, high < by
    return True if within else False if beyond else None


def _interval(values: Sequence[float]) -> str:
    if not len(values):
        return "– (all pairs diverged)"
    (mean,), (half,) = interval(np.asarray(values, float).reshape(-1, 1))
    return f"{mean:+.3g} [{mean - half:+.3g}, {mean + half:+.3g}]"


def _method(study: Study, cell: Cell, figures: Mapping[str, float], row) -> str:
    """A method's figures with their intervals, its rate, and bytes where they are judged."""
    found, runs = study.rows[study.cells.index(cell)], study.ended(cell)
    words = []
    for name in dict.fromkeys([study.judge, *figures]):
        if name != "bytes_sent":
            (mean,), (half,) = interval(np.array([[run.last(name)] for run in runs]).reshape(-1, 1))
            words.append(f"{name} {number(mean)} ± {number(half)}")
    if "reaches" in row:
        words.append(_until(study, cell, row["reaches"]))
    if "bytes_sent" in figures:
        words.append(f"{number(found['MB'])} MB{_codes(cell, study, runs)}")
    rate = f" (lr {found['lr']:g})" if "lr" in found else ""
    return f"{cell.label('method')}{rate}: {', '.join(words)}{lost(found)}"


def _until(study: Study, cell: Cell, loss: float) -> str:
    """Bytes that a node sends until the training loss, mean of 20 steps, is down to it."""
    sent = []
    for run in study.ended(cell):
        mean = np.convolve(run.log.steps["loss"].mean(1), np.ones(20) / 20, "valid")
        below = np.flatnonzero(mean <= loss)
        sent += [run.log.steps["bytes_sent"].mean(1)[below[0] + 19] / 1e6] if len(below) else []
    lacking = len(study.seeds) - len(sent)
    said = f" (not by {lacking} of {len(study.seeds)})" if lacking else ""
    return f"{number(np.mean(sent)) if sent else '–'} MB to {loss:g}{said}"


def _codes(cell: Cell, study: Study, runs) -> str:
    """Of an encoded wire, bytes of codes and of decoded values on a ring, as papers count them."""
    if not runs:
        return ""
    job = assemble.load(runs[0].log.job)
    if job.node.wire == "fp32":
        return ""
    assembly = assemble.assemble(job, Alone(), cell.nodes)
    width = assembly.trainer.replicas.flat.size
    assembly.close()
    rounds = np.mean([run.last("exchanges") for run in runs]) * 2 * (cell.nodes - 1) / cell.nodes
    codes = rounds * assemble.make_wire(job).nbytes(width)
    return f" as sent, {codes / 1e6:.1f} MB of codes, {rounds * 4 * width / 1e6:.1f} MB decoded"
