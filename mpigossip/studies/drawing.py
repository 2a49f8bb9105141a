"""Plot the curves of a study: one line with its interval for each point of the grid."""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpigossip.config import JobError
from mpigossip.store.log import VIRTUAL
from mpigossip.studies.grid import Cell
from mpigossip.studies.results import Results
from mpigossip.studies.running import RunResult
from mpigossip.studies.seeds import LEVEL, interval
from mpigossip.studies.tables import lost
from mpigossip.studies.theory import draw_rates

# Okabe and Ito's colours, which colour-blind people can tell apart, each with a line of its own for
# grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
MARKERS = "os^DvPX"
MOST = 10
"""Curves in a panel."""
AXES = {"step": "step", "epoch": "epoch", "bytes": "MB sent by a node", "time": "virtual seconds"}
LABELS = {
    "loss": "test loss",
    "accuracy": "test accuracy",
    "train_loss": "training loss since the evaluation before",
    "parallel": "parallel SGD", "dsgd": "D-PSGD", "dmsgd": "DmSGD", "qg-dmsgd": "QG-DmSGD",
    "dmsgd-vanilla": "vanilla DmSGD", "decentlam": "DecentLaM", "d2": "D²", "dsgt": "DSGT",
    "detag": "DeTAG", "defacto": "DeFacto", "sgp": "SGP", "choco": "CHOCO-SGD", "slowmo": "SlowMo",
}  # fmt: skip
"""Figures as axes call them, methods as their papers do."""
FILLS = ("full", "none", "left", "bottom", "right")
"""Of markers, one for each line, and markers one for each colour: for grey print."""
SPAN = 3.0
"""Largest over smallest value from which on an axis is logarithmic."""
WIDE = 5.4
HIGH = 4.2
"""Inches of a panel."""
INK = 0.6
"""Opacity of all bands of a panel together; of one at most a quarter of it."""


def style(k: int) -> dict[str, Any]:
    """Colour, line and marker of the k-th run of a picture."""
    return {"color": COLOURS[k % 7], "linestyle": LINES[k % 5], "marker": MARKERS[k % 5]}


class Picture(Figure):
    """A figure that a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=110)
        return out.getvalue()


def curves(study: Results, y: str, x: str, theory: bool = False) -> Figure:
    """A figure of the averaged model against steps, epochs or bytes."""
    if x not in AXES:
        raise JobError(f'x = "{x}": choose one of {", ".join(AXES)}')
    if theory and (y, x) != ("gradient_square", "step"):
        raise JobError(
            f'theory = True: rates are of y = "gradient_square" against x = "step", not of "{y}" '
            f'against "{x}"'
        )
    apart = _panel_axis(study)
    panels: dict[str, list[Cell]] = {}
    for cell in study.cells:
        panels.setdefault(cell.label(apart) if apart else "", []).append(cell)
    columns = min(len(panels), 2)  # more are too small on a page
    lines = -(-len(panels) // columns)
    made = Picture(figsize=(WIDE * columns, HIGH * lines), layout="constrained")
    grid = made.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    named = [axis for axis in study.axes if axis != apart]
    styles = _styles(study.cells, named)
    for axes, (title, cells) in zip(grid.flat, panels.items(), strict=False):
        for cell in cells:
            _draw(axes, study, cell, y, x, styles[_name(cell, named)], _name(cell, named))
        for band in (one for one in axes.collections if isinstance(one, PolyCollection)):
            band.set_alpha(INK / max(4, len(cells)))
        if theory:
            draw_rates(axes, study, {cell: styles[_name(cell, named)]["color"] for cell in cells})
        axes.set_title(_said(apart, title) if apart else "", fontsize=11)
        axes.set_xlabel(AXES[x])
        if x in ("step", "epoch"):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.grid(alpha=0.25)
        if named or theory:
            axes.legend(framealpha=0.8, fontsize=9)  # where it covers a curve, that is seen
        _scale(axes, y)
    for row in grid:
        row[0].set_ylabel(LABELS.get(y, y.replace("_", " ")))
    made.suptitle(_of_all(study), fontsize=10, color="#555555")
    return made


def _of_all(study: Results) -> str:
    """Title: what all curves have in common, and what their bands are."""
    said = [] if "nodes" in study.axes else [f"n = {study.cells[0].nodes}"]
    seeds = len(study.seeds)
    if seeds > 1:
        said += [f"mean of {seeds} seeds", f"{100 * LEVEL:.0f} % interval"]
    return ", ".join(said)


def _scale(axes, y: str) -> None:
    """Orders of magnitude where curves span some; accuracies within what they can be."""
    if "accuracy" in y:
        axes.set_ylim(max(axes.get_ylim()[0], -0.02), min(axes.get_ylim()[1], 1.02))
        return
    drawn = np.concatenate([[], *(np.asarray(line.get_ydata(), float) for line in axes.lines)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) and drawn.min() > 0 and drawn.max() > SPAN * drawn.min():
        axes.set_yscale("log")


def _panel_axis(study: Results) -> str | None:
    """The axis whose labels get a panel each, where one panel would be crowded."""
    if len(study.cells) <= MOST:
        return None
    sizes = {axis: len({cell.label(axis) for cell in study.cells}) for axis in study.axes}
    enough = [axis for axis, size in sizes.items() if len(study.cells) <= MOST * size]
    return min(enough, key=sizes.__getitem__) if enough else max(sizes, key=sizes.__getitem__)


def _name(cell: Cell, axes: list[str]) -> str:
    return ", ".join(_said(axis, cell.label(axis)) for axis in axes)


def _said(axis: str, label: str) -> str:
    """A label where its axis isn't named: of numbers and truths what they are of."""
    if axis == "nodes":
        return f"n = {label}"
    if axis in ("algorithm.name", "graph.name"):
        return LABELS.get(label, label.replace("one-peer-", "one-peer "))
    speaks = not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", label, re.IGNORECASE)
    return label if speaks else f"{axis.rpartition('.')[2]} = {label}"


