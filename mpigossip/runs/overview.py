"""Overview that is printed at the start of a run: nodes, model, data, method and exchange.

Values such as the transport and the memory are read from the objects that were built for the run,
because settings of the job may be "auto".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpigossip.algorithms import BUILDERS
from mpigossip.cluster.world import World
from mpigossip.config import NodeSection
from mpigossip.config.choices import spec_of
from mpigossip.config.readable import format_bytes, pluralize
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import named_arrays
from mpigossip.graphs import Graph, spectral
from mpigossip.groups.devices import unused_gpus_note
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange
from mpigossip.training.costs import add_memory, describe_memory, held
from mpigossip.training.schedule import full_rate

if TYPE_CHECKING:
    from mpigossip.runs.progress import Progress
    from mpigossip.training.assemble import Assembly
    from mpigossip.training.loop import Trainer

ROUNDS = 64
"""Number of rounds of a graph from which neighbours and bytes are computed, at most one period."""
TRANSPORTS = {
    "windows": "put from GPU to GPU",
    "messages": "messages from GPU to GPU",
    "nccl": "NCCL",
    "host": "host staging",
}
"""Descriptions of the transports between GPUs, by the first word of an entry of `mixer.routes`."""


def overview(progress: Progress, assembly: Assembly, world: World) -> list[tuple[str, str]]:
    """Return the overview of a job as pairs (label, text); not collective."""
    job = progress.job
    trainer = assembly.trainer
    graph = assembly.parts.graph
    flat = trainer.replicas.flat
    section = job.checkpoint
    local = _local(job.algorithm.name, job.local.name)
    cadence = "" if job.cadence.name == "always" else f", cadence {job.cadence.name}"
    saves = f"every {section.every_steps} steps" if section.every_steps else "at the end"
    data = assembly.source
    per_step = progress.samples_per_step
    return [
        ("nodes", nodes(trainer.mixer.n, trainer.engine.group.devices, world)),
        ("model", f"{job.model.name}, {flat.count:,} parameters, {format_bytes(4 * flat.count)}"),
        (
            "data",
            f"{job.data.source}: {data.train_size:,} training and {data.test_size:,} "
            f"test samples; {per_step} per step, {per_step // progress.nodes} per node",
        ),
        ("method", f"{job.algorithm.name}{local} on {job.graph.name}{cadence}"),
        *between(trainer.engine, graph, job.node, world),
        (
            "memory",
            f"{_memory(progress, trainer, world)}, without activations",
        ),
        ("rate", full_rate(job.schedule, per_step)[1]),
        ("steps", f"{progress.total_steps:,}, {progress.steps_per_epoch:,} per epoch"),
        (
            "files",
            f"{progress.folder}: log.h5 every {job.log.flush_steps} steps, checkpoints/ {saves}",
        ),
    ]


def _local(algorithm: str, local: str | None) -> str:
    """Return the name of the local step in brackets; "" for a default without momentum.

    :param algorithm: name of the algorithm, or of custom code
    :param local: setting `local.name`; None: the default of the algorithm is used
    """
    spec = spec_of(BUILDERS, algorithm) if local is None else None
    default = spec.implies.get("local.name") if spec else None
    name = default if local is None and default != "sgd" else local
    return f" ({name})" if name else ""


def between(engine: Engine, graph: Graph, node: NodeSection, world: World) -> list[tuple[str, str]]:
    """Return the lines about the exchange between nodes, as pairs (label, text).

    The labels are "graph", "exchange" (the transport) and "traffic".
    """
    return [
        ("graph", _graph(graph) if _gossips(engine) else _unused_graph(graph)),
        ("exchange", _exchange(engine, graph, node, world)),
        ("traffic", _traffic(engine, graph, world)),
    ]


def nodes(n: int, devices: Sequence[str], world: World) -> str:
    """Describe the nodes of a run: their ranks, hosts and slots.

    :param n: number of nodes
    :param devices: devices of the local slots
    :param world: ranks of the run
    """
    per = world.nodes.per_node
    names = ", ".join(dict.fromkeys(devices))
    slots = f"{pluralize(per * len(devices), 'slot')} each ({names}{unused_gpus_note(devices)})"
    if world.comm is None:
        return f"{n} simulated in this process on {world.hosts[0]}, {slots}"
    hosts = Counter(world.hosts)
    several = "" if len(hosts) == 1 else f", at most {max(hosts.values())} per host"
    names = f"{next(iter(hosts))}" + (" …" if len(hosts) > 1 else "")
    where = f"{pluralize(len(hosts), 'host')} ({names}{several})"
    if per > 1:
        slots = f"{per} per node: {pluralize(n, 'node')}, {slots}"
    return f"{pluralize(world.size, 'rank')} on {where}, {slots}"


def _gossips(engine: Engine) -> bool:
    """Return whether the method has exchanges with neighbours, and not only global averages."""
    return ExchangeKind.GOSSIP in engine.cadence.kinds


def _unused_graph(graph: Graph) -> str:
    return f"unused: averages are over all nodes{_weights(graph)}"


def _weights(graph: Graph) -> str:
    """Return a text on the weights of the first eight nodes in averages; "" if all are equal."""
    weights = " : ".join(f"{weight:.3g}" for weight in graph.node_weights[:8])
    more = " : …" if len(graph.node_weights) > 8 else ""
    return f", nodes weighted {weights}{more}" if weights else ""


def _graph(graph: Graph) -> str:
    """Describe a graph in a line: degree, period, and mostly how fast nodes reach their average.

    The speed is the number of rounds to the exact average; if rounds never compute it, the speed is
    the spectral gap. It is left out for large graphs and for "ceca". If nodes have weights, these
    are shown; otherwise, if columns of W(t) do not sum to one, the line says that the mean over
    nodes drifts.
    """
    if graph.n == 1:
        return "one node: nothing to average"
    period = "no period" if graph.period is None else f"period {graph.period}"
    text = f"{pluralize(graph.degree, 'neighbour')} per round, {period}"
    if "signed" in graph.facts:
        text += ", signed weights"
    text += _weights(graph)
    if "column-stochastic" not in graph.facts and not graph.node_weights:
        text += ", mean drifts"
    # The matrices of "ceca" are permutations, of which the algorithm computes the average. Their
    # spectral gap means nothing.
    if graph.n > spectral.LARGE or graph.name == "ceca":
        return text
    exact = spectral.rounds_to_exact(graph)
    rate = spectral.consensus_rate(graph)
    if exact is not None and graph.period is not None:
        return f"{text}, exact average in {pluralize(exact, 'round')}"
    # Without a period, the rate belongs to drawn matrices, which may be exact by chance.
    if graph.period is None and rate == 0:
        return text
    if rate >= 1 - 1e-9:
        return f"{text}, not connected: nodes never agree"
    gap = "spectral gap" if graph.period == 1 else "gap"
    return f"{text}, {gap} {1 - rate:.3g}"


def _exchange(engine: Engine, graph: Graph, node: NodeSection, world: World) -> str:
    """Return a text on the transports by which the first local node receives messages."""
    receiver = engine.mixer.local_nodes[0]
    wire = node.wire
    over = "" if wire == "fp32" else f", {wire} on the wire"
    if graph.n == 1:
        return "none"
    if not _gossips(engine):
        return f"reduce-scatter and all-gather over all nodes{over}"
    if world.comm is None:
        return f"simulated{over}"
    if world.survives:
        return f"messages between ranks (run.survive: windows do not survive a rank failure){over}"
    rounds = range(min(graph.period or ROUNDS, ROUNDS))
    peers = sorted({int(j) for t in rounds for j in graph.neighbours(t, receiver)[0]})
    hosts = world.nodes.inter_node.hosts
    near = [j for j in peers if hosts[j] == hosts[receiver] and node.same_host == "read"]
    far = [j for j in peers if j not in near]
    words = "put into MPI windows" + ("" if engine.mixer.synchronous else ", without waiting")
    ways = [(near, "read in place (same host)"), (far, words)]
    if routes := getattr(engine.mixer, "routes", None):
        texts = {route: _route_text(route) for route in map(routes.get, peers)}
        ways = [([j for j in peers if routes[j] == route], texts[route]) for route in texts]
    sources = [f"from {_listed(some)}: {how}" for some, how in ways if some]
    return f"node {receiver} receives " + "; ".join(sources) + over


def _route_text(route: str) -> str:
    name, _, why = route.partition(" ")
    return f"{TRANSPORTS[name]} {why}".rstrip()


def _listed(nodes: list[int]) -> str:
    shown = ", ".join(map(str, nodes[:6]))
    return shown if len(nodes) <= 6 else f"{shown}, … ({len(nodes)})"


def _traffic(engine: Engine, graph: Graph, world: World) -> str:
    """Return a text on the bytes that a node sends per exchange; "none" if there is one node.

    They are a mean over the rounds of a period of the graph, but over `ROUNDS` rounds at most. If
    the method has exchanges with neighbours, the bytes that an all-reduce would send are added.
    """
    n = graph.n
    mixer = engine.mixer
    layout = mixer.sent_layout
    waits = mixer.synchronous
    if n == 1:
        return "none"
    kind = ExchangeKind.GOSSIP if _gossips(engine) else ExchangeKind.GLOBAL
    rounds = range(min(graph.period or ROUNDS, ROUNDS))
    sent = [
        bytes_per_exchange(
            graph, kind, t, mixer.local_nodes[0], layout.sent_bytes, layout.raw_bytes, waits
        )
        for t in rounds
    ]
    per = world.nodes.per_node
    average = per * float(np.mean(sent))
    ring = per * 2 * (n - 1) * 4 * sum(layout.widths) / n
    always = len(engine.cadence.kinds) == 1
    when = "step" if always else "gossip step" if kind is ExchangeKind.GOSSIP else "averaging step"
    ratio = (
        f"; all-reduce would send {format_bytes(ring)}"
        if ring and kind is ExchangeKind.GOSSIP
        else ""
    )
    vectors = _vectors(engine, [s / max(layout.sent_bytes, 1) for s in sent])
    state = _state(engine, graph, per)
    return f"{format_bytes(average)} per node and {when} ({vectors}){state}{ratio}"


def _vectors(engine: Engine, messages: Sequence[float]) -> str:
    """Return a text on the vectors of a message, and on the number of messages if it is not one.

    :param engine: engine with the algorithm and the mixer
    :param messages: number of messages that a node sends, for each round of a period
    """
    vectors = pluralize(engine.method.vectors, "vector")
    times = float(np.mean(messages))
    is_exact = engine.mixer.layout.raw_bytes is None
    return f"{times:.4g} x {vectors}" if is_exact and times != 1 else vectors


def _state(engine: Engine, graph: Graph, per_node: int) -> str:
    """Return a text on the bytes that a node sends to average arrays of its local step.

    If no array is averaged, return "".

    :param engine: engine that averages the arrays
    :param graph: graph over the nodes
    :param per_node: number of ranks of a node, each of which sends its part of the arrays
    """
    averages = engine.averages
    if averages is None:
        return ""
    texts = []
    for name, period in averages.periods.items():
        mixer = engine.mixer.state_mixers[name]
        nbytes = mixer.sent_layout.sent_bytes
        rounds = range(min(graph.period or ROUNDS, ROUNDS))
        node = mixer.local_nodes[0]
        sent = [bytes_per_exchange(graph, averages.kind, t, node, nbytes) for t in rounds]
        average = per_node * float(np.mean(sent))
        texts.append(f"{format_bytes(average)} every {period} steps for {name}")
    return f", and {', '.join(texts)}"


def _memory(progress: Progress, trainer: Trainer, world: World) -> str:
    """Return a text on the bytes of memory of a node, without activations."""
    mixer = trainer.mixer
    replicas = trainer.replicas
    state = sum(
        a.nbytes for states in trainer.engine.states for _, a in named_arrays(states)
    ) // len(mixer.local_nodes)
    per = world.nodes.per_node
    slots = trainer.engine.group.slots
    averages = ExchangeKind.GLOBAL in trainer.engine.cadence.kinds
    others = [m.memory(averages) for m in mixer.state_mixers.values()]
    memory = add_memory(mixer.memory(averages), others)
    messages = {name: per * count for name, count in memory.items()}
    parts = held(progress.job, replicas.flat, slots, per * state, messages, world.survives)
    return describe_memory(parts, per * trainer.engine.group.devices)
