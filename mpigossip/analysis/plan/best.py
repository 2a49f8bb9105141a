"""Propose graph, algorithm, period and wire for a network (`mpigossip plan --best`)."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from mpigossip.analysis.plan import ALL_REDUCE, GOSSIP, NEAR, Choice, Row, always_global, predict
from mpigossip.config import Job, JobError
from mpigossip.config.readable import aligned
from mpigossip.training import assemble
from mpigossip.training.costs import Subject
from mpigossip.training.machines import Machine

PERIODS = (8, 32, 128)
"""Periods H that are tried, in steps."""
FRAGMENTS = 4
"""Number of fragments that are tried with each period; a fragment is exchanged during later
steps."""
WITHIN = 1.1
"""A proposal counts as fast as the fastest one if its time is at most this multiple of it."""
KNOWN = {
    "none": ("", "the same training as on one large node"),
    "one-peer": ("resnet50", "published: +0.02 points (ResNet-50, 32 nodes)"),
    "static": ("", "in theory the same as one-peer"),
    "ring": ("resnet50", "published: -0.63 points (ResNet-50, 32 nodes)"),
    "bf16": ("lenet", "measured: none (steps to a loss, LeNet, 8 nodes)"),
    "diloco": ("lenet", "measured: 1.1-1.4 x the steps at H = 50; it needs its own rate"),
    "gasloc": ("gpt", "measured: loss 5 % above DiLoCo; it needs its own rate"),
}
"""For each choice: the model for which its cost in accuracy is known ("": any), and the cost.

