"""Choice of the learning rate of each point, by additional runs with another seed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpigossip.config import JobError
from mpigossip.config.readable import pluralize
from mpigossip.runs.summary import metrics_of
from mpigossip.studies.grid import Cell
from mpigossip.studies.running import DERIVED, Key, Runner, RunResult
from mpigossip.training import assemble

SEED = 1000
"""Seed of the runs by which learning rates are chosen; results of these runs are not reported."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Learning rates that a search tries first, as multiples of the rate of the job."""
FURTHER = 3
"""Largest number of rates that a search adds because the best rate is the smallest or largest."""


@dataclass(frozen=True)
class Trial:
    """Learning rate that was tried for a point, and its result."""

    rate: float
    """Learning rate."""
    judged: float
    """Final value of the metric by which rates are compared; NaN if the loss became NaN or
    infinite."""
    late: bool = False
    """True if the training loss rose again by over half of its decrease."""
    cell: Cell | None = None
    """Point of the grid; None outside of a study."""

    @property
    def lost(self) -> bool:
        """True if the run diverged: its loss became NaN or infinite, or rose again late."""
        return self.late or not math.isfinite(self.judged)


def chosen(
    cells: Sequence[Cell],
    rates: Sequence[float] | str | None,
    judge: str | None,
    runner: Runner,
    larger: bool | None = None,
    seeds: int = 0,
) -> tuple[dict[Cell, float | None], list[Trial]]:
    """Choose the learning rate of each point.

    If ``rates`` contains a single rate, it is chosen without a run.

    :param cells: points of the grid
    :param rates: rates to try, "search" or "fine"; None: the rate of the job is used
    :param judge: metric by which rates are compared; None: see :func:`figure_of`
    :param runner: runner of the study
    :param larger: whether larger values of ``judge`` are better; None: true for accuracies, and
        false for other metrics
    :param seeds: number of seeds of the runs that follow, for the message on missing runs
    :return: rate of each point (None: the rate of the job); and all rates that were tried
    :raises JobError: if ``rates`` or ``judge`` is not valid
    :raises Failure: if a run fails
    """
    if rates is None:
        return dict.fromkeys(cells), []
    if not isinstance(rates, str):
        rates = np.ravel(rates).tolist()
    if isinstance(rates, str) and rates in SEARCHES:
        rate_of_job = {cell: assemble.load(runner.job, cell.settings).schedule.lr for cell in cells}
        candidates = {cell: [rate_of_job[cell] * factor for factor in FACTORS] for cell in cells}
    elif not rates or not all(isinstance(rate, int | float) and rate > 0 for rate in rates):
        raise JobError(f'rates = {rates!r}: must be learning rates above 0, "search" or "fine"')
    elif len({*rates}) == 1:
        # With a single rate, there is nothing to choose.
        return dict.fromkeys(cells, float(rates[0])), []
    else:
        candidates = {cell: sorted({float(rate) for rate in rates}) for cell in cells}
    results: dict[Key, RunResult] = {}
    for further in [*SEARCHES.get(rates, []), None] if isinstance(rates, str) else [None]:
        keys = [(cell, rate, SEED) for cell in cells for rate in candidates[cell]]
        about = _about(cells, rates, seeds)
        results |= runner.fill([key for key in keys if key not in results], about)
        name = figure_of(results.values(), judge)
        tried = [
            Trial(rate, run.last(name), run.late, cell) for (cell, rate, _), run in results.items()
        ]
        tried_of = {cell: [trial for trial in tried if trial.cell == cell] for cell in cells}
        wanted = larger_is_better(name, larger)
        best = {cell: best_rate(trials, wanted) for cell, trials in tried_of.items()}
        if further:
            more = {cell: further(best[cell], candidates[cell]) for cell in cells}
            candidates = {cell: sorted([*candidates[cell], *more[cell]]) for cell in cells}
    return dict(best), tried


def _about(cells: Sequence[Cell], rates: Sequence[float] | str, seeds: int) -> str:
    """Return a text on the runs of a search, and on the runs that follow it.

    :param cells: points of the grid
    :param rates: rates to try, or the name of a search
    :param seeds: number of seeds of the runs that follow
    """
    later = len(cells) * seeds
    further = ""
    if isinstance(rates, str):
        further = f", up to {FURTHER} further rates for each point"
    return (
        f" of the search of rates (seed {SEED}{further}); afterwards, {later} runs with the "
        f"chosen rates ({pluralize(len(cells), 'point')} x {pluralize(seeds, 'seed')})"
    )


def figure_of(results: Iterable[RunResult], judge: str | None) -> str:
    """Return the metric by which points are compared.

    It is ``judge``. If ``judge`` is None, it is the first metric of the task for which it is known
    whether larger or smaller values are better. Without such a metric, or without a log, it is
    "loss".

    :param results: results of the runs
    :param judge: the requested metric; None: choose it
    :raises JobError: if the runs do not have the metric ``judge``
    """
    log = next((result.log for result in results if result.log is not None), None)
    if log is None:
        return judge or "loss"
    metrics = metrics_of(log.summary)
    if judge is not None and judge not in {*log.summary, *DERIVED}:
        choices = ", ".join(dict.fromkeys([*metrics, "loss", *DERIVED]))
        raise JobError(f'judge = "{judge}": the runs have no such metric; choose one of {choices}')
    return judge or next(filter(_directed, metrics), "loss")


def _directed(name: str) -> bool:
    """Return whether it is known for a metric, by its name, if larger or smaller is better."""
    return "accuracy" in name or name in {"gradient_square", "distance_square"}


def larger_is_better(name: str, larger: bool | None = None) -> bool:
    """Return whether larger values of a metric are better.

    :param name: name of the metric
    :param larger: the user's answer, which is returned; None: return true for accuracies only
    """
    return "accuracy" in name if larger is None else larger


def best_rate(tried: Sequence[Trial], larger: bool) -> float:
    """Return the learning rate with the best result; if several are equal, the smallest of them.

    Rates whose runs diverged late count only if the runs of all other rates diverged, too. If the
    losses of all runs became NaN or infinite, the smallest rate is returned.

    :param tried: rates that were tried, at least one
    :param larger: whether larger values are better
    """
    sign = -1 if larger else 1
    ended = [trial for trial in tried if math.isfinite(trial.judged)]
    candidates = [trial for trial in ended if not trial.lost] or ended
    if not candidates:
        return min(trial.rate for trial in tried)
    return min(candidates, key=lambda trial: (sign * trial.judged, trial.rate)).rate


def further_rates(best: float, candidates: Sequence[float]) -> list[float]:
    """Return half the best rate if it is the smallest one, and twice if it is the largest.

    The result is [] if the best rate is neither.

    :param best: the best rate
    :param candidates: all rates that were tried
    """
    return [best / 2] * (best == min(candidates)) + [best * 2] * (best == max(candidates))


def _between(best: float, candidates: Sequence[float]) -> list[float]:
    """Return the geometric means of the best rate and its neighbours, with three digits.

    :param best: the best rate
    :param candidates: all rates that were tried, in ascending order
    """
    index = candidates.index(best)
    neighbours = [*candidates[max(0, index - 1) : index], *candidates[index + 1 : index + 2]]
    return [float(f"{math.sqrt(best * rate):.3g}") for rate in neighbours]


SEARCHES = {
    "search": [further_rates] * FURTHER,
    "fine": [*[further_rates] * FURTHER, _between],
}
"""Functions that return further rates to try, in the order of their use, for each search."""
