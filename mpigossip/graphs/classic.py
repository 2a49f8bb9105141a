"""Textbook graphs and random graphs.

The undirected ones have Metropolis–Hastings weights W[i, j] = 1/(1 + max(d_i, d_j)), which are 1/(1
+ d) if all degrees are equal, unless `weights` says otherwise. They are symmetric and doubly
stochastic. Except for `complete`, they reach the average only asymptotically.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError, random_words, static
from mpigossip.graphs.exponential import check_power_of_two, rounds_needed
from mpigossip.graphs.rounds import Circulant, Round, paired
from mpigossip.graphs.weights import undirected

TRIES = 1000
"""Number of draws of a random graph, none of them connected, after which an error is raised."""


def identity(n: int, seed: int = 0) -> Graph:
    """Return a graph without edges: W = I, nothing is sent.

    Degree 0, period 1; for n > 1 it never averages.
    """
    return static(Circulant(n, 1.0))


def complete(n: int, seed: int = 0) -> Graph:
    """Return the complete graph: W = 11ᵀ/n.

    Degree n−1, period 1, exact in one round.
    """
    return static(Circulant(n, 1 / n, tuple(range(1, n)), (1 / n,) * (n - 1)))


def both_ways(n: int, distances: range) -> Graph:
    """Return the circulant graph with neighbours at ± each distance and equal weights.

    Neighbours are summed in the order of ``distances``.
    """
    offsets = tuple(dict.fromkeys(o % n for d in distances for o in (-d, d)))
    weight = 1 / (1 + len(offsets))
    return static(Circulant(n, weight, offsets, (weight,) * len(offsets)))


def ring(n: int, seed: int = 0) -> Graph:
    """Return the ring: W[i, i] = W[i, i−1] = W[i, i+1] = 1/3.

    Degree 2, period 1, symmetric; only asymptotically exact, spectral gap 2/3 (1 − cos(2π/n)) =
    O(1/n²). For n = 2, there is one neighbour, and all weights are 1/2.
    """
    return both_ways(n, range(1, 2))


def ring_lattice(n: int, seed: int = 0, *, degree: int = 4) -> Graph:
    """Return the ring lattice: neighbours at ±1 … ±degree/2, all weights 1/(degree+1).

    Period 1. It is the hand-made baseline of Jameel et al., PAKDD 2020.

    :param n: number of nodes
    :param seed: not used
    :param degree: number of neighbours, even and < n
    """
    if degree < 2 or degree % 2 or degree >= n:
        raise GraphError(
            f'graph "ring-lattice" needs an even degree from 2 to {n - 1} at n = {n}, got '
            f'{degree}; "random-regular" accepts odd degrees, "complete" has degree n − 1'
        )
    return both_ways(n, range(1, degree // 2 + 1))


def path(n: int, seed: int = 0) -> Graph:
    """Return the path 0 — 1 — … — n−1: degree 2, period 1, spectral gap O(1/n²)."""
    return undirected(n, [(i, i + 1) for i in range(n - 1)])


def star(n: int, seed: int = 0) -> Graph:
    """Return the star, in which node 0 is a neighbour of all other nodes.

    Degree n−1 (at node 0 only), period 1. With Metropolis–Hastings weights, 1/n, the spectral gap
    is 1/n.
    """
    return undirected(n, [(0, i) for i in range(1, n)])


def sides(name: str, n: int, rows: int | None) -> tuple[int, int]:
    """Return the numbers of rows and columns of a grid of n nodes.

    :param name: name of the graph in messages
    :param n: number of nodes
    :param rows: number of rows; None: the largest divisor of n that is at most √n
    """
    if rows is None:
        rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    if rows < 1 or n % rows:
        raise GraphError(
            f'graph "{name}" can\'t arrange {n} nodes in {rows} equal rows; choose a divisor of {n}'
        )
    return rows, n // rows


def grid(n: int, seed: int = 0, *, rows: int | None = None) -> Graph:
    """Return the 2D grid of rows x n/rows nodes, with node i at (i // columns, i mod columns).

    Degree ≤ 4, period 1, spectral gap O(1/(n log n)).

    :param n: number of nodes
    :param seed: not used
    :param rows: number of rows; None: the largest divisor of n that is at most √n, so that a prime
        n gives a path
    """
    _, columns = sides("grid", n, rows)
    right = [(i, i + 1) for i in range(n) if (i + 1) % columns]
    return undirected(n, right + [(i, i + columns) for i in range(n - columns)])


def torus(n: int, seed: int = 0, *, rows: int | None = None) -> Graph:
    """Return the 2D torus: the grid closed in both directions; a prime n gives a ring.

    Degree 4, or less if a side has length 1 or 2; period 1, spectral gap O(1/n).

    :param n: number of nodes
    :param seed: not used
    :param rows: number of rows; None: the largest divisor of n that is at most √n
    """
    height, width = sides("torus", n, rows)
    edges = set()
    for i in range(n):
        y, x = divmod(i, width)
        for j in (y * width + (x + 1) % width, (y + 1) % height * width + x):
            edges.add((min(i, j), max(i, j)))
    return undirected(n, {(i, j) for i, j in edges if i != j})


def hypercube(n: int, seed: int = 0) -> Graph:
    """Return the hypercube, with edges between numbers that differ in one bit; n is a power of two.

    Degree τ = log2 n, period 1, weights 1/(τ+1), spectral gap 2/(τ+1).
    """
    check_power_of_two("hypercube", n)
    bits = [2**k for k in range(rounds_needed(n))]
    return undirected(n, [(i, i ^ b) for i in range(n) for b in bits if i < i ^ b])


def _connected(name: str, n: int, seed: int, draw: Callable[[int], Any], remedy: str) -> Graph:
    """Return the first connected networkx graph among draw(number), with seeded numbers."""
    import networkx

    for number in random_words((seed, n), TRIES):
        network = draw(int(number % 2**32))
        if networkx.is_connected(network):
            return undirected(n, network.edges)
    raise GraphError(f'graph "{name}": none of {TRIES} draws at n = {n} is connected; {remedy}')


def erdos_renyi(n: int, seed: int = 0, *, probability: float | None = None) -> Graph:
    """Return an Erdős–Rényi graph, in which each pair is an edge with the same probability.

    It is drawn again until it is connected. Period 1; the degree depends on the draw.

    :param n: number of nodes
    :param seed: seed of the draw
    :param probability: probability of each edge; None: min(1, 2 ln n / n), which is twice the
        threshold of connectedness and gives a mean degree of about 2 ln n
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
    """Return the 1/2-random graph, in which each pair is an edge with probability 1/2.

    It is drawn again until it is connected. Degree about n/2, period 1, spectral gap O(1). Ying et
    al., NeurIPS 2021, compare with it.
    """
    return erdos_renyi(n, seed, probability=0.5)


def random_regular(n: int, seed: int = 0, *, degree: int = 4) -> Graph:
    """Return a random graph in which all nodes have `degree` neighbours, weights 1/(degree+1).

    It is drawn again until it is connected. Period 1. With high probability, its spectral gap is
    nearly the best for its degree (Friedman 2008).

    :param n: number of nodes
    :param seed: seed of the draw
    :param degree: number of neighbours; n · degree must be even
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
    """Return a uniformly drawn perfect matching, in which one node is idle if n is odd."""
    shuffled = np.argsort(random_words((seed, t), n), kind="stable")
    first = shuffled[: n // 2]
    second = shuffled[n // 2 : n // 2 * 2]
    partner = np.arange(n)
    partner[first] = second
    partner[second] = first
    return paired(partner)


def random_matching(n: int, seed: int = 0) -> Graph:
    """Return random matchings: in each round, nodes are paired at random and pairs take their mean.

    One half of the nodes is drawn and paired with the other half; if n is odd, one node is idle.
    Degree 1, drawn from (seed, round), symmetric. It is exact only asymptotically: E‖x − x̄‖²
    shrinks by about 1/2 per round. Ying et al., NeurIPS 2021, compare with it.
    """
    return Graph(Drawn(_matched, n, seed))
