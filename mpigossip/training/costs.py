"""What a job moves and holds, counted without a machine: for the dry run and for the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from mpigossip import algorithms, models
from mpigossip.algorithms.base import Step
from mpigossip.algorithms.cadence import Cadence
from mpigossip.config import Job, JobError
from mpigossip.data.loading import AnyData
from mpigossip.data.sources import SyntheticSource, source
from mpigossip.engine.state import leaves
from mpigossip.engine.vector import Flat, flatten
from mpigossip.graphs import Graph
from mpigossip.mixing import mixer_class
from mpigossip.mixing.base import Kind, Layout, is_average, traffic
from mpigossip.store import StoreError
from mpigossip.training import assemble, shape

STEPS = 240
"""Steps over which costs are averaged: whole periods of all usual graphs and cadences."""
STEADY = {"variance": 1.0, "loss": 1.0}
"""What an adaptive cadence is told to have measured: nothing changes, so its period stays."""


@dataclass(frozen=True)
class Subject:
    """The parts of a job that don't depend on the number of nodes."""

    job: Job
    flat: Flat
    slots: int
    samples: int
    """for training, over all nodes"""

    @property
    def per_step(self) -> int:
        """Samples a node and step."""
        return self.slots * self.job.data.batch * self.job.algorithm.accumulate

    def steps_per_epoch(self, n: int) -> int:
        """Steps in which n nodes go through the samples once."""
        return self.samples // n // self.per_step


def subject(job: Job) -> tuple[Subject, str]:
    """What is to be counted, and a note where a stand-in takes the place of missing data."""
    data, note = data_or_stand_in(job)
    module = assemble.make_model(job, data)
    slots = shape.planned(job)
    undecayed = None if job.algorithm.decay_all else models.decayed(module)
    flat = flatten(module, slots if job.node.shard else 1, undecayed)
    told = "; ".join(filter(None, (note, shape.assumed(job))))
    return Subject(job, flat, slots, data.train_size), told


def data_or_stand_in(job: Job) -> tuple[AnyData, str]:
    """The job's data, or where they aren't here, a stand-in of data.shape and data.classes."""
    try:
        return source(job.data, job.run.seed), ""
    except (JobError, StoreError):
        section = job.data
        stand_in = SyntheticSource(
            tuple(section.shape), section.classes, section.samples, section.test_samples, 0
        )
        if job.model.name == "gpt":
            stand_in.dtype = torch.int64  # only counted: no batch is made of it
        return stand_in, (
            f'"{section.source}" is not here: {section.samples:,} samples of shape '
            f"{tuple(section.shape)} in {section.classes} classes assumed (data.samples, "
            "data.shape, data.classes)"
        )


@dataclass(frozen=True)
class Exchanges:
    """A job's exchanges between n nodes."""

    graph: Graph
    method: algorithms.Algorithm
    cadence: Cadence
    layout: Layout
    asynchronous: bool = False

    def rounds(self) -> Iterator[tuple[Kind, int]]:
        """Kind and clock of each exchange of `STEPS` steps."""
        state, clock = self.cadence.init(), 0
        for index in range(STEPS):
            kind = self.cadence.kind(state, index)
            yield kind, clock
            now = Step(index, clock, kind, 1.0)
            clock += kind is Kind.GOSSIP
            state = self.cadence.observe(state, now, STEADY)

    @cached_property
    def counted(self) -> Counter[tuple[Kind, int | None]]:
        """How often each kind and round occurs in `STEPS` steps; None: an average over all.

        Rounds that are the exact average count as one, since they are carried out as one.
        """
        period, found = self.graph.period, Counter[tuple[Kind, int | None]]()
        for kind, t in self.rounds():
            t = t % period if period else t
            if kind is Kind.GOSSIP and is_average(self.graph, t):
                kind = Kind.GLOBAL
            found[kind, t if kind is Kind.GOSSIP else None] += 1
        return found

    @property
    def bytes_per_step(self) -> float:
        """What node 0 sends in an average step."""
        sent, raw = self.layout.sent_bytes, self.layout.raw_bytes
        total = 0
        for (kind, t), count in self.counted.items():
            # asynchronously a copy is fetched and a deposit put for each neighbour
            messages = 2 if self.asynchronous and kind is Kind.GOSSIP else 1
            total += count * messages * traffic(self.graph, kind, t or 0, 0, sent, raw)
        return total / STEPS


def exchanges(what: Subject, n: int) -> Exchanges:
    """The exchanges of a job on n nodes. Raises GraphError for an n that the graph doesn't have."""
    job, flat = what.job, what.flat
    graph = assemble.make_graph(job, n)
    method = assemble.make_algorithms(job, flat, graph)[0]
    layout = Layout(flat.widths, method.vectors, method.scalars, wire=assemble.make_wire(job))
    cadence = assemble.make_cadence(job, method, graph, STEPS)
    return Exchanges(graph, method, cadence, layout, job.node.mixer == "asynchronous")


def memory(what: Subject, made: Exchanges) -> dict[str, int]:
    """Bytes of a node by purpose, each node on a host of its own; see :func:`held`."""
    job, flat = what.job, what.flat
    state = made.method.init(torch.empty(1, flat.size, device="meta"))
    arrays = sum(array.numel() * array.element_size() for _, array in leaves(state))
    on_cpu = job.node.devices.startswith("cpu")
    where = "survivors" if job.run.survive else "ranks" if on_cpu else "devices"
    mixer = mixer_class(job.node.mixer, where)
    messages = mixer.holds(made.graph, made.layout, 0, averages=Kind.GLOBAL in made.cadence.kinds)
    return held(job, flat, what.slots, arrays, messages)


def held(
    job: Job, flat: Flat, slots: int, state: int, messages: dict[str, int], survives: bool = True
) -> dict[str, int]:
    """Bytes of a node by purpose; activations, batches and libraries are not counted.

    ``state``: of the algorithm; ``messages``: what the mixer says that it holds; ``survives``:
    the MPI of this run can do what `run.survive` asks for.
    """
    model = 4 * flat.size
    copies = 2 if job.run.survive and survives else 0
    found = {"replicas": slots * model, "gradients": slots * model, "algorithm state": state}
    found |= {f"messages' {name}": count for name, count in messages.items() if count}
    found["snapshot for checkpoints"] = model + state
    return found | ({"copies to outlive a lost rank": copies * (model + state)} if copies else {})
