"""Predictions of the time of a step and of an epoch on n nodes, per graph, cadence and wire."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import isfinite
from typing import Any

from mpigossip.analysis.machine import coding_seconds, fit_nodes
from mpigossip.analysis.plan.gpu_costs import local_step, with_gpu
from mpigossip.config import CadenceSection, GraphSection, Job, JobError, LocalSection
from mpigossip.config.sections import FaultsSection
from mpigossip.graphs import GraphError
from mpigossip.graphs.theory import averaging_gap, transient_of
from mpigossip.mixing.base import ExchangeKind
from mpigossip.training.costs import Exchanges, Subject, exchanges
from mpigossip.training.machines import Machine
from mpigossip.training.parts import make_parts
from mpigossip.training.rules import incompatibilities, lacking
from mpigossip.training.time_model import Timing

GRAPHS = ("one-peer-exponential", "one-peer-hypercube", "base-2", "exponential", "ring")
CADENCES = ("always", "every", "gossip-pga", "cpsgd")
WIRES = ("fp32", "bf16", "qsgd")
"""Graphs, cadences and wires that are predicted in addition to the job's own."""
ALL_REDUCE = "all-reduce"
"""Name of parallel SGD by all-reduce, in place of a graph."""
GOSSIP = "dmsgd-vanilla"
"""Algorithm that is assumed for gossip if the job's algorithm is parallel SGD: it has a local
momentum, and sends one vector."""
NEAR = 1.05
"""A choice counts as fast as the fastest one if its time is at most this multiple of that time."""


@dataclass(frozen=True)
class Choice:
    """Graph, cadence and wire, which replace the settings of a job.

    The graph may be `ALL_REDUCE`, which stands for parallel SGD by all-reduce.
    """

    graph: str
    cadence: str = "always"
    wire: str = "fp32"

    def job(self, job: Job) -> Job:
        """Return ``job`` with the graph, the cadence and the wire of this choice.

        If the name of the graph or of the cadence stays the same, the options that the job gives it
        are kept. If the job averages over all nodes in every step, gossip uses `GOSSIP` instead of
        its algorithm.
        """
        if self.graph == ALL_REDUCE:
            return parallel(job)
        if always_global(job):
            section = replace(job.algorithm, name=GOSSIP, options={}, average_state={})
            job = replace(job, algorithm=section, local=LocalSection())
        graph = job.graph
        cadence = job.cadence
        if graph.name != self.graph:
            graph = replace(graph, name=self.graph, weights=None, lazy=False, options={})
        if cadence.name != self.cadence:
            cadence = CadenceSection(name=self.cadence)
            if job.algorithm.node_weights == "steps":  # the steps of the job's own cadence
                job = replace(job, algorithm=replace(job.algorithm, node_weights="equal"))
        node: Any = replace(job.node, **{"wire": self.wire})  # type: ignore[arg-type]
        return replace(job, graph=graph, cadence=cadence, node=node)


def always_global(job: Job) -> bool:
    """Return whether the job's algorithm averages over all nodes in every step."""
    return make_parts(job).method.always_global


def parallel(job: Job) -> Job:
    """Return the job with an all-reduce of gradients in float32 in place of its algorithm.

    All nodes wait for each other, and all links work.
    """
    section = replace(
        job.algorithm,
        name="parallel",
        options={},
        average_state={},
        node_weights="equal",
        blend=None,
    )
    return replace(
        job,
        algorithm=section,
        local=LocalSection(),
        graph=GraphSection(name="complete"),
        cadence=CadenceSection(),
        node=replace(job.node, wire="fp32", mixer="synchronous"),
        faults=FaultsSection(),
    )


@dataclass(frozen=True)
class Prediction:
    """Prediction for one combination of graph, cadence and wire on n nodes.

    Times are in seconds per step, per epoch (``epoch_s``) and per run (``total_s``). ``exchange_s``
    is the time of the exchanges, of which ``hidden_s`` overlaps with computation; ``waiting_s`` is
    the time in which a node waits for slower nodes. ``bytes_per_step`` is the mean number of bytes
    that a node sends. ``transient`` is the theoretical number of iterations before a linear
    speedup; inf if nothing is averaged.
    """

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
        """Graph, cadence and wire of the row."""
        return Choice(self.graph, self.cadence, self.wire)

    def as_json(self) -> dict[str, Any]:
        """Return the values as a dict for JSON.

        If nothing is averaged, the number of transient iterations is infinite; JSON gets null.
        """
        return asdict(self) | {"transient": self.transient if isfinite(self.transient) else None}


