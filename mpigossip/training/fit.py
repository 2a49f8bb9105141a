"""Compatibility checks between algorithm, graph, cadence and wire format."""

import contextlib
import copy

import torch
from torch import nn

from mpigossip import graphs
from mpigossip.algorithms import BUILDERS, Algorithm, build
from mpigossip.algorithms.cadence import BUILDERS as CADENCES
from mpigossip.algorithms.cadence import Cadence
from mpigossip.algorithms.methods import above_minus_third
from mpigossip.cluster.local_devices import slots_of
from mpigossip.cluster.world import World
from mpigossip.config import Data, Job, JobError
from mpigossip.config.choices import BuilderSpec
from mpigossip.config.errors import UserError
from mpigossip.data.pytree import Nested
from mpigossip.graphs import Graph, GraphError
from mpigossip.graphs.base import Drawn
from mpigossip.graphs.faulty import least_rounds
from mpigossip.graphs.spectral import LARGE, consensus_rate, rounds_to_exact, unreached
from mpigossip.mixing.base import ExchangeKind
from mpigossip.mixing.wire import Wire
from mpigossip.training import shape
from mpigossip.training.fragments import unfit_fragments
from mpigossip.training.machines import OFF, named
from mpigossip.training.parts import JobParts
from mpigossip.training.task import Objective

FACTS = {"static", "symmetric", "row-stochastic", "column-stochastic"}


def incompatibilities(parts: JobParts) -> list[str]:
    """Return the incompatibilities between the parts of a job, each with a remedy."""
    job = parts.job
    graph = parts.graph
    method = parts.method
    cadence = parts.cadence
    return [
        *_unfit_graph(job, graph, method.needs),
        *_unconnected(job, graph, cadence),
        *_unfit_cadence(job, method.needs, cadence),
        *_unfit_periods(job, graph, method, cadence),
        *_unfit_length(job, graph, method.needs),
        *_unfit_wire(job, parts.layout.wire, method.needs),
        *unfit_fragments(job, graph, method, cadence),
        *_unfit_asynchrony(job, parts.layout.wire, method),
        *_unfit_faults(job, method),
        *_unfit_nccl(job),
    ]


def check_rounds(job: Job, graph: Graph, world: World) -> None:
    """Check that a custom graph is identical on all ranks; collective.

    :raises JobError: on all ranks, if the first rounds differ from those of rank 0
    """
    if job.graph.name in graphs.BUILDERS:
        return
    with world.raise_together(UserError):
        digest = graph.fingerprint
    first_digest = world.broadcast(digest)
    with world.raise_together(JobError):
        if digest != first_digest:
            raise JobError(
                f'graph.name = "{job.graph.name}": its first 64 rounds differ from the rounds on '
                "rank 0: a function may use only n, seed and t, and a file must be identical on "
                "all hosts"
            )


def lacking(needs: frozenset, graph: Graph) -> list[str]:
    """Return the properties that an algorithm needs and the graph lacks, in words.

    :param needs: `Algorithm.needs`
    :param graph: the graph of the job
    """
    doubly = {"row-stochastic", "column-stochastic"} if "doubly" in needs else set()
    missing = sorted((doubly | needs & FACTS) - graph.facts)
    if {"row-stochastic", "column-stochastic"} & set(missing) and doubly:
        missing = ["doubly stochastic", *(m for m in missing if m not in doubly)]
    elif "column-stochastic" in missing:
        missing[missing.index("column-stochastic")] += ' (set graph.weights = "push")'
    elif "column-stochastic" in needs and any(
        r.row_sums().min() <= 0 for r in graph.schedule.rounds
    ):
        missing.append("of positive row sums (push-sum divides by a weight that would become 0)")
    if "phases" in needs and not _exact(graph):
        missing.append("exact in one period")
    if "above -1/3" in needs and not missing and not above_minus_third(graph):
        missing.append("of eigenvalues above -1/3 (set graph.lazy = true)")
    if graph.name == "ceca" and graph.n > 1 and "graph:ceca" not in needs:
        missing.append('averaging (the rounds of "ceca" only permute)')
    if "signed" in graph.facts and "column-stochastic" in needs:
        missing.append("without negative weights")
    elif "signed" in graph.facts and "always-global" not in needs and _grows(graph):
        missing.append("averaging (its weights make nodes differ more in each round)")
    if "graph:ceca" in needs and graph.n > 1 and graph.name != "ceca":
        missing.append('"ceca"')
    return missing


