"""Rules about combinations of settings, each with a condition, an error message and a remedy.

A table of rules is a sequence of groups. Only the first broken rule of a group is reported, because
it explains the others. The condition of a rule is a function of a subject that contains the job. If
it returns a dictionary, the values in it are inserted into the templates of message and remedy.

================  ============================================  =============================
table             subject                                       used by
================  ============================================  =============================
`COMPATIBILITY`   parts of a job: graph, method, cadence, wire  :func:`incompatibilities`
`SETTINGS`        job and its number of slots per node          :func:`contradictions`
`LAUNCH`          job, its slots, and the world that runs it    :func:`launch_problems`
`SURVIVAL`        job and its number of slots per node          :func:`survival_problems`
`FAULTS`          job and its number of slots per node          :func:`fault_problems`
`CUSTOM_LOOP`     parts of the job of a custom loop, its world  :func:`loop_problems`
`MEMBERS`         job, and its parts or None                    :func:`check_member`
`VECTORIZATION`   job, model, objective and a batch             :func:`check_vmap`
================  ============================================  =============================
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from mpigossip import graphs
from mpigossip.algorithms import BUILDERS, LOCALS, Algorithm, build
from mpigossip.algorithms.cadence import BUILDERS as CADENCES
from mpigossip.algorithms.cadence import Cadence
from mpigossip.algorithms.local import NO_LOCAL_STEP
from mpigossip.algorithms.methods import above_minus_third, takes_local
from mpigossip.cluster.local_devices import slots_of
from mpigossip.cluster.world import World
from mpigossip.config import Data, Job, JobError
from mpigossip.config.choices import BuilderSpec
from mpigossip.config.errors import UserError
from mpigossip.config.readable import pluralize
from mpigossip.config.sections import FaultsSection, GraphSection
from mpigossip.config.toml import show
from mpigossip.data.pytree import Nested
from mpigossip.engine.state_averages import local_arrays
from mpigossip.graphs import Graph, GraphError
from mpigossip.graphs.base import Drawn
from mpigossip.graphs.faulty import least_rounds
from mpigossip.graphs.spectral import LARGE, consensus_rate, rounds_to_exact, unreached
from mpigossip.mixing.base import ExchangeKind
from mpigossip.training import shape
from mpigossip.training.machines import OFF, named
from mpigossip.training.parts import JobParts, links_fail, make_parts
from mpigossip.training.task import Objective


class HasJob(Protocol):
    """Protocol of the subject of a rule, which is an object with the attribute ``job``."""

    @property
    def job(self) -> Job: ...


S = TypeVar("S", bound=HasJob)
Verdict = bool | None | Mapping[str, Any]
"""Result of the condition of a rule: false, None or an empty mapping if the settings are
compatible; otherwise true, or a mapping with the values that the templates of message and remedy
contain.
"""


class Rule(NamedTuple, Generic[S]):
    """Condition under which settings are incompatible, with templates of the message and remedy."""

    is_broken: Callable[[S], Verdict]
    message: str
    """Template of the message; `{job.section.key}` stands for a setting of the job."""
    remedy: str = ""
    """Template of the remedy, which follows the message after a semicolon; "": there is none."""


Table = Sequence[Sequence[Rule[S]]]
"""Groups of rules; only the first broken rule of each group is reported."""


class Launch(NamedTuple):
    """Job, its number of slots per node, and its world, which is None if it is not known."""

    job: Job
    slots: int
    world: World | None = None


class CustomLoop(NamedTuple):
    """Parts of the job of a custom loop, the world of its ranks, and the origin of its graph."""

    parts: JobParts
    world: World
    has_graph_object: bool
    """True if the program passed a graph object instead of the name of a graph."""

    @property
    def job(self) -> Job:
        """Job that is equivalent to the arguments of `Gossip`."""
        return self.parts.job


class Membership(NamedTuple):
    """Job that is checked for training by members, and its parts.

    ``parts`` is None if members can't train the algorithm of the job.
    """

    job: Job
    parts: JobParts | None


class VectorizedModel(NamedTuple):
    """Job with its model and objective, and a batch on which these are tested."""

    job: Job
    module: nn.Module
    objective: Objective
    batch: Nested


def problems(table: Table[S], subject: S) -> list[str]:
    """Return the message of the first broken rule of each group of a table."""
    return [text for group in table for text in _first_problem(group, subject)]


def _first_problem(group: Sequence[Rule[S]], subject: S) -> list[str]:
    """Return the message of the first broken rule of a group, as a list; [] if none is broken."""
    for rule in group:
        if broken := rule.is_broken(subject):
            template = f"{rule.message}; {rule.remedy}" if rule.remedy else rule.message
            details = broken if isinstance(broken, Mapping) else {}
            return [template.format(job=subject.job, **details)]
    return []


def incompatibilities(parts: JobParts) -> list[str]:
    """Return messages about incompatible parts of a job, such as graph and algorithm."""
    return problems(COMPATIBILITY, parts)


def contradictions(job: Job) -> list[str]:
    """Return messages about settings that have no effect or contradict each other.

    If `clock.network` is not "none", errors of section `[clock]` are included.
    """
    messages = problems(SETTINGS, Launch(job, shape.slots(job)))
    try:
        if job.clock.network != OFF:
            named(job.clock)
    except JobError as error:
        messages += error.messages
    return messages


def launch_problems(job: Job, world: World) -> list[str]:
    """Return messages about settings that a world does not support.

    :param job: the job
    :param world: world of MPI ranks, or of one process that simulates all nodes
    """
    return problems(LAUNCH, Launch(job, shape.slots(job, world), world))


def survival_problems(job: Job) -> list[str]:
    """Return messages about settings with which a run can't survive a rank failure.

    The result is [] without `run.survive`.
    """
    return problems(SURVIVAL, Launch(job, shape.slots(job)))


def fault_problems(job: Job) -> list[str]:
    """Return messages about settings in `[faults]` that are impossible."""
    return problems(FAULTS, Launch(job, shape.slots(job)))


def loop_problems(parts: JobParts, world: World, has_graph_object: bool) -> list[str]:
    """Return messages about settings that a custom loop does not support.

    :param parts: parts of the job that is equivalent to the arguments of `Gossip`
    :param world: world of all ranks of the program
    :param has_graph_object: whether the program passed a graph object instead of a name
    """
    return problems(CUSTOM_LOOP, CustomLoop(parts, world, has_graph_object))


def check_member(job: Job) -> None:
    """Check that members can train a job.

    :param job: the job
    :raises JobError: if they can't; it contains the first message of each group of `MEMBERS`
    """
    parts = make_parts(job) if _can_train(job.algorithm.name) else None
    if messages := problems(MEMBERS, Membership(job, parts)):
        raise JobError(messages)


def check_vmap(job: Job, module: nn.Module, objective: Objective, batch: Nested) -> None:
    """Check that `torch.func.vmap` can compute the gradients of all replicas in one call.

    :param job: the job; without `node.vmap`, nothing is checked
    :param module: model, which is copied for a trial on the batch
    :param objective: task of the job
    :param batch: batch on the device of the model
    :raises JobError: if the model recomputes activations or changes its buffers in training
    """
    if messages := problems(VECTORIZATION, VectorizedModel(job, module, objective, batch)):
        raise JobError(messages)


def check_rounds(job: Job, graph: Graph, world: World) -> None:
    """Check that a custom graph is identical on all ranks; collective.

    The graphs of this package are not checked.

    :param job: the job, whose graph is custom if the package has no graph of this name
    :param graph: graph of this rank
    :param world: all ranks
    :raises JobError: on all ranks, if the first 64 rounds differ from the rounds on rank 0
    :raises UserError: on all ranks, if custom code fails while it makes these rounds
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


