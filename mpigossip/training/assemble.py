"""From a job to a trainer: everything is built and checked here, and mistakes are collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mpigossip import algorithms, config, graphs, models
from mpigossip.algorithms import cadence as cadences
from mpigossip.algorithms.local import Local
from mpigossip.cluster import topology
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError, Part
from mpigossip.config.choices import Tables
from mpigossip.config.errors import Mistake
from mpigossip.data.loading import (
    AnyData,
    AnyLoader,
    check_alike,
    make_orders,
    open_loader,
    processes,
)
from mpigossip.data.sources import SOURCES, Source, source
from mpigossip.engine.measurements import measured_every
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import Flat, flatten
from mpigossip.graphs import Graph, GraphError
from mpigossip.graphs.faulty import Links, faulty
from mpigossip.graphs.placement import place
from mpigossip.groups import devices
from mpigossip.groups.base import Group, held
from mpigossip.groups.devices import slots_of
from mpigossip.mixing import MIXERS, open_mixer
from mpigossip.mixing.base import Kind, Layout, Mixer
from mpigossip.mixing.compressors import WIRES, wire
from mpigossip.mixing.faults import Faults
from mpigossip.mixing.wire import Wire
from mpigossip.training import shape, task
from mpigossip.training.fit import check_rounds, check_vmap, contradictions, unfit
from mpigossip.training.fragments import engine_of, make_fragments, narrowed
from mpigossip.training.loop import Settings, Trainer
from mpigossip.training.precision import Precision, arranged, resolved
from mpigossip.training.replicas import Replicas
from mpigossip.training.schedule import schedule
from mpigossip.training.task import CLASSIFICATION, Objective


@dataclass
class Assembly:
    """A job made ready to run on n nodes, of which some live in this process."""

    job: Job
    graph: Graph
    trainer: Trainer
    source: AnyData
    loader: AnyLoader
    steps_per_epoch: int
    total_steps: int

    @property
    def engine(self) -> Engine:
        """What makes the steps."""
        return self.trainer.engine

    def close(self) -> None:
        """Release threads, files and windows; collective under MPI."""
        self.trainer.mixer.close()
        self.abandon()

    def abandon(self) -> None:
        """Release what needs no other rank: all but what lies between nodes."""
        self.loader.close()
        self.trainer.group.close()
        self.source.close()


def load(where: Path | str | dict, overrides: Sequence[str] = (), resolve: bool = True) -> Job:
    """Read a job with the names and options of everything that the package has.

    ``resolve``: "auto" of `node.devices` and `node.ranks_per_node` becomes what this host and its
    launcher show. Raises JobError with all mistakes.
    """
    tables: Tables = {
        "task.name": task.TASKS,
        "data.source": SOURCES,
        "model.name": models.BUILDERS,
        "algorithm.name": algorithms.BUILDERS,
        "local.name": algorithms.LOCALS,
        "graph.name": graphs.BUILDERS,
        "cadence.name": cadences.BUILDERS,
        "node.wire": WIRES,
        "node.mixer": {asked: open_mixer for asked, _ in MIXERS},
    }
    job = config.load(where, overrides, tables)
    if not resolve:
        return job
    own, ranks = devices.resolved(job.node.devices, job.node.ranks_per_node)
    return replace(job, node=replace(job.node, devices=own, ranks_per_node=ranks))


def make_graph(job: Job, n: int) -> Graph:
    """The graph that the job names, over n nodes."""
    section = job.graph
    seed = job.run.seed if section.seed is None else section.seed
    made = graphs.graph(
        section.name, n, weights=section.weights, seed=seed, lazy=section.lazy, **section.options
    )
    ill = job.faults
    if job.node.mixer == "asynchronous" or not (ill.lost or ill.away or ill.ticks):
        return made
    return faulty(made, Links(n, job.run.seed, ill.lost, ill.lost_rounds, ill.away,
                              ill.away_rounds, ill.ticks))  # fmt: skip


def placed(job: Job, graph: Graph, world: World) -> Graph:
    """The graph renumbered for the racks that the nodes stand in; collective."""
    if job.graph.placement == "given" or world.comm is None:
        return graph
    column = world.nodes.column
    told = topology.addresses(column) if job.graph.placement == "scheduler" else ()
    with world.together(JobError):
        found = topology.racks(job.graph.placement, column.hosts, told)
    order = sorted(range(graph.n), key=lambda i: (topology.natural(column.hosts[i]), i))
    return place(graph, found, order)


def make_cadence(
    job: Job,
    method: algorithms.Algorithm,
    graph: Graph | None = None,
    total: int | None = None,
) -> cadences.Cadence:
    """The cadence that the job names, or the only one that the method allows.

    Options that the job leaves unset come from the graph's period and the run's steps.
    """
    if method.always_global:
        return cadences.globally()
    part, options = Part.of(cadences.BUILDERS, job.cadence.name), job.cadence.options
    return part(**options | part.following(options, cadences.Known(graph, total)))


def make_algorithms(
    job: Job,
    flat: Flat,
    graph: Graph | None = None,
    here: range | None = None,
) -> list[algorithms.Algorithm]:
    """The algorithm, once for each shard, made to bear the job's wire.

    ``here``: the shards that live in this process; None: all.
    """
    shards = range(flat.slots) if here is None else here
    whole = None if flat.slots > 1 else flat
    return [make_method(job, flat.decayed_in(shard), graph, layout=whole) for shard in shards]


def make_method(
    job: Job,
    decayed: int,
    graph: Graph | None,
    local: Local | None = None,
    layout: Flat | None = None,
) -> algorithms.Algorithm:
    """The job's algorithm for a segment, made to bear the job's wire; see :func:`make_bare`."""
    method, coding = make_bare(job, decayed, graph, local, layout), make_wire(job)
    if coding.exact:
        return method
    meets = Kind.GLOBAL in make_cadence(job, method, graph).kinds
    return algorithms.over_wire(method, biased=coding.biased, meets=meets)


def make_bare(
    job: Job,
    decayed: int = 0,
    graph: Graph | None = None,
    local: Local | None = None,
    layout: Flat | None = None,
) -> algorithms.Algorithm:
    """The job's algorithm for a segment whose first ``decayed`` columns take weight decay.

    ``local``: a local step in place of the job's. ``layout``: of a segment that is all of a vector.
    """
    section = job.local
    return algorithms.build(
        job.algorithm.name, local or section.name, job.algorithm.options, decayed, graph,
        local_options=section.options, node=job.node, layout=layout,
    )  # fmt: skip


def make_wire(job: Job) -> Wire:
    """How messages between nodes are encoded."""
    return wire(job.node.wire, job.node.levels, job.node.kept, job.run.seed)


def make_model(job: Job, data: AnyData) -> torch.nn.Module:
    """The model with its initial parameters, the same on all nodes.

    Where the task is one of the package's own, and so are the data, its output has a given shape.
    """
    scores = job.task.name in task.TASKS and isinstance(data, Source)
    return models.model(
        job.model.name, data.shape, data.classes, job.run.seed, data.dtype if scores else None,
        **job.model.options,
    )  # fmt: skip


def mistakes(job: Job, n: int) -> list[str]:
    """What doesn't go together in a job whose parts are right by themselves."""
    found = _unfit(job, n)
    if not found:
        found += lasting(job, n)
    return found + devices.mistakes(job.node.devices) + contradictions(job)


