"""What a step of n nodes takes on a machine: messages, sums, what is hidden, who waits for whom."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpigossip.config import Job
from mpigossip.graphs import Graph
from mpigossip.graphs.rounds import Circulant, Xor
from mpigossip.mixing.base import Kind, is_average
from mpigossip.training.costs import Exchanges
from mpigossip.training.timing.machines import Machine

BACKWARD = 2 / 3
"""Share of computing that is backward: two of three products of matrices a layer."""
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes of gradients that torch's DistributedDataParallel sends at once, as it comes."""
BURN_IN, SHOWN = 24, 96
"""Rounds until waiting has spread over a graph, and rounds over which it is then averaged."""
DRAWN = 512
"""Nodes, over all repetitions, whose steps are drawn for that."""


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
    """Who waits for whom in a round: each node for itself first, then for its in-neighbours."""

    senders: np.ndarray
    """(edges,), those of a node side by side"""
    starts: np.ndarray
    """(n,): where a node's begin"""
    sent: np.ndarray
    """(n,): messages that each node sends"""
    received: np.ndarray

    @property
    def receivers(self) -> np.ndarray:
        """(edges,): who waits."""
        return np.repeat(np.arange(len(self.starts)), self.received + 1)


@lru_cache(maxsize=512)
def edges_of(graph: Graph, t: int) -> Edges:
    """Those of round t."""
    r, n = graph.round(t), graph.n
    nodes = np.arange(n)
    if isinstance(r, Xor):
        r = r.sparse()
    if isinstance(r, Circulant):
        senders = (nodes[:, None] + np.array([0, *r.offsets], np.int64)) % n
        degree = np.full(n, len(r.offsets))
        return Edges(senders.ravel(), nodes * (len(r.offsets) + 1), degree, degree)
    received = np.diff(r.indptr)
    senders = np.insert(r.indices, r.indptr[:-1], nodes)
    return Edges(senders, r.indptr[:-1] + nodes, np.bincount(r.indices, minlength=n), received)


