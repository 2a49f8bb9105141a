"""Weights for the edges of a graph, by name.

Each rule takes a round for its edges alone and gives the round with new weights. d_i is the
number of in-neighbours of node i (without itself), L = D − A the Laplacian of undirected edges
with eigenvalues λ_1 ≥ … ≥ λ_{n−1} > λ_n = 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from mpigossip.config.toml import near
from mpigossip.graphs.base import Drawn, Graph, GraphError, static
from mpigossip.graphs.rounds import Circulant, Round, Sparse


def as_sparse(r: Round) -> Sparse:
    """The same round as sparse rows."""
    if isinstance(r, Sparse):
        return r
    to = np.repeat(np.arange(r.n), r.degree)
    source = (to.reshape(r.n, -1) + np.array(r.offsets, np.int64)).ravel() % r.n
    return Sparse.from_edges(r.n, to, source, np.tile(r.weights, r.n), np.full(r.n, r.own))


def links(graph: Graph) -> Any:
    """Number of messages from each node (row) to each (column) in the schedule's rounds, (n, n).

    As scipy's csr_array.
    """
    from scipy.sparse import csr_array

    rounds = [as_sparse(r) for r in graph.schedule.rounds]
    ends = np.concatenate([(r.indices, r.edge_receivers) for r in rounds], axis=1)
    return csr_array((np.ones(ends.shape[1]), ends), (graph.n, graph.n))


def _undirected(r: Round, rule: str) -> None:
    """Reject edges that go one way only."""
    if isinstance(r, Circulant):
        both = set(r.offsets) == {r.n - o for o in r.offsets}
    else:
        back = r.transposed
        both = np.array_equal(r.indptr, back.indptr) and np.array_equal(r.indices, back.indices)
    if not both:
        raise GraphError(
            f'weights "{rule}" need edges that go both ways, and this graph is directed; '
            '"uniform" (rows sum to one) and "push" (columns do) are for directed graphs'
        )


def _with(r: Round, values: np.ndarray | float) -> Round:
    """The edges of r with these weights (one per offset or edge); own weights fill up the rows."""
    if isinstance(r, Circulant):
        weights = np.broadcast_to(values, r.degree)
        return Circulant(r.n, float(1.0 - weights.sum()), r.offsets, tuple(weights.tolist()))
    return Sparse.from_edges(r.n, r.edge_receivers, r.indices, values)


def uniform(r: Round) -> Round:
    """W[i, j] = W[i, i] = 1/(1 + d_i): the plain mean of what arrives; rows sum to one."""
    if isinstance(r, Circulant):
        return _with(r, 1.0 / (1 + r.degree))
    return _with(r, 1.0 / (1 + np.diff(r.indptr)[r.edge_receivers]))


def push(r: Round) -> Round:
    """W[i, j] = W[j, j] = 1/(1 + out-degree of j): j splits evenly; columns sum to one.

    What push-sum needs (Assran et al., Stochastic Gradient Push, ICML 2019).
    """
    return uniform(r.transposed).transposed


def max_degree(r: Round) -> Round:
    """W[i, j] = 1/(1 + max d): symmetric, so doubly stochastic."""
    _undirected(r, "max-degree")
    return _with(r, 1.0 / (1 + r.degree))


def metropolis_hastings(r: Round) -> Round:
    """W[i, j] = 1/(1 + max(d_i, d_j)): symmetric, non-negative, needs only local knowledge."""
    _undirected(r, "metropolis-hastings")
    if isinstance(r, Circulant):
        return _with(r, 1.0 / (1 + r.degree))
    degrees = np.diff(r.indptr)
    return _with(r, 1.0 / (1 + np.maximum(degrees[r.edge_receivers], degrees[r.indices])))


def laplacian_spectrum(r: Round) -> np.ndarray:
    """Eigenvalues of the Laplacian of r's undirected edges (unit weights), ascending, (n,)."""
    if isinstance(r, Circulant):
        unit = Circulant(r.n, 0.0, r.offsets, (1.0,) * r.degree)
        return np.sort(r.degree - unit.eigenvalues().real)
    matrix = np.diag(np.diff(r.indptr).astype(float))
    matrix[r.edge_receivers, r.indices] = -1.0
    return np.linalg.eigvalsh(matrix)


def laplacian(r: Round) -> Round:
    """W = I − αL with the best constant α = 2/(λ_1 + λ_{n−1}).

    Then ρ(W − J) = (1−r)/(1+r) with r = λ_{n−1}/λ_1.
    Xiao and Boyd, Fast linear iterations for distributed averaging, 2004; Jameel et al., PAKDD
    2020. Own weights 1 − α d_i can be negative: the graph then has the fact "signed". Of a graph
    in several parts λ_{n−1} is the least eigenvalue that isn't zero.
    """
    _undirected(r, "laplacian")
    spectrum = laplacian_spectrum(r)
    nonzero = spectrum[spectrum > 1e-9 * max(1.0, spectrum[-1])]
    return _with(r, 2.0 / (nonzero[0] + nonzero[-1]) if len(nonzero) else 0.0)


