"""Graph, algorithms, cadence and message layout of a job, made once and kept in one object.

Jobs, custom loops, ``plan``, ``--dry-run`` and studies use this object; mixer and engine are made
from it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpigossip import algorithms, graphs
from mpigossip.algorithms import Algorithm
from mpigossip.algorithms import cadence as cadences
from mpigossip.algorithms.cadence import Cadence
from mpigossip.algorithms.local import NO_LOCAL_STEP, Local
from mpigossip.algorithms.methods import Known
from mpigossip.cluster.world import World
from mpigossip.config import BuilderSpec, Job
from mpigossip.engine.fragments import FragmentExchange, Fragments
from mpigossip.engine.measurements import measured_every
from mpigossip.engine.state_averages import LocalState, StateArrays, StateAverages
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import FlatParameters, NodeLayout, ParameterLayout
from mpigossip.engine.whole import WholeExchange
from mpigossip.graphs import Graph
from mpigossip.graphs.faulty import Links, faulty
from mpigossip.groups.base import Group, local_shards
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout, Mixer
from mpigossip.mixing.delayed import Faults
from mpigossip.mixing.lossy_wires import wire
from mpigossip.mixing.wire import Wire
from mpigossip.training.fragments import fragment_columns, fragment_width

EMPTY = ParameterLayout((), (), (), (), size=0, decayed=0, slots=1)
"""Parameter layout that stands for a model that does not exist yet."""


def _unwrapped(layout: MessageLayout, make: Callable[[MessageLayout], Mixer]) -> Mixer:
    """Return the mixer of the layout itself, see ``wrap`` of :meth:`JobParts.open_mixer`."""
    return make(layout)


@dataclass(frozen=True)
class JobParts:
    """Graph, algorithms, cadence and message layout of a job.

    An algorithm that was built for this job is called a method.
    """

    job: Job
    graph: Graph
    methods: Sequence[Algorithm]
    """Algorithm of each local shard, which sends messages in the wire of the job."""
    cadence: Cadence
    layout: MessageLayout
    """Positions of the arrays in a message, or in the message of a fragment if there are several.
    """
    state_layout: MessageLayout
    """Position of an array of the local step in a message, for `algorithm.average_state`."""
    frozen: Collection[str] = ()
    """Names of the model's parameters that are not trained now, but may be later."""

    @property
    def method(self) -> Algorithm:
        """Algorithm of the first local shard; other shards differ in weight decay only."""
        return self.methods[0]

    def open_mixer(
        self,
        world: World,
        layout: MessageLayout | None = None,
        mixer: str | None = None,
        wrap: Callable[[MessageLayout, Callable[[MessageLayout], Mixer]], Mixer] = _unwrapped,
    ) -> Mixer:
        """Return a new mixer, which exchanges messages between the ranks of ``world``; collective.

        Without MPI, all nodes are local to this process.

        :param world: world with one rank for each node
        :param layout: message layout; None: the layout of the job
        :param mixer: value of `node.mixer`; None: the value in the job
        :param wrap: function (layout, make) that returns a mixer of this layout. It may open a
            mixer of another layout by ``make(other)``, and return an object that uses it. It is
            called for the model, and for each array of the local step that is averaged
        """
        job = self.job
        node = self.job.node
        section = self.job.faults
        faults = Faults(
            self.graph.n,
            job.run.seed,
            section.slow_times,
            section.slow_nodes,
            section.slow_steps,
            section.lost,
            job.log.flush_steps,
        )
        graph = self.graph.slowed(self.cadence.fragment_schedule.fragments)
        open_for = partial(
            open_mixer,
            world=world,
            mixer=mixer or node.mixer,
            same_host=node.same_host,
            exchange=node.exchange,
            timeout_s=node.timeout_s,
            ages=faults.ages,
        )
        opened = wrap(layout or self.layout, partial(open_for, graph))
        opened.state_mixers = {
            name: wrap(self.state_layout, partial(open_for, self.graph))
            for name in job.algorithm.average_state
        }
        return opened

    def make_averages(self, arrays: StateArrays | None = None) -> StateAverages | None:
        """Return the averages of the local step's state, or None if the job makes no such averages.

        :param arrays: object that reads and writes the arrays that are averaged; None: an object
            for the arrays in the state of the job's local step
        """
        periods = self.job.algorithm.average_state
        gossips = ExchangeKind.GOSSIP in self.cadence.kinds
        kind = ExchangeKind.GOSSIP if gossips else ExchangeKind.GLOBAL
        return StateAverages(periods, kind, arrays or LocalState()) if periods else None

    def make_engine(
        self,
        mixer: Mixer,
        group: Group,
        vector: FlatParameters,
        measure_every: int | str,
        arrays: StateArrays | None = None,
    ) -> Engine:
        """Return a new engine, which updates and exchanges the flat parameters of the local nodes.

        :param mixer: communication between nodes
        :param group: slots of this node
        :param vector: flat parameters of the local nodes
        :param measure_every: number of steps between two measurements of the consensus distance, or
            "auto"
        :param arrays: object that reads and writes the arrays that :class:`StateAverages` averages;
            None: an object for the arrays in the state of the job's local step
        """
        fragments = self.make_fragments(vector.flat, local_shards(group))
        exchange = WholeExchange() if fragments is None else FragmentExchange(fragments)
        every = measured_every(measure_every, group.devices[0])
        return Engine(
            mixer,
            group,
            vector,
            self.methods,
            self.cadence,
            exchange,
            measure_every=every,
            averages=self.make_averages(arrays),
        )

    def make_fragments(self, flat: NodeLayout, shards: range) -> Fragments | None:
        """Return the fragments of some shards.

        The result is None if the model is exchanged as a whole and at once, and if its average
        replaces it, so that there is no blending.

        :param flat: layout of the model's parameters
        :param shards: numbers of the shards
        :raises JobError: if the fragments that the job names don't divide the model
        """
        schedule = self.cadence.fragment_schedule
        section = self.job.algorithm
        if schedule.is_whole_model and section.blend is None:
            return None
        width = self.layout.widths[0]
        cuts = [fragment_columns(flat, slot, schedule, width, self.frozen) for slot in shards]
        # Make an algorithm for each shard, because a lossy wire keeps a state for each shard.
        methods = [_method(self.job, self.graph, local=NO_LOCAL_STEP) for _ in shards]
        exchanges = [_over_wire(method, self.layout.wire, self.cadence) for method in methods]
        blend = section.blend
        if blend is None:
            blend = 0.5 if schedule.delay else 1.0
        if "keeps-x" in exchanges[0].needs:
            blend = 0.0
        return Fragments(schedule, cuts, width, exchanges, blend)


