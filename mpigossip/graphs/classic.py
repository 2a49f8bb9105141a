"""Textbook graphs and random graphs.

The undirected ones have Metropolis–Hastings weights W[i, j] = 1/(1 + max(d_i, d_j)) (1/(1 + d)
where all degrees are equal) unless `weights` says otherwise: symmetric, doubly stochastic, only
asymptotically exact (but for `complete`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError, random_words, static
from mpigossip.graphs.exponential import check_power_of_two, rounds_needed
from mpigossip.graphs.rounds import Circulant, Round, paired
from mpigossip.graphs.weights import undirected

TRIES = 1000
"""Draws of a random graph before it is given up as never connected."""


def identity(n: int, seed: int = 0) -> Graph:
    """No edges: W = I, nothing is sent. Degree 0, period 1; never averages (n > 1)."""
    return static(Circulant(n, 1.0))


def complete(n: int, seed: int = 0) -> Graph:
    """Everybody with everybody: W = 11ᵀ/n. Degree n−1, period 1, exact in one round."""
    return static(Circulant(n, 1 / n, tuple(range(1, n)), (1 / n,) * (n - 1)))


def both_ways(n: int, distances: range) -> Graph:
    """The circulant graph with neighbours at ± each distance, nearest first, all weights alike."""
    offsets = tuple(dict.fromkeys(o % n for d in distances for o in (-d, d)))
    weight = 1 / (1 + len(offsets))
    return static(Circulant(n, weight, offsets, (weight,) * len(offsets)))


def ring(n: int, seed: int = 0) -> Graph:
    """Ring: W[i, i] = W[i, i−1] = W[i, i+1] = 1/3 (n = 2: one neighbour, all weights 1/2).

    Degree 2, period 1, symmetric; only asymptotically exact, spectral gap
    2/3 (1 − cos(2π/n)) = O(1/n²).
    """
    return both_ways(n, range(1, 2))


def ring_lattice(n: int, seed: int = 0, *, degree: int = 4) -> Graph:
    """Ring lattice: neighbours at ±1 … ±degree/2, all weights 1/(degree+1).

    `degree` even and < n; period 1. The hand-made baseline of Jameel et al., PAKDD 2020.
    """
    if degree < 2 or degree % 2 or degree >= n:
        raise GraphError(
            f'graph "ring-lattice" needs an even degree from 2 to {n - 1} at n = {n}, got '
            f'{degree}; "random-regular" takes odd ones, "complete" has degree n − 1'
        )
    return both_ways(n, range(1, degree // 2 + 1))


def path(n: int, seed: int = 0) -> Graph:
    """Path 0 — 1 — … — n−1: degree 2, period 1, spectral gap O(1/n²)."""
    return undirected(n, [(i, i + 1) for i in range(n - 1)])


def star(n: int, seed: int = 0) -> Graph:
    """Star: node 0 with everybody else. Degree n−1 (all of it at node 0), period 1, gap O(1/n).

    With Metropolis–Hastings weights 1/n the gap is 1/n.
    """
    return undirected(n, [(0, i) for i in range(1, n)])


def sides(name: str, n: int, rows: int | None) -> tuple[int, int]:
    """Rows and columns of a grid of n nodes: as square as n's divisors allow, unless told."""
    if rows is None:
        rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    if rows < 1 or n % rows:
        raise GraphError(
            f'graph "{name}" can\'t lay {n} nodes in {rows} equal rows; choose a divisor of {n}'
        )
    return rows, n // rows


def grid(n: int, seed: int = 0, *, rows: int | None = None) -> Graph:
    """2D grid of rows x n/rows nodes, node i at (i // columns, i mod columns).

    Degree ≤ 4, period 1, gap O(1/(n log n)). `rows` is the largest divisor ≤ √n unless given, so
    that a prime n makes a path.
    """
    _, columns = sides("grid", n, rows)
    right = [(i, i + 1) for i in range(n) if (i + 1) % columns]
    return undirected(n, right + [(i, i + columns) for i in range(n - columns)])


