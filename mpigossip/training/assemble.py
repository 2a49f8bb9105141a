"""Assembly of a job, which checks all settings together and then builds the trainer."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpigossip import algorithms, config, graphs, models
from mpigossip.algorithms import cadence as cadences
from mpigossip.algorithms.adamw_step import all_use_kernel
from mpigossip.cluster import deadline, nodes
from mpigossip.cluster.local_devices import resolve_auto, slots_of
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.choices import Tables
from mpigossip.config.errors import UserError
from mpigossip.config.readable import print_note_once
from mpigossip.config.user_code import is_user_code
from mpigossip.data.base import JobData
from mpigossip.data.loader import Loader, processes
from mpigossip.data.partition import make_orders, partition_digest
from mpigossip.data.sources import SOURCES, check_alike, source
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import ParameterLayout, flatten
from mpigossip.graphs import Graph, GraphError
from mpigossip.graphs.placement import graph_nodes_for, renumbered
from mpigossip.groups import devices
from mpigossip.groups.base import Group, local_shards
from mpigossip.mixing import MIXERS, close_mixer, open_mixer
from mpigossip.mixing.lossy_wires import WIRES
from mpigossip.training import rules, shape, task
from mpigossip.training.loop import Trainer
from mpigossip.training.parts import (
    JobParts,
    make_graph,
    make_parts,
    make_unweighted_graph,
    weigh_nodes,
)
from mpigossip.training.precision import Precision, agreed, arranged
from mpigossip.training.replicas import Replicas
from mpigossip.training.schedule import schedule
from mpigossip.training.task import Objective

COMPILER_LOCK_S = 60.0
"""Smallest limit, in seconds, of waits for a lock of torch's compiler cache."""

MODEL_TASKS = ("classification", "language-model")
"""Tasks that use the parameters of a model only by calling the model."""


@dataclass
class Assembly:
    """Job that is ready to run on n nodes, of which some are local to this process."""

    parts: JobParts
    trainer: Trainer
    source: JobData
    loader: Loader
    steps_per_epoch: int
    total_steps: int
    """Number of steps of the run: the steps of all epochs, but at most `run.steps`."""
    partition: str = ""
    """Digest of the partition of the samples over nodes; "" for data that are a stream."""

    @property
    def engine(self) -> Engine:
        """Engine of the trainer, which updates and exchanges the models."""
        return self.trainer.engine

    def close(self) -> None:
        """Release threads, files and MPI windows; collective if nodes are MPI ranks."""
        close_mixer(self.trainer.mixer)
        self.abandon()

    def abandon(self) -> None:
        """Release everything except the mixer, because closing the mixer is collective."""
        self.loader.close()
        self.engine.group.close()
        self.source.close()


def tables_of_names() -> Tables:
    """Return, for each setting that holds a name, the table of the valid names."""
    return {
        "task.name": task.TASKS,
        "data.source": SOURCES,
        "model.name": models.BUILDERS,
        "algorithm.name": algorithms.BUILDERS,
        "local.name": algorithms.LOCALS,
        "graph.name": graphs.BUILDERS,
        "cadence.name": cadences.BUILDERS,
        "node.wire": WIRES,
        "node.mixer": {mixer: open_mixer for mixer, _ in MIXERS},
    }


def load(where: Path | str | dict, overrides: Sequence[str] = (), resolve: bool = True) -> Job:
    """Read a job, and check its names and options against the tables of all subpackages.

    :param where: path of a TOML file, name of an example, TOML text of several lines, or sections
        as a dict
    :param overrides: settings "section.key=value" that replace settings of the file
    :param resolve: replace "auto" of `node.devices` and `node.ranks_per_node` by the values for
        this host and its launcher
    :raises JobError: if the job has errors, with one paragraph for each of them; or if ``resolve``
        is true, and the GPUs of this host can't be used
    """
    job = config.load(where, overrides, tables_of_names())
    if not resolve:
        return job
    node_devices, ranks = resolve_auto(job.node.devices, job.node.ranks_per_node)
    return replace(job, node=replace(job.node, devices=node_devices, ranks_per_node=ranks))