def make_graph(job: Job, n: int) -> Graph:
    """Return the graph of a job over n nodes, with the weights of its nodes.

    Unless nodes are asynchronous, `[faults]` removes links of it.

    :param job: the job
    :param n: number of nodes
    :raises GraphError: if the graph does not exist for n nodes, or its file or function is invalid
    """
    return weigh_nodes(job, make_unweighted_graph(job, n))


def make_unweighted_graph(job: Job, n: int) -> Graph:
    """Return the graph of :func:`make_graph` without the weights of its nodes."""
    section = job.graph
    faults = job.faults
    seed = job.run.seed if section.seed is None else section.seed
    base = graphs.graph(
        section.name, n, weights=section.weights, seed=seed, lazy=section.lazy, **section.options
    )
    if not links_fail(job):
        return base
    return faulty(
        base,
        Links(
            n,
            job.run.seed,
            faults.lost,
            faults.lost_rounds,
            faults.away,
            faults.away_rounds,
            faults.ticks,
        ),
    )


def links_fail(job: Job) -> bool:
    """Return whether links of the graph fail in some rounds.

    In asynchronous runs, the graph keeps all links, and the mixer drops messages instead.
    """
    faults = job.faults
    return job.node.mixer != "asynchronous" and bool(faults.lost or faults.away or faults.ticks)


def node_weights(job: Job) -> tuple[float, ...]:
    """Return the weight of each node in averages, in proportion; empty: all weights are equal.

    With `algorithm.node_weights = "steps"`, the weights are the numbers of local steps in a period.
    Decoupled DiLoCo (arXiv 2604.21428) weights by tokens · tokens/steps. The batches of all nodes
    are equal, so that tokens/steps is the same for all of them.
    """
    setting = job.algorithm.node_weights
    if setting == "equal":
        return ()
    if setting == "steps":
        return tuple(map(float, cadences.periods_of(job.cadence.options)))
    return setting