class Timing:
    """Seconds of a job's exchanges on a machine.

    A method of global averages at every step is timed as torch's DistributedDataParallel carries
    it out: each bucket of gradients leaves during backward; without ``ddp`` as this package does,
    behind it. ``bandwidth`` (n,): of each node's link, where they differ.
    """

    def __init__(
        self,
        job: Job,
        made: Exchanges,
        machine: Machine,
        bandwidth: np.ndarray | None = None,
        ddp: bool = True,
    ):
        self.made, self.machine = made, machine
        layout, method = made.layout, made.method
        self._bandwidth, self.delay = bandwidth, made.cadence.turns.delay
        self._ddp = ddp and method.always_global
        self.last = last_bucket(layout.nbytes) if self._ddp else 1.0
        """share of an exchange that begins when backward is over"""
        lossy = 0.0 if layout.wire.exact else layout.nbytes
        self.encode_s = lossy / machine.encode_rate if machine.encode_rate else 0.0
        decode_s = lossy / machine.decode_rate if machine.decode_rate else 0.0
        self.term_s = decode_s + layout.nbytes / machine.combine_rate
        """to decode a message and add it"""

    def wire_s(self, kind: Kind, messages=1):
        """Seconds on the wire of a round, or of so many messages in or out of a node."""
        m, layout, n = self.machine, self.made.layout, self.made.graph.n
        if kind is Kind.LOCAL:
            return 0.0 * messages
        if kind is Kind.GLOBAL:
            slowest = 1.0 if self._bandwidth is None else self._bandwidth.min() / m.bandwidth
            moved = 2 * (n - 1) / n * layout.nbytes
            if not layout.wire.exact:  # a sum of codes has no code: decoded, or to all others
                moved = min(moved, (n - 1) * layout.sent_bytes)
            latency = hops(n) * m.global_latency_s
            return latency + moved / (slowest * m.global_bandwidth)
        latency = m.latency_s * (messages > 0)
        return latency + messages * layout.sent_bytes / m.bandwidth

    def exchange_s(self, kind: Kind, t: int | None) -> float:
        """Seconds of a round: messages and sums of its busiest node, nothing hidden."""
        if kind is Kind.LOCAL:
            return 0.0
        sent, received = self._busiest(kind, t)
        return self.encode_s + self.wire_s(kind, max(sent, received)) + received * self.term_s

    def hidden_s(self, kind: Kind, t: int | None) -> float:
        """Those of them that pass while gradients are computed, alike on all nodes.

        Ahead: during all of it. DDP: all but the last bucket during backward. With a delay: during
        the steps until it is applied.
        """
        whole = self.exchange_s(kind, t)
        if self.made.method.ahead and kind is not Kind.LOCAL:
            alone = self._busiest(kind, t)[1] * self.term_s
            return float(min(whole - alone, self.machine.compute_s))
        return float(self._hidden(whole))

    def _hidden(self, whole):
        compute = self.machine.compute_s
        if self.delay:
            return np.minimum(whole, self.delay * self.steady_s)
        return np.minimum((1 - self.last) * whole, BACKWARD * compute)

    def _busiest(self, kind: Kind, t: int | None) -> tuple[int, int]:
        return busiest(self.made.graph, t or 0) if kind is Kind.GOSSIP else (1, 1)

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
        exchange = hidden = 0.0
        for (kind, t), count in self.made.counted.items():
            exchange += count * self.exchange_s(kind, t)
            hidden += count * self.hidden_s(kind, t)
        return exchange / self.made.steps, hidden / self.made.steps

    def waiting_s(self) -> float:
        """Seconds of an average step in which a node waits because others computed longer.

        Steps of normal duration, independent of each other. Where all wait for all, after h steps
        of their own each: √h σ E[max of n], a formula. With neighbours waits spread from step to
        step over the graph, and how fast such a system goes has no formula: drawn, from a seed.
        """
        sigma, n = self.machine.jitter * self.machine.compute_s, self.made.graph.n
        if not sigma or n == 1:
            return 0.0
        turns = self.made.cadence.turns
        if {kind for kind, _ in self.made.counted} <= {Kind.LOCAL, Kind.GLOBAL} and not self.delay:
            gaps, since = 0.0, 0
            for kind, _ in self.made.rounds():
                since += 1
                if kind is Kind.GLOBAL:
                    gaps, since = gaps + math.sqrt(since), 0
            return sigma * expected_maximum(n) * gaps / self.made.steps
        clock, rows = Clock(self, max(1, DRAWN // n)), max(1, DRAWN // n)
        random = np.random.default_rng(0)
        burn_in, shown = (turns.period * -(-count // turns.fragments) for count in (BURN_IN, SHOWN))
        rounds = replace(self.made, steps=burn_in + shown).rounds()
        begin, calm = 0.0, 0.0
        for index, (kind, t) in enumerate(rounds):
            if index == burn_in:
                begin = clock.now.mean()
            noise = 1 + self.machine.jitter * random.standard_normal((rows, n))
            clock.step(kind, t, self.machine.compute_s * np.maximum(noise, 0.0))
            if index >= burn_in:
                calm += self.steady_s + self.exchange_s(kind, t) - self.hidden_s(kind, t)
        spent = clock.now.mean() - begin - calm
        return max(0.0, float(spent) / shown)


class Clock:
    """When each node is through with its steps: every exchange waits for those that it needs.

    ``now`` (rows, n): seconds since the beginning, in as many repetitions as there are rows. With
    `cadence.delay` an exchange is waited for in the step that applies it, not in that which sends.
    """

    def __init__(self, timing: Timing, rows: int = 1):
        self._timing, self._n = timing, timing.made.graph.n
        self.now = np.zeros((rows, self._n))
        self._sent: deque[np.ndarray | None] = deque([None] * timing.delay)

    def step(self, kind: Kind, t: int, compute: np.ndarray) -> np.ndarray:
        """Let a step pass whose computing takes ``compute`` (rows, n) seconds; `now` behind it."""
        timing, made, begin = self._timing, self._timing.made, self.now
        rest = timing.machine.node_s + timing.machine.update_s
        ready = begin + compute + rest
        if kind is Kind.GOSSIP and is_average(made.graph, t):
            kind = Kind.GLOBAL
        if timing.delay:
            arrived = self._sent.popleft()
            self.now = ready if arrived is None else np.maximum(ready, arrived)
            sends = kind is not Kind.LOCAL
            self._sent.append(self._exchanged(kind, t, self.now, self.now) if sends else None)
        elif kind is Kind.LOCAL:
            self.now = ready
        elif made.asynchronous:
            self.now = ready + timing.exchange_s(kind, t)
        else:
            self.now = self._exchanged(kind, t, begin + rest, ready)
        return self.now

    def _exchanged(self, kind: Kind, t: int, begin: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """When each node has the result of a synchronous exchange, sent when all are `ready`."""
        timing = self._timing
        if kind is Kind.GLOBAL:
            alone = timing.exchange_s(kind, t)
            alone -= 0.0 if timing.delay else timing.hidden_s(kind, t)
            return np.repeat(ready.max(1, keepdims=True) + alone, self._n, axis=1)
        period = timing.made.graph.period
        edges = edges_of(timing.made.graph, t % period if period else t)
        wire, sums = _on_edges(timing, edges)
        if timing.made.method.ahead:
            came = np.maximum.reduceat((begin[:, edges.senders] + wire), edges.starts, axis=1)
            return np.maximum(ready, came) + edges.received * timing.term_s
        whole = wire + sums
        hidden = 0.0 if timing.delay else timing._hidden(whole)
        return np.maximum.reduceat(ready[:, edges.senders] + whole - hidden, edges.starts, axis=1)


def _on_edges(timing: Timing, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each message on its way and of the sums of who gets it.

    To oneself as long as one's own message to the slowest takes: a step ends when it has left.
    """
    to, bandwidth = edges.receivers, timing._bandwidth
    many = np.maximum(edges.sent[edges.senders], edges.received[to])
    wire = timing.wire_s(Kind.GOSSIP, many)
    if bandwidth is not None:
        slow = np.minimum(bandwidth[edges.senders], bandwidth[to]) / timing.machine.bandwidth
        wire = (
            wire + many * timing.made.layout.sent_bytes * (1 / slow - 1) / timing.machine.bandwidth
        )
    wire[edges.starts] = 0.0
    own = np.zeros(len(edges.starts))
    np.maximum.at(own, edges.senders, wire)
    wire[edges.starts] = own  # a node goes on when its own message has left
    busy = (edges.sent + edges.received > 0)[to]
    return wire + busy * timing.encode_s, edges.received[to] * timing.term_s


def busiest(graph: Graph, t: int) -> tuple[int, int]:
    """Most messages that any node sends, and that any receives, in round t."""
    r = graph.round(t)
    indices = getattr(r, "indices", None)
    if indices is None:  # a circulant: all nodes alike
        return r.degree, r.degree
    return int(np.bincount(indices, minlength=1).max()), r.degree


@lru_cache(maxsize=256)
def expected_maximum(n: int) -> float:
    """Mean of the largest of n standard normal numbers: ∫ z n φ(z) Φ(z)ⁿ⁻¹ dz."""
    z = np.linspace(-9.0, 9.0, 20_001)
    below = 0.5 * (1 + np.array([math.erf(v) for v in z / math.sqrt(2)]))
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(np.sum(z * n * density * below ** (n - 1)) * (z[1] - z[0]))
