"""Plots of a study, with a curve and its confidence interval for each point of the grid."""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from mpigossip.config import JobError
from mpigossip.store.log import VIRTUAL
from mpigossip.studies.grid import Cell
from mpigossip.studies.results import Results
from mpigossip.studies.running import RunResult
from mpigossip.studies.seeds import LEVEL, confidence_band, settings
from mpigossip.studies.tables import lost
from mpigossip.studies.theory import draw_rates

# Colour-blind people can distinguish these colours, which are from Okabe and Ito. Lines and markers
# differ as well, for printing in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
MARKERS = "os^DvPX"
MAX_CURVES = 10
"""Largest number of curves in a panel."""
AXES = {"step": "step", "epoch": "epoch", "bytes": "MB sent per node", "time": "virtual seconds"}
"""Label of each horizontal axis, by the values of the parameter ``x`` of `Study.plot`."""
LABELS = {
    "loss": "test loss of the averaged model",
    "accuracy": "test accuracy of the averaged model",
    "train_loss": "training loss since the previous evaluation",
    "parallel": "parallel SGD", "dsgd": "D-PSGD", "dmsgd": "DmSGD", "qg-dmsgd": "QG-DmSGD",
    "dmsgd-vanilla": "vanilla DmSGD", "decentlam": "DecentLaM", "d2": "D²", "dsgt": "DSGT",
    "detag": "DeTAG", "defacto": "DeFacto", "sgp": "SGP", "choco": "CHOCO-SGD", "slowmo": "SlowMo",
}  # fmt: skip
"""Labels of metrics on axes, and names of algorithms as in their papers."""
FILLS = ("full", "none", "left", "bottom", "right")
"""Fill styles of markers, one for each line style."""
SPAN = 3.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
WIDE = 5.4
"""Width of a panel in inches."""
HIGH = 4.2
"""Height of a panel in inches."""
COLUMN = 3.4
"""Width of a column of a paper in inches."""
PAPER = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,  # publishers reject fonts of type 3, the default
}
"""Settings of matplotlib for a figure in a paper."""
SCREEN = {"axes.titlesize": 11, "legend.fontsize": 9, "lines.linewidth": 1.8, "lines.markersize": 5}
"""Settings of matplotlib for a figure on a screen."""
INK = 0.6
"""Largest sum of the opacities of the bands in a panel; the opacity of each is at most a quarter of
it."""


def style(k: int) -> dict[str, Any]:
    """Return the colour, line style and marker of the curve with index k in a plot, from 0 on."""
    return {"color": COLOURS[k % 7], "linestyle": LINES[k % 5], "marker": MARKERS[k % 5]}