def _exact(graph: Graph) -> bool:
    """Return whether one period from round 0 computes the exact average."""
    if graph.period is None:
        return False
    rounds = rounds_to_exact(graph, limit=graph.period)
    return graph.n == 1 or rounds is not None and rounds <= graph.period


def _grows(graph: Graph) -> bool:
    """Return whether the consensus distance grows, which negative weights can cause."""
    return graph.n <= LARGE and consensus_rate(graph) > 1 + 1e-9


def _unfit_graph(job: Job, graph: Graph, needs: frozenset) -> list[str]:
    missing = lacking(needs, graph)
    if not missing:
        return []
    if _links_fail(job) and "static" in missing:
        return [
            f'faults: algorithm "{job.algorithm.name}" needs a graph that is '
            f"{' and '.join(missing)}, but lost links change it in each round; leave [faults] "
            "out, or choose another algorithm"
        ]
    fitting = [name for name in graphs.BUILDERS if _fits(name, graph.n, needs)]
    suffix = " with their own weights" if job.graph.weights else ""
    return [
        f'graph.name = "{job.graph.name}": algorithm "{job.algorithm.name}" needs a graph that '
        f"is {' and '.join(missing)}; suitable graphs of {graph.n} nodes{suffix} are: "
        f"{', '.join(fitting)}"
    ]


def _unconnected(job: Job, graph: Graph, cadence: Cadence) -> list[str]:
    """Return why nodes would never agree, if the edges of the graph do not connect all of them.

    With graph "identity", nodes train alone on purpose. An average over all nodes connects them,
    too. If the rounds are drawn without a period, their edges can't be known beforehand.
    """
    full_graph = getattr(graph.schedule, "of", graph)  # the graph before [faults] removes links
    alone = graph.n == 1 or graph.name == "identity"
    if alone or isinstance(full_graph.schedule, Drawn):
        return []
    if ExchangeKind.GOSSIP not in cadence.kinds or ExchangeKind.GLOBAL in cadence.kinds:
        return []
    nodes = unreached(full_graph)
    if nodes is None:
        return []
    return [
        f'graph.name = "{job.graph.name}": its {graph.n} nodes are not connected, because the '
        f"model of node {nodes[0]} never reaches node {nodes[1]}; add edges, choose a cadence "
        'that averages over all nodes, such as cadence.name = "gossip-pga", or let each node '
        'train on its own with graph.name = "identity"'
    ]


def _fits(name: str, n: int, needs: frozenset) -> bool:
    if name == "identity":
        return False  # it fits every method, but does not help
    with contextlib.suppress(GraphError):
        return not lacking(needs, graphs.BUILDERS[name](n))
    return False


def _unfit_cadence(job: Job, needs: frozenset, cadence: Cadence) -> list[str]:
    kinds = cadence.kinds
    reason = None
    if "always-global" in needs and job.cadence.name not in ("always", "global"):
        reason = "averages over all nodes at every step; leave the cadence out"
    elif "phases" in needs and job.cadence.name != "halves":
        reason = 'needs the cadence "halves"; leave the cadence out'
    elif "unmixed" in needs and len(kinds) > 1:
        reason = f"supports only one kind of step; choose {_cadences(lambda c: len(c.kinds) == 1)}"
    elif "never-global" in needs and ExchangeKind.GLOBAL in kinds:
        adapts_later = job.algorithm.options.get("style") == "awc"
        remedy = 'set algorithm.style = "atc", or choose' if adapts_later else "choose"
        reason = (
            f"does not keep nodes identical after a global average; {remedy} "
            f"{_cadences(lambda c: ExchangeKind.GLOBAL not in c.kinds)}"
        )
    elif "never-gossip" in needs and ExchangeKind.GOSSIP in kinds:
        fitting = _cadences(lambda c: ExchangeKind.GOSSIP not in c.kinds)
        reason = f"supports only averages over all nodes; choose {fitting}"
    if reason is None:
        return []
    return [f'cadence.name = "{job.cadence.name}": algorithm "{job.algorithm.name}" {reason}']


