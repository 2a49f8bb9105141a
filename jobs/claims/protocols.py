"""Claims on training: the studies in `jobs/claims/*.toml`, judged by runs with equal seeds.

A file contains the arguments of `mpigossip.study` with an axis "method", and in addition:

* `common`: a learning rate; all methods are compared at this rate in a second table;
* `seconds`: seconds of a run on an idle core, for the estimate;
* `equal_traffic`: two methods. The placeholder "{period}" of the second one is replaced by the
  largest period with which it sends at least the bytes of the first one;
* `[[row]]`: a table for each claim.

A row contains the following keys:

* `claim`, `source` and `expected`: texts of the result;
* `at`: labels of the other axes of the study, which select the runs;
* `order`: methods, each of which has to be better than the next. Without it, the row is not judged;
* `by`: smallest difference between two methods in `order`; default: 0;
* `alike`: instead of `by`, the largest difference of each method from the first one;
* `figures`: metrics by which the row is judged; default: the metric that chose the learning rates;
* `share`: by metric, the factor of the next method's value before the comparison;
* `reaches`: training loss until which bytes are counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from inputs import searched_graph
from judging import PAIRS, Difference, format_interval, judge, of_values
from table import Row

import mpigossip
from mpigossip.config.errors import Failure
from mpigossip.runs.summary import number
from mpigossip.studies import Study
from mpigossip.studies.grid import Cell, arguments, cells_of
from mpigossip.studies.running import RunResult
from mpigossip.studies.seeds import interval
from mpigossip.studies.tables import lost
from mpigossip.training import assemble
from mpigossip.training.costs import subject
from mpigossip.training.parts import make_parts

TRIES = 8
"""Approximate number of learning rates that a search tries, for the estimate."""
COMMON = "Comparison at one common rate"
REHEARSAL = ["data.source=digits", "run.epochs=1"]
OWN_KEYS = ("row", "common", "seconds", "equal_traffic")


class Protocol:
    """Studies of one TOML file, and the rows of its claims."""

    def __init__(self, path: Path, options):
        """Read the file.

        :param path: TOML file with the arguments of a study
        :param options: options of the command line
        """
        self.name = path.stem
        self.options = options
        study_arguments = arguments(path, mpigossip.study, OWN_KEYS)
        self.judging = {key: study_arguments.pop(key, None) for key in OWN_KEYS}
        folder = options.runs / f"{self.name}{'-rehearsal' * options.rehearse}"
        self.study_arguments = study_arguments | {"output": folder, "processes": options.workers}
        if options.rehearse:
            settings = [*study_arguments.get("settings", ()), *REHEARSAL]
            self.study_arguments |= {"seeds": 2, "rates": None, "settings": settings}

    def tables(self) -> Iterator[tuple[str, Study]]:
        """Yield the studies as pairs (heading, study).

        In the first, each method has its own learning rate; in the second, all have the common one.
        """
        values = {"{data}": str(self.options.data)}
        if "{searched}" in str(self.study_arguments):
            values["{searched}"] = str(
                searched_graph(self.options.runs, self.study_arguments["nodes"])
            )
        filled = _filled(self.study_arguments, values)
        common = self.judging["common"]
        for table in ("", COMMON)[: 1 + bool(common)]:
            rates = filled | ({"rates": [common]} if table else {})
            yield table, mpigossip.study(**rates | {"grid": self._grid(rates)})

    def _grid(self, filled: Mapping[str, Any]) -> dict[str, Any]:
        """Return the grid of the study, with the period of `equal_traffic` filled in.

        It is the largest period with which the second method sends at least the bytes that the
        first one sends, which is run for this purpose.

        :param filled: arguments of the study, without other placeholders
        :raises Failure: if all runs of the first method diverge
        """
        methods = dict(filled["grid"]["method"])
        if self.judging["equal_traffic"]:
            first, second = self.judging["equal_traffic"]
            study = mpigossip.study(**filled | {"grid": {"method": {first: methods[first]}}})
            runs = study.ended(study.cells[0])
            if not runs:
                raise Failure(f"{study.folder}: all runs of {first} diverged; try other rates")
            share = np.mean([run.last("exchanges") / len(run.log.steps["step"]) for run in runs])
            period = str(max(1, int(1 / share)))
            settings = methods.pop(second).replace("{period}", period)
            methods[f"{second}, period {period}"] = settings
        return filled["grid"] | {"method": methods}

    def rows(self) -> Iterator[Row]:
        """Train the missing runs, and yield the rows of all tables.

        If the runs fail, each row has the text "not run: " and the reason instead of a measurement.
        """
        try:
            if "{data}" in str(self.study_arguments) and not (
                self.options.data or self.options.rehearse
            ):
                raise Failure(
                    "the study needs CIFAR-10, but --data was not given: pass --data FILE"
                )
            for table, study in self.tables():
                study.plot(out=study.folder / f"curves{'-common' * bool(table)}.png")
                for row in self.judging["row"]:
                    yield Row(*_head(row), *judge_row(study, row), "order" in row, table)
        except Failure as error:
            for row in self.judging["row"]:
                yield Row(*_head(row), f"not run: {error}", None, judged=False)

    def estimate(self) -> tuple[int, float]:
        """Return the approximate number of runs, and the hours that they take with --workers."""
        filled = _filled(self.study_arguments, {"file:{searched}": "ring", "{period}": "4"})
        nodes = filled["nodes"] if isinstance(filled["nodes"], list) else [filled["nodes"]]
        cells, _ = cells_of(filled["job"], filled["grid"], nodes, filled.get("settings", []), False)
        seeds = PAIRS * (1 + bool(self.judging["common"]))
        runs = len(cells) * (TRIES * bool(filled.get("rates")) + seeds)
        return runs, runs * self.judging["seconds"] / self.options.workers / 3600


def _head(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the first three cells of a row: claim, source and expected value."""
    return row["claim"], row["source"], row.get("expected", "as measured")


