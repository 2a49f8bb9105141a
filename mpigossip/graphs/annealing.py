"""Simulated annealing over sparse undirected graphs, for the search in `search.py`.

A candidate is a graph with a cyclic symmetry of order m (m = 1: any graph). It has n = b·m nodes
(a, k), a < b, k < m, and edge *orbits* (a, c, s), which join (a, k) with (c, k + s) for all k. Its
Laplacian splits into m Hermitian b x b blocks, one for each frequency (a voltage lift, see Gross
and Tucker, Topological Graph Theory, 1987). Graphs with a symmetry can therefore be judged fast,
and there are few of them, among which are very good graphs.

Candidates are judged by the second smallest eigenvalue λ_2 and the largest eigenvalue λ_max of the
Laplacian. A move replaces orbits of a candidate by other orbits. For m = 1, most moves are screened
first: to first order, an edge ij adds (v_i − v_j)² to the eigenvalue of v, so the Fiedler vector
shows which edges raise λ_2, and the top eigenvector which edges leave λ_max low. Neighbouring
eigenvalues are included with exponentially decreasing weights, because symmetric graphs have
multiple eigenvalues.

Eigenvalues, logarithms and sums differ between processors in their last bits. To make the result
independent of the processor, scores and estimated gains are rounded to multiples of GRAIN before
they are compared, ties are broken in a fixed order, and a random number is drawn even if it is not
needed. Eigenvectors are used only in sums over whole eigenspaces, which do not depend on the choice
of a basis.
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
"""Change of a candidate: orbits to remove, and orbits to add."""

GRAIN = 2.0**-30
"""Scores are rounded to multiples of this unit, about 1e-9, which is far larger than the rounding
error of a processor and far smaller than relevant differences. It is a power of two, so that
neither decimal nor short binary fractions lie halfway between two multiples.
"""

CONNECTED = 1e-9
"""A graph counts as connected if its λ_2 is larger than this number."""

NARROW = 1e-6
"""Smallest width of the range of eigenvalues that count as close to λ_2 or λ_max. It is far above
their rounding error.
"""

SAMPLE = 48
"""Number of moves that are screened, so that the best of them is judged."""


@dataclass
class Budget:
    """Limits of a search in seconds and in judged graphs, and the amounts used so far.

    A limit of None does not limit the search. ``used`` counts judged circulant graphs and drawn
    moves, even if a move is not allowed. ``started`` is the start in seconds of `time.monotonic`.
    The constructor raises GraphError if a limit is not positive.
    """

    seconds: float | None
    evaluations: int | None
    used: int = 0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        seconds = self.seconds
        count = self.evaluations
        if (seconds is not None and not seconds > 0) or (count is not None and count < 1):
            raise GraphError(
                f"seconds = {seconds}, evaluations = {count}: a search needs more than 0 seconds "
                "and at least 1 evaluation; omit a limit that shall not apply"
            )

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def spent(self) -> float:
        """Return the fraction of the budget that is used; the search ends at 1."""
        by_time = self.elapsed / self.seconds if self.seconds else 0.0
        by_count = self.used / self.evaluations if self.evaluations else 0.0
        return max(by_time, by_count)


def grained(x: Any) -> Any:
    """Return a number or array, rounded to multiples of GRAIN."""
    return np.rint(x / GRAIN) * GRAIN


def generator(seed: int) -> np.random.Generator:
    """Return the random number generator of a search.

    :raises GraphError: if the seed is not an integer ≥ 0
    """
    return np.random.default_rng(checked_seed(seed, "a search"))


@dataclass(frozen=True)
class SearchTask:
    """Task of a search: number of nodes, limits of degree and number of edges, rule of weights."""

    n: int
    degree: int
    edges: int
    weights: str

    def exact(self, low: float, high: float) -> float:
        """Return the score that a search maximizes.

        It is r = λ_2/λ_max for the weights "laplacian", and 1 − ρ(W − 11ᵀ/n) for all others. It is
        0 for a graph that is not connected.

        :param low: λ_2, second smallest eigenvalue of :meth:`CandidateGraph.laplacian`
        :param high: λ_max, its largest eigenvalue
        """
        if low <= CONNECTED:
            return 0.0
        return low / high if self.weights == "laplacian" else 1.0 - max(1.0 - low, high - 1.0)

    def score(self, low: float, high: float) -> float:
        """Return the score of :meth:`exact`, rounded to multiples of GRAIN for comparisons."""
        return float(grained(self.exact(low, high)))


class CandidateGraph:
    """Candidate of a search, which is a graph with a cyclic symmetry of order m, a divisor of n.

    It consists of edge orbits: an orbit contains all edges that the symmetry maps to each other.
    `degrees` has the degree of the nodes (a, k) at index a, and `size` is the number of edges.
    `blocks`, (m//2 + 1, b, b), are the blocks of the unweighted Laplacian for the frequencies
    0 … m//2; the blocks of the other frequencies are their complex conjugates.
    """

    def __init__(self, task: SearchTask, m: int) -> None:
        self.task = task
        self.m = m
        self.b = task.n // m
        self.orbits: list[Orbit] = []
        self.index_of: dict[Orbit, int] = {}
        self.degrees = [0] * self.b
        self.size = 0
        turns = np.outer(np.arange(m), np.arange(m // 2 + 1)) % m
        angles = 2 * np.pi / m * turns
        self.phases = np.exp(1j * angles) if m > 2 else np.cos(angles)
        self.blocks = np.zeros((m // 2 + 1, self.b, self.b), self.phases.dtype)

    def canonical(self, a: int, c: int, s: int) -> Orbit:
        """Return the orbit (a, c, s) in a unique form; (c, a, −s) is the same orbit."""
        s %= self.m
        back = -s % self.m
        return (a, c, s) if a < c or (a == c and s <= back) else (c, a, back)

    def _count(self, orbit: Orbit, sign: int) -> None:
        """Add an orbit to the degrees, the number of edges and the blocks of the Laplacian.

        If ``sign`` is −1 instead of 1, subtract the orbit.
        """
        a, c, s = orbit
        # If s and −s are the same shift, each edge would be counted twice: the orbit has m/2 edges.
        half = a == c and 2 * s == self.m
        self.size += sign * (self.m // 2 if half else self.m)
        # This computes the same as the other branch, but faster: most candidates have m = 1.
        if self.m == 1:
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
        """Return whether the number of edges and all degrees are within the limits."""
        return self.size <= self.task.edges and max(self.degrees) <= self.task.degree

    def add(self, orbit: Orbit) -> bool:
        """Add an orbit unless it is a loop or already present; return whether it was added.

        A loop joins nodes to themselves.
        """
        if orbit in self.index_of or (orbit[0] == orbit[1] and orbit[2] == 0):
            return False
        self.index_of[orbit] = len(self.orbits)
        self.orbits.append(orbit)
        self._count(orbit, 1)
        return True

    def remove(self, orbit: Orbit) -> None:
        """Remove an orbit; the last orbit of the list moves to its position."""
        index = self.index_of.pop(orbit)
        last = self.orbits.pop()
        if last != orbit:
            self.orbits[index] = last
            self.index_of[last] = index
        self._count(orbit, -1)

    def apply(self, move: Move) -> bool:
        """Apply a move and return True, or return False if it is not allowed.

        A move is not allowed if it adds a loop or an orbit that is present, or if the result
        exceeds a limit. The edges then stay as they were, but the order of `orbits` may change.
        """
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
        """Return the undirected edges of the whole graph; node (a, k) has number a·m + k."""
        edges = set()
        for a, c, s in self.orbits:
            for k in range(self.m):
                i = a * self.m + k
                j = c * self.m + (k + s) % self.m
                edges.add((min(i, j), max(i, j)))
        return sorted(edges)

    def laplacian(self) -> np.ndarray:
        """Return the blocks of a Laplacian for frequencies 0 … m//2, (m//2 + 1, b, b).

        It is the unweighted Laplacian for the weights "laplacian", and I − W for all others. The
        blocks are real for m ≤ 2, and complex otherwise.
        """
        smallest = min(self.degrees)
        largest = max(self.degrees)
        if self.task.weights == "laplacian":
            return self.blocks
        if self.task.weights == "max-degree" or smallest == largest:
            return self.blocks / (1 + largest)
        degrees = np.array(self.degrees)
        weights = 1.0 / (1 + np.maximum(degrees[:, None], degrees[None, :]))
        blocks = self.blocks * weights
        diagonal = np.arange(self.b)
        # Every row of the block of frequency 0 has to sum to zero, including loops.
        shift = blocks[0].sum(axis=1).real
        blocks[:, diagonal, diagonal] -= shift
        return blocks

    def extremes(self) -> tuple[float, float]:
        """Return λ_2 and λ_max, the second smallest and the largest eigenvalue of `laplacian`."""
        values = np.linalg.eigvalsh(self.laplacian())
        low = values[0, 1] if self.b > 1 else np.inf
        if self.m > 1:
            low = min(low, values[1:, 0].min())
        return float(low), float(values[:, -1].max())


def fill(
    plan: CandidateGraph, rng: np.random.Generator, tree_degree: int = 2, tries: int = 2000
) -> None:
    """Add random orbits within the limits, preferably at nodes of small degree.

    Without symmetry (m = 1), it starts from a balanced tree, so that the graph is connected.

    :param plan: candidate to add to
    :param rng: random number generator
    :param tree_degree: degree of the tree: 2 gives a random path, n − 1 a star
    :param tries: number of consecutive failed attempts after which no more orbits are added
    """
    if plan.m == 1:
        order = rng.permutation(plan.b).tolist()
        for k in range(1, plan.b):
            # The root has `tree_degree` children, and all other nodes one less.
            parent = order[max(0, (k - 2) // (tree_degree - 1)) if tree_degree > 1 else 0]
            plan.add((min(order[k], parent), max(order[k], parent), 0))
    misses = 0
    while misses < tries and plan.size < plan.task.edges:
        by_degree = np.argsort(plan.degrees + rng.random(plan.b), kind="stable")
        a = int(by_degree[0])
        c = int(rng.choice(by_degree)) if misses % 2 else int(by_degree[1 % plan.b])
        orbit = plan.canonical(a, c, int(rng.integers(plan.m)))
        misses = 0 if plan.apply(([], [orbit])) else misses + 1


def random_move(plan: CandidateGraph, rng: np.random.Generator) -> Move | None:
    """Return a random move, or None if the drawn move would add the same orbit twice.

    A move exchanges ends of two orbits, changes the shift of an orbit, moves an orbit to other
    nodes, or adds an orbit if there are fewer edges than allowed. `CandidateGraph.apply` finds out
    whether the move is allowed.

    :param plan: candidate, which is not changed
    :param rng: random number generator
    """
    orbits = plan.orbits
    m = plan.m
    kind = rng.random()
    i, j = rng.integers(len(orbits), size=2)
    (a, c, _), (e, f, _) = orbits[i], orbits[j]
    if kind < 0.5 and i != j:
        if rng.random() < 0.5:
            e, f = f, e
        s, t = rng.integers(m, size=2)
        first = plan.canonical(a, f, int(s))
        second = plan.canonical(e, c, int(t))
        return ([orbits[i], orbits[j]], [first, second]) if first != second else None
    if kind < 0.8 and m > 1:
        return [orbits[i]], [plan.canonical(a, c, int(rng.integers(m)))]
    x, y = rng.integers(plan.b, size=2)
    new = plan.canonical(int(x), int(y), int(rng.integers(m)))
    spare = plan.size + m <= plan.task.edges
    return ([] if spare and rng.random() < 0.5 else [orbits[i]]), [new]


class Screen:
    """Estimated change of a candidate's score by each possible edge.

    It is computed to first order, for candidates without symmetry only (m = 1).
    """

    def __init__(self, plan: CandidateGraph) -> None:
        values, vectors = np.linalg.eigh(plan.laplacian()[0])
        low = values[1]
        high = values[-1]
        # The lower limit prevents division by rounding errors if λ_2 = 0.
        width = max(0.1 * low, NARROW)
        rises = self._change(values - low, vectors, skip=1, width=width)
        tops = self._change(high - values, vectors, skip=0, width=width)
        if plan.task.weights == "laplacian":
            self.gain = (rises - low / high * tops) / high
        else:
            # Either λ_2 or λ_max determines ρ. The weights of both gains depend on which is closer
            # to it.
            binding = 1.0 / (1.0 + np.exp(np.clip((low + high - 2.0) / 0.05, -50, 50)))
            self.gain = binding * rises - (1.0 - binding) * tops
        self.taken = np.eye(plan.b, dtype=bool)
        # This is a copy, because each trial changes the order of the candidate's list.
        self.orbits = list(plan.orbits)
        self.ends = np.array(self.orbits, np.int64)[:, :2]
        self.taken[self.ends[:, 0], self.ends[:, 1]] = True
        self.taken[self.ends[:, 1], self.ends[:, 0]] = True

    @staticmethod
    def _change(gaps: np.ndarray, vectors: np.ndarray, skip: int, width: float) -> np.ndarray:
        """Return the change of an eigenvalue by each edge ij, Σ_k p_k (v_ki − v_kj)², (b, b).

        The sum includes eigenvalues close to it, with weights p_k ~ exp(−gap_k/width).

        The sum by which p is normalized leaves out the first `skip` vectors, but the result
        includes them: the constant vector (skip = 1) adds nothing to differences, and if λ_2 = 0 it
        cannot be distinguished from the other vectors of its eigenspace.

        :param gaps: distance ≥ 0 of each eigenvalue from the eigenvalue whose change is returned,
            in ascending order of the eigenvalues, (b,); a negative distance counts as 0
        :param vectors: eigenvectors v_k as columns, in the same order, (b, b)
        :param skip: number of leading vectors that do not count in the sum of the weights
        :param width: distance at which the weight has fallen to 1/e
        """
        p = np.exp(-np.clip(gaps / width, 0.0, 50.0))
        product = (vectors * (p / p[skip:].sum())) @ vectors.T
        square = product.diagonal()
        return square[:, None] + square[None, :] - 2 * product

    def move(self, plan: CandidateGraph, rng: np.random.Generator, heat: float) -> Move | None:
        """Return the most promising of `SAMPLE` random moves, or None if none of them is allowed.

        If several moves are equally good, the first of them is returned.

        :param plan: candidate from which this object was made
        :param rng: random number generator
        :param heat: scale of the Gumbel noise that is added to each estimated gain, in units of the
            score
        """
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
        """Sample moves that replace edges ac and ef by af and ec, which changes no degree.

        The parameters and the result are described in :meth:`_puts`.
        """
        i, j = rng.integers(len(self.ends), size=(2, SAMPLE))
        (a, c), (e, f) = self.ends[i].T, self.ends[j].T
        flip = rng.random(SAMPLE) < 0.5
        e, f = np.where(flip, f, e), np.where(flip, e, f)
        return i, (j,), ((a, f), (e, c)), i != j

    def _puts(self, plan: CandidateGraph, degrees: np.ndarray, rng: np.random.Generator) -> tuple:
        """Sample moves that replace edge ac by an edge xy between nodes of small degree.

        Without ac, the degrees of x and y are below the largest that is allowed.

        :param plan: candidate
        :param degrees: degree of each node of the candidate, (b,)
        :param rng: random number generator
        :return: index in `orbits` of the first removed edge; indices of further removed edges; both
            ends of each added edge; and a mask of the moves that are allowed as far as degrees and
            removed edges decide. Each array has one element per move, (SAMPLE,)
        """
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
    on_accepted: Callable[[CandidateGraph, float], None],
) -> None:
    """Anneal a candidate until a fraction of the budget is spent.

    A move whose score is equal or larger, and thus better, is always accepted. A smaller score is
    accepted at random, and less often at a lower temperature.

    :param plan: candidate, changed in place; at the end, it is the last accepted candidate, which
        need not be the best one
    :param rng: random number generator
    :param budget: budget of the search
    :param until: used fraction of the budget at which annealing ends
    :param heat: temperatures at the start and at the end, in units of the score
    :param on_accepted: function that is called as on_accepted(plan, score) for each accepted
        candidate, and for ``plan`` at the start. It must copy a candidate that it keeps
    """
    current = plan.task.score(*plan.extremes())
    on_accepted(plan, current)
    start = budget.spent()
    screen = None
    while (spent := budget.spent()) < until:
        progress = (spent - start) / (until - start)
        temperature = heat[0] * (heat[1] / heat[0]) ** progress
        if plan.m == 1 and rng.random() < 0.8:
            screen = screen or Screen(plan)
            move = screen.move(plan, rng, temperature)
        else:
            move = random_move(plan, rng)
        budget.used += 1
        if move is None or not plan.apply(move):
            continue
        score = plan.task.score(*plan.extremes())
        # Draw for every judged candidate: later random numbers must not depend on a comparison.
        if rng.random() < math.exp(min(0.0, (score - current) / temperature)):
            current = score
            screen = None
            on_accepted(plan, score)
        else:
            plan.apply((move[1], move[0]))
