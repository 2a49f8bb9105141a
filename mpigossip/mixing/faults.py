"""Slow nodes and lost links, drawn from a seed: the delay table of a simulated asynchronous run.

A *delay table* is a function t -> int array (n, n): entry [i, j] tells how many rounds old what
node i sees of node j at its round t is (0: of the same round), or −1 where it sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Ages = Callable[[int], np.ndarray]

OLDEST = 16
"""Rounds that a copy may be old: the simulator keeps so many, and shows the oldest beyond."""


def table(ages: np.ndarray) -> Ages:
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
        """How long each node computes in its round t, in units of the normal time: (n,)."""
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
            words = _words((self.seed, 2, t), self.n * self.n).reshape(self.n, self.n)
            ages[words < self.lost * 2.0**64] = -1
        return ages


def _words(key: tuple[int, ...], count: int) -> np.ndarray:
    """``count`` uint64 from the key alone (Philox: numpy promises its stream for all versions)."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


@lru_cache(maxsize=64)
def _drawn(key: tuple[int, ...], n: int) -> np.ndarray:
    return np.argsort(_words(key, n), kind="stable")


@lru_cache(maxsize=4)
def _ends(faults: Faults, block: int) -> np.ndarray:
    """T_i(t) of the rounds between two meetings, (meet, n)."""
    first = block * faults.meet
    return np.cumsum([faults.costs(t) for t in range(first, first + faults.meet)], axis=0)
