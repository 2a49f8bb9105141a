"""What a log tells: one picture of one or several runs, a text table, CSV."""

from __future__ import annotations

import csv
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpigossip.store.hdf5 import writing
from mpigossip.store.log import Log, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 1000
"""Rows that are read for a picture; longer logs are averaged over blocks of steps."""
PARTS = {"compute_s": "compute", "node_s": "node", "exchange_s": "exchange", "idle_s": "idle"}
"""Where the time of a step goes: column and word."""

# Okabe and Ito's colours, which colour-blind people can tell apart, each with a line of its own for
# grey print; for the parts of a step dark to light with hatches.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
MARKERS = "os^Dv"
ROUNDING = 1e-12
"""Relative squared distances below this are float32's rounding, not disagreement."""
SHADES = (("#1B4F72", ""), ("#7FB3D5", "////"), ("#F5B041", "...."), ("#E5E7E9", ""))


@dataclass(frozen=True)
class Run:
    """One run in a picture: its name, its log, colour and line, and x for a step."""

    name: str
    log: Log
    style: dict[str, Any]
    per_step: float = 1.0

    @property
    def line(self) -> dict[str, Any]:
        """Colour and line without the marker."""
        return self.style | {"marker": None}


def plot(runs: Sequence[Path], out: Path) -> None:
    """Write one PNG: loss, accuracy, consensus distance and time of a step against the step.

    `runs` are folders of runs, or logs; several are compared by colour and line, and against the
    epoch if their epochs differ in length.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    drawn, label = _same_axis(_load([Path(run) for run in runs]))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, rect=(0, 0, 0.99, 1))
    figure = Figure(figsize=(12.4, 8.4), dpi=130, layout=layout)
    FigureCanvasAgg(figure)  # needs no display, and leaves pyplot's global state alone
    (loss, accuracy), (consensus, seconds) = figure.subplots(2, 2)
    _draw_loss(loss, drawn)
    _draw_accuracy(accuracy, drawn)
    _draw_consensus(consensus, drawn)
    if len(drawn) == 1:
        _draw_time(seconds, drawn[0].log)
    else:
        _draw_times(seconds, drawn)
    against_step = [loss, accuracy, consensus] + [seconds] * (len(drawn) == 1)
    for axes in against_step:
        axes.set_xlabel(label)
        ends = [run.per_step * (int(run.log.steps["step"].max(initial=0)) + 1) for run in drawn]
        axes.set_xlim(0, 1.02 * max(ends))
    _name_runs(figure, drawn)
    with writing(Path(out)):
        figure.savefig(out, format="png")


def table(log: Log) -> str:
    """The evaluations, the time of a step and the summary as text."""
    found = log.evaluations
    local = found.get("local_accuracy", np.full((len(found["step"]), 1), np.nan))
    columns = {
        "step": [f"{step}" for step in found["step"]],
        "epoch": _cells(found.get("epoch"), "{:.2f}"),
        "loss": _cells(found.get("loss"), "{:.4f}"),
        "accuracy": _cells(found.get("accuracy"), "{:.4f}"),
        "local accuracy": [
            f"{low:.4f} – {high:.4f}" if low == low else "–"
            for low, high in zip(
                _over_nodes(np.nanmin, local), _over_nodes(np.nanmax, local), strict=True
            )
        ],
        "consensus distance": _cells(found.get("consensus_distance"), "{:.3e}"),
        "seconds": _cells(found.get("seconds"), "{:.1f}"),
    }
    lines = [_description(log), ""]
    lines += _aligned({name: cells for name, cells in columns.items() if cells}) or [
        "no evaluation yet"
    ]
    lines += ["", _time_line(log)]
    if log.summary:
        width = max(map(len, log.summary))
        lines += ["", *(f"{name:<{width}}  {value}" for name, value in log.summary.items())]
    return "\n".join(lines)


def export_csv(log: Log, out: Path) -> tuple[Path, Path]:
    """Write the steps to `out` and the evaluations beside it, one line per step and node.

    `out` = run.csv gives run.csv and run-evaluations.csv; values of all nodes together are repeated
    for each node. Returns both paths.
    """
    out = Path(out)
    beside = out.with_name(f"{out.stem}-evaluations{out.suffix}")
    for path, columns in ((out, log.steps), (beside, log.evaluations)):
        with writing(path), path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "node", *(name for name in columns if name != "step")])
            values = [value for name, value in columns.items() if name != "step"]
            for row, step in enumerate(columns["step"]):
                for node in range(log.nodes):
                    cells = (v[row, node] if v.ndim == 2 else v[row] for v in values)
                    writer.writerow([step, node, *cells])
    return out, beside


def _load(paths: Sequence[Path]) -> list[Run]:
    """The runs with their styles."""
    names = _names([(path if path.is_dir() else path.parent).resolve() for path in paths])
    logs = [read(path / "log.h5" if path.is_dir() else path, points=POINTS) for path in paths]
    styles = [
        {"color": COLOURS[k % 7], "linestyle": LINES[k % 5], "marker": MARKERS[k % 5]}
        for k in range(len(paths))
    ]
    return [Run(*each) for each in zip(names, logs, styles, strict=True)]


def _names(folders: Sequence[Path], most: int = 32) -> list[str]:
    """Each folder's last part, with as many before it as tell the folders apart.

    Long names lose their beginning: a legend must leave room for the axes.
    """
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return [name if len(name) <= most else f"…{name[1 - most :]}" for name in names]


def _description(log: Log) -> str:
    """Algorithm, graph and nodes of a run."""
    try:
        job = tomllib.loads(log.job)
        names = [str(job[section]["name"]) for section in ("algorithm", "graph")]
    except (ValueError, LookupError, TypeError):
        names = []  # a log of other origin: its figures are still worth drawing
    return ", ".join([*names, f"{log.nodes} node{'s' * (log.nodes > 1)}"])


def _name_runs(figure: Figure, drawn: Sequence[Run]) -> None:
    """The title of one run, or the legend of several, each with its last accuracy."""
    labels = []
    for run in drawn:
        accuracy = run.log.evaluations.get("accuracy", np.zeros(0))
        last = f"; test accuracy {accuracy[-1]:.4f}" if len(accuracy) else ""
        labels.append(f"{run.name}: {_description(run.log)}{last}")
    if len(drawn) == 1:
        figure.suptitle(labels[0], fontsize=13)
        return
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], lw=2.2, ms=6, **run.style, label=label)
        for run, label in zip(drawn, labels, strict=True)
    ]
    columns = 1 + (len(drawn) > 3)
    figure.legend(
        handles=lines, loc="outside upper left", handlelength=4.5, frameon=False, ncols=columns
    )


def _same_axis(drawn: Sequence[Run]) -> tuple[list[Run], str]:
    """The runs with what a step is on the x axis, and its label."""
    lengths = []
    for run in drawn:
        found = run.log.evaluations
        known = len(found["step"]) and "epoch" in found and found["epoch"][-1] > 0
        lengths.append(float(found["step"][-1] / found["epoch"][-1]) if known else 0.0)
    if len(set(lengths)) == 1:
        return list(drawn), f"step  (epoch = {lengths[0]:.6g} steps)" if lengths[0] else "step"
    if not all(lengths):
        return list(drawn), "step"
    scaled = [replace(run, per_step=1 / n) for run, n in zip(drawn, lengths, strict=True)]
    return scaled, "epoch"


def _over_nodes(function: Callable, values: np.ndarray) -> np.ndarray:
    """`function` over the nodes; NaN, without a warning, where no node has a value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return function(values, axis=1)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of 1/25 of the rows, shorter at the ends, of what is finite."""
    half = len(values) // 50
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def _dress(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(label)
    axes.grid(True, color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _key(axes: Axes, handles: Iterable) -> None:
    """A legend above the axes, beside the title, where no line runs."""
    axes.legend(
        handles=list(handles), loc="lower right", bbox_to_anchor=(1, 0.99), ncols=4, frameon=False,
        fontsize=8.5, borderaxespad=0.2, columnspacing=1.1, handlelength=1.7, handletextpad=0.6,
    )  # fmt: skip


def _sample(label: str, **style: Any) -> Any:
    """What a line or marker means, in grey: whichever run it is of."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#444444", label=label, **style)


