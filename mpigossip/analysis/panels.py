"""Panels of a plot, each drawn by a function that shows one quantity of one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpigossip.analysis.logged_runs import (
    PARTS,
    LoggedRun,
    drawable,
    is_simulated,
    mean_ms,
    over_nodes,
    shares,
    smooth,
)
from mpigossip.config.readable import three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDING = 1e-12
"""Consensus distance below which the nodes differ only by the rounding of float32."""
OWN_PART = "each node on its own part of the test set"
LONG = 7
"""Largest length of a metric's name, in characters, with which a legend fits next to the title."""
BANDS = 6
"""Largest number of runs whose ranges over nodes can be distinguished."""
SHADES = (("#1B4F72", ""), ("#7FB3D5", "////"), ("#F5B041", "...."), ("#E5E7E9", ""))
"""Colour and hatch of each part of a step, from dark to light."""
PREFIXES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
"""Units of traffic: number of bytes, and name."""
CLOCKS = ((2 * 3600, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))
"""Units of a time axis: smallest time, in seconds, for which the unit is used; length of the unit
in seconds; name."""
ONE_PROCESS = "of the simulating process"
"""Clause in the label of an axis that shows durations of simulated runs."""


@dataclass(frozen=True)
class Axis:
    """Horizontal axis of a panel: a label, and a function that maps steps of a run to positions."""

    label: str
    at: Callable[[LoggedRun, np.ndarray], np.ndarray]
    """Function that maps a run and some of its steps to positions."""

    def dress(self, axes: Axes, runs: Sequence[LoggedRun]) -> None:
        """Set the label and the limits of the horizontal axis, which starts at 0."""
        axes.set_xlabel(self.label)
        ends = [float(self.at(run, np.array([run.last]))[0]) for run in runs]
        end = max((end for end in ends if np.isfinite(end)), default=0.0)
        axes.set_xlim(0, 1.02 * end or 1)


def steps(runs: Sequence[LoggedRun]) -> Axis:
    """Return an axis of steps, or of epochs if the runs' epochs have different numbers of steps.

    If one of these numbers is not known, the axis shows steps.
    """
    lengths = {run.epoch_steps for run in runs}
    if len(lengths) > 1 and all(lengths):
        return Axis("epoch", lambda run, at: at / run.epoch_steps)
    (length,) = lengths if len(lengths) == 1 else (0.0,)
    label = f"step  (epoch = {length:.6g} steps)" if length else "step"
    return Axis(label, lambda run, at: np.asarray(at, float))


def clock(runs: Sequence[LoggedRun]) -> Axis:
    """Return an axis of training time, in a unit that fits the longest run.

    If all runs have a virtual clock, the axis is the virtual time, because the real time of a
    simulation says nothing about training on real nodes. Without a virtual clock, the axis of runs
    that are all simulated is the number of bytes that a node has sent, if it is known.
    """
    virtual = all(run.has_virtual_time for run in runs)
    simulated = [run for run in runs if is_simulated(run.log)]
    if len(simulated) == len(runs) and not virtual and all(map(_has_sent, runs)):
        return _sent(runs)
    seconds = LoggedRun.virtual_seconds if virtual else LoggedRun.seconds
    durations = [float(seconds(run, np.array([run.last]))[0]) for run in runs]
    longest = max((duration for duration in durations if np.isfinite(duration)), default=0.0)
    unit, word = next((unit, word) for minimum, unit, word in CLOCKS if longest >= minimum)
    label = f"time of training ({word}; without evaluations and checkpoints)"
    if virtual:
        label = f"virtual time of training ({word}; [clock] of the job)"
    elif simulated:
        label = f"time of training ({word}; simulated runs: {ONE_PROCESS})"
    return Axis(label, lambda run, at: seconds(run, at) / unit)


def _has_sent(run: LoggedRun) -> bool:
    """Return whether the log of a run contains the bytes that nodes have sent, if they sent any."""
    return bool((run.log.steps.get("bytes_sent", np.empty(0)) > 0).any())


def _sent(runs: Sequence[LoggedRun]) -> Axis:
    """Return an axis of the bytes that a node has sent, as a mean over nodes."""
    totals = [over_nodes(np.nanmean, run.log.steps["bytes_sent"]) for run in runs]
    unit, word = _traffic_unit(max(float(np.nanmax(total)) for total in totals))

    def at(run: LoggedRun, steps: np.ndarray) -> np.ndarray:
        rows = run.log.steps["step"]
        block = rows[1] - rows[0] if len(rows) > 1 else 1  # Steps over which a row is averaged.
        done = np.append(0, rows + (1 + block) / 2)
        total = np.append(0.0, over_nodes(np.nanmean, run.log.steps["bytes_sent"]))
        return np.interp(steps, done, total / unit)

    return Axis(f"{word} sent per node (mean)", at)


