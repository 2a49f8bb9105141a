"""Text and plot of the predictions of `mpigossip plan`."""

import math
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mpigossip.analysis.plan import (
    ALL_REDUCE,
    GOSSIP,
    Choice,
    Row,
    always_global,
    choices,
)
from mpigossip.analysis.plan import name as named
from mpigossip.config.readable import aligned
from mpigossip.training.costs import Subject
from mpigossip.training.machines import Machine

WIDTH = 80
"""Largest number of characters in a line; a narrower terminal gets shorter lines."""


EXPLAINED = (
    "(transient: iterations until n nodes are n times as fast, in theory and up to a constant: "
    "compare them, but do not add them)"
)
PROPOSED = "`mpigossip plan … --best` proposes graph, algorithm, H and wire"
ASSUMED = "all-reduce as in DDP, with buckets sent during backward"
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def text(
    what: Subject,
    machine: Machine,
    rows: Sequence[Row],
    nodes: Sequence[int],
    epochs: float,
    note: str = "",
) -> str:
    """Return a text with two tables: all numbers of nodes, and details for the last one.

    :param what: the job and its sizes
    :param machine: costs of the machine
    :param rows: predictions
    :param nodes: numbers of nodes; the second table is for the last one
    :param epochs: number of epochs
    :param note: remark on the job
    """
    shown = [choice for choice in choices(what.job) if any(r.choice == choice for r in rows)]
    row_of = {(row.choice, row.nodes): row for row in rows}
    own_choice = shown[1] if len(shown) > 1 else shown[0]
    labels = {choice: _label(choice, own_choice) for choice in shown}
    last = nodes[-1]
    times = {key: _short(1e3 * row.step_s) for key, row in row_of.items()}
    steps = [["ms/step, nodes:", *(f"{n:,}" for n in nodes)]]
    steps += [[labels[c], *(times.get((c, n), "-") for n in nodes)] for c in shown]
    head = ["ms/step", "hidden", "MB/step", "epoch", f"{epochs:g} epochs", "transient"]
    details = [[f"at {last:,} nodes", *head]]
    details += [[labels[c], *_details(row_of[c, last])] for c in shown if (c, last) in row_of]
    lines = [*_head(what, machine, note), aligned(steps), "", aligned(details)]
    lines += [*_wrapped(EXPLAINED), "", *_wrapped(PROPOSED)]
    return "\n".join(lines)


def _wrapped(words: str, indent: str = "") -> list[str]:
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    return textwrap.wrap(words, width, subsequent_indent=indent, break_on_hyphens=False)


def _head(what: Subject, machine: Machine, note: str) -> list[str]:
    job = what.job
    sources = machine.sources
    method = job.algorithm.name
    if always_global(job):
        method = f"{method}; gossip as {GOSSIP}"
    paragraphs = (
        f"{job.run.name}: {what.flat.count:,} parameters, {method}, {what.per_step} samples per "
        f"node and step" + (f"; {note}" if note else ""),
        f"compute {_time(machine.compute_s)} ({sources['compute']}), within the node "
        f"{_time(machine.node_s)} ({sources['node-local']}), update {_time(machine.update_s)}",
        f"jitter of compute {machine.jitter:.1%} ({sources.get('jitter', 'not given')}), sum "
        f"{machine.combine_rate / 1e9:.3g} GB/s ({sources.get('sum', 'given')}); {ASSUMED}",
        f"latency {_time(machine.latency_s)} ({sources['latency']}), bandwidth "
        f"{machine.bandwidth / 1e9:.3g} GB/s ({sources['bandwidth']}); {machine.where}",
    )
    return [*(line for words in paragraphs for line in _wrapped(words, "  ")), ""]


def _label(choice: Choice, own: Choice) -> str:
    """Return the first cell of a row: the graph, or the cadence or wire that differs.

    :param choice: the choice of the row
    :param own: the job's own choice
    """
    if choice.cadence != own.cadence and choice.graph != ALL_REDUCE:
        return f"  cadence {choice.cadence}"
    if choice.wire != own.wire and choice.graph != ALL_REDUCE:
        return f"  wire {choice.wire}"
    return choice.graph


def _details(row: Row) -> list[str]:
    hidden = f"{row.hidden_s / row.exchange_s:.0%}" if row.exchange_s else "-"
    megabytes = _short(row.bytes_per_step / 1e6)
    times = [_time(row.epoch_s), _time(row.total_s)] if row.steps_per_epoch else ["-", "-"]
    return [_short(1e3 * row.step_s), hidden, megabytes, *times, f"{row.transient:.1g}"]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _time(value: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if value >= 2 * length or unit == "ms" and value >= 1e-3:
            return f"{_short(value / length)} {unit}"
    return f"{1e6 * value:.3g} µs"


def picture(
    what: Subject, rows: Sequence[Row], nodes: Sequence[int], epochs: float, out: Path
) -> None:
    """Plot the time of a step and of the whole training against the number of nodes, as a PNG.

    :param what: the job and its sizes
    :param rows: predictions
    :param nodes: numbers of nodes
    :param epochs: number of epochs
    :param out: file to write
    """
    from matplotlib.figure import Figure

    from mpigossip.store.hdf5 import replacing
    from mpigossip.studies.drawing import COLOURS
    from mpigossip.studies.drawing import style as style_of

    figure = Figure(figsize=(12.4, 5.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    longest = max(row.total_s for row in rows)
    unit, scale = next((u for u in UNITS if longest >= 2 * u[1]), UNITS[-1])
    for k, choice in enumerate(choices(what.job)):
        own_rows = [row for row in rows if row.choice == choice]
        colour = COLOURS[-1] if choice.graph == ALL_REDUCE else COLOURS[k % 6]
        style = style_of(k) | {"color": colour, "ms": 5, "label": named(choice)}
        if own_rows:
            counts = [row.nodes for row in own_rows]
            left.plot(counts, [1e3 * row.step_s for row in own_rows], **style)
            right.plot(counts, [row.total_s / scale or math.nan for row in own_rows], **style)
    for axis, label, title in (
        (left, "milliseconds", "A step"),
        (right, unit, f"{epochs:g} epochs"),
    ):
        axis.set(xlabel="nodes", ylabel=label, title=title, xscale="log", xticks=nodes)
        axis.set_xticks(nodes, [f"{n:,}" for n in nodes], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.4)
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"{what.job.run.name}: predicted")
    with replacing(Path(out)) as temporary:
        figure.savefig(temporary, format="png")
