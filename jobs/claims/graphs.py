"""Claims on graphs: spectral gaps, exact averages, weights, the topology search, and push-sum."""

import itertools
import math
from collections.abc import Iterator

import networkx
import numpy as np
import torch
from quadratics import run_rounds
from table import Row

from mpigossip import algorithms
from mpigossip.graphs import graph
from mpigossip.graphs.base import in_order
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.finite_time import factors
from mpigossip.graphs.rounds import Circulant
from mpigossip.graphs.search import search
from mpigossip.graphs.spectral import (
    consensus_rate,
    mean_square_contraction,
    residue,
    spectral_gap,
)

RESIDUES = {3: 0.25, 5: 0.2023, 6: 0.2165, 7: 0.125, 12: 0.2091, 24: 0.2073, 25: 0.1921}
"""Distance ‖Π W − J‖ from the exact average after one period of the one-peer exponential graph, by
number of nodes."""

BASE2_LENGTHS = {
    2: 1,
    3: 3,
    4: 2,
    5: 5,
    6: 4,
    7: 5,
    8: 3,
    9: 7,
    10: 6,
    12: 5,
    15: 7,
    16: 4,
    17: 9,
    20: 7,
    24: 6,
    25: 9,
    31: 9,
    32: 5,
    33: 11,
    40: 8,
    48: 7,
    63: 11,
    64: 6,
}
"""Number of rounds of the Base-2 graph, by number of nodes."""

MIXING = {
    "ring 16": ("ring", 16, 0.9267, 0.9493),
    "lattice 16": ("ring-lattice", 16, 0.7866, 0.8524),
    "4-regular 16": ("random-regular", 16, 0.6745, 0.7222),
    "hypercube 16": ("hypercube", 16, 0.6, 0.6),
    "G(16, 32)": ("G(n, 2n)", 16, 0.8046, 0.8623),
    "star 16": ("star", 16, 0.8824, 0.9375),
    "path 16": ("path", 16, 0.9808, 0.9872),
    "lattice 32": ("ring-lattice", 32, 0.9407, 0.9619),
    "4-regular 32": ("random-regular", 32, 0.8053, 0.8441),
}
"""For each row: name of the graph, number of nodes, and the spectral radius ρ(W − J) with Laplacian
weights (with the best constant) and with Metropolis–Hastings weights."""


def exponential_gap(options) -> Iterator[Row]:
    """Compare the spectral gap of the static exponential graph with its formula."""
    gaps = ((n, spectral_gap(graph("exponential", n))) for n in range(2, 257))
    excess = [gap - 2 / (1 + rounds_needed(n)) for n, gap in gaps]
    even = max(map(abs, excess[::2]))
    odd = min(excess[1::2])
    yield Row(
        "static exponential gap = 2/(1+⌈log2 n⌉) for even n, larger for odd n; n = 2 … 256",
        "Ying et al., NeurIPS 2021",
        "≤ 1e-12; > 0",
        f"even: differs by ≤ {even:.1e}; odd: larger by ≥ {odd:.3f}",
        even <= 1e-12 and odd > 0,
    )


def one_peer_exact(options) -> Iterator[Row]:
    """Check which one-peer graphs average exactly.

    Graphs with 2^τ nodes have to be exact after one period. For other graphs, the distance from the
    exact average after one period is compared with `RESIDUES`.
    """
    worst = 0.0
    for tau in range(1, 9):
        n = 2**tau
        cyclic = graph("one-peer-exponential", n)
        drawn = [graph("one-peer-exponential", n, seed=s, order="permuted") for s in range(3)]
        worst = max(worst, *(residue(cyclic, tau, start) for start in range(2 * tau)))
        worst = max(worst, *(residue(g, tau, k * tau) for g in drawn for k in range(4)))
    yield Row(
        "one-peer exponential exact in log2 n rounds, n = 2 … 256: cyclic from any round, permuted "
        "in each period",
        "Ying et al., NeurIPS 2021",
        "≤ 1e-12",
        f"‖ΠW − J‖ ≤ {worst:.1e}",
        worst <= 1e-12,
    )
    measured = {n: residue(graph("one-peer-exponential", n)) for n in RESIDUES}
    yield Row(
        "one-peer exponential, distance ‖ΠW − J‖ after one period, other n",
        "calculation for this project",
        ", ".join(f"{n}: {value:g}" for n, value in RESIDUES.items()),
        ", ".join(f"{n}: {value:.4f}" for n, value in measured.items()),
        all(abs(measured[n] - value) < 6e-5 for n, value in RESIDUES.items()),
    )


