"""`mpigossip plan`: what a step and an epoch would take on n nodes, per graph, cadence and wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from mpigossip.analysis.machine import coding_seconds
from mpigossip.config import CadenceSection, GraphSection, Job, JobError, LocalSection
from mpigossip.graphs import Graph, GraphError
from mpigossip.graphs.theory import averaging_gap, transient_of
from mpigossip.mixing.base import Kind
from mpigossip.training.assemble import make_bare
from mpigossip.training.costs import Exchanges, Subject, exchanges
from mpigossip.training.fit import lacking, unfit
from mpigossip.training.timing.machines import Machine
from mpigossip.training.timing.steps import Timing

GRAPHS = ("one-peer-exponential", "one-peer-hypercube", "base-2", "exponential", "ring")
CADENCES = ("always", "every", "gossip-pga", "cpsgd")
WIRES = ("fp32", "bf16", "qsgd")
ALL_REDUCE = "all-reduce"
GOSSIP = "dmsgd-vanilla"
"""What gossips in place of a job's parallel SGD: local momentum, one vector."""
NEAR = 1.05
"""Choices that take at most so many times as long as the fastest count as equally fast."""
REFERENCE = "exponential"
"""The graph whose transient iterations a recommended choice must not exceed."""


@dataclass(frozen=True)
class Choice:
    """Graph, cadence and wire of a job, everything else as in its file; ALL_REDUCE: parallel."""

    graph: str
    cadence: str = "always"
    wire: str = "fp32"

    def job(self, job: Job) -> Job:
        """The job with this choice; options stay where the name does."""
        if self.graph == ALL_REDUCE:
            return parallel(job)
        if always_global(job):
            section = replace(job.algorithm, name=GOSSIP, options={})
            job = replace(job, algorithm=section, local=LocalSection())
        graph, cadence = job.graph, job.cadence
        if graph.name != self.graph:
            graph = replace(graph, name=self.graph, weights=None, lazy=False, options={})
        if cadence.name != self.cadence:
            cadence = CadenceSection(name=self.cadence)
        node: Any = replace(job.node, **{"wire": self.wire})  # type: ignore[arg-type]
        return replace(job, graph=graph, cadence=cadence, node=node)


def always_global(job: Job) -> bool:
    """Whether the job is a method of global averages at every step."""
    return make_bare(job).always_global


def parallel(job: Job) -> Job:
    """The same training by all-reduce of gradients, exact on the wire."""
    section = replace(job.algorithm, name="parallel", options={})
    return replace(
        job,
        algorithm=section,
        local=LocalSection(),
        graph=GraphSection(name="complete"),
        cadence=CadenceSection(),
        node=replace(job.node, wire="fp32"),
    )


@dataclass(frozen=True)
class Row:
    """One choice on n nodes; seconds, bytes; transient: iterations, without constants."""

    graph: str
    cadence: str
    wire: str
    nodes: int
    step_s: float
    exchange_s: float
    hidden_s: float
    waiting_s: float
    bytes_per_step: float
    steps_per_epoch: int
    epoch_s: float
    total_s: float
    transient: float

    @property
    def choice(self) -> Choice:
        """What it is a row of."""
        return Choice(self.graph, self.cadence, self.wire)


def choices(job: Job, everything: bool = False) -> list[Choice]:
    """All-reduce; then each graph, cadence and wire, one changed at a time, or all products."""
    own = Choice(job.graph.name, job.cadence.name, job.node.wire)
    if always_global(job):
        own = Choice(GRAPHS[0])
    graphs = dict.fromkeys((own.graph, *GRAPHS))
    cadences = dict.fromkeys((own.cadence, *CADENCES))
    wires = dict.fromkeys((own.wire, *WIRES))
    found = [Choice(ALL_REDUCE), *(replace(own, graph=name) for name in graphs)]
    if everything:
        found += [Choice(g, c, w) for g in graphs for c in cadences for w in wires]
    else:
        found += [replace(own, cadence=name) for name in cadences]
        found += [replace(own, wire=name) for name in wires]
    return list(dict.fromkeys(found))


def predict(
    what: Subject,
    machine: Machine,
    choice: Choice,
    n: int,
    epochs: float,
    period: float | None = None,
) -> Row | None:
    """One choice on n nodes; None where the graph doesn't exist for n or the parts don't fit.

    ``period``: average one of an adaptive cadence, where its formula isn't to say it.
    """
    job = choice.job(what.job)
    try:
        made = exchanges(replace(what, job=job), n, period)
    except GraphError:
        return None
    if lacking(made.method.needs, made.graph) or unfit(job, made.graph, made.method, made.cadence):
        return None
    timing = Timing(job, made, _coding(machine, made))
    (exchange, hidden), waiting = timing.mean_s(), timing.waiting_s()
    step = timing.steady_s + exchange - hidden + waiting
    per_epoch = what.steps_per_epoch(n)
    return Row(
        choice.graph, choice.cadence, choice.wire, n, step, exchange, hidden, waiting,
        made.bytes_per_step, per_epoch, per_epoch * step, epochs * per_epoch * step,
        _transient(made, job.data.partition == "shuffled"),
    )  # fmt: skip


_CODED: dict[tuple[str, int], tuple[float, float]] = {}