class Picture(Figure):
    """Figure of matplotlib that a notebook displays."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()


def style_of(width: float | None) -> AbstractContextManager:
    """Return a context with the settings of matplotlib for a figure.

    :param width: width of a figure for a paper in inches; None: a figure for a screen
    """
    return rc_context(SCREEN if width is None else PAPER)


def curves(
    study: Results, y: str, x: str, theory: bool = False, width: float | None = None
) -> Figure:
    """Plot a metric over steps, epochs, bytes or time, in a context of :func:`style_of`.

    :param study: results of the study
    :param y: name of the metric
    :param x: key of `AXES`
    :param theory: whether to draw theoretical rates and bounds, too
    :param width: width of a figure for a paper in inches, whose panels are below each other; None:
        a figure for a screen, with a title
    :raises JobError: as `Study.plot`
    """
    if x not in AXES:
        raise JobError(f'x = "{x}": must be one of {", ".join(AXES)}')
    if theory and (y, x) != ("gradient_square", "step"):
        raise JobError(
            f'theory = True: needs y = "gradient_square" and x = "step", not y = "{y}" '
            f'and x = "{x}"'
        )
    panel_axis = _panel_axis(study)
    panels: dict[str, list[Cell]] = {}
    for cell in study.cells:
        panels.setdefault(cell.label(panel_axis) if panel_axis else "", []).append(cell)
    # With three columns, panels would be too small on a page.
    columns = 1 if width else min(len(panels), 2)
    lines = -(-len(panels) // columns)
    panel_width = width or WIDE
    panel_height = panel_width * HIGH / WIDE
    figure = Picture(figsize=(panel_width * columns, panel_height * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    curve_axes = [axis for axis in study.axes if axis != panel_axis]
    styles = _styles(study.cells, curve_axes)
    for axes, (title, cells) in zip(grid.flat, panels.items(), strict=False):
        for cell in cells:
            _draw(axes, study, cell, y, x, styles[_name(cell, curve_axes)], _name(cell, curve_axes))
        for band in (c for c in axes.collections if isinstance(c, PolyCollection)):
            band.set_alpha(INK / max(4, len(cells)))
        if theory:
            draw_rates(
                axes, study, {cell: styles[_name(cell, curve_axes)]["color"] for cell in cells}
            )
        axes.set_title(_label_text(panel_axis, title) if panel_axis else "")
        axes.set_xlabel(AXES[x])
        if x in ("step", "epoch"):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.grid(alpha=0.25)
        if curve_axes or theory:
            # A transparent legend does not hide the curves behind it.
            axes.legend(framealpha=0.8)
        _scale(axes, y)
    for row in grid:
        row[0].set_ylabel(LABELS.get(y, y.replace("_", " ")) + _unit(study, y))
    if width is None:
        figure.suptitle(_of_all(study), fontsize=10, color="#555555")
    return figure


def _of_all(study: Results) -> str:
    """Return the title of a figure: the number of nodes if it is the same in all curves, and seeds.

    With several seeds, the title also explains that curves are means and bands are intervals.
    """
    parts = [] if "nodes" in study.axes else [f"n = {study.cells[0].nodes}"]
    seeds = len(study.seeds)
    if seeds > 1:
        parts += [f"mean of {seeds} seeds", f"{100 * LEVEL:.0f} % interval"]
    return ", ".join(parts)


def _unit(study: Results, y: str) -> str:
    """Return the unit of a metric in brackets: "nat" for losses of cross-entropy, otherwise ""."""
    tasks = {
        settings(run.log.job).get("task.name") for cell in study.cells for run in study.ended(cell)
    }
    is_entropy = bool(tasks) and tasks <= {"classification", "language-model"}
    return " (nat)" if y in ("loss", "train_loss", "local_loss") and is_entropy else ""


def _scale(axes, y: str) -> None:
    """Make the vertical axis logarithmic if curves span a wide range; limit it for accuracies."""
    if "accuracy" in y:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.02, _late_minimum(axes)), min(high, 1.02))
        return
    drawn = np.concatenate([[], *(np.asarray(line.get_ydata(), float) for line in axes.lines)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) and drawn.min() > 0 and drawn.max() > SPAN * drawn.min():
        label_logarithmic(axes)


def _late_minimum(axes) -> float:
    """Return a lower limit for an axis of accuracies, which may cut off the first evaluations.

    Accuracies increase fast at first. If they change little in the last half of the evaluations,
    an axis of all values would not show how the curves differ. The limit is the smallest value of
    the last half minus the range of these values, or minus 0.1 if the range is smaller; it is
    rounded down to a multiple of 0.05. Return 0 if the limit would be at most 0.4, because it would
    hardly enlarge the curves, or if a curve has fewer than 8 evaluations.
    """
    curves = [np.asarray(line.get_ydata(), float) for line in axes.lines]
    if not curves or min(map(len, curves)) < 8:
        return 0.0
    late = np.concatenate([curve[len(curve) // 2 :] for curve in curves])
    late = late[np.isfinite(late)]
    if not len(late):
        return 0.0
    limit = late.min() - max(late.max() - late.min(), 0.1)
    return float(np.floor(20 * limit) / 20) if limit > 0.4 else 0.0


def label_logarithmic(axes) -> None:
    """Make the vertical axis logarithmic, with labels at 1, 2 and 5 times each power of ten.

    If the axis spans more than three powers of ten, only these have labels.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 1000 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _panel_axis(study: Results) -> str | None:
    """Return the axis of the grid each label of which gets a panel; None: there is one panel."""
    if len(study.cells) <= MAX_CURVES:
        return None
    sizes = {axis: len({cell.label(axis) for cell in study.cells}) for axis in study.axes}
    enough = [axis for axis, size in sizes.items() if len(study.cells) <= MAX_CURVES * size]
    return min(enough, key=sizes.__getitem__) if enough else max(sizes, key=sizes.__getitem__)


