"""Traffic and memory estimates of a job, computed without running it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from mpigossip.algorithms.base import Step
from mpigossip.algorithms.cadence import Cadence, fixed_schedule, period_of
from mpigossip.config import Job, JobError
from mpigossip.config.readable import format_bytes
from mpigossip.data.base import JobData
from mpigossip.data.problems import Functions
from mpigossip.data.sources import SOURCES, SyntheticSource, source
from mpigossip.engine.vector import ParameterLayout, named_arrays
from mpigossip.mixing import mixer_class
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange, is_average
from mpigossip.store import StoreError
from mpigossip.training import assemble, shape
from mpigossip.training.parts import JobParts, make_graph, make_parts
from mpigossip.training.schedule import schedule

STEPS = 240
"""Smallest number of steps over which costs are averaged. It is a multiple of many periods of
graphs and cadences.
"""
STEADY = {"variance": 1.0, "loss": 1.0}
"""Measured values that are passed to an adaptive cadence if no formula predicts them."""
LONGEST = 200_000
"""Largest number of steps for which an adaptive cadence is simulated."""
PERIODS = 20
"""Smallest number of periods of an adaptive cadence over which costs are averaged."""
ON_HOST = ("messages' host", "snapshot for checkpoints", "copies for rank failures")
"""Purposes of memory that is host memory even if the slots of a node are GPUs."""


@dataclass(frozen=True)
class ModuleSizes:
    """Sizes of a model that only DistributedDataParallel and per-tensor averages need."""

    tensors: tuple[int, ...] = ()
    """Bytes of each trained parameter in the order of ``module.parameters()``; () if unknown."""
    buffers: int = 0
    """Bytes of the module's buffers, which DistributedDataParallel sends before each forward."""
    element_size: int = 4
    """Bytes of an element of a gradient."""


