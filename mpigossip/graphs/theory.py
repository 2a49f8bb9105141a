"""Theory of a graph: transient iterations, rates, lower bounds, messages per round.

Orders of magnitude without constants: they compare graphs and methods, they predict no run.
"""

import numpy as np

from mpigossip.graphs import spectral
from mpigossip.graphs.base import Graph, GraphError
from mpigossip.graphs.weights import links

NO_GAP = 1e-9
"""A gap that can't be told from none."""


def averaging_gap(graph: Graph) -> float:
    """The gap 1 − ρ to be used in rates: of W if static, of the sequence otherwise.

    A graph that is exact in R rounds counts as 2/(1+R), which for the one-peer exponential graph
    is the gap of the static one: they have the same transient order (Ying et al. 2021).
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
    """n³/(1−ρ)² (data alike on all nodes) and n³/(1−ρ)⁴ (not alike); inf without averaging."""
    return _transient(graph.n, averaging_gap(graph))


def transient_of(
    n: int, gap: float, gossip_share: float = 1.0, global_every: float = float("inf")
) -> tuple[float, float]:
    """n³C² (data alike on all nodes) and n³C²D² (not alike) where only some steps average.

    A ``gossip_share`` of the steps is a round of a graph with this averaging gap 1 − ρ, which makes
    β = 1 − (1−ρ) · share a step; every ``global_every``-th is the exact average, H.
    C = 1 + β + … + β^(H−1), D = min(H, 1/(1−β)); 0 where every step is the exact average.
    Chen et al., Accelerating Gossip SGD with Periodic Global Averaging, ICML 2021, from memory; it
    has the rates of gossip (H = ∞) and of local SGD (no gossip: C = D = H) as its limits. That
    gossip in a share of the steps counts as a gap smaller by that share is our estimate.
    """
    if global_every <= 1 or n == 1:
        return 0.0, 0.0
    left = gap * gossip_share
    if left <= NO_GAP:
        if global_every == float("inf"):
            return float("inf"), float("inf")
        c = d = global_every
    else:
        c = (1.0 - (1.0 - left) ** global_every) / left
        d = min(global_every, 1.0 / left)
    return n**3 * c**2, n**3 * c**2 * d**2


def _sample_term(
    delta: float, smoothness: float, noise: float, epsilon: float, n: int, batch: int
) -> float:
    given = {"delta": delta, "smoothness": smoothness, "epsilon": epsilon, "n": n, "batch": batch}
    for name, value in given.items():
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
    """ΔLσ²/(nBε⁴) + ΔLD/ε²: iterations that any protocol needs on a graph of diameter D.

    delta Δ: initial gap of the loss; smoothness L; noise σ: deviation of a gradient; epsilon ε:
    gradient norm asked for; batch B: gradients per node and iteration. Up to a constant; DeFacto
    attains it. Lu and De Sa, JMLR 24 (2023), theorem 1.
    """
    if diameter is None or diameter < 0:
        raise GraphError(f"the bound needs a diameter ≥ 0, got {diameter}: is the graph connected?")
    sample = _sample_term(delta, smoothness, noise, epsilon, n, batch)
    return sample + delta * smoothness * diameter / epsilon**2


def gossip_lower_bound(
    delta: float, smoothness: float, noise: float, epsilon: float, n: int, batch: int, lam: float
) -> float:
    """ΔLσ²/(nBε⁴) + ΔL/(ε² √(1−λ)): the same for gossip with one W, λ = max(|λ_2|, |λ_n|) < 1.

    Up to a constant; DeTAG attains it up to a logarithm. Lu and De Sa (with their erratum) state
    it for λ = cos(π/n); Yuan et al. 2022 for all λ in [0, cos(π/n)].
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
    """The least E ‖∇f(x̄)‖² after so many steps: :func:`lower_bound` solved for ε²."""
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
    """Rate of D-PSGD: the mean of E ‖∇f(x̄)‖² after so many steps, without constants.

    σ √(LΔ/(nT)) + (LΔ (ζ + σ√p)/(pT))^(2/3) + LΔ/(pT), p = 1 − ρ² of the averaging gap 1 − ρ; the
    first and, with p = 1, the last are parallel SGD's, which has no second: gap = inf. Koloskova
    et al., A Unified Theory of Decentralized SGD, ICML 2020, theorem 2, from memory.
    """
    steps = np.asarray(steps, float)
    size = smoothness * delta
    p = 1.0 if gap >= 1 else gap * (2 - gap)
    apart = 0.0 if gap == float("inf") else (heterogeneity + noise * p**0.5) / p
    return (
        noise * np.sqrt(size / (n * steps)) + (size * apart / steps) ** (2 / 3) + size / (p * steps)
    )


def quadratic_limit(
    graph: Graph, centre: np.ndarray, curvature: np.ndarray, lr: float, style: str = "atc"
) -> np.ndarray:
    """Limit of D-PSGD without noise on f_i(x) = ½ Σ_k a_ik (x_k − b_ik)²: the x_i, (n, d).

    centre b and curvature a: (n, d). The fixed point of one period, at its end: of
    x ← W(x − lr a(x − b)), style "atc", or x ← W x − lr a(x − b), "awc"; column by column. Raises
    GraphError where there is no period, or no fixed point is reached.
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
    """Most hops between two nodes along the edges of all rounds; None if some can't be reached.

    A message moves from j to i where i receives from j. The rounds of a drawn graph are a sample.
    """
    from scipy.sparse import csgraph

    hops = csgraph.shortest_path(links(graph), unweighted=True).max()
    return int(hops) if np.isfinite(hops) else None


def vectors_per_round(graph: Graph) -> float:
    """Vectors that a node sends in a round, the mean over nodes and the rounds of a period.

    The complete graph is counted as the reduce-scatter and all-gather that carry it out.
    """
    if graph.complete:
        return 2 * (graph.n - 1) / graph.n
    return float(np.mean([r.edge_count / graph.n for r in graph.schedule.rounds]))


def describe(graph: Graph) -> dict[str, object]:
    """All that `mpigossip graph show` says of a graph, as plain numbers; None where undefined."""
    exact = spectral.rounds_to_exact(graph)
    rate = spectral.consensus_rate(graph)
    iid, non_iid = _transient(graph.n, _gap(exact, rate))
    normal = {"static", "symmetric"} <= graph.facts  # then ‖W − J‖ = ρ(W − J)
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