def _traffic_unit(largest: float) -> tuple[float, str]:
    """Return the unit for numbers of bytes up to ``largest``: its number of bytes, and its name."""
    return next(((unit, word) for unit, word in PREFIXES if largest >= unit), PREFIXES[-1])


def loss(axes: Axes, runs: Sequence[LoggedRun], axis: Axis) -> None:
    """Draw the test loss of the averaged model, and the training loss.

    The training loss is a mean over nodes, smoothed over steps.
    """
    units = sorted({run.unit("loss") for run in runs})
    _dress(axes, "Loss", "cross entropy (nat)" if units == [" (nat)"] else f"loss{units[0]}")
    shown = [np.ones(0)]
    for run in runs:
        positions = axis.at(run, run.log.steps["step"])
        values = run.log.steps["loss"]
        smoothed = smooth(over_nodes(np.nanmean, values))
        if len(runs) == 1 < run.log.nodes:
            low, high = (smooth(over_nodes(f, values)) for f in (np.nanmin, np.nanmax))
            axes.fill_between(positions, low, high, color=run.style["color"], alpha=0.2, lw=0)
        axes.plot(positions, smoothed, lw=1.8, **run.line)
        evaluations = run.log.evaluations
        if "loss" in evaluations:
            positions = axis.at(run, evaluations["step"])
            axes.plot(
                positions, evaluations["loss"], ms=4.5, mfc="white", **run.style | {"linestyle": ""}
            )
            if "loss" in run.bands:
                run.bands["loss"].draw(axes, positions, run.style["color"], alpha=0.15)
        shown += [smoothed, evaluations.get("loss", smoothed)]
    values = np.concatenate(shown)
    _wide(axes, values[values > 0])
    bands = [_band("range of nodes")] * (len(runs) == 1 < runs[0].log.nodes)
    test = _sample("test, averaged model", marker="o", ms=4.5, mfc="white", ls="")
    _key(axes, [_sample("training, mean", lw=1.8), *bands, test])


def metric(axes: Axes, runs: Sequence[LoggedRun], axis: Axis, name: str) -> None:
    """Draw a metric of the averaged model on the test set, of the nodes' models, and of training.

    The nodes' models are drawn as a range from their lowest to their highest value, if there are at
    most `BANDS` runs. A run that combines several seeds has a confidence interval instead. Runs
    without this metric are left out.
    """
    shown = [run for run in runs if name in run.log.evaluations]
    heading = drawable(name)
    label = "fraction of test samples" if name == "accuracy" else f"{heading}{runs[0].unit(name)}"
    # A metric of a custom loop need not be of a test.
    title = f"Test {heading}" if shown else heading
    _dress(axes, title, label)
    drawn = [np.ones(0)]
    for run in shown:
        evaluations = run.log.evaluations
        positions = axis.at(run, evaluations["step"])
        local = evaluations.get(f"local_{name}")
        if run.bands:
            run.bands[name].draw(axes, positions, run.style["color"], alpha=0.15)
        elif local is not None and len(runs) <= BANDS:
            low, high = (over_nodes(f, local) for f in (np.nanmin, np.nanmax))
            faint = 0.2 if len(runs) < 3 else 0.1
            axes.fill_between(positions, low, high, color=run.style["color"], alpha=faint, lw=0)
        axes.plot(positions, evaluations[name], lw=1.8, ms=4, **run.style)
        drawn.append(evaluations[name])
    trained = [run for run in runs if known(run, name)]
    for run in trained:
        positions = axis.at(run, run.log.steps["step"])
        training = over_nodes(np.nanmean, run.log.steps[name])
        is_known = np.isfinite(training)
        if is_known.mean() < 0.5:  # The program has logged the metric at some steps only.
            axes.plot(positions[is_known], training[is_known], lw=1.5, ms=4, **run.style)
        else:
            axes.plot(positions, smooth(training), lw=0.9, color=run.style["color"], alpha=0.55)
        drawn.append(training)
    if not shown and not trained:
        _nothing(axes, "no evaluation yet")
        return
    if name != "accuracy":
        _wide(axes, np.concatenate(drawn))
    seeds = any(run.bands for run in shown)
    single_runs = [run for run in shown if not run.bands]
    several = len(runs) <= BANDS and any(run.log.nodes > 1 for run in single_runs)
    bands = [_band("range of nodes' own")] * several + [_band("95 % over seeds")] * seeds
    if several:
        last = shown[0].log.evaluations[name][-1:]
        falls = name != "accuracy" and bool((last < np.mean(axes.get_ylim())).any())
        _note(axes, OWN_PART, right=True, above=falls)
    thin = [_sample("training", lw=0.9)] * bool(trained)
    if shown:
        tested = _sample("averaged model", lw=1.8, marker="o", ms=3.5)
        _key(axes, [tested, *bands, *thin])
    # With both entries, the legend is nearly as wide as the axes, and leaves no room for the title.
    if len(name) > LONG and trained:
        key_below_title(axes)


