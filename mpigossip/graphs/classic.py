"""Textbook graphs and random graphs.

Undirected graphs have Metropolis–Hastings weights W[i, j] = 1/(1 + max(d_i, d_j)), where d_i is the
number of neighbours of node i, unless `graph.weights` names another rule. These weights are
symmetric and doubly stochastic. Only "complete" computes the exact average for every n. The other
graphs converge to it, except "identity", which never averages.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError, random_words, static
from mpigossip.graphs.exponential import check_power_of_two, rounds_needed
from mpigossip.graphs.rounds import Circulant, Round, paired
from mpigossip.graphs.weights import undirected

TRIES = 1000
"""Number of draws of a random graph after which an error is raised if none was connected."""


def identity(n: int, seed: int = 0) -> Graph:
    """Return the graph without edges, W = I, in which nothing is sent.

    It has degree 0 and period 1. If n > 1, it never averages.

    :param n: number of nodes
    :param seed: not used
    """
    return static(Circulant(n, 1.0))


def complete(n: int, seed: int = 0) -> Graph:
    """Return the complete graph, W = 11ᵀ/n.

    It has degree n−1 and period 1, and computes the exact average in one round.

    :param n: number of nodes
    :param seed: not used
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
    """Return the ring, W[i, i] = W[i, i−1] = W[i, i+1] = 1/3.

    It is symmetric, with degree 2, period 1 and spectral gap 2/3 (1 − cos(2π/n)) = O(1/n²). For n >
    3, it converges to the average, but does not reach it. If n = 2, there is one neighbour, all
    weights are 1/2, and the spectral gap is 1.

    :param n: number of nodes
    :param seed: not used
    """
    return both_ways(n, range(1, 2))


