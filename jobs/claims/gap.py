"""Tables on the gap in accuracy between the one-peer graph and parallel SGD, and on its remedies.

python jobs/claims/verdicts.py --write    # puts the three tables into RESULTS.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from designs import (
    AT_PARALLELS,
    CONTROLS,
    PAIR,
    REMEDIED,
    REMEDIES,
    SEEDS,
    STUDIES,
    Cell,
    best_rate,
    pair_rates,
    reported_runs,
    search_runs,
    searched_rates,
)
from judging import LEVEL, Verdict, format_interval, holm, judge, of_values
from stored import Line, finals

SMALL = 0.3
"""A gap in accuracy, in percentage points, that counts as small. The rule of thumb gives the
consensus distance below which the gap is smaller."""


class Gap(NamedTuple):
    """Row of a table: difference in accuracy between parallel SGD and the one-peer graph."""

    title: str
    lr: tuple[float, float]
    """Learning rates of parallel SGD and of the one-peer graph."""
    accuracy: tuple[float, float]
    """Mean accuracies of parallel SGD and of the one-peer graph, in percent."""
    values: list[float]
    """Gap in percentage points, for each seed."""
    distance: list[float]
    """Root mean square of ‖x_i − x̄‖ / ‖x̄‖ over nodes and steps, for each seed."""


def behind(title: str, first: dict[int, Line], second: dict[int, Line]) -> Gap | None:
    """Return the row for the runs of both methods; None if a run is missing or has diverged.

    :param title: text of the row's first column
    :param first: runs of parallel SGD by seed
    :param second: runs of the one-peer graph by seed
    """
    both = [(first[s], second[s]) for s in SEEDS if s in first and s in second]
    if len(both) < len(SEEDS) or not all(a["figures"] and b["figures"] for a, b in both):
        return None
    ends = [[r["figures"]["accuracy"] for r in side] for side in zip(*both, strict=True)]
    return Gap(
        title,
        (both[0][0]["lr"], both[0][1]["lr"]),
        (100 * float(np.mean(ends[0])), 100 * float(np.mean(ends[1]))),
        [100 * (a - b) for a, b in zip(*ends, strict=True)],
        [b["figures"]["distance"] for _, b in both],
    )


def pairs() -> list[Cell]:
    """Return the cells that compare parallel SGD with the one-peer graph."""
    return [cell for cell in STUDIES["gap"]() if "of" not in cell.labels]


def title(cell: Cell, tail: str) -> str:
    """Return the text of a row's first column: model, number of nodes, batch, and ``tail``."""
    labels = cell.labels
    return f"{labels['model']}, n = {cell.nodes}, batch {labels['batch']}, {tail}"


def gaps(runs: Sequence[Line]) -> list[Gap]:
    """Return the finished rows in which each method has its best learning rate, or a part of it."""
    rows = (
        behind(
            title(cell, f"{level} rate"),
            *(finals(runs, cell, method, level) for method in ("parallel", "one-peer")),
        )
        for cell in pairs()
        for level in cell.levels
    )
    return [row for row in rows if row]


def equals(runs: Sequence[Line]) -> list[Gap]:
    """Return the rows at equal learning rates.

    There is a row for each cell of `pairs` and each rate at which both methods were run with all
    seeds, in this cell or in others with the same model, batch and number of nodes. Rows with a
    diverged run are left out.
    """
    rows = []
    for cell in pairs():
        rates = {r["lr"] for r in runs if r["study"] == "gap" and r["level"] != "search"}
        for lr in sorted(rates, reverse=True):
            both = (reported_runs(runs, cell.nodes, cell.labels, m, lr) for m in PAIR)
            rows.append(behind(title(cell, f"rate {lr:g}"), *both))
    return [row for row in rows if row]


def verdicts(rows: Sequence[Gap]) -> list[Verdict]:
    """Judge for each row whether the gap is within one percentage point, in either direction."""
    return holm([judge(gap.title, [of_values(gap.values)], alike=1.0) for gap in rows])