def lasting(job: Job, n: int) -> list[str]:
    """What keeps a job that is to outlive losses from going on with one node fewer."""
    if not job.run.survive:
        return []
    found = _unfit(job, n - 1) if n > 1 else []
    found = [f"run.survive, with one node fewer: {text}" for text in found]
    if job.node.mixer == "asynchronous":
        found.append(
            "run.survive = true: windows can't outlive a lost rank, and an asynchronous run needs "
            'them; use node.mixer = "synchronous", or restart from checkpoints'
        )
    return found


def _unfit(job: Job, n: int) -> list[str]:
    """The graph can't be made for n nodes, or the parts don't go together."""
    try:
        graph = make_graph(job, n)
    except GraphError as error:
        return [f"graph.name: {error}"]
    method = make_bare(job, 0, graph)
    return unfit(job, graph, method, make_cadence(job, method, graph))


def make_precision(job: Job, on: Sequence[str], rows: int) -> Precision:
    """The arithmetic of forward and backward passes on these devices."""
    return Precision(resolved(job.node.precision, on[0]), on, rows)


def make_replicas(
    job: Job,
    module: torch.nn.Module,
    flat: Flat,
    rows: int,
    group: Group,
    objective: Objective = CLASSIFICATION,
) -> Replicas:
    """The copies of the model, compiled and captured where the job asks for it."""
    node = job.node
    eager = node.vmap or group.devices[0] == "cpu"
    graphs = "never" if eager else node.cuda_graphs
    replicas = Replicas(module, flat, rows, group, together=node.vmap, graphs=graphs,
                        objective=objective)  # fmt: skip
    if node.compile:
        for replica in (each for row in replicas.modules for each in row):
            replica.compile()
    return replicas


