"""Speed with which a graph averages: spectral gap, consensus rate, rounds to the exact average.

Circulant rounds commute, so the eigenvalues of their product are products of eigenvalues, which the
FFT computes. Most functions treat other graphs as dense matrices for small n, and by iterative
methods of scipy for larger n. In this module, J = 11ᵀ/n is the exact average, ρ the spectral
radius, and Π W = W(t−1) … W(1) W(0) the product of rounds.

If the nodes have weights w, J is 1wᵀ, and J Π W takes the place of J, because rounds may change the
weighted mean: Π W − J Π W is the disagreement that remains. Norms are then the operator norms that
belong to ‖x‖² = n Σ_i w_i x_i².
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import count

import numpy as np

from mpigossip.graphs.base import Graph, GraphError
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.rounds import Circulant, Round, as_sparse
from mpigossip.graphs.weights import links

LARGE = 512
"""Largest number of nodes for which a run computes the spectral gap of its graph, because this
takes long for more nodes.
"""

DENSE = 1024
"""Largest n for which norms of products of non-circulant rounds are computed from dense matrices.
For the spectral radius, on which the spectral gap depends, the limit is twice this number.
"""

COLUMNS = 32
"""Number of columns of W from which the effective number of neighbours is estimated for large n."""

EXACT = 1e-12
BEFORE = 1e-3
"""Limits of ‖Π W − J‖ by which a product is recognized as the exact average. The norm is at least
BEFORE before the round that makes the product exact, and at most EXACT after it. The norm of a
product that only converges to the average takes values between both limits.
"""

VANISHED = 1e-12
"""Spectral radius below which a computed value may be a rounding error of zero."""


def horizon(graph: Graph) -> int:
    """Return the number of rounds to examine: one period, or ⌈log2 n⌉ (≥ 1) if there is none."""
    return graph.period or max(1, rounds_needed(graph.n))


def _circulants(product: list[Round]) -> list[Circulant]:
    """Return the rounds if all of them are circulant, otherwise an empty list."""
    circulants = [r for r in product if isinstance(r, Circulant)]
    return circulants if len(circulants) == len(product) else []


def _largest(product: list[Circulant]) -> float:
    """Return ρ(Π W − J) = ‖Π W − J‖_2 of circulant rounds.

    This is the largest |λ| of Π W, except the eigenvalue of the constant vector.
    """
    values = np.prod([r.eigenvalues()[1:] for r in product], axis=0)
    return float(np.abs(values).max(initial=0.0))


def _rounds(graph: Graph, count: int, start: int = 0) -> list[Round]:
    return [graph.round(start + t) for t in range(count)]


NodeWeights = np.ndarray | None
"""Weights w of the nodes, float64 (n,), which sum to one; None: all nodes have the weight 1/n."""


def _node_weights(graph: Graph) -> NodeWeights:
    return np.array(graph.node_weights) if graph.node_weights else None


def _disagreement(y: np.ndarray, x: np.ndarray, w: NodeWeights) -> np.ndarray:
    """Return what remains of the disagreement of ``x`` in y = Π W x, by rows.

    Without weights, it is y − J x; with weights, it is y − J y.
    """
    return y - (x.mean(axis=0) if w is None else w @ y)


def _remaining(matrix: np.ndarray, w: NodeWeights) -> np.ndarray:
    """Return what remains of disagreement after the product ``matrix`` of rounds, in the norm of w.

    Without weights, it is Π W − J. With weights, it is Π W − J Π W, multiplied by roots of the
    weights, so that its spectral norm is the norm that belongs to the weights.
    """
    if w is None:
        return matrix - 1.0 / len(matrix)
    root = np.sqrt(w)
    return root[:, None] * (matrix - w @ matrix) / root


def eigenvalues(graph: Graph, t: int = 0) -> np.ndarray:
    """Return all n eigenvalues of W(t), complex, in the order of decreasing modulus.

    If W is symmetric, their imaginary parts are exactly zero.
    """
    r = graph.round(t)
    if isinstance(r, Circulant):
        values = r.eigenvalues()
        values = values.real.astype(complex) if r.symmetric() else values
    elif r.symmetric():
        values = np.linalg.eigvalsh(r.matrix()).astype(complex)
    else:
        values = np.linalg.eigvals(r.matrix())
    return values[np.argsort(-np.abs(values), kind="stable")]


def spectral_gap(graph: Graph) -> float:
    """Return the spectral gap 1 − ρ(W − J) of a static graph.

    It is 1 for the complete graph, and 0 if the graph is not connected.

    :raises GraphError: if the graph is not static
    """
    if graph.period != 1:
        raise GraphError(
            f'graph "{graph.name}" varies with the round and has no spectral gap; '
            "compute its consensus rate"
        )
    return 1.0 - consensus_rate(graph)


def consensus_rate(graph: Graph, rounds: int | None = None) -> float:
    """Return the factor by which a round reduces disagreement in the long run.

    For a periodic graph, the factor is ρ(Π W − J)^(1/period), which is 0 if one period computes the
    exact average. For a graph without a period, it is the estimate ‖Π W − J‖_2^(1/rounds) from the
    first rounds.

    :param graph: graph to examine
    :param rounds: number of rounds of the estimate, not used for a graph with a period; None: four
        times the :func:`horizon`
    """
    if graph.n == 1:
        return 0.0
    if graph.period is None:
        count = rounds or 4 * horizon(graph)
        size = residue(graph, count)
        return 0.0 if size < VANISHED else size ** (1 / count)
    # If Π W − J is nilpotent, ρ is 0, but the computed value is a root of the rounding error.
    radius = _radius(_rounds(graph, graph.period), _node_weights(graph))
    return 0.0 if radius < VANISHED else float(radius ** (1 / graph.period))


def _radius(product: list[Round], w: NodeWeights) -> float:
    """Return ρ(Π W − J) of the rounds."""
    if circulants := _circulants(product):
        return _largest(circulants)
    if _exact_after(product, w) is not None:
        return 0.0
    n = product[0].n
    first = as_sparse(product[0])
    symmetric = len(product) == 1 and first.symmetric() and w is None
    if n > 2 * DENSE:
        return _radius_symmetric(first) if symmetric else _radius_arnoldi(product, w)
    matrix = _remaining(_applied(product, np.eye(n)), w)
    solve = np.linalg.eigvalsh if symmetric else np.linalg.eigvals
    return float(np.abs(solve(matrix)).max())


def _applied(product: list[Round], x: np.ndarray) -> np.ndarray:
    for r in product:
        x = r.apply(x)
    return x


def _radius_symmetric(r: Round) -> float:
    """Return ρ(W − J) of a large symmetric round, from its eigenvalues closest to 1 and to −1."""
    from scipy.sparse import csc_array, diags_array
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    r = as_sparse(r)
    edges = csc_array((r.weights, (r.edge_receivers, r.indices)), (r.n, r.n))
    matrix = csc_array(edges + diags_array(r.own))
    common = {"v0": np.random.default_rng(0).standard_normal(r.n), "return_eigenvectors": False}
    try:
        top = eigsh(matrix, k=2, which="LA", ncv=48, maxiter=20, tol=1e-9, **common)
    # The gap of such a graph is small, so it has few edges and its factorization is fast.
    except ArpackNoConvergence:
        top = eigsh(matrix, k=2, sigma=1.0 + 1e-5, **common)
    low = eigsh(matrix, k=1, which="SA", tol=1e-6, **common)
    return float(max(top.min(), abs(low[0])))


def _radius_arnoldi(product: list[Round], w: NodeWeights) -> float:
    """Return ρ(Π W − J) of large rounds, computed by Arnoldi iteration."""
    from scipy.sparse.linalg import LinearOperator, eigs

    n = product[0].n
    start = np.random.default_rng(0).standard_normal(n)
    operator = LinearOperator(
        (n, n),
        matvec=lambda x: _disagreement(_applied(product, x.reshape(n)), x, w),
        dtype=np.float64,
    )
    return float(np.abs(eigs(operator, k=2, which="LM", v0=start, tol=1e-8)[0]).max())


def unreached(graph: Graph) -> tuple[int, int] | None:
    """Return a pair of nodes (j, i) such that no message from j ever reaches i.

    The result is None if the graph is connected (strongly, if edges are directed). Messages
    travel along the edges of all rounds of a period, or of the first few rounds of a drawn graph.
    """
    rounds = list(graph.schedule.rounds)
    if circulants := _circulants(rounds):
        offsets = (offset for c in circulants for offset in c.offsets)
        return None if math.gcd(graph.n, *offsets) == 1 else (0, 1)
    from scipy.sparse import csgraph

    sent = links(graph)
    for edges, forwards in ((sent, True), (sent.T.tocsr(), False)):
        reached = csgraph.breadth_first_order(edges, 0, return_predecessors=False)
        if len(reached) < graph.n:
            other = int(np.setdiff1d(np.arange(graph.n), reached)[0])
            return (0, other) if forwards else (other, 0)
    return None


def residue(graph: Graph, rounds: int | None = None, start: int = 0) -> float:
    """Return ‖W(start+rounds−1) … W(start) − J‖_2, the disagreement that remains.

    :param graph: graph to examine
    :param rounds: number of rounds; None: the :func:`horizon`
    :param start: first round
    """
    product = _rounds(graph, horizon(graph) if rounds is None else rounds, start)
    return _norm(product, _node_weights(graph))


def _norm(product: list[Round], w: NodeWeights) -> float:
    """Return ‖Π W − J‖_2 of the rounds, and 1 if there are none."""
    if not product:
        return 1.0
    if circulants := _circulants(product):
        return _largest(circulants)
    n = product[0].n
    if n > DENSE and len(product) == 1 and product[0].symmetric() and w is None:
        return _radius(product, w)
    if n > DENSE:
        return _norm_iterated(product, w)
    return float(np.linalg.norm(_remaining(_applied(product, np.eye(n)), w), 2))


def _norm_iterated(product: list[Round], w: NodeWeights) -> float:
    """Return ‖Π W − J‖_2 of large rounds by an iterative method.

    It is the square root of the largest eigenvalue of AᵀA with A = Π W − J. With weights, A is the
    matrix that :func:`_remaining` returns.
    """
    n = product[0].n
    back = [r.transposed for r in reversed(product)]
    root: np.ndarray | float = 1.0 if w is None else np.sqrt(w)

    def squared(x: np.ndarray) -> np.ndarray:
        x = x.reshape(n) / root
        y = _disagreement(_applied(product, x), x, w) * root**2
        if w is None:
            return _applied(back, y) - y.mean()
        return _applied(back, y - w * y.sum()) / root

    start = np.random.default_rng(0).standard_normal(n)
    seen = np.sqrt(np.linalg.norm(squared(start)) / np.linalg.norm(start))
    # Such a small norm consists of rounding errors, with which the iteration would not converge.
    if seen <= EXACT:
        return float(seen)
    from scipy.sparse.linalg import LinearOperator, eigsh

    operator = LinearOperator((n, n), matvec=squared, dtype=np.float64)
    (largest,) = eigsh(operator, k=1, v0=start, tol=1e-9, return_eigenvectors=False)
    return float(np.sqrt(max(0.0, largest)))


def residues(graph: Graph, rounds: int, start: int = 0) -> np.ndarray:
    """Return ‖Π W − J‖_2 after 0, 1, …, ``rounds`` rounds from round ``start``, (rounds + 1,)."""
    product = _rounds(graph, rounds, start)
    w = _node_weights(graph)
    n = graph.n
    sizes = [float(n > 1)]
    if circulants := _circulants(product):
        values = np.ones(n - 1, complex)
        for c in circulants:
            values = values * c.eigenvalues()[1:]
            sizes.append(float(np.abs(values).max(initial=0.0)))
    elif n <= DENSE:
        matrix = np.eye(n)
        for r in product:
            matrix = r.apply(matrix)
            sizes.append(float(np.linalg.norm(_remaining(matrix, w), 2)))
    else:
        sizes += [_norm(product[: t + 1], w) for t in range(rounds)]
    return np.array(sizes)


def rounds_to_exact(graph: Graph, start: int = 0, limit: int | None = None) -> int | None:
    """Return the smallest number of rounds that compute the exact average.

    The result is None if no number up to ``limit`` does, so that the graph probably only converges.

    EXACT and BEFORE describe how the exact average is distinguished from convergence to it.

    :param graph: graph to examine
    :param start: first round
    :param limit: largest number of rounds to try; None: two periods, or 4 ⌈log2 n⌉ + 4 rounds if
        that is more. The graph may be static: powers of its matrix can become exact, too
    """
    n = graph.n
    if n == 1:
        return 0
    if limit is None:
        limit = max(2 * horizon(graph), 4 * rounds_needed(n) + 4)
    product = _rounds(graph, limit, start)
    if _circulants(product):
        return _first_exact(residues(graph, limit, start))
    return _exact_after(product, _node_weights(graph))


def _first_exact(sizes: np.ndarray) -> int | None:
    """Return the first number of rounds after which a product is exact; None if there is none.

    :param sizes: ‖Π W − J‖ after each number of rounds, (rounds + 1,)
    """
    exact = np.flatnonzero((sizes[1:] <= EXACT) & (sizes[:-1] >= BEFORE))
    return int(exact[0]) + 1 if len(exact) else None


def _exact_after(product: list[Round], w: NodeWeights) -> int | None:
    """Return the number of rounds after which their product is the exact average.

    The result is None if there is no such number. The product is tested on random vectors, on which
    a wrong result has probability zero.
    """
    x = np.random.default_rng(0).standard_normal((product[0].n, 4))
    y = x
    sizes = [1.0]
    for r in product:
        y = r.apply(y)
        sizes.append(np.abs(_disagreement(y, x, w)).max())
    return _first_exact(np.array(sizes))


def mean_square_contraction(graph: Graph, rounds: int | None = None) -> float:
    """Return the worst-case factor by which E‖x − x̄‖² decreases per round.

    It is the largest eigenvalue of the mean of (W − J)ᵀ(W − J) over rounds. If nodes have weights,
    x̄ is their weighted mean, and the norm is weighted, too.

    :param graph: graph to examine
    :param rounds: number of rounds; None: one period, or 64 n rounds if there is none
    """
    n = graph.n
    product = _rounds(graph, rounds or graph.period or 64 * n)
    w = _node_weights(graph)
    if circulants := _circulants(product):
        squares = cache(lambda r: np.abs(r.eigenvalues()) ** 2)
        return float(np.mean([squares(c)[1:] for c in circulants], axis=0).max(initial=0.0))
    mean = np.zeros((n, n))
    for r in product:
        centred = _remaining(r.matrix(), w)
        mean += centred.T @ centred / len(product)
    return float(np.linalg.eigvalsh(mean)[-1])


def effective_neighbours(graph: Graph, gamma: float = 0.951) -> float:
    """Return the effective number of neighbours n_W(γ), from 1 (no averaging) to n (exact average).

    n_W(γ) = (1/(1−γ)) / Σ_k γ^k ‖W(s+k) … W(s)‖_F²/n is the factor by which averaging reduces the
    variance of a random walk with decay γ. For static symmetric W this is the definition of Vogels,
    Hendrikx and Jaggi (Beyond spectral gap, JMLR 24, 2023): (1/(1−γ)) / (1/n Σ λ_i²/(1 − λ_i² γ)).
    For graphs that are not static, the sum is averaged over first rounds s: up to 16 rounds of a
    period, or four rounds if there is no period. Above 256 nodes (1,024 for static symmetric
    graphs), norms of rounds that are not circulant are estimated from 32 columns.

    :param graph: graph to examine
    :param gamma: γ in [0, 1); the default is the value that Vogels et al. fitted for 32 nodes
    :raises GraphError: if γ is outside [0, 1)
    """
    if not 0.0 <= gamma < 1.0:
        raise GraphError(f"gamma = {gamma} is outside [0, 1); omit it for the default, 0.951")
    n = graph.n
    first = graph.round(0)
    if graph.period == 1 and (isinstance(first, Circulant) or (n <= DENSE and first.symmetric())):
        squares = np.abs(eigenvalues(graph)) ** 2
        return float(1.0 / (1.0 - gamma) / np.mean(squares / (1.0 - squares * gamma)))
    starts = range(min(graph.period or 4, 16))
    total = np.mean([_decayed(graph, start, gamma) for start in starts])
    return float(1.0 / (1.0 - gamma) / total)


def _decayed(graph: Graph, start: int, gamma: float) -> float:
    """Return Σ_k γ^k ‖W(start+k) … W(start)‖_F²/n.

    As soon as the product is the exact average, the rest of the sum is a geometric series.
    """
    total = 0.0
    weight = 1.0
    for square in _squares(graph, start):
        if graph.doubly_stochastic and abs(square * graph.n - 1.0) < 1e-9:
            return total + weight / (1.0 - gamma) / graph.n
        total += weight * square
        weight *= gamma
        if weight <= 1e-10:
            break
    return total


def _squares(graph: Graph, start: int) -> Iterator[float]:
    """Yield ‖W(start+k) … W(start)‖_F²/n for k = 0, 1, 2 and so on."""
    n = graph.n
    if _circulants(list(graph.schedule.rounds)):
        spectra = cache(lambda r: r.eigenvalues())
        values = np.ones(n, complex)
        for t in count(start):
            values = values * spectra(graph.round(t))
            yield float(np.mean(np.abs(values) ** 2))
    columns = np.arange(n) if n <= 256 else np.linspace(0, n - 1, COLUMNS).astype(int)
    x = np.zeros((n, len(columns)))
    x[columns, np.arange(len(columns))] = 1.0
    for t in count(start):
        x = graph.round(t).apply(x)
        yield float((x**2).sum() / len(columns))
