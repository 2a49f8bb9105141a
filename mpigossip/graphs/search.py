"""Search for the graph that averages fastest within a limit on the degree or number of edges.

The default objective follows Jameel, Jawed, Schmidt-Thieme (Optimal Topology Search for Fast Model
Averaging in Decentralized Parallel SGD, PAKDD 2020): find the graph whose Laplacian weights average
fastest. Let λ_1 be the largest and λ_{n−1} the smallest non-zero eigenvalue of the Laplacian. The
best graph has the largest ratio r = λ_{n−1}/λ_1, because ρ(W − 11ᵀ/n) = (1−r)/(1+r). The search
method is described in `annealing.py`.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import combinations, islice
from pathlib import Path

import numpy as np

from mpigossip.graphs.annealing import (
    GRAIN,
    Budget,
    CandidateGraph,
    SearchTask,
    anneal,
    fill,
    generator,
)
from mpigossip.graphs.base import Graph, GraphError
from mpigossip.graphs.weights import undirected

WEIGHTS = ("laplacian", "metropolis-hastings", "max-degree")
"""Rules of weights for which a graph can be searched."""

HOT = 0.02
COLD = 0.0005
"""Temperatures at the start (HOT) and at the end of annealing, in units of the score."""

Progress = Callable[[float, float, int], None]
"""Function that a search calls at most twice per second, when it accepts a candidate.

Its arguments are the used fraction of the budget, the best score, and the number of judged graphs.
"""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: the edges, their quality, and how they were found.

    `score` is λ_{n−1}/λ_1, the ratio of the smallest non-zero eigenvalue of the Laplacian to the
    largest, for the weights "laplacian", and 1 − ρ(W − 11ᵀ/n) for other weights. `spectrum` holds
    the eigenvalues of the unweighted Laplacian, ascending. `history` has a row (seconds, judged
    graphs, score) for each improvement. `degree` and `budget` are the largest degree and the
    largest number of edges that were allowed, and may be larger than in the graph. `seconds` and
    `evaluations` are the time and the number of judged graphs that the search used. `interrupted`
    is whether Ctrl-C ended the search.
    """

    n: int
    edges: tuple[tuple[int, int], ...]
    weights: str
    score: float
    degree: int
    budget: int
    spectrum: tuple[float, ...]
    history: tuple[tuple[float, int, float], ...]
    seed: int
    seconds: float
    evaluations: int
    interrupted: bool = False

    def graph(self) -> Graph:
        """Return the graph, with the weights that the search optimized for."""
        return undirected(self.n, self.edges, self.weights).renamed("searched")