# -- graph ------------------------------------------------------------------------------------

FACTS = {"static", "symmetric", "row-stochastic", "column-stochastic"}
"""Conditions of algorithms (`Algorithm.needs`) that are names of facts (`Graph.facts`)."""


def lacking(needs: frozenset, graph: Graph) -> list[str]:
    """Return descriptions of the properties that an algorithm needs and the graph lacks.

    :param needs: conditions of the algorithm, `Algorithm.needs`
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
    if "phases" in needs and not _is_exact(graph):
        missing.append("exact in one period")
    if "above -1/3" in needs and not missing and not above_minus_third(graph):
        missing.append("of eigenvalues above -1/3 (set graph.lazy = true)")
    if graph.name == "ceca" and graph.n > 1 and "graph:ceca" not in needs:
        missing.append('averaging (the rounds of "ceca" only permute)')
    if "signed" in graph.facts and "column-stochastic" in needs:
        missing.append("without negative weights")
    elif "signed" in graph.facts and "always-global" not in needs and _diverges(graph):
        missing.append("averaging (its weights make nodes differ more in each round)")
    if "graph:ceca" in needs and graph.n > 1 and graph.name != "ceca":
        missing.append('"ceca"')
    return missing


def _is_exact(graph: Graph) -> bool:
    """Return whether one period from round 0 computes the exact average."""
    if graph.period is None:
        return False
    rounds = rounds_to_exact(graph, limit=graph.period)
    return graph.n == 1 or rounds is not None and rounds <= graph.period


def _diverges(graph: Graph) -> bool:
    """Return whether averaging on the graph increases the distance between nodes.

    Negative weights can cause this. The result is false for more than `LARGE` nodes, for which
    eigenvalues would take too long.
    """
    return graph.n <= LARGE and consensus_rate(graph) > 1 + 1e-9


def _changed_by_lost_links(parts: JobParts) -> Verdict:
    """Return the missing properties if the algorithm needs a static graph and links fail."""
    missing = lacking(parts.method.needs, parts.graph)
    return "static" in missing and links_fail(parts.job) and {"missing": " and ".join(missing)}


def _lacks_properties(parts: JobParts) -> Verdict:
    """Return the properties that the algorithm needs and the graph lacks, and suitable graphs."""
    graph = parts.graph
    needs = parts.method.needs
    missing = lacking(needs, graph)
    return bool(missing) and {
        "missing": " and ".join(missing),
        "n": graph.n,
        "suffix": " with their own weights" if parts.job.graph.weights else "",
        "fitting": ", ".join(name for name in graphs.BUILDERS if _suits(name, graph.n, needs)),
    }


def _suits(name: str, n: int, needs: frozenset) -> bool:
    """Return whether a graph of this package exists for n nodes and meets the needs of a method.

    The result is False for the graph "identity".

    :param name: name of the graph, which is made with its default options
    :param n: number of nodes
    :param needs: conditions of the algorithm, `Algorithm.needs`
    """
    if name == "identity":
        # Each algorithm accepts the graph "identity", but nothing is averaged on it.
        return False
    with contextlib.suppress(GraphError):
        return not lacking(needs, graphs.BUILDERS[name](n))
    return False


def _is_unconnected(parts: JobParts) -> Verdict:
    """Return n, and two nodes of which the first never reaches the second, if nodes can't agree.

    The result is None if there are no such nodes. The graph "identity" is accepted, because nodes
    then train separately on purpose. So are cadences with averages over all nodes, and cadences
    without gossip. Graphs whose rounds are drawn are not checked, because their edges are not known
    beforehand.
    """
    graph = parts.graph
    kinds = parts.cadence.kinds
    # Use the graph from which [faults] has not removed links.
    full_graph = getattr(graph.schedule, "of", graph)
    alone = graph.n == 1 or graph.name == "identity"
    if alone or isinstance(full_graph.schedule, Drawn):
        return None
    if ExchangeKind.GOSSIP not in kinds or ExchangeKind.GLOBAL in kinds:
        return None
    nodes = unreached(full_graph)
    return nodes and {"n": graph.n, "nodes": nodes}


WEIGHABLE = frozenset(
    {"row-stochastic", "always-global", "never-global", "never-gossip", "own-wire", "shared-wire"}
)
"""Conditions of algorithms that only average, so that they can average with weights of nodes."""


def _weighs_nodes(parts: JobParts) -> bool:
    """Return whether a job, or the graph object of a custom loop, gives nodes weights."""
    return parts.job.algorithm.node_weights != "equal" or bool(parts.graph.node_weights)


def _show_node_weights(job: Job) -> str:
    """Return the setting `algorithm.node_weights` as in a job file, or name the weighted graph."""
    setting = job.algorithm.node_weights
    if setting == "equal":
        return "a graph with weights of nodes"
    return f"algorithm.node_weights = {show(setting)}"


def _miscounts_weights(parts: JobParts) -> Verdict:
    """Return both numbers if the list of weights does not have one number for each node."""
    setting = parts.job.algorithm.node_weights
    n = parts.graph.n
    broken = not isinstance(setting, str) and len(setting) != n
    return broken and {
        "setting": _show_node_weights(parts.job),
        "count": pluralize(len(setting), "number"),
        "nodes": pluralize(n, "node"),
    }


def _weighs_otherwise(parts: JobParts) -> Verdict:
    """Return the algorithms that can weigh nodes if the algorithm of the job is not one of them."""
    if not _weighs_nodes(parts) or parts.method.needs <= WEIGHABLE:
        return None
    fitting = [name for name in BUILDERS if build(name, None, {}, 0).needs <= WEIGHABLE]
    return {"setting": _show_node_weights(parts.job), "fitting": ", ".join(fitting)}


def _weighs(is_broken: Callable[[JobParts], bool]) -> Callable[[JobParts], Verdict]:
    """Return a condition that holds if nodes have weights and ``is_broken`` does.

    The verdict contains the setting.
    """

    def condition(parts: JobParts) -> Verdict:
        broken = _weighs_nodes(parts) and is_broken(parts)
        return broken and {"setting": _show_node_weights(parts.job)}

    return condition


def _gives_equal_steps(parts: JobParts) -> bool:
    """Return whether weights follow the nodes' local steps, but all nodes make equally many."""
    return parts.job.algorithm.node_weights == "steps" and not parts.cadence.periods