class Slope(NamedTuple):
    """Percentage points of gap for each 1 % of relative consensus distance, with 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} points [{self.low:.2f}, {self.high:.2f}]"


def regression(rows: Sequence[Gap], draws: int = 2000) -> Slope | None:
    """Fit a line through 0 to gap and consensus distance by least squares.

    The interval of its slope is found by a bootstrap over rows.

    :param rows: rows of the table
    :param draws: number of bootstrap samples
    :return: the slope; None if there are fewer than six rows
    """
    if len(rows) < 6:
        return None
    a, b = (
        np.array([np.mean(v) for v in side])
        for side in zip(*((100 * np.array(gap.distance), gap.values) for gap in rows), strict=True)
    )
    drawn = np.random.default_rng(0).integers(0, len(a), (draws, len(a)))
    slopes = (a * b)[drawn].sum(1) / (a * a)[drawn].sum(1)
    low, high = np.quantile(slopes, [LEVEL / 2, 1 - LEVEL / 2])
    return Slope(float((a * b).sum() / (a * a).sum()), float(low), float(high))


def rule(rows: Sequence[Gap]) -> str:
    """Return the rule of thumb from rows at equal rates, or the reason why there is none.

    The rule is that the gap is less than 0.3 points if the consensus distance is less than
    c = 0.3 / slope. The interval of c follows from the interval of the slope. The rule is stated
    only if the interval of the slope is above 0, and if no row with a smaller distance contradicts
    it.
    """
    slope = regression(rows)
    if slope is None:
        return f"{len(rows)} rows at equal rates are too few for a rule of thumb."
    text = f"At equal rates the gap is {slope} for each 1 % of distance ({len(rows)} rows). "
    if slope.low <= 0:
        return text + "The interval includes 0 or less: no rule of thumb follows."
    c, low, high = (SMALL / s for s in (slope.mean, slope.high, slope.low))
    near = [gap for gap in rows if 100 * np.mean(gap.distance) < c]
    against = [gap.title for gap in near if of_values(gap.values).beyond(SMALL) <= LEVEL]
    if against:
        return text + f"No rule of thumb follows; against it: {'; '.join(against)}."
    return text + (
        f"Rule of thumb: below a distance of {c:.2f} % [{low:.2f}, {high:.2f}] the gap "
        f"is less than {SMALL} points."
    )


def _rows(rows: Sequence[Gap], rates: bool) -> list[str]:
    """Return a table of gaps as lines of Markdown.

    :param rows: rows of the table
    :param rates: whether the table has a column with the learning rates
    """
    lines = [
        f"| cell |{' rates |' * rates} parallel, one-peer | gap, points | distance "
        "| within 1 point |",
        "|---|---|---|---|---|" + "---|" * rates,
    ]
    for gap, verdict in zip(rows, verdicts(rows), strict=True):
        lr = f" {gap.lr[0]:g}, {gap.lr[1]:g} |" * rates
        lines.append(
            f"| {gap.title} |{lr} {gap.accuracy[0]:.1f}, {gap.accuracy[1]:.1f} % | "
            f"{format_interval(of_values(gap.values))} | {100 * np.mean(gap.distance):.2f} % | "
            f"{verdict.words} |"
        )
    return lines


def page(runs: Sequence[Line]) -> str:
    """Return the table with each method's own learning rates, in Markdown."""
    rows = gaps(runs)
    total = sum(len(cell.levels) for cell in pairs())
    count = sum(run["study"] == "gap" for run in runs)
    last = f"{len(rows)} of {total} cells are finished, {count} runs stored."
    if slope := regression(rows):
        last += f" Over all of them the gap is {slope} for each 1 % of distance."
    return "\n".join([*_rows(rows, True), "", last]) + "\n"


def equal_page(runs: Sequence[Line]) -> str:
    """Return the table at equal learning rates, and the rule of thumb, in Markdown."""
    rows = equals(runs)
    return "\n".join([*_rows(rows, False), "", rule(rows)]) + "\n"


# -- remedies ------------------------------------------------------------------------------------