def make_layout(job: Job, flat: Flat, method: algorithms.Algorithm, group: Group) -> Layout:
    """What the shards that live here send in a round."""
    shards = held(group)
    return Layout(
        tuple(flat.widths[shard] for shard in shards), method.vectors, method.scalars,
        group.devices[: len(shards)], make_wire(job),
        first=tuple(flat.size // flat.slots * shard for shard in shards),
    )  # fmt: skip


def make_mixer(job: Job, graph: Graph, layout: Layout, world: World) -> Mixer:
    """Between the nodes of ``world``, or all nodes in this process where it has no MPI."""
    node, ill = job.node, job.faults
    faults = Faults(
        graph.n, job.run.seed, ill.slow_times, ill.slow_nodes, ill.slow_steps, ill.lost,
        job.log.flush_steps,
    )  # fmt: skip
    return open_mixer(
        graph, layout, world.nodes.column, node.mixer, same_host=node.same_host,
        exchange=node.exchange, timeout_s=node.timeout_s, ages=faults.ages,
    )  # fmt: skip


def make_engine(
    job: Job,
    graph: Graph,
    mixer: Mixer,
    replicas: Replicas,
    methods: Sequence[algorithms.Algorithm],
    total: int,
) -> Engine:
    """What steps along the replicas' gradients, for ``total`` steps."""
    group, flat = replicas.group, replicas.flat

    cadence, width = make_cadence(job, methods[0], graph, total), flat.size // flat.slots
    parts = make_fragments(
        job, cadence.turns, mixer.layout, flat,
        [slice(width * shard, width * (shard + 1)) for shard in held(group)],
        methods, lambda still: make_method(job, 0, graph, still),
    )  # fmt: skip
    return engine_of(parts)(
        mixer, group, replicas, methods, cadence,
        measure_every=measured_every(job.log.consensus_every, group.devices[0]),
    )  # fmt: skip


def assemble(job: Job, world: World, n: int) -> Assembly:
    """Build all that a run on n nodes needs; collective under MPI.

    Raises JobError on every rank where any rank found mistakes.
    """
    shape.check_alike(job, world)
    with world.together(Mistake):
        found = shape.explained(mistakes(job, n), world) + shape.mistakes(job, world)
        if found:
            raise JobError(found)
        here = [world.nodes.of[world.rank]] if world.comm is not None else range(n)
        data = source(job.data, job.run.seed, here, n)
        section = job.algorithm
        slots = shape.slots(job, world)
        per_step = slots * job.data.batch * section.accumulate
        each = make_orders(data, job.data, job.run.seed, n, per_step)
        module = arranged(
            make_model(job, data), job.node.channels_last, slots_of(job.node.devices)[0]
        )
        sample = data.sample("test")
        objective = task.make(job.task).told(data).tried(module, sample)
        check_vmap(job, module, objective, sample)
        decayed = None if section.decay_all else models.decayed(module)
        flat = flatten(module, slots if job.node.shard else 1, decayed)
        graph = make_graph(job, n)
    check_alike(job.data.source, data, world)
    check_rounds(job, graph, world)
    graph = placed(job, graph, world)
    group = shape.make_group(job, world)
    methods = make_algorithms(job, flat, graph, here=held(group))
    turns = make_cadence(job, methods[0]).turns
    layout = narrowed(make_layout(job, flat, methods[0], group), turns)
    mixer = make_mixer(job, graph.slowed(turns.fragments), layout, world)
    replicas = make_replicas(job, module, flat, len(mixer.rows), group, objective)
    loader = open_loader(
        data,
        [each[node] for node in mixer.rows],
        seed=job.run.seed,
        together=job.node.vmap,
        devices=group.devices,
        workers=processes(job.data.workers, group.devices, world.nodes.per_node),
        timeout_s=job.node.timeout_s,
        slots=group.slots,
        mine=group.mine,
    )
    per_epoch = each[0].steps_per_epoch
    total = job.run.epochs * per_epoch
    settings = Settings(
        rate=schedule(job.schedule, per_epoch, total, n * per_step),
        batches=loader.step,
        seed=job.run.seed,
        precision=make_precision(job, group.devices, len(mixer.rows)),
        accumulate=section.accumulate,
        weight_decay=section.weight_decay,
        clip_norm=section.clip_norm,
    )
    engine = make_engine(job, graph, mixer, replicas, methods, total)
    trainer = Trainer(engine, replicas, settings)
    total = total if job.run.steps is None else min(total, job.run.steps)
    return Assembly(job, graph, trainer, data, loader, per_epoch, total)


def with_output(job: Job, folder: str) -> Job:
    """The same job with another folder for its run."""
    return replace(job, run=replace(job.run, output=folder))