def _is_no_average(parts: JobParts) -> bool:
    """Return whether the rounds of the graph are no averages that weights of nodes can change."""
    return not (parts.graph.is_averaging or parts.graph.node_weights)


NODE_WEIGHTS = (
    Rule(
        _miscounts_weights,
        "{setting}: {count} for {nodes}",
        "give one number for each node",
    ),
    Rule(
        _weighs(_gives_equal_steps),
        "{setting}: all nodes make equally many local steps",
        "give a list as cadence.period, or a list of weights",
    ),
    Rule(
        _weighs_otherwise,
        '{setting}: algorithm "{job.algorithm.name}" does more than averaging, and its equations '
        "hold for the plain mean of the nodes",
        "choose one of {fitting}",
    ),
    Rule(
        _weighs(lambda parts: parts.job.node.mixer == "asynchronous"),
        "{setting}: the corrections of asynchronous nodes preserve the plain mean",
        'use node.mixer = "synchronous"',
    ),
    Rule(
        _weighs(lambda parts: links_fail(parts.job)),
        "{setting}: the rounds of [faults] preserve the plain mean",
        "remove [faults]",
    ),
    Rule(
        _weighs(_is_no_average),
        '{setting}: graph "{job.graph.name}" has negative weights, or rows that do not sum to one',
        "choose another graph.name or graph.weights",
    ),
    Rule(
        _weighs(lambda parts: parts.cadence.kinds == {ExchangeKind.LOCAL}),
        '{setting}: with cadence.name = "{job.cadence.name}", nodes exchange nothing',
        "choose another cadence.name",
    ),
)
"""Rules about weights of nodes in averages. They come before other rules about the graph, because
weights change what its rounds preserve."""


GRAPH: Table[JobParts] = (
    (
        *NODE_WEIGHTS,
        Rule(
            _changed_by_lost_links,
            'faults: algorithm "{job.algorithm.name}" needs a graph that is {missing}, but lost '
            "links change it in each round",
            "remove [faults], or choose another algorithm.name",
        ),
        Rule(
            _lacks_properties,
            'graph.name = "{job.graph.name}": algorithm "{job.algorithm.name}" needs a graph that '
            "is {missing}",
            "suitable graphs of {n} nodes{suffix} are: {fitting}",
        ),
    ),
    (
        Rule(
            _is_unconnected,
            'graph.name = "{job.graph.name}": its {n} nodes are not connected, because the model '
            "of node {nodes[0]} never reaches node {nodes[1]}",
            "add edges, choose a cadence that averages over all nodes, such as "
            'cadence.name = "gossip-pga", or let each node train on its own with '
            'graph.name = "identity"',
        ),
    ),
)


# -- cadence ----------------------------------------------------------------------------------


def _cadences(is_allowed: Callable[[Cadence], bool]) -> str:
    """Return the names of the cadences that, with default options, are allowed, for a message."""
    return " or ".join(f'"{name}"' for name, build in CADENCES.items() if is_allowed(build()))


def _mixes_kinds(parts: JobParts) -> Verdict:
    """Return suitable cadences if the algorithm needs steps of one kind, but gets several kinds."""
    broken = "unmixed" in parts.method.needs and len(parts.cadence.kinds) > 1
    return broken and {"fitting": _cadences(lambda c: len(c.kinds) == 1)}


def _averages_globally(parts: JobParts) -> Verdict:
    """Return a remedy if the cadence has global averages, which the algorithm does not support."""
    if "never-global" not in parts.method.needs or ExchangeKind.GLOBAL not in parts.cadence.kinds:
        return None
    adapts_later = parts.job.algorithm.options.get("style") == "awc"
    return {
        "choose": 'set algorithm.style = "atc", or choose' if adapts_later else "choose",
        "fitting": _cadences(lambda c: ExchangeKind.GLOBAL not in c.kinds),
    }


def _gossips(parts: JobParts) -> Verdict:
    """Return suitable cadences if the cadence gossips and the algorithm does not support that."""
    broken = "never-gossip" in parts.method.needs and ExchangeKind.GOSSIP in parts.cadence.kinds
    return broken and {"fitting": _cadences(lambda c: ExchangeKind.GOSSIP not in c.kinds)}