def weigh_nodes(job: Job, graph: Graph) -> Graph:
    """Return the graph with the weights of `algorithm.node_weights`.

    If the setting does not fit the graph, the graph is returned unchanged, and
    :func:`~mpigossip.training.rules.incompatibilities` returns the reason.

    :param job: the job
    :param graph: graph whose node i is node i of the job
    """
    weights = node_weights(job)
    fits = len(weights) == graph.n and graph.is_averaging and not links_fail(job)
    return graph.weighted(weights) if fits and not graph.node_weights else graph


def make_parts(
    job: Job,
    graph: Graph | None = None,
    flat: NodeLayout = EMPTY,
    *,
    shards: range | None = None,
    devices: Sequence[str] = (),
    local: Local | None = None,
    local_options: Mapping[str, Any] | None = None,
    total: int | None = None,
    frozen: Collection[str] = (),
) -> JobParts:
    """Return the :class:`JobParts` of a job: its graph, algorithms, cadence and message layout.

    :param job: the job
    :param graph: the graph; None for a single node, which has no neighbours
    :param flat: layout of the model's parameters
    :param shards: indices of the local shards; None: all shards
    :param devices: the device of each local shard
    :param local: local step that replaces the local step of the job; None: the job's local step
    :param local_options: options that the ranks have agreed on; None: the job's `[local]` options
    :param total: number of steps of the run, on which some cadences depend; None: not known
    :param frozen: names of parameters that are not trained now, but may be later
    :raises JobError: if the fragments that the job names don't divide the model, or if its
        algorithm can't be built
    """
    graph = graphs.graph("identity", 1) if graph is None else graph
    shards = range(flat.slots) if shards is None else shards
    full_layout = None
    if isinstance(flat, ParameterLayout) and flat.slots == 1 and flat.size:
        full_layout = flat
    decayed = [flat.decayed_in(slot) for slot in shards]
    exact_methods = [
        _method(job, graph, count, local, full_layout, local_options) for count in decayed
    ]
    cadence = _cadence(job, exact_methods[0], graph, total)
    node = job.node
    coding = wire(node.wire, node.levels, node.density, job.run.seed)
    width = fragment_width(flat, cadence.fragment_schedule, coding, frozen)
    layout = MessageLayout(
        (width,) * len(shards),
        exact_methods[0].vectors,
        exact_methods[0].scalars,
        tuple(devices),
        coding,
        first=tuple(width * shard for shard in shards),
    )
    state_layout = MessageLayout(
        (flat.width,) * len(shards),
        devices=tuple(devices),
        first=tuple(flat.width * shard for shard in shards),
    )
    methods = [_over_wire(method, coding, cadence) for method in exact_methods]
    return JobParts(job, graph, methods, cadence, layout, state_layout, frozen)


def _method(
    job: Job,
    graph: Graph,
    decayed: int = 0,
    local: Local | None = None,
    full_layout: ParameterLayout | None = None,
    local_options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Return the algorithm of a shard, which sends exact messages.

    :param job: the job
    :param graph: its graph
    :param decayed: number of elements of the shard that have weight decay
    :param local: local step that replaces the local step of the job; None: the job's local step
    :param full_layout: layout of the parameters if the shard contains all of them, otherwise None
    :param local_options: options of the local step; None: the options of the job
    """
    section = job.local
    return algorithms.build(
        job.algorithm.name,
        local or section.name,
        job.algorithm.options,
        decayed,
        graph,
        local_options=section.options if local_options is None else local_options,
        node=job.node,
        layout=full_layout,
    )


def _cadence(job: Job, method: Algorithm, graph: Graph, total: int | None) -> Cadence:
    """Return the cadence of the job, or the only cadence that the algorithm allows.

    Options that the job does not set are computed from the period of the graph and the number of
    steps of the run.

    :param job: the job
    :param method: its algorithm
    :param graph: its graph
    :param total: number of steps of the run; None: not known
    """
    if method.always_global:
        return cadences.globally()
    spec = BuilderSpec.of(cadences.BUILDERS, job.cadence.name)
    options = job.cadence.options
    return spec(**options | spec.following(options, Known(graph, options, total=total)))


def _over_wire(method: Algorithm, coding: Wire, cadence: Cadence) -> Algorithm:
    """Return the algorithm, adapted to a lossy wire by differences or error feedback.

    :param method: algorithm for exact messages, which is returned unchanged if the wire is exact
    :param coding: format of the messages
    :param cadence: cadence of the job
    """
    if coding.exact:
        return method
    has_global = ExchangeKind.GLOBAL in cadence.kinds
    return algorithms.over_wire(method, biased=coding.biased, meets=has_global)
