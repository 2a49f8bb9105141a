"""Text and plot of the predictions of `mpigossip plan`."""

import math
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mpigossip.algorithms.cadence import BUILDERS
from mpigossip.analysis.logged_runs import drawable
from mpigossip.analysis.plan import (
    ALL_REDUCE,
    GOSSIP,
    NEAR,
    Choice,
    Prediction,
    always_global,
    choices,
    predict,
)
from mpigossip.analysis.plan import name as named
from mpigossip.analysis.plan.gpu_costs import style_of
from mpigossip.config import CadenceSection, Job
from mpigossip.config.choices import keyword_only, spec_of
from mpigossip.config.readable import aligned, pluralize, three_digits
from mpigossip.training.costs import Subject
from mpigossip.training.machines import Machine

ALONE = "this process only"
"""Description of a machine that one process has measured."""
WIDTH = 80
"""Largest number of characters in a line; a narrower terminal gets shorter lines."""


EXPLAINED = (
    "ms/step: average step on each number of nodes. hidden: part of the exchange that overlaps "
    "with computing. MB/step: bytes that a node sends in an average step.{epoch} Indented rows "
    "change the cadence or the wire of the graph above them. all-reduce is PyTorch's "
    "DistributedDataParallel, which sends buckets during the last backward pass."
)
"""Explanation of the tables; `EPOCH` takes the place of {epoch} if they have such columns."""
EPOCH = " epoch: one pass over the data."
HINT = (
    "hint: if a node has {count} GPUs, add node.devices={devices}: they encode, add and update "
    "their shards at the same time, and {row} takes {faster} instead of {time} ms."
)
"""Sentence of :func:`device_hint`."""
PROPOSED = "`mpigossip plan … --best` proposes graph, algorithm, H and wire"
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
"""Units of the time of a training in the plot, each with its length in seconds."""


def text(
    what: Subject,
    machine: Machine,
    rows: Sequence[Prediction],
    nodes: Sequence[int],
    epochs: float,
    note: str = "",
    hint: str = "",
) -> str:
    """Return a text with two tables: all numbers of nodes, and details for the last number.

    :param what: the job and its sizes
    :param machine: costs of the machine
    :param rows: predictions
    :param nodes: numbers of nodes; the second table is for the last one
    :param epochs: number of epochs
    :param note: remark on the job
    :param hint: sentence below the explanation of the tables, see :func:`device_hint`; "": none
    """
    half_gradients = what.module.element_size == 2
    candidates = choices(what.job, bf16=half_gradients)
    shown = [choice for choice in candidates if any(r.choice == choice for r in rows)]
    row_of = {(row.choice, row.nodes): row for row in rows}
    own_choice = candidates[1]
    labels = {choice: _label(choice, own_choice, shown, what.job) for choice in shown}
    last = nodes[-1]
    times = {key: three_digits(1e3 * row.step_s) for key, row in row_of.items()}
    steps = [["ms/step, nodes:", *(f"{n:,}" for n in nodes)]]
    steps += [[labels[c], *(times.get((c, n), "-") for n in nodes)] for c in shown]
    head = ["ms/step", "hidden", "MB/step"]
    if what.samples:
        head += ["epoch", f"{epochs:g} epochs"]
    details = [[f"at {last:,} nodes", *head]]
    details += [
        [labels[c], *_details(row_of[c, last])[: len(head)]] for c in shown if (c, last) in row_of
    ]
    lines = [*_head(what, machine, note), aligned(steps), "", aligned(details), ""]
    lines += [
        *_wrapped(EXPLAINED.format(epoch=EPOCH if what.samples else "")),
        "",
    ]
    if hint:
        lines += [*_wrapped(hint), ""]
    lines += _wrapped(PROPOSED)
    return "\n".join(lines)