def _unfit_periods(job: Job, graph: Graph, method: Algorithm, cadence: Cadence) -> list[str]:
    """Return why numbers of local steps per node don't go with method or graph.

    The method has to allow idle nodes, and the setting needs one number for each node.
    """
    periods = cadence.periods
    name = job.algorithm.name
    if not periods:
        return []
    setting = f"cadence.period = {list(periods)}"
    if method.local_update is None:
        cadence_name = job.cadence.name
        specs = {other: BuilderSpec.of(BUILDERS, other) for other in BUILDERS}
        fitting = [
            other
            for other, spec in specs.items()
            if build(other, None, {}, 0).local_update is not None
            and not (spec.only and spec.implies.get("cadence.name", cadence_name) != cadence_name)
        ]
        return [
            f'{setting}: algorithm "{name}" needs a gradient of every node in every step, and an '
            f"idle node has none; give one number, or choose one of {', '.join(fitting)}"
        ]
    if len(periods) != graph.n:
        return [
            f"{setting}: {len(periods)} numbers for {graph.n} nodes; give {graph.n} numbers, one "
            f"for "
            "each node, or one number for all"
        ]
    return []


def _unfit_length(job: Job, graph: Graph, needs: frozenset) -> list[str]:
    """Return a problem unless algorithm and cadence "halves" have the same length.

    The length has to be a multiple of the graph's period.
    """
    if "phases" not in needs or job.cadence.name != "halves" or graph.period is None:
        return []
    gathers = job.algorithm.options.get("length") or graph.period
    mixes = job.cadence.options.get("length") or graph.period
    if gathers == mixes and not mixes % graph.period:
        return []
    return [
        f"algorithm.length = {gathers}, cadence.length = {mixes}: both must be the same multiple "
        f'of the graph\'s period, {graph.period}, for algorithm "{job.algorithm.name}"; leave '
        "both out"
    ]


def _cadences(is_allowed) -> str:
    return " or ".join(f'"{name}"' for name, build in CADENCES.items() if is_allowed(build()))


def _unfit_wire(job: Job, coding: Wire, needs: frozenset) -> list[str]:
    wire = job.node.wire
    name = job.algorithm.name
    if coding.exact:
        return []
    if "shared-wire" in needs and not coding.shared:
        return [
            f'node.wire = "{wire}": algorithm "{name}" averages the messages of all nodes, which '
            'must therefore omit the same elements; use "shared-k" or "fp32"'
        ]
    if "exact-wire" in needs:
        return [f'node.wire = "{wire}": algorithm "{name}" needs exact messages; use "fp32"']
    if coding.biased and not needs & {"own-wire", "always-global"}:
        return [
            f'node.wire = "{wire}": it omits most of a model, and algorithm "{name}" does not '
            'compensate for that; use node.wire = "qsgd" or "bf16", or algorithm "choco" or '
            '"parallel"'
        ]
    return []


def contradictions(job: Job) -> list[str]:
    """Return settings that have no effect, or contradict each other."""
    problems = shape.cut(job, shape.slots(job))
    data = job.data
    defaults = Data()
    for key, partition in (("shuffled_percent", "mixed"), ("dirichlet_alpha", "dirichlet")):
        if getattr(data, key) != getattr(defaults, key) and data.partition != partition:
            problems.append(
                f'data.{key} = {getattr(data, key):g}: only the partition "{partition}" uses it; '
                f'set data.partition = "{partition}", or leave it out'
            )
    node = job.node
    if node.cuda_graphs == "always" and slots_of(node.devices)[0] == "cpu":
        problems.append(
            f'node.cuda_graphs = "always": the slots of node.devices = "{node.devices}" are on '
            'the CPU; leave it at "auto"'
        )
    if node.vmap and node.precision == "fp16":
        problems.append(
            'node.precision = "fp16": node.vmap does not support a separate loss scale for each '
            'node; use "bf16", or leave node.vmap out'
        )
    try:
        if job.clock.network != OFF:
            named(job.clock)
    except JobError as error:
        problems += error.messages
    return problems