def _wide(axes: Axes, values: np.ndarray) -> None:
    """Make the vertical axis logarithmic if values are positive and span a factor above 30."""
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 30 * values.min():
        # Matplotlib takes long to import, and this module is imported by commands without plots.
        from mpigossip.studies.drawing import label_logarithmic

        label_logarithmic(axes)


def consensus(axes: Axes, runs: Sequence[LoggedRun], axis: Axis) -> None:
    """Draw the consensus distance, and mark the range in which it is only rounding of float32.

    If a run has measured the distance only at evaluations, as asynchronous runs do, its line has
    markers.
    """
    _dress(axes, "Consensus distance", r"$\|x_i-\bar{x}\|^2\,/\,\|\bar{x}\|^2$, mean over nodes")
    equal_runs = []
    for run in runs:
        step = run.log.steps["step"]
        values = run.log.steps.get("consensus_distance", np.full((len(step), 1), np.nan))
        values = over_nodes(np.nanmean, values)
        differ = values > ROUNDING
        if differ.any():
            drawn = values > 0
            style = run.line if drawn.sum() > 1 else run.style  # A line needs two points.
            axes.plot(axis.at(run, step[drawn]), values[drawn], lw=1.5, **style)
        elif np.isfinite(values).any():
            equal_runs.append(run.name)
        elif "consensus_distance" in run.log.evaluations:
            tested = run.log.evaluations["consensus_distance"]
            if np.isfinite(tested).any() and not (tested > 0).any():
                equal_runs.append(run.name)
                continue
            positions = axis.at(run, run.log.evaluations["step"])
            axes.plot(positions, tested, lw=1.5, ms=4, **run.style)
    if not axes.lines:
        _nothing(axes, "all nodes are equal, except for rounding" if equal_runs else "not measured")
        return
    axes.set_yscale("log")
    shown = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    lowest = float(np.min(shown, initial=np.inf, where=shown > 0))
    if lowest < ROUNDING:
        axes.axhspan(lowest, ROUNDING, color="#EEEEEE", zorder=0)
        axes.text(
            0.01,
            ROUNDING,
            "below: equal except for float32 rounding",
            va="top",
            fontsize=8.5,
            color="#666666",
            transform=axes.get_yaxis_transform(),
        )
    if equal_runs:
        names = (
            ", ".join(equal_runs)
            if len(equal_runs) <= 3
            else f"{len(equal_runs)} of {len(runs)} runs"
        )
        text = drawable(f"all nodes equal, except for rounding: {names}")
        axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=8.5)


def spread(axes: Axes, runs: Sequence[LoggedRun], axis: Axis) -> None:
    """Draw the difference between the nodes' own models and the averaged model, in a metric.

    The metric is the first metric of the first run that has any, on each node's part of the test
    set. The panel shows the mean of the difference over nodes and, for at most `BANDS` runs, its
    range.
    """
    name = next((name for run in runs for name in run.metrics), "accuracy")
    of, scale = "% points", 100
    if name != "accuracy":
        of, scale = f"{drawable(name)}{runs[0].unit(name)}", 1
    _dress(axes, "Spread over nodes", f"local − averaged model ({of})")
    for run in runs:
        evaluations = run.log.evaluations
        if run.log.nodes < 2 or f"share_{name}" not in evaluations:
            continue
        difference = scale * (evaluations[f"local_{name}"] - evaluations[f"share_{name}"])
        low, mean, high = (over_nodes(f, difference) for f in (np.nanmin, np.nanmean, np.nanmax))
        positions = axis.at(run, evaluations["step"])
        if len(runs) <= BANDS:
            axes.fill_between(positions, low, high, color=run.style["color"], alpha=0.2, lw=0)
        axes.plot(positions, mean, lw=1.5, ms=4, **run.style)
    if not axes.lines:
        _nothing(axes, "one node, or no evaluation yet")
        return
    axes.axhline(0, color="#444444", lw=0.8)
    bands = [_band("range of nodes")] * (len(runs) <= BANDS)
    _key(axes, [_sample("mean", lw=1.5, marker="o", ms=3.5), *bands])
    bottom, top = axes.get_ylim()
    if name == "accuracy":
        axes.set_ylim(min(bottom, -0.1), max(top, 0.1))
    _note(axes, OWN_PART)