def _has_no_idle_nodes(parts: JobParts) -> Verdict:
    """Return suitable algorithms if nodes have different periods and this algorithm forbids that.

    An algorithm without a separate local step needs a gradient of every node in every step.
    """
    if not parts.cadence.periods or parts.method.local_update is not None:
        return None
    cadence_name = parts.job.cadence.name
    specs = {other: BuilderSpec.of(BUILDERS, other) for other in BUILDERS}
    fitting = [
        other
        for other, spec in specs.items()
        if build(other, None, {}, 0).local_update is not None
        and not (spec.only and spec.implies.get("cadence.name", cadence_name) != cadence_name)
    ]
    return {"periods": list(parts.cadence.periods), "fitting": ", ".join(fitting)}


def _miscounts_nodes(parts: JobParts) -> Verdict:
    """Return both numbers if the list of periods does not have one number for each node."""
    periods = parts.cadence.periods
    n = parts.graph.n
    broken = bool(periods) and len(periods) != n
    return broken and {
        "periods": list(periods),
        "count": pluralize(len(periods), "number"),
        "nodes": pluralize(n, "node"),
    }


def _lengths_differ(parts: JobParts) -> Verdict:
    """Return the lengths of the algorithm and of its cadence if they do not match.

    They match if they are equal and a multiple of the graph's period.
    """
    job = parts.job
    period = parts.graph.period
    if "phases" not in parts.method.needs or job.cadence.name != "halves" or period is None:
        return None
    gathers = job.algorithm.options.get("length") or period
    mixes = job.cadence.options.get("length") or period
    broken = gathers != mixes or bool(mixes % period)
    return broken and {"gathers": gathers, "mixes": mixes, "period": period}


_CADENCE = 'cadence.name = "{job.cadence.name}": algorithm "{job.algorithm.name}" '
_PERIODS = "cadence.period = {periods}: "

CADENCE: Table[JobParts] = (
    (
        Rule(
            lambda parts: (
                "always-global" in parts.method.needs
                and parts.job.cadence.name not in ("always", "global")
            ),
            _CADENCE + "averages over all nodes at every step",
            "leave the cadence out",
        ),
        Rule(
            lambda parts: "phases" in parts.method.needs and parts.job.cadence.name != "halves",
            _CADENCE + 'needs the cadence "halves"',
            "leave the cadence out",
        ),
        Rule(_mixes_kinds, _CADENCE + "supports only one kind of step", "choose {fitting}"),
        Rule(
            _averages_globally,
            _CADENCE + "does not keep nodes identical after a global average",
            "{choose} {fitting}",
        ),
        Rule(_gossips, _CADENCE + "supports only averages over all nodes", "choose {fitting}"),
    ),
    (
        Rule(
            _has_no_idle_nodes,
            _PERIODS + 'algorithm "{job.algorithm.name}" needs a gradient of every node in every '
            "step, and an idle node has none",
            "give one number, or choose one of {fitting}",
        ),
        Rule(
            _miscounts_nodes,
            _PERIODS + "{count} for {nodes}",
            "give one number for each node, or one number for all",
        ),
    ),
    (
        Rule(
            _lengths_differ,
            "algorithm.length = {gathers}, cadence.length = {mixes}: both must be the same "
            'multiple of the graph\'s period, {period}, for algorithm "{job.algorithm.name}"',
            "leave both out",
        ),
    ),
)


# -- wire -------------------------------------------------------------------------------------


WIRE: Table[JobParts] = (
    (
        Rule(
            lambda parts: (
                "shared-wire" in parts.method.needs
                and not (parts.layout.wire.exact or parts.layout.wire.shared)
            ),
            'node.wire = "{job.node.wire}": algorithm "{job.algorithm.name}" averages the messages '
            "of all nodes, which must therefore omit the same elements",
            'use "shared-k" or "fp32"',
        ),
        Rule(
            lambda parts: "exact-wire" in parts.method.needs and not parts.layout.wire.exact,
            'node.wire = "{job.node.wire}": algorithm "{job.algorithm.name}" needs exact messages',
            'use "fp32"',
        ),
        Rule(
            lambda parts: (
                parts.layout.wire.biased
                and not parts.layout.wire.exact
                and not parts.method.needs & {"own-wire", "always-global"}
            ),
            'node.wire = "{job.node.wire}": it omits most of a model, and algorithm '
            '"{job.algorithm.name}" does not compensate for that',
            'use node.wire = "qsgd" or "bf16", or algorithm "choco" or "parallel"',
        ),
    ),
)


# -- fragments --------------------------------------------------------------------------------


def _has_too_many_fragments(parts: JobParts) -> Verdict:
    """Return both settings if there are more fragments than steps in a period."""
    schedule = parts.cadence.fragment_schedule
    return schedule.fragments > schedule.period and {
        "setting": schedule.setting,
        "period": schedule.period,
    }


def _has_too_long_a_delay(parts: JobParts) -> Verdict:
    """Return the limits if a fragment would be applied after the next fragment is sent."""
    schedule = parts.cadence.fragment_schedule
    between = schedule.period // schedule.fragments
    return schedule.delay > between and {
        "period": schedule.period,
        "setting": schedule.setting,
        "delay": schedule.delay,
        "between": between,
    }


def _blends(parts: JobParts) -> Verdict:
    """Return the setting that blends received averages into x; None if there is none."""
    section = parts.job.algorithm
    if section.blend is not None:
        return {"setting": f"algorithm.blend = {section.blend:g}"}
    return None


def _blends_what_is_kept(parts: JobParts) -> Verdict:
    """Return the setting that blends averages into x if the algorithm keeps x unchanged by them."""
    return "keeps-x" in parts.method.needs and _blends(parts)


def _in_fragments(parts: JobParts) -> Verdict:
    """Return the setting that divides, delays or blends exchanges; None if there is none."""
    schedule = parts.cadence.fragment_schedule
    if schedule.is_whole_model:
        return _blends(parts)
    if schedule.fragments > 1:
        return {"setting": f"cadence.fragments = {schedule.setting}"}
    return {"setting": f"cadence.delay = {schedule.delay}"}