def torus(n: int, seed: int = 0, *, rows: int | None = None) -> Graph:
    """2D torus: the grid closed in both directions; a prime n makes a ring.

    Degree 4 (less where a side is 1 or 2), period 1, gap O(1/n).
    """
    height, width = sides("torus", n, rows)
    edges = set()
    for i in range(n):
        y, x = divmod(i, width)
        for j in (y * width + (x + 1) % width, (y + 1) % height * width + x):
            edges.add((min(i, j), max(i, j)))
    return undirected(n, {(i, j) for i, j in edges if i != j})


def hypercube(n: int, seed: int = 0) -> Graph:
    """Hypercube: nodes whose numbers differ in one bit; n a power of two, weights 1/(τ+1).

    Degree τ = log2 n, period 1, spectral gap 2/(τ+1).
    """
    check_power_of_two("hypercube", n)
    bits = [2**k for k in range(rounds_needed(n))]
    return undirected(n, [(i, i ^ b) for i in range(n) for b in bits if i < i ^ b])


def _connected(name: str, n: int, seed: int, draw: Callable[[int], Any], remedy: str) -> Graph:
    """The first connected networkx graph among draw(number), number drawn from the seed."""
    import networkx

    for number in random_words((seed, n), TRIES):
        network = draw(int(number % 2**32))
        if networkx.is_connected(network):
            return undirected(n, network.edges)
    raise GraphError(f'graph "{name}": none of {TRIES} draws at n = {n} is connected; {remedy}')


def erdos_renyi(n: int, seed: int = 0, *, probability: float | None = None) -> Graph:
    """Erdős–Rényi graph: each pair is an edge with this probability; drawn once, connected.

    The probability is min(1, 2 ln n / n) unless given: twice the threshold of connectedness, mean
    degree about 2 ln n. Period 1, degree as drawn. Drawn again until connected.
    """
    import networkx

    chance = min(1.0, 2 * np.log(n) / n) if probability is None else probability
    if not 0 < chance <= 1:
        raise GraphError(f'graph "erdos-renyi" needs a probability in (0, 1], got {probability}')
    return _connected(
        "erdos-renyi",
        n,
        seed,
        lambda number: networkx.fast_gnp_random_graph(n, chance, number),
        f"raise the probability {chance:.3g} above ln n / n = {np.log(n) / n:.3g}",
    )


def half_random(n: int, seed: int = 0) -> Graph:
    """1/2-random graph: each pair is an edge with probability 1/2; drawn once, connected.

    Degree about n/2, period 1, spectral gap O(1). A comparison of Ying et al., NeurIPS 2021.
    """
    return erdos_renyi(n, seed, probability=0.5)


def random_regular(n: int, seed: int = 0, *, degree: int = 4) -> Graph:
    """Random regular graph: all nodes have `degree` neighbours, weights 1/(degree+1).

    Drawn once from the seed until connected; period 1; n · degree even. Nearly the best gap for
    its degree with high probability (Friedman 2008).
    """
    import networkx

    if not 1 <= degree < n or n * degree % 2 or (degree == 1 and n > 2):
        raise GraphError(
            f'graph "random-regular" of {n} nodes can\'t have degree {degree}: it needs '
            f'1 < degree < n and n · degree even; "complete" has degree n − 1'
        )
    return _connected(
        "random-regular",
        n,
        seed,
        lambda number: networkx.random_regular_graph(degree, n, number),
        "raise the degree",
    )


def _matched(n: int, seed: int, t: int) -> Round:
    """A uniformly drawn perfect matching (one node idles if n is odd)."""
    shuffled = np.argsort(random_words((seed, t), n), kind="stable")
    first = shuffled[: n // 2]
    second = shuffled[n // 2 : n // 2 * 2]
    partner = np.arange(n)
    partner[first] = second
    partner[second] = first
    return paired(partner)


def random_matching(n: int, seed: int = 0) -> Graph:
    """Random matching: at each round the nodes are paired at random and pairs take their mean.

    A random half against the other half (bipartite); with odd n one node idles. Degree 1, drawn
    from (seed, round), symmetric; asymptotic: E‖x − x̄‖² shrinks by about 1/2 a round. A
    comparison of Ying et al., NeurIPS 2021.
    """
    return Graph(Drawn(_matched, n, seed))