def place_on_racks(job: Job, graph: Graph, world: World) -> Graph:
    """Return the graph, renumbered so that few messages cross between racks.

    The graph is returned unchanged if `graph.placement` is "given", or without MPI. The call is
    collective over all ranks.

    :param job: the job
    :param graph: graph of all nodes
    :param world: all ranks, grouped into nodes
    :raises JobError: on all ranks, if the racks of the hosts can't be determined
    :raises GraphError: on all ranks, if the search for graph nodes fails
    """
    if job.graph.placement == "given" or world.comm is None:
        return graph
    inter_node = world.nodes.inter_node
    addresses = nodes.addresses(inter_node) if job.graph.placement == "scheduler" else ()
    with world.raise_together(JobError):
        racks = nodes.racks(job.graph.placement, inter_node.hosts, addresses)
    order = sorted(range(graph.n), key=lambda i: (nodes.natural(inter_node.hosts[i]), i))
    graph_nodes = None
    with world.raise_together(GraphError):
        if world.rank == 0:
            # The other ranks wait for the search, which may take longer than their time limit.
            with deadline.paused():
                graph_nodes = graph_nodes_for(graph, racks, order)
    # The weights of nodes are in the order of the ranks, not of the graph's nodes.
    unweighted = make_unweighted_graph(job, graph.n) if graph.node_weights else graph
    return weigh_nodes(job, renumbered(unweighted, world.broadcast(graph_nodes)))


def make_model(job: Job, data: JobData, counted: bool = False) -> torch.nn.Module:
    """Return the model with its initial parameters, which are identical on all nodes.

    With a task of this package, the model is tested on a sample, unless the data do not state the
    type of their inputs. With a custom task, the model may return anything, and is not tested.

    :param job: the job
    :param data: source of the data, which states the shape of a sample and the number of classes
    :param counted: whether only the number and shapes of the parameters are needed; a large model
        is then made without values, and not tested
    :raises JobError: if the model can't be built, fails the test, or does not fit into the memory
    """
    make = models.counted if counted else models.model
    return make(
        job.model.name,
        data.shape,
        data.classes,
        job.run.seed,
        data.dtype if job.task.name in task.TASKS else None,
        **job.model.options,
    )


def lay_out(job: Job, module: nn.Module, slots: int) -> ParameterLayout:
    """Return the positions of the model's parameters in the flat parameters of a node.

    :param job: the job
    :param module: the model, on any device
    :param slots: number of slots per node; with `node.shard`, each of them has one shard
    :raises JobError: if the model has no trained parameter, or one that is not float32
    """
    decayed = None if job.algorithm.decay_all else models.decayed(module)
    return flatten(module, slots if job.node.shard else 1, decayed)


def mistakes(job: Job, n: int) -> list[str]:
    """Return error messages about settings of a job that are wrong on n nodes.

    Settings that only the world of the run can contradict are not checked.
    """
    return check(job, n)[1]


def check(job: Job, n: int) -> tuple[Graph | None, list[str]]:
    """Return the graph of a job on n nodes, and the error messages of :func:`mistakes`.

    The graph is None if it can't be made, or if a setting of `[faults]` is impossible. The ability
    to survive a rank failure is checked only if the graph and the parts of the job fit together.
    """
    graph, problems = _unfit(job, n)
    if not problems:
        problems += survival_problems(job, n)
    return graph, problems + devices.device_problems(job.node.devices) + rules.contradictions(job)


def survival_problems(job: Job, n: int) -> list[str]:
    """Return the reasons why a job with `run.survive` could not continue after a rank failure.

    After a rank failure, the run continues with n − 1 nodes. The result is [] without
    `run.survive`.
    """
    if not job.run.survive:
        return []
    problems = _unfit(job, n - 1)[1] if n > 1 else []
    problems = [f"run.survive, with one node fewer: {text}" for text in problems]
    return problems + rules.survival_problems(job)


