"""Proposals of graph, algorithm, period and wire for a network (`mpigossip plan --best`)."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from mpigossip.analysis.plan import (
    ALL_REDUCE,
    GOSSIP,
    NEAR,
    Choice,
    Prediction,
    always_global,
    predict,
)
from mpigossip.analysis.plan.gpu_costs import style_of
from mpigossip.analysis.plan.quality import Accept, Evidence, nearest
from mpigossip.config import Job, JobError
from mpigossip.config.readable import aligned, three_digits
from mpigossip.config.sections import FaultsSection
from mpigossip.training import assemble
from mpigossip.training.costs import Subject
from mpigossip.training.machines import Machine

PERIODS = (8, 32, 128)
"""Periods H that are tried, in steps."""
FRAGMENTS = 4
"""Number of fragments that are tried with each period; a fragment is exchanged during later
steps."""
PERIODIC = ("diloco", "gasloc")
"""Algorithms that are proposed with the periods above only, and not with an exchange per step."""
WITHIN = 1.1
"""A proposal counts as fast as the fastest one if its time is at most this multiple of it."""


@dataclass(frozen=True)
class Proposal:
    """Proposal of a graph, an algorithm, a period and a wire.

    With a higher ``level``, the risk of a lower accuracy is higher; all-reduce has the level 0.
    """

    label: str
    level: int
    graph: str
    settings: tuple[str, ...]
    """Settings of the proposal, which follow the settings of the job on the command line."""
    job_settings: tuple[str, ...] = ()
    """Settings of the job that the proposal keeps, see :func:`_kept`."""
    row: Prediction | None = None
    """Prediction of the proposal; None until it is made."""
    evidence: Evidence | None = None
    """The nearest measurement of what the method costs; None: not measured."""
    style: str = ""
    """Style of its algorithm, "atc" or "awc"; "" if the algorithm has none."""

    @property
    def cost(self) -> str:
        """Description of the measured cost in quality."""
        if not self.level:
            return "none: this is what the others are compared with"
        if self.evidence is None:
            return "not measured"
        measured = self.evidence.style
        if measured == self.style:
            return self.evidence.text
        return f"{self.evidence.text}; measured with style {measured}, not {self.style}"

    def fulfils(self, accept: Accept) -> bool:
        """Return whether the measured cost is acceptable; all-reduce costs nothing."""
        return not self.level or (self.evidence is not None and self.evidence.fulfils(accept))


def _ways(job: Job, n: int) -> Iterator[Proposal]:
    """Yield all proposals on n nodes; the caller adds the graph to their ``settings``."""
    always = ("cadence.name=always", "node.wire=fp32")
    averages = ("algorithm.average_state={}",) * bool(job.algorithm.average_state)
    weights = ("algorithm.node_weights=equal",) * (job.algorithm.node_weights != "equal")
    unblended = ("algorithm.blend=none",) * (job.algorithm.blend is not None)
    # The blend of a job with a delay is meant for the delay.
    whole_blend = unblended * bool(job.cadence.options.get("delay", 0))
    waits = ("node.mixer=synchronous",) * (job.node.mixer != "synchronous")
    reduce = ("algorithm.name=parallel", *averages, *weights, *unblended, *always)
    reduce = (*reduce, *waits, *_without_faults(job))
    yield Proposal("all-reduce (DDP)", 0, ALL_REDUCE, reduce)
    method = job.algorithm.name
    if always_global(job):
        method = GOSSIP
    same_method: tuple[str, ...] = (f"algorithm.name={method}", *weights, *whole_blend)
    if method in PERIODIC:
        method = "dsgd"
        same_method = ("algorithm.name=dsgd", "algorithm.style=awc", *weights, *unblended)
    graphs = ("one-peer-exponential", "one-peer-hypercube", "base-2", "exponential", "ring")
    for graph in graphs:
        if n & (n - 1) and graph == "one-peer-exponential":
            continue  # This graph is not exact for n nodes, but base-2 is.
        level = 3 if graph == "ring" else 1
        yield Proposal(f"{method}, {graph}", level, graph, (*same_method, *always))
    peer = "base-2" if n & (n - 1) else "one-peer-exponential"
    wire = ("cadence.name=always", "node.wire=bf16")
    yield Proposal(f"{method}, {peer}, bf16", 2, peer, (*same_method, *wire))
    for step, period in enumerate(PERIODS):
        level = 4 + step
        seldom = f"cadence.period={period}"
        outer = ("algorithm.name=diloco", *weights, "cadence.name=cpsgd", seldom, "node.wire=fp32")
        parts = (f"cadence.fragments={FRAGMENTS}", "cadence.delay=1")
        gasloc = ("algorithm.name=gasloc", *weights, "cadence.name=every", seldom, "node.wire=fp32")
        whole = (*_whole_model(job, "cpsgd"), *whole_blend)
        yield Proposal(f"diloco, H = {period}", level, "complete", (*outer, *whole))
        label = f"diloco, H = {period}, {FRAGMENTS} fragments"
        yield Proposal(label, level, "complete", (*outer, *parts))
        whole = (*_whole_model(job, "every"), *whole_blend)
        yield Proposal(f"gasloc, {peer}, H = {period}", level, peer, (*gasloc, *whole))


def _without_faults(job: Job) -> tuple[str, ...]:
    """Return settings that undo the job's settings in `[faults]`; () if there are none."""
    defaults = asdict(FaultsSection())
    own = asdict(job.faults)
    return tuple(f"faults.{k}={defaults[k]}" for k, v in own.items() if v != defaults[k])