def _coding(machine: Machine, made: Exchanges) -> Machine:
    """With rates of coding measured here, once for each wire and width, where none are given."""
    layout = made.layout
    if layout.wire.exact or machine.encode_rate:
        return machine
    key = layout.wire.name, layout.vectors * sum(layout.widths)
    if key not in _CODED:
        _CODED[key] = coding_seconds(layout.wire, key[1])
    encode, decode = (layout.nbytes / seconds for seconds in _CODED[key])
    return replace(machine, encode_rate=encode, decode_rate=decode)


def _transient(made: Exchanges, alike: bool) -> float:
    """Transient iterations in theory, for data alike on all nodes or not."""
    counted = made.counted
    gossip = sum(count for (kind, _), count in counted.items() if kind is Kind.GOSSIP)
    everywhere = sum(count for (kind, _), count in counted.items() if kind is Kind.GLOBAL)
    every = made.steps / everywhere if everywhere else float("inf")
    gap = _gap(made.graph) if gossip else 0.0
    found = transient_of(made.graph.n, gap, gossip / made.steps, every)
    return found[0] if alike else found[1]


@lru_cache(maxsize=256)
def _gap(graph: Graph) -> float:
    return averaging_gap(graph)


def table(
    what: Subject,
    machine: Machine,
    nodes: Sequence[int],
    epochs: float,
    period: float | None = None,
) -> list[Row]:
    """Every product of graph, cadence and wire on every number of nodes, refused ones left out."""
    found = (
        predict(what, machine, choice, n, epochs, period)
        for n in nodes
        for choice in choices(what.job, everything=True)
    )
    return [row for row in found if row is not None]


@dataclass(frozen=True)
class Advice:
    """The recommended choice for n nodes and why."""

    row: Row
    reason: str


def recommend(rows: Iterable[Row], n: int) -> Advice:
    """The fastest choice with an exact wire whose transient is at most the reference graph's.

    Among those within `NEAR` of the fastest: the fewest transient iterations, then bytes.
    """
    at = [row for row in rows if row.nodes == n]
    exact = [row for row in at if row.wire == "fp32"]
    plain = [row for row in exact if row.graph == REFERENCE and row.cadence == "always"]
    limit = plain[0].transient if plain else float("inf")
    sound = [row for row in exact if row.transient <= limit * (1 + 1e-9)] or exact or at
    if not sound:
        raise JobError([f"--nodes {n}: no graph fits the job's algorithm with {n} nodes"])
    fastest = min(row.step_s for row in sound)
    best = min(
        (row for row in sound if row.step_s <= NEAR * fastest),
        key=lambda row: (row.transient, row.bytes_per_step, row.step_s),
    )
    return Advice(best, _reason(best, at, sound, limit))


def _reason(best: Row, at: list[Row], sound: list[Row], limit: float) -> str:
    reduce = next((row for row in at if row.graph == ALL_REDUCE), None)
    parts = []
    if reduce and best is not reduce:
        parts.append(f"{reduce.step_s / best.step_s:.2f} x as fast as all-reduce")
    elif reduce:
        second = min((r.step_s for r in sound if r is not reduce), default=reduce.step_s)
        parts.append(
            f"no sound choice is faster by more than {NEAR - 1:.0%} (the next takes "
            f"{second / reduce.step_s:.2f} x as long), and it needs no extra iterations"
        )
    quicker = [r for r in at if r.wire == "fp32" and r.step_s * NEAR < best.step_s]
    if quicker and limit < float("inf"):
        first = min(quicker, key=lambda row: row.step_s)
        parts.append(
            f"{name(first.choice)} would be faster still, with {first.transient / limit:.0f} x "
            f'the transient iterations of "{REFERENCE}"'
        )
    lossy = [r for r in at if r.wire != "fp32" and r.transient <= limit * (1 + 1e-9)]
    lossy = [r for r in lossy if r.step_s * NEAR < best.step_s]
    if lossy:
        first = min(lossy, key=lambda row: row.step_s)
        parts.append(
            f"a lossy wire would bring {best.step_s / first.step_s:.2f} x ({name(first.choice)}), "
            "a loss that theory's figures here don't count"
        )
    return "; ".join(parts)


def name(choice: Choice) -> str:
    """As shown: the graph, then what differs from gossip at every step in full precision."""
    words = [choice.graph]
    words += [choice.cadence] * (choice.cadence != "always")
    return " + ".join([*words, *[choice.wire] * (choice.wire != "fp32")])


def as_json(
    what: Subject, machine: Machine, rows: Sequence[Row], nodes: Sequence[int], epochs: float
) -> dict[str, Any]:
    """All that was predicted, as plain values."""
    advice = {n: recommend(rows, n) for n in nodes}
    return {
        "parameters": what.flat.count,
        "samples_per_step": what.per_step,
        "epochs": epochs,
        "machine": asdict(machine),
        "rows": [_finite(asdict(row)) for row in rows],
        "recommended": {
            str(n): {**asdict(found.row.choice), "reason": found.reason}
            for n, found in advice.items()
        },
    }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: where nothing averages, the transient is null."""
    return row | {"transient": row["transient"] if row["transient"] < float("inf") else None}