@dataclass
class _Best:
    """Best candidate of a search so far; it also records improvements and reports progress."""

    task: SearchTask
    budget: Budget
    progress: Progress | None
    score: float = 0.0
    edges: list[tuple[int, int]] = field(default_factory=list)
    history: list[tuple[float, int, float]] = field(default_factory=list)
    reported_s: float = -1.0

    def keep_better(self, plan: CandidateGraph | list[tuple[int, int]], score: float) -> None:
        """Keep a candidate if its score is larger than the best by more than the rounding unit.

        Progress is reported if half a second has passed since the last report.

        :param plan: the candidate, or its edges
        :param score: its score, as `SearchTask.score` returns it
        """
        if score > self.score + 1.5 * GRAIN:
            # Set the edges first: if Ctrl-C interrupts here, they are at least as good as the
            # score.
            self.edges = plan.edges() if isinstance(plan, CandidateGraph) else plan
            self.score = float(score)
            self.history.append((self.budget.elapsed, self.budget.used, float(score)))
        if self.progress and self.budget.elapsed > self.reported_s + 0.5:
            self.reported_s = self.budget.elapsed
            self.progress(min(1.0, self.budget.spent()), self.score, self.budget.used)

    def try_circulants(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Score the circulant graph of each set of jumps; keep the best that has few enough edges.

        A circulant graph with jump s connects each node i with node (i + s) modulo n.
        """
        for jumps, score in _circulants(self.task, sets):
            self.budget.used += 1
            if score > self.score and _size(self.task.n, jumps) <= self.task.edges:
                self.keep_better(_circulant_edges(self.task.n, jumps), score)


def task_of(n: int, degree: int | None, edges: int | None, weights: str) -> SearchTask:
    """Return the task of a search, after checking its limits.

    :param n: number of nodes
    :param degree: largest number of neighbours of a node; None: no limit
    :param edges: largest number of edges; None: no limit
    :param weights: name of the rule of weights, one of `WEIGHTS`
    :raises GraphError: if no connected graph fits these limits, if neither limit is given, if a
        limit is larger than any graph of n nodes reaches, or if the rule is not one of `WEIGHTS`
    """
    if n < 2:
        raise GraphError(f"n = {n}: a search needs at least 2 nodes; raise n")
    if degree is None and edges is None:
        raise GraphError("a search needs a budget: give the degree, the number of edges, or both")
    if weights not in WEIGHTS:
        raise GraphError(
            f'weights = "{weights}" can\'t be used in a search; choose one of {", ".join(WEIGHTS)}'
        )
    for value, what, limit in ((degree, "degree", n - 1), (edges, "edges", n * (n - 1) // 2)):
        if value is not None and value > limit:
            raise GraphError(
                f"{what} = {value}: a graph of {n} nodes has at most {limit}; reduce {what}"
            )
    degree = n - 1 if degree is None else degree
    largest_edges = n * degree // 2
    edges = largest_edges if edges is None else min(edges, largest_edges)
    if degree < min(2, n - 1):
        raise GraphError(
            f"no connected graph of {n} nodes has degree {degree}; allow at least {min(2, n - 1)}"
        )
    if edges < n - 1:
        raise GraphError(
            f"{edges} edges can't connect {n} nodes; allow at least {n - 1} (degree {degree} "
            f"allows {largest_edges})"
        )
    return SearchTask(n, degree, edges, weights)


def search(
    n: int,
    *,
    degree: int | None = None,
    edges: int | None = None,
    weights: str = "laplacian",
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for the connected graph of n nodes that averages fastest, within limits.

    Ctrl-C ends the search early with the best graph so far.

    :param n: number of nodes
    :param degree: largest number of neighbours of a node; None: no limit
    :param edges: largest number of edges; None: no limit. At least one of the two has to be given
    :param weights: rule of weights. "laplacian": maximize λ_{n−1}/λ_1, the ratio of the smallest
        non-zero eigenvalue of the Laplacian to the largest; other rules: minimize ρ(W − 11ᵀ/n) for
        their W
    :param seconds: time after which the search ends; None: no limit, but 60 s if ``evaluations`` is
        None, too
    :param evaluations: number of judged graphs after which the search ends. With this limit alone,
        the result depends on the seed only, not on the processor
    :param seed: seed of all random numbers
    :param progress: function that is called with the progress; see `Progress`
    :raises GraphError: if an argument is invalid, if no connected graph fits the limits, or if the
        search ended before it found one
    """
    task = task_of(n, degree, edges, weights)
    if seconds is None and evaluations is None:
        seconds = 60.0
    budget = Budget(seconds, evaluations)
    best = _Best(task, budget, progress)
    random = generator(seed)
    interrupted = False
    try:
        _run(task, budget, best, random)
    except KeyboardInterrupt:
        interrupted = True
    if not best.edges:
        raise GraphError(
            f"the search of {n} nodes with at most {task.edges} edges ended after "
            f"{budget.elapsed:.3g} s without a connected graph; increase seconds, evaluations or "
            "edges"
        )
    return _result(task, best, seed, interrupted)


def _result(task: SearchTask, best: _Best, seed: int, interrupted: bool) -> SearchResult:
    plan = _plan(task, best.edges)
    return SearchResult(
        n=task.n,
        edges=tuple((int(i), int(j)) for i, j in best.edges),
        weights=task.weights,
        score=float(task.exact(*plan.extremes())),
        degree=task.degree,
        budget=task.edges,
        spectrum=tuple(np.linalg.eigvalsh(plan.blocks[0]).tolist()),
        history=tuple(best.history),
        seed=seed,
        seconds=best.budget.elapsed,
        evaluations=best.budget.used,
        interrupted=interrupted,
    )


def _run(task: SearchTask, budget: Budget, best: _Best, rng: np.random.Generator) -> None:
    """Score circulant graphs, then anneal candidates without symmetry and with cyclic symmetries.

    Candidates without symmetry are annealed before and after those with a symmetry. Finally, the
    best graph is annealed at a low temperature. If the limits allow the complete graph, only random
    candidates are scored, because filling them up to the limits gives the complete graph.

    :param task: task of the search
    :param budget: budget, whose used amounts are updated
    :param best: best candidate so far, updated
    :param rng: random number generator
    """
    n = task.n
    path = CandidateGraph(task, 1)
    tree = CandidateGraph(task, 1)
    fill(path, rng, tree_degree=min(2, n - 1))
    fill(tree, rng, tree_degree=task.degree)
    for plan in (tree, path):
        best.keep_better(plan, task.score(*plan.extremes()))
    start = tree if best.edges == tree.edges() else path
    if task.edges == n * (n - 1) // 2:
        return
    best.try_circulants(islice(_jump_sets(n, task.degree), 20_000))
    anneal(start, rng, budget, 0.25, (HOT, COLD), best.keep_better)
    orders = [m for m in range(2, n // 2 + 1) if n % m == 0]
    windows = [(m, 0.25 + 0.4 * (k + 1) / len(orders)) for k, m in enumerate(orders)]
    for m, until in (*windows, (1, 0.9)):
        if budget.spent() >= until:
            continue
        plan = CandidateGraph(task, m)
        fill(plan, rng)
        if plan.orbits:
            anneal(plan, rng, budget, until, (HOT, COLD), best.keep_better)
    anneal(_plan(task, best.edges), rng, budget, 1.0, (HOT / 10, COLD / 2), best.keep_better)


def _plan(task: SearchTask, edges: list[tuple[int, int]]) -> CandidateGraph:
    """Return the candidate that has the given edges; it has no symmetry (m = 1)."""
    plan = CandidateGraph(task, 1)
    for i, j in edges:
        plan.add((i, j, 0))
    return plan


def _size(n: int, jumps: tuple[int, ...]) -> int:
    """Return the number of edges of the circulant graph with neighbours at ± each jump."""
    return sum(n // 2 if 2 * jump == n else n for jump in jumps)


def _circulant_edges(n: int, jumps: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = {(i, (i + jump) % n) for jump in jumps for i in range(n)}
    return sorted({(min(i, j), max(i, j)) for i, j in ends})


def _jump_sets(n: int, degree: int) -> Iterable[tuple[int, ...]]:
    """Yield sets of jumps that cover all circulant graphs of a degree.

    A circulant graph with jump s connects each node i with node (i + s) modulo n. Multiplying all
    jumps by a number without a common divisor with n only renumbers the nodes, so only sets with a
    jump that divides n are needed. If n and the degree are odd, there is no such graph, and the
    sets have one neighbour less.
    """
    halves, odd = divmod(degree, 2)
    half = (n // 2,) if odd and n % 2 == 0 else ()
    candidates = range(1, (n - 1) // 2 + 1)
    if not halves:
        yield half
    seen = set()
    for first in (d for d in candidates if n % d == 0):
        for rest in combinations((c for c in candidates if c != first), halves - 1):
            jumps = tuple(sorted((first, *rest)))
            if jumps not in seen:
                seen.add(jumps)
                yield jumps + half


def _circulants(task: SearchTask, sets: Iterable[tuple[int, ...]]) -> Iterable[tuple[tuple, float]]:
    """Yield each set of jumps with the score of its circulant graph.

    The eigenvalues of its Laplacian are λ_k = Σ_jumps (2 − 2 cos(2πk·jump/n)), where the term of
    the jump n/2 counts half.
    """
    n = task.n
    waves = 1.0 - np.cos(2 * np.pi / n * (np.outer(np.arange(n // 2 + 1), np.arange(1, n)) % n))
    for jumps in sets:
        counts = np.array([1.0 if 2 * jump == n else 2.0 for jump in jumps])
        values = waves[1:, np.array(jumps) - 1] @ counts
        scale = 1.0 if task.weights == "laplacian" else 1.0 + counts.sum()
        yield jumps, task.score(values.min() / scale, values.max() / scale)


def search_circulants(
    n: int,
    degree: int,
    *,
    edges: int | None = None,
    weights: str = "laplacian",
    limit: int = 2_000_000,
    progress: Progress | None = None,
) -> SearchResult:
    """Search all circulant graphs of a degree for the one that averages fastest.

    In a circulant graph, each node i has neighbours at the same distances ±s, modulo n. Ctrl-C ends
    the search early with the best graph so far.

    :param n: number of nodes
    :param degree: number of neighbours of each node
    :param edges: largest number of edges; None: no limit
    :param weights: as in :func:`search`
    :param limit: largest number of sets of distances that may be tried
    :param progress: function that is called with the progress; see `Progress`
    :raises GraphError: if an argument is invalid, if n and ``degree`` are odd, if there are more
        sets of distances than ``limit``, or if no graph within the limits is connected
    """
    task = task_of(n, degree, edges, weights)
    if task.degree % 2 and n % 2:
        raise GraphError(
            f"no circulant graph of {n} nodes has the odd degree {degree}; choose an even degree"
        )
    divisors = sum(n % d == 0 for d in range(1, (n - 1) // 2 + 1))
    count = divisors * math.comb(max(0, (n - 1) // 2 - 1), max(0, task.degree // 2 - 1))
    if count > limit:
        raise GraphError(
            f"{count} circulant graphs of {n} nodes and degree {degree} are more than "
            f"limit = {limit}; raise limit, or search all graphs by annealing"
        )
    budget = Budget(None, max(1, count))
    best = _Best(task, budget, progress)
    interrupted = False
    try:
        best.try_circulants(_jump_sets(n, task.degree))
    except KeyboardInterrupt:
        interrupted = True
    if not best.edges:
        raise GraphError(
            f"no circulant graph of {n} nodes, degree {degree} and at most {task.edges} edges is "
            "connected; allow more, or search all graphs"
        )
    return _result(task, best, 0, interrupted)


def save(result: SearchResult, path: str | Path) -> Path:
    """Write the result of a search as JSON, either completely or not at all; return the path.

    :raises GraphError: if the file can't be written, or its suffix is not .json
    """
    from mpigossip.store import StoreError, hdf5

    path = Path(path)
    check_target(path)
    try:
        with hdf5.replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(result)) + "\n")
    except StoreError as error:
        raise GraphError(str(error)) from error
    return path


def check_target(path: Path) -> None:
    """Check the suffix and the folder of a path for `save`; call this before a search.

    :raises GraphError: if the suffix is not .json, or the folder does not exist
    """
    if path.suffix != ".json":
        raise GraphError(f'"{path}": a graph is saved as JSON; use the suffix .json')
    if not path.parent.is_dir():
        raise GraphError(f'can\'t write "{path}": there is no folder "{path.parent}"; create it')