def _is_indivisible(parts: JobParts) -> Verdict:
    """Return the reason why the algorithm can't exchange fragments, and the algorithms that can.

    The result is None if it can, or if nothing divides, delays or blends its exchanges.
    """
    setting = _in_fragments(parts)
    if not isinstance(setting, Mapping):
        return None
    section = parts.job.algorithm
    exchange = parts.method
    if exchange.local_update is not None:
        exchange = build(section.name, NO_LOCAL_STEP, section.options, 0, parts.graph)
    reason = _why_indivisible(exchange)
    if not reason:
        return None
    algorithms = ((other, build(other, None, {}, 0)) for other in BUILDERS)
    fitting = [other for other, algorithm in algorithms if not _why_indivisible(algorithm)]
    by_options = section.name in fitting
    options = ", ".join(f"algorithm.{k} = {show(v)}" for k, v in section.options.items())
    return {
        **setting,
        "options": f" with {options}" if by_options else "",
        "reason": reason,
        "leave": "leave that out, or " if by_options else "",
        "others": ", ".join(other for other in fitting if other != section.name),
    }


def _why_indivisible(method: Algorithm) -> str:
    """Return why an algorithm can't exchange fragments at different steps; "" if it can."""
    if method.local_update is None:
        return (
            "has no separate local step: its step depends on the received messages, while "
            "fragments are exchanged, and averages blended, between local steps of the whole model"
        )
    if not method.elementwise:
        return "updates the model as a whole: its Algorithm has elementwise=False"
    return ""


def _delays_some_elements(parts: JobParts) -> Verdict:
    """Return the delay if the algorithm exchanges only some elements of a fragment."""
    delay = parts.cadence.fragment_schedule.delay
    return bool(delay) and "shared-wire" in parts.method.needs and {"delay": delay}


FRAGMENTS: Table[JobParts] = (
    (
        Rule(
            _has_too_many_fragments,
            "cadence.fragments = {setting}: each fragment is sent at a separate step, and a period "
            "has only cadence.period = {period} steps",
            "use at most {period}, or a longer period",
        ),
        Rule(
            _has_too_long_a_delay,
            "cadence.delay = {delay}: a fragment must be applied before the next one is sent, "
            "{between} steps later (cadence.period = {period}, cadence.fragments = {setting})",
            "use at most {between}, or a longer period",
        ),
    ),
    (
        Rule(
            _blends_what_is_kept,
            "{setting}: with algorithm.eager, received models are not blended into the model",
            "remove {setting}",
        ),
    ),
    (
        Rule(
            _is_indivisible,
            '{setting}: algorithm "{job.algorithm.name}"{options} {reason}',
            "{leave}choose one of {others}",
        ),
        Rule(
            _delays_some_elements,
            'cadence.delay = {delay}: algorithm "{job.algorithm.name}" exchanges only some '
            "elements of a fragment, and algorithm.blend would undo the local steps of all other "
            "elements",
            'use cadence.delay = 0, or an algorithm with local steps such as "diloco"',
        ),
    ),
    (
        Rule(
            lambda parts: parts.job.node.mixer == "asynchronous" and _in_fragments(parts),
            "{setting}: asynchronous nodes would average different fragments, and add corrections "
            "to the model that must not be blended",
            'use node.mixer = "synchronous"',
        ),
    ),
)


# -- averages of the local step's state ---------------------------------------------------------

PAIRS = (("first", "second"), ("exp_avg", "exp_avg_sq"))
"""Names of Adam's running means of g and g², in jobs and in torch."""


def state_warning(parts: JobParts) -> str:
    """Return a warning if a job averages m along the graph more often than v; otherwise "".

    m is Adam's running mean of g, and v its running mean of g².
    """
    periods = parts.job.algorithm.average_state
    if ExchangeKind.GOSSIP not in parts.cadence.kinds:
        return ""  # DES-LOC averages m more often than v, but always over all nodes
    for m, v in PAIRS:
        if m in periods and periods[m] < periods.get(v, periods[m] + 1):
            return (
                f"algorithm.average_state averages {m} more often than {v}: a node then gets {m} "
                f"for elements whose {v} is still 0 there, which diverged in trials: average {v} "
                "at least as often, or use a cadence with global averages only"
            )
    return ""


def _averages_state(parts: JobParts) -> Verdict:
    """Return the setting that averages the local step's state; None if the job lacks it."""
    periods = parts.job.algorithm.average_state
    return {"setting": _show_average_state(periods)} if periods else None


def _show_average_state(periods: Mapping[str, int]) -> str:
    """Return the setting `algorithm.average_state` as in a job file.

    :param periods: number of steps between two averages of an array, by the name of the array
    """
    shown = ", ".join(f"{name} = {period}" for name, period in periods.items())
    return f"algorithm.average_state = {{{shown}}}"


def _unknown_array(launch: Launch) -> Verdict:
    """Return the first array in `algorithm.average_state` that the local step of the job lacks.

    The result also contains the setting and a remedy. It is None if the local step has all arrays,
    or if the algorithm takes no local step by name.
    """
    section = launch.job.algorithm
    if not section.average_state or not takes_local(section.name):
        return None
    state = make_parts(launch.job).method.init(torch.empty(1, 2, device="meta"))
    names = local_arrays(state)
    unknown = [name for name in section.average_state if name not in names]
    if not unknown:
        return None
    return {
        "setting": _show_average_state(section.average_state),
        "array": unknown[0],
        "remedy": f"use {' or '.join(names)}" if names else "remove algorithm.average_state",
    }


def _spoils_averages_of_state(parts: JobParts) -> Verdict:
    """Return why the rounds of the graph do not average arrays such as v; None if they do."""
    periods = parts.job.algorithm.average_state
    graph = parts.graph
    if not periods or graph.n == 1 or ExchangeKind.GOSSIP not in parts.cadence.kinds:
        return None
    if graph.name == "ceca":
        reason = 'each round of the graph "ceca" only permutes the arrays of the nodes'
    elif "row-stochastic" not in graph.facts:
        reason = "rows of the mixing matrix do not sum to one, so the arrays would be scaled"
    elif "signed" in graph.facts:
        reason = "the graph has negative weights, so an average of g² could be negative"
    else:
        return None
    return {"setting": _show_average_state(periods), "reason": reason}


