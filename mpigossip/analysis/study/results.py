"""What a study found: a table with intervals, the best point, and what can't be told from it."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpigossip.analysis.seeds import interval
from mpigossip.analysis.study.grid import Cell
from mpigossip.analysis.study.running import Found, Key
from mpigossip.analysis.study.search import Tried, figure_of, larger_is_better
from mpigossip.config import JobError
from mpigossip.runs.summary import metrics_of, number

LOST = {"diverged": "diverged", "late": "diverged late"}


class Results:
    """The results of a grid: the tables.

    `rows`: a dict for each point with its labels, "nodes", "lr" where rates were chosen, "seeds",
    "diverged" (how many of them), "late" (how many ended, but lost again most of what they had
    learnt: `Found.late`), and of each figure NAME (mean over the seeds that ended), NAME_std
    (ddof 1), NAME_low and NAME_high (95 % interval of the mean, Student's t); figures are the
    task's metrics, "loss", and "MB", sent by a node. `tried`: what a search of rates tried;
    `left_out`: points whose parts don't go together, with the reason; `folder`: where the logs lie.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        rates: Mapping[Cell, float | None],
        seeds: Sequence[int],
        found: Mapping[Key, Found],
        judge: str | None,
        tried: Sequence[Tried],
        left_out: Mapping[str, str],
        folder: Path,
    ):
        """Of runs that have ended."""
        self.cells, self.rates, self.seeds = list(cells), dict(rates), list(seeds)
        self.tried, self.left_out, self.folder = list(tried), dict(left_out), folder
        self._found = dict(found)
        self.judge = figure_of(found.values(), judge)
        self.axes = [name for name, _ in self.cells[0].labels]
        if len({cell.nodes for cell in cells}) > 1:
            self.axes.append("nodes")
        self.rows = [self._row(cell) for cell in self.cells]

    def runs(self, cell: Cell) -> list[Found]:
        """A point's runs in the order of the seeds."""
        return [self._found[cell, self.rates[cell], seed] for seed in self.seeds]

    def ended(self, cell: Cell) -> list[Found]:
        """Those of them that didn't diverge."""
        return [run for run in self.runs(cell) if not run.diverged]

    @property
    def figures(self) -> list[str]:
        """Names of the figures of the table; the one that is judged first."""
        logs = [run.log for run in self._found.values() if run.log is not None]
        names = metrics_of(logs[0].summary) if logs else []
        return list(dict.fromkeys([self.judge, *names, "loss"]))

    def _row(self, cell: Cell) -> dict[str, Any]:
        ended = self.ended(cell)
        row: dict[str, Any] = dict(cell.labels) | {"nodes": cell.nodes}
        if self.rates[cell] is not None:
            row["lr"] = self.rates[cell]
        row |= {"seeds": len(self.seeds), "diverged": len(self.seeds) - len(ended)}
        row["late"] = sum(run.late for run in ended)
        for name in self.figures:
            row |= _spread(name, [run.last(name) for run in ended])
        return row | _spread("MB", [run.last("bytes_sent") / 1e6 for run in ended])

    # -- what is best ----------------------------------------------------------------------------

    def best(self) -> dict[str, Any]:
        """The row of the best mean of what is judged; those with runs that diverged come last."""
        return self.rows[self._order()[0]]

    def _order(self) -> list[int]:
        sign = -1 if larger_is_better(self.judge) else 1

        def place(k: int):
            value = self.rows[k][self.judge]
            lost = self.rows[k]["diverged"] + self.rows[k]["late"]
            return lost, math.isnan(value), sign * value

        return sorted(range(len(self.rows)), key=place)

    def ties(self) -> list[dict[str, Any]]:
        """Rows that can't be told from the best: the interval of paired differences has 0 in it."""
        first = self.cells[self._order()[0]]
        found = []
        for cell, row in zip(self.cells, self.rows, strict=True):
            apart = _spread("d", self.apart(first, cell, self.judge))
            if cell is not first and not row["diverged"] and apart["d_low"] <= 0 <= apart["d_high"]:
                found.append(row)
        return found

    def apart(self, first: Cell, second: Cell, name: str, share: float = 1.0) -> list[float]:
        """By how much one point is ahead of ``share`` times another: a difference a seed.

        Above 0 where the first is better: an accuracy larger, any other figure smaller. Paired by
        seed, as seeds share initial parameters and the order of samples; of seeds with which
        neither diverged.
        """
        sign = 1 if larger_is_better(name) else -1
        return [
            sign * (a.last(name) - share * b.last(name))
            for a, b in zip(self.runs(first), self.runs(second), strict=True)
            if not (a.diverged or b.diverged)
        ]

    # -- tables ----------------------------------------------------------------------------------

    def table(self, form: Literal["text", "csv", "latex"] = "text") -> str:
        """A row a point. LaTeX needs booktabs; bold are the best and what can't be told from it."""
        if form == "csv":
            out = io.StringIO()
            writer = csv.DictWriter(out, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            return out.getvalue()
        if form not in ("text", "latex"):
            raise JobError([f'table("{form}"): choose one of text, csv, latex'])
        heads = [axis.removesuffix(".name").rpartition(".")[2] for axis in self.axes]
        chosen = ["lr"] * ("lr" in self.rows[0])
        heads += [*chosen, *self.figures, "MB a node"]
        strong = [id(row) for row in ([self.best(), *self.ties()] if form == "latex" else [])]
        lines = [self._line(row, chosen, form, id(row) in strong) for row in self.rows]
        return (_latex if form == "latex" else _text)(heads, lines, len(self.axes))

    def _line(
        self, row: Mapping[str, Any], chosen: Sequence[str], form: str, strong: bool
    ) -> list[str]:
        said = [str(row[axis]) for axis in self.axes] + [f"{row[key]:g}" for key in chosen]
        for name in self.figures:
            value = _with_interval(row, name, " \\pm " if form == "latex" else " ± ")
            if form == "latex":
                value = f"$\\mathbf{{{value}}}$" if strong and name == self.judge else f"${value}$"
            said.append(value)
        said[len(self.axes) + len(chosen)] += lost(row)
        return [*said, number(row["MB"])]

    def frame(self) -> Any:
        """The rows as a DataFrame of pandas."""
        import pandas

        return pandas.DataFrame(self.rows)

    def dataset(self) -> Any:
        """All seeds as an xarray.Dataset: figures over ("point", "seed"), labels as coordinates."""
        import xarray

        points = ("point", "seed")
        values = {
            name: (points, [[run.last(name) for run in self.runs(cell)] for cell in self.cells])
            for name in [*self.figures, "bytes_sent"]
        }
        labels = {axis: ("point", [cell.label(axis) for cell in self.cells]) for axis in self.axes}
        if "lr" in self.rows[0]:
            labels["lr"] = ("point", [row["lr"] for row in self.rows])
        return xarray.Dataset(values, labels | {"seed": self.seeds})

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table())}</pre>"


