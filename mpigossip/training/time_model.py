"""Model of the time that a training step takes on a given machine, and the virtual clock.

A step consists of computation, messages, weighted sums and waiting for other nodes, some of which
overlap.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpigossip.config import Job
from mpigossip.graphs import Graph
from mpigossip.graphs.base import random_words
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange
from mpigossip.mixing.delayed import Faults
from mpigossip.training.assemble import Assembly
from mpigossip.training.costs import STEPS, Exchanges
from mpigossip.training.machines import Machine, named

BACKWARD = 2 / 3
"""Fraction of the computation in the backward pass, which has two of three matrix products."""
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
"""Default sizes, in bytes, of the first bucket (FIRST_BUCKET) and of all further buckets (BUCKET)
of gradients that torch's DistributedDataParallel sends at once.
"""
BURN_IN = 24
MEASURED = 96
"""Number of simulated rounds before waiting is measured, and number of rounds for which it is then
measured. The first rounds are left out because delays spread over the graph gradually.
"""
DRAWN = 512
"""Approximate number of nodes, of all repetitions together, for which durations are drawn."""
DRAWS = 5
"""Number in the key of the virtual clock's random numbers, so that they are independent of other
random numbers of the run.
"""


def hops(n: int) -> int:
    """Return the number of messages, one after another, in a global average over n nodes."""
    return 2 * (n - 1).bit_length()


def ddp_buckets(tensors: Sequence[int]) -> list[int]:
    """Return the sizes of the buckets in which DistributedDataParallel of torch sends gradients.

    Gradients fill the buckets in the order of backward, the last parameter first. A bucket is
    complete as soon as it has reached its limit of 1 MiB (the first) or 25 MiB (the others).
    Tensors are never split, so a large one makes a larger bucket. The last bucket is sent after
    backward.

    :param tensors: bytes of each trained parameter, in the order of ``module.parameters()``
    """
    buckets = []
    size = 0
    limit = FIRST_BUCKET
    for tensor in reversed(tensors):
        size += tensor
        if size >= limit:
            buckets.append(size)
            size = 0
            limit = BUCKET
    return buckets + [size] if size else buckets


def even_buckets(nbytes: int) -> list[int]:
    """Return the buckets of :func:`ddp_buckets` for a model of many small tensors.

    :param nbytes: bytes of all trained parameters
    """
    rest = nbytes - FIRST_BUCKET
    if rest <= 0:
        return [nbytes]
    full = (rest - 1) // BUCKET
    return [FIRST_BUCKET, *[BUCKET] * full, rest - BUCKET * full]


class Edges(NamedTuple):
    """Messages of a round, sorted by receiver.

    The first edge of a node is an edge to itself; the others come from its in-neighbours.
    """

    senders: np.ndarray
    """Sender of each edge, (edges,); the edges of a receiver are adjacent."""
    starts: np.ndarray
    """Index of the first edge of each node, (n,)."""
    sent: np.ndarray
    """Number of messages that each node sends, (n,)."""
    received: np.ndarray
    """Number of messages that each node receives, (n,)."""

    @property
    def receivers(self) -> np.ndarray:
        """Receiver of each edge, (edges,)."""
        return np.repeat(np.arange(len(self.starts)), self.received + 1)


@lru_cache(maxsize=512)
def edges_of(graph: Graph, t: int) -> Edges:
    """Return the edges of round t of a graph; results are cached."""
    r = graph.round(t)
    n = graph.n
    senders = [[i, *r.neighbours(i)[0]] for i in range(n)]
    received = np.array([len(row) - 1 for row in senders])
    flat = np.concatenate(senders)
    starts = np.cumsum(received + 1) - received - 1
    return Edges(flat, starts, np.bincount(flat, minlength=n) - 1, received)


class Timing:
    """Durations of the exchanges of a job on a machine."""

    def __init__(
        self,
        exchanges: Exchanges,
        machine: Machine,
        bandwidth: np.ndarray | None = None,
        ddp: bool = True,
        per_tensor: bool = False,
    ):
        """Prepare the durations.

        :param exchanges: exchanges of the job
        :param machine: durations and rates of a node
        :param bandwidth: bytes/s of the link of each node, (n,); None: equal for all nodes
        :param ddp: time a method that averages over all nodes in each step like
            DistributedDataParallel of torch, which sends each bucket of gradients during backward;
            if false, like this package, which sends after backward
        :param per_tensor: count one global average per parameter tensor, as in programs that
            average a model tensor by tensor; if false, one per exchange, like this package
        """
        self.exchanges = exchanges
        self.parts = exchanges.parts
        self.machine = machine
        layout = self.parts.layout
        method = self.parts.method
        self._bandwidth = bandwidth
        self.delay = self.parts.cadence.fragment_schedule.delay
        module = exchanges.module
        as_ddp = ddp and method.always_global
        buckets = [layout.nbytes]
        if as_ddp:
            buckets = ddp_buckets(module.tensors) or even_buckets(layout.nbytes)
        self.last = buckets[-1] / sum(buckets)
        """Fraction of an exchange that begins after backward."""
        self.collectives = 1
        if as_ddp and module.tensors:
            self.collectives = len(buckets)
        elif per_tensor:
            self.collectives = max(1, len(module.tensors))
        """Number of consecutive global averages into which an exchange is divided."""
        self.backward_s = BACKWARD * machine.compute_s
        """Seconds of the backward pass that DistributedDataParallel's messages overlap with."""
        if as_ddp:
            # With no_sync(), only the last of several backward passes sends gradients.
            self.backward_s /= self.parts.job.algorithm.accumulate
        self.element_size = module.element_size if as_ddp else 4
        self.broadcast_s = self._broadcast_s(module.buffers) if as_ddp else 0.0
        """Seconds before each forward pass in which DistributedDataParallel sends the buffers."""
        lossy = 0.0 if layout.wire.exact else layout.nbytes
        self.encode_s = lossy / machine.encode_rate if machine.encode_rate else 0.0
        decode_s = lossy / machine.decode_rate if machine.decode_rate else 0.0
        self.term_s = decode_s + layout.nbytes / machine.combine_rate
        """Seconds for decoding a message and adding it to the weighted sum."""

    def _broadcast_s(self, buffers: int) -> float:
        """Return the seconds of a broadcast of the module's buffers, whose size is in bytes.

        The buffers pass through all nodes in a chain, in pieces, and so cross each link once.
        """
        n = self.parts.graph.n
        if not buffers or n == 1:
            return 0.0
        latencies = (n - 1).bit_length()
        return latencies * self.machine.global_latency_s + buffers / self._global_bandwidth

    @property
    def _global_bandwidth(self) -> float:
        """Bytes/s of a global average, which the slowest link limits."""
        m = self.machine
        slowest = 1.0 if self._bandwidth is None else self._bandwidth.min() / m.bandwidth
        return slowest * m.global_bandwidth

    def message_s(self, kind: ExchangeKind, t: int | None):
        """Return the seconds until a message is received, and of the weighted sum afterwards.

        Both are numbers for LOCAL and GLOBAL, and arrays over the edges of round t for GOSSIP. A
        message takes as long as all messages that its sender sends, or as all messages that its
        receiver receives, whichever is longer. The edge of a node to itself takes as long as the
        slowest message that the node sends, because the step of the node ends when that message has
        been sent.

        :param kind: kind of the exchange, as it is executed
        :param t: round of the exchange; None unless it is gossip
        """
        m = self.machine
        layout = self.parts.layout
        n = self.parts.graph.n
        if kind is ExchangeKind.LOCAL:
            return 0.0, 0.0
        if kind is ExchangeKind.GLOBAL:
            moved = bytes_per_exchange(
                self.parts.graph, kind, 0, 0, layout.sent_bytes, layout.raw_bytes
            )
            sent_bytes = moved * self.element_size / 4
            latencies_s = self.collectives * hops(n) * m.global_latency_s
            wire = latencies_s + sent_bytes / self._global_bandwidth
            return self.broadcast_s + self.encode_s + wire, self.term_s
        edges = edges_of(self.parts.graph, t)
        receivers = edges.receivers
        message_counts = np.maximum(edges.sent[edges.senders], edges.received[receivers])
        link = np.full(n, m.bandwidth) if self._bandwidth is None else self._bandwidth
        slower = np.minimum(link[edges.senders], link[receivers])
        wire = self.encode_s + m.latency_s + message_counts * layout.sent_bytes / slower
        wire[edges.starts] = 0.0
        # A node without in-neighbours encodes its message, too.
        self_edges = np.full(n, self.encode_s)
        np.maximum.at(self_edges, edges.senders, wire)
        wire[edges.starts] = self_edges
        return wire, edges.received[receivers] * self.term_s

    def hidden(self, send_s, sum_s):
        """Return the seconds of an exchange that overlap with computation.

        If the method sends ahead, the message overlaps with the whole computation. With
        DistributedDataParallel, all but the last bucket overlap with the backward pass of the last
        part of a batch (`algorithm.accumulate`), and the broadcast of buffers does not overlap.
        With a delay, the exchange overlaps with the steps until it is applied.

        :param send_s: seconds of the messages, from :meth:`message_s`
        :param sum_s: seconds of the weighted sums, from :meth:`message_s`
        """
        compute = self.machine.compute_s
        total = send_s + sum_s
        if self.parts.method.ahead:
            return np.minimum(send_s, compute)
        if self.delay:
            return np.minimum(total, self.delay * self.steady_s)
        early = (1 - self.last) * (total - self.broadcast_s)
        return np.minimum(early, self.backward_s)

    def exchange_s(self, kind: ExchangeKind, t: int | None) -> tuple[float, float]:
        """Return the seconds of an exchange without waiting, and how many of them overlap.

        They overlap with computation, as :meth:`hidden` computes. For gossip, both are the largest
        values of all edges.

        :param kind: kind of the exchange, as it is executed
        :param t: round of the exchange; None unless it is gossip
        """
        wire, sums = self.message_s(kind, t)
        return float(np.max(wire + sums)), float(np.max(self.hidden(wire, sums)))

    @property
    def steady_s(self) -> float:
        """Seconds of a step without exchange and jitter."""
        return self.machine.compute_s + self.machine.node_s + self.machine.update_s

    def step_s(self) -> float:
        """Return the mean seconds of a step, including waiting for other nodes."""
        exchange, hidden = self.mean_s()
        return self.steady_s + exchange - hidden + self.waiting_s()

    def mean_s(self) -> tuple[float, float]:
        """Return the mean seconds of exchanges per step, and how many of them overlap.

        The averages of `algorithm.average_state` are included; they do not overlap.
        """
        costs = [(self.exchange_s(*key), count) for key, count in self.exchanges.counted.items()]
        exchange, hidden = (sum(s[k] * count for s, count in costs) for k in (0, 1))
        return exchange / self.exchanges.steps + self.state_s(), hidden / self.exchanges.steps

    def state_s(self) -> float:
        """Return the mean seconds per step of the averages of `algorithm.average_state`.

        They begin after the exchange of the model, and the step ends after them. The virtual clock
        does not count them.
        """
        averages = self.parts.make_averages()
        if averages is None:
            return 0.0
        parts = replace(self.parts, layout=self.parts.state_layout)
        exchanges = replace(self.exchanges, parts=parts)
        timing = Timing(exchanges, self.machine, self._bandwidth, ddp=False)
        rounds = range(min(parts.graph.period or STEPS, STEPS))
        kinds = [exchanges.carried_out(averages.kind, t) for t in rounds]
        seconds = [float(np.max(sum(timing.message_s(*kind)))) for kind in kinds]
        return sum(seconds) / len(seconds) * sum(1 / p for p in averages.periods.values())

    def waiting_s(self) -> float:
        """Return the mean seconds per step in which a node waits for slower nodes.

        Durations of steps are assumed to be independent normal numbers with standard deviation σ.
        If all nodes wait for each other after h steps of their own, each such wait takes √h σ E[max
        of n standard normal numbers]. If nodes wait for neighbours, delays spread over the graph
        from step to step. There is no formula for this case, so it is simulated with a fixed seed.
        """
        sigma = self.machine.jitter * self.machine.compute_s
        n = self.parts.graph.n
        if not sigma or n == 1:
            return 0.0
        schedule = self.parts.cadence.fragment_schedule
        if {kind for kind, _ in self.exchanges.counted} <= {
            ExchangeKind.LOCAL,
            ExchangeKind.GLOBAL,
        } and not self.delay:
            kinds = enumerate(self.exchanges.rounds(), 1)
            ends = [step for step, (kind, _) in kinds if kind is ExchangeKind.GLOBAL]
            gaps = sum(map(math.sqrt, np.diff(ends, prepend=0)))
            return sigma * expected_maximum(n) * gaps / self.exchanges.steps
        rows = max(1, DRAWN // n)
        random = np.random.default_rng(0)
        waited = []
        clock = Clock(self, rows)
        burn_in, measured = (
            schedule.period * -(-k // schedule.fragments) for k in (BURN_IN, MEASURED)
        )
        for kind, t in replace(self.exchanges, steps=burn_in + measured).rounds():
            noise = 1 + self.machine.jitter * random.standard_normal((rows, n))
            begin = clock.now
            end = clock.step(kind, t, self.machine.compute_s * np.maximum(noise, 0.0))
            exchange, hidden = self.exchange_s(kind, t)
            waited.append((end - begin).mean() - (self.steady_s + exchange - hidden))
        return max(0.0, float(np.mean(waited[burn_in:])))


class Clock:
    """Clock with the time at which each node ends its steps.

    Synchronous nodes wait for their messages; asynchronous nodes do not. ``now``, (rows, n), are
    the seconds since the start; each row is an independent repetition of the training. With
    `cadence.delay`, nodes wait for an exchange in the step that applies it.
    """

    def __init__(self, timing: Timing, rows: int = 1):
        self._timing = timing
        self._n = timing.parts.graph.n
        self.now = np.zeros((rows, self._n))
        self._sent = deque([self.now] * timing.delay)

    def step(self, kind: ExchangeKind, t: int | None, compute: np.ndarray) -> np.ndarray:
        """Advance the clock by one step; return `now` after it.

        :param kind: kind of the exchange
        :param t: round of the exchange; None unless it is gossip
        :param compute: seconds of the computation of each node, (rows, n)
        """
        machine = self._timing.machine
        begin = self.now
        fixed_s = machine.node_s + machine.update_s
        ready = begin + compute + fixed_s
        kind, t = self._timing.exchanges.carried_out(kind, t)
        if self._timing.delay:
            self.now = np.maximum(ready, self._sent.popleft())
            self._sent.append(self._exchanged(kind, t, self.now, self.now))
        else:
            self.now = self._exchanged(kind, t, begin + fixed_s, ready)
        return self.now

    def _exchanged(self, kind: ExchangeKind, t, begin: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """Return the time at which each node has the result of an exchange, in seconds, (rows, n).

        :param kind: kind of the exchange
        :param t: round of the exchange; None unless it is gossip
        :param begin: time at which each node starts to send, in seconds, (rows, n)
        :param ready: time at which each node has computed its gradient, in seconds, (rows, n)
        """
        timing = self._timing
        exchanges = self._timing.exchanges
        wire, sums = timing.message_s(kind, t)
        if kind is ExchangeKind.LOCAL or exchanges.asynchronous:
            return ready + np.max(wire + sums)
        visible = wire + sums - (0.0 if timing.delay else timing.hidden(wire, sums))
        if kind is ExchangeKind.GLOBAL:
            return np.repeat(ready.max(1, keepdims=True) + visible, self._n, axis=1)
        edges = edges_of(timing.parts.graph, t)
        if timing.parts.method.ahead:
            arrival = np.maximum.reduceat(begin[:, edges.senders] + wire, edges.starts, axis=1)
            return np.maximum(ready, arrival) + edges.received * timing.term_s
        return np.maximum.reduceat(ready[:, edges.senders] + visible, edges.starts, axis=1)


@lru_cache(maxsize=256)
def expected_maximum(n: int) -> float:
    """Return the mean of the maximum of n standard normal numbers, ∫ z n φ(z) Φ(z)ⁿ⁻¹ dz."""
    z = np.linspace(-9.0, 9.0, 20_001)
    below = 0.5 * (1 + np.array([math.erf(v) for v in z / math.sqrt(2)]))
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(np.sum(z * n * density * below ** (n - 1)) * (z[1] - z[0]))


class VirtualClock:
    """Clock of the seconds that a training would have taken on the machine that `[clock]` names.

    The time depends on the job, that machine, the number of nodes and the exchanges only. The clock
    does not affect the training.
    """

    def __init__(self, job: Job, assembly: Assembly, begun: np.ndarray | None = None):
        """Prepare the clock.

        :param job: the job
        :param assembly: the parts of the job
        :param begun: time in seconds at which each node had ended the steps before a resume, (n,),
            NaN if it is not known; None: 0 for all nodes
        :raises JobError: if `[clock]` names no valid machine
        """
        section = job.clock
        engine = assembly.engine
        parts = assembly.parts
        self._machine = named(section)
        self._fragments = parts.cadence.fragment_schedule.fragments
        # Count all slots of a node, including slots of other ranks.
        widths = parts.layout.widths[:1] * assembly.trainer.replicas.flat.slots
        node = replace(parts, layout=replace(parts.layout, widths=widths))
        self._clock = Clock(Timing(Exchanges(node), self._machine))
        if begun is not None:
            self._clock.now[0] = begun
        self._round = engine.round
        self._seed = job.run.seed
        self._engine = engine
        # In simulated asynchronous runs, [faults] makes nodes slow.
        faults = job.faults
        has_own = job.faults.slow_times > 1
        slow = faults if has_own else section
        self._slow = Faults(
            parts.graph.n, job.run.seed, slow.slow_times, slow.slow_nodes, slow.slow_steps
        )

    def step(self, index: int, kind: ExchangeKind) -> np.ndarray:
        """Advance the clock by one step; return the time of each node at its end, in s, (n,).

        :param index: number of the step; steps must follow each other in order
        :param kind: kind of the exchange in this step
        """
        machine = self._machine
        n = len(self._clock.now[0])
        pace = 1 + machine.jitter * normal((self._seed, DRAWS, index), n)
        pace = np.maximum(pace, 0.0) * self._slow.costs(index)
        begun = index - self._engine.state_start
        pace[list(self._engine.cadence.idle_nodes(begun, range(n)))] = 0.0
        self._clock.step(kind, self._round // self._fragments, machine.compute_s * pace[None])
        self._round += kind is ExchangeKind.GOSSIP
        return self._clock.now[0]


def normal(key: tuple[int, ...], count: int) -> np.ndarray:
    """Return ``count`` standard normal numbers that depend on the key alone.

    They are computed by the method of Box and Muller, because the generators of NumPy may change
    with its version.

    :param key: whole numbers, such as a seed and a step
    :param count: number of random numbers
    """
    u = (random_words(key, 2 * count).astype(np.float64) + 0.5) / 2.0**64
    return np.sqrt(-2 * np.log(u[:count])) * np.cos(2 * np.pi * u[count:])
