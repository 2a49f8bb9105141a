"""EquiTopo graphs, whose mixing rate hardly depends on the number of nodes n by default.

By default, a node has O(ln n) in-neighbours in the static graphs, and at most one per round in the
others.

Song, Li, Jin, Shi, Yan, Yin, Yuan: Communication-Efficient Topologies for Decentralized Learning
with O(1) Consensus Rate, NeurIPS 2022. All graphs are built from the basis matrices A^(a), a = 1 …
n−1, with A^(a)[i, i+a] = (n−1)/n and A^(a)[i, i] = 1/n. The mean of A^(a) over all a is the exact
average, J = 11ᵀ/n.
"""

import math

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError, random_words, static
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.rounds import Circulant, Round, paired

DRAWS = 1000
"""Largest number of draws of distances; if none of them connects all nodes, an error is raised."""


def _mean_of_basis(n: int, distances: np.ndarray) -> Graph:
    """Return the mean of the basis matrices A^(a) over the distances a, which may repeat."""
    offsets, counts = np.unique(distances, return_counts=True)
    weights = counts / len(distances) * ((n - 1) / n)
    return static(Circulant(n, 1 / n, tuple(offsets.tolist()), tuple(weights.tolist())))


def _distances(name: str, n: int, seed: int, peers: int | None) -> np.ndarray:
    peers = rounds_needed(n) if peers is None else peers
    if peers < 1:
        raise GraphError(
            f'graph "{name}" needs at least one peer, got {peers}; omit peers for ⌈log2 n⌉'
        )
    for draw in range(DRAWS):
        # The key of the first draw is the key of earlier versions, so that their graphs stay the
        # same.
        key = (seed, n, draw) if draw else (seed, n)
        distances = (random_words(key, peers) % np.uint64(n - 1)).astype(np.int64) + 1
        # All nodes are connected if sums of the distances modulo n reach every number.
        if math.gcd(n, *distances.tolist()) == 1:
            return distances
    raise GraphError(
        f'graph "{name}": peers = {peers}: none of {DRAWS} random choices of this number of '
        f"distances connects all {n} nodes; set peers = {peers + 1}"
    )


def d_equistatic(n: int, seed: int = 0, *, peers: int | None = None) -> Graph:
    """Return the graph D-EquiStatic, in which node i receives from nodes at random distances.

    `peers` distances a are drawn from 1 … n−1 with repeats, and node i receives from i + a.
    Distances that do not connect all nodes are drawn again. W is the mean of the matrices A^(a)
    with A^(a)[i, i+a] = (n−1)/n and A^(a)[i, i] = 1/n. The graph is directed and doubly stochastic,
    with degree ≤ peers and period 1. ‖W − 11ᵀ/n‖ < ε with probability 1 − p if peers ≥ 8
    ln(2n/p)/(3ε²).

    :param n: number of nodes
    :param seed: seed of the draw
    :param peers: number of draws, at least 1; None: ⌈log2 n⌉
    :raises GraphError: if ``peers`` < 1, or if no draw connects all nodes
    """
    return _mean_of_basis(n, _distances("d-equistatic", n, seed, peers))


def u_equistatic(n: int, seed: int = 0, *, peers: int | None = None) -> Graph:
    """Return the graph U-EquiStatic, which has the matrix (W + Wᵀ)/2 for the W of D-EquiStatic.

    It is symmetric, with degree ≤ 2 · peers and period 1.

    :param n: number of nodes
    :param seed: seed of the draw
    :param peers: number of distances, as for :func:`d_equistatic`; None: ⌈log2 n⌉
    :raises GraphError: as in :func:`d_equistatic`
    """
    distances = _distances("u-equistatic", n, seed, peers)
    return _mean_of_basis(n, np.concatenate((distances, n - distances)))


def _one_basis(n: int, seed: int, t: int) -> Circulant:
    """Return the basis matrix A^(a) for a random a, in which node i receives from i + a."""
    a = int(random_words((seed, t), 1)[0] % (n - 1)) + 1
    return Circulant(n, 1 / n, (a,), ((n - 1) / n,))


def _swept(n: int, seed: int, t: int) -> Round:
    """Return a matching of nodes i and i + a for a random distance a.

    The nodes i are visited in order, from a random node on. i and i + a become partners if neither
    of them has a partner yet.
    """
    words = random_words((seed, t), 2)
    a = int(words[0] % (n - 1)) + 1
    start = int(words[1] % n)
    partner = np.arange(n)
    for i in (i % n for i in range(start, start + n)):
        j = (i + a) % n
        if partner[i] == i and partner[j] == j:
            partner[i] = j
            partner[j] = i
    return paired(partner, (n - 1) / n)


def _eta(name: str, eta: float) -> float:
    if not 0.0 < eta <= 1.0:
        raise GraphError(
            f'graph "{name}" needs eta in (0, 1], got {eta}; use 0.5, which mixes well'
        )
    return eta


def od_equidyn(n: int, seed: int = 0, *, eta: float = 0.5) -> Graph:
    """Return the graph OD-EquiDyn, in which node i receives from i + a with a new a in each round.

    W(t) = (1−η)I + ηA^(a), with A^(a)[i, i+a] = (n−1)/n and A^(a)[i, i] = 1/n. Each node sends one
    message and receives one. The graph is directed and doubly stochastic; a depends on n, the seed
    and the round only. With η = 1/2, each round reduces E‖x − x̄‖² to less than half for any n.
    With η = 1, its factor per round is only 1 − 2/n.

    :param n: number of nodes
    :param seed: seed of the draws
    :param eta: η in (0, 1]
    :raises GraphError: if η is outside (0, 1]
    """
    return Graph(Drawn(_one_basis, n, seed)).slack(_eta("od-equidyn", eta))


def ou_equidyn(n: int, seed: int = 0, *, eta: float = 0.5) -> Graph:
    """Return the graph OU-EquiDyn, which pairs nodes i and i + a, with a new a in each round.

    The nodes i are visited in order, from a random node on, and i is paired with i + a if neither
    has a partner yet. Partners give each other the weight η(n−1)/n, and nodes without a partner are
    idle. The graph is symmetric and has degree 1; a round depends on n, the seed and its number
    only.

    :param n: number of nodes
    :param seed: seed of the draws
    :param eta: η in (0, 1]
    :raises GraphError: if η is outside (0, 1]
    """
    return Graph(Drawn(_swept, n, seed)).slack(_eta("ou-equidyn", eta))