def _unfit(job: Job, n: int) -> tuple[Graph | None, list[str]]:
    """Return the graph of a job on n nodes, and error messages about incompatible settings.

    The graph is None if it can't be made, or if a setting of `[faults]` is impossible.
    """
    if problems := rules.fault_problems(job):
        return None, problems
    try:
        graph = make_graph(job, n)
    except GraphError as error:
        return None, [f"graph.name: {error}"]
    return graph, rules.incompatibilities(make_parts(job, graph))


def agree_on_local_options(job: Job, world: World, local_devices: Sequence[str]) -> dict[str, Any]:
    """Return the options of the local step that all ranks use; collective over ``world``.

    `local.fused` becomes false unless all ranks can use the fused kernel, because ranks would
    otherwise compute in different ways.

    :param job: the job
    :param world: all ranks of the run
    :param local_devices: devices of this rank's slots
    """
    options = dict(job.local.options)
    if options.get("fused"):
        options["fused"] = all_use_kernel(world, local_devices)
    return options


def resolve_cuda_graphs(setting: str, eager: bool) -> str:
    """Return the value of `node.cuda_graphs` for this job: "always", "never" or "auto".

    If the replicas can't be captured, the value is "never". On AMD GPUs, "auto" becomes "never":
    with ROCm 7.0 to 7.2, a capture becomes invalid if another thread, such as NCCL's watchdog,
    queries an event meanwhile (not tested here).

    :param setting: value of `node.cuda_graphs`
    :param eager: whether the replicas can't be captured: on CPUs, or with vmap
    """
    if eager or (setting == "auto" and torch.version.hip):
        return "never"
    return setting


def allows_buckets(job: Job) -> bool:
    """Return whether a job's gradients may be averaged in parameter buckets during backward.

    The group of the node's slots must be able to do so, too (`Group.starts_means`).

    A CUDA graph contains the whole backward pass, so a job with CUDA graphs gets no parameter
    buckets. Parameter buckets have not been tested on several GPUs. A job gets them only if
    `node.cuda_graphs` is "never", and not if it is "auto", even if "auto" captures no graphs, as on
    AMD GPUs. With `node.compile` or `node.vmap`, the backward pass returns all gradients at its
    end, so that parameter buckets would not overlap with it.
    """
    node = job.node
    eager = node.cuda_graphs == "never" and not (node.compile or node.vmap)
    return eager and node.shard and node.bucket_mb > 0


def allows_gather(job: Job) -> bool:
    """Return whether a job's forward pass may begin before the whole model is gathered.

    Each parameter must be used only after the forward pass of a module that owns it has begun. This
    is tested for the package's models and for `MODEL_TASKS`, but not known for custom code: a
    model, a task, or a hook that reads parameters between steps. A compiled model may leave out the
    hooks of its modules.
    """
    built_in = job.model.name in models.BUILDERS and job.task.name in MODEL_TASKS
    return built_in and not job.node.compile and not any(map(is_user_code, job.log.hooks))


def make_replicas(
    job: Job,
    module: nn.Module,
    flat: ParameterLayout,
    rows: int,
    group: Group,
    objective: Objective,
) -> Replicas:
    """Return the copies of the model, compiled if `node.compile` is set.

    CUDA graphs are captured later, by the first step that uses them.

    :param job: the job
    :param module: the model with its initial parameters
    :param flat: layout of its parameters
    :param rows: number of local nodes
    :param group: slots of a node
    :param objective: task of the training
    """
    node = job.node
    graphs = resolve_cuda_graphs(node.cuda_graphs, node.vmap or group.devices[0] == "cpu")
    uses_buckets = group.starts_means and allows_buckets(job)
    replicas = Replicas(
        module,
        flat,
        rows,
        group,
        vectorized=node.vmap,
        graphs=graphs,
        objective=objective,
        bucket_mb=node.bucket_mb if uses_buckets else 0,
        gather_later=allows_gather(job),
    )
    if node.compile:
        _limit_compiler_lock(node.timeout_s)
        for replica in (replica for row in replicas.modules for replica in row):
            _compile(replica)
    return replicas


