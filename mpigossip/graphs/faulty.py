"""Graphs with lost links and absent nodes: each round is reweighted so that its sums stay one.

The weight of a lost link is given to the own weight of the node that would have used it, so that
each round keeps the properties of the graph. In particular, rows and columns of a doubly stochastic
graph still sum to one, and the mean of the nodes is preserved. Everything is determined by (seed,
round).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from mpigossip.graphs.base import SAMPLED_ROUNDS, Graph, GraphError, random_words
from mpigossip.graphs.rounds import TOLERANCE, Round, Sparse


def least_rounds(share: float) -> float:
    """Return the mean number of rounds off of an item that is drawn independently in each round."""
    return 1 / (1 - share) if share < 1 else math.inf


def _check(share: float, rounds: float, names: tuple[str, str]) -> None:
    """Raise GraphError if ``rounds`` is smaller than is possible for a chain with this share."""
    if rounds and not rounds >= (minimum := least_rounds(share)):
        raise GraphError(
            f"{names[1]} = {rounds:g}: must be at least 1/(1 - {names[0]}) = {minimum:.6g}, or 0 "
            "for rounds that are drawn independently"
        )


@dataclass(frozen=True)
class OnOff:
    """Items of which each is off in a fraction of the rounds, for ``rounds`` in a row on average.

    Each item is a Markov chain of two states. In each round, it is drawn again with probability r,
    and is then off with probability ``share``; otherwise it keeps its state. It stays off for 1/(r
    (1 − share)) rounds on average. ``rounds`` = 0 means r = 1: each item is drawn again in each
    round. Fewer rounds than 1/(1 − share) raise GraphError.
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
        """Probability r that an item is drawn again in a round."""
        return 1 / (self.rounds * (1 - self.share)) if self.rounds else 1.0

    def off(self, t: int) -> np.ndarray:
        """Return which items are off in round t: bool (count,)."""
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
        """Return which items are drawn again in round t (all in round 0), and their new states."""
        uniform, state = random_words((*self.key, t), 2 * self.count).reshape(2, -1) / 2.0**64
        return (uniform < self.redraw_probability) | (t == 0), state < self.share


@dataclass(frozen=True)
class Links:
    """Lost links and absent nodes, determined by (seed, round) alone.

    ``lost`` is the fraction of rounds in which a link carries nothing in both directions, for
    ``lost_rounds`` in a row on average (0: independently). ``away`` and ``away_rounds`` are the
    same for nodes with all their links. If ``ticks`` is not 0, a node takes part only in rounds in
    which its Poisson clock ticks; ``ticks`` is the mean number of ticks per round.
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
        """Return which pairs of nodes can exchange in round t: bool (n, n), symmetric."""
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
    """Rounds of a graph, each reweighted for its lost links."""

    of: Graph
    links: Links
    change: Callable[[Round], Round] = lambda r: r
    """Change of a round that is applied before it is reweighted."""
    period = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds of the graph itself, followed by the first few reweighted ones."""
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
    """Return the graph with lost links and absent nodes as in ``links``."""
    named = {k: v for k, v in vars(links).items() if v and k not in ("n", "seed")}
    options = (*graph.options, *named.items())
    schedule = cast("Any", Faulty(graph, links))
    return replace(graph, schedule=schedule, options=options, times=1)


def without_lost_links(full: Round, alive: np.ndarray, facts: frozenset[str]) -> Round:
    """Return a round without the dead links, in which the same sums are one as before.

    If W is doubly stochastic, it is a sum of circles of nodes that pass on the same weight. A
    circle with a dead link is removed, and its nodes keep that weight themselves; two nodes that
    exchange are a circle of two. Otherwise, the receiver keeps the weight of a dead link, or the
    sender if W is column-stochastic.

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
    return Sparse.from_matrix(remaining)


@lru_cache(maxsize=64)
def _circles(full: Round) -> list[tuple[np.ndarray, float]]:
    """Split W without its diagonal into circles of nodes and their weights.

    Each node of a circle receives from the next. Pairs that exchange come first. The other circles
    are found by walks that end when they reach a node for the second time.
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
