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
"""Number of steps over which costs are averaged: whole periods of all common graphs and
cadences."""
STEADY = {"variance": 1.0, "loss": 1.0}
"""Measurements that are passed to an adaptive cadence if no formula gives them."""
LONGEST = 200_000
"""Largest number of steps over which an adaptive cadence is followed."""
PERIODS = 20
"""Smallest number of periods of an adaptive cadence over which costs are averaged."""


@dataclass(frozen=True)
class Subject:
    """Parts of a job that do not depend on the number of nodes."""

    job: Job
    flat: ParameterLayout
    slots: int
    samples: int
    """Number of training samples: of all nodes together if ``shared``, otherwise of each node."""
    shared: bool = True
    """True if nodes share the samples. In a problem of theory, each node has the same number."""

    @property
    def per_step(self) -> int:
        """Number of samples per node and step."""
        return self.slots * self.job.data.batch * self.job.algorithm.accumulate

    def steps_per_epoch(self, n: int) -> int:
        """Return the number of steps in which n nodes process all samples once."""
        return self.samples // (n if self.shared else 1) // self.per_step


def subject(job: Job) -> tuple[Subject, str]:
    """Return the subject of a job, and a note.

    The note is not empty if a stand-in replaces data that are not on this host, or if the number of
    ranks per node is assumed.
    """
    data, note = data_or_stand_in(job)
    module = assemble.make_model(job, data, counted=True)
    slots = shape.slots(job)
    flat = assemble.lay_out(job, module, slots)
    notes = "; ".join(filter(None, (note, shape.assumed(job))))
    shared = not isinstance(getattr(data, "train", None), Functions)
    return Subject(job, flat, slots, data.train_size, shared), notes


def data_or_stand_in(job: Job) -> tuple[AnyData, str]:
    """Return the data of the job, or synthetic data of the same shape if they are not on this host.

    The second value is "" or a note that describes the stand-in.
    """
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
            stand_in.dtype = torch.int64  # parameters are only counted, and no batch is made
        return stand_in, (
            f'"{section.source}" is not on this host: assuming {section.samples:,} samples of '
            f"shape {tuple(section.shape)} in {section.classes} classes (data.samples, "
            "data.shape, data.classes)"
        )


@dataclass(frozen=True)
class Exchanges:
    """Exchanges of a job between n nodes."""

    parts: JobParts
    steps: int = STEPS
    """Number of steps over which costs are averaged."""

    def carried_out(self, kind: ExchangeKind, t: int | None) -> tuple[ExchangeKind, int | None]:
        """Return the kind of an exchange as it is executed, and its round in the graph's period.

        A GOSSIP round whose result is the exact average is executed as a GLOBAL exchange, unless
        nodes are asynchronous. The round is None unless the kind is GOSSIP.
        """
        graph = self.parts.graph
        if kind is ExchangeKind.GOSSIP and t is not None:
            t = t % graph.period if graph.period else t
            if self.asynchronous or not is_average(graph, t):
                return kind, t
            kind = ExchangeKind.GLOBAL
        return kind, None

    def rounds(self) -> Iterator[tuple[ExchangeKind, int | None]]:
        """Yield the result of :meth:`carried_out` for each of the `steps` steps."""
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
        """Number of occurrences of each exchange."""
        return Counter(self.rounds())

    @property
    def asynchronous(self) -> bool:
        """Return whether nodes never wait for each other."""
        return self.parts.job.node.mixer == "asynchronous"

    @property
    def bytes_per_step(self) -> float:
        """Number of bytes that node 0 sends in an average step."""
        layout = self.parts.layout
        sent = layout.sent_bytes
        raw = layout.raw_bytes
        graph = self.parts.graph
        waits = not self.asynchronous
        counts = self.counted.items()
        total = sum(
            k * bytes_per_exchange(graph, kind, t or 0, 0, sent, raw, waits)
            for (kind, t), k in counts
        )
        return total / self.steps