def lost(row: Mapping[str, Any]) -> str:
    """How many of a row's runs diverged, and how many of them late, in words."""
    said = [f"{row[k]} of {row['seeds']} {word}" for k, word in LOST.items() if row[k]]
    return f" ({', '.join(said)})" if said else ""


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, deviation and interval of a figure."""
    mean, half = map(float, interval(values))
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return {name: mean, f"{name}_std": std, f"{name}_low": mean - half, f"{name}_high": mean + half}


def _with_interval(row: Mapping[str, Any], name: str, between: str) -> str:
    half = row[f"{name}_high"] - row[name]
    if math.isnan(row[name]):
        return "--"
    if math.isnan(half) or half == 0:
        return number(row[name])
    digits = min(max(1 - math.floor(math.log10(half)), 0), 12)  # two of the interval
    return f"{row[name]:.{digits}f}{between}{half:.{digits}f}"


def _text(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]

    def padded(words: Sequence[str]) -> str:
        cells = [
            word.ljust(width) if k < left else word.rjust(width)
            for k, (word, width) in enumerate(zip(words, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(padded(line) for line in [heads, *lines])


def _latex(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    form = "l" * left + "r" * (len(heads) - left)
    named = [" & ".join(_escaped(head) for head in heads) + r" \\"]
    rows = [
        " & ".join(_escaped(w) if k < left else w.replace("%", r"\%") for k, w in enumerate(line))
        + r" \\"
        for line in lines
    ]
    begin, end = rf"\begin{{tabular}}{{{form}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", *named, r"\midrule", *rows, r"\bottomrule", end])


def _escaped(text: str) -> str:
    return "".join("\\" + c if c in "_%&#$" else c for c in text)