def device_hint(
    what: Subject,
    rows: Sequence[Prediction],
    n: int,
    more: Subject,
    machine: Machine,
    period: float | None = None,
    per_tensor: bool = False,
) -> str:
    """Return a sentence that names more devices per node if they make a row of the text faster.

    It names the row whose time decreases most, if it decreases by a factor of more than `NEAR`.

    :param what: the job and its sizes
    :param rows: predictions for the job
    :param n: number of nodes
    :param more: the job with more devices per node
    :param machine: costs of a machine with these devices
    :param period: mean period of an adaptive cadence, with which the rows were predicted; None: the
        period of the job
    :param per_tensor: whether the rows count one global average per tensor
    :returns: the sentence; "" if no row becomes much faster
    """
    shown = choices(what.job, bf16=what.module.element_size == 2)
    gains = list[tuple[float, Prediction, Prediction]]()
    for row in rows:
        if row.nodes != n or row.choice not in shown:
            continue
        faster = predict(more, machine, row.choice, n, 0, period, per_tensor)
        if faster is not None:
            gains.append((row.step_s / faster.step_s, row, faster))
    if not gains:
        return ""
    gain, row, faster = max(gains, key=lambda each: each[0])
    if gain <= NEAR:
        return ""
    return HINT.format(
        count=more.slots,
        devices=more.job.node.devices,
        row=named(row.choice),
        faster=three_digits(1e3 * faster.step_s),
        time=three_digits(1e3 * row.step_s),
    )


def _wrapped(words: str, indent: str = "") -> list[str]:
    """Return a text as lines of at most `WIDTH` characters; all but the first are indented."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    return textwrap.wrap(words, width, subsequent_indent=indent, break_on_hyphens=False)


def _head(what: Subject, machine: Machine, note: str) -> list[str]:
    """Return the subject of the plan, and a table of the assumed properties of the machine.

    :param what: the job and its sizes
    :param machine: costs of the machine
    :param note: remark on the job; "": there is none
    """
    job = what.job
    method = job.algorithm.name
    if always_global(job):
        method = f"{method}; gossip as {GOSSIP}"
    if style := style_of(choices(job)[1].job(job)):
        method = f"{method}, style {style}"
    samples = f", {what.per_step} samples per node and step" if what.samples else ""
    if cadence := _name_cadence(job.cadence):
        method = f"{method}, {cadence}"
    subject = f"{job.run.name}: {what.flat.count:,} parameters, {method}{samples}"
    table = [["assumptions", "value", "origin"], *_assumptions(machine, job)]
    lines = _wrapped(f"{subject}; {note}" if note else subject, "  ")
    return [*lines, "", aligned(table, left=(0, 2)), ""]


def _assumptions(machine: Machine, job: Job) -> list[list[str]]:
    """Return the rows of a table: name, value and origin of each property of the machine."""
    own_bandwidth = machine.global_bandwidth != machine.bandwidth
    own_latency = machine.global_latency_s != machine.latency_s
    rows = [
        ("computing of a step", _time(machine.compute_s), "compute"),
        ("averaging in the node", _time(machine.node_s), "node-local"),
        ("update", _time(machine.update_s), "update"),
        ("jitter of computing", f"{machine.jitter:.1%}", "jitter"),
        ("sum of two vectors", _rate(machine.combine_rate), "sum"),
    ]
    # On CPUs, the rate is 0 here unless it is given, because it is measured for each wire.
    if machine.encode_rate:
        rows.append(("encoding of a wire", _rate(machine.encode_rate), "coding"))
    rows += [
        ("latency of a message", _time(machine.latency_s), "latency"),
        ("bandwidth of a node", _rate(machine.bandwidth), "bandwidth"),
    ]
    if own_latency:
        rows.append(
            ("latency in all-reduce", _time(machine.global_latency_s), "all-reduce latency")
        )
    if own_bandwidth:
        rows.append(
            ("bandwidth in all-reduce", _rate(machine.global_bandwidth), "all-reduce bandwidth")
        )
    table = [[name, value, _origin(machine, key)] for name, value, key in rows]
    passes = ["backward passes of a step", str(job.algorithm.accumulate), "algorithm.accumulate"]
    table.insert(1, passes)
    return [*table, ["devices of a node", job.node.devices, _origin_of_devices(machine, job)]]


def _origin(machine: Machine, name: str) -> str:
    """Return the origin of a property of the machine, such as "measured here" or "assumed".

    :param machine: the machine
    :param name: name of the property in `Machine.sources`
    """
    origin = machine.sources.get(name, machine.sources.get(name.removeprefix("all-reduce "), ""))
    if origin == "measured":
        return "measured here" if machine.where == ALONE else f"measured here, {machine.where}"
    return "assumed" if origin in ("", "not given") else origin


def _origin_of_devices(machine: Machine, job: Job) -> str:
    """Return a text on the origin of the devices of a node: a measurement, or a setting."""
    if machine.sources.get("compute") == "measured":
        return "their steps were timed here"
    return "node.devices"


def _label(choice: Choice, own: Choice, shown: Sequence[Choice], job: Job) -> str:
    """Return the first cell of a row: its graph, or the cadence or wire that differs from the job.

    :param choice: the choice of the row
    :param own: the job's own choice
    :param shown: choices of all rows
    :param job: the job
    """
    if replace(own, graph=choice.graph) not in shown:
        return named(choice)  # No row above it names the graph.
    if choice.cadence != own.cadence and choice.graph != ALL_REDUCE:
        return f"  {_name_cadence(choice.job(job).cadence) or f'cadence {choice.cadence}'}"
    if choice.wire != own.wire and choice.graph != ALL_REDUCE:
        return f"  wire {choice.wire}"
    return choice.graph


def _name_cadence(section: CadenceSection) -> str:
    """Return the name and the period of a cadence, such as "cpsgd, every 8 steps".

    :param section: the cadence
    :returns: the text; for the cadence "every", "every 16 steps"; "" without a constant period
    """
    spec = spec_of(BUILDERS, section.name)
    options = keyword_only(spec.build)[0] if spec else {}
    period = section.options.get("period", options.get("period", (None, None))[1])
    if period is None or section.name in ("adpsgd", "gossip-aga", "qsr"):
        return ""
    longest = period if isinstance(period, int) else max(period)
    steps = f"every {pluralize(longest, 'step')}" if longest > 1 else "every step"
    return steps if section.name == "every" else f"{section.name}, {steps}"


def _details(row: Prediction) -> list[str]:
    """Return the cells of the second table: ms/step, hidden part, MB/step, and two durations."""
    hidden = f"{row.hidden_s / row.exchange_s:.0%}" if row.exchange_s else "-"
    megabytes = three_digits(row.bytes_per_step / 1e6)
    times = [_time(row.epoch_s), _time(row.total_s)] if row.steps_per_epoch else ["-", "-"]
    return [three_digits(1e3 * row.step_s), hidden, megabytes, *times]


def _rate(value: float) -> str:
    """Return a rate in bytes per second, such as "25 GB/s"."""
    if value >= 1e9:
        return f"{three_digits(value / 1e9)} GB/s"
    return f"{three_digits(value / 1e6)} MB/s"


def _time(value: float) -> str:
    """Return a duration in seconds as a text, such as "80 ms"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if value >= 2 * length or unit == "ms" and value >= 1e-3:
            return f"{three_digits(value / length)} {unit}"
    return f"{three_digits(1e6 * value)} µs"


