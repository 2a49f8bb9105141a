"""Rules that assign weights to the edges of a graph, by name.

A rule is a function that returns a round with the same edges and new weights. All rules except
"uniform" and "push" need undirected edges and raise GraphError for other rounds. In this module,
d_i is the number of in-neighbours of node i, not counting the node itself. L = D − A is the
Laplacian of undirected edges, with the eigenvalues λ_1 ≥ … ≥ λ_{n−1} > λ_n = 0, and J = 11ᵀ/n.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from mpigossip.config.toml import near
from mpigossip.graphs.base import Drawn, Graph, GraphError, static
from mpigossip.graphs.rounds import Circulant, Round, SparseMatrix, as_sparse


def links(graph: Graph) -> Any:
    """Count the messages from each node (row) to each other node (column) in all rounds.

    Each different round of a graph counts once; for a drawn graph, these are its first rounds.

    :return: a scipy csr_array of shape (n, n)
    """
    from scipy.sparse import csr_array

    rounds = [as_sparse(r) for r in graph.schedule.rounds]
    ends = np.concatenate([(r.indices, r.edge_receivers) for r in rounds], axis=1)
    return csr_array((np.ones(ends.shape[1]), ends), (graph.n, graph.n))


def _undirected(r: Round, rule: str) -> None:
    """Check that all edges of a round are undirected.

    :param r: round
    :param rule: name of the rule that requires this, for the message
    :raises GraphError: if some edge is directed
    """
    if isinstance(r, Circulant):
        is_undirected = set(r.offsets) == {r.n - o for o in r.offsets}
    else:
        transposed = r.transposed
        is_undirected = np.array_equal(r.indptr, transposed.indptr) and np.array_equal(
            r.indices, transposed.indices
        )
    if not is_undirected:
        raise GraphError(
            f'weights "{rule}" need undirected edges, but this graph is directed; '
            'use "uniform" (rows sum to one) or "push" (columns sum to one)'
        )


def _with(r: Round, values: np.ndarray | float) -> Round:
    """Return a round with the edges of ``r`` and new weights; own weights make rows sum to one.

    :param r: round
    :param values: weight of each offset of a circulant round, or of each edge
    """
    if isinstance(r, Circulant):
        weights = np.broadcast_to(values, r.degree)
        return Circulant(r.n, float(1.0 - weights.sum()), r.offsets, tuple(weights.tolist()))
    return SparseMatrix.from_edges(r.n, r.edge_receivers, r.indices, values)


def uniform(r: Round) -> Round:
    """Return the round with W[i, j] = W[i, i] = 1/(1 + d_i), so that rows sum to one.

    d_i is the number of in-neighbours of node i. Each node takes the mean of its own vector and the
    received vectors.
    """
    if isinstance(r, Circulant):
        return _with(r, 1.0 / (1 + r.degree))
    return _with(r, 1.0 / (1 + np.diff(r.indptr)[r.edge_receivers]))


def push(r: Round) -> Round:
    """Return the round with W[i, j] = W[j, j] = 1/(1 + out-degree of j): columns sum to one.

    Node j splits its vector evenly between itself and its out-neighbours. Push-sum needs these
    weights (Assran et al., Stochastic Gradient Push, ICML 2019).
    """
    return uniform(r.transposed).transposed


def max_degree(r: Round) -> Round:
    """Return the round with W[i, j] = 1/(1 + largest degree of all nodes), doubly stochastic."""
    _undirected(r, "max-degree")
    return _with(r, 1.0 / (1 + r.degree))


def metropolis_hastings(r: Round) -> Round:
    """Return the round with W[i, j] = 1/(1 + max(d_i, d_j)), where d_i is the degree of node i.

    These weights are symmetric and non-negative, and depend on neighbours only.
    """
    _undirected(r, "metropolis-hastings")
    if isinstance(r, Circulant):
        return _with(r, 1.0 / (1 + r.degree))
    degrees = np.diff(r.indptr)
    return _with(r, 1.0 / (1 + np.maximum(degrees[r.edge_receivers], degrees[r.indices])))


def laplacian_spectrum(r: Round) -> np.ndarray:
    """Return the eigenvalues of the unweighted Laplacian of a round's edges, ascending, (n,)."""
    if isinstance(r, Circulant):
        unit = Circulant(r.n, 0.0, r.offsets, (1.0,) * r.degree)
        return np.sort(r.degree - unit.eigenvalues().real)
    matrix = np.diag(np.diff(r.indptr).astype(float))
    matrix[r.edge_receivers, r.indices] = -1.0
    return np.linalg.eigvalsh(matrix)


def laplacian(r: Round) -> Round:
    """Return the round with W = I − αL and the best constant α, where L is the Laplacian.

    Let λ_1 be the largest and λ_{n−1} the smallest non-zero eigenvalue of L, and r = λ_{n−1}/λ_1.
    The constant α = 2/(λ_1 + λ_{n−1}) gives ρ(W − 11ᵀ/n) = (1−r)/(1+r) for a connected graph (Xiao
    and Boyd, Fast linear iterations for distributed averaging, 2004; Jameel et al., PAKDD 2020).
    The own weight of a node of degree d is 1 − αd and may be negative; the graph then has the fact
    "signed". A graph that is not connected averages each of its components in this way, and one
    without edges has W = I.
    """
    _undirected(r, "laplacian")
    spectrum = laplacian_spectrum(r)
    nonzero = spectrum[spectrum > 1e-9 * max(1.0, spectrum[-1])]
    return _with(r, 2.0 / (nonzero[0] + nonzero[-1]) if len(nonzero) else 0.0)