def staleness(axes: Axes, runs: Sequence[LoggedRun], axis: Axis) -> None:
    """Draw the age, in rounds, of the models with which asynchronous nodes have averaged."""
    _dress(axes, "Staleness", "age of the neighbours' models (rounds)")
    for run in runs:
        if not stale(run):
            continue
        values = run.log.steps["staleness"]
        positions = axis.at(run, run.log.steps["step"])
        low, high = (smooth(over_nodes(f, values)) for f in (np.nanmin, np.nanmax))
        axes.fill_between(positions, low, high, color=run.style["color"], alpha=0.2, lw=0)
        axes.plot(positions, smooth(over_nodes(np.nanmean, values)), lw=1.8, **run.line)
    axes.set_ylim(bottom=0)
    _key(axes, [_sample("mean", lw=1.8), _band("range of nodes")])


def members(axes: Axes, run: LoggedRun) -> None:
    """Draw, for each place of a training of members, the time from its first to its last step.

    A place without a step has no bar.
    """
    from matplotlib.ticker import MaxNLocator

    _dress(axes, "Members", "place")
    times = run.log.steps["time"]
    if not known(run, "time"):
        _nothing(axes, "times are not known" if times.size else "no steps yet")
        return
    first = over_nodes(np.nanmin, times.T)
    last = over_nodes(np.nanmax, times.T)
    begin = np.nanmin(first)
    scale, word = (3600, "hours") if np.nanmax(last) - begin > 7200 else (1, "seconds")
    axes.barh(
        range(run.log.nodes),
        np.nan_to_num(last - first) / scale,
        left=np.nan_to_num(first - begin) / scale,
        color=run.style["color"],
        height=0.7,
    )
    axes.set_xlabel(f"time since the first member's first step ({word})")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(run.log.nodes - 0.5, -0.5)


def traffic(axes: Axes, runs: Sequence[LoggedRun], axis: Axis) -> None:
    """Draw the bytes that a node has sent so far, as a mean over nodes."""
    shown = [run for run in runs if known(run, "bytes_sent")]
    sent = [over_nodes(np.nanmean, run.log.steps["bytes_sent"]) for run in shown]
    largest = max((float(values.max()) for values in sent), default=0.0)
    unit, word = _traffic_unit(largest)
    _dress(axes, "Sent", f"{word} per node since the start (mean)")
    if not largest:
        _nothing(axes, "nothing was sent" if shown else "not measured")
        return
    for run, values in zip(shown, sent, strict=True):
        axes.plot(axis.at(run, run.log.steps["step"] + 1), values / unit, lw=1.8, **run.line)
    axes.set_ylim(bottom=0)


def time(axes: Axes, runs: Sequence[LoggedRun], axis: Axis) -> None:
    """Draw the parts of one run's step time as stacked areas, smoothed over steps.

    Steps that took more than 5 times the median are left out, and counted in the label.
    """
    (run,) = runs
    log = run.log
    is_of_process = is_simulated(log)
    title = "Time to simulate a step" if is_of_process else "Step time"
    label = f"milliseconds {ONE_PROCESS}" if is_of_process else "milliseconds, mean over nodes"
    parts = [name for name in PARTS if known(run, name)]
    if not parts:
        _dress(axes, title, label)
        _nothing(axes, "times are not known" if len(log.steps["step"]) else "no steps yet")
        return
    values = 1e3 * np.stack([over_nodes(np.nanmean, log.steps[name]) for name in parts])
    total = values.sum(0)
    finite = total[np.isfinite(total)]
    # If the first steps and rare delays were drawn, all other steps would look equally short.
    slow = total > 5 * np.median(finite) if len(finite) else np.zeros(len(total), bool)
    values[:, slow] = np.nan
    means = [float(np.nanmean(v)) if np.isfinite(v).any() else 0.0 for v in values]
    note = f"\n(more than 5 × the median omitted: {slow.sum()})" if slow.any() else ""
    _dress(axes, title, label + note)
    shades = [SHADES[list(PARTS).index(name)] for name in parts]
    layers = axes.stackplot(
        axis.at(run, log.steps["step"]),
        [smooth(v) for v in values],
        labels=shares(dict(zip(parts, means, strict=True))),
        colors=[colour for colour, _ in shades],
    )
    for layer, (_, hatch) in zip(layers, shades, strict=True):
        layer.set(hatch=hatch, edgecolor="white", lw=0.3)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    _key(axes, layers)
    key_below_title(axes)  # The legend is as wide as the axes.