The published values are from Ying et al. 2021's table (76.25 % all-reduce, 76.27 % one-peer,
75.62 % ring). Ours are in jobs/claims/BEYOND.md (LeNet, 8 nodes, steps to a training loss of 1.8:
fp32 231 to 240, bf16 213, DiLoCo with AdamW 269 to 318) and, for GASLoC (published: equal to
DiLoCo), in tools/bench/BENCHMARKS.md (GPT of 2.2 M parameters, 4 nodes, H = 32).
"""


def known(choice: str, job: Job) -> str:
    """Return the cost in accuracy of a choice, as a text.

    The costs in `KNOWN` are used only if they were measured with the job's model and task.
    """
    model, cost = KNOWN[choice]
    task = "language-model" if model == "gpt" else "classification"
    same = not model or (job.model.name, job.task.name) == (model, task)
    return cost if same else "not measured for this model and task"


@dataclass(frozen=True)
class Proposal:
    """Proposal of a graph, an algorithm, a period and a wire.

    With a higher ``level``, fewer bytes are sent, and the risk of a lower accuracy is higher.
    """

    label: str
    level: int
    known: str
    graph: str
    settings: tuple[str, ...]
    row: Row | None = None


def _ways(job: Job, n: int) -> Iterator[Proposal]:
    """Yield all proposals, in the order of their risk; their ``settings`` still lack the graph."""
    always = ("cadence.name=always", "node.wire=fp32")
    yield Proposal("all-reduce (DDP)", 0, "none", ALL_REDUCE, ("algorithm.name=parallel", *always))
    method = job.algorithm.name
    if always_global(job):
        method = GOSSIP
    same_method = (f"algorithm.name={method}",)
    graphs = {
        "one-peer-exponential": "one-peer",
        "one-peer-hypercube": "one-peer",
        "base-2": "one-peer",
        "exponential": "static",
        "ring": "ring",
    }
    for graph, known in graphs.items():
        if n & (n - 1) and graph == "one-peer-exponential":
            continue  # This graph is not exact for n nodes, but base-2 is.
        level = 3 if graph == "ring" else 1
        yield Proposal(f"{method}, {graph}", level, known, graph, (*same_method, *always))
    peer = "base-2" if n & (n - 1) else "one-peer-exponential"
    wire = ("cadence.name=always", "node.wire=bf16")
    yield Proposal(f"{method}, {peer}, bf16", 2, "bf16", peer, (*same_method, *wire))
    for step, period in enumerate(PERIODS):
        level = 4 + step
        seldom = f"cadence.period={period}"
        outer = ("algorithm.name=diloco", "cadence.name=cpsgd", seldom, "node.wire=fp32")
        parts = (f"cadence.fragments={FRAGMENTS}", "cadence.delay=1")
        gasloc = ("algorithm.name=gasloc", "cadence.name=every", seldom, "node.wire=fp32")
        yield Proposal(f"diloco, H = {period}", level, "diloco", "complete", outer)
        label = f"diloco, H = {period}, {FRAGMENTS} fragments"
        yield Proposal(label, level, "diloco", "complete", (*outer, *parts))
        yield Proposal(f"gasloc, {peer}, H = {period}", level, "gasloc", peer, gasloc)


def proposals(
    path: Path, settings: Sequence[str], what: Subject, machine: Machine, n: int, epochs: float = 1
) -> tuple[list[Proposal], dict[str, str]]:
    """Return the proposals that fit a job, and those that do not, with the reason.

    :param path: job file, which the settings of a proposal may follow on the command line
    :param settings: settings of the job
    :param what: the job and its sizes
    :param machine: costs of the machine
    :param n: number of nodes
    :param epochs: number of epochs
    :raises JobError: if no proposal fits
    """
    fitting = []
    left_out = {}
    ranks = f"node.ranks_per_node={what.job.node.ranks_per_node}"
    for proposal in _ways(what.job, n):
        graph = "complete" if proposal.graph == ALL_REDUCE else proposal.graph
        pasted = (*proposal.settings, f"graph.name={graph}")
        try:
            job = assemble.load(path, [*settings, *pasted, ranks])
            problems = [m for m in assemble.mistakes(job, n) if not m.startswith("node.devices")]
            if problems:
                raise JobError(problems)
        except JobError as error:
            left_out[proposal.label] = str(error)
            continue
        choice = Choice(proposal.graph, job.cadence.name, job.node.wire)
        row = predict(replace(what, job=job), machine, choice, n, epochs)
        if row is None:
            left_out[proposal.label] = (
                f"the graph does not exist for {n} nodes, or the parts are incompatible"
            )
        else:
            fitting.append(
                replace(proposal, known=known(proposal.known, job), settings=pasted, row=row)
            )
    if not fitting:
        raise JobError([f"{label}: {why}" for label, why in left_out.items()])
    return fitting, left_out


def best(proposals: Sequence[Proposal]) -> Proposal:
    """Return the proposal with the lowest risk among those that count as fast as the fastest.

    If several have the same risk, return the one that sends the fewest bytes.
    """
    fastest = min(proposal.row.step_s for proposal in proposals)
    near = [proposal for proposal in proposals if proposal.row.step_s <= WITHIN * fastest]
    level = min(proposal.level for proposal in near)
    lowest = [proposal for proposal in near if proposal.level == level]
    fastest_of_level = min(proposal.row.step_s for proposal in lowest)
    lowest = [proposal for proposal in lowest if proposal.row.step_s <= NEAR * fastest_of_level]
    return min(lowest, key=lambda proposal: (proposal.row.bytes_per_step, proposal.row.step_s))


def text(
    job: Path,
    settings: Sequence[str],
    proposals: Sequence[Proposal],
    left_out: dict[str, str],
    n: int,
) -> str:
    """Return a text with a table of proposals, the fastest first, and the command to use.

    :param job: job file
    :param settings: settings of the job
    :param proposals: proposals
    :param left_out: for each proposal that does not fit, by name, the reason
    :param n: number of nodes
    """
    chosen = best(proposals)
    reduce = next((proposal.row.step_s for proposal in proposals if proposal.level == 0), None)
    near = f"(* proposed: the lowest risk within {WITHIN - 1:.0%} of the fastest)"
    lines = [f"{n} nodes, predicted, fastest first", near]
    notes = list(dict.fromkeys(proposal.known for proposal in proposals))
    rows = [("", "ms/step", "MB/step", "accuracy")]
    for proposal in sorted(proposals, key=lambda proposal: proposal.row.step_s):
        label = f"{'*' if proposal is chosen else ' '} {proposal.label}"
        cost = f"{1e3 * proposal.row.step_s:.4g}", f"{proposal.row.bytes_per_step / 1e6:.3g}"
        rows.append((label, *cost, f"({1 + notes.index(proposal.known)})"))
    lines += [aligned(rows), "", "cost in accuracy:"]
    lines += [f"({number}) {note}" for number, note in enumerate(notes, 1)]
    if reduce is not None and chosen.level:
        gain = f"{reduce / chosen.row.step_s:.2f} x as fast as all-reduce; "
    else:
        gain = "sending less is not faster; " if not chosen.level else ""
    command = shlex.join(["mpigossip", "train", str(job), *settings, *chosen.settings])
    lines += ["", f"{gain}the command:", f"  {command}"]
    for label, why in left_out.items():
        lines += wrap(f"left out: {label}: {why.splitlines()[0]}", 80, subsequent_indent="  ")
    return "\n".join(lines)


def as_json(proposals: Sequence[Proposal], left_out: dict[str, str]) -> dict[str, Any]:
    """Return the proposals, and the reasons for those that do not fit, as a dict for JSON."""
    chosen = best(proposals)
    rows = [
        {
            "label": proposal.label,
            "level": proposal.level,
            "known": proposal.known,
            "settings": list(proposal.settings),
            "proposed": proposal is chosen,
            **proposal.row.as_json(),
        }
        for proposal in proposals
    ]
    return {"proposals": rows, "left_out": left_out}
