"""Claims of later methods: CECA, EquiTopo, push-sum."""

from collections.abc import Iterator

import networkx
import torch
from table import Row
from toy import after

from mpigossip import algorithms
from mpigossip.graphs import graph
from mpigossip.graphs.base import in_order
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.rounds import Circulant
from mpigossip.graphs.spectral import consensus_rate, mean_square_contraction


def ceca(options) -> Iterator[Row]:
    """Check that CECA is exact for any n in the smallest number of one-peer rounds."""
    worst = 0.0
    for n in range(2, 130):
        made = graph("ceca", n)
        method = algorithms.build("ceca", "sgd", {}, 0, made)
        worst = max(worst, _off(after(method, made, rounds_needed(n))))
    yield Row(
        "CECA exact in ⌈log2 n⌉ one-peer rounds, n = 2 … 129",
        "Ding et al. 2023",
        "≤ 1e-9",
        f"furthest from the mean: {worst:.1e}",
        worst <= 1e-9,
    )


def _off(ends: torch.Tensor) -> float:
    """Return the largest deviation of a result from the mean, 1/n, over all starts."""
    return float((ends - 1 / len(ends)).abs().max())


def equitopo(options) -> Iterator[Row]:
    """Compare ‖E WᵀW − J‖ over all distances, and 40 drawn rounds of the package's own graph."""
    for eta, bars, wanted in (
        (0.5, {8: 0.4375, 256: 0.498}, ".4375 (n = 8), .498 (n = 256)"),
        (1.0, {256: 0.992}, ".992 at n = 256"),
    ):
        found = {}
        for n in (8, 64, 256):
            rounds = [Circulant(n, 1 / n, (a,), ((n - 1) / n,)) for a in range(1, n)]
            found[n] = mean_square_contraction(in_order(rounds, "cyclic", 0).slack(eta))
        rate = consensus_rate(graph("od-equidyn", 64, eta=eta), 40) ** 2
        words = ", ".join(f"n = {n}: {value:.4f}" for n, value in found.items())
        yield Row(
            f"OD-EquiDyn, η = {eta:g}: factor of E ‖x − x̄‖² a round",
            "Song et al. 2022",
            wanted,
            f"{words}; 40 rounds drawn, n = 64: {rate:.3f} a round from the worst start",
            all(abs(found[n] - bar) < 1e-3 for n, bar in bars.items()),
        )


def push_sum(options) -> Iterator[Row]:
    """Check that only push-sum finds the mean on a directed graph whose rows do not sum to one."""
    n = 11
    ends = []
    network = networkx.cycle_graph(n, networkx.DiGraph)
    network.add_edges_from((0, to) for to in range(2, n, 3))
    for name, weights in (("sgp", "push"), ("dsgd", "uniform")):
        made = graph(network, weights=weights)
        ends.append(after(algorithms.build(name, "sgd", {}, 0, made), made, 400))
    pushed, plain = map(_off, ends)
    apart = float((ends[1] - ends[1].mean(0)).abs().max())
    yield Row(
        f"directed irregular graph of {n} nodes, 400 rounds: distance from the true mean",
        "Assran et al. 2019",
        "sgp ≤ 1e-9, plain gossip > 1e-2",
        f"sgp {pushed:.1e}; dsgd (rows sum to one) {plain:.2g}, though its nodes agree to "
        f"{apart:.0e}",
        pushed <= 1e-9 and plain > 1e-2,
    )


CLAIMS = (ceca, equitopo, push_sum)