def _graph_of(job: Job, name: str) -> tuple[str, ...]:
    """Return settings of the graph ``name`` with its own weights, unless it is the job's graph."""
    section = job.graph
    if name == section.name:
        return (f"graph.name={name}",)
    weights = ("graph.weights=none",) * (section.weights is not None)
    lazy = ("graph.lazy=false",) * section.lazy
    return (f"graph.name={name}", *weights, *lazy)


def _kept(job: Job, settings: Sequence[str], pasted: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of the job that a proposal neither replaces nor excludes.

    The result lacks keys that occur again later, options of another algorithm or graph, and all
    options of the cadence, which the proposal names completely.

    :param job: the job
    :param settings: settings of the job, as on the command line
    :param pasted: settings of the proposal
    """
    later = {_key(setting) for setting in pasted}
    later |= {f"cadence.{option}" for option in job.cadence.options}
    for name, section in (("algorithm", job.algorithm), ("graph", job.graph)):
        if f"{name}.name={section.name}" not in pasted:
            later |= {f"{name}.{option}" for option in section.options}
    kept = list[str]()
    for setting in reversed(settings):
        if _key(setting) not in later:
            kept.append(setting)
            later.add(_key(setting))
    return tuple(reversed(kept))


def _key(setting: str) -> str:
    """Return the name "section.key" of a setting "section.key=value"."""
    return setting.partition("=")[0].strip()


def _whole_model(job: Job, cadence: str) -> tuple[str, ...]:
    """Return settings that undo fragments and a delay of the job's own cadence; () without any.

    :param job: the job
    :param cadence: name of the proposed cadence
    """
    if job.cadence.name != cadence:
        return ()
    plain = {"fragments": 1, "delay": 0}
    own = job.cadence.options
    return tuple(f"cadence.{k}={v}" for k, v in plain.items() if own.get(k, v) != v)


def proposals(
    where: Path | dict[str, Any],
    settings: Sequence[str],
    what: Subject,
    machine: Machine,
    n: int,
    epochs: float = 1,
) -> tuple[list[Proposal], dict[str, str]]:
    """Return the proposals that fit a job, and for each other proposal the reason why it does not.

    :param where: job file, which the settings of a proposal may follow on the command line, or a
        job as a dict
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
        pasted = (*proposal.settings, *_graph_of(what.job, graph))
        try:
            job_settings = _kept(what.job, settings, pasted)
            job = assemble.load(where, [*job_settings, *pasted, ranks])
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
            evidence = nearest(job, n, what.flat.count, any_task=not what.samples)
            fitting.append(
                replace(
                    proposal,
                    settings=pasted,
                    job_settings=job_settings,
                    row=row,
                    evidence=evidence,
                    style=style_of(job),
                )
            )
    if not fitting:
        raise JobError([f"{label}: {why}" for label, why in left_out.items()])
    return fitting, left_out


def best(proposals: Sequence[Proposal], accept: Accept) -> Proposal | None:
    """Return the proposal with the lowest risk among those that are about as fast as the fastest.

    A proposal is about as fast if its step takes at most `WITHIN` times as long. Only proposals
    whose measured cost in quality is acceptable are considered. If several proposals have the
    lowest risk, only those whose steps take at most `NEAR` times as long as the fastest of them
    remain, and the result is the one that sends the fewest bytes.

    :param proposals: proposals with their predictions
    :param accept: largest acceptable cost
    :returns: the proposal; None if no cost is acceptable and all-reduce is not among the proposals
    """
    acceptable = [proposal for proposal in proposals if proposal.fulfils(accept)]
    if not acceptable:
        return None
    fastest = min(proposal.row.step_s for proposal in acceptable)
    near = [proposal for proposal in acceptable if proposal.row.step_s <= WITHIN * fastest]
    level = min(proposal.level for proposal in near)
    lowest = [proposal for proposal in near if proposal.level == level]
    fastest_of_level = min(proposal.row.step_s for proposal in lowest)
    lowest = [proposal for proposal in lowest if proposal.row.step_s <= NEAR * fastest_of_level]
    return min(lowest, key=lambda proposal: (proposal.row.bytes_per_step, proposal.row.step_s))


def text(
    job: Path | None,
    proposals: Sequence[Proposal],
    left_out: dict[str, str],
    n: int,
    accept: Accept,
) -> str:
    """Return a table of proposals, fastest first, with the conclusion and the command to run.

    If the conclusion is to use all-reduce, there is no command, because the rows of all-reduce
    predict DistributedDataParallel and not this package's own all-reduce.

    :param job: job file; None: only the size of the model is known, so that the result has the
        settings of the proposal instead of a command
    :param proposals: proposals
    :param left_out: for each proposal that does not fit, by name, the reason
    :param n: number of nodes
    :param accept: largest acceptable cost in quality
    """
    chosen = best(proposals, accept)
    styled = [proposal for proposal in proposals if proposal.style]
    styles = dict.fromkeys(f"; style of {p.label.partition(',')[0]}: {p.style}" for p in styled)
    lines = wrap(f"{n} nodes, predicted, fastest first{''.join(styles)}", 80)
    notes = list(dict.fromkeys(proposal.cost for proposal in proposals))
    rows = [("", "ms/step", "MB/step", "cost")]
    for proposal in sorted(proposals, key=lambda proposal: proposal.row.step_s):
        label = f"{'*' if proposal is chosen else ' '} {proposal.label}"
        row = proposal.row
        figures = three_digits(1e3 * row.step_s), three_digits(row.bytes_per_step / 1e6)
        rows.append((label, *figures, f"({1 + notes.index(proposal.cost)})"))
    lines += [aligned(rows), "", "measured cost in quality, compared with all-reduce:"]
    for number, note in enumerate(notes, 1):
        lines += wrap(f"({number}) {note}", 80, subsequent_indent="    ")
    lines += ["", *wrap(_conclusion(proposals, chosen, accept, notes), 80)]
    if chosen is not None and chosen.level:
        chosen_settings = [*chosen.job_settings, *chosen.settings]
        if job is None:
            lines += ["its settings, in a job file of your own:"]
            lines += [f"  {shlex.join(chosen_settings)}"]
        else:
            command = shlex.join(["mpigossip", "train", str(job), *chosen_settings])
            lines += ["the command:", f"  {command}"]
    for label, why in left_out.items():
        lines += wrap(f"left out: {label}: {why.splitlines()[0]}", 80, subsequent_indent="  ")
    return "\n".join(lines)


def _conclusion(
    proposals: Sequence[Proposal], chosen: Proposal | None, accept: Accept, notes: Sequence[str]
) -> str:
    """Return the last sentence of the text: which proposal to use, and the reason.

    :param proposals: all proposals
    :param chosen: result of :func:`best`
    :param accept: largest acceptable cost in quality
    :param notes: footnotes of the table, which the sentence refers to by number
    """
    limit = f"{accept.loss:.3g} % of the loss or {accept.points:.3g} points of accuracy (--accept)"
    if chosen is None:
        return f"No proposal has a measured cost of at most {limit}."
    reduce = next((proposal.row.step_s for proposal in proposals if not proposal.level), None)
    if chosen.level:
        gain = f"{reduce / chosen.row.step_s:.2f} x as fast as all-reduce" if reduce else "proposed"
        return f"* {chosen.label}: {gain}, with the cost ({1 + notes.index(chosen.cost)})."
    keep = "Keep DistributedDataParallel (or HSDP)."
    fastest = min(proposal.row.step_s for proposal in proposals)
    if WITHIN * fastest >= chosen.row.step_s:
        reason = "on this network, sending less is not faster by a tenth."
    else:
        reason = f"no faster proposal has a measured cost of at most {limit}."
    return f"Stay with all-reduce: {reason} {keep}"


def as_json(
    proposals: Sequence[Proposal], left_out: dict[str, str], accept: Accept
) -> dict[str, Any]:
    """Return the proposals, with their predictions and measured costs, as a dict for JSON.

    :param proposals: proposals with their predictions
    :param left_out: for each proposal that does not fit, by name, the reason
    :param accept: largest acceptable cost in quality
    """
    chosen = best(proposals, accept)
    rows = [
        {
            "label": proposal.label,
            "level": proposal.level,
            "cost": proposal.cost,
            "evidence": asdict(proposal.evidence) if proposal.evidence else None,
            "settings": list(proposal.settings),
            "style": proposal.style or None,
            "proposed": proposal is chosen,
            **proposal.row.as_json(),
        }
        for proposal in proposals
    ]
    return {"proposals": rows, "left_out": left_out, "accept": asdict(accept)}