def _name(cell: Cell, axes: list[str]) -> str:
    """Return the name of a point's curve, which consists of its labels on some axes of the grid."""
    return ", ".join(_label_text(axis, cell.label(axis)) for axis in axes)


def _label_text(axis: str, label: str) -> str:
    """Return the text for a label, with the name of its axis if it is a number or Boolean.

    :param axis: name of the axis of the grid, or "nodes"
    :param label: label on this axis
    """
    if axis == "nodes":
        return f"n = {label}"
    if axis in ("algorithm.name", "graph.name"):
        return LABELS.get(label, label.replace("one-peer-", "one-peer "))
    is_name = not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", label, re.IGNORECASE)
    return label if is_name else f"{axis.rpartition('.')[2]} = {label}"


def _styles(cells: Sequence[Cell], axes: list[str]) -> dict[str, dict]:
    """Return the style of each curve by its name; it is the same in all panels.

    The first axis of the grid with several labels determines the colour, and the other axes
    determine the line style. If there are too few line styles for the other axes, but enough
    colours, colours and line styles are exchanged. Otherwise, or if there is only one axis, each
    name has the next colour and the next line style.
    """
    several = [axis for axis in axes if len({cell.label(axis) for cell in cells}) > 1]
    parts = {
        _name(cell, axes): (_name(cell, several[:1]), _name(cell, several[1:])) for cell in cells
    }
    first, others = (list(dict.fromkeys(part)) for part in zip(*parts.values(), strict=True))
    indices = {name: (first.index(a), others.index(b)) for name, (a, b) in parts.items()}
    if len(first) <= len(LINES) and len(LINES) < len(others) <= len(COLOURS):
        indices = {name: (line, colour) for name, (colour, line) in indices.items()}
    elif len(others) == 1 or len(first) > len(COLOURS) or len(others) > len(LINES):
        indices = {name: (k, k) for k, name in enumerate(indices)}
    return {
        name: {
            "color": COLOURS[colour % len(COLOURS)],
            "linestyle": LINES[line % len(LINES)],
            "marker": MARKERS[colour % len(COLOURS)],
            "fillstyle": FILLS[line % len(LINES)],
        }
        for name, (colour, line) in indices.items()
    }


def _places(run: RunResult, x: str) -> np.ndarray:
    """Return the horizontal positions of a run's evaluations, in the unit of the axis ``x``.

    :param run: a run that has not diverged
    :param x: key of `AXES`
    :raises JobError: if ``x`` is "time" and the log has no virtual time
    """
    if x == "bytes":
        return run.so_far("bytes_sent") / 1e6
    if x != "time":
        return run.curve(x)
    try:
        return run.so_far(VIRTUAL)
    except KeyError:
        remedy = 'set clock.network and clock.compute_s, as in settings=["clock.network=10gbit"'
        raise JobError(f'x = "time": the logs have no virtual time; {remedy}, …]') from None


def _draw(axes, study: Results, cell: Cell, y: str, x: str, style: dict, name: str) -> None:
    """Draw the curve of a point and its band; without a run that ended, only a legend entry.

    :param axes: axes of matplotlib
    :param study: results of the study
    :param cell: the point
    :param y: metric on the vertical axis
    :param x: key of `AXES`, which determines the horizontal axis
    :param style: keyword arguments of matplotlib for the curve
    :param name: name of the curve in the legend, to which the number of diverged runs is added
    """
    runs = study.ended(cell)
    lost_runs = lost(study.rows[study.cells.index(cell)])
    label = f"{name} ({', '.join(lost_runs)})" if lost_runs else name
    if not runs:
        axes.plot([], [], label=label, **style)
        return
    band = confidence_band(y, np.stack([run.curve(y) for run in runs]))
    positions = np.mean([_places(run, x) for run in runs], axis=0)
    mean, low, high = band
    # A line through a single evaluation would not be visible.
    if len(positions) == 1:
        bar = [mean - low, high - mean] if np.isfinite(low).any() else None
        axes.errorbar(positions, mean, bar, label=label, capsize=4, **style | {"linestyle": ""})
        return
    axes.plot(positions, mean, markevery=-(-len(positions) // 12), label=label, **style)
    band.draw(axes, positions, style["color"])