def ring_lattice(n: int, seed: int = 0, *, degree: int = 4) -> Graph:
    """Return the ring lattice, with neighbours at ±1 … ±degree/2 and all weights 1/(degree+1).

    It has period 1. Jameel et al., PAKDD 2020, compare their searched graphs with it.

    :param n: number of nodes
    :param seed: not used
    :param degree: number of neighbours, even and < n
    :raises GraphError: if the degree is odd or outside 2 … n−1
    """
    if degree < 2 or degree % 2 or degree >= n:
        raise GraphError(
            f'graph "ring-lattice" needs an even degree from 2 to {n - 1} at n = {n}, got '
            f'{degree}; use "random-regular" for an odd degree, or "complete" for degree n − 1'
        )
    return both_ways(n, range(1, degree // 2 + 1))


def path(n: int, seed: int = 0) -> Graph:
    """Return the path 0 — 1 — … — n−1, with degree ≤ 2, period 1 and spectral gap O(1/n²).

    :param n: number of nodes
    :param seed: not used
    """
    return undirected(n, [(i, i + 1) for i in range(n - 1)])


def star(n: int, seed: int = 0) -> Graph:
    """Return the star, in which node 0 is a neighbour of all other nodes.

    It has degree n−1 (at node 0) and period 1. With Metropolis–Hastings weights, which are 1/n, the
    spectral gap is 1/n if n > 2.

    :param n: number of nodes
    :param seed: not used
    """
    return undirected(n, [(0, i) for i in range(1, n)])


def sides(name: str, n: int, rows: int | None) -> tuple[int, int]:
    """Return the numbers of rows and columns of a grid of n nodes.

    :param name: name of the graph in messages
    :param n: number of nodes
    :param rows: number of rows; None: the largest divisor of n that is at most √n
    :raises GraphError: if ``rows`` does not divide n
    """
    if rows is None:
        rows = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    if rows < 1 or n % rows:
        raise GraphError(
            f'graph "{name}" can\'t arrange {n} nodes in {rows} equal rows; choose a divisor of {n}'
        )
    return rows, n // rows


def grid(n: int, seed: int = 0, *, rows: int | None = None) -> Graph:
    """Return the 2D grid, in which node i has row i // columns and column i mod columns.

    It has degree ≤ 4, period 1 and spectral gap O(1/(n log n)).

    :param n: number of nodes
    :param seed: not used
    :param rows: number of rows; None: the largest divisor of n that is at most √n, so that a prime
        n gives a path
    :raises GraphError: if ``rows`` does not divide n
    """
    _, columns = sides("grid", n, rows)
    right = [(i, i + 1) for i in range(n) if (i + 1) % columns]
    return undirected(n, right + [(i, i + columns) for i in range(n - columns)])


def torus(n: int, seed: int = 0, *, rows: int | None = None) -> Graph:
    """Return the 2D torus, which is a grid that is closed in both directions.

    It has degree 4, or less if a side has length 1 or 2, period 1 and spectral gap O(1/n). If n is
    prime, it is a ring, because it has one row.

    :param n: number of nodes
    :param seed: not used
    :param rows: number of rows; None: the largest divisor of n that is at most √n
    :raises GraphError: if ``rows`` does not divide n
    """
    height, width = sides("torus", n, rows)
    edges = set()
    for i in range(n):
        y, x = divmod(i, width)
        for j in (y * width + (x + 1) % width, (y + 1) % height * width + x):
            edges.add((min(i, j), max(i, j)))
    return undirected(n, {(i, j) for i, j in edges if i != j})


def hypercube(n: int, seed: int = 0) -> Graph:
    """Return the hypercube, in which neighbours are nodes whose numbers differ in one bit.

    The graph has degree τ = log2 n, period 1, weights 1/(τ+1) and spectral gap 2/(τ+1).

    :param n: number of nodes
    :param seed: not used
    :raises GraphError: if n is not a power of two
    """
    check_power_of_two("hypercube", n)
    bits = [2**k for k in range(rounds_needed(n))]
    return undirected(n, [(i, i ^ b) for i in range(n) for b in bits if i < i ^ b])


def _connected(name: str, n: int, seed: int, draw: Callable[[int], Any], remedy: str) -> Graph:
    """Draw networkx graphs by ``draw(number)`` until one is connected, and return its graph.

    The numbers are random and depend on n and the seed only.

    :param name: name of the graph, for the message
    :param n: number of nodes
    :param seed: seed of the numbers
    :param draw: function that is called with a number from 0 to 2³² − 1 and returns a networkx
        graph
    :param remedy: end of the message
    :raises GraphError: if none of TRIES graphs is connected; the message ends with ``remedy``
    """
    import networkx

    for number in random_words((seed, n), TRIES):
        network = draw(int(number % 2**32))
        if networkx.is_connected(network):
            return undirected(n, network.edges)
    raise GraphError(f'graph "{name}": none of {TRIES} draws at n = {n} is connected; {remedy}')


def erdos_renyi(n: int, seed: int = 0, *, probability: float | None = None) -> Graph:
    """Return an Erdős–Rényi graph, in which all edges have the same probability.

    The graph is drawn again until it is connected. It has period 1; its degree depends on the draw.

    :param n: number of nodes
    :param seed: seed of the draw
    :param probability: probability of each edge; None: min(1, 2 ln n / n), which is twice the
        threshold of connectedness and gives a mean degree of about 2 ln n
    :raises GraphError: if the probability is outside (0, 1], or no drawn graph is connected
    """
    import networkx

    chance = min(1.0, 2 * np.log(n) / n) if probability is None else probability
    if not 0 < chance <= 1:
        raise GraphError(
            f'graph "erdos-renyi" needs a probability in (0, 1], got {probability}; omit it for '
            "2 ln n / n"
        )
    return _connected(
        "erdos-renyi",
        n,
        seed,
        lambda number: networkx.fast_gnp_random_graph(n, chance, number),
        f"raise the probability {chance:.3g} above ln n / n = {np.log(n) / n:.3g}",
    )


def half_random(n: int, seed: int = 0) -> Graph:
    """Return the 1/2-random graph, in which each pair of nodes has an edge with probability 1/2.

    The graph is drawn again until it is connected. It has mean degree about n/2, period 1 and
    spectral gap O(1). Ying et al., NeurIPS 2021, compare exponential graphs with it.

    :param n: number of nodes
    :param seed: seed of the draw
    """
    return erdos_renyi(n, seed, probability=0.5)


def random_regular(n: int, seed: int = 0, *, degree: int = 4) -> Graph:
    """Return a random graph with `degree` neighbours of each node, and weights 1/(degree+1).

    The graph is drawn again until it is connected. It has period 1. With high probability, its
    spectral gap is nearly the largest possible for its degree (Friedman 2008).

    :param n: number of nodes
    :param seed: seed of the draw
    :param degree: number of neighbours; n · degree must be even
    :raises GraphError: if there is no connected graph of this degree, or none was drawn
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
    """Return a random perfect matching, in which one node is idle if n is odd.

    All perfect matchings are equally likely.
    """
    shuffled = np.argsort(random_words((seed, t), n), kind="stable")
    first = shuffled[: n // 2]
    second = shuffled[n // 2 : n // 2 * 2]
    partner = np.arange(n)
    partner[first] = second
    partner[second] = first
    return paired(partner)


def random_matching(n: int, seed: int = 0) -> Graph:
    """Return random matchings, in which random pairs of nodes take their mean in each round.

    If n is odd, one node is idle. The graph is symmetric and has degree 1; round t depends on n,
    the seed and t only. For large n, E‖x − x̄‖² is about halved in each round. Ying et al.,
    NeurIPS 2021, compare exponential graphs with it.

    :param n: number of nodes
    :param seed: seed of the draws
    """
    return Graph(Drawn(_matched, n, seed))