def picture(
    what: Subject, rows: Sequence[Prediction], nodes: Sequence[int], epochs: float, out: Path
) -> None:
    """Plot the time of a step and of the whole training against the number of nodes, as a PNG.

    The training is left out if its time is not known, because only the size of the model is known,
    or if it has no epoch.

    :param what: the job and its sizes
    :param rows: predictions
    :param nodes: numbers of nodes
    :param epochs: number of epochs
    :param out: file to write
    :raises StoreError: if the file can't be written
    """
    from matplotlib.figure import Figure

    from mpigossip.store.hdf5 import replacing
    from mpigossip.studies.drawing import COLOURS
    from mpigossip.studies.drawing import style as style_of

    longest = max(row.total_s for row in rows)
    panels = 2 if longest else 1
    figure = Figure(figsize=(12.4, 5.6), dpi=130, layout="constrained")
    left, *others = figure.subplots(1, panels, squeeze=False)[0]
    unit, scale = next((u for u in UNITS if longest >= 2 * u[1]), UNITS[-1])
    for k, choice in enumerate(choices(what.job)):
        own_rows = [row for row in rows if row.choice == choice]
        colour = COLOURS[-1] if choice.graph == ALL_REDUCE else COLOURS[k % 6]
        style = style_of(k) | {"color": colour, "ms": 5, "label": named(choice)}
        if own_rows:
            counts = [row.nodes for row in own_rows]
            left.plot(counts, [1e3 * row.step_s for row in own_rows], **style)
            for right in others:
                right.plot(counts, [row.total_s / scale or math.nan for row in own_rows], **style)
    labels = [("milliseconds", "A step"), (unit, f"{epochs:g} epochs")][:panels]
    for axis, (label, title) in zip((left, *others), labels, strict=True):
        axis.set(xlabel="nodes", ylabel=label, title=title, xscale="log", xticks=nodes)
        axis.set_xticks(nodes, [f"{n:,}" for n in nodes], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.4)
    left.set_ylim(bottom=0)
    for right in others:
        right.set_yscale("log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(drawable(f"{what.job.run.name}: predicted"))
    with replacing(Path(out)) as temporary:
        figure.savefig(temporary, format="png")
