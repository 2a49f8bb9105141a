"""Graphs with lost links and absent nodes, whose rounds get new weights that still sum to one.

Lost weights are added to own weights. If the rows or the columns of a graph sum to one, they still
do. If both do, the mean of the nodes is preserved. The lost links and absent nodes of a round are
determined by the seed and the number of the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from mpigossip.graphs.base import SAMPLED_ROUNDS, Graph, GraphError, random_words
from mpigossip.graphs.rounds import TOLERANCE, Round, SparseMatrix


def least_rounds(share: float) -> float:
    """Return the mean number of consecutive rounds for which an item is off, 1/(1 − ``share``).

    This number holds if the state of the item is drawn independently in each round. If the state
    persists, the number is larger. The result is inf if ``share`` is 1.

    :param share: probability that an item is off in a round
    """
    return 1 / (1 - share) if share < 1 else math.inf


def _check(share: float, rounds: float, names: tuple[str, str]) -> None:
    """Raise GraphError if ``rounds`` is not 0, but smaller than `least_rounds(share)`.

    :param share: probability that an item is off in a round
    :param rounds: mean number of consecutive rounds in which an item is off
    :param names: names of the two numbers in the message
    """
    if rounds and not rounds >= (minimum := least_rounds(share)):
        raise GraphError(
            f"{names[1]} = {rounds:g}: must be at least 1/(1 - {names[0]}) = {minimum:.6g}, or 0 "
            "for rounds that are drawn independently"
        )


@dataclass(frozen=True)
class OnOff:
    """Items that are sometimes off, each in a fraction ``share`` of the rounds.

    An item stays off for ``rounds`` consecutive rounds on average. Its state is a Markov chain: in
    each round, the state is drawn again with probability r, and is then off with probability
    ``share``; otherwise the item keeps its state. The probability r follows from ``rounds`` =
    1/(r (1 − share)). ``rounds`` = 0 stands for r = 1, so that the state is drawn again in each
    round. Any other number below 1/(1 − share) raises GraphError.

    ``count`` is the number of items. ``key`` distinguishes the random numbers of these items from
    all others, as in `random_words`.
    """

    share: float
    rounds: float
    key: tuple[int, ...]
    count: int
    _latest: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.share, self.rounds, ("share", "rounds"))

    @property
    def redraw_probability(self) -> float:
        """Probability r that the state of an item is drawn again in a round."""
        return 1 / (self.rounds * (1 - self.share)) if self.rounds else 1.0

    def off(self, t: int) -> np.ndarray:
        """Return a mask of the items that are off in round t, bool (count,).

        A call is fast if the last call was for round t − 1. Otherwise, earlier rounds are examined
        until the last draw of each item is known.
        """
        if not self.share:
            return np.zeros(self.count, bool)
        before = self._latest.get(t - 1)
        drawn, off = self._drawn(t)
        back = t
        while not drawn.all() and back > 0 and before is None:
            back -= 1
            earlier, state = self._drawn(back)
            off = np.where(drawn, off, state)
            drawn = drawn | earlier
        if before is not None:
            off = np.where(drawn, off, before)
        self._latest.clear()
        self._latest[t] = off
        return off

    def _drawn(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a mask of the items whose state is drawn again in round t, and the new states.

        In round 0, the state of every item is drawn.
        """
        uniform, state = random_words((*self.key, t), 2 * self.count).reshape(2, -1) / 2.0**64
        return (uniform < self.redraw_probability) | (t == 0), state < self.share


@dataclass(frozen=True)
class Links:
    """Lost links and absent nodes, determined by (seed, round) alone.

    ``lost`` is the fraction of rounds in which a link carries no message in either direction, and
    ``lost_rounds`` the mean number of consecutive rounds for which it does so (0: rounds are
    independent). ``away`` and ``away_rounds`` are the same numbers for nodes, which lose all their
    links. If ``ticks`` is not 0, a node takes part only in rounds in which its Poisson clock ticks;
    ``ticks`` is the mean number of ticks per round. The numbers of rounds have the limits of
    `OnOff`.
    """

    n: int
    seed: int = 0
    lost: float = 0.0
    lost_rounds: float = 0.0
    away: float = 0.0
    away_rounds: float = 0.0
    ticks: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lost, self.lost_rounds, ("lost", "lost_rounds"))
        _check(self.away, self.away_rounds, ("away", "away_rounds"))

    def alive(self, t: int) -> np.ndarray:
        """Return a symmetric mask of the pairs that can exchange in round t, bool (n, n)."""
        pairs, nodes, clocks = _chains(self)
        alive = np.ones((self.n, self.n), bool)
        upper = np.triu_indices(self.n, 1)
        alive[upper] = ~pairs.off(t)
        alive &= alive.T
        present = ~(nodes.off(t) | clocks.off(t))
        return alive & present[:, None] & present[None, :]