def times(axes: Axes, runs: Sequence[LoggedRun]) -> None:
    """Draw the parts of the mean time of a step as a stacked bar for each run.

    Title and label say if these are times of processes that simulate all nodes.
    """
    simulated = sum(is_simulated(run.log) for run in runs)
    _dress(axes, "Time to simulate a step" if simulated == len(runs) else "Step time", "")
    axes.grid(False, axis="y")
    positions = np.arange(len(runs))
    start = np.zeros(len(runs))
    bars = []
    for (part, word), (colour, hatch) in zip(PARTS.items(), SHADES, strict=True):
        length = np.array([mean_ms(run.log, part) for run in runs])
        bars.append(
            axes.barh(
                positions,
                length,
                0.6,
                start,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                label=word,
            )
        )
        start += length
    for position, total in enumerate(start):
        text = f" {three_digits(total)} ms" if total else " times are not known"
        axes.text(total, position, text, va="center", fontsize=9)
    axes.set_yticks(positions, [drawable(run.name) for run in runs])
    for label, run in zip(axes.get_yticklabels(), runs, strict=True):
        label.set(color=run.style["color"], fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * float(start.max()) or 1)
    unit = "milliseconds, mean over nodes and steps"
    if simulated:
        unit = f"milliseconds, mean over steps; {ONE_PROCESS}"
    if 0 < simulated < len(runs):
        unit = f"milliseconds, mean over nodes and steps\n(simulated runs: {ONE_PROCESS})"
    axes.set_xlabel(unit)
    _key(axes, bars)
    if simulated == len(runs):
        key_below_title(axes)  # The longer title leaves no room for the legend next to it.


def stale(run: LoggedRun) -> bool:
    """Return whether nodes have averaged with models of other rounds than their own."""
    return bool((run.log.steps.get("staleness", np.empty(0)) > 0).any())


def known(run: LoggedRun, column: str) -> bool:
    """Return whether a column of the log's steps exists and contains a number."""
    return bool(np.isfinite(run.log.steps.get(column, np.empty(0))).any())


def _dress(axes: Axes, title: str, label: str) -> None:
    """Set the title and the style of a panel, and the label of its vertical axis."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(label)
    axes.grid(True, color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _key(axes: Axes, handles: Iterable) -> None:
    """Put a legend next to the title, above the axes, where it does not cover any line."""
    axes.legend(
        handles=list(handles),
        loc="lower right",
        bbox_to_anchor=(1, 0.99),
        ncols=4,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
        columnspacing=0.9,
        handlelength=1.4,
        handletextpad=0.4,
    )


def key_below_title(axes: Axes) -> None:
    """Move the legend of a narrow panel below its title."""
    if legend := axes.get_legend():
        legend.set_loc("lower left")
        legend.set_bbox_to_anchor((0, 0.99))
        # The legend is about as wide as the axes, and the layout would make the axes narrower.
        legend.set_in_layout(False)
        axes.set_title(axes.get_title("left"), loc="left", fontsize=11, fontweight="bold", pad=22)


def _sample(label: str, **style: Any) -> Any:
    """Return a legend entry for a line style or marker; it is grey, as it applies to all runs."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#444444", label=label, **style)


def _band(label: str) -> Any:
    """Return a legend entry for a shaded range; it is grey, as it applies to all runs."""
    from matplotlib.patches import Patch

    return Patch(color="#444444", alpha=0.2, label=label)


def _note(axes: Axes, text: str, right: bool = False, above: bool = False) -> None:
    """Write a short text in a corner of the panel, by default the lower left corner."""
    position = {"ha": "right", "x": 0.99} if right else {"x": 0.01}
    position |= {"va": "top", "y": 0.98} if above else {"y": 0.02}
    axes.text(s=text, transform=axes.transAxes, fontsize=8.5, color="#666666", **position)


def _nothing(axes: Axes, text: str) -> None:
    """Write the reason why a panel is empty into its centre."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#666666")
