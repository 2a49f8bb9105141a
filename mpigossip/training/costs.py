"""Traffic and memory estimates of a job, computed without running it."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from mpigossip.algorithms.base import Step
from mpigossip.algorithms.cadence import Cadence, fixed_schedule
from mpigossip.config import Job, JobError
from mpigossip.data.problems import Functions
from mpigossip.data.sources import SOURCES, AnyData, SyntheticSource, source
from mpigossip.engine.vector import ParameterLayout, named_arrays
from mpigossip.mixing import mixer_class
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange, is_average
from mpigossip.store import StoreError
from mpigossip.training import assemble, shape
from mpigossip.training.parts import JobParts, make_graph, make_parts
from mpigossip.training.schedule import schedule

STEPS = 240
"""Steps over which costs are averaged: whole periods of all usual graphs and cadences."""
STEADY = {"variance": 1.0, "loss": 1.0}
"""Measurements that an adaptive cadence is given, where no formula says them."""
LONGEST = 200_000
"""Most steps of a run along which an adaptive cadence is followed."""
PERIODS = 20
"""Fewest periods of an adaptive cadence over which costs are averaged."""


@dataclass(frozen=True)
class Subject:
    """The parts of a job that don't depend on the number of nodes."""

    job: Job
    flat: ParameterLayout
    slots: int
    samples: int
    """for training, over all nodes"""
    shared: bool = True
    """unless each node has as many, of a problem of theory"""

    @property
    def per_step(self) -> int:
        """Samples a node and step."""
        return self.slots * self.job.data.batch * self.job.algorithm.accumulate

    def steps_per_epoch(self, n: int) -> int:
        """Steps in which n nodes go through the samples once."""
        return self.samples // (n if self.shared else 1) // self.per_step


def subject(job: Job) -> tuple[Subject, str]:
    """Return the subject, and a note if a stand-in takes the place of missing data."""
    data, note = data_or_stand_in(job)
    module = assemble.make_model(job, data, counted=True)
    slots = shape.slots(job)
    flat = assemble.lay_out(job, module, slots)
    told = "; ".join(filter(None, (note, shape.assumed(job))))
    shared = not isinstance(getattr(data, "train", None), Functions)
    return Subject(job, flat, slots, data.train_size, shared), told


