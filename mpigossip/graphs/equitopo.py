"""EquiTopo: graphs whose mixing rate does not worsen with n, with O(ln n) peers or one per round.

Song, Li, Jin, Shi, Yan, Yin, Yuan: Communication-Efficient Topologies for Decentralized Learning
with O(1) Consensus Rate, NeurIPS 2022. All are built from the basis matrices A^(a), a = 1 … n−1,
with A^(a)[i, i+a] = (n−1)/n, A^(a)[i, i] = 1/n. The mean of these over all a is J.
"""

import math

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError, random_words, static
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.rounds import Circulant, Round, paired

DRAWS = 1000
"""Largest number of draws until the distances connect all nodes."""


def _mean_of_basis(n: int, distances: np.ndarray) -> Graph:
    """Return the mean of A^(a) over the distances a, which may repeat."""
    offsets, counts = np.unique(distances, return_counts=True)
    weights = counts / len(distances) * ((n - 1) / n)
    return static(Circulant(n, 1 / n, tuple(offsets.tolist()), tuple(weights.tolist())))


def _distances(name: str, n: int, seed: int, peers: int | None) -> np.ndarray:
    peers = rounds_needed(n) if peers is None else peers
    if peers < 1:
        raise GraphError(f'graph "{name}" needs at least one peer, got {peers}')
    for draw in range(DRAWS):
        # The first draw has the key of earlier versions, so connected graphs keep their weights.
        key = (seed, n, draw) if draw else (seed, n)
        distances = (random_words(key, peers) % np.uint64(n - 1)).astype(np.int64) + 1
        # Sums of the distances modulo n are the multiples of this divisor: 1 connects all nodes.
        if math.gcd(n, *distances.tolist()) == 1:
            return distances
    raise GraphError(
        f'graph "{name}": none of {DRAWS} draws of peers = {peers} distances connects its n = {n} '
        f"nodes; set peers = {peers + 1}"
    )


def d_equistatic(n: int, seed: int = 0, *, peers: int | None = None) -> Graph:
    """Return D-EquiStatic: the mean of `peers` basis matrices A^(a) with random a.

    a is drawn from 1 … n−1 with repeats, and node i receives from i + a. Distances that do not
    connect all nodes are drawn again. Degree ≤ peers, period 1, directed, doubly stochastic. ‖W −
    J‖ < ε with probability 1 − p if peers ≥ 8 ln(2n/p)/(3ε²).

    :param n: number of nodes
    :param seed: seed of the draw
    :param peers: number of draws; None: ⌈log2 n⌉
    """
    return _mean_of_basis(n, _distances("d-equistatic", n, seed, peers))


def u_equistatic(n: int, seed: int = 0, *, peers: int | None = None) -> Graph:
    """Return U-EquiStatic: D-EquiStatic made symmetric, (W + Wᵀ)/2. Degree ≤ 2 peers, period 1."""
    distances = _distances("u-equistatic", n, seed, peers)
    return _mean_of_basis(n, np.concatenate((distances, n - distances)))


def _one_basis(n: int, seed: int, t: int) -> Circulant:
    """Return A^(a) for a drawn a: node i receives from i + a."""
    a = int(random_words((seed, t), 1)[0] % (n - 1)) + 1
    return Circulant(n, 1 / n, (a,), ((n - 1) / n,))


def _swept(n: int, seed: int, t: int) -> Round:
    """Return pairs i, i + a for a drawn a, formed by a sweep over i from a drawn start.

    A pair is formed if neither of its nodes has a partner yet.
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
        raise GraphError(f'graph "{name}" needs eta in (0, 1], got {eta}; 0.5 mixes well')
    return eta


def od_equidyn(n: int, seed: int = 0, *, eta: float = 0.5) -> Graph:
    """Return OD-EquiDyn: W(t) = (1−η)I + ηA^(a), with one a for all nodes, drawn in each round.

    Each node sends one message and receives one. Directed, doubly stochastic; drawn from (seed,
    round). At η = 1/2, E‖x − x̄‖² is about halved in each round for any n. At η = 1, the factor is
    only 1 − O(1/n).

    :param n: number of nodes
    :param seed: seed of the draws
    :param eta: η in (0, 1]
    """
    return Graph(Drawn(_one_basis, n, seed)).slack(_eta("od-equidyn", eta))


def ou_equidyn(n: int, seed: int = 0, *, eta: float = 0.5) -> Graph:
    """Return OU-EquiDyn: OD-EquiDyn made symmetric, by pairing i with i + a if both are still free.

    Pairs have weights η(n−1)/n; all other nodes are idle. Degree 1, symmetric, drawn from (seed,
    round).

    :param n: number of nodes
    :param seed: seed of the draws
    :param eta: η in (0, 1]
    """
    return Graph(Drawn(_swept, n, seed)).slack(_eta("ou-equidyn", eta))
