"""Search over sequences of one-peer matchings where edges between racks cost more than inside.

A sequence of R matchings is judged by what it gains per cost: s = −ln(max(ρ, 10⁻³)) / c, where ρ =
‖W(R−1) … W(0) − J‖_F / √(n−1) is what a period leaves of the (root mean square) distance from the
average, c the sum over its rounds of the mean cost of their edges, 1 inside a rack and `between`
between racks (idle nodes cost nothing). Annealing, by two moves: two pairs of a round change
partners; two nodes change all their places, which keeps ρ and moves edges between racks. Our own.
Scores are grained before they are compared (see `annealing.py`), so that a seed gives the same
sequence on every processor; of equals the first is kept.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mpigossip.graphs.annealing import GRAIN, Budget, generator, grained
from mpigossip.graphs.base import Cycle, Graph, GraphError
from mpigossip.graphs.finite_time import base
from mpigossip.graphs.rounds import paired
from mpigossip.graphs.search import Progress

ENOUGH = 1e-3
"""What a period leaves of the distance and counts as exact: less gains nothing."""
HOT, COLD = 0.05, 0.001
"""Temperatures, as parts of the best score."""


@dataclass(frozen=True)
class FoundSequence:
    """A found sequence: its rounds of pairs, how good it is, and how it was found."""

    n: int
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    score: float
    residue: float
    cost: float
    racks: tuple[int, ...]
    between: float
    seed: int
    seconds: float
    evaluations: int
    weights: str = "uniform"

    def graph(self) -> Graph:
        """The graph that goes through the matchings in turn."""
        return Graph(Cycle(tuple(paired(p) for p in _partners(self.n, self.rounds))), "matchings")


def _partners(n: int, rounds) -> np.ndarray:
    """Who is whose partner in each round, (rounds, n); an idle node is its own."""
    partner = np.tile(np.arange(n), (len(rounds), 1))
    for t, pairs in enumerate(rounds):
        for i, j in pairs:
            partner[t, i], partner[t, j] = j, i
    return partner


class _Judge:
    """Scores partner arrays (rounds, n)."""

    def __init__(self, n: int, racks: np.ndarray, dear: float) -> None:
        self.n = n
        self.costs = np.where(racks[:, None] == racks[None, :], 1.0, dear)
        np.fill_diagonal(self.costs, 0.0)

    def residue(self, partner: np.ndarray) -> float:
        """What a period leaves of the root mean square distance from the average."""
        product = np.eye(self.n)
        for row in partner:
            product = (product + product[row]) / 2
        return float(np.linalg.norm(product - 1 / self.n) / math.sqrt(self.n - 1))

    def cost(self, partner: np.ndarray) -> float:
        """Sum over rounds of the mean cost of a node's edge."""
        return float(self.costs[np.arange(self.n)[None, :], partner].sum() / self.n)

    def score(self, partner: np.ndarray) -> float:
        """Nats that the distance falls by, per unit of cost."""
        cost = self.cost(partner)
        return -math.log(max(self.residue(partner), ENOUGH)) / cost if cost else 0.0


def search_matchings(
    n: int,
    rounds: int,
    *,
    racks: Sequence[Hashable] | None = None,
    between: float = 4.0,
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FoundSequence:
    """The best sequence of so many one-peer matchings of n nodes found in the time.

    racks: one label a node, None for one rack; between: cost of an edge between racks, inside 1.
    It ends after `seconds` (60 if neither is given) or judged sequences (`evaluations`; with this
    limit alone the rounds depend on the seed only, not on the processor); Ctrl-C ends it with the
    best so far. Raises GraphError for what can't be.
    """
    label = _checked(n, rounds, racks, between)
    if seconds is None and evaluations is None:
        seconds = 60.0
    budget, judge = Budget(seconds, evaluations), _Judge(n, label, between)
    random = generator(seed)
    best = now = _start(n, rounds, random)
    high = score = grained(judge.score(now))
    told = 0.0
    try:
        while (spent := budget.spent()) < 1:
            budget.used += 1
            tried = _moved(now, random)
            value = grained(judge.score(tried))
            heat = max(high, 1e-3) * HOT * (COLD / HOT) ** spent
            # drawn in any case: else one comparison would shift all random numbers to come
            if random.random() < math.exp(min(0.0, (value - score) / heat)):
                now, score = tried, value
                if value > high + 1.5 * GRAIN:
                    best, high = tried, value
            if progress and budget.elapsed > told + 0.5:
                told = budget.elapsed
                progress(min(spent, 1.0), high, budget.used)
    except KeyboardInterrupt:
        pass
    found = tuple(tuple((i, int(j)) for i, j in enumerate(row) if i < j) for row in best)
    return FoundSequence(
        n, found, judge.score(best), judge.residue(best), judge.cost(best), tuple(label.tolist()),
        between, seed, budget.elapsed, budget.used,
    )  # fmt: skip


def _checked(n: int, rounds: int, racks, between: float) -> np.ndarray:
    """The racks as numbers, (n,)."""
    if n < 2 or rounds < 1:
        raise GraphError(f"a sequence needs 2 nodes and 1 round at least, got {n} and {rounds}")
    if not between >= 1:
        raise GraphError(f"edges between racks cost at least as much as inside (1), got {between}")
    racks = [0] * n if racks is None else list(racks)
    if len(racks) != n:
        raise GraphError(f"{len(racks)} racks are named for {n} nodes; name one for each")
    numbers = {rack: k for k, rack in enumerate(dict.fromkeys(racks))}
    return np.array([numbers[rack] for rack in racks])


def _start(n: int, rounds: int, random: np.random.Generator) -> np.ndarray:
    """The pairs of Base-2, exact for any n where it needs only halves; further ones by chance."""
    partner = np.stack([_by_chance(n, random) for _ in range(rounds)])
    known = [r.matrix() for r in base(1)(n).schedule.rounds]
    if len(known) <= rounds and all(np.isin(w, (0.0, 0.5, 1.0)).all() for w in known):
        for row, w in zip(partner, known, strict=False):
            np.fill_diagonal(w, 0.0)
            row[:] = np.where(w.any(axis=1), w.argmax(axis=1), np.arange(n))
    return partner


def _by_chance(n: int, random: np.random.Generator) -> np.ndarray:
    """A matching with one idle node at most."""
    order, partner = random.permutation(n), np.arange(n)
    one, other = order[: n // 2], order[n // 2 : n // 2 * 2]
    partner[one], partner[other] = other, one
    return partner


def _moved(partner: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Another sequence nearby."""
    tried, n = partner.copy(), partner.shape[1]
    a, b = random.choice(n, 2, replace=False)
    if random.random() < 0.3:
        swap = np.arange(n)
        swap[a], swap[b] = b, a
        return swap[partner[:, swap]]
    row = tried[int(random.integers(len(tried)))]
    c, d = row[a], row[b]
    if c == b:  # the pair parts, or two idle nodes meet
        row[a], row[b] = a, b
    elif c == a and d == b:
        row[a], row[b] = b, a
    else:  # a takes b's partner, b takes a's
        row[a], row[b] = (d if d != b else a), (c if c != a else b)
        if d != b:
            row[d] = a
        if c != a:
            row[c] = b
    return tried