def _filled(study_arguments: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a study with placeholders replaced by values."""
    # The path of the job must remain a path, because a str would be parsed as TOML.
    text = json.dumps(dict(study_arguments), default=str)
    for placeholder, value in values.items():
        text = text.replace(placeholder, json.dumps(value)[1:-1])
    return json.loads(text) | {"job": study_arguments["job"]}


def judge_row(study: Study, row: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Return the measured values of a row as text, and whether its claim holds.

    :param study: the study with all of its runs
    :param row: keys of the table `[[row]]`
    :return: text of the values, and the verdict; None: it can't be decided, or the row has no
        key `order`
    """
    at = {axis: str(label) for axis, label in row.get("at", {}).items()}
    cells = {
        cell.label("method").split(", period")[0]: cell
        for cell in study.cells
        if all(cell.label(axis) == label for axis, label in at.items())
    }
    shares = dict.fromkeys(row.get("figures", [study.judge]), 1.0) | row.get("share", {})
    order = row.get("order", [])
    words = [_describe_method(study, cells[name], shares, row) for name in order or cells]
    pairs = [(order[0], name) for name in order[1:]] if "alike" in row else [*pairwise(order)]
    differences = []
    for figure, share in shares.items():
        for first, second in pairs:
            values = study.paired_difference(cells[first], cells[second], figure, share)
            differences.append(of_values(values))
            part = "" if share == 1 else f"{share:g} of "
            words.append(f"{first} ahead of {part}{second} in {figure} by {_lead(differences[-1])}")
    if not differences:
        return "; ".join(words), None
    verdict = judge(row["claim"], differences, row.get("by", 0.0), row.get("alike"))
    return "; ".join(words), verdict.holds


def _lead(difference: Difference) -> str:
    """Return a difference with its interval as text, or a note if no pair of runs has ended."""
    return format_interval(difference, "+.3g") if difference.pairs else "– (all pairs diverged)"


def _describe_method(study: Study, cell: Cell, figures: Mapping[str, float], row) -> str:
    """Return a text about a method: its metrics with 95 % intervals, and its learning rate.

    The text contains the megabytes that a node sends if the row is judged by "bytes_sent".

    :param study: the study
    :param cell: cell of the method
    :param figures: metrics by which the row is judged
    :param row: keys of the table `[[row]]`
    """
    measured_row = study.rows[study.cells.index(cell)]
    runs = study.ended(cell)
    words = []
    for name in dict.fromkeys([study.judge, *figures]):
        if name != "bytes_sent":
            mean, half = interval([run.last(name) for run in runs])
            words.append(f"{name} {number(mean)} ± {number(half)}")
    if "reaches" in row:
        words.append(_megabytes_until(study, cell, row["reaches"]))
    if "bytes_sent" in figures:
        words.append(f"{number(measured_row['MB'])} MB{_message_sizes(cell, runs)}")
    rate = f" (lr {measured_row['lr']:g})" if "lr" in measured_row else ""
    notes = f" ({', '.join(lost(measured_row))})" if lost(measured_row) else ""
    return f"{cell.label('method')}{rate}: {', '.join(words)}{notes}"


def _megabytes_until(study: Study, cell: Cell, loss: float) -> str:
    """Return the MB that a node sends until the training loss reaches ``loss``, as text.

    The training loss is averaged over 20 steps.

    :param study: the study
    :param cell: point of the grid
    :param loss: the training loss to reach
    """
    sent = []
    for run in study.ended(cell):
        mean = np.convolve(run.log.steps["loss"].mean(1), np.ones(20) / 20, "valid")
        below = np.flatnonzero(mean <= loss)
        sent += [run.log.steps["bytes_sent"].mean(1)[below[0] + 19] / 1e6] if len(below) else []
    missing = len(study.seeds) - len(sent)
    note = f" (not by {missing} of {len(study.seeds)})" if missing else ""
    return f"{number(np.mean(sent)) if sent else '–'} MB to {loss:g}{note}"


def _message_sizes(cell: Cell, runs: Sequence[RunResult]) -> str:
    """Return the MB of encoded and of decoded messages as text, as papers count them.

    The papers' counts assume ring all-reduce, with 2 (n − 1)/n messages per node and exchange. The
    text is empty if messages are not encoded, or if there are no runs.
    """
    job = assemble.load(runs[0].log.job) if runs else None
    if job is None or job.node.wire == "fp32":
        return ""
    width = subject(job)[0].flat.size
    rounds = np.mean([run.last("exchanges") for run in runs]) * 2 * (cell.nodes - 1) / cell.nodes
    codes = rounds * make_parts(job).layout.wire.nbytes(width)
    return f" as sent, {codes / 1e6:.1f} MB of codes, {rounds * 4 * width / 1e6:.1f} MB decoded"