def module_sizes(module: torch.nn.Module, element_size: int = 4) -> ModuleSizes:
    """Return the sizes of a module.

    :param module: the module
    :param element_size: bytes of an element of a gradient
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    tensors = tuple(element_size * p.numel() for p in trained)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    return ModuleSizes(tensors, buffers, element_size)


@dataclass(frozen=True)
class Subject:
    """Values of a job that do not depend on the number of nodes."""

    job: Job
    flat: ParameterLayout
    slots: int
    samples: int
    """Number of training samples, of all nodes together if ``shared``, otherwise of each node; 0 if
    the data are not known.
    """
    shared: bool = True
    """True if the samples are divided among the nodes. In theory tasks, each node has its own."""
    module: ModuleSizes = ModuleSizes()

    @property
    def per_step(self) -> int:
        """Number of samples per node and step."""
        return self.slots * self.job.data.batch * self.job.algorithm.accumulate

    def steps_per_epoch(self, n: int) -> int:
        """Return the number of complete steps that n nodes can make with all samples once."""
        return self.samples // (n if self.shared else 1) // self.per_step


def subject(job: Job, element_size: int = 4) -> tuple[Subject, str]:
    """Return the :class:`Subject` of a job, and a note for the user.

    The note is "" unless data that are not on this host are replaced by synthetic data, or the
    number of ranks per node is assumed.

    :param job: the job
    :param element_size: bytes of an element of a gradient in DistributedDataParallel
    :raises JobError: if the model can't be built, or if :func:`data_or_stand_in` raises it
    :raises StoreError: if :func:`data_or_stand_in` raises it
    """
    data, note = data_or_stand_in(job)
    module = assemble.make_model(job, data, counted=True)
    slots = shape.slots(job)
    flat = assemble.lay_out(job, module, slots)
    notes = "; ".join(filter(None, (note, shape.assumed(job))))
    shared = not isinstance(getattr(data, "train", None), Functions)
    sizes = module_sizes(module, element_size)
    return Subject(job, flat, slots, data.train_size, shared, sizes), notes


def sized_subject(job: Job, parameters: int, element_size: int = 4, buffers: int = 0) -> Subject:
    """Return the subject of a model of which only the size is known.

    :param job: the job; its model and its data are ignored
    :param parameters: number of trained parameters
    :param element_size: bytes of an element of a gradient
    :param buffers: bytes of the module's buffers
    """
    with torch.device("meta"):
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(parameters))])
    slots = shape.slots(job)
    flat = assemble.lay_out(job, module, slots)
    return Subject(job, flat, slots, 0, module=ModuleSizes((), buffers, element_size))


def data_or_stand_in(job: Job) -> tuple[JobData, str]:
    """Return the data of the job, or synthetic data if they are not on this host.

    Synthetic data have the sizes that section `[data]` states. They also replace custom data that
    can't be made on this host. The second value is a note that describes them, or "".

    :param job: the job
    :raises JobError: if data of a built-in source, or a file that exists, are invalid
    :raises StoreError: if such data can't be read
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
        if job.model.name == "gpt" or job.task.name == "language-model":
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
    """Number of steps over which these exchanges are averaged."""
    module: ModuleSizes = ModuleSizes()

    def carried_out(self, kind: ExchangeKind, t: int | None) -> tuple[ExchangeKind, int | None]:
        """Return the kind of an exchange as it is executed, and its round in the graph's period.

        A GOSSIP round whose result is the exact average is executed as a GLOBAL exchange, unless
        nodes are asynchronous. The round is None unless the kind is GOSSIP.

        :param kind: kind of the exchange in the cadence
        :param t: round of the graph; None or any number unless the kind is GOSSIP
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
        """Number of times that each exchange occurs in the `steps` steps."""
        return Counter(self.rounds())

    @property
    def asynchronous(self) -> bool:
        """True if nodes never wait for each other."""
        return self.parts.job.node.mixer == "asynchronous"

    @property
    def bytes_per_step(self) -> float:
        """Number of bytes that node 0 sends per step, on average."""
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
        return total / self.steps + self.state_bytes_per_step

    @property
    def state_bytes_per_step(self) -> float:
        """Part of :attr:`bytes_per_step` that `algorithm.average_state` sends."""
        averages = self.parts.make_averages()
        if averages is None:
            return 0.0
        graph = self.parts.graph
        nbytes = self.parts.state_layout.sent_bytes
        rounds = range(min(graph.period or STEPS, STEPS))
        sent = [bytes_per_exchange(graph, averages.kind, t, 0, nbytes) for t in rounds]
        return sum(sent) / len(sent) * sum(1 / period for period in averages.periods.values())


def exchanges(subject: Subject, n: int, period: float | None = None) -> Exchanges:
    """Return the :class:`Exchanges` of a job on n nodes, from which its traffic is computed.

    :param subject: the job
    :param n: number of nodes
    :param period: average period of an adaptive cadence; None: the result of :func:`average_period`
    :raises GraphError: if the graph does not exist for n nodes
    :raises JobError: if the fragments that the job names don't divide the model
    """
    job = subject.job
    parts = make_parts(job, make_graph(job, n), subject.flat, total=STEPS)
    cadence = parts.cadence
    if cadence.is_adaptive:
        period = average_period(subject, n) if period is None else period
        parts = replace(parts, cadence=steady(cadence, period))
        return Exchanges(parts, max(STEPS, round(PERIODS * period)), subject.module)
    if cadence.kinds == {ExchangeKind.GOSSIP}:
        return Exchanges(parts, module=subject.module)
    longest = period_of(job.cadence.options)
    steps = longest * -(-STEPS // longest)  # a multiple of the period
    return Exchanges(parts, steps, subject.module)


_PERIODS: dict[str, float] = {}
"""Results of :func:`average_period`, because each takes a simulation of the cadence."""


def average_period(subject: Subject, n: int) -> float:
    """Return the average number of steps between two rare exchanges of an adaptive cadence.

    The rare exchanges are its global averages, or its rounds along the graph if it has none.

    The cadence is simulated with values in place of its measurements. A cadence that measures the
    variance between nodes gets S = Σ r_k² V, the variance that arises in local steps at learning
    rates r_k if the variance V of the gradients is constant. The period of ADPSGD then tends to p₀
    r₀/r, where p₀ is its first period, r₀ the mean learning rate of its samples, and r the learning
    rate. A cadence that measures the loss gets a constant loss. All get the learning rates of the
    job.

    :param subject: the job and its sizes
    :param n: number of nodes
    :return: number of steps; if the simulation has no rare exchange, its length
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
    """Return the number of rare exchanges in ``total`` steps at learning rates ``rate(step)``."""
    rare = _rare_kind(cadence)
    state = cadence.init()
    spread = 0.0
    averages = 0
    for index in range(total):
        kind = cadence.kind(state, index)
        lr = rate(index)
        spread += lr * lr
        state = cadence.observe(state, Step(index, 0, kind, lr), STEADY | {"variance": spread})
        if kind is rare:
            averages = averages + 1
            spread = 0.0
    return averages


