"""Theoretical values of a graph: transient iterations, rates, lower bounds, messages per round.

Transient iterations, rates and bounds are orders of magnitude without constants. Use them to
compare graphs and algorithms, not to predict a run.
"""

import numpy as np

from mpigossip.graphs import spectral
from mpigossip.graphs.base import Graph, GraphError
from mpigossip.graphs.weights import links

NO_GAP = 1e-9
"""Spectral gap below which a computed value may be a rounding error of zero."""


def averaging_gap(graph: Graph) -> float:
    """Return the averaging gap 1 − ρ of a graph, for use in rates.

    This is the spectral gap of a static graph, and 1 − consensus rate of any other graph. A graph
    that computes the exact average in R rounds has the averaging gap 2/(1+R). For the one-peer
    exponential graph of n = 2^τ nodes, this is the gap of the static exponential graph; both have
    transients of the same order (Ying et al. 2021).
    """
    exact = spectral.rounds_to_exact(graph)
    return _gap(exact, spectral.consensus_rate(graph) if exact is None else 0.0)


def _gap(exact: int | None, rate: float) -> float:
    return 1.0 - rate if exact is None else 2.0 / (1.0 + max(1, exact))


def _transient(n: int, gap: float) -> tuple[float, float]:
    if gap <= NO_GAP:
        return float("inf"), float("inf")
    return n**3 / gap**2, n**3 / gap**4


def transient_iterations(graph: Graph) -> tuple[float, float]:
    """Return the orders of transient iterations for equal and for different data on nodes.

    These are n³/(1−ρ)² and n³/(1−ρ)⁴ with the averaging gap 1 − ρ; both are inf if the graph does
    not average.
    """
    return _transient(graph.n, averaging_gap(graph))


def transient_of(
    n: int, gap: float, gossip_share: float = 1.0, global_every: float = float("inf")
) -> tuple[float, float]:
    """Return the orders of transient iterations if only some steps average.

    These are n³C² for equal data on all nodes and n³C²D² for different data, with C = 1 + β + … +
    β^(H−1), D = min(H, 1/(1−β)) and β = 1 − (1−ρ) · ``gossip_share``. Both are 0 if every step is
    the exact average or n = 1, and inf if no step averages. Source: Chen et al., Accelerating
    Gossip SGD with Periodic Global Averaging, ICML 2021 (quoted from memory). The limits are the
    rates of gossip (H = ∞) and of local SGD (no gossip: C = D = H). The factor ``gossip_share`` of
    the gap is an estimate of this package.

    :param n: number of nodes
    :param gap: averaging gap 1 − ρ of the graph
    :param gossip_share: fraction of the steps that are a round of the graph
    :param global_every: H, the number of steps from one exact average to the next
    """
    if global_every <= 1 or n == 1:
        return 0.0, 0.0
    remaining_gap = gap * gossip_share
    if remaining_gap <= NO_GAP:
        if global_every == float("inf"):
            return float("inf"), float("inf")
        c = d = global_every
    else:
        c = (1.0 - (1.0 - remaining_gap) ** global_every) / remaining_gap
        d = min(global_every, 1.0 / remaining_gap)
    return n**3 * c**2, n**3 * c**2 * d**2


def _sample_term(
    delta: float, smoothness: float, noise: float, epsilon: float, n: int, batch: int
) -> float:
    inputs = {
        "delta": delta,
        "smoothness": smoothness,
        "epsilon": epsilon,
        "n": n,
        "batch": batch,
    }
    for name, value in inputs.items():
        if not value > 0:
            raise GraphError(f"a lower bound needs {name} > 0, got {value}; pass a positive number")
    if noise < 0:
        raise GraphError(f"a lower bound needs noise ≥ 0, got {noise}; pass 0 for none")
    return delta * smoothness * noise**2 / (n * batch * epsilon**4)


