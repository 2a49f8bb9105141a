"""Local search over sparse undirected graphs by simulated annealing: the engine of `search.py`.

A *plan* is a graph with a cyclic symmetry of order m (m = 1: any graph): n = b·m nodes (a, k),
a < b, k < m, and edge *orbits* (a, c, s) that join (a, k) with (c, k + s) for all k. Its
Laplacian falls into m Hermitian b x b blocks, one for each frequency (a voltage lift, see Gross
and Tucker, Topological Graph Theory, 1987), so that symmetric graphs are judged fast and a small
space holds very good ones.

The judged numbers are λ_2, the least Laplacian eigenvalue but one, and λ_max. A move replaces
orbits by others. For m = 1 moves are screened: to first order an edge ij adds (v_i − v_j)² to the
eigenvalue of v, so the Fiedler vector tells which edges lift λ_2, and the top one which spare
λ_max. Neighbouring eigenvalues count with exponentially falling weights, because symmetric graphs
have multiple ones.

Processors' eigenvalues, logarithms and sums differ in their last bits. So whatever decides is first
rounded to multiples of GRAIN, equals go by a stated order, a draw is made whether it is needed or
not, and of eigenvectors only sums over whole eigenspaces count, which no basis of theirs changes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpigossip.graphs.base import GraphError, checked_seed

Orbit = tuple[int, int, int]
Move = tuple[list[Orbit], list[Orbit]]
"""Orbits to be removed, orbits to be added."""

GRAIN = 2.0**-30
"""Scores are rounded to multiples of this, about 1e-9: far above a processor's rounding error, far
below what matters; a power of two, so that neither decimal nor short binary fractions lie on the
border of two multiples."""

CONNECTED = 1e-9
"""Least λ_2 of a graph that counts as connected."""

NARROW = 1e-6
"""Least width of the weights of neighbouring eigenvalues, far above their rounding error."""

SAMPLE = 48
"""Moves that are screened for each one that is judged."""


@dataclass
class Budget:
    """Limits of a search, in seconds or judged graphs, and what it has found so far."""

    seconds: float | None
    evaluations: int | None
    used: int = 0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        seconds = self.seconds
        count = self.evaluations
        if (seconds is not None and not seconds > 0) or (count is not None and count < 1):
            raise GraphError(f"a search needs time: got seconds={seconds}, evaluations={count}")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def spent(self) -> float:
        """Part of the budget that is used up; the search ends at 1."""
        by_time = self.elapsed / self.seconds if self.seconds else 0.0
        by_count = self.used / self.evaluations if self.evaluations else 0.0
        return max(by_time, by_count)


def grained(x: Any) -> Any:
    """A number or array rounded to multiples of GRAIN, exactly."""
    return np.rint(x / GRAIN) * GRAIN


def generator(seed: int) -> np.random.Generator:
    """The random numbers of a search; GraphError where the seed is no integer ≥ 0."""
    return np.random.default_rng(checked_seed(seed, "a search"))


@dataclass(frozen=True)
class Task:
    """Task of a search: n nodes, most neighbours, most edges, rule of the weights."""

    n: int
    degree: int
    edges: int
    weights: str

    def exact(self, low: float, high: float) -> float:
        """The number to be maximised: r = λ_2/λ_max, or 1 − ρ for weights that are given."""
        if low <= CONNECTED:
            return 0.0
        return low / high if self.weights == "laplacian" else 1.0 - max(1.0 - low, high - 1.0)

    def score(self, low: float, high: float) -> float:
        """The same, grained: what graphs are compared by."""
        return float(grained(self.exact(low, high)))


class CandidateGraph:
    """A graph with a cyclic symmetry of order m, as a set of edge orbits."""

    def __init__(self, task: Task, m: int) -> None:
        self.task = task
        self.m = m
        self.b = task.n // m
        self.orbits: list[Orbit] = []
        self.place: dict[Orbit, int] = {}
        self.degrees = [0] * self.b
        self.size = 0
        turns = np.outer(np.arange(m), np.arange(m // 2 + 1)) % m
        angles = 2 * np.pi / m * turns
        self.phases = np.exp(1j * angles) if m > 2 else np.cos(angles)
        self.blocks = np.zeros((m // 2 + 1, self.b, self.b), self.phases.dtype)

    def canonical(self, a: int, c: int, s: int) -> Orbit:
        """The one name of an orbit that has two."""
        s %= self.m
        back = -s % self.m
        return (a, c, s) if a < c or (a == c and s <= back) else (c, a, back)

    def _count(self, orbit: Orbit, sign: int) -> None:
        """Carry an orbit into, or out of, the counts and the Laplacian's blocks."""
        a, c, s = orbit
        half = a == c and 2 * s == self.m  # its shift is its own inverse: m/2 edges only
        self.size += sign * (self.m // 2 if half else self.m)
        if self.m == 1:  # the same in scalars, as it is done most often
            matrix = self.blocks[0]
            matrix[a, c] = matrix[c, a] = -(sign > 0)
            ends = [a, c]
        else:
            ends = [a] if half else [a, c]
            self.blocks[:, a, c] -= sign * self.phases[s]
            if not half:
                self.blocks[:, c, a] -= sign * self.phases[s].conj()
        for x in ends:
            self.degrees[x] += sign
            self.blocks[:, x, x] += sign

    def fits(self) -> bool:
        return self.size <= self.task.edges and max(self.degrees) <= self.task.degree

    def add(self, orbit: Orbit) -> bool:
        """Add an orbit unless it is a loop or there already; tells whether it was added."""
        if orbit in self.place or (orbit[0] == orbit[1] and orbit[2] == 0):
            return False
        self.place[orbit] = len(self.orbits)
        self.orbits.append(orbit)
        self._count(orbit, 1)
        return True

    def remove(self, orbit: Orbit) -> None:
        """Take an orbit out; the last one takes its place."""
        at = self.place.pop(orbit)
        last = self.orbits.pop()
        if last != orbit:
            self.orbits[at] = last
            self.place[last] = at
        self._count(orbit, -1)

    def apply(self, move: Move) -> bool:
        """Carry a move out, or leave the graph as it was and return False if it isn't allowed."""
        removed, added = move
        for orbit in removed:
            self.remove(orbit)
        done = []
        for orbit in added:
            if not self.add(orbit):
                break
            done.append(orbit)
        if len(done) == len(added) and self.fits():
            return True
        for orbit in done:
            self.remove(orbit)
        for orbit in removed:
            self.add(orbit)
        return False

    def edges(self) -> list[tuple[int, int]]:
        """The undirected edges of the whole graph, node (a, k) being a·m + k."""
        found = set()
        for a, c, s in self.orbits:
            for k in range(self.m):
                i = a * self.m + k
                j = c * self.m + (k + s) % self.m
                found.add((min(i, j), max(i, j)))
        return sorted(found)

    def laplacian(self) -> np.ndarray:
        """The blocks of the weighted Laplacian, (m//2 + 1, b, b); real for m ≤ 2."""
        least = min(self.degrees)
        most = max(self.degrees)
        if self.task.weights == "laplacian":
            return self.blocks
        if self.task.weights == "max-degree" or least == most:
            return self.blocks / (1 + most)
        degrees = np.array(self.degrees)
        weights = 1.0 / (1 + np.maximum(degrees[:, None], degrees[None, :]))
        blocks = self.blocks * weights
        diagonal = np.arange(self.b)
        # every row of the block of frequency 0 sums to zero, loops and all
        shift = blocks[0].sum(axis=1).real
        blocks[:, diagonal, diagonal] -= shift
        return blocks

    def extremes(self) -> tuple[float, float]:
        """λ_2 and λ_max."""
        values = np.linalg.eigvalsh(self.laplacian())
        low = values[0, 1] if self.b > 1 else np.inf
        if self.m > 1:
            low = min(low, values[1:, 0].min())
        return float(low), float(values[:, -1].max())


def fill(plan: CandidateGraph, rng: np.random.Generator, most: int = 2, tries: int = 2000) -> None:
    """Add random orbits, first where degrees are least, as long as the budgets allow it.

    Without symmetry (m = 1) it starts from a balanced tree of degree `most`, so that the graph is
    connected: a random path for 2, a star for n − 1.
    """
    if plan.m == 1:
        order = rng.permutation(plan.b).tolist()
        for k in range(1, plan.b):
            # the root has `most` children, all others one less
            parent = order[max(0, (k - 2) // (most - 1)) if most > 1 else 0]
            plan.add((min(order[k], parent), max(order[k], parent), 0))
    misses = 0
    while misses < tries and plan.size < plan.task.edges:
        by_degree = np.argsort(plan.degrees + rng.random(plan.b), kind="stable")
        a = int(by_degree[0])
        c = int(rng.choice(by_degree)) if misses % 2 else int(by_degree[1 % plan.b])
        orbit = plan.canonical(a, c, int(rng.integers(plan.m)))
        misses = 0 if plan.apply(([], [orbit])) else misses + 1


def random_move(plan: CandidateGraph, rng: np.random.Generator) -> Move | None:
    """A swap of two orbits' ends, a new shift, or an orbit put elsewhere."""
    orbits = plan.orbits
    m = plan.m
    kind = rng.random()
    i, j = rng.integers(len(orbits), size=2)
    (a, c, _), (e, f, _) = orbits[i], orbits[j]
    if kind < 0.5 and i != j:
        if rng.random() < 0.5:
            e, f = f, e
        s, t = rng.integers(m, size=2)
        one = plan.canonical(a, f, int(s))
        other = plan.canonical(e, c, int(t))
        return ([orbits[i], orbits[j]], [one, other]) if one != other else None
    if kind < 0.8 and m > 1:
        return [orbits[i]], [plan.canonical(a, c, int(rng.integers(m)))]
    x, y = rng.integers(plan.b, size=2)
    new = plan.canonical(int(x), int(y), int(rng.integers(m)))
    spare = plan.size + m <= plan.task.edges
    return ([] if spare and rng.random() < 0.5 else [orbits[i]]), [new]


class Screen:
    """First-order change of the score by each edge, for a plan without symmetry (m = 1)."""

    def __init__(self, plan: CandidateGraph) -> None:
        values, vectors = np.linalg.eigh(plan.laplacian()[0])
        low = values[1]
        high = values[-1]
        # the floor keeps rounding errors out of a graph in parts, where λ_2 = 0
        width = max(0.1 * low, NARROW)
        rises = self._change(values - low, vectors, skip=1, width=width)
        tops = self._change(high - values, vectors, skip=0, width=width)
        if plan.task.weights == "laplacian":
            self.gain = (rises - low / high * tops) / high
        else:
            # either end may bind: the one that is nearer to it counts more
            binding = 1.0 / (1.0 + np.exp(np.clip((low + high - 2.0) / 0.05, -50, 50)))
            self.gain = binding * rises - (1.0 - binding) * tops
        self.taken = np.eye(plan.b, dtype=bool)
        self.orbits = list(plan.orbits)  # the plan's own list changes its order with each trial
        self.ends = np.array(self.orbits, np.int64)[:, :2]
        self.taken[self.ends[:, 0], self.ends[:, 1]] = True
        self.taken[self.ends[:, 1], self.ends[:, 0]] = True

    @staticmethod
    def _change(gaps: np.ndarray, vectors: np.ndarray, skip: int, width: float) -> np.ndarray:
        """Σ_k p_k (v_ki − v_kj)² with p_k ~ exp(−gap_k/width), the first `skip` in no sum of p.

        The constant vector (skip = 1) adds nothing to differences, and where λ_2 = 0 it can't be
        told from its equals: so no vector is left out.
        """
        p = np.exp(-np.clip(gaps / width, 0.0, 50.0))
        product = (vectors * (p / p[skip:].sum())) @ vectors.T
        square = product.diagonal()
        return square[:, None] + square[None, :] - 2 * product

    def move(self, plan: CandidateGraph, rng: np.random.Generator, heat: float) -> Move | None:
        """The most promising of a sample of moves, up to noise of the size `heat`; the first."""
        degrees = np.array(plan.degrees)
        free = (degrees < plan.task.degree).sum() > 1 and rng.random() < 0.5
        i, others, new, legal = (self._puts if free else self._swaps)(plan, degrees, rng)
        gain = sum(self.gain[x, y] for x, y in new)
        for gone in (i, *others):
            gain = gain - self.gain[self.ends[gone, 0], self.ends[gone, 1]]
        for x, y in new:
            legal = legal & ~self.taken[x, y]
        value = np.where(legal, grained(gain + heat * rng.gumbel(size=SAMPLE)), -np.inf)
        best = int(value.argmax())
        if value[best] == -np.inf:
            return None
        added = [(int(min(x[best], y[best])), int(max(x[best], y[best])), 0) for x, y in new]
        return [self.orbits[gone[best]] for gone in (i, *others)], added

    def _swaps(self, plan: CandidateGraph, degrees: np.ndarray, rng: np.random.Generator) -> tuple:
        """Edges ac and ef become af and ec: all degrees stay."""
        i, j = rng.integers(len(self.ends), size=(2, SAMPLE))
        (a, c), (e, f) = self.ends[i].T, self.ends[j].T
        flip = rng.random(SAMPLE) < 0.5
        e, f = np.where(flip, f, e), np.where(flip, e, f)
        return i, (j,), ((a, f), (e, c)), i != j

    def _puts(self, plan: CandidateGraph, degrees: np.ndarray, rng: np.random.Generator) -> tuple:
        """Edge ac becomes any xy whose ends have a degree to spare, those of ac included."""
        i = rng.integers(len(self.ends), size=SAMPLE)
        x, y = rng.integers(plan.b, size=(2, SAMPLE))
        a, c = self.ends[i].T
        limit = plan.task.degree
        legal = (degrees[x] - (x == a) - (x == c) < limit) & (
            degrees[y] - (y == a) - (y == c) < limit
        )
        return i, (), ((x, y),), legal


def anneal(
    plan: CandidateGraph,
    rng: np.random.Generator,
    budget: Budget,
    until: float,
    heat: tuple[float, float],
    found: Callable[[CandidateGraph, float], None],
) -> None:
    """Anneal a plan until `until` of the budget is spent, cooling from heat[0] to heat[1].

    `found(plan, score)` is called for each judged plan that is accepted; an equal one always is.
    """
    current = plan.task.score(*plan.extremes())
    found(plan, current)
    start = budget.spent()
    screen = None
    while (spent := budget.spent()) < until:
        at = (spent - start) / (until - start)
        temperature = heat[0] * (heat[1] / heat[0]) ** at
        if plan.m == 1 and rng.random() < 0.8:
            screen = screen or Screen(plan)
            move = screen.move(plan, rng, temperature)
        else:
            move = random_move(plan, rng)
        budget.used += 1
        if move is None or not plan.apply(move):
            continue
        score = plan.task.score(*plan.extremes())
        # drawn in any case: else one comparison would shift all random numbers to come
        if rng.random() < math.exp(min(0.0, (score - current) / temperature)):
            current = score
            screen = None
            found(plan, score)
        else:
            plan.apply((move[1], move[0]))