def _styles(cells: Sequence[Cell], axes: list[str]) -> dict[str, dict]:
    """A colour and a line for each name, the same in all panels.

    The first axis of several labels chooses the colour, the others the line. Where there are too
    few lines for those but enough colours it is the other way round; else both go on in turn.
    """
    several = [axis for axis in axes if len({cell.label(axis) for cell in cells}) > 1]
    parts = {
        _name(cell, axes): (_name(cell, several[:1]), _name(cell, several[1:])) for cell in cells
    }
    first, others = (list(dict.fromkeys(part)) for part in zip(*parts.values(), strict=True))
    at = {name: (first.index(a), others.index(b)) for name, (a, b) in parts.items()}
    if len(first) <= len(LINES) and len(LINES) < len(others) <= len(COLOURS):
        at = {name: (line, colour) for name, (colour, line) in at.items()}
    elif len(others) == 1 or len(first) > len(COLOURS) or len(others) > len(LINES):
        at = {name: (k, k) for k, name in enumerate(at)}
    return {
        name: {
            "color": COLOURS[colour % len(COLOURS)],
            "linestyle": LINES[line % len(LINES)],
            "marker": MARKERS[colour % len(COLOURS)],
            "fillstyle": FILLS[line % len(LINES)],
        }
        for name, (colour, line) in at.items()
    }


def _places(run: RunResult, x: str) -> np.ndarray:
    """Positions of a run's evaluations on an axis."""
    if x == "bytes":
        return run.so_far("bytes_sent") / 1e6
    if x != "time":
        return run.curve(x)
    try:
        return run.so_far(VIRTUAL)
    except KeyError:
        remedy = 'give clock.network and clock.compute_s, such as settings=["clock.network=10gbit"'
        raise JobError(f'x = "time": the logs have no virtual time; {remedy}, …]') from None


def _draw(axes, study: Results, cell: Cell, y: str, x: str, style: dict, name: str) -> None:
    runs = study.ended(cell)
    said = lost(study.rows[study.cells.index(cell)])
    label = f"{name} ({', '.join(said)})" if said else name
    if not runs:
        axes.plot([], [], label=label, **style)
        return
    mean, half = interval(np.stack([run.curve(y) for run in runs]))
    at = np.mean([_places(run, x) for run in runs], axis=0)
    low = mean - half
    high = mean + half
    if "accuracy" in y:  # Student's t knows no ends
        low = np.clip(low, 0, 1)
        high = np.clip(high, 0, 1)
    elif (mean > 0).all() and (low <= 0).any():  # in ratio as far below as above
        low = mean**2 / high
    banded = bool(np.isfinite(half).any())
    if len(at) == 1:  # no line: of a single evaluation
        bar = [mean - low, high - mean] if banded else None
        axes.errorbar(at, mean, bar, label=label, capsize=4, **style | {"linestyle": ""})
        return
    axes.plot(at, mean, lw=1.8, ms=5, markevery=-(-len(at) // 12), label=label, **style)
    if banded:
        axes.fill_between(at, low, high, color=style["color"], lw=0)