class Remedy(NamedTuple):
    """Row of a remedy or control, at 16 nodes with batches of 16 samples."""

    method: str
    where: str
    """Learning rate: the method's own best one, or parallel's."""
    lr: float
    accuracy: float
    """Mean accuracy of the method over the seeds, in percent."""
    base: str
    """Method with which it is compared: "one-peer", or "parallel" for the EMA of parallel SGD."""
    ahead: list[float]
    """Accuracy of this method minus the accuracy of ``base``, in percentage points, by seed."""
    behind: list[float]
    """Accuracy of parallel SGD minus the accuracy of this method, in percentage points, by seed."""
    sent: float
    """Bytes sent, as a multiple of the bytes that the one-peer graph sends."""


def remedies(runs: Sequence[Line]) -> list[Remedy]:
    """Return a row for each remedy and control whose runs are finished.

    Needed are its search, and the runs of all seeds of this method, of parallel SGD and of the
    one-peer graph. A row with a diverged run is left out.
    """
    cells = {cell.labels.get("of"): cell for cell in STUDIES["gap"]() if cell.nodes == 16}
    cell = cells[REMEDIED]
    best = pair_rates(runs, 16, cell.labels)
    if len(best) < len(PAIR):
        return []
    rows = []
    for where in (REMEDIED, AT_PARALLELS):
        rate = dict.fromkeys(PAIR, best["parallel"]) if where == AT_PARALLELS else best
        both = {m: reported_runs(runs, 16, cell.labels, m, rate[m]) for m in PAIR}
        for method in (*REMEDIES, *CONTROLS):
            lr = best["parallel"]
            if where == REMEDIED:
                trials = search_runs(cell, method, runs)
                if not all(rate in trials for rate in searched_rates(cell, method, runs)):
                    continue
                lr = best_rate([*trials.values()])
            remedied = reported_runs(runs, 16, cell.labels, method, lr)
            base = "parallel" if method.startswith("parallel") else "one-peer"
            compared = [remedied, both[base], both["parallel"], both["one-peer"]]
            if not all(
                s in by_seed and by_seed[s]["figures"] for by_seed in compared for s in SEEDS
            ):
                continue
            a, b, p = (
                [100 * by_seed[s]["figures"]["accuracy"] for s in SEEDS] for by_seed in compared[:3]
            )
            sent = (
                remedied[1]["figures"]["bytes_sent"] / both["one-peer"][1]["figures"]["bytes_sent"]
            )
            rows.append(
                Remedy(
                    method,
                    "own best rate" if where == REMEDIED else "parallel's rate",
                    remedied[1]["lr"],
                    float(np.mean(a)),
                    base,
                    _subtract(a, b),
                    _subtract(p, a),
                    sent,
                )
            )
    return rows


def _subtract(a: Iterable[float], b: Iterable[float]) -> list[float]:
    """Return the differences a − b of two equally long sequences."""
    return [x - y for x, y in zip(a, b, strict=True)]


def remedy_verdicts(rows: Sequence[Remedy]) -> list[Verdict]:
    """Judge for each remedy and control whether it is more accurate than its base.

    If the control "no exchange" were better, the remedies would prove nothing.
    """
    return holm(
        [judge(f"{x.method}, {x.where}: ahead of {x.base}", [of_values(x.ahead)]) for x in rows]
    )


def remedy_page(runs: Sequence[Line]) -> str:
    """Return the table of remedies, in Markdown."""
    rows = remedies(runs)
    lines = [
        "| remedy, rate | accuracy | ahead of one-peer, points | behind parallel | bytes | ahead |",
        "|---|---|---|---|---|---|",
    ]
    for x, verdict in zip(rows, remedy_verdicts(rows), strict=True):
        ahead = format_interval(of_values(x.ahead)) + (
            f" ({x.base})" if x.base != "one-peer" else ""
        )
        lines.append(
            f"| {x.method}, {x.where}, {x.lr:g} | {x.accuracy:.1f} % | {ahead} | "
            f"{format_interval(of_values(x.behind))} | {x.sent:.2f} | {verdict.words} |"
        )
    total = 2 * len(REMEDIES | CONTROLS)
    return "\n".join([*lines, "", f"{len(rows)} of {total} rows are finished."]) + "\n"
