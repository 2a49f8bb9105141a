"""Claims on training: studies of `jobs/claims/*.toml`, judged by differences of paired seeds.

A file contains the arguments of `mpigossip.study` with an axis "method", and in addition:

* `common`: learning rate of a second table, in which all methods have the same rate;
* `seconds`: seconds of a run on an idle core, for the estimate;
* `equal_traffic`: two methods; the "{period}" of the second is chosen so that it spends as much
  traffic as the first;
* `[[row]]`: tables of rows.

A row contains `claim`, `source` and `expected`; `at`, labels of other axes; `order`, methods of
which each is better than the next by at least `by` (0), or, with `alike`, differs from the first by
at most that much; `figures`, the metrics by which it is judged (default: the metric that chose the
learning rates); `share`, a factor for the metric of the next method; and `reaches`, a training loss
until which bytes are counted. A row without `order` is not judged.
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
"""Smallest number of pairs of seeds for a verdict."""
TRIES = 8
"""Approximate number of learning rates that a search tries."""
COMMON = "The same at one common rate"
REHEARSAL = ["data.source=digits", "run.epochs=1"]
OWN_KEYS = ("row", "common", "seconds", "equal_traffic")


class Protocol:
    """Studies of one of the files."""

    def __init__(self, path: Path, options):
        """Read the file; ``options`` are the options of the command line."""
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
        """Yield the studies: at each method's own learning rate, and at the common one."""
        places = {"{data}": str(self.options.data)}
        if "{searched}" in str(self.given):
            places["{searched}"] = str(self._searched(self.given["nodes"]))
        given = _filled(self.given, places)
        common = self.own["common"]
        for table in ("", COMMON)[: 1 + bool(common)]:
            rates = given | ({"rates": [common]} if table else {})
            yield table, mpigossip.study(**rates | {"grid": self._grid(rates)})

    def _searched(self, nodes: int) -> Path:
        """Return the file of a searched graph, which is made if it does not exist."""
        file = self.options.runs / f"searched-{nodes}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            save(search(nodes, degree=4, evaluations=20_000, seed=0), file)
        return file

    def _grid(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the grid, with the largest period that spends at least the same traffic."""
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
        """Yield the rows of all tables; if runs are missing, the rows say what is missing."""
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
        """Return the approximate number of runs, and the hours that they take on the workers."""
        given = _filled(self.given, {"file:{searched}": "ring", "{period}": "4"})
        nodes = given["nodes"] if isinstance(given["nodes"], list) else [given["nodes"]]
        cells, _ = cells_of(given["job"], given["grid"], nodes, given.get("settings", []), False)
        seeds = SEEDS * (1 + bool(self.own["common"]))
        runs = len(cells) * (TRIES * bool(given.get("rates")) + seeds)
        return runs, runs * self.own["seconds"] / self.options.workers / 3600


def _about(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["claim"], row["source"], row.get("expected", "as measured")


def _filled(given: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """Return a study's arguments with placeholders replaced."""
    text = json.dumps(dict(given), default=str)
    for place, words in places.items():
        text = text.replace(place, json.dumps(words)[1:-1])
    return json.loads(text) | {"job": given["job"]}  # keep the path: a text would be read as TOML


def measured(study: Study, row: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Return the measured values of a row in words, and whether its claim holds."""
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
    """Return whether differences confirm a claim by their 95 % interval.

    The result is None if the interval lies on both sides of the limit, or if there are fewer than
    SEEDS differences.
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
    """Return a method's metrics with intervals, learning rate, and bytes if they are judged."""
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
    """Return the MB that a node sends until the training loss reaches ``loss``, as text.

    The training loss is averaged over 20 steps.
    """
    sent = []
    for run in study.ended(cell):
        mean = np.convolve(run.log.steps["loss"].mean(1), np.ones(20) / 20, "valid")
        below = np.flatnonzero(mean <= loss)
        sent += [run.log.steps["bytes_sent"].mean(1)[below[0] + 19] / 1e6] if len(below) else []
    lacking = len(study.seeds) - len(sent)
    said = f" (not by {lacking} of {len(study.seeds)})" if lacking else ""
    return f"{number(np.mean(sent)) if sent else '–'} MB to {loss:g}{said}"


def _codes(cell: Cell, runs: Sequence[RunResult]) -> str:
    """Return the bytes of codes and of decoded values on a ring, as papers count them."""
    job = assemble.load(runs[0].log.job) if runs else None
    if job is None or job.node.wire == "fp32":
        return ""
    width = subject(job)[0].flat.size
    rounds = np.mean([run.last("exchanges") for run in runs]) * 2 * (cell.nodes - 1) / cell.nodes
    codes = rounds * make_parts(job).layout.wire.nbytes(width)
    return f" as sent, {codes / 1e6:.1f} MB of codes, {rounds * 4 * width / 1e6:.1f} MB decoded"