@lru_cache(maxsize=8)
def _chains(links: Links) -> tuple[OnOff, OnOff, OnOff]:
    n = links.n
    seed = links.seed
    asleep = math.exp(-links.ticks) if links.ticks else 0.0
    return (
        OnOff(links.lost, links.lost_rounds, (seed, 11), n * (n - 1) // 2),
        OnOff(links.away, links.away_rounds, (seed, 12), n),
        OnOff(asleep, 0.0, (seed, 13), n),
    )


@dataclass(frozen=True)
class Faulty:
    """Schedule of the rounds of a graph, in which each round is reweighted for its lost links."""

    of: Graph
    links: Links
    change: Callable[[Round], Round] = lambda r: r
    """Change of a round that is applied before it is reweighted."""
    period = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds of the graph itself, followed by its first few reweighted rounds."""
        unchanged = tuple(map(self.change, self.of.schedule.rounds))
        return (*unchanged, *(self.at(t) for t in range(SAMPLED_ROUNDS)))

    def at(self, t: int) -> Round:
        return _round_at(self, t)

    def mapped(self, change: Callable[[Round], Round]) -> Faulty:
        """Return the schedule with ``change`` applied to each round before it is reweighted."""
        return replace(self, change=lambda r: change(self.change(r)))


@lru_cache(maxsize=64)
def _round_at(faulty: Faulty, t: int) -> Round:
    full = faulty.change(faulty.of.round(t))
    return without_lost_links(full, faulty.links.alive(t), faulty.of.facts)


def faulty(graph: Graph, links: Links) -> Graph:
    """Return the graph with lost links and absent nodes as in ``links``, for the same n."""
    named = {k: v for k, v in vars(links).items() if v and k not in ("n", "seed")}
    options = (*graph.options, *named.items())
    schedule = cast("Any", Faulty(graph, links))
    return replace(graph, schedule=schedule, options=options, times=1)


def without_lost_links(full: Round, alive: np.ndarray, facts: frozenset[str]) -> Round:
    """Return a round without the dead links, whose rows or columns still sum to one.

    If W is doubly stochastic, its links can be split into circles, in which each node receives from
    the next with the same weight. Two nodes that exchange are a circle of two. A circle with a dead
    link is removed, and its weight is added to the own weight of each of its nodes. If W is not
    doubly stochastic, the weight of a dead link is added to the own weight of the receiver, or of
    the sender if W is column-stochastic.

    :param full: round with all links
    :param alive: pairs of nodes that can exchange, bool (n, n)
    :param facts: facts of the graph
    """
    w = full.matrix()
    n = len(w)
    off = ~np.eye(n, dtype=bool)
    remaining = np.where(off & alive, w, 0.0)
    own = w.diagonal().copy()
    if {"row-stochastic", "column-stochastic"} <= facts and not full.symmetric():
        remaining = np.where(off, w, 0.0)
        for nodes, weight in _circles(full):
            after = np.roll(nodes, -1)
            if not alive[nodes, after].all():
                remaining[nodes, after] -= weight
                own[nodes] += weight
        remaining[remaining < TOLERANCE] = 0.0
    elif "row-stochastic" in facts:
        own += (w - remaining).sum(1) - w.diagonal()
    else:
        own += (w - remaining).sum(0) - w.diagonal()
    np.fill_diagonal(remaining, own)
    return SparseMatrix.from_matrix(remaining)


@lru_cache(maxsize=64)
def _circles(full: Round) -> list[tuple[np.ndarray, float]]:
    """Split the links of a doubly stochastic W into circles of nodes with one weight each.

    Each node of a circle receives from the next. Two nodes that exchange are a circle, too, and are
    found first. Other circles are found by walking along links until a node is reached for the
    second time.
    """
    remaining = full.matrix()
    np.fill_diagonal(remaining, 0.0)
    circles = []
    mutual = np.triu(np.minimum(remaining, remaining.T))
    for i, j in zip(*np.nonzero(mutual), strict=True):
        circles.append((np.array([i, j]), float(mutual[i, j])))
    remaining -= mutual + mutual.T
    for start in range(len(remaining)):
        while remaining[start].max() > TOLERANCE:
            walk = []
            node = start
            while node not in walk:
                walk.append(node)
                node = int(np.argmax(remaining[node]))
            nodes = np.array(walk[walk.index(node) :])
            after = np.roll(nodes, -1)
            weight = float(remaining[nodes, after].min())
            remaining[nodes, after] -= weight
            remaining[remaining < TOLERANCE] = 0.0
            circles.append((nodes, weight))
    return circles
