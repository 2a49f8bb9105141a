"""Results of a study: tables with intervals, the best point, and points that are equally good."""

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpigossip.config import JobError
from mpigossip.config.readable import cells
from mpigossip.runs.summary import metrics_of
from mpigossip.studies import tables
from mpigossip.studies.grid import Cell
from mpigossip.studies.running import Key, RunResult
from mpigossip.studies.search import Trial, figure_of, larger_is_better
from mpigossip.studies.seeds import LEVEL, interval, many_to_one, settings

WIDE = 0.1
"""Largest half width of an accuracy's interval; a study warns if an interval is wider."""
CHANCES = 2.0
"""A study warns if an accuracy is below this multiple of the accuracy of guessing, 1 / classes."""


class Results:
    """Results of a study as tables.

    The attribute `rows` has a dict for each point, with its labels and these entries:

    * "nodes", "seeds" (number of complete runs) and "lr", the setting `schedule.lr` of the runs
      (NaN if it is not known);
    * "diverged", the number of runs whose loss became NaN or infinite, and "late", the number of
      runs that ended, but whose training loss rose again by over half of its decrease;
    * for each metric, NAME (the mean over the complete runs whose loss stayed finite), NAME_std
      (standard deviation with ddof 1), NAME_low and NAME_high (95 % confidence interval of the
      mean, by Student's t). The metrics are ``judge``, the metrics of the task, "loss", and "MB",
      the megabytes sent by a node.

    `tried` contains the learning rates that a search tried, `left_out` the reason why a point was
    left out, by its name, and `folder` is the folder of the logs.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        rates: Mapping[Cell, float | None],
        seeds: Sequence[int],
        results: Mapping[Key, RunResult],
        judge: str | None,
        tried: Sequence[Trial],
        left_out: Mapping[str, str],
        folder: Path,
        larger: bool | None = None,
    ):
        """Compute the rows of the table from the results of the runs.

        :param cells: points of the grid
        :param rates: chosen learning rate of each point; None: the rate of the job
        :param seeds: seeds of the runs
        :param results: results of the runs
        :param judge: metric by which points are compared; None: see `search.figure_of`
        :param tried: learning rates that a search tried
        :param left_out: reason why a point was left out, by the name of the point
        :param folder: folder of the logs
        :param larger: whether larger values of ``judge`` are better; None: true for accuracies, and
            false for other metrics
        """
        self.cells = list(cells)
        self.rates = dict(rates)
        self.seeds = list(seeds)
        self.tried = list(tried)
        self.left_out = dict(left_out)
        self.folder = folder
        self._results = dict(results)
        self.judge = figure_of(results.values(), judge)
        self.larger = larger
        self.axes = [name for name, _ in self.cells[0].labels]
        if len({cell.nodes for cell in cells}) > 1:
            self.axes.append("nodes")
        self.rows = [self._row(cell) for cell in self.cells]

    def runs(self, cell: Cell) -> list[RunResult]:
        """Return the runs of a point in the order of the seeds."""
        return [self._results[cell, self.rates[cell], seed] for seed in self.seeds]

    def ended(self, cell: Cell) -> list[RunResult]:
        """Return the complete runs of a point whose loss stayed finite."""
        return [run for run in self.runs(cell) if run.log is not None]

    @property
    def figures(self) -> list[str]:
        """Names of the metrics in the table, with ``judge`` first."""
        logs = [run.log for run in self._results.values() if run.log is not None]
        names = metrics_of(logs[0].summary) if logs else []
        return list(dict.fromkeys([self.judge, *names, "loss"]))

    @property
    def curves(self) -> list[str]:
        """Names of the metrics of which all logs have a value for each evaluation."""
        logs = [run.log for run in self._results.values() if run.log is not None]
        names_by_log = [{"train_loss", *log.evaluations} for log in logs]
        return [name for name in self.figures if all(name in names for names in names_by_log)]

    def _row(self, cell: Cell) -> dict[str, Any]:
        """Return the row of a point, with the entries that the docstring of the class lists."""
        ended = self.ended(cell)
        row: dict[str, Any] = dict(cell.labels) | {"nodes": cell.nodes}
        if self.rates[cell] is not None:
            row["lr"] = self.rates[cell]
        runs = self.runs(cell)
        seeds = sum(not run.missing for run in runs)
        row |= {"seeds": seeds, "diverged": sum(run.diverged for run in runs)}
        row["late"] = sum(run.late for run in ended)
        for name in self.figures:
            row |= _spread(name, [run.last(name) for run in ended])
        row |= _spread("MB", [run.last("bytes_sent") / 1e6 for run in ended])
        return row if "lr" in row else row | {"lr": self._rate_of_job(cell)}

    def _rate_of_job(self, cell: Cell) -> float:
        """Return the setting `schedule.lr` of the runs of a point; NaN if it is not known."""
        jobs = [settings(run.log.job) for run in self.ended(cell)]
        return float(jobs[0].get("schedule.lr", math.nan)) if jobs else math.nan

    @property
    def _has_rates(self) -> bool:
        """True if the table needs a column of learning rates: they were chosen, or differ."""
        known = {row["lr"] for row in self.rows if not math.isnan(row["lr"])}
        return len(known) > 1 or any(rate is not None for rate in self.rates.values())

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Return the labels of a row, separated by commas, or "the job" if there are no axes."""
        return ", ".join(str(row[axis]) for axis in self.axes) or "the job"

    # -- comparison ------------------------------------------------------------------------------

    def best(self) -> dict[str, Any]:
        """Return the row with the best mean of ``judge`` among rows with fewest diverged runs.

        Runs that diverged late count as diverged.
        """
        return self.rows[self._order()[0]]

    def _order(self) -> list[int]:
        """Return the indices of the rows, best first: by runs that diverged, then by ``judge``."""
        sign = -1 if larger_is_better(self.judge, self.larger) else 1

        def sort_key(k: int):
            value = self.rows[k][self.judge]
            return _lost(self.rows[k]), math.isnan(value), sign * value

        return sorted(range(len(self.rows)), key=sort_key)

    def ties(self) -> list[dict[str, Any]]:
        """Return the rows that do not differ significantly from the best row.

        Rows with the same number of diverged runs as the best row are compared with it by Dunnett's
        test at a level of 5 %. Only seeds for which all of these values are finite are used.
        """
        best, *others = self._order()
        near = [k for k in sorted(others) if _lost(self.rows[k]) == _lost(self.rows[best])]
        values = [[run.last(self.judge) for run in self.runs(self.cells[k])] for k in (best, *near)]
        ended = np.array(values)[:, np.isfinite(values).all(0)]
        p_values = many_to_one(ended) if near else np.empty(0)
        return [self.rows[k] for k, p in zip(near, p_values, strict=True) if p >= 1 - LEVEL]

    def paired_difference(
        self, first: Cell, second: Cell, name: str, share: float = 1.0
    ) -> list[float]:
        """Return the difference between two points in a metric for each seed.

        It is positive if the first point is better.

        Runs are paired by seed, because they share the initial parameters and the order of the
        samples. Seeds for which the loss of a run became NaN or infinite, or for which a run is
        missing, are left out.

        :param first: first point
        :param second: second point
        :param name: metric to compare. Larger values are better for accuracies, and smaller values
            for other metrics, unless ``larger`` of the study was given for this metric
        :param share: factor by which the values of the second point are multiplied
        """
        larger = self.larger if name == self.judge else None
        sign = 1 if larger_is_better(name, larger) else -1
        return [
            sign * (a.last(name) - share * b.last(name))
            for a, b in zip(self.runs(first), self.runs(second), strict=True)
            if a.log is not None and b.log is not None
        ]

    # -- tables ----------------------------------------------------------------------------------

    def table(self, form: Literal["text", "csv", "latex"] = "text") -> str:
        """Return a table with a row for each point.

        :param form: "text", "csv" or "latex". The LaTeX table requires the package booktabs; the
            best point and its :meth:`ties` are bold, unless these are all points
        :raises JobError: if ``form`` has another value
        """
        if form == "csv":
            out = io.StringIO()
            writer = csv.writer(out, lineterminator="\n")
            writer.writerows(map(cells, [self.rows[0], *(row.values() for row in self.rows)]))
            return out.getvalue()
        if form not in ("text", "latex"):
            raise JobError(f'table("{form}"): choose one of text, csv, latex')
        left = len(self.axes)
        rates = ["lr"] * self._has_rates
        heads = [axis.removesuffix(".name").rpartition(".")[2] for axis in self.axes]
        heads += [f"lr{self._per()}" for _ in rates] + [*self.figures, "MB per node"]
        columns = [[str(row[axis]) for row in self.rows] for axis in self.axes]
        columns += [[f"{row[key]:g}" for row in self.rows] for key in rates]
        columns += [tables.column(self.rows, name) for name in [*self.figures, "MB"]]
        best = [self.best(), *self.ties()]
        strong = {id(row) for row in best if len(best) < max(2, len(self.rows))}
        rows = [
            tables.Row(texts, left + len(rates), self.note(cell), id(row) in strong)
            for cell, row, *texts in zip(self.cells, self.rows, *columns, strict=True)
        ]
        if form == "text":
            return "\n".join([tables.text(heads, rows, left), *self._comments()])
        bold = "bold: not" if strong else "no point is"
        bold += f" significantly different from the best {self.judge} (paired Dunnett's test)"
        bold = bold if len(self.seeds) > 1 else f"bold: the best {self.judge}"
        return tables.latex(heads, rows, left, [*self._comments(), bold, self._caption(bold)])

    def _caption(self, bold: str) -> str:
        """Return the draft of a caption for LaTeX, with what a reader of the table has to know.

        :param bold: explanation of the bold numbers
        """
        size, spread, data = self._size(), self._spread_text(), self._partition()
        rate = self._rate_text().partition(" (")[0]
        sentence = bold[0].upper() + bold[1:]
        parts = [f"Test results of the averaged model; {size}", spread, rate, data, sentence]
        return rf"\caption{{{'. '.join(map(tables.escaped, filter(None, parts)))}.}}"

    def _size(self) -> str:
        """Return a text on the numbers of nodes and of steps."""
        steps = [int(run.last("steps")) for cell in self.cells for run in self.ended(cell)]
        nodes = sorted({cell.nodes for cell in self.cells})
        size = f"n = {', '.join(map(str, nodes))}"
        if steps:
            size += f", {' to '.join(map(str, sorted({min(steps), max(steps)})))} steps"
        return size

    def _spread_text(self) -> str:
        """Return an explanation of the intervals."""
        up_to = "up to " if any(row["seeds"] < len(self.seeds) for row in self.rows) else ""
        seeds = f"{up_to}{len(self.seeds)} seeds"
        half = f"±: half the {100 * LEVEL:.0f} % interval of the mean of {seeds}"
        return f"{half} (Student's t)" if len(self.seeds) > 1 else "one seed, no intervals"

    def _partition(self) -> str:
        """Return a text on the partition of the samples if all runs have the same; otherwise ""."""
        jobs = [settings(run.log.job) for run in self._results.values() if run.log is not None]
        texts = set()
        for job in jobs:
            name = job.get("data.partition", "")
            alpha = job.get("data.dirichlet_alpha", "")
            shape = f", α = {alpha}" if name == "dirichlet" else ""
            texts.add(f"data.partition = {name}{shape}" if name else "")
        return texts.pop() if len(texts) == 1 else ""

    def _rate_text(self) -> str:
        """Return a text on the rate if all points have the rate of the job; otherwise ""."""
        known = {row["lr"] for row in self.rows if not math.isnan(row["lr"])}
        if self._has_rates or len(known) != 1:
            return ""
        return (
            f"schedule.lr = {known.pop():g}{self._per()} for all points, not tuned for each "
            '(rates = "search" tunes it)'
        )

    def note(self, cell: Cell) -> str:
        """Return the table's note on a point; "" if there is none.

        It states the numbers of diverged and missing runs, and that no learning rate of a search
        converged.
        """
        notes = tables.lost(self.rows[self.cells.index(cell)])
        complete = sum(not run.missing for run in self.runs(cell))
        if complete < len(self.seeds):
            notes = [f"only {complete} of {len(self.seeds)} seeds are complete", *notes]
        trials = [trial for trial in self.tried if trial.cell == cell]
        no_rate = ["no tried rate converged"] * bool(trials and all(trial.lost for trial in trials))
        return "; ".join([*notes, *no_rate])

    def _per(self) -> str:
        """Return the unit of learning rates in the table, such as " per 256 samples".

        If all jobs scale the learning rate by the same reference batch, the unit names this batch;
        otherwise, it is "".
        """
        jobs = [settings(run.log.job) for run in self._results.values() if run.log is not None]
        units = {
            f" per {job['schedule.reference_batch']} samples"
            if job.get("schedule.scale") == "linear"
            else ""
            for job in jobs
        }
        return units.pop() if len(units) == 1 else ""

    def _comments(self) -> list[str]:
        """Return lines that explain the table; they are comments in LaTeX."""
        late = ["diverged late: the training loss rose again by over half of its decrease"]
        late = late * any(row["late"] for row in self.rows)
        rate = [text for text in [self._rate_text()] if text]
        return [f"{self._spread_text()}; {self._size()}", *rate, *late, *self._warnings()]

    def _warnings(self) -> list[str]:
        """Return warnings that this study hardly distinguishes its points, or cannot do so."""
        warnings = []
        if min(cell.nodes for cell in self.cells) == 1:
            warnings.append(
                "warning: n = 1: a single node exchanges nothing, so graphs make no "
                "difference: use at least nodes = 2"
            )
        seeds = {row["seeds"] for row in self.rows}
        if 1 in seeds:
            warnings.append(
                "warning: one seed: there are no intervals and no test of significance: use at "
                "least seeds = 3"
            )
        if 2 in seeds:
            warnings.append(
                "warning: 2 seeds: intervals have one degree of freedom, and are 12.7 standard "
                "errors wide on either side: use at least seeds = 3"
            )
        return [*warnings, *self._accuracy_warnings()]

    def _accuracy_warnings(self) -> list[str]:
        """Return warnings that the accuracies of this study hardly distinguish its points."""
        if "accuracy" not in self.judge:
            return []
        logs = [run.log for run in self._results.values() if run.log is not None]
        job = settings(logs[0].job) if logs else {}
        # The log doesn't contain the number of classes of a file.
        known = job.get("data.source") in ("digits", "synthetic")
        classes = job["data.classes"] if known else 0
        means = [row[self.judge] for row in self.rows if not math.isnan(row[self.judge])]
        wide = [row for row in self.rows if row[f"{self.judge}_high"] - row[self.judge] > WIDE]
        warnings = []
        if classes and means and min(means) < CHANCES / classes:
            warnings.append(
                f"warning: an {self.judge} of {min(means):.2g} is near chance (1/{classes}): train "
                'longer (run.epochs), or use another rate (rates="search")'
            )
        if wide:
            warnings.append(
                f"warning: {len(wide)} of {len(self.rows)} intervals exceed ± {WIDE:g}: use more "
                "seeds, train longer, or use an easier problem (model.name=mlp)"
            )
        return warnings

    def frame(self) -> Any:
        """Return the rows as a pandas.DataFrame; requires the package pandas."""
        import pandas

        return pandas.DataFrame(self.rows)

    def dataset(self) -> Any:
        """Return the metrics of all runs as an xarray.Dataset over ("point", "seed").

        The labels of the points are coordinates. Requires the package xarray.
        """
        import xarray

        points = ("point", "seed")
        values = {
            name: (points, [[run.last(name) for run in self.runs(cell)] for cell in self.cells])
            for name in [*self.figures, "bytes_sent"]
        }
        labels = {axis: ("point", [cell.label(axis) for cell in self.cells]) for axis in self.axes}
        if self._has_rates:
            labels["lr"] = ("point", [row["lr"] for row in self.rows])
        return xarray.Dataset(values, labels | {"seed": self.seeds})

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table())}</pre>"


def _lost(row: Mapping[str, Any]) -> int:
    """Return the number of runs of a row that diverged, at once or late."""
    return sum(row[k] for k in tables.LOST)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the entries of a row for a metric: mean, standard deviation, and ends of its interval.

    :param name: name of the metric, with which each key begins
    :param values: value of each run
    """
    mean, half = map(float, interval(values))
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return {name: mean, f"{name}_std": std, f"{name}_low": mean - half, f"{name}_high": mean + half}