def _limit_compiler_lock(timeout_s: float) -> None:
    """Limit the time for which torch.compile waits for a lock of its cache.

    The ranks of a host share this cache. If one of them is stopped while it holds a lock, the
    others wait inside torch, where no limit of this package applies, for 600 s by default. The
    limit set here is ``timeout_s``, but at least `COMPILER_LOCK_S`, because a rank may compile for
    that long. A limit that the user has set in the environment remains.

    :param timeout_s: time limit of waits between ranks, in seconds (node.timeout_s)
    """
    limit = math.ceil(max(timeout_s, COMPILER_LOCK_S))
    os.environ.setdefault("TORCHINDUCTOR_FILE_LOCK_TIMEOUT", str(limit))


def _compile(module: nn.Module) -> None:
    """Let calls of a module go through torch.compile.

    ``module.compile()`` has no effect on modules whose class inherits ``forward`` from torch.nn,
    for example ``nn.Sequential`` (pytorch/pytorch issue 150915, seen with torch 2.13). As with that
    method, copies of the module are not compiled.
    """

    def call(*inputs, **options):
        return module._call_impl(*inputs, **options)

    module._compiled_call_impl = torch.compile(call)


def assemble(job: Job, world: World, n: int) -> Assembly:
    """Build the parts of a run on n nodes; collective if nodes are MPI ranks.

    :param job: the job
    :param world: ranks of the run
    :param n: number of nodes
    :raises UserError: on all ranks, if the job has errors (JobError, GraphError), or if the data
        can't be read (StoreError)
    """
    shape.check_alike(job, world)
    with world.raise_together(UserError):
        graph, problems = check(job, n)
        problems = shape.explained(problems, world) + rules.launch_problems(job, world)
        if problems or graph is None:
            raise JobError(problems)
        local_nodes = [world.nodes.node_of_rank[world.rank]] if world.comm is not None else range(n)
        data = source(job.data, job.run.seed, local_nodes, n)
        section = job.algorithm
        slots = shape.slots(job, world)
        per_step = slots * job.data.batch * section.accumulate
        orders = make_orders(data, job.data, job.run.seed, n, per_step)
        module = arranged(
            make_model(job, data), job.node.channels_last, slots_of(job.node.devices)[0]
        )
        sample = data.sample("test")
        objective = task.make(job.task).prepare(data).probe(module, sample)
        rules.check_vmap(job, module, objective, sample)
        flat = lay_out(job, module, slots)
    partition = partition_digest(orders)
    check_alike(job.data.source, data, world, partition)
    rules.check_rounds(job, graph, world)
    graph = place_on_racks(job, graph, world)
    group = shape.make_group(job, world)
    per_epoch = orders[0].steps_per_epoch
    total = job.run.epochs * per_epoch
    shards = local_shards(group)
    parts = make_parts(
        job,
        graph,
        flat,
        shards=shards,
        devices=group.devices[: len(shards)],
        local_options=agree_on_local_options(job, world, group.devices),
        total=total,
    )
    if world.rank == 0 and (warning := rules.state_warning(parts)):
        print_note_once(warning)
    mixer = parts.open_mixer(world.nodes.inter_node)
    replicas = make_replicas(job, module, flat, len(mixer.local_nodes), group, objective)
    loader = Loader(
        data,
        [orders[node] for node in mixer.local_nodes],
        seed=job.run.seed,
        joined=job.node.vmap,
        devices=group.devices,
        workers=processes(job.data.workers, group.devices, world.nodes.per_node),
        timeout_s=job.node.timeout_s,
        slots=group.slots,
        local_slots=group.local_slots,
    )
    engine = parts.make_engine(mixer, group, replicas, job.log.consensus_every)
    engine.publish = replicas.publish
    arithmetic = agreed(job.node.precision, world, group.devices)
    trainer = Trainer(
        job,
        engine,
        replicas,
        Precision(arithmetic, group.devices, len(mixer.local_nodes)),
        schedule(job.schedule, per_epoch, total, n * per_step),
        loader.step,
    )
    total = total if job.run.steps is None else min(total, job.run.steps)
    return Assembly(parts, trainer, data, loader, per_epoch, total, partition)


def with_output(job: Job, folder: str) -> Job:
    """Return the job with ``folder`` as its run directory."""
    return replace(job, run=replace(job.run, output=folder))
