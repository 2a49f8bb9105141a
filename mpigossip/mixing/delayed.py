"""Simulation of asynchronous gossip of n nodes in this process, determined by a delay table.

Nodes average by the same rule as in :mod:`mpigossip.mixing.asynchronous`, but the delay table
instead of the speed of ranks determines which model a node receives. A *delay table* is a function
t -> int array (n, n). Its element [i, j] is the age, in rounds, of the model of node j that node i
receives in its round t; 0 means the same round, and −1 that it receives none. Slow nodes and
failing links are drawn from a seed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from mpigossip.graphs.base import random_words
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout, bytes_per_exchange
from mpigossip.mixing.simulated import Simulated

DelayTable = Callable[[int], np.ndarray]

OLDEST = 16
"""Largest age of a received model, in rounds. `Faults` replaces a larger age by this one; if
another delay table has a larger age, the node receives nothing."""


def table(ages: np.ndarray) -> DelayTable:
    """Return the delay table that repeats the rounds of an int array (rounds, n, n)."""
    return lambda t: ages[t % len(ages)]


@dataclass(frozen=True)
class Faults:
    """Schedule of slow nodes and failing links, determined by the seed and the round alone.

    Every ``steps`` rounds, ``slow`` of the ``n`` nodes are drawn, whose rounds take ``times`` times
    the normal duration until the next draw. In each round, a node receives nothing from another
    node with probability ``lost``. All nodes wait for each other every ``meet`` rounds, in which a
    run gathers its log, so that no node falls behind without limit.
    """

    n: int
    seed: int = 0
    times: float = 1.0
    slow: int = 1
    steps: int = 10
    lost: float = 0.0
    meet: int = 50

    def costs(self, t: int) -> np.ndarray:
        """Return the duration of round t on each node, in units of the normal duration: (n,)."""
        cost = np.ones(self.n)
        cost[_draw_order((self.seed, 1, t // self.steps), self.n)[: self.slow]] = self.times
        return cost

    def ages(self, t: int) -> np.ndarray:
        """Return the delay table at round t, an int array (n, n).

        Node i ends its round t at time T_i(t), the sum of its :meth:`costs` since all nodes last
        waited for each other. At this time, it receives the newest model of node j, from the
        last round s with T_j(s) ≤ T_i(t), so that its age is t − s, but at most `OLDEST`. If node j
        is ahead of node i, the age is 0. If the link fails, it is −1.
        """
        ages = np.zeros((self.n, self.n), np.int64)
        if self.times > 1:
            block, k = divmod(t, self.meet)
            ends = _end_times(self, block)[: k + 1]
            for i in range(self.n):
                ages[i] = np.minimum(k + 1 - (ends <= ends[k, i]).sum(axis=0), OLDEST)
        if self.lost:
            words = random_words((self.seed, 2, t), self.n * self.n).reshape(self.n, self.n)
            ages[words < self.lost * 2.0**64] = -1
        return ages


@lru_cache(maxsize=64)
def _draw_order(key: tuple[int, ...], n: int) -> np.ndarray:
    return np.argsort(random_words(key, n), kind="stable")


@lru_cache(maxsize=4)
def _end_times(faults: Faults, block: int) -> np.ndarray:
    """Return the times T_i(t) of :meth:`Faults.ages`, an array (meet, n) by round and node.

    They are computed for the ``meet`` rounds from one wait of all nodes for each other to the next.

    :param faults: schedule of slow nodes
    :param block: number of waits of all nodes for each other before these rounds
    """
    first = block * faults.meet
    return np.cumsum([faults.costs(t) for t in range(first, first + faults.meet)], axis=0)


def readers(graph, node: int) -> list[int]:
    """Return the nodes that receive from ``node`` in at least one round, in ascending order.

    For a graph without a period, these are all other nodes.
    """
    if graph.period is None:
        return [j for j in range(graph.n) if j != node]
    receivers = {int(j) for t in range(graph.period) for j in graph.receivers(t, node)}
    return sorted(receivers - {node})


def flow(weight: float, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the change of a model towards another: weight · (other − own), a new array."""
    return torch.sub(other, own).mul_(weight)


class Correction(NamedTuple):
    """Correction in flight: node ``target`` has to subtract it from its model.

    It is the change by which node ``source`` moved towards ``target`` in its round ``t``. ``parts``
    holds an array (1, p) for each vector of each slot.
    """

    t: int
    source: int
    target: int
    parts: list[torch.Tensor]


