"""Graphs with lost links and absent nodes: each round reweighted so that its sums stay one.

What a lost link would have carried stays with who would have had it, so that every round keeps
what the graph promises: of a doubly stochastic one rows and columns still sum to one, and the mean
of the nodes stays. Everything follows from (seed, round).
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
    """Return the mean number of rounds off of a thing that is drawn independently each round."""
    return 1 / (1 - share) if share < 1 else math.inf


def _check(share: float, rounds: float, names: tuple[str, str]) -> None:
    """Raise GraphError for fewer rounds than any chain of this share has."""
    if rounds and not rounds >= (least := least_rounds(share)):
        raise GraphError(
            f"{names[1]} = {rounds:g}: must be at least 1/(1 - {names[0]}) = {least:.6g}, or 0 for "
            "rounds that are drawn independently"
        )


@dataclass(frozen=True)
class OnOff:
    """Things of which each is off in a share of the rounds, for ``rounds`` on the average.

    A chain of two states: with probability r a thing is drawn anew (off with probability
    ``share``), else it stays. Off it stays 1/(r (1 − share)) rounds; 0 means r = 1, drawn anew each
    round. GraphError for fewer rounds than that, 1/(1 − share).
    """

    share: float
    rounds: float
    key: tuple[int, ...]
    count: int
    _latest: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.share, self.rounds, ("share", "rounds"))

    @property
    def anew(self) -> float:
        """The probability r."""
        return 1 / (self.rounds * (1 - self.share)) if self.rounds else 1.0

    def off(self, t: int) -> np.ndarray:
        """Return which are off in round t: bool (count,)."""
        if not self.share:
            return np.zeros(self.count, bool)
        before = self._latest.get(t - 1)
        drawn, off = self._drawn(t)
        back = t
        while not drawn.all() and back > 0 and before is None:
            back -= 1
            also, state = self._drawn(back)
            off = np.where(drawn, off, state)
            drawn = drawn | also
        if before is not None:
            off = np.where(drawn, off, before)
        self._latest.clear()
        self._latest[t] = off
        return off

    def _drawn(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which are drawn anew in a round (in the first, all), and their new states."""
        anew, state = random_words((*self.key, t), 2 * self.count).reshape(2, -1) / 2.0**64
        return (anew < self.anew) | (t == 0), state < self.share


@dataclass(frozen=True)
class Links:
    """Lost links and absent nodes as a function of (seed, round) alone.

    ``lost``: share of the rounds in which a link, both ways, carries nothing, ``lost_rounds`` in a
    row on the average (0: independent). ``away``, ``away_rounds``: the same of nodes and all their
    links. ``ticks``: nodes take part where their Poisson clocks tick, so often a round on the
    average; 0: always.
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
        """Between which nodes something travels in round t: bool (n, n), symmetric."""
        pairs, nodes, clocks = _chains(self)
        alive = np.ones((self.n, self.n), bool)
        upper = np.triu_indices(self.n, 1)
        alive[upper] = ~pairs.off(t)
        alive &= alive.T
        here = ~(nodes.off(t) | clocks.off(t))
        return alive & here[:, None] & here[None, :]


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
    """The rounds of a graph, each reweighted for its lost links."""

    of: Graph
    links: Links
    change: Callable[[Round], Round] = lambda r: r
    """of a round before it is reweighted"""
    period = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The graph's own, and the first few reweighted ones."""
        own = tuple(map(self.change, self.of.schedule.rounds))
        return (*own, *(self.at(t) for t in range(SAMPLED_ROUNDS)))

    def at(self, t: int) -> Round:
        return _round_at(self, t)

    def mapped(self, change: Callable[[Round], Round]) -> Faulty:
        """The same with each round changed before it is reweighted."""
        return replace(self, change=lambda r: change(self.change(r)))


@lru_cache(maxsize=64)
def _round_at(faulty: Faulty, t: int) -> Round:
    whole = faulty.change(faulty.of.round(t))
    return without_lost_links(whole, faulty.links.alive(t), faulty.of.facts)


def faulty(graph: Graph, links: Links) -> Graph:
    """The graph with its links lost now and then."""
    named = {k: v for k, v in vars(links).items() if v and k not in ("n", "seed")}
    options = (*graph.options, *named.items())
    schedule = cast("Any", Faulty(graph, links))
    return replace(graph, schedule=schedule, options=options, times=1)


def without_lost_links(whole: Round, alive: np.ndarray, facts: frozenset[str]) -> Round:
    """A round without the dead links, that keeps which of its sums are one.

    Doubly stochastic: W is a sum of circles of nodes that hand on the same weight; one with a dead
    link in it is left out, and its nodes keep their own. Two nodes that exchange are a circle of
    two. Else a receiver keeps more of its own, or (column-stochastic) a sender.
    """
    w = whole.matrix()
    n = len(w)
    off = ~np.eye(n, dtype=bool)
    left = np.where(off & alive, w, 0.0)
    own = w.diagonal().copy()
    if {"row-stochastic", "column-stochastic"} <= facts and not whole.symmetric():
        left = np.where(off, w, 0.0)
        kept = own
        for nodes, weight in _circles(whole):
            after = np.roll(nodes, -1)
            if not alive[nodes, after].all():
                left[nodes, after] -= weight
                kept[nodes] += weight
        left[left < TOLERANCE] = 0.0
    elif "row-stochastic" in facts:
        own += (w - left).sum(1) - w.diagonal()
    else:
        own += (w - left).sum(0) - w.diagonal()
    np.fill_diagonal(left, own)
    return Sparse.from_matrix(left)


@lru_cache(maxsize=64)
def _circles(whole: Round) -> list[tuple[np.ndarray, float]]:
    """Circles of nodes, each taking from the next, and their weights: W off its diagonal.

    Pairs that exchange come first; the rest is walked until a node is met again.
    """
    left = whole.matrix()
    np.fill_diagonal(left, 0.0)
    found = []
    both = np.triu(np.minimum(left, left.T))
    for i, j in zip(*np.nonzero(both), strict=True):
        found.append((np.array([i, j]), float(both[i, j])))
    left -= both + both.T
    for start in range(len(left)):
        while left[start].max() > TOLERANCE:
            walk = []
            at = start
            while at not in walk:
                walk.append(at)
                at = int(np.argmax(left[at]))
            nodes = np.array(walk[walk.index(at) :])
            after = np.roll(nodes, -1)
            weight = float(left[nodes, after].min())
            left[nodes, after] -= weight
            left[left < TOLERANCE] = 0.0
            found.append((nodes, weight))
    return found