def steady(cadence: Cadence, period: float) -> Cadence:
    """Return a cadence with the same kinds of exchange and a constant period of the rare ones.

    :param cadence: adaptive cadence
    :param period: mean number of steps between two rare exchanges, which need not be an integer
    """
    rare = _rare_kind(cadence)
    others = next(iter(cadence.kinds - {rare}), ExchangeKind.LOCAL)

    def kind(index: int) -> ExchangeKind:
        return rare if int((index + 1) / period) > int(index / period) else others

    return fixed_schedule(kind, *cadence.kinds)


def _rare_kind(cadence: Cadence) -> ExchangeKind:
    """Return GLOBAL if an adaptive cadence can average over all nodes, otherwise GOSSIP."""
    averages = ExchangeKind.GLOBAL in cadence.kinds
    return ExchangeKind.GLOBAL if averages else ExchangeKind.GOSSIP


def memory(subject: Subject, job_exchanges: Exchanges) -> dict[str, int]:
    """Return the bytes of memory that a node needs if it is alone on its host, by purpose.

    Activations, batches and libraries are not included.

    :param subject: the job and its sizes
    :param job_exchanges: exchanges of the job on n nodes
    """
    job = subject.job
    flat = subject.flat
    parts = job_exchanges.parts
    state = parts.method.init(torch.empty(1, flat.size, device="meta"))
    arrays = sum(array.numel() * array.element_size() for _, array in named_arrays(state))
    if parts.cadence.fragment_schedule.delay:
        arrays += 4 * flat.size  # fragments received but not yet applied
    on_cpu = job.node.devices.startswith("cpu")
    where = "survivors" if job.run.survive else "ranks" if on_cpu else "devices"
    mixer = mixer_class(job.node.mixer, where)
    devices = () if on_cpu else ("cuda",) * flat.slots
    layout = replace(parts.layout, devices=devices)
    averages = ExchangeKind.GLOBAL in parts.cadence.kinds
    messages = mixer.estimate_memory(parts.graph, layout, 0, averages=averages)
    if state_averages := parts.make_averages():
        layout = replace(parts.state_layout, devices=devices)
        averages = state_averages.kind is ExchangeKind.GLOBAL
        more = mixer.estimate_memory(parts.graph, layout, 0, averages=averages)
        messages = add_memory(messages, [more] * len(state_averages.periods))
    return held(job, flat, subject.slots, arrays, messages)


def add_memory(messages: dict[str, int], others: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the sum of the bytes of several mixers, by purpose.

    :param messages: bytes of one mixer by purpose, as `Mixer.estimate_memory` returns them
    :param others: the same for each of the other mixers
    """
    total = Counter(messages)
    for other in others:
        total.update(other)
    return dict(total)


def held(
    job: Job,
    flat: ParameterLayout,
    slots: int,
    state: int,
    messages: dict[str, int],
    survives: bool = True,
) -> dict[str, int]:
    """Return the bytes of memory that a node needs, by purpose.

    Activations, batches and libraries are not included.

    :param job: the job
    :param flat: layout of the model's parameters
    :param slots: number of slots of a node
    :param state: bytes of the state of the algorithm
    :param messages: bytes of the mixer's memory by purpose
    :param survives: whether the MPI of this run supports `run.survive`
    """
    model = 4 * flat.size
    copies = 2 if job.run.survive and survives else 0
    sizes = {"replicas": slots * model, "gradients": slots * model, "algorithm state": state}
    sizes |= {f"messages' {name}": count for name, count in messages.items() if count}
    sizes["snapshot for checkpoints"] = model + state
    return sizes | ({"copies for rank failures": copies * (model + state)} if copies else {})


def describe_memory(parts: dict[str, int], devices: Sequence[str]) -> str:
    """Return a text on the bytes of a node; for GPUs, also on the bytes per GPU and on the host.

    Each slot has a replica and gradients. All other arrays on GPUs are divided among the slots.

    :param parts: bytes of a node by purpose, as :func:`held` returns them
    :param devices: devices of all slots of the node
    """
    total = sum(parts.values())
    text = f"{format_bytes(total)} per node"
    if devices[0].startswith("cpu"):
        return text
    on_host = sum(parts.get(purpose, 0) for purpose in ON_HOST)
    per_device = (total - on_host) / len(devices)
    return f"{text} ({format_bytes(per_device)} per GPU, {format_bytes(on_host)} on the host)"