def _band(label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color="#444444", alpha=0.2, label=label)


def _nothing(axes: Axes, text: str) -> None:
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#666666")


def _draw_loss(axes: Axes, drawn: Sequence[Run]) -> None:
    _dress(axes, "Loss", "cross entropy (nat)")
    shown = [np.ones(1)]
    for run in drawn:
        steps, loss = run.per_step * run.log.steps["step"], run.log.steps["loss"]
        mean = _over_nodes(np.nanmean, loss)
        smooth = _smooth(mean)
        if len(drawn) == 1 < run.log.nodes:
            low, high = (_smooth(_over_nodes(f, loss)) for f in (np.nanmin, np.nanmax))
            axes.fill_between(steps, low, high, color=run.style["color"], alpha=0.2, lw=0)
        axes.plot(steps, smooth, lw=1.8, **run.line)
        found = run.log.evaluations
        if "loss" in found:
            points = run.style | {"linestyle": ""}
            at = run.per_step * found["step"]
            axes.plot(at, found["loss"], ms=4.5, mfc="white", **points)
        shown += [smooth, found.get("loss", smooth)]
    values = np.concatenate(shown[1:])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) and values.max() > 30 * values.min():
        axes.set_yscale("log")
    bands = [_band("range of nodes")] * (len(drawn) == 1 < drawn[0].log.nodes)
    test = _sample("test, averaged model", marker="o", ms=4.5, mfc="white", ls="")
    _key(axes, [_sample("training, mean", lw=1.8), *bands, test])