def finite_time(options) -> Iterator[Row]:
    """Check that Base-(k+1) and hyper-hypercube graphs are exact after one period.

    Their number of rounds and their degree must not exceed the bounds of the paper.
    """
    for k in range(1, 5):
        base = f"base-{k + 1}"
        smooth = [n for n in range(2, 130) if factors(n, k + 1)]
        for name, sizes, graphs in (
            (base, "n = 2 … 129", [graph(base, n) for n in range(2, 130)]),
            (
                "hyper-hypercube",
                f"{len(smooth)} values of n ≤ 129",
                [graph("hyper-hypercube", n, p=k) for n in smooth],
            ),
        ):
            worst = max(residue(g) for g in graphs)
            degree = max(g.degree for g in graphs)
            length = max(g.period / (2 * math.log(g.n, k + 1) + 2) for g in graphs)
            lengths = {g.n: g.period for g in graphs}
            is_expected = name != "base-2" or BASE2_LENGTHS.items() <= lengths.items()
            note = ", lengths of section 6.2 reproduced" * (is_expected and name == "base-2")
            yield Row(
                f"{name} with k = {k} exact for {sizes}",
                "Takezawa et al., NeurIPS 2023",
                f"≤ 1e-9, length ≤ 2 log n + 2 (base {k + 1}), degree ≤ {k}",
                f"distance {worst:.0e}, longest sequence {length:.2f} times the bound, "
                f"degree {degree}{note}",
                worst <= 1e-9 and length <= 1 and degree <= k and is_expected,
            )


def laplacian_weights(options) -> Iterator[Row]:
    """Compare Laplacian weights with the best constant to Metropolis–Hastings weights."""
    for label, (name, n, *expected) in MIXING.items():
        drawn = name in ("random-regular", "G(n, 2n)")
        pairs = np.array([_rates(name, n, seed) for seed in range(20 if drawn else 1)])
        measured = np.median(pairs, axis=0)
        tolerance = 0.05 if drawn else 6e-5
        never_slower = bool((pairs[:, 0] < pairs[:, 1] + 1e-12 * (name == "hypercube")).all())
        yield Row(
            f"ρ by Laplacian and Metropolis weights, {label}" + " (median of 20 draws)" * drawn,
            "calculation for this project" + ", one draw" * drawn,
            "{:.4f}, {:.4f}".format(*expected),
            "{:.4f}, {:.4f}".format(*measured) + "; never slower" * never_slower,
            never_slower and bool((np.abs(measured - expected) <= tolerance).all()),
        )


def _rates(name: str, n: int, seed: int) -> list[float]:
    """Return the spectral radius ρ(W − J) with Laplacian and with Metropolis–Hastings weights.

    The random graph G(n, 2n) is drawn with ``seed``, ``seed`` + 1000 and so on, until it is
    connected.

    :param name: name of the graph, or "G(n, 2n)"
    :param n: number of nodes
    :param seed: seed of a random graph
    """
    drawn = (networkx.gnm_random_graph(n, 2 * n, seed=s) for s in itertools.count(seed, 1000))
    network = next(filter(networkx.is_connected, drawn)) if name == "G(n, 2n)" else name
    rules = ("laplacian", "metropolis-hastings")
    return [consensus_rate(graph(network, n, weights=rule, seed=seed)) for rule in rules]


def topology_search(options) -> Iterator[Row]:
    """Check the graphs that the topology search finds.

    They have to be connected, use at most the allowed edges, and reach the expected ratio r.
    """
    plans = [(16, 20.0, 0.37), (32, 60.0, 0.23), (64, 60.0, 0.17)]
    kind = "seconds"
    effort = "{:g} s on one core"
    if options.quick:
        plans = [(16, 10_000, 0.31)]
        kind = "evaluations"
        effort = "{} graphs judged"
    for n, limit, bar in plans:
        result = search(n, degree=4, seed=0, **{kind: limit})
        degrees = np.bincount(np.array(result.edges).ravel(), minlength=n)
        is_valid = result.spectrum[1] > 1e-9 and degrees.max() <= 4 and len(result.edges) <= 2 * n
        rho = consensus_rate(result.graph())
        agrees = abs(rho - (1 - result.score) / (1 + result.score)) < 1e-9
        yield Row(
            f"topology search, degree 4, n = {n}, {effort.format(limit)}",
            "requirement of this project, after Jameel et al. 2020",
            f"r ≥ {bar}, connected, within the budget",
            f"r = {result.score:.4f} after {result.seconds:.1f} s, {result.evaluations} graphs",
            bool(is_valid and agrees and result.score >= bar),
        )


