"""Verdicts on claims by differences between runs with equal seeds; Holm's procedure for a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from stored import Line

LEVEL = 0.05
"""Largest probability with which a verdict of a table may be wrong."""
PAIRS = 5
"""Smallest number of pairs of seeds for a verdict."""
VERDICTS = {None: "cannot tell", True: "holds", False: "**does not hold**"}
"""Verdicts in the form of the pages, by whether a claim holds; None: this cannot be decided."""


class Difference(NamedTuple):
    """Differences between two methods with equal seeds: mean, standard error, number of pairs."""

    mean: float
    error: float
    pairs: int

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval."""
        return float(stats.t.ppf(1 - LEVEL / 2, self.pairs - 1) * self.error)

    def beyond(self, bar: float) -> float:
        """Return twice the p-value of the hypothesis that the true mean is at most ``bar``.

        It is at most 5 % if the 95 % interval lies above ``bar``.
        """
        if not self.error:
            return 0.0 if self.mean > bar else 1.0
        p = 2 * stats.t.sf((self.mean - bar) / self.error, self.pairs - 1)
        return float(min(1.0, p))

    def below(self, bar: float) -> float:
        """Return twice the p-value of the hypothesis that the true mean is at least ``bar``.

        It is at most 5 % if the 95 % interval lies below ``bar``.
        """
        return Difference(-self.mean, self.error, self.pairs).beyond(-bar)


class Verdict(NamedTuple):
    """Verdict on a row of a table, with its p-value.

    ``p`` is the p-value of the row alone, and ``adjusted`` the p-value after Holm's procedure for
    the whole table. ``holds`` says whether the claim holds according to ``p``; None: this can't be
    decided.
    """

    claim: str
    holds: bool | None
    p: float
    adjusted: float = 1.0

    @property
    def words(self) -> str:
        """The verdict in the form of the page, after Holm's procedure."""
        name = VERDICTS[self.holds]
        if self.holds is None or self.adjusted <= LEVEL:
            return name
        return f"cannot tell (alone: {name.strip('*')})"


def of_values(values: Sequence[float]) -> Difference:
    """Return the mean of differences and its standard error.

    The error is NaN if there is only one seed; both are NaN if there is none.

    :param values: one difference per seed
    """
    if len(values) < 2:
        return Difference(values[0] if len(values) else math.nan, math.nan, len(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Difference(float(np.mean(values)), error, len(values))


def of_interval(line: Line) -> Difference:
    """Return the difference whose 95 % interval is stored in a line of intervals.jsonl."""
    half = (line["high"] - line["low"]) / 2
    quantile = float(stats.t.ppf(1 - LEVEL / 2, line["pairs"] - 1))
    return Difference(line["mean"], half / quantile, line["pairs"])


def judge(
    claim: str,
    differences: Sequence[Difference],
    by: float = 0.0,
    alike: float | None = None,
) -> Verdict:
    """Judge a row: all of its differences have to confirm it, and one is enough to refute it.

    The p-value of a confirmation is the largest of all differences. The p-value of a refutation is
    the smallest, times the number of differences. A row with fewer than `PAIRS` pairs of seeds
    can't be decided.

    :param claim: the claim, for the table
    :param differences: its differences
    :param by: smallest difference that confirms the claim
    :param alike: largest absolute difference that confirms the claim; None: use ``by`` instead
    :return: the verdict, not yet adjusted for the other rows of its table
    """
    if any(difference.pairs < PAIRS for difference in differences):
        return Verdict(claim, None, 1.0)
    if alike is None:
        shown = [difference.beyond(by) for difference in differences]
        against = [difference.below(by) for difference in differences]
    else:
        shown = [
            max(difference.beyond(-alike), difference.below(alike)) for difference in differences
        ]
        against = [
            min(difference.beyond(alike), difference.below(-alike)) for difference in differences
        ]
    yes = max(shown)
    no = min(against)
    if no <= LEVEL:
        return Verdict(claim, False, min(1.0, len(differences) * no))
    return Verdict(claim, True if yes <= LEVEL else None, min(1.0, yes))


def holm(rows: Sequence[Verdict]) -> list[Verdict]:
    """Return the rows with p-values that are adjusted by Holm's procedure for a whole table."""
    order = sorted(range(len(rows)), key=lambda k: rows[k].p)
    largest_p = 0.0
    adjusted = list(rows)
    for rank, k in enumerate(order):
        largest_p = max(largest_p, min(1.0, (len(rows) - rank) * rows[k].p))
        adjusted[k] = rows[k]._replace(adjusted=largest_p)
    return adjusted


def format_interval(difference: Difference, form: str = ".2f") -> str:
    """Return the mean of a difference and its 95 % interval as text, "mean [low, high]".

    :param difference: difference of two methods, over seeds
    :param form: format of the three numbers
    """
    mean, half = difference.mean, difference.half
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"
