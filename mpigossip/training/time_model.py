"""Time of a step of n nodes on a machine: messages, sums, overlap, waiting; the virtual clock."""

import math
from collections import deque
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
from mpigossip.training.costs import Exchanges
from mpigossip.training.machines import Machine, named

BACKWARD = 2 / 3
"""Share of computing that is backward: two of three products of matrices a layer."""
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20
"""Bytes of gradients that torch's DistributedDataParallel sends at once, as it comes."""
BURN_IN = 24
SHOWN = 96
"""Rounds until waiting has spread over a graph, and rounds over which it is then averaged."""
DRAWN = 512
"""Nodes, over all repetitions, whose steps are drawn for that."""
DRAWS = 5
"""Keeps what the virtual clock draws apart from what else the run's seed gives."""


def hops(n: int) -> int:
    """Latencies one after the other in a global average over n nodes."""
    return 2 * (n - 1).bit_length()


def last_bucket(nbytes: int) -> float:
    """Share of the gradients' bytes that DistributedDataParallel sends when backward is over.

    The first bucket holds 1 MiB, the others 25 MiB; the last one what is left for it.
    """
    if nbytes <= FIRST_BUCKET:
        return 1.0
    rest = nbytes - FIRST_BUCKET
    return (rest - BUCKET * ((rest - 1) // BUCKET)) / nbytes


class Edges(NamedTuple):
    """Messages of a round, by receiver: a node waits for itself first, then its in-neighbours."""

    senders: np.ndarray
    """(edges,), those of a node side by side"""
    starts: np.ndarray
    """(n,): where a node's begin"""
    sent: np.ndarray
    """(n,): messages that each node sends"""
    received: np.ndarray

    @property
    def receivers(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.starts)), self.received + 1)


@lru_cache(maxsize=512)
def edges_of(graph: Graph, t: int) -> Edges:
    """Those of round t."""
    r = graph.round(t)
    n = graph.n
    senders = [[i, *r.neighbours(i)[0]] for i in range(n)]
    received = np.array([len(each) - 1 for each in senders])
    flat = np.concatenate(senders)
    starts = np.cumsum(received + 1) - received - 1
    return Edges(flat, starts, np.bincount(flat, minlength=n) - 1, received)