AVERAGED_STATE: Table[JobParts] = (
    (
        Rule(
            _spoils_averages_of_state,
            "{setting}: {reason}",
            "remove algorithm.average_state, or choose another graph.name or graph.weights",
        ),
    ),
    (
        Rule(
            lambda parts: not takes_local(parts.job.algorithm.name) and _averages_state(parts),
            '{setting}: algorithm "{job.algorithm.name}" replaces the local step, and has no such '
            "arrays",
            'choose an algorithm with a local step, such as "dsgd"',
        ),
        Rule(
            lambda parts: parts.cadence.kinds == {ExchangeKind.LOCAL} and _averages_state(parts),
            '{setting}: with cadence.name = "{job.cadence.name}", nodes exchange nothing',
            "remove algorithm.average_state, or choose another cadence.name",
        ),
        Rule(
            lambda parts: parts.job.node.mixer == "asynchronous" and _averages_state(parts),
            "{setting}: the nodes of an asynchronous mixer do not make equal rounds",
            'use node.mixer = "synchronous"',
        ),
        Rule(
            lambda parts: parts.job.run.survive and _averages_state(parts),
            "{setting}: these averages do not survive a rank failure",
            "use run.survive = false, and restart from checkpoints",
        ),
    ),
)


# -- asynchronous runs, faults and NCCL -------------------------------------------------------


def tolerates_delay(method: Algorithm) -> bool:
    """Return whether an algorithm can average with models of earlier rounds.

    Plain averaging can, and so can tracking, because it needs sums only. Algorithms can't if they
    have corrections or memories that depend on the matrix W(t) of the round.
    """
    return method.needs <= {"row-stochastic", "doubly", "never-global"}


def _is_asynchronous(parts: JobParts) -> bool:
    """Return whether the job selects the asynchronous mixer."""
    return parts.job.node.mixer == "asynchronous"


def _needs_the_same_round(parts: JobParts) -> Verdict:
    """Return suitable algorithms if the job is asynchronous and its algorithm forbids that."""
    if not _is_asynchronous(parts) or tolerates_delay(parts.method):
        return None
    fitting = [name for name in BUILDERS if tolerates_delay(build(name, None, {}, 0))]
    return {"fitting": ", ".join(fitting)}


def _uses_nccl(parts: JobParts) -> bool:
    """Return whether the job names NCCL as the transport between GPUs."""
    return parts.job.node.exchange == "nccl"


def _unsupported_fault(key: str) -> Rule[JobParts]:
    """Return the rule that asynchronous runs do not support the setting ``key`` of `[faults]`."""
    return Rule(
        lambda parts: _is_asynchronous(parts) and bool(getattr(parts.job.faults, key)),
        f"faults.{key} = {{job.faults.{key}:g}}: an asynchronous run supports only slow nodes and "
        "faults.lost",
        f"remove faults.{key}",
    )


ASYNCHRONY: Table[JobParts] = (
    (
        Rule(
            lambda parts: not _is_asynchronous(parts) and parts.job.faults.slow_times > 1,
            "faults.slow_times = {job.faults.slow_times:g}: only asynchronous runs have slow nodes",
            'set node.mixer = "asynchronous", or remove faults.slow_times',
        ),
    ),
    *((_unsupported_fault(key),) for key in ("lost_rounds", "away", "away_rounds", "ticks")),
    (
        Rule(
            _needs_the_same_round,
            'node.mixer = "asynchronous": algorithm "{job.algorithm.name}" needs the models of the '
            "same round",
            "choose one of {fitting}",
        ),
    ),
    (
        Rule(
            lambda parts: _is_asynchronous(parts) and not parts.layout.wire.exact,
            'node.wire = "{job.node.wire}": an asynchronous run exchanges exact models only',
            'use "fp32"',
        ),
    ),
    (
        Rule(
            lambda parts: _is_asynchronous(parts) and not parts.job.node.devices.startswith("cpu"),
            'node.devices = "{job.node.devices}": the windows of an asynchronous run are in host '
            "memory",
            'use "cpu:1", or node.mixer = "synchronous"',
        ),
    ),
)

LINKS: Table[JobParts] = (
    (
        Rule(
            lambda parts: parts.method.always_global and links_fail(parts.job),
            'faults: algorithm "{job.algorithm.name}" averages over all nodes and therefore needs '
            "every link",
            "leave [faults] out, or choose an algorithm that exchanges with neighbours",
        ),
    ),
    (
        Rule(
            lambda parts: _uses_nccl(parts) and _is_asynchronous(parts),
            'node.exchange = "nccl" and node.mixer = "asynchronous": NCCL needs both ranks to take '
            "part in an exchange",
            'use "auto"',
        ),
    ),
    (
        Rule(
            lambda parts: _uses_nccl(parts) and parts.job.run.survive,
            'node.exchange = "nccl" and run.survive = true: NCCL can\'t continue after a rank '
            "failure",
            'use "auto"',
        ),
    ),
)

COMPATIBILITY: Table[JobParts] = (
    *GRAPH,
    *CADENCE,
    *WIRE,
    *FRAGMENTS,
    *AVERAGED_STATE,
    *ASYNCHRONY,
    *LINKS,
)


# -- settings that need no parts --------------------------------------------------------------


def _cuts_matrices(launch: Launch) -> Verdict:
    """Return the number of slots if a local step needs whole parameters, but slots have shards."""
    job = launch.job
    name = job.local.name
    if launch.slots == 1 or not job.node.shard or name not in LOCALS or not LOCALS[name](0).whole:
        return None
    return {"slots": launch.slots}


def _unused_by_partition(key: str, partition: str) -> Rule[Launch]:
    """Return the rule that a setting of `[data]` has no effect with other partitions.

    :param key: name of the setting
    :param partition: the only value of `data.partition` that uses it
    """
    default = getattr(Data(), key)
    return Rule(
        lambda launch: (
            getattr(launch.job.data, key) != default and launch.job.data.partition != partition
        ),
        f'data.{key} = {{job.data.{key}:g}}: only the partition "{partition}" uses it',
        f'set data.partition = "{partition}", or remove data.{key}',
    )


