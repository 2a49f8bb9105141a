"""Plot of one or several runs, which arranges the panels of `analysis.panels` in a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpigossip.analysis import panels
from mpigossip.analysis.logged_runs import (
    LoggedRun,
    description,
    drawable,
    load,
    of_members,
    time_note,
)
from mpigossip.runs.summary import number
from mpigossip.store.hdf5 import replacing
from mpigossip.studies.seeds import parted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

HIGH = 3.9
LINE = 0.21
"""Height, in inches, of a row of panels, and of a line of text."""


def plot(runs: Sequence[Path], out: Path) -> str:
    """Write a PNG file with one run, or one that compares runs.

    Each run has its own colour, line style and marker. Runs that differ only in their seed are
    drawn as one. The panels of one run show the loss and the task's metrics against steps, the
    consensus distance (for members, the times of their places), the time of a step and, for
    asynchronous exchanges, the staleness. The panels of several runs also show the loss and the
    metrics against training time, the difference between each node's model and the averaged model,
    and the bytes sent. If the epochs of the runs have different numbers of steps, epochs are used
    in place of steps. If all runs are simulated without a virtual clock, bytes are used in place of
    training time.

    :param runs: run directories or logs
    :param out: file to write
    :return: note on the times of simulated runs; "" if there are none
    :raises StoreError: if there is no log, if it can't be read, or if the file can't be written
    """
    drawn = load([Path(run) for run in runs])
    with replacing(out) as temporary:
        figure(drawn).savefig(temporary, format="png")
    return time_note(drawn)


def figure(runs: Sequence[LoggedRun]) -> Figure:
    """Return the figure that :func:`plot` writes.

    More than `CURVES` runs are divided into groups, with one set of panels below the other.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from mpigossip.studies.drawing import style

    if len(runs) == 1:
        return _training_curve(runs)
    parts = {
        title: [replace(runs[k], style=style(index)) for index, k in enumerate(chosen)]
        for title, chosen in parted([run.log for run in runs]).items()
    }
    heights = {title: _heights(part) for title, part in parts.items()}
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, rect=(0, 0, 0.99, 1))
    total_heights = [sum(each) + _names(parts[title]) for title, each in heights.items()]
    result = Figure(figsize=(12.4, sum(total_heights)), dpi=110, layout=layout)
    if len(parts) == 1:
        _draw(result, parts[""], "", heights[""])
        return result
    below: Any = result.subfigures(len(parts), 1, height_ratios=total_heights)
    for sub, (title, part) in zip(below, parts.items(), strict=True):
        _draw(sub, part, title, heights[title])
    return result


def _training_curve(runs: Sequence[LoggedRun]) -> Figure:
    """Return a figure of one run, whose panels are readable at a width of 800 pixels.

    :param runs: sequence that contains the run
    """
    from matplotlib.figure import Figure

    drawn: list[Callable] = [panels.loss]
    drawn += [partial(panels.metric, name=name) for name in runs[0].metrics]
    has_members = of_members(runs[0].log)  # Members don't measure the consensus distance.
    drawn += [panels.time] if has_members else [panels.consensus, panels.time]
    drawn += [panels.staleness] * panels.stale(runs[0])
    rows = -(-(len(drawn) + has_members) // 2)
    result = Figure(figsize=(10, 3.6 * rows + 0.4), dpi=130, layout="constrained")
    axis = panels.steps(runs)
    grid = result.subplots(rows, 2, squeeze=False).ravel()
    for draw, axes in zip(drawn, grid, strict=False):
        draw(axes, runs, axis)
        axis.dress(axes, runs)
        panels.key_below_title(axes)
    if has_members:
        panels.members(grid[len(drawn)], runs[0])
    for axes in grid[len(drawn) + has_members :]:
        axes.set_axis_off()
    _name_runs(result, runs, "")
    return result


def _heights(runs: Sequence[LoggedRun]) -> list[float]:
    """Return the height of each row of panels, in inches, from top to bottom.

    The panel with the time of a step has a bar for each run, so its row is higher if there are many
    runs.
    """
    metrics = {name for run in runs for name in run.metrics}
    bars = max(HIGH, 1 + LINE * len(runs))  # a bar and its name for each run
    return [HIGH] * (2 + len(metrics)) + [bars] + [HIGH] * any(map(panels.stale, runs))


def _names(runs: Sequence[LoggedRun]) -> float:
    """Return the additional height, in inches, of a legend with more than three names."""
    return LINE * -(-len(runs) // 2) if len(runs) > 3 else 0.0


def _draw(target: FigureBase, runs: Sequence[LoggedRun], title: str, heights: list[float]) -> None:
    """Draw all panels of a group of runs.

    :param target: figure, or part of it, into which the panels are drawn
    :param runs: runs of the group
    :param title: title of the group; "" if there is one group only
    :param heights: height of each row of panels in inches, from :func:`_heights`
    """
    stale = any(map(panels.stale, runs))
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    below = 1 + len(metrics)
    last = 2 + len(metrics)
    grid = target.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    by_step = panels.steps(runs)
    by_time = panels.clock(runs)
    tested = [partial(panels.metric, name=name) for name in metrics]
    both: list[Callable] = [panels.loss, *tested]
    for row, draw in enumerate(both):
        for axis, axes in zip((by_step, by_time), grid[row], strict=True):
            draw(axes, runs, axis)
            axis.dress(axes, runs)
    others: list[tuple[Callable, Axes]] = [
        (panels.consensus, grid[below, 0]),
        (panels.spread, grid[below, 1]),
    ]
    others += [(panels.traffic, grid[last, 1])] + [(panels.staleness, grid[-1, 0])] * stale
    panels.times(grid[last, 0], runs)
    for draw, axes in others:
        draw(axes, runs, by_step)
        by_step.dress(axes, runs)
    if stale:
        grid[-1, 1].set_axis_off()
    _name_runs(target, runs, title)


def _name_runs(target: FigureBase, runs: Sequence[LoggedRun], title: str) -> None:
    """Add a title if there is one run, or a legend if there are several.

    Each name is followed by a description of the run, unless it combines several seeds, and by the
    last test value of the task's first metric, if there is one.

    :param target: figure, or part of it
    :param runs: runs of the group
    :param title: title of the group; "" if there is one group only
    """
    labels = []
    for run in runs:
        values = [(name, run.log.evaluations.get(name)) for name in run.metrics[:1]]
        last = "".join(f"; test {n} {number(v[-1])}" for n, v in values if v is not None and len(v))
        what = "" if run.bands else f": {description(run.log)}"
        labels.append(drawable(f"{run.name}{what}{last}"))
    title = drawable(title)
    if len(runs) == 1:
        target.suptitle(f"{title}: {labels[0]}" if title else labels[0], fontsize=13)
        return
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], lw=2.2, ms=6, **run.style, label=label)
        for run, label in zip(runs, labels, strict=True)
    ]
    target.legend(
        handles=lines,
        loc="outside upper left",
        handlelength=4.5,
        frameon=False,
        ncols=1 + (len(runs) > 3),
        title=title or None,
        title_fontsize=13,
    )