class Delayed(Simulated):
    """Asynchronous mixer of all n nodes; the delay table gives the age of each received model.

    A round preserves the sum over all nodes: the sum of ``mixed`` plus the corrections in flight
    (:meth:`pending`) after the round equals the sum of ``sent`` plus those in flight before it, up
    to rounding.
    """

    synchronous = False

    def __init__(self, graph, layout: MessageLayout, ages: DelayTable):
        super().__init__(graph, layout)
        self._ages = ages
        self._past: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=OLDEST + 1)
        self._in_flight: list[Correction] = []
        # Round in which node `target` applied the last correction of node `source`, by the key
        # (source, target).
        self._applied: dict[tuple[int, int], int] = {}

    @staticmethod
    def estimate_memory(graph, layout, node: int, near: Sequence = (), averages: bool = True):
        """Return the bytes of a node's messages by purpose, without a mixer.

        "copies" are the outboxes of past rounds, from which nodes receive old models; "inbox" are
        the corrections from the nodes that read this one. ``near`` and ``averages`` are not used.
        """
        return {
            "outbox": layout.nbytes,
            "result": layout.nbytes,
            "copies": (OLDEST + 1) * layout.nbytes,
            "inbox": len(readers(graph, node)) * layout.nbytes,
        }

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        self._open = (kind, t)
        if kind is ExchangeKind.GOSSIP:
            self._past.append((t, [part.clone() for part in _flat(self._out)]))

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        kind, t = self._open
        if kind is ExchangeKind.GLOBAL:
            for node in self.local_nodes:
                self.bytes_sent[node] += bytes_per_exchange(
                    self.graph, kind, t, node, self.layout.nbytes
                )
            self._apply_corrections(t - 1, np.zeros((self.n, self.n), np.int64), _flat(self._out))
        if kind is not ExchangeKind.GOSSIP:
            return super().finish()
        self._open = None
        ages = self._ages(t)
        past = dict(self._past)
        sent = _flat(self._out)
        mixed = _flat(self._mixed)
        for own, result in zip(sent, mixed, strict=True):
            result.copy_(own)
        for i in self.local_nodes:
            self._pull(i, t, ages[i], past, sent, mixed)
        self._apply_corrections(t, ages, mixed)
        return self._out, self._mixed

    def _pull(self, i: int, t: int, ages, past: dict, sent: list, mixed: list) -> None:
        """Move node i towards the models that it receives; send opposite changes as corrections.

        :param i: number of the node
        :param t: number of the round
        :param ages: row i of the delay table, (n,)
        :param past: outboxes of past rounds by number; in each, arrays (n, p)
        :param sent: outboxes of this round, arrays (n, p)
        :param mixed: results, arrays (n, p), whose row i is changed
        """
        received_ages = []
        sources, weights, _ = self.graph.neighbours(t, i)
        for j, weight in zip(map(int, sources), weights, strict=True):
            s = t - int(ages[j])
            if ages[j] < 0 or s not in past or self._applied.get((i, j), s - 1) >= s:
                continue
            parts = [
                flow(float(weight) / 2, own[i : i + 1], copy[j : j + 1])
                for own, copy in zip(sent, past[s], strict=True)
            ]
            for result, part in zip(mixed, parts, strict=True):
                result[i : i + 1].add_(part)
            received_ages.append(t - s)
            self._in_flight.append(Correction(t, i, j, parts))
            self._applied[i, j] = 1 << 62  # until the correction is applied
            self.bytes_sent[i] += 2 * self.layout.nbytes
        self.staleness[i] = float(np.mean(received_ages)) if received_ages else float("nan")

    def _apply_corrections(self, t: int, ages: np.ndarray, onto: list[torch.Tensor]) -> None:
        """Subtract the corrections that have arrived from the models of their targets.

        A correction has arrived if its target receives a model of its source that is at least as
        new. Corrections are applied in the order of their sources, so that the bits are determined.

        :param t: number of the round
        :param ages: delay table of the round, (n, n)
        :param onto: arrays (n, p) of all nodes' models, which are changed
        """
        remaining = []
        for correction in sorted(self._in_flight, key=lambda d: (d.source, d.t)):
            age = int(ages[correction.target, correction.source])
            if age < 0 or t - age < correction.t:
                remaining.append(correction)
                continue
            for result, part in zip(onto, correction.parts, strict=True):
                result[correction.target : correction.target + 1].sub_(part)
            self._applied[correction.source, correction.target] = t
        self._in_flight = remaining

    def pending(self) -> MessageArrays:
        """Return the change of the sum of all models by the corrections that are still in flight.

        The result has the arrays of a message with one row: (1, p) for each vector of each slot.
        """
        total = [torch.zeros_like(part[:1]) for part in _flat(self._out)]
        for correction in self._in_flight:
            for into, part in zip(total, correction.parts, strict=True):
                into.sub_(part)
        vectors = iter(total)
        return [tuple(next(vectors) for _ in segment) for segment in self._out]


def _flat(segments: MessageArrays) -> list[torch.Tensor]:
    return [part for segment in segments for part in segment]
