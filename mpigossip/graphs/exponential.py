"""Exponential graphs: the static graph, and sequences with one or p in-neighbours per round.

Ying, Yuan, Chen, Hu, Pan, Yin: Exponential Graph is Provably Efficient for Decentralized Deep
Training, NeurIPS 2021, arXiv 2110.13363. Throughout, τ = ⌈log2 n⌉. Node i receives from i − 2^k,
that is, it sends to i + 2^k (mod n).
"""

from typing import Literal

import numpy as np

from mpigossip.graphs.base import Cycle, Graph, GraphError, in_order, static
from mpigossip.graphs.rounds import Circulant, paired

Order = Literal["cyclic", "permuted", "uniform"]


def rounds_needed(n: int, base: int = 2) -> int:
    """Return ⌈log_base n⌉, computed exactly with integers."""
    rounds = 0
    reach = 1
    while reach < n:
        rounds = rounds + 1
        reach = reach * base
    return rounds


def check_power_of_two(name: str, n: int) -> None:
    """Raise GraphError unless n is a power of two, which the graph ``name`` needs."""
    if n < 1 or n & (n - 1):
        raise GraphError(
            f'graph "{name}" needs a power of two nodes, got {n}; use "base-2", which is exact for '
            "any n"
        )


def from_behind(n: int, *distances: int) -> Circulant:
    """Return the round in which node i receives from i − d for each d, with equal weights."""
    weight = 1.0 / (len(distances) + 1)
    return Circulant(n, weight, tuple(n - d for d in distances), (weight,) * len(distances))


def exponential(n: int, seed: int = 0) -> Graph:
    """Return the static exponential graph, W[i, i] = W[i, i − 2^k] = 1/(τ+1), k = 0 … τ−1.

    τ = ⌈log2 n⌉ is the degree. The graph is directed and doubly stochastic, and has period 1. For n
    > 3, repeated rounds approach the average, but do not reach it. The spectral gap is 2/(1+τ) for
    even n and larger for odd n (Ying et al. 2021, proposition 1).

    :param n: number of nodes
    :param seed: not used
    """
    return static(from_behind(n, *(2**k for k in range(rounds_needed(n)))))


def one_peer_exponential(n: int, seed: int = 0, *, order: Order = "cyclic") -> Graph:
    """Return the one-peer exponential graph, W[i, i] = W[i, i − 2^k] = 1/2 with one k per round.

    The numbers k are 0 … τ−1, with τ = ⌈log2 n⌉. The graph is directed and doubly stochastic, and
    has degree 1. If n = 2^τ, any τ consecutive rounds in the order "cyclic" compute the exact
    average, and so do τ rounds in the order "permuted" that begin at a multiple of τ (Ying et al.
    2021, lemma 1). In the order "uniform", the average is exact as soon as each k has occurred. For
    other n, rounds only converge to the average; the graph "base-2" is exact for any n.

    :param n: number of nodes
    :param seed: seed of the order
    :param order: "cyclic": k = t mod τ, period τ; "permuted": a permutation of all k, drawn again
        every τ rounds; "uniform": any k, drawn independently in each round
    :raises GraphError: if there is no such order
    """
    return in_order([from_behind(n, 2**k) for k in range(rounds_needed(n))], order, seed)


def one_peer_hypercube(n: int, seed: int = 0, *, order: Order = "cyclic") -> Graph:
    """Return the one-peer hypercube, in which nodes i and i xor 2^k take their mean.

    There is one k < τ = log2 n per round. The graph is symmetric and doubly stochastic, and has
    degree 1. Rounds compute the exact average as soon as each k has occurred: in the order
    "cyclic", these are any τ consecutive rounds. SGP and, for powers of two, Decent-DP pair nodes
    in this way.

    :param n: number of nodes
    :param seed: seed of the order
    :param order: as for :func:`one_peer_exponential`
    :raises GraphError: if n is not a power of two, or there is no such order
    """
    check_power_of_two("one-peer-hypercube", n)
    nodes = np.arange(n)
    rounds = [paired(nodes ^ 2**k) for k in range(rounds_needed(n))]
    return in_order(rounds, order, seed)


def p_peer_exponential(n: int, seed: int = 0, *, p: int = 2, order: Order = "cyclic") -> Graph:
    """Return the p-peer exponential graph, in which a node averages with p in-neighbours.

    Node i takes the mean of the nodes i − d, d = 0, b^k, 2 b^k, …, p b^k, with b = p + 1 and one k
    < τ = ⌈log_b n⌉ per round. Distances d ≥ n are left out. The graph is directed and doubly
    stochastic, with degree min(p, n−1) and, in the order "cyclic", period τ. It then computes the
    exact average in each period if n = m b^(τ−1) with an integer 1 < m ≤ b, because the sums of one
    distance per round are then all residues modulo n, equally often.

    :param n: number of nodes
    :param seed: seed of the order
    :param p: number of peers per round; 1 gives the one-peer exponential graph
    :param order: as for :func:`one_peer_exponential`
    :raises GraphError: if p < 1, or there is no such order
    """
    if p < 1:
        raise GraphError(
            f'graph "p-peer-exponential" needs p ≥ 1 peers per round, got {p}; omit p for 2'
        )
    steps = [(p + 1) ** k for k in range(rounds_needed(n, p + 1))]
    rounds = [from_behind(n, *range(s, min(n, (p + 1) * s), s)) for s in steps]
    return in_order(rounds, order, seed)


def alternating_exponential_ring(n: int, seed: int = 0) -> Graph:
    """Return the alternating exponential ring, which splits each one-peer hypercube round in two.

    The pairs i, i xor 2^k are numbered from 0, first for k = 0, and so on. Pairs with odd numbers
    take their mean in round 2k, pairs with even numbers in round 2k+1. The other nodes are idle in
    that round. The graph is symmetric and doubly stochastic, with degree 1 and period 2 log2 n, and
    computes the exact average in each period. Source: Wang et al., From promise to practice
    (Decent-DP), ICLR 2025, arXiv 2410.11998.

    :param n: number of nodes
    :param seed: not used
    :raises GraphError: if n is not a power of two
    """
    check_power_of_two("alternating-exponential-ring", n)
    nodes = np.arange(n)
    rounds = []
    number = 0
    for k in range(rounds_needed(n)):
        partners = (nodes.copy(), nodes.copy())
        for i in nodes[nodes & 2**k == 0]:
            partner = partners[1 - number % 2]
            partner[i] = i ^ 2**k
            partner[i ^ 2**k] = i
            number += 1
        rounds += [paired(partner) for partner in partners]
    return Graph(Cycle(tuple(rounds)))