WHOLE_MATRICES: Rule[Launch] = Rule(
    _cuts_matrices,
    'local.name = "{job.local.name}" needs complete matrices, and each of the {slots} slots of a '
    "node has a shard of the model, which may begin or end within a matrix",
    "use node.shard = false (slot 0 then makes the step for all slots, which requires "
    "node.ranks_per_node = 1)",
)

SETTINGS: Table[Launch] = (
    (
        Rule(
            _unknown_array,
            "{setting}: {array} is no array of the local step of this job",
            "{remedy}",
        ),
    ),
    (WHOLE_MATRICES,),
    (_unused_by_partition("shuffled_percent", "mixed"),),
    (_unused_by_partition("dirichlet_alpha", "dirichlet"),),
    (
        Rule(
            lambda launch: (
                launch.job.node.cuda_graphs == "always"
                and slots_of(launch.job.node.devices)[0] == "cpu"
            ),
            'node.cuda_graphs = "always": the slots of node.devices = "{job.node.devices}" are on '
            "the CPU",
            'use node.cuda_graphs = "auto"',
        ),
    ),
    (
        Rule(
            lambda launch: launch.job.node.vmap and launch.job.node.precision == "fp16",
            'node.precision = "fp16": node.vmap does not support a separate loss scale for each '
            "node",
            'use node.precision = "bf16", or remove node.vmap',
        ),
    ),
)


def _runs_on_ranks(launch: Launch) -> bool:
    """Return whether the world is known and consists of MPI ranks."""
    return launch.world is not None and launch.world.comm is not None


def _has_several_ranks(launch: Launch) -> Verdict:
    """Return the value of `node.ranks_per_node` if it isn't 1 and the job runs on ranks."""
    setting = launch.job.node.ranks_per_node
    return _runs_on_ranks(launch) and setting != 1 and {"ranks": show(setting)}


LAUNCH: Table[Launch] = (
    (
        # If the job alone determines several slots per node, SETTINGS reports the same problem.
        WHOLE_MATRICES._replace(
            is_broken=lambda launch: shape.slots(launch.job) == 1 and _cuts_matrices(launch)
        ),
    ),
    (
        Rule(
            lambda launch: launch.job.node.ranks_per_node == "host" and not _runs_on_ranks(launch),
            'node.ranks_per_node = "host": a simulation has no hosts',
            "set the number of ranks per node, as in node.ranks_per_node=4",
        ),
    ),
    (
        Rule(
            lambda launch: _runs_on_ranks(launch) and launch.job.faults != FaultsSection(),
            "faults: a run on ranks does not simulate faults",
            "leave [faults] out, or use `mpigossip simulate`",
        ),
    ),
    (
        Rule(
            lambda launch: launch.job.run.survive and _has_several_ranks(launch),
            "run.survive = true: with node.ranks_per_node = {ranks} a failed rank takes a shard of "
            "its node with it, and the run can't continue without the complete node",
            "use node.ranks_per_node = 1, or restart from checkpoints",
        ),
    ),
    (
        Rule(
            lambda launch: not launch.job.node.shard and _has_several_ranks(launch),
            "node.shard = false: with node.ranks_per_node = {ranks} each rank updates and "
            "exchanges its shard",
            "remove node.shard, or use node.ranks_per_node = 1",
        ),
    ),
)

SURVIVAL: Table[Launch] = (
    (
        Rule(
            lambda launch: launch.job.run.survive and launch.job.node.mixer == "asynchronous",
            "run.survive = true: an asynchronous run needs MPI windows, which do not survive a "
            "rank failure",
            'use node.mixer = "synchronous", or restart from checkpoints',
        ),
    ),
)


def _too_short(key: str) -> Rule[Launch]:
    """Return the rule about the smallest mean duration of a fault, in rounds.

    The mean duration is smallest if each round is drawn independently. The setting 0 is allowed.

    :param key: setting of `[faults]` with the probability of the fault: "lost" or "away"
    """

    def is_broken(launch: Launch) -> Verdict:
        minimum = least_rounds(getattr(launch.job.faults, key))
        rounds = getattr(launch.job.faults, f"{key}_rounds")
        return bool(rounds) and rounds < minimum and {"minimum": minimum}

    return Rule(
        is_broken,
        f"faults.{key}_rounds = {{job.faults.{key}_rounds:g}}: must be at least {{minimum:.3g}}, "
        f"the mean with faults.{key} = {{job.faults.{key}:g}} if each round is drawn independently",
        "use a larger value, or 0",
    )


FAULTS: Table[Launch] = ((_too_short("lost"),), (_too_short("away"),))


# -- custom loops -----------------------------------------------------------------------------


def _has_periods(loop: CustomLoop) -> Verdict:
    """Return the list of periods if nodes have different ones; otherwise false."""
    periods = loop.parts.cadence.periods
    return bool(periods) and {"periods": list(periods)}


CUSTOM_LOOP: Table[CustomLoop] = (
    (
        Rule(
            lambda loop: loop.parts.cadence.longest_round > 1,
            'period = "auto": only jobs of members support it (mpigossip join)',
            "pass a number of steps",
        ),
        Rule(
            _has_periods,
            "period = {periods}: a custom loop does not choose the steps of its nodes: pass one "
            'number, or mixer="asynchronous" with the cadence "every", for which each rank may '
            "pass its own number",
        ),
        Rule(
            lambda loop: "loss" in loop.parts.cadence.measures,
            'cadence.name = "{job.cadence.name}": this cadence needs the loss, which step() does '
            'not know: use "gossip-pga", or a job',
        ),
        Rule(
            lambda loop: (
                loop.job.cadence.name == "adpsgd" and loop.job.cadence.options.get("total") is None
            ),
            'cadence.name = "adpsgd": needs the number of steps of the run, which is not known in '
            "a custom loop: pass total=…",
        ),
    ),
    (
        Rule(
            lambda loop: loop.world.nodes.per_node > 1 and loop.job.node.mixer != "synchronous",
            'mixer = "{job.node.mixer}": the ranks of a node step together, and would wait for '
            'each other\'s neighbours: use mixer = "synchronous", or ranks_per_node = 1',
        ),
    ),
    (
        Rule(
            lambda loop: loop.world.nodes.per_node > 1 and loop.job.run.survive,
            "survive = True: if a node has several ranks, the shard of a failed rank is lost, and "
            "its node can't continue: use ranks_per_node = 1, or remove survive and resume from a "
            "checkpoint after a failure",
        ),
    ),
    (
        Rule(
            lambda loop: loop.has_graph_object and loop.job.run.survive,
            "survive = True: a graph object has a fixed number of nodes, but survivors need a "
            f"smaller graph: pass the name of a graph, such as {GraphSection.name}",
        ),
    ),
)


