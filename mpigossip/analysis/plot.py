"""One picture of one or several runs: every figure that a log gives, each panel with its units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpigossip.analysis import panels
from mpigossip.analysis.axis import clock, steps
from mpigossip.analysis.compared import LoggedRun, description, load
from mpigossip.store.hdf5 import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIGH, LINE = 3.9, 0.21
"""Inches: of a row of panels, of a line of text."""


def plot(runs: Sequence[Path], out: Path) -> None:
    """Write one PNG of runs (folders or logs), told apart by colour, line and marker.

    Loss and accuracy against the step and against the time of training; consensus distance, what
    the nodes' own models differ by, time of a step, bytes sent, and where exchanges were
    asynchronous their staleness. Runs whose epochs differ in length are drawn against the epoch.
    """
    with replacing(out) as beside:
        figure(load([Path(run) for run in runs])).savefig(beside, format="png")


def figure(runs: Sequence[LoggedRun]) -> Figure:
    """The picture, not yet written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stale = any(panels.stale(run) for run in runs)
    rows = 4 + stale
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, rect=(0, 0, 0.99, 1))
    heights = [HIGH] * rows
    heights[3] = max(HIGH, 1 + LINE * len(runs))  # a bar and its name for each run
    names = LINE * -(-len(runs) // 2) if len(runs) > 3 else 0.0
    made = Figure(figsize=(12.4, sum(heights) + names), dpi=110, layout=layout)
    FigureCanvasAgg(made)  # needs no display, and leaves pyplot's global state alone
    grid = made.subplots(rows, 2, squeeze=False, height_ratios=heights)
    by_step, by_time = steps(runs), clock(runs)
    for draw, row in ((panels.loss, 0), (panels.accuracy, 1)):
        for axis, axes in zip((by_step, by_time), grid[row], strict=True):
            draw(axes, runs, axis)
            axis.dress(axes, runs)
    below = [(panels.consensus, grid[2, 0]), (panels.spread, grid[2, 1])]
    below += [(panels.traffic, grid[3, 1])] + [(panels.staleness, grid[-1, 0])] * stale
    if len(runs) == 1:
        below += [(panels.time, grid[3, 0])]
    else:
        panels.times(grid[3, 0], runs)
    for draw, axes in below:
        draw(axes, runs, by_step)
        by_step.dress(axes, runs)
    if stale:
        grid[-1, 1].set_axis_off()
    _name_runs(made, runs)
    return made


def _name_runs(made: Figure, runs: Sequence[LoggedRun]) -> None:
    """The title of one run, or the legend of several, each with its last accuracy."""
    labels = []
    for run in runs:
        accuracy = run.log.evaluations.get("accuracy", np.zeros(0))
        last = f"; test accuracy {accuracy[-1]:.4f}" if len(accuracy) else ""
        labels.append(f"{run.name}: {description(run.log)}{last}")
    if len(runs) == 1:
        made.suptitle(labels[0], fontsize=13)
        return
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], lw=2.2, ms=6, **run.style, label=label)
        for run, label in zip(runs, labels, strict=True)
    ]
    columns = 1 + (len(runs) > 3)
    made.legend(
        handles=lines, loc="outside upper left", handlelength=4.5, frameon=False, ncols=columns
    )
