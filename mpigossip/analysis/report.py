"""What logs tell in words: a text table of one run, one page in HTML of one or several."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpigossip.analysis.aligned import aligned
from mpigossip.analysis.compared import PARTS, description, mean_ms, over_nodes, shares
from mpigossip.runs.summary import describe, number
from mpigossip.store.log import Log
from mpigossip.store.log_reading import metrics_in


def table(log: Log) -> str:
    """The evaluations, the time of a step and the summary as text."""
    found = log.evaluations
    unknown = np.full((len(found["step"]), 1), np.nan)
    metrics = metrics_in(found)
    first = (metrics or ["loss"])[0]
    local = found.get(f"local_{first}", unknown)
    apart = local - found.get(f"share_{first}", unknown)
    scale, form = (100, "{:+.1f} %") if first == "accuracy" else (1, "{:+.2g}")
    columns = {
        "step": [f"{step}" for step in found["step"]],
        "epoch": _cells(found.get("epoch"), "{:.2f}"),
        "loss": _cells(found.get("loss")),
        **{name: _cells(found.get(name)) for name in metrics[:1]},
        f"local {first}*": _ranges(local, number),
        "− averaged*": _ranges(scale * apart, form.format) if np.isfinite(apart).any() else [],
        **{name: _cells(found.get(name)) for name in metrics[1:]},
        "consensus distance": _cells(found.get("consensus_distance"), "{:.3e}"),
        "seconds": _cells(found.get("seconds"), "{:.1f}"),
    }
    lines = [description(log), ""]
    columns = {name: cells for name, cells in columns.items() if cells}
    rows = [columns, *zip(*columns.values(), strict=True)]
    lines += [aligned(rows, left=()) if columns else "no evaluation yet"]
    if log.nodes > 1 and np.isfinite(local).any():
        lines += [f"* of the nodes, each on its own 1/{log.nodes} of the test samples; beside the "
                  "averaged model's on the same samples"]  # fmt: skip
    lines += ["", _time_line(log)]
    if "finished" in log.summary:
        lines += ["", describe(log.summary)]
    elif log.summary:
        lines += ["", aligned(log.summary.items(), left=(0, 1))]
    return "\n".join(lines)


def _ranges(values: np.ndarray, form: Callable[[float], str]) -> list[str]:
    """Least and most over the nodes, one cell a row."""
    low, high = over_nodes(np.nanmin, values), over_nodes(np.nanmax, values)
    return [f"{form(a)} – {form(b)}" if a == a else "–" for a, b in zip(low, high, strict=True)]


def _time_line(log: Log) -> str:
    """Mean time of a step and its parts, in words."""
    total = sum(mean_ms(log, part) for part in PARTS)
    if not total:
        return "no steps yet"
    return f"a step takes {total:.3g} ms: {', '.join(shares(log, list(PARTS)))}"


def _cells(values: np.ndarray | None, form: str = "") -> list[str]:
    """Texts in a form, or as figures of any size."""
    if values is None:
        return []
    return [(form.format(v) if form else number(v)) if v == v else "–" for v in values]
