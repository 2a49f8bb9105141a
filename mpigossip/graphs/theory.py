"""Theory of a graph: transient iterations, rates, lower bounds, messages per round.

All results are orders of magnitude without constants. They compare graphs and algorithms, but do
not predict a run.
"""

import numpy as np

from mpigossip.graphs import spectral
from mpigossip.graphs.base import Graph, GraphError
from mpigossip.graphs.weights import links

NO_GAP = 1e-9
"""Gap below which it cannot be distinguished from zero."""


def averaging_gap(graph: Graph) -> float:
    """Return the gap 1 − ρ for use in rates: of W if static, otherwise of the sequence.

    A graph that is exact in R rounds counts as 2/(1+R). For the one-peer exponential graph, this is
    the gap of the static one; both have the same transient order (Ying et al. 2021).
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
    """Return n³/(1−ρ)² for equal data on all nodes, and n³/(1−ρ)⁴ for different data.

    Both are inf if the graph does not average.
    """
    return _transient(graph.n, averaging_gap(graph))


def transient_of(
    n: int, gap: float, gossip_share: float = 1.0, global_every: float = float("inf")
) -> tuple[float, float]:
    """Return n³C² for equal data and n³C²D² for different data, if only some steps average.

    C = 1 + β + … + β^(H−1), D = min(H, 1/(1−β)), with β = 1 − (1−ρ) · share per step. Both results
    are 0 if every step is the exact average. Source: Chen et al., Accelerating Gossip SGD with
    Periodic Global Averaging, ICML 2021, from memory. The limits are the rates of gossip (H = ∞)
    and of local SGD (no gossip: C = D = H). Our estimate is that gossip in a fraction of the steps
    reduces the gap by that fraction.

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
            raise GraphError(f"a lower bound needs {name} > 0, got {value}")
    if noise < 0:
        raise GraphError(f"a lower bound needs noise ≥ 0, got {noise}")
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

    The bound holds up to a constant on a graph of diameter D, and DeFacto attains it (Lu and De Sa,
    JMLR 24, 2023, theorem 1).

    :param delta: Δ, initial gap of the loss
    :param smoothness: L
    :param noise: σ, standard deviation of a gradient
    :param epsilon: ε, norm of the gradient to reach
    :param n: number of nodes
    :param batch: B, number of gradients per node and iteration
    :param diameter: D
    """
    if diameter is None or diameter < 0:
        raise GraphError(f"the bound needs a diameter ≥ 0, got {diameter}: is the graph connected?")
    sample = _sample_term(delta, smoothness, noise, epsilon, n, batch)
    return sample + delta * smoothness * diameter / epsilon**2


def gossip_lower_bound(
    delta: float, smoothness: float, noise: float, epsilon: float, n: int, batch: int, lam: float
) -> float:
    """Return ΔLσ²/(nBε⁴) + ΔL/(ε² √(1−λ)): the lower bound for gossip with one W.

    It holds up to a constant, and DeTAG attains it up to a logarithm. Lu and De Sa (with their
    erratum) prove it for λ = cos(π/n); Yuan et al. 2022 for all λ in [0, cos(π/n)].

    :param delta: Δ, as the other parameters in :func:`lower_bound`
    :param smoothness: L
    :param noise: σ
    :param epsilon: ε
    :param n: number of nodes
    :param batch: B
    :param lam: λ = max(|λ_2|, |λ_n|) < 1
    """
    if not 0.0 <= lam < 1.0:
        raise GraphError(f"the gossip bound needs λ in [0, 1), got {lam}: does the graph average?")
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
    """Return the smallest possible E ‖∇f(x̄)‖² after ``steps`` steps.

    This is :func:`lower_bound` solved for ε²; the other parameters are described there.
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

    σ √(LΔ/(nT)) + (LΔ (ζ + σ√p)/(pT))^(2/3) + LΔ/(pT), with p = 1 − ρ² for the averaging gap 1 − ρ.
    The first term and, with p = 1, the last are those of parallel SGD, which has no second term:
    pass gap = inf. Koloskova et al., A Unified Theory of Decentralized SGD, ICML 2020, theorem 2,
    from memory.

    :param steps: T, numbers of steps
    :param delta: Δ, initial gap of the loss
    :param smoothness: L
    :param noise: σ, standard deviation of a gradient
    :param heterogeneity: ζ, deviation of the nodes' gradients
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
    """Return the limit x_i, (n, d), of D-PSGD without noise on f_i(x) = ½ Σ_k a_ik (x_k − b_ik)².

    It is the fixed point of one period, at the end of the period, computed for each column.

    :param graph: graph with a period
    :param centre: b, (n, d)
    :param curvature: a, (n, d)
    :param lr: learning rate
    :param style: "atc": x ← W(x − lr a(x − b)); "awc": x ← W x − lr a(x − b)
    :raises GraphError: if there is no period, or D-PSGD diverges at this rate
    """
    if graph.period is None or graph.n > spectral.LARGE:
        raise GraphError(f"{graph!r}: a limit needs a period and at most {spectral.LARGE} nodes")
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
            raise GraphError(f"lr = {lr:g}: D-PSGD diverges there; a smaller one has a limit")
        limits.append(np.linalg.solve(np.eye(graph.n) - map_, shift))
    return np.stack(limits, axis=1)


def diameter(graph: Graph) -> int | None:
    """Return the largest number of hops between two nodes; None if some cannot be reached.

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
    """Return everything that `mpigossip graph show` prints, as plain numbers; None if undefined."""
    exact = spectral.rounds_to_exact(graph)
    rate = spectral.consensus_rate(graph)
    iid, non_iid = _transient(graph.n, _gap(exact, rate))
    normal = {"static", "symmetric"} <= graph.facts  # so ‖W − J‖ = ρ(W − J)
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