def ceca(options) -> Iterator[Row]:
    """Check that CECA is exact for any n in the smallest number of one-peer rounds."""
    worst = 0.0
    for n in range(2, 130):
        gossip_graph = graph("ceca", n)
        method = algorithms.build("ceca", "sgd", {}, 0, gossip_graph)
        worst = max(worst, _error(run_rounds(method, gossip_graph, rounds_needed(n))))
    yield Row(
        "CECA computes the exact mean in ⌈log2 n⌉ one-peer rounds, n = 2 … 129",
        "Ding et al. 2023",
        "≤ 1e-9",
        f"largest distance from the mean: {worst:.1e}",
        worst <= 1e-9,
    )


def _error(ends: torch.Tensor) -> float:
    """Return the largest deviation from the mean 1/n.

    :param ends: results, one column for each start from a unit vector
    """
    return float((ends - 1 / len(ends)).abs().max())


def equitopo(options) -> Iterator[Row]:
    """Compare the factor ‖E WᵀW − J‖ by which a round of OD-EquiDyn reduces the variance.

    The expectation is computed over all distances between neighbours, and compared with the paper
    and with 40 drawn rounds of the package's graph.
    """
    for eta, bars, expected in (
        (0.5, {8: 0.4375, 256: 0.498}, ".4375 (n = 8), .498 (n = 256)"),
        (1.0, {256: 0.992}, ".992 at n = 256"),
    ):
        factors_by_n = {}
        for n in (8, 64, 256):
            rounds = [Circulant(n, 1 / n, (a,), ((n - 1) / n,)) for a in range(1, n)]
            factors_by_n[n] = mean_square_contraction(in_order(rounds, "cyclic", 0).slack(eta))
        rate = consensus_rate(graph("od-equidyn", 64, eta=eta), 40) ** 2
        values = ", ".join(f"n = {n}: {value:.4f}" for n, value in factors_by_n.items())
        yield Row(
            f"OD-EquiDyn, η = {eta:g}: factor of E ‖x − x̄‖² per round",
            "Song et al. 2022",
            expected,
            f"{values}; 40 random rounds, n = 64: {rate:.3f} per round from the worst start",
            all(abs(factors_by_n[n] - bar) < 1e-3 for n, bar in bars.items()),
        )


def push_sum(options) -> Iterator[Row]:
    """Check that push-sum finds the mean on an irregular directed graph, where gossip does not."""
    n = 11
    ends = []
    network = networkx.cycle_graph(n, networkx.DiGraph)
    network.add_edges_from((0, to) for to in range(2, n, 3))
    for name, weights in (("sgp", "push"), ("dsgd", "uniform")):
        gossip_graph = graph(network, weights=weights)
        method = algorithms.build(name, "sgd", {}, 0, gossip_graph)
        ends.append(run_rounds(method, gossip_graph, 400))
    push_sum_error, gossip_error = map(_error, ends)
    disagreement = float((ends[1] - ends[1].mean(0)).abs().max())
    yield Row(
        f"directed irregular graph of {n} nodes, 400 rounds: distance from the true mean",
        "Assran et al. 2019",
        "sgp ≤ 1e-9, plain gossip > 1e-2",
        f"sgp {push_sum_error:.1e}; dsgd (rows of W sum to one) {gossip_error:.2g}, although "
        f"its nodes agree within {disagreement:.0e}",
        push_sum_error <= 1e-9 and gossip_error > 1e-2,
    )


CLAIMS = (
    exponential_gap,
    one_peer_exact,
    finite_time,
    laplacian_weights,
    topology_search,
    ceca,
    equitopo,
    push_sum,
)
