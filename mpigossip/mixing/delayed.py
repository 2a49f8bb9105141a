"""Asynchronous gossip of n nodes in this process, deterministic: a delay table says who sees what.

The rule of :mod:`mpigossip.mixing.asynchronous`, with the table in the place of chance. A *delay
table* is a function t -> int array (n, n): entry [i, j] tells how many rounds old what node i sees
of node j at its round t is (0: of the same round), or −1 where it sees nothing. Slow nodes and lost
links are drawn from a seed.
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
"""Rounds that a copy may be old: the simulator keeps so many, and shows the oldest beyond."""


def table(ages: np.ndarray) -> DelayTable:
    """The delay table that goes through an int array (rounds, n, n) again and again."""
    return lambda t: ages[t % len(ages)]


@dataclass(frozen=True)
class Faults:
    """Which nodes are slow when, and which links fail; a function of (seed, round) alone.

    In each stretch of ``steps`` rounds ``slow`` nodes, drawn anew, compute ``times`` longer. A
    node sees nothing of another one in a round with probability ``lost``. All nodes meet every
    ``meet`` rounds (where the log is gathered), so that none falls behind for ever.
    """

    n: int
    seed: int = 0
    times: float = 1.0
    slow: int = 1
    steps: int = 10
    lost: float = 0.0
    meet: int = 50

    def costs(self, t: int) -> np.ndarray:
        """Return how long each node computes in its round t, in units of the normal time: (n,)."""
        cost = np.ones(self.n)
        cost[_drawn((self.seed, 1, t // self.steps), self.n)[: self.slow]] = self.times
        return cost

    def ages(self, t: int) -> np.ndarray:
        """The delay table at round t: what node i sees of j is its newest copy at that moment.

        Node i ends its round t at T_i(t), the sum of its costs since all met last; it sees round
        s of j, the last with T_j(s) ≤ T_i(t). A node that is ahead is shown as of round t.
        """
        ages = np.zeros((self.n, self.n), np.int64)
        if self.times > 1:
            block, k = divmod(t, self.meet)
            ends = _ends(self, block)[: k + 1]
            for i in range(self.n):
                ages[i] = np.minimum(k + 1 - (ends <= ends[k, i]).sum(axis=0), OLDEST)
        if self.lost:
            words = random_words((self.seed, 2, t), self.n * self.n).reshape(self.n, self.n)
            ages[words < self.lost * 2.0**64] = -1
        return ages


@lru_cache(maxsize=64)
def _drawn(key: tuple[int, ...], n: int) -> np.ndarray:
    return np.argsort(random_words(key, n), kind="stable")


@lru_cache(maxsize=4)
def _ends(faults: Faults, block: int) -> np.ndarray:
    """T_i(t) of the rounds between two meetings, (meet, n)."""
    first = block * faults.meet
    return np.cumsum([faults.costs(t) for t in range(first, first + faults.meet)], axis=0)


def readers(graph, node: int) -> list[int]:
    """Nodes that have ``node`` as an in-neighbour in some round, ascending."""
    if graph.period is None:
        return [j for j in range(graph.n) if j != node]
    found = {int(j) for t in range(graph.period) for j in graph.receivers(t, node)}
    return sorted(found - {node})


def flow(weight: float, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return what a node takes from another one: weight · (other − own), a new array."""
    return torch.sub(other, own).mul_(weight)


class Correction(NamedTuple):
    """What node ``source`` took from ``target`` at round t, a flat list of rows (1, p)."""

    t: int
    source: int
    target: int
    parts: list[torch.Tensor]


class Delayed(Simulated):
    """All n nodes in step, each seeing copies of the others as old as the delay table says.

    The sum of ``mixed`` plus what is under way (:meth:`pending`) is the sum of ``sent``.
    """

    synchronous = False

    def __init__(self, graph, layout: MessageLayout, ages: DelayTable):
        super().__init__(graph, layout)
        self._ages = ages
        self._past: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=OLDEST + 1)
        self._under_way: list[Correction] = []
        # the round in which a node took in the last deposit of another one, by (source, target)
        self._absorbed: dict[tuple[int, int], int] = {}

    @staticmethod
    def estimate_memory(graph, layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: an outbox, a result, the past of its outbox, deposits of its readers."""
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
            self._take_in(t - 1, np.zeros((self.n, self.n), np.int64), _flat(self._out))
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
        self._take_in(t, ages, mixed)
        return self._out, self._mixed

    def _pull(self, i: int, t: int, ages, past: dict, sent: list, mixed: list) -> None:
        """Node i moves towards the copies that it sees, and deposits the opposite with each."""
        seen = []
        sources, weights, _ = self.graph.neighbours(t, i)
        for j, weight in zip(map(int, sources), weights, strict=True):
            s = t - int(ages[j])
            if ages[j] < 0 or s not in past or self._absorbed.get((i, j), s - 1) >= s:
                continue
            parts = [
                flow(float(weight) / 2, own[i : i + 1], copy[j : j + 1])
                for own, copy in zip(sent, past[s], strict=True)
            ]
            for result, part in zip(mixed, parts, strict=True):
                result[i : i + 1].add_(part)
            seen.append(t - s)
            self._under_way.append(Correction(t, i, j, parts))
            self._absorbed[i, j] = 1 << 62  # until it is taken in
            self.bytes_sent[i] += 2 * self.layout.nbytes
        self.staleness[i] = float(np.mean(seen)) if seen else float("nan")

    def _take_in(self, t: int, ages: np.ndarray, onto: list[torch.Tensor]) -> None:
        """Every node takes in the deposits that it sees, in the order of who made them."""
        left = []
        for one in sorted(self._under_way, key=lambda d: (d.source, d.t)):
            age = int(ages[one.target, one.source])
            if age < 0 or t - age < one.t:
                left.append(one)
                continue
            for result, part in zip(onto, one.parts, strict=True):
                result[one.target : one.target + 1].sub_(part)
            self._absorbed[one.source, one.target] = t
        self._under_way = left

    def pending(self) -> MessageArrays:
        """Return the sum of deposits in flight, applied by nobody yet, (1, p) a vector."""
        total = [torch.zeros_like(part[:1]) for part in _flat(self._out)]
        for one in self._under_way:
            for into, part in zip(total, one.parts, strict=True):
                into.sub_(part)
        each = iter(total)
        return [tuple(next(each) for _ in segment) for segment in self._out]


def _flat(segments: MessageArrays) -> list[torch.Tensor]:
    return [part for segment in segments for part in segment]