def lower_bound(
    delta: float,
    smoothness: float,
    noise: float,
    epsilon: float,
    n: int,
    batch: int,
    diameter: int | None,
) -> float:
    """Return ΔLσ²/(nBε⁴) + ΔLD/ε², the iterations that any algorithm needs.

    The bound holds up to a constant on a graph of diameter D, and the algorithm DeFacto attains it
    (Lu and De Sa, JMLR 24, 2023, theorem 1).

    :param delta: Δ, difference of the loss at the start from its minimum
    :param smoothness: L, smoothness of the loss
    :param noise: σ, standard deviation of a gradient
    :param epsilon: ε, norm of the gradient to reach
    :param n: number of nodes
    :param batch: B, number of gradients per node and iteration
    :param diameter: D, diameter of the graph; None: the graph is not connected, which is an error
    :raises GraphError: if the graph is not connected, ``noise`` < 0, or another value is not > 0
    """
    if diameter is None or diameter < 0:
        raise GraphError(f"diameter = {diameter}: a lower bound needs a connected graph; add edges")
    sample = _sample_term(delta, smoothness, noise, epsilon, n, batch)
    return sample + delta * smoothness * diameter / epsilon**2


def gossip_lower_bound(
    delta: float, smoothness: float, noise: float, epsilon: float, n: int, batch: int, lam: float
) -> float:
    """Return ΔLσ²/(nBε⁴) + ΔL/(ε² √(1−λ)), the lower bound for gossip with a static W.

    The bound holds up to a constant, and the algorithm DeTAG attains it up to a logarithm. Lu and
    De Sa (with their erratum) prove it for λ = cos(π/n), and Yuan et al. 2022 for all λ in [0,
    cos(π/n)].

    :param delta: Δ, difference of the loss at the start from its minimum
    :param smoothness: L, smoothness of the loss
    :param noise: σ, standard deviation of a gradient
    :param epsilon: ε, norm of the gradient to reach
    :param n: number of nodes
    :param batch: B, number of gradients per node and iteration
    :param lam: λ = max(|λ_2|, |λ_n|) < 1 of W
    :raises GraphError: if λ is outside [0, 1), ``noise`` < 0, or another value is not > 0
    """
    if not 0.0 <= lam < 1.0:
        raise GraphError(f"λ = {lam}: a gossip bound needs λ in [0, 1); use a graph that averages")
    sample = _sample_term(delta, smoothness, noise, epsilon, n, batch)
    return sample + delta * smoothness / (epsilon**2 * np.sqrt(1.0 - lam))


def gradient_floor(
    steps: np.ndarray,
    delta: float,
    smoothness: float,
    noise: float,
    n: int,
    batch: int,
    diameter: int | None,
) -> np.ndarray:
    """Return the smallest possible E ‖∇f(x̄)‖² after ``steps`` steps, up to a constant.

    This is :func:`lower_bound` solved for ε²; the other parameters and the errors are described
    there.

    :param steps: numbers of steps, > 0, an array of any shape, which the result has, too
    """
    once = lower_bound(delta, smoothness, 0.0, 1.0, n, batch, diameter)  # ΔLD
    noisy = _sample_term(delta, smoothness, noise, 1.0, n, batch)
    steps = np.asarray(steps, float)
    return (once + np.sqrt(once**2 + 4 * steps * noisy)) / (2 * steps)


def gossip_rate(
    steps: np.ndarray,
    delta: float,
    smoothness: float,
    noise: float,
    heterogeneity: float,
    n: int,
    gap: float,
) -> np.ndarray:
    """Return the rate of D-PSGD, without constants: the mean of E ‖∇f(x̄)‖² after ``steps`` steps.

    The rate is σ √(LΔ/(nT)) + (LΔ (ζ + σ√p)/(pT))^(2/3) + LΔ/(pT), with p = 1 − ρ² for the
    averaging gap 1 − ρ. The rate of parallel SGD consists of the first term and of the last term
    with p = 1; gap = inf gives this rate. Koloskova et al., A Unified Theory of Decentralized SGD,
    ICML 2020, theorem 2, from memory.

    :param steps: T, numbers of steps
    :param delta: Δ, difference of the loss at the start from its minimum
    :param smoothness: L, smoothness of the loss
    :param noise: σ, standard deviation of a gradient
    :param heterogeneity: ζ, deviation of the nodes' gradients from their mean
    :param n: number of nodes
    :param gap: averaging gap 1 − ρ
    """
    steps = np.asarray(steps, float)
    size = smoothness * delta
    p = 1.0 if gap >= 1 else gap * (2 - gap)
    deviation = 0.0 if gap == float("inf") else (heterogeneity + noise * p**0.5) / p
    return (
        noise * np.sqrt(size / (n * steps))
        + (size * deviation / steps) ** (2 / 3)
        + size / (p * steps)
    )


