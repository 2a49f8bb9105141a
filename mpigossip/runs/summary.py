"""Text of the summary of a run, and the formats of the numbers in it."""

import re
from typing import Any

import numpy as np

from mpigossip.config.readable import format_bytes, pluralize

SPLIT = {"compute_s": "compute", "node_s": "node", "exchange_s": "exchange", "idle_s": "idle"}
"""Parts of the time of a step: for each column of the log, the word in the summary."""


def metrics_of(summary: dict[str, Any]) -> list[str]:
    """Return the names of the task's metrics, as a summary lists them.

    Summaries of earlier versions contain no such list; their only metric is "accuracy".
    """
    return str(summary.get("metrics", "accuracy")).split()


def number(value: float) -> str:
    """Format a number for a column, with four decimals.

    If the absolute value is below 0.01 and not 0, or at least 10,000, the number gets three
    significant digits instead.
    """
    if 0.01 <= abs(value) < 1e4 or not value:
        return f"{value:.4f}"
    small = 1e-3 <= abs(value) < 0.01
    return f"{value:.3g}" if small else re.sub(r"e([+-])0", r"e\1", f"{value:.2e}")


def mean(values: Any) -> float:
    """Return the mean of the finite values of a number or an array; NaN if there are none."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    return float(finite.mean()) if finite.size else float("nan")


def _tested(summary: dict[str, Any]) -> str:
    names = [name for name in metrics_of(summary) if name in summary]
    metrics = [f"{name} {number(summary[name])}" for name in names]
    metrics += [f"test loss {number(summary['loss'])}"]
    head, *others = metrics
    first_name, _, value = head.rpartition(" ")
    return ", ".join([f"{first_name:<10} {value} (averaged model)", *others])


def describe(summary: dict[str, Any], who: str = "node") -> str:
    """Return the summary as text.

    :param summary: entries of the summary
    :param who: the word for a participant, "node" or "member"
    """
    state = "finished" if summary["finished"] else "stopped, to be resumed"
    epochs = f" ({summary['epochs']:.2f} epochs)" if "epochs" in summary else ""
    lines = [
        f"run        {state} at step {summary['steps']}{epochs}, "
        f"{pluralize(summary['nodes'], who)} x {pluralize(summary['slots'], 'slot')}"
    ]
    if "loss" in summary:
        lines.append(_tested(summary))
    if "figures" in summary:
        lines.append(f"metrics    {summary['figures']}")
    spent = {name: summary[key] for key, name in SPLIT.items() if key in summary}
    total = sum(spent.values())
    if total:
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in spent.items())
        lines.append(f"time       {summary['seconds']:.1f} s; steps {total:.1f} s: {shares}")
        if summary.get("samples_per_second"):
            speed = f"{summary['samples_per_second']:,.0f} samples/s over all {who}s"
            lines.append(f"speed      {speed}")
    if "lost" in summary:
        lines.append(f"failed     {summary['lost']}")
    if "warnings" in summary:
        lines.append(f"warnings   {summary['warnings']}")
    lines.append(f"sent       {format_bytes(summary['bytes_sent'])} per {who}")
    if "checkpoint" in summary:
        lines.append(f"checkpoint {summary['checkpoint']}")
        lines.append(f"digest     {summary.get('digest', 'not known')}")
    return "\n".join(lines)