# -- members ----------------------------------------------------------------------------------


def period_problem(job: Job) -> str:
    """Return a message if a job that is not for members has the period "auto"; otherwise ""."""
    if job.cadence.options.get("period") != "auto":
        return ""
    return (
        'cadence.period = "auto": all nodes of a run exchange at the same steps, so H follows '
        "the speed of members only (mpigossip join); set a number of steps, or a list with one for "
        "each node"
    )


def _can_train(name: str) -> bool:
    """Return whether members can use an algorithm of this package, with its default options.

    After its local steps, such an algorithm averages one vector, the model, with one neighbour.
    """
    if name not in BUILDERS:
        return False
    implied = BuilderSpec.of(BUILDERS, name).implies
    if implied.get("cadence.name", "every") not in ("every", "always"):
        return False
    try:
        algorithm = build(name, None, {}, 0)
    except (TypeError, ValueError):
        return False
    averages_model = (
        algorithm.vectors == 1
        and not (algorithm.scalars or algorithm.ahead)
        and algorithm.local_update is not None
    )
    return averages_model and algorithm.needs <= {"row-stochastic", "never-global"}


def _cannot_train(member: Membership) -> Verdict:
    """Return the algorithms that members can use if the algorithm of the job is not one of them."""
    return member.parts is None and {"fitting": ", ".join(filter(_can_train, BUILDERS))}


def _averages_otherwise(member: Membership) -> Verdict:
    """Return whether members can't follow the cadence.

    They can't make global averages, choose periods by node or by measurements, or exchange
    fragments.
    """
    if member.parts is None:
        return False
    cadence = member.parts.cadence
    others = cadence.kinds - {ExchangeKind.LOCAL, ExchangeKind.GOSSIP}
    varies = bool(others or cadence.periods or cadence.is_adaptive)
    return varies or not cadence.fragment_schedule.is_whole_model


def _members_need(setting: str, *values: str) -> Rule[Membership]:
    """Return the rule that a setting, such as "node.wire", has one of some values."""
    section, key = setting.split(".")
    supported = " or ".join(f'"{value}"' for value in values)
    return Rule(
        lambda member: getattr(getattr(member.job, section), key) not in values,
        f'{setting} = "{{job.{setting}}}": members need {supported}',
    )


MEMBERS: Table[Membership] = (
    (
        Rule(
            _cannot_train,
            'algorithm.name = "{job.algorithm.name}": members average one model with one other '
            "member per round",
            "choose one of {fitting}",
        ),
    ),
    (
        Rule(
            lambda member: member.parts is not None and member.parts.method.ahead,
            'algorithm.style = "awc" sends the model before the last step',
            'members need algorithm.style = "atc"',
        ),
    ),
    (
        Rule(
            _averages_otherwise,
            'cadence.name = "{job.cadence.name}": members average whole models with one other '
            'member every H steps: set cadence.name = "every", cadence.period = H, and leave '
            "cadence.fragments and cadence.delay out",
        ),
    ),
    (
        Rule(
            lambda member: member.parts is not None and _blends(member.parts),
            "{setting}: members replace the model by its average with another one",
            "remove {setting}",
        ),
    ),
    (
        Rule(
            lambda member: member.job.algorithm.node_weights != "equal",
            "algorithm.node_weights: members weigh each other by the number of chunks that they "
            "trained",
            "remove algorithm.node_weights",
        ),
    ),
    (
        Rule(
            lambda member: member.parts is not None and _averages_state(member.parts),
            "{setting}: members exchange the model only",
            "remove algorithm.average_state",
        ),
    ),
    (_members_need("node.wire", "fp32"),),
    (_members_need("node.mixer", "synchronous"),),
    (_members_need("graph.name", "one-peer-exponential", "random-matching"),),
    (
        Rule(
            lambda member: member.job.node.precision == "fp16",
            'node.precision = "fp16": members have no common loss scale',
            'use "bf16"',
        ),
    ),
)


# -- the model --------------------------------------------------------------------------------


def _recomputes(model: VectorizedModel) -> bool:
    """Return whether a job with `node.vmap` has a model that recomputes activations."""
    parts = model.module.modules()
    return model.job.node.vmap and any(getattr(part, "recompute", False) for part in parts)


def _changes_buffers(model: VectorizedModel) -> bool:
    """Return whether a job with `node.vmap` has a model whose buffers change in training.

    A copy of the model is applied to the batch, and its buffers are compared with the model's.
    """
    if not model.job.node.vmap:
        return False
    trial = copy.deepcopy(model.module).train()
    with torch.random.fork_rng(devices=()), torch.no_grad(), contextlib.suppress(Exception):
        # Some norm layers reject a batch of one sample, but only after they have changed their
        # buffers.
        model.objective(trial, model.batch)
    return not all(map(torch.equal, trial.buffers(), model.module.buffers()))


VECTORIZATION: Table[VectorizedModel] = (
    (
        Rule(
            _recomputes,
            "node.vmap = true: model.recompute = true uses hooks, which can't be vectorized over "
            "nodes",
            "remove one of the two settings",
        ),
        Rule(
            _changes_buffers,
            'node.vmap = true: model "{job.model.name}" changes its buffers in training (norm '
            "statistics, averages), which can't be vectorized over nodes",
            "remove node.vmap",
        ),
    ),
)