def _draw_accuracy(axes: Axes, drawn: Sequence[Run]) -> None:
    _dress(axes, "Test accuracy", "share of test samples")
    shown = [run for run in drawn if "accuracy" in run.log.evaluations]
    for run in shown:
        found = run.log.evaluations
        at = run.per_step * found["step"]
        if "local_accuracy" in found:
            low, high = (_over_nodes(f, found["local_accuracy"]) for f in (np.nanmin, np.nanmax))
            faint = 0.2 if len(drawn) < 3 else 0.1
            axes.fill_between(at, low, high, color=run.style["color"], alpha=faint, lw=0)
        axes.plot(at, found["accuracy"], lw=1.8, ms=4, **run.style)
    if not shown:
        _nothing(axes, "no evaluation yet")
        return
    bands = [_band("range of local models")] * any(run.log.nodes > 1 for run in shown)
    _key(axes, [_sample("averaged model", lw=1.8, marker="o", ms=3.5), *bands])


def _draw_consensus(axes: Axes, drawn: Sequence[Run]) -> None:
    _dress(axes, "Consensus distance", r"$\|x_i-\bar{x}\|^2\,/\,\|\bar{x}\|^2$, mean over nodes")
    equal = []
    for run in drawn:
        values = run.log.steps.get(
            "consensus_distance", np.full((len(run.log.steps["step"]), 1), np.nan)
        )
        values = _over_nodes(np.nanmean, values)
        apart = values > ROUNDING
        if apart.any():
            at = run.per_step * run.log.steps["step"][apart]
            axes.plot(at, values[apart], lw=1.5, **run.line)
        elif np.isfinite(values).any():
            equal.append(run.name)
    if not axes.lines:
        _nothing(axes, "all nodes are equal, up to rounding" if equal else "not measured")
        return
    axes.set_yscale("log")
    if equal:
        text = f"all nodes equal, up to rounding: {', '.join(equal)}"
        axes.text(0.99, 0.02, text, transform=axes.transAxes, ha="right", fontsize=8.5)


