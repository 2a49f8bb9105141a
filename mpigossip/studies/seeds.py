"""Means and confidence intervals over runs that differ only in their seeds."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpigossip.store.log import Log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN = ("run.seed", "run.output", "run.name")
"""Settings in which runs may differ that are averaged as runs of one job with several seeds."""
LEVEL = 0.95
"""Confidence level of the intervals, which are computed by Student's t over the seeds."""
NAME_LENGTH = 36
"""Largest number of characters of a name."""
CURVES = 10
"""Largest number of curves in a panel."""


class Band(NamedTuple):
    """Mean over seeds at each evaluation, and ends of its interval, which are NaN for one seed."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def draw(self, axes: Axes, positions: np.ndarray, colour: str, alpha: float = 1.0) -> None:
        """Fill the area of the interval in a plot; if there is no interval, draw nothing."""
        if np.isfinite(self.low).any():
            axes.fill_between(positions, self.low, self.high, color=colour, alpha=alpha, lw=0)


Bands = Mapping[str, Band]
"""Band of each metric, by its name."""


def interval(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over seeds, and half the width of its confidence interval.

    :param values: array of shape (seeds, …)
    :return: two arrays of shape (…): the mean, which is NaN without seeds, and half the width of
        the interval by Student's t, which is NaN for fewer than two seeds
    """
    from scipy import stats

    values = np.asarray(values, float)
    count = len(values)
    unknown = np.full(values.shape[1:], np.nan)
    if count < 2:
        return (values[0] if count else unknown), unknown
    half = stats.t.ppf((1 + LEVEL) / 2, count - 1) * values.std(0, ddof=1) / count**0.5
    return values.mean(0), half


def confidence_band(metric: str, values: Any) -> Band:
    """Return the band of a metric.

    Intervals by Student's t are not bounded. The interval of an accuracy is therefore clipped to
    [0, 1]. If the interval of another metric, whose means are positive, would reach 0 at some
    evaluation, its lower end is replaced by mean² / upper end at all evaluations.

    :param metric: name of the metric
    :param values: array of shape (seeds, evaluations)
    """
    mean, half = interval(values)
    low = mean - half
    high = mean + half
    if "accuracy" in metric:
        low = np.clip(low, 0, 1)
        high = np.clip(high, 0, 1)
    elif (mean > 0).all() and (low <= 0).any():
        low = mean**2 / high
    return Band(mean, low, high)


def many_to_one(values: np.ndarray) -> np.ndarray:
    """Compare each row of ``values`` with the first row by Dunnett's two-sided test.

    Values of the same seed are compared with each other, because these runs have the same initial
    parameters. For two points, this is the paired t-test.

    :param values: array of shape (points, seeds)
    :return: p-value of each row except the first, (points − 1,); NaN if there are fewer than two
        seeds
    """
    from scipy import stats

    others = len(values) - 1
    seeds = values.shape[1]
    if seeds < 2:
        return np.full(others, np.nan)
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    free = others * (seeds - 1)
    difference = np.abs(values[1:].mean(1) - values[0].mean())
    error = np.sqrt(2 * (rest**2).sum() / free / seeds)
    t = np.divide(difference, error, out=np.where(difference > 0, np.inf, 0.0), where=error > 0)
    # Integrate P(all |T| ≤ t), T = (Z_k − Z_0) / (√2 S), over Z_0 by Gauss-Hermite quadrature and
    # over S by quantiles.
    z, weights = np.polynomial.hermite_e.hermegauss(64)
    s = np.sqrt(stats.chi2.ppf((np.arange(200) + 0.5) / 200, free) / free)
    reach = np.sqrt(2) * t[:, None, None] * s[:, None]
    within = (stats.norm.cdf(z + reach) - stats.norm.cdf(z - reach)) ** others
    return 1 - within.mean(1) @ weights / weights.sum()


def settings(job: str) -> dict[str, Any]:
    """Return the settings of a job by "section.key", from its TOML; {} if it is not valid TOML."""
    try:
        return {
            f"{section}.{key}": value
            for section, values in tomllib.loads(job).items()
            for key, value in values.items()
        }
    except (ValueError, AttributeError):
        return {}