def check_vmap(job: Job, module: nn.Module, objective: Objective, batch: Nested) -> None:
    """Check that `vmap` can compute the gradients of all replicas in one call.

    :raises JobError: if the model recomputes activations or changes its buffers in training
    """
    if not job.node.vmap:
        return
    if any(getattr(part, "recompute", False) for part in module.modules()):
        raise JobError(
            "node.vmap = true: model.recompute = true uses hooks, which can't be vectorized over "
            "nodes; leave one of the two out"
        )
    trial = copy.deepcopy(module).train()
    with torch.random.fork_rng(devices=()), torch.no_grad(), contextlib.suppress(Exception):
        # Some norm layers reject a batch of one sample, but only after they have counted it.
        objective(trial, batch)
    if not all(map(torch.equal, trial.buffers(), module.buffers())):
        raise JobError(
            f'node.vmap = true: model "{job.model.name}" changes its buffers in training (norm '
            "statistics, averages), which can't be vectorized over nodes; leave node.vmap out"
        )


def tolerates_delay(method: Algorithm) -> bool:
    """Return whether a method tolerates models of earlier rounds.

    Plain averaging does, and so does tracking, which needs sums only. Methods with corrections or
    memories that depend on W(t) of the round do not.
    """
    return method.needs <= {"row-stochastic", "doubly", "never-global"}


def _links_fail(job: Job) -> bool:
    """Return whether rounds are reweighted because links fail."""
    faults = job.faults
    return job.node.mixer != "asynchronous" and bool(faults.lost or faults.away or faults.ticks)


def _unfit_faults(job: Job, method: Algorithm) -> list[str]:
    """Return a problem if links fail and the method averages over all nodes."""
    if method.always_global and _links_fail(job):
        return [
            f'faults: algorithm "{job.algorithm.name}" averages over all nodes and therefore '
            "needs every link; leave [faults] out, or choose an algorithm that exchanges with "
            "neighbours"
        ]
    return []


def short_faults(job: Job) -> list[str]:
    """Return the faults whose duration is too short for any graph of failing links.

    If each round is drawn independently, the mean duration of faults is already longer than such a
    setting.
    """
    faults = job.faults
    problems = []
    stays = {"lost": (faults.lost, faults.lost_rounds), "away": (faults.away, faults.away_rounds)}
    for key, (share, rounds) in stays.items():
        minimum = least_rounds(share)
        if rounds and rounds < minimum:
            problems.append(
                f"faults.{key}_rounds = {rounds:g}: must be at least {minimum:.3g}, the mean with "
                f"faults.{key} = {share:g} if each round is drawn independently; use a larger "
                "value, or 0"
            )
    return problems


def _unfit_nccl(job: Job) -> list[str]:
    if job.node.exchange != "nccl":
        return []
    problems = []
    if job.node.mixer == "asynchronous":
        problems.append(
            'node.mixer = "asynchronous": NCCL needs both ranks to take part in an exchange'
        )
    if job.run.survive:
        problems.append("run.survive = true: NCCL can't continue after a rank failure")
    return [f'node.exchange = "nccl" and {text}; use "auto"' for text in problems]


def _unfit_asynchrony(job: Job, coding: Wire, method: Algorithm) -> list[str]:
    node = job.node
    faults = job.faults
    problems = []
    if node.mixer != "asynchronous":
        if faults.slow_times > 1:
            problems.append(
                f"faults.slow_times = {faults.slow_times:g}: only asynchronous runs have slow "
                'nodes; set node.mixer = "asynchronous", or leave it out'
            )
        return problems
    problems += [
        f"faults.{key} = {value:g}: an asynchronous run supports faults.lost only; leave it out"
        for key in ("lost_rounds", "away", "away_rounds", "ticks")
        if (value := getattr(faults, key))
    ]
    if not tolerates_delay(method):
        fitting = [name for name in BUILDERS if tolerates_delay(build(name, None, {}, 0))]
        problems.append(
            f'node.mixer = "asynchronous": algorithm "{job.algorithm.name}" needs the models of '
            f"the same round; choose one of {', '.join(fitting)}"
        )
    if not coding.exact:
        problems.append(
            f'node.wire = "{node.wire}": an asynchronous run exchanges exact models only; '
            'use "fp32"'
        )
    if not node.devices.startswith("cpu"):
        problems.append(
            f'node.devices = "{node.devices}": the windows of an asynchronous run are in host '
            'memory; use "cpu:1", or node.mixer = "synchronous"'
        )
    return problems