def fmmc(r: Round) -> Round:
    """Fastest mixing Markov chain: minimise ρ(W − J) over symmetric W ≥ 0 on these edges.

    Boyd, Diaconis, Xiao, SIAM Review 2004; a semidefinite program, solved by cvxpy.
    """
    _undirected(r, "fmmc")
    return _solved(r, signed=False)


def fdla(r: Round) -> Round:
    """Fastest distributed linear averaging: minimise ρ(W − J) over symmetric W of any sign.

    Xiao and Boyd 2004; never slower than "fmmc", possibly with negative weights ("signed").
    """
    _undirected(r, "fdla")
    return _solved(r, signed=True)


@lru_cache(maxsize=32)
def _solved(r: Round, signed: bool) -> Round:
    """Minimise s with −sI ⪯ I − A diag(w) Aᵀ − J ⪯ sI, A the (n, edges) incidence matrix."""
    try:
        import cvxpy
    except ImportError as error:
        raise GraphError(
            'weights "fmmc" and "fdla" need the convex solver cvxpy, which isn\'t installed; '
            'pip install \'mpigossip[study]\', or take "laplacian" or "metropolis-hastings"'
        ) from error
    edges = as_sparse(r)
    one_way = np.flatnonzero(edges.edge_receivers < edges.indices)
    to = edges.edge_receivers[one_way]
    source = edges.indices[one_way]
    incidence = np.zeros((r.n, len(to)))
    incidence[to, np.arange(len(to))] = 1.0
    incidence[source, np.arange(len(to))] = -1.0
    w = cvxpy.Variable(len(to))
    s = cvxpy.Variable()
    rest = np.eye(r.n) - 1.0 / r.n - incidence @ cvxpy.diag(w) @ incidence.T
    limits = [rest << s * np.eye(r.n), -s * np.eye(r.n) << rest]
    if not signed:
        limits += [w >= 0, np.abs(incidence) @ w <= 1]
    cvxpy.Problem(cvxpy.Minimize(s), limits).solve(solver=cvxpy.CLARABEL)
    if w.value is None:
        raise GraphError(f'the convex solver found no weights for {r!r}; take "laplacian"')
    values = np.asarray(w.value)
    if not signed:
        values = np.maximum(values, 0.0)
        values /= max(1.0, (np.abs(incidence) @ values).max())
    made = Sparse.from_edges(r.n, [*to, *source], [*source, *to], [*values, *values])
    if not isinstance(r, Circulant):
        return made
    # the problem is convex and looks alike from every node: so may its solution be made
    matrix = made.matrix()
    nodes = np.arange(r.n)
    return _with(r, np.array([matrix[nodes, (nodes + o) % r.n].mean() for o in r.offsets]))


WEIGHTS: dict[str, Callable[[Round], Round]] = {
    "uniform": uniform,
    "push": push,
    "max-degree": max_degree,
    "metropolis-hastings": metropolis_hastings,
    "laplacian": laplacian,
    "fmmc": fmmc,
    "fdla": fdla,
}
"""Every rule by name."""


def rule(name: str) -> Callable[[Round], Round]:
    """The rule of this name; GraphError with a near miss otherwise."""
    if name not in WEIGHTS:
        raise GraphError(f'weights "{name}" are unknown; {near(str(name), WEIGHTS)}')
    return WEIGHTS[name]


def reweighted(graph: Graph, name: str) -> Graph:
    """The graph with each round's edges weighed by this rule."""
    change = rule(name)
    if isinstance(graph.schedule, Drawn):
        raise GraphError(
            f'graph "{graph.name}" is drawn anew each round and keeps its own weights; leave '
            f'weights = "{name}" out'
        )
    options = {**dict(graph.options), "weights": name}
    made = replace(graph, schedule=graph.schedule.mapped(change))
    return made.renamed(graph.name, **options)


def undirected(
    n: int, edges: Iterable[tuple[int, int]], weights: str = "metropolis-hastings"
) -> Graph:
    """The static graph of undirected edges (each pair once), weighed by a rule."""
    pairs = np.array(sorted(edges), np.int64).reshape(-1, 2)
    to, source = np.concatenate((pairs, pairs[:, ::-1])).T
    return static(rule(weights)(Sparse.from_edges(n, to, source, 1.0)))