def _draw_time(axes: Axes, log: Log) -> None:
    """Stacked parts of the time of a step, smoothed."""
    label = "milliseconds, mean over nodes"
    parts = [name for name in PARTS if name in log.steps]
    if not parts or not len(log.steps["step"]):
        _dress(axes, "Time", label)
        _nothing(axes, "no steps yet")
        return
    values = 1e3 * np.stack([_over_nodes(np.nanmean, log.steps[name]) for name in parts])
    total = values.sum(0)
    slow = total > 5 * np.nanmedian(total)  # start-up and hiccups would dwarf the rest
    values[:, slow] = np.nan
    note = f"\n(more than 5 × the median left out: {slow.sum()})" if slow.any() else ""
    _dress(axes, "Time", label + note)
    shades = [SHADES[list(PARTS).index(name)] for name in parts]
    layers = axes.stackplot(
        log.steps["step"], [_smooth(v) for v in values], labels=_shares(log, parts),
        colors=[colour for colour, _ in shades],
    )  # fmt: skip
    for layer, (_, hatch) in zip(layers, shades, strict=True):
        layer.set(hatch=hatch, edgecolor="white", lw=0.3)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    _key(axes, layers)


def _draw_times(axes: Axes, drawn: Sequence[Run]) -> None:
    """Stacked bars, one a run: the mean time of a step."""
    _dress(axes, "Time", "")
    axes.grid(False, axis="y")
    places = np.arange(len(drawn))
    start = np.zeros(len(drawn))
    bars = []
    for (part, word), (colour, hatch) in zip(PARTS.items(), SHADES, strict=True):
        length = np.array([_mean_ms(run.log, part) for run in drawn])
        bars.append(
            axes.barh(
                places, length, 0.6, start, color=colour, hatch=hatch, edgecolor="white", label=word
            )
        )
        start += length
    for place, total in enumerate(start):
        axes.text(total, place, f" {total:.3g} ms", va="center", fontsize=9)
    axes.set_yticks(places, [run.name for run in drawn])
    for label, run in zip(axes.get_yticklabels(), drawn, strict=True):
        label.set(color=run.style["color"], fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * float(start.max()) or 1)
    axes.set_xlabel("milliseconds, mean over nodes and steps")
    _key(axes, bars)


def _shares(log: Log, parts: Sequence[str]) -> list[str]:
    """Each part with its share of the whole time."""
    means = [_mean_ms(log, part) for part in parts]
    whole = sum(means) or 1.0
    return [f"{PARTS[p]} {100 * m / whole:.0f} %" for p, m in zip(parts, means, strict=True)]


def _mean_ms(log: Log, part: str) -> float:
    values = log.steps.get(part, np.empty(0))
    known = values[np.isfinite(values)]
    return 1e3 * float(known.mean()) if len(known) else 0.0


def _time_line(log: Log) -> str:
    """Mean time of a step and its parts, in words."""
    total = sum(_mean_ms(log, part) for part in PARTS)
    if not total:
        return "no steps yet"
    return f"a step takes {total:.3g} ms: {', '.join(_shares(log, list(PARTS)))}"


def _cells(values: np.ndarray | None, form: str) -> list[str]:
    return [] if values is None else [form.format(v) if v == v else "–" for v in values]


def _aligned(columns: dict[str, list[str]]) -> list[str]:
    """Right-aligned columns under their names; nothing where there are no rows."""
    widths = [max(len(name), *map(len, cells)) if cells else 0 for name, cells in columns.items()]
    rows = list(zip(*columns.values(), strict=True))
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [tuple(columns), *rows]
    ] if rows else []  # fmt: skip