def choices(job: Job, everything: bool = False, bf16: bool = False) -> list[Choice]:
    """Return the choices to predict: all-reduce first, then the job's choice, then others.

    Unless ``everything``, choices with the same graph follow each other.

    :param job: the job
    :param everything: whether to return all combinations of graphs, cadences and wires. If false,
        at most one of the three differs from the job, except for the choices of ``bf16``
    :param bf16: whether to include the wire "bf16" for each graph
    """
    own_choice = Choice(job.graph.name, job.cadence.name, job.node.wire)
    if always_global(job):
        own_choice = Choice(GRAPHS[0])
    graphs = dict.fromkeys((own_choice.graph, *GRAPHS))
    cadences = dict.fromkeys((own_choice.cadence, *CADENCES))
    wires = dict.fromkeys((own_choice.wire, *WIRES))
    selected = [Choice(ALL_REDUCE), own_choice]
    if everything:
        selected += [replace(own_choice, graph=name) for name in graphs]
        selected += [Choice(g, c, w) for g in graphs for c in cadences for w in wires]
        return list(dict.fromkeys(selected))
    selected += [replace(own_choice, cadence=name) for name in cadences]
    selected += [replace(own_choice, wire=name) for name in wires]
    for name in graphs:
        with_graph = replace(own_choice, graph=name)
        selected.append(with_graph)
        if bf16:
            selected.append(replace(with_graph, wire="bf16"))
    return list(dict.fromkeys(selected))


def predict(
    what: Subject,
    machine: Machine,
    choice: Choice,
    n: int,
    epochs: float,
    period: float | None = None,
    per_tensor: bool = False,
) -> Prediction | None:
    """Predict one choice on n nodes.

    Lists with a number for each node, such as `cadence.period = [4, 1, 3]`, are replaced by
    :func:`~mpigossip.analysis.machine.fit_nodes` if they do not have n numbers.

    :param what: the job and its sizes
    :param machine: costs of the machine
    :param choice: graph, cadence and wire
    :param n: number of nodes
    :param epochs: number of epochs
    :param period: mean period of an adaptive cadence; None: it is simulated
    :param per_tensor: count one global average per tensor, except for DistributedDataParallel
    :returns: the row; None if the graph doesn't exist for n nodes, or if graph, cadence and wire
        are incompatible with the job's algorithm
    :raises JobError: if the machine names a GPU, and the update of the algorithm is not known
    """
    job = fit_nodes(choice.job(what.job), n)
    try:
        prediction = exchanges(replace(what, job=job), n, period)
    except GraphError:
        return None
    parts = prediction.parts
    if lacking(parts.method.needs, parts.graph) or incompatibilities(parts):
        return None
    machine = with_gpu(machine, replace(what, job=job), local_step(what.job))
    timing = Timing(prediction, _coding(machine, prediction), per_tensor=per_tensor)
    (exchange, hidden), waiting = timing.mean_s(), timing.waiting_s()
    step = timing.step_s()
    per_epoch = what.steps_per_epoch(n)
    return Prediction(
        choice.graph,
        choice.cadence,
        choice.wire,
        n,
        step,
        exchange,
        hidden,
        waiting,
        prediction.bytes_per_step * timing.element_size / 4,
        per_epoch,
        per_epoch * step,
        epochs * per_epoch * step,
        _transient(prediction, job.data.partition == "shuffled"),
    )


_CODED: dict[tuple[str, int], tuple[float, float]] = {}
"""Measured seconds to encode and to decode a message, by the wire and the number of elements."""