class Timing:
    """Seconds of a job's exchanges on a machine.

    A method of global averages at every step is timed as torch's DistributedDataParallel carries
    it out: each bucket of gradients leaves during backward; without ``ddp`` as this package does,
    behind it. ``bandwidth`` (n,): of each node's link, where they differ.
    """

    def __init__(
        self,
        made: Exchanges,
        machine: Machine,
        bandwidth: np.ndarray | None = None,
        ddp: bool = True,
    ):
        self.made = made
        self.parts = made.parts
        self.machine = machine
        layout = self.parts.layout
        method = self.parts.method
        self._bandwidth = bandwidth
        self.delay = self.parts.cadence.fragment_schedule.delay
        self.last = last_bucket(layout.nbytes) if ddp and method.always_global else 1.0
        """share of an exchange that begins when backward is over"""
        lossy = 0.0 if layout.wire.exact else layout.nbytes
        self.encode_s = lossy / machine.encode_rate if machine.encode_rate else 0.0
        decode_s = lossy / machine.decode_rate if machine.decode_rate else 0.0
        self.term_s = decode_s + layout.nbytes / machine.combine_rate
        """to decode a message and add it"""

    def message_s(self, kind: ExchangeKind, t: int | None):
        """Seconds until a message is received, and of the sums after it.

        A number each for LOCAL and GLOBAL, for GOSSIP arrays over the edges of round t: a message
        takes as long as all those that its sender sends, or its receiver receives. A node's edge to
        itself takes as long as its slowest message, as its step ends when that has left.
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
            slowest = 1.0 if self._bandwidth is None else self._bandwidth.min() / m.bandwidth
            wire = hops(n) * m.global_latency_s + moved / (slowest * m.global_bandwidth)
            return self.encode_s + wire, self.term_s
        edges = edges_of(self.parts.graph, t)
        to = edges.receivers
        many = np.maximum(edges.sent[edges.senders], edges.received[to])
        link = np.full(n, m.bandwidth) if self._bandwidth is None else self._bandwidth
        slower = np.minimum(link[edges.senders], link[to])
        wire = self.encode_s + m.latency_s + many * layout.sent_bytes / slower
        wire[edges.starts] = 0.0
        own = np.full(n, self.encode_s)  # a node without neighbours encodes, too
        np.maximum.at(own, edges.senders, wire)
        wire[edges.starts] = own
        return wire, edges.received[to] * self.term_s

    def hidden(self, wire, sums):
        """Seconds of an exchange of these `parts` that pass while gradients are computed.

        Ahead: of the message, during all of it. DDP: of all but the last bucket, during backward.
        With a delay: during the steps until it is applied.
        """
        compute = self.machine.compute_s
        whole = wire + sums
        if self.parts.method.ahead:
            return np.minimum(wire, compute)
        if self.delay:
            return np.minimum(whole, self.delay * self.steady_s)
        return np.minimum((1 - self.last) * whole, BACKWARD * compute)

    def exchange_s(self, kind: ExchangeKind, t: int | None) -> tuple[float, float]:
        """Seconds of an exchange for which nobody waits, and those of them that are hidden."""
        wire, sums = self.message_s(kind, t)
        return float(np.max(wire + sums)), float(np.max(self.hidden(wire, sums)))

    @property
    def steady_s(self) -> float:
        """Seconds of a step without exchange and jitter."""
        return self.machine.compute_s + self.machine.node_s + self.machine.update_s

    def step_s(self) -> float:
        """Seconds of an average step, waiting included."""
        exchange, hidden = self.mean_s()
        return self.steady_s + exchange - hidden + self.waiting_s()

    def mean_s(self) -> tuple[float, float]:
        """Seconds of an average step's exchange, and those of them that are hidden."""
        each = [(self.exchange_s(*key), count) for key, count in self.made.counted.items()]
        exchange, hidden = (sum(s[k] * count for s, count in each) for k in (0, 1))
        return exchange / self.made.steps, hidden / self.made.steps

    def waiting_s(self) -> float:
        """Seconds of an average step in which a node waits because others computed longer.

        Steps of normal duration, independent of each other. Where all wait for all, after h steps
        of their own each: √h σ E[max of n], a formula. With neighbours waits spread from step to
        step over the graph, and how fast such a system goes has no formula: drawn, from a seed.
        """
        sigma = self.machine.jitter * self.machine.compute_s
        n = self.parts.graph.n
        if not sigma or n == 1:
            return 0.0
        schedule = self.parts.cadence.fragment_schedule
        if {kind for kind, _ in self.made.counted} <= {
            ExchangeKind.LOCAL,
            ExchangeKind.GLOBAL,
        } and not self.delay:
            kinds = enumerate(self.made.rounds(), 1)
            ends = [step for step, (kind, _) in kinds if kind is ExchangeKind.GLOBAL]
            gaps = sum(map(math.sqrt, np.diff(ends, prepend=0)))
            return sigma * expected_maximum(n) * gaps / self.made.steps
        rows = max(1, DRAWN // n)
        random = np.random.default_rng(0)
        waited = []
        clock = Clock(self, rows)
        burn_in, shown = (schedule.period * -(-k // schedule.fragments) for k in (BURN_IN, SHOWN))
        for kind, t in replace(self.made, steps=burn_in + shown).rounds():
            noise = 1 + self.machine.jitter * random.standard_normal((rows, n))
            begin = clock.now
            end = clock.step(kind, t, self.machine.compute_s * np.maximum(noise, 0.0))
            exchange, hidden = self.exchange_s(kind, t)
            waited.append((end - begin).mean() - (self.steady_s + exchange - hidden))
        return max(0.0, float(np.mean(waited[burn_in:])))


class Clock:
    """When each node is through with its steps: every exchange waits for those that it needs.

    ``now`` (rows, n): seconds since the beginning, in as many repetitions as there are rows. With
    `cadence.delay` an exchange is waited for in the step that applies it, not in that which sends.
    """

    def __init__(self, timing: Timing, rows: int = 1):
        self._timing = timing
        self._n = timing.parts.graph.n
        self.now = np.zeros((rows, self._n))
        self._sent = deque([self.now] * timing.delay)

    def step(self, kind: ExchangeKind, t: int | None, compute: np.ndarray) -> np.ndarray:
        """Let a step pass whose computing takes ``compute`` (rows, n) seconds; `now` behind it."""
        machine = self._timing.machine
        begin = self.now
        rest = machine.node_s + machine.update_s
        ready = begin + compute + rest
        kind, t = self._timing.made.carried_out(kind, t)
        if self._timing.delay:
            self.now = np.maximum(ready, self._sent.popleft())
            self._sent.append(self._exchanged(kind, t, self.now, self.now))
        else:
            self.now = self._exchanged(kind, t, begin + rest, ready)
        return self.now

    def _exchanged(self, kind: ExchangeKind, t, begin: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """Return when each node has the result of an exchange, sent when all are `ready`."""
        timing = self._timing
        made = self._timing.made
        wire, sums = timing.message_s(kind, t)
        if kind is ExchangeKind.LOCAL or made.asynchronous:
            return ready + np.max(wire + sums)
        shown = wire + sums - (0.0 if timing.delay else timing.hidden(wire, sums))
        if kind is ExchangeKind.GLOBAL:
            return np.repeat(ready.max(1, keepdims=True) + shown, self._n, axis=1)
        edges = edges_of(timing.parts.graph, t)
        if timing.parts.method.ahead:
            came = np.maximum.reduceat(begin[:, edges.senders] + wire, edges.starts, axis=1)
            return np.maximum(ready, came) + edges.received * timing.term_s
        return np.maximum.reduceat(ready[:, edges.senders] + shown, edges.starts, axis=1)


@lru_cache(maxsize=256)
def expected_maximum(n: int) -> float:
    """Mean of the largest of n standard normal numbers: ∫ z n φ(z) Φ(z)ⁿ⁻¹ dz."""
    z = np.linspace(-9.0, 9.0, 20_001)
    below = 0.5 * (1 + np.array([math.erf(v) for v in z / math.sqrt(2)]))
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(np.sum(z * n * density * below ** (n - 1)) * (z[1] - z[0]))


class VirtualClock:
    """Seconds since the beginning that each node would have needed, by the job's `[clock]`.

    A function of the job, the number of nodes and what each step exchanged; it changes nothing.
    """

    def __init__(self, job: Job, assembly: Assembly, begun: np.ndarray | None = None):
        """``begun`` (n,): when each node was through with the steps before, NaN: not known."""
        section = job.clock
        engine = assembly.engine
        parts = assembly.parts
        self._machine = named(section)
        self._fragments = parts.cadence.fragment_schedule.fragments
        # of all slots of a node, also those in other ranks
        widths = parts.layout.widths[:1] * assembly.trainer.replicas.flat.slots
        node = replace(parts, layout=replace(parts.layout, widths=widths))
        self._clock = Clock(Timing(Exchanges(node), self._machine))
        if begun is not None:
            self._clock.now[0] = begun
        self._round = engine.round
        self._seed = job.run.seed
        self._engine = engine
        # the stragglers of a simulated asynchronous run are its own
        ill = job.faults
        own = job.faults.slow_times > 1
        slow = ill if own else section
        self._slow = Faults(
            parts.graph.n, job.run.seed, slow.slow_times, slow.slow_nodes, slow.slow_steps
        )

    def step(self, index: int, kind: ExchangeKind) -> np.ndarray:
        """(n,): seconds at the end of step ``index``."""
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
    """Standard normal numbers from the key alone, the same with every numpy (Box and Muller)."""
    u = (random_words(key, 2 * count).astype(np.float64) + 0.5) / 2.0**64
    return np.sqrt(-2 * np.log(u[:count])) * np.cos(2 * np.pi * u[count:])