def data_or_stand_in(job: Job) -> tuple[AnyData, str]:
    """The job's data, or where they aren't here, a stand-in of data.shape and data.classes."""
    section = job.data
    try:
        return source(section, job.run.seed), ""
    except (JobError, StoreError):
        if section.source in SOURCES or Path(section.source).expanduser().exists():
            raise
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

    parts: JobParts
    steps: int = STEPS
    """over which costs are averaged"""

    def carried_out(self, kind: ExchangeKind, t: int | None) -> tuple[ExchangeKind, int | None]:
        """Kind of an exchange and its round within the graph's period, if it is gossip.

        A round of gossip that is the exact average is carried out as a global one, unless nodes
        don't wait for each other.
        """
        graph = self.parts.graph
        if kind is ExchangeKind.GOSSIP and t is not None:
            t = t % graph.period if graph.period else t
            if self.asynchronous or not is_average(graph, t):
                return kind, t
            kind = ExchangeKind.GLOBAL
        return kind, None

    def rounds(self) -> Iterator[tuple[ExchangeKind, int | None]]:
        """Each exchange of `steps` steps, as `carried_out`."""
        cadence = self.parts.cadence
        clock = 0
        state = cadence.init()
        for index in range(self.steps):
            kind = cadence.kind(state, index)
            yield self.carried_out(kind, clock // cadence.fragment_schedule.fragments)
            now = Step(index, clock, kind, 1.0)
            clock += kind is ExchangeKind.GOSSIP
            state = cadence.observe(state, now, STEADY)

    @cached_property
    def counted(self) -> Counter[tuple[ExchangeKind, int | None]]:
        """Their number of occurrences."""
        return Counter(self.rounds())

    @property
    def asynchronous(self) -> bool:
        """Return whether nodes never wait for each other."""
        return self.parts.job.node.mixer == "asynchronous"

    @property
    def bytes_per_step(self) -> float:
        """Bytes that node 0 sends in an average step."""
        layout = self.parts.layout
        sent = layout.sent_bytes
        raw = layout.raw_bytes
        graph = self.parts.graph
        waits = not self.asynchronous
        each = self.counted.items()
        total = sum(
            k * bytes_per_exchange(graph, kind, t or 0, 0, sent, raw, waits)
            for (kind, t), k in each
        )
        return total / self.steps


def exchanges(what: Subject, n: int, period: float | None = None) -> Exchanges:
    """The exchanges of a job on n nodes. Raises GraphError for an n that the graph doesn't have.

    ``period``: average one of an adaptive cadence, in place of what its formula gives.
    """
    job = what.job
    parts = make_parts(job, make_graph(job, n), what.flat, total=STEPS)
    cadence = parts.cadence
    if cadence.measures:
        period = average_period(what, n) if period is None else period
        parts = replace(parts, cadence=steady(cadence, period))
        return Exchanges(parts, max(STEPS, round(PERIODS * period)))
    if cadence.kinds == {ExchangeKind.GOSSIP}:
        return Exchanges(parts)
    own = max(cadence.periods, default=job.cadence.options.get("period", 1))
    return Exchanges(parts, own * -(-STEPS // own))  # whole periods


_PERIODS: dict[str, float] = {}


def average_period(what: Subject, n: int) -> float:
    """Steps between two global averages of an adaptive cadence, on average over the run.

    Local steps at rates r_k take nodes apart by S = Σ r_k² V, V the gradients' variance, taken as
    constant: what a cadence that measures S is told. ADPSGD's period then tends to p₀ r₀/r, r₀ the
    mean rate of its samples. One that goes by the loss is told that this stays.
    """
    job = what.job
    an_epoch = what.steps_per_epoch(n)
    total = min(LONGEST, job.run.epochs * an_epoch) or STEPS
    key = repr((job.algorithm, job.cadence, job.schedule, an_epoch, total, n * what.per_step))
    if key not in _PERIODS:
        rate = schedule(job.schedule, an_epoch, total, n * what.per_step)
        cadence = make_parts(job, make_graph(job, n), what.flat, total=total).cadence
        _PERIODS[key] = total / max(1, _averages(cadence, rate, total))
    return _PERIODS[key]


def _averages(cadence: Cadence, rate: Callable[[int], float], total: int) -> int:
    """Number of global averages in ``total`` steps, at these learning rates."""
    state = cadence.init()
    spread = 0.0
    found = 0
    for index in range(total):
        kind = cadence.kind(state, index)
        lr = rate(index)
        spread += lr * lr
        state = cadence.observe(state, Step(index, 0, kind, lr), STEADY | {"variance": spread})
        if kind is ExchangeKind.GLOBAL:
            found = found + 1
            spread = 0.0
    return found


def steady(cadence: Cadence, period: float) -> Cadence:
    """The cadence with a global average at every ``period``-th step on average, for ever."""
    others = next(iter(cadence.kinds - {ExchangeKind.GLOBAL}), ExchangeKind.LOCAL)

    def kind(index: int) -> ExchangeKind:
        return ExchangeKind.GLOBAL if int((index + 1) / period) > int(index / period) else others

    return fixed_schedule(kind, *cadence.kinds)


def memory(what: Subject, made: Exchanges) -> dict[str, int]:
    """Bytes of a node by purpose, each node on a host of its own; see :func:`held`."""
    job = what.job
    flat = what.flat
    parts = made.parts
    state = parts.method.init(torch.empty(1, flat.size, device="meta"))
    arrays = sum(array.numel() * array.element_size() for _, array in named_arrays(state))
    if parts.cadence.fragment_schedule.delay:
        arrays += 4 * flat.size  # received, not applied yet
    on_cpu = job.node.devices.startswith("cpu")
    where = "survivors" if job.run.survive else "ranks" if on_cpu else "devices"
    mixer = mixer_class(job.node.mixer, where)
    devices = () if on_cpu else ("cuda",) * len(flat.widths)
    layout = replace(parts.layout, devices=devices)
    averages = ExchangeKind.GLOBAL in parts.cadence.kinds
    messages = mixer.estimate_memory(parts.graph, layout, 0, averages=averages)
    return held(job, flat, what.slots, arrays, messages)


def held(
    job: Job,
    flat: ParameterLayout,
    slots: int,
    state: int,
    messages: dict[str, int],
    survives: bool = True,
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