def _coding(machine: Machine, prediction: Exchanges) -> Machine:
    """Return the machine, with the rates of encoding and decoding if the wire is lossy.

    If these rates were not given, they are measured once for each wire and length of a message.
    """
    layout = prediction.parts.layout
    if layout.wire.exact or machine.encode_rate:
        return machine
    key = layout.wire.name, layout.vectors * sum(layout.widths)
    if key not in _CODED:
        _CODED[key] = coding_seconds(layout.wire, key[1])
    encode, decode = (layout.nbytes / seconds for seconds in _CODED[key])
    return replace(machine, encode_rate=encode, decode_rate=decode)


def coded(machine: Machine, what: Subject) -> Machine:
    """Return the machine to save in a file, with the rates of encoding the job's wire.

    If the job's wire is "fp32", use the rates of the wire "qsgd".

    :param machine: the machine; rates that it has already are kept
    :param what: the job and its sizes
    """
    wire = "qsgd" if what.job.node.wire == "fp32" else what.job.node.wire
    # The graph "complete" exists for any number of nodes.
    job = Choice("complete", what.job.cadence.name, wire).job(what.job)
    return _coding(machine, exchanges(replace(what, job=job), 2))


def _transient(prediction: Exchanges, alike: bool) -> float:
    """Return the theoretical number of transient iterations.

    :param prediction: exchanges of the job
    :param alike: whether the nodes' samples have the same distribution
    """
    counted = prediction.counted
    gossip = sum(count for (kind, _), count in counted.items() if kind is ExchangeKind.GOSSIP)
    global_rounds = sum(
        count for (kind, _), count in counted.items() if kind is ExchangeKind.GLOBAL
    )
    steps_between = prediction.steps / global_rounds if global_rounds else float("inf")
    graph = prediction.parts.graph
    exact = graph.name == "ceca"  # Its matrices are permutations: the algorithm averages.
    gap = 2.0 / (1.0 + graph.period) if exact else _gap(graph) if gossip else 0.0
    iterations = transient_of(graph.n, gap, gossip / prediction.steps, steps_between)
    return iterations[0] if alike else iterations[1]


_gap = lru_cache(maxsize=256)(averaging_gap)


def table(
    what: Subject,
    machine: Machine,
    nodes: Sequence[int],
    epochs: float,
    period: float | None = None,
    per_tensor: bool = False,
) -> list[Prediction]:
    """Return all compatible combinations of graph, cadence and wire on each number of nodes.

    :param what: the job and its sizes
    :param machine: costs of the machine
    :param nodes: numbers of nodes
    :param epochs: number of epochs
    :param period: mean period of an adaptive cadence; None: it is simulated
    :param per_tensor: count one global average per tensor, except for DistributedDataParallel
    :raises JobError: if no graph fits the algorithm with one of these numbers of nodes, or if the
        machine names a GPU, and the update of the algorithm is not known
    """
    every = choices(what.job, everything=True)
    rows = list[Prediction]()
    for n in nodes:
        predictions = (
            predict(what, machine, choice, n, epochs, period, per_tensor) for choice in every
        )
        known_rows = [row for row in predictions if row is not None]
        if not known_rows:
            raise JobError(
                f"--nodes {n}: no graph is compatible with the job's algorithm for {n} nodes; "
                "choose other numbers for --nodes, or another algorithm.name"
            )
        rows += known_rows
    return rows


def name(choice: Choice) -> str:
    """Return a name for a choice: its graph, and then its cadence and wire.

    The cadence is left out if it exchanges in every step, and the wire if it has full precision.
    """
    parts = [choice.graph]
    parts += [choice.cadence] * (choice.cadence != "always")
    return " + ".join([*parts, *[choice.wire] * (choice.wire != "fp32")])


def as_json(
    what: Subject, machine: Machine, rows: Sequence[Prediction], epochs: float
) -> dict[str, Any]:
    """Return the job, the machine and all predictions as a dict for JSON.

    :param what: the job and its sizes
    :param machine: costs of the machine
    :param rows: predictions
    :param epochs: number of epochs
    """
    return {
        "parameters": what.flat.count,
        "samples_per_step": what.per_step,
        "epochs": epochs,
        "machine": asdict(machine),
        "rows": [row.as_json() for row in rows],
    }
