"""Claims on training: studies of `jobs/claims/*.toml`, judged by differences of paired seeds.

A file holds the arguments of `mpigossip.study` with an axis "method", and besides: `common`, the
rate of a second table in which all methods have the same; `seconds` of a run on a quiet core, for
the estimate; `equal_traffic`, of two methods the one whose "{period}" shall spend what the other
does; `[[row]]` tables. A row has `claim`, `source`, `expected`; `at`, labels of other axes;
`order`, methods of which each is ahead of the next by `by` (0), or, with `alike`, within so much of
the first; `figures` it is judged by (unset: what chose the rates), and `share`: so much of the
next one's figure; `reaches`: a training loss, bytes until it. Without `order` nothing is judged.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from table import Row

import mpigossip
from mpigossip.config.errors import Failure
from mpigossip.graphs.search import save, search
from mpigossip.runs.summary import number
from mpigossip.studies import Study
from mpigossip.studies.grid import Cell, arguments, cells_of
from mpigossip.studies.running import RunResult
from mpigossip.studies.seeds import interval
from mpigossip.studies.tables import lost
from mpigossip.training import assemble
from mpigossip.training.costs import subject
from mpigossip.training.parts import make_parts

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
        self.name = path.stem
        self.options = options
        given = arguments(path, mpigossip.study, OWN_KEYS)
        self.own = {key: given.pop(key, None) for key in OWN_KEYS}
        folder = options.runs / f"{self.name}{'-rehearsal' * options.rehearse}"
        self.given = given | {"output": folder, "processes": options.workers}
        if options.rehearse:
            settings = [*given.get("settings", ()), *REHEARSAL]
            self.given |= {"seeds": 2, "rates": None, "settings": settings}

    def tables(self) -> Iterator[tuple[str, Study]]:
        """The studies at each method's own rate, and at the common one."""
        places = {"{data}": str(self.options.data)}
        if "{searched}" in str(self.given):
            places["{searched}"] = str(self._searched(self.given["nodes"]))
        given = _filled(self.given, places)
        common = self.own["common"]
        for table in ("", COMMON)[: 1 + bool(common)]:
            rates = given | ({"rates": [common]} if table else {})
            yield table, mpigossip.study(**rates | {"grid": self._grid(rates)})

    def _searched(self, nodes: int) -> Path:
        """The file of a searched graph."""
        file = self.options.runs / f"searched-{nodes}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            save(search(nodes, degree=4, evaluations=20_000, seed=0), file)
        return file

    def _grid(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The grid, with the period of equal traffic: the largest that spends no less."""
        methods = dict(given["grid"]["method"])
        if self.own["equal_traffic"]:
            first, second = self.own["equal_traffic"]
            alone = mpigossip.study(**given | {"grid": {"method": {first: methods[first]}}})
            runs = alone.ended(alone.cells[0])
            if not runs:
                raise Failure(f"{alone.folder}: all runs of {first} diverged")
            used = np.mean([run.last("exchanges") / len(run.log.steps["step"]) for run in runs])
            period = str(max(1, int(1 / used)))
            words = methods.pop(second).replace("{period}", period)
            methods[f"{second}, period {period}"] = words
        return given["grid"] | {"method": methods}

    def rows(self) -> Iterator[Row]:
        """The rows of all tables; where runs are missing, what they lack."""
        try:
            if "{data}" in str(self.given) and not (self.options.data or self.options.rehearse):
                raise Failure("it needs --data")
            for table, study in self.tables():
                study.plot(out=study.folder / f"curves{'-common' * bool(table)}.png")
                for row in self.own["row"]:
                    yield Row(*_about(row), *measured(study, row), "order" in row, table)
        except Failure as error:
            for row in self.own["row"]:
                yield Row(*_about(row), f"not run: {error}", None, judged=False)

    def estimate(self) -> tuple[int, float]:
        """Runs of the whole, about, and hours that they take on so many cores."""
        given = _filled(self.given, {"file:{searched}": "ring", "{period}": "4"})
        nodes = given["nodes"] if isinstance(given["nodes"], list) else [given["nodes"]]
        cells, _ = cells_of(given["job"], given["grid"], nodes, given.get("settings", []), False)
        seeds = SEEDS * (1 + bool(self.own["common"]))
        runs = len(cells) * (TRIES * bool(given.get("rates")) + seeds)
        return runs, runs * self.own["seconds"] / self.options.workers / 3600


def _about(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["claim"], row["source"], row.get("expected", "as measured")


def _filled(given: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """A study's arguments with placeholders replaced."""
    text = json.dumps(dict(given), default=str)
    for place, words in places.items():
        text = text.replace(place, json.dumps(words)[1:-1])
    return json.loads(text) | {"job": given["job"]}  # a path, as a text would be TOML


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
            apart = study.paired_difference(cells[first], cells[second], figure, share)
            verdicts.append(judged(apart, row.get("by", 0.0), row.get("alike")))
            part = "" if share == 1 else f"{share:g} of "
            words.append(f"{first} ahead of {part}{second} in {figure} by {_interval(apart)}")
    holds = False if False in verdicts else None if None in verdicts else True
    return "; ".join(words), holds


def judged(apart: Sequence[float], by: float = 0.0, alike: float | None = None) -> bool | None:
    """Return whether differences show it: their 95 % interval lies where it has to, or beyond.

    None where it lies on both sides, or there are fewer than SEEDS.
    """
    mean, half = interval(apart)
    low = mean - half
    high = mean + half
    if len(apart) < SEEDS:
        return None
    if alike is not None:
        within = -alike <= low and high <= alike
        beyond = low > alike or high < -alike
    else:
        within = low >= by
        beyond = high < by
    return True if within else False if beyond else None


def _interval(values: Sequence[float]) -> str:
    mean, half = interval(values)
    known = f"{mean:+.3g} [{mean - half:+.3g}, {mean + half:+.3g}]"
    return known if len(values) else "– (all pairs diverged)"


def _method(study: Study, cell: Cell, figures: Mapping[str, float], row) -> str:
    """A method's figures with their intervals, its rate, and bytes where they are judged."""
    found = study.rows[study.cells.index(cell)]
    runs = study.ended(cell)
    words = []
    for name in dict.fromkeys([study.judge, *figures]):
        if name != "bytes_sent":
            mean, half = interval([run.last(name) for run in runs])
            words.append(f"{name} {number(mean)} ± {number(half)}")
    if "reaches" in row:
        words.append(_until(study, cell, row["reaches"]))
    if "bytes_sent" in figures:
        words.append(f"{number(found['MB'])} MB{_codes(cell, runs)}")
    rate = f" (lr {found['lr']:g})" if "lr" in found else ""
    wrong = f" ({', '.join(lost(found))})" if lost(found) else ""
    return f"{cell.label('method')}{rate}: {', '.join(words)}{wrong}"


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


def _codes(cell: Cell, runs: Sequence[RunResult]) -> str:
    """Of an encoded wire, bytes of codes and of decoded values on a ring, as papers count them."""
    job = assemble.load(runs[0].log.job) if runs else None
    if job is None or job.node.wire == "fp32":
        return ""
    width = subject(job)[0].flat.size
    rounds = np.mean([run.last("exchanges") for run in runs]) * 2 * (cell.nodes - 1) / cell.nodes
    codes = rounds * make_parts(job).layout.wire.nbytes(width)
    return f" as sent, {codes / 1e6:.1f} MB of codes, {rounds * 4 * width / 1e6:.1f} MB decoded"