def fmmc(r: Round) -> Round:
    """Return the round of the fastest mixing Markov chain.

    Its weights minimize ρ(W − 11ᵀ/n) over symmetric W ≥ 0 (Boyd, Diaconis, Xiao, SIAM Review 2004).
    They are the solution of a semidefinite program, which cvxpy solves.

    :raises GraphError: if an edge is directed, cvxpy is not installed, or finds no solution
    """
    _undirected(r, "fmmc")
    return _solved(r, signed=False)


def fdla(r: Round) -> Round:
    """Return the round of the fastest distributed linear averaging.

    Its weights minimize ρ(W − 11ᵀ/n) over all symmetric W (Xiao and Boyd 2004). It is never slower
    than the rule "fmmc", but weights may be negative, which the fact "signed" states.

    :raises GraphError: if an edge is directed, cvxpy is not installed, or finds no solution
    """
    _undirected(r, "fdla")
    return _solved(r, signed=True)


@lru_cache(maxsize=32)
def _solved(r: Round, signed: bool) -> Round:
    """Return the round whose weights minimize ρ(W − 11ᵀ/n) over symmetric W.

    The semidefinite program is: minimize s with −sI ⪯ I − A diag(w) Aᵀ − 11ᵀ/n ⪯ sI, where w are
    the weights and A is the (n, edges) incidence matrix.

    :param r: round
    :param signed: whether weights may be negative
    :raises GraphError: if cvxpy is not installed or finds no solution
    """
    try:
        import cvxpy
    except ImportError as error:
        raise GraphError(
            'weights "fmmc" and "fdla" need the convex solver cvxpy, which isn\'t installed; '
            'pip install \'mpigossip[study]\', or use "laplacian" or "metropolis-hastings"'
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
    deviation = np.eye(r.n) - 1.0 / r.n - incidence @ cvxpy.diag(w) @ incidence.T
    limits = [deviation << s * np.eye(r.n), -s * np.eye(r.n) << deviation]
    if not signed:
        limits += [w >= 0, np.abs(incidence) @ w <= 1]
    cvxpy.Problem(cvxpy.Minimize(s), limits).solve(solver=cvxpy.CLARABEL)
    if w.value is None:
        raise GraphError(
            f'weights "{"fdla" if signed else "fmmc"}": the convex solver found no solution for '
            f'{r!r}; set graph.weights = "laplacian" or "metropolis-hastings"'
        )
    values = np.asarray(w.value)
    if not signed:
        values = np.maximum(values, 0.0)
        values /= max(1.0, (np.abs(incidence) @ values).max())
    solution = SparseMatrix.from_edges(r.n, [*to, *source], [*source, *to], [*values, *values])
    if not isinstance(r, Circulant):
        return solution
    # The problem is convex and looks the same from every node, so the average of its solution over
    # all nodes is a solution, too.
    matrix = solution.matrix()
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
"""Rule of weights of each name, as in `graph.weights`."""


def rule(name: str) -> Callable[[Round], Round]:
    """Return the rule of this name.

    :raises GraphError: if there is no such rule; the message suggests a similar name
    """
    if name not in WEIGHTS:
        raise GraphError(f'weights "{name}" are unknown; {near(str(name), WEIGHTS)}')
    return WEIGHTS[name]


def reweighted(graph: Graph, name: str) -> Graph:
    """Return the graph with the edges of each round weighted by the rule ``name``.

    :raises GraphError: if there is no such rule, if the rule cannot be applied to a round, if the
        rounds are drawn, or if the nodes have weights
    """
    change = rule(name)
    if isinstance(graph.schedule, Drawn):
        raise GraphError(
            f'graph "{graph.name}" is drawn again in each round and keeps its own weights; '
            f'remove weights = "{name}"'
        )
    if graph.node_weights:
        raise GraphError(
            f'graph "{graph.name}": its nodes have weights, which the rule "{name}" would replace: '
            "apply the rule first, and then weigh the nodes"
        )
    options = {**dict(graph.options), "weights": name}
    result = replace(graph, schedule=graph.schedule.mapped(change))
    return result.renamed(graph.name, **options)


def undirected(
    n: int, edges: Iterable[tuple[int, int]], weights: str = "metropolis-hastings"
) -> Graph:
    """Return the static graph with the given edges, weighted by a rule.

    :param n: number of nodes
    :param edges: undirected edges (i, j), each given once
    :param weights: name of the rule, as in `graph.weights`
    :raises GraphError: if there is no such rule, or if it finds no weights
    """
    pairs = np.array(sorted(edges), np.int64).reshape(-1, 2)
    to, source = np.concatenate((pairs, pairs[:, ::-1])).T
    return static(rule(weights)(SparseMatrix.from_edges(n, to, source, 1.0)))