def exchanges(subject: Subject, n: int, period: float | None = None) -> Exchanges:
    """Return the exchanges of a job on n nodes.

    :param subject: the job
    :param n: number of nodes
    :param period: average period of an adaptive cadence; None: the period that its formula gives
    :raises GraphError: if the graph does not exist for n nodes
    """
    job = subject.job
    parts = make_parts(job, make_graph(job, n), subject.flat, total=STEPS)
    cadence = parts.cadence
    if cadence.measures:
        period = average_period(subject, n) if period is None else period
        parts = replace(parts, cadence=steady(cadence, period))
        return Exchanges(parts, max(STEPS, round(PERIODS * period)))
    if cadence.kinds == {ExchangeKind.GOSSIP}:
        return Exchanges(parts)
    longest = max(cadence.periods, default=job.cadence.options.get("period", 1))
    return Exchanges(parts, longest * -(-STEPS // longest))  # a multiple of the period


_PERIODS: dict[str, float] = {}


def average_period(subject: Subject, n: int) -> float:
    """Return the average number of steps between two global averages of an adaptive cadence.

    Local steps at learning rates r_k increase the consensus distance by S = Σ r_k² V, where V is
    the variance of the gradients, which is assumed to be constant. A cadence that measures the
    variance gets S. The period of ADPSGD then tends to p₀ r₀/r, where r₀ is the mean learning rate
    of its samples. A cadence that measures the loss gets a constant loss.
    """
    job = subject.job
    steps_per_epoch = subject.steps_per_epoch(n)
    total = min(LONGEST, job.run.epochs * steps_per_epoch) or STEPS
    key = repr(
        (job.algorithm, job.cadence, job.schedule, steps_per_epoch, total, n * subject.per_step)
    )
    if key not in _PERIODS:
        rate = schedule(job.schedule, steps_per_epoch, total, n * subject.per_step)
        cadence = make_parts(job, make_graph(job, n), subject.flat, total=total).cadence
        _PERIODS[key] = total / max(1, _averages(cadence, rate, total))
    return _PERIODS[key]


def _averages(cadence: Cadence, rate: Callable[[int], float], total: int) -> int:
    """Return the number of global averages in ``total`` steps at these learning rates."""
    state = cadence.init()
    spread = 0.0
    averages = 0
    for index in range(total):
        kind = cadence.kind(state, index)
        lr = rate(index)
        spread += lr * lr
        state = cadence.observe(state, Step(index, 0, kind, lr), STEADY | {"variance": spread})
        if kind is ExchangeKind.GLOBAL:
            averages = averages + 1
            spread = 0.0
    return averages


def steady(cadence: Cadence, period: float) -> Cadence:
    """Return a cadence of the same kinds with an average over all nodes every ``period`` steps.

    The distance between two averages is ``period`` on average.
    """
    others = next(iter(cadence.kinds - {ExchangeKind.GLOBAL}), ExchangeKind.LOCAL)

    def kind(index: int) -> ExchangeKind:
        return ExchangeKind.GLOBAL if int((index + 1) / period) > int(index / period) else others

    return fixed_schedule(kind, *cadence.kinds)


def memory(subject: Subject, job_exchanges: Exchanges) -> dict[str, int]:
    """Return the bytes of a node by purpose if it has its own host; see :func:`held`."""
    job = subject.job
    flat = subject.flat
    parts = job_exchanges.parts
    state = parts.method.init(torch.empty(1, flat.size, device="meta"))
    arrays = sum(array.numel() * array.element_size() for _, array in named_arrays(state))
    if parts.cadence.fragment_schedule.delay:
        arrays += 4 * flat.size  # fragments that were received but not applied yet
    on_cpu = job.node.devices.startswith("cpu")
    where = "survivors" if job.run.survive else "ranks" if on_cpu else "devices"
    mixer = mixer_class(job.node.mixer, where)
    devices = () if on_cpu else ("cuda",) * flat.slots
    layout = replace(parts.layout, devices=devices)
    averages = ExchangeKind.GLOBAL in parts.cadence.kinds
    messages = mixer.estimate_memory(parts.graph, layout, 0, averages=averages)
    return held(job, flat, subject.slots, arrays, messages)


def held(
    job: Job,
    flat: ParameterLayout,
    slots: int,
    state: int,
    messages: dict[str, int],
    survives: bool = True,
) -> dict[str, int]:
    """Return the bytes of a node by purpose, without activations, batches and libraries.

    :param job: the job
    :param flat: layout of the model's parameters
    :param slots: number of slots of a node
    :param state: bytes of the state of the algorithm
    :param messages: bytes of the mixer by purpose
    :param survives: whether the MPI of this run supports `run.survive`
    """
    model = 4 * flat.size
    copies = 2 if job.run.survive and survives else 0
    sizes = {"replicas": slots * model, "gradients": slots * model, "algorithm state": state}
    sizes |= {f"messages' {name}": count for name, count in messages.items() if count}
    sizes["snapshot for checkpoints"] = model + state
    return sizes | ({"copies for rank failures": copies * (model + state)} if copies else {})