def alike(logs: Sequence[Log]) -> list[list[int]]:
    """Group logs that differ only in their seeds and have the same nodes, steps and columns.

    A log without valid settings, or with the seed of another log in the group, is a group of its
    own.

    :param logs: logs of runs
    :return: indices of the logs of each group
    """
    groups: dict[Any, list[int]] = {}
    for k, log in enumerate(logs):
        job_settings = settings(log.job)
        seed = job_settings.get("run.seed")
        rest = repr(sorted((key, v) for key, v in job_settings.items() if key not in OWN))
        shape = [log.nodes, log.steps["step"].tobytes(), log.evaluations["step"].tobytes()]
        columns = [sorted(log.steps), sorted(log.evaluations)]
        key = (rest, repr(shape), repr(columns)) if job_settings else (k,)
        members = groups.setdefault(key, [])
        if any(settings(logs[other].job).get("run.seed") == seed for other in members):
            # A log with the same seed is from the same run, or from a repetition of it.
            groups[key, k] = [k]
        else:
            members.append(k)
    return sorted(groups.values())


def joined(logs: Sequence[Log]) -> tuple[Log, Bands]:
    """Join the logs of one group of :func:`alike`, of runs that differ only in their seeds.

    :param logs: the logs, at least one
    :return: a log with the nodes of all seeds as columns, and the band of each metric that does not
        have a value for each node. The evaluations of these metrics, and the numbers in the
        summary, are means over seeds
    """
    first = logs[0]
    steps = {"step": first.steps["step"]}
    for name in first.steps.keys() - {"step"}:
        steps[name] = np.concatenate([log.steps[name] for log in logs], axis=1)
    evaluations = {"step": first.evaluations["step"]}
    bands = {}
    for name in first.evaluations.keys() - {"step"}:
        values = [log.evaluations[name] for log in logs]
        if values[0].ndim == 1:
            bands[name] = confidence_band(name, values)
            evaluations[name] = bands[name].mean
        else:
            evaluations[name] = np.concatenate(values, axis=1)
    shared = set.intersection(*(set(log.summary) for log in logs))
    summary: dict[str, Any] = {}
    for key in shared:
        values = [log.summary[key] for log in logs]
        # Equal values keep their type, such as int.
        if isinstance(values[0], (int, float)):
            summary[key] = values[0] if len(set(values)) == 1 else np.mean(values).item()
    return replace(first, steps=steps, evaluations=evaluations, summary=summary), bands


def _different_settings(logs: Sequence[Log]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the settings of each run, and the names of the settings in which the runs differ."""
    settings_of = [settings(log.job) | {"nodes": log.nodes} for log in logs]
    keys = dict.fromkeys(key for values in settings_of for key in values if key not in OWN)
    return settings_of, [
        key for key in keys if len({repr(values.get(key)) for values in settings_of}) > 1
    ]


def parted(logs: Sequence[Log]) -> dict[str, list[int]]:
    """Divide logs into groups of at most `CURVES` logs, by a setting in which they differ.

    If several settings give such groups, the setting with the fewest groups is used. If no setting
    does, the logs are divided in their order.

    :param logs: logs of runs
    :return: indices of the logs of each group, by its title; {"": all indices} if there are at most
        `CURVES` logs
    """
    count = len(logs)
    if count <= CURVES:
        return {"": list(range(count))}
    settings_of, keys = _different_settings(logs)
    divisions: list[dict[str, list[int]]] = []
    for key in keys:
        parts: dict[str, list[int]] = {}
        for k, values in enumerate(settings_of):
            parts.setdefault(f"{key} = {values.get(key, 'unset')}", []).append(k)
        if max(map(len, parts.values())) <= CURVES:
            divisions.append(parts)
    if divisions:
        return min(divisions, key=len)
    cuts = [list(range(count))[first : first + CURVES] for first in range(0, count, CURVES)]
    return {f"runs {cut[0] + 1} to {cut[-1] + 1}": cut for cut in cuts}


def differences(logs: Sequence[Log]) -> list[str]:
    """Return a name for each run, by the settings in which runs differ.

    A name consists of the values of settings that are names, such as "graph.name". If these names
    are not unique, "key=value" is added for the other settings. A name is cut to `NAME_LENGTH`
    characters, and may then equal another one.
    """
    settings_of, keys = _different_settings(logs)
    names, others = ([k for k in keys if k.endswith(".name") is named] for named in (True, False))

    def format_name(values: Mapping[str, Any], more: Sequence[str]) -> str:
        words = [str(values[key]) for key in names if key in values]
        words += [f"{key.rpartition('.')[2]}={values[key]}" for key in more if key in values]
        name = ", ".join(words)
        return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"

    short = [format_name(values, []) for values in settings_of]
    return (
        short
        if len(set(short)) == len(short)
        else [format_name(values, others) for values in settings_of]
    )
