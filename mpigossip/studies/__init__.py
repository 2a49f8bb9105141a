"""Studies, which simulate all points of a grid of settings, and tabulate and plot the results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpigossip.config import JobError
from mpigossip.config.errors import Failure
from mpigossip.studies.grid import Axis, cells_of
from mpigossip.studies.results import Results
from mpigossip.studies.running import Runner, RunResult
from mpigossip.studies.search import chosen
from mpigossip.studies.tables import with_greek

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Study(Results):
    """Results of a study, as returned by :func:`study`, with tables and plots."""

    def plot(
        self,
        y: str | None = None,
        x: Literal["step", "epoch", "bytes", "time"] = "step",
        out: str | Path | None = None,
        theory: bool = False,
        width: float | None = None,
    ) -> Figure:
        """Plot the mean of a metric over seeds, with a band for its confidence interval.

        A curve has a value for each evaluation. Runs whose loss became NaN or infinite are left
        out. The band is the 95 % confidence interval of the mean over seeds. The band of an
        accuracy is clipped to [0, 1], and an axis of accuracies may leave out the first
        evaluations, to show how the last ones differ. If the mean of another metric is positive but
        its band would reach 0 at some evaluation, the lower end of the whole band is replaced by
        mean² / upper end.

        :param y: name of a metric, "loss" or "consensus_distance"; None: the metric ``judge`` of
            the study
        :param x: horizontal axis: "step", "epoch", "bytes" (MB sent by a node) or "time" (virtual
            seconds, for jobs with a section `[clock]`)
        :param out: file to write, as PNG, PDF, SVG or PGF, depending on its suffix; None: no file
            is written
        :param theory: whether to draw the rate of D-PSGD on each graph (dotted) and the lower
            bounds (grey), too. This is possible for theory tasks if "gradient_square" is plotted
            over steps
        :param width: width of the figure in inches for a paper, such as `drawing.COLUMN`, the
            width of a column: without a title, with text of 8 points and, in a PDF, with embedded
            fonts; None: 5.4 inches per panel, with a title
        :return: figure, which a notebook displays
        :raises JobError: if ``x`` is not valid, if the logs do not have such a metric or no virtual
            time, or if ``theory`` does not apply
        :raises StoreError: if the file can't be written
        """
        from mpigossip.store.hdf5 import replacing
        from mpigossip.studies.drawing import curves, style_of

        with style_of(width):
            figure = curves(self, y or self.judge, x, theory, width)
        if out is not None:
            with style_of(width), replacing(Path(out)) as temporary:
                figure.savefig(temporary, dpi=150)
                if temporary.suffix == ".pgf":
                    temporary.write_text(with_greek(temporary.read_text()))
        return figure

    def write(self) -> list[str]:
        """Write the tables and figures of the study to its folder, and return their names.

        The files are table.csv, table.tex and, for each metric with a curve, METRIC.png for a
        screen and METRIC.pdf for a column of a paper. METRIC-by-MB shows the metric by which points
        are compared (without a curve of it, the first metric with a curve) against the megabytes
        that a node sent.

        :raises StoreError: if a file can't be written
        """
        from mpigossip.store.hdf5 import replacing
        from mpigossip.studies.drawing import COLUMN

        names = ["table.csv", "table.tex"]
        for name, form in (("table.csv", "csv"), ("table.tex", "latex")):
            with replacing(self.folder / name) as temporary:
                temporary.write_text(self.table(form), encoding="utf-8")  # type: ignore[arg-type]
        figures: list[tuple[str, Literal["step", "bytes"], str]] = [
            (y, "step", y) for y in self.curves
        ]
        figures += [(y, "bytes", f"{y}-by-MB") for y in self._compared_curve()]
        for y, x, name in figures:
            self.plot(y, x, out=self.folder / f"{name}.png")
            self.plot(y, x, out=self.folder / f"{name}.pdf", width=COLUMN)
            names += [f"{name}.png", f"{name}.pdf"]
        return names

    def _compared_curve(self) -> list[str]:
        """Return the metric that `METRIC-by-MB` shows, in a list; [] if no metric has a curve."""
        return [self.judge] if self.judge in self.curves else self.curves[:1]

    def transient(
        self, against: str = "parallel", y: str = "loss", within: float = 2.0
    ) -> list[dict[str, Any]]:
        """Return, for each point, the step from which its curve stays near a reference curve.

        Both curves are means of a metric over seeds. In each row, "transient" is this step, or inf
        if the curve never stays near the reference. "iid" and "non_iid" are the theoretical
        estimates n³/(1−ρ)² and n³/(1−ρ)⁴ for the graph of the point; a point whose runs all
        diverged lacks them.

        :param against: label of the reference. If several references have the same number of nodes
            as the point, the reference that shares most labels with the point is used
        :param y: metric for which smaller values are better; names such as "local_loss" are metrics
            of the nodes' own models
        :param within: largest ratio of the curve to the reference from this step on
        :return: a row for each point that is not a reference
        :raises JobError: if there is no reference for some number of nodes, if it was evaluated at
            other steps, or if the evaluations do not have the metric ``y``
        """
        from mpigossip.studies.theory import transients

        return transients(self, against, y, within)


def study(
    job: str | Path,
    grid: Mapping[str, Axis] | None = None,
    *,
    nodes: int | Sequence[int] = 8,
    seeds: int | Sequence[int] = 3,
    rates: Sequence[float] | Literal["search", "fine"] | None = None,
    settings: Sequence[str] = (),
    judge: str | None = None,
    larger: bool | None = None,
    output: str | Path | None = None,
    processes: int | None = None,
    skip: bool = False,
    partial: bool = False,
) -> Study:
    """Simulate each point of a grid with each seed, and return the results.

    Runs that exist already are not repeated. If a study was killed, or is called again with more
    points or seeds, only the missing runs are simulated; the results are bitwise identical to the
    results of an uninterrupted study. A run whose loss becomes NaN or infinite is a result, too,
    and is called "diverged".

    :param job: path of a job file, or name of an example, such as "digits"
    :param grid: axes of the grid, by name. If the name is a setting, the axis is a list of its
        values (``{"graph.name": ["ring", "base-2"]}``). If the name is any other, the axis is a
        dict of labels, each with the settings that it stands for (``{"method": {"QG":
        "algorithm.name=qg-dmsgd algorithm.beta=0.9"}}``). None: no axes
    :param nodes: number of nodes, or several numbers, which form another axis
    :param seeds: number of seeds, counted from 0, or a list of seeds. `run.seed` determines the
        partition of the samples (unless `data.partition = "sorted"`), the initial parameters, the
        order of the samples and random graphs
    :param rates: None: use `schedule.lr` of the job. A list: each point uses the rate that is best
        by ``judge`` in a run with another seed, which is not reported. Rates that diverged are used
        only if all rates diverged. A list with a single rate: all points use it. "search": try ¼,
        ½, 1, 2 and 4 times the rate of the job; while the best rate is the smallest or the largest,
        try half or twice this rate, at most 3 times. "fine": then also try the geometric means of
        the best rate and its neighbours
    :param settings: settings of all runs: ``["run.epochs=5"]``
    :param judge: metric by which points are compared: a metric of the task, or "loss", of the
        averaged model at the end, or "train_loss", the training loss in the last twentieth of the
        steps. None: the first metric of the task, or "loss" for a custom task
    :param larger: whether larger values of ``judge`` are better; None: true for accuracies, and
        false for other metrics
    :param output: folder of all logs; None: runs/study-JOB
    :param processes: number of simultaneous runs; None: one for each core that this process may
        use; 0: no run is started
    :param skip: whether to leave out points whose settings cannot be combined; if false, such
        points raise JobError
    :param partial: whether to return the results of the complete runs without starting others. The
        result lacks points and seeds without a complete run; the table has a note on each point
        of which some seeds are not complete
    :raises JobError: if the grid or another argument is not valid, or if another study runs in the
        same folder
    :raises Failure: if a run ends with an error; if a run is missing and ``processes`` is 0; or if,
        with ``partial``, no run or not every run of a search of rates is complete
    """
    if isinstance(settings, str):
        raise JobError(f"settings = {settings!r}: must be a list, such as [{settings!r}]")
    path = Path(job)
    cells, left_out = cells_of(path, grid or {}, _listed("nodes", nodes), settings, skip)
    folder = Path("runs") / f"study-{path.stem}"
    if output is not None:
        # The runs expand ~ in run.output in the same way.
        folder = Path(os.path.expanduser(output))  # noqa: PTH111
    runner = Runner(path, folder, 0 if partial else processes)
    numbers = _listed("seeds", range(seeds) if isinstance(seeds, Integral) else seeds)
    rate_of, tried = chosen(cells, rates, judge, runner, larger, len(numbers))
    keys = [(cell, rate_of[cell], seed) for cell in cells for seed in numbers]
    if partial:
        results = runner.complete(keys)
        if not results:
            raise Failure(f"{folder}: none of {len(keys)} runs is complete: start the study first")
        cells = [cell for cell in cells if any(key[0] == cell for key in results)]
        numbers = [seed for seed in numbers if any(key[2] == seed for key in results)]
        absent = RunResult(None, missing=True)
        keys = [(cell, rate_of[cell], seed) for cell in cells for seed in numbers]
        results = {key: results.get(key, absent) for key in keys}
    else:
        results = runner.fill(keys)
    return Study(cells, rate_of, numbers, results, judge, tried, left_out, folder, larger)


def _listed(name: str, value: Any) -> list[int]:
    """Return a number, or the different numbers of a sequence, as a list.

    :param name: name of the argument, for messages
    :param value: the argument
    :raises JobError: if there is no number, or a value is not a whole number
    """
    try:
        numbers = list(dict.fromkeys(map(index, [value] if isinstance(value, Integral) else value)))
    except TypeError:
        raise JobError(
            f"{name} = {value!r}: needs a whole number or a list of whole numbers"
        ) from None
    if not numbers:
        raise JobError(f"{name} = []: must contain at least one number")
    return numbers