def quadratic_limit(
    graph: Graph, centre: np.ndarray, curvature: np.ndarray, lr: float, style: str = "atc"
) -> np.ndarray:
    """Return the models to which D-PSGD converges on quadratic losses without noise, (n, d).

    The loss of node i is f_i(x) = ½ Σ_k a_ik (x_k − b_ik)². The result is the fixed point of one
    period of the graph, at the end of the period.

    :param graph: graph with a period
    :param centre: b, minimum of each node's loss, (n, d)
    :param curvature: a, curvature of each node's loss, (n, d)
    :param lr: learning rate
    :param style: "atc": x ← W(x − lr a(x − b)); "awc": x ← W x − lr a(x − b)
    :raises GraphError: if the graph has no period or more than `spectral.LARGE` nodes, or D-PSGD
        diverges at this rate
    """
    if graph.period is None or graph.n > spectral.LARGE:
        raise GraphError(
            f"{graph!r}: the limit of D-PSGD is computed only for graphs with a period and at most "
            f"{spectral.LARGE} nodes: choose such a graph"
        )
    limits = []
    for b, a in zip(centre.T, curvature.T, strict=True):
        map_ = np.eye(graph.n)
        shift = np.zeros(graph.n)
        for t in range(graph.period):
            w = graph.matrix(t)
            pull = w * (lr * a) if style == "atc" else np.diag(lr * a)
            map_ = (w - pull) @ map_
            shift = (w - pull) @ shift + pull @ b
        if max(abs(np.linalg.eigvals(map_))) >= 1:
            raise GraphError(f"lr = {lr:g}: D-PSGD diverges at this rate; use a smaller rate")
        limits.append(np.linalg.solve(np.eye(graph.n) - map_, shift))
    return np.stack(limits, axis=1)


def diameter(graph: Graph) -> int | None:
    """Return the largest number of hops between two nodes; None if no path joins some pair.

    A message moves from j to i along the edges of all rounds in which i receives from j. For a
    drawn graph, a sample of its rounds is used.
    """
    from scipy.sparse import csgraph

    hops = csgraph.shortest_path(links(graph), unweighted=True).max()
    return int(hops) if np.isfinite(hops) else None


def vectors_per_round(graph: Graph) -> float:
    """Return the number of vectors that a node sends in a round, averaged over nodes and a period.

    The complete graph is counted as the reduce-scatter and all-gather that implement it.
    """
    if graph.complete:
        return 2 * (graph.n - 1) / graph.n
    return float(np.mean([r.edge_count / graph.n for r in graph.schedule.rounds]))


def describe(graph: Graph) -> dict[str, object]:
    """Return facts about a graph, by name, for `mpigossip graph show`.

    A value is None if it is undefined.
    """
    exact = spectral.rounds_to_exact(graph)
    rate = spectral.consensus_rate(graph)
    iid, non_iid = _transient(graph.n, _gap(exact, rate))
    # For such graphs, ‖W − J‖ = ρ(W − J).
    normal = {"static", "symmetric"} <= graph.facts
    return {
        "name": graph.name,
        "options": dict(graph.options),
        "n": graph.n,
        "degree": graph.degree,
        "period": graph.period,
        "facts": sorted(graph.facts),
        "least_weight": min(r.smallest() for r in graph.schedule.rounds),
        "vectors_per_round": vectors_per_round(graph),
        "spectral_gap": 1.0 - rate if graph.period == 1 else None,
        "consensus_rate": rate,
        "rounds_to_exact": exact,
        "residue_after_period": rate if normal else spectral.residue(graph),
        "effective_neighbours": spectral.effective_neighbours(graph),
        "transient_iid": iid,
        "transient_non_iid": non_iid,
    }
