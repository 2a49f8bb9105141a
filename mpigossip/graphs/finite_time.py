"""Sequences of sparse rounds that compute the exact average after a finite number of rounds.

These are the hyper-hypercube, Base-(k+1) and trees. The rounds of CECA compute it only together
with the algorithm `ceca`.

Takezawa, Sato, Bao, Niwa, Yamada: Beyond Exponential Graph: Communication-Efficient Topologies for
Decentralized Learning via Finite-time Convergence, NeurIPS 2023. In the graphs of this paper, a
node has at most k neighbours per round, and all rounds are symmetric and doubly stochastic. The
rounds of trees and of CECA are directed; they are made for the algorithms `defacto` and `ceca`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from mpigossip.graphs.base import Cycle, Graph, GraphError
from mpigossip.graphs.rounds import Circulant, SparseMatrix
from mpigossip.graphs.weights import links

Pairs = dict[tuple[int, int], float]
"""Round under construction, as the weight of each undirected edge (i, j) with i < j."""


@lru_cache(maxsize=1024)
def factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the shortest list of factors ≤ ``largest`` with product n, ascending.

    The result is None if n has a larger prime factor.
    """
    if n == 1:
        return ()
    best = None
    for f in range(largest, 1, -1):
        if n % f == 0 and (rest := factors(n // f, f)) is not None:
            candidate = (*rest, f)
            best = candidate if best is None or len(candidate) < len(best) else best
    return best


def _add_clique(pairs: Pairs, nodes: Sequence[int]) -> None:
    for a, i in enumerate(nodes):
        for j in nodes[a + 1 :]:
            pairs[min(i, j), max(i, j)] = 1.0 / len(nodes)


def _hyper_hypercube(nodes: Sequence[int], k: int) -> list[Pairs]:
    """Return rounds of a hyper-hypercube, after which all given nodes hold their mean.

    :param nodes: numbers of the nodes; no prime factor of their count may be larger than k+1
    :param k: largest number of neighbours of a node in a round
    """
    rounds = []
    stride = 1
    for f in factors(len(nodes), k + 1):
        pairs: Pairs = {}
        for start in range(len(nodes)):
            if start // stride % f == 0:
                _add_clique(pairs, [nodes[start + digit * stride] for digit in range(f)])
        rounds.append(pairs)
        stride *= f
    return rounds


def _digits(n: int, base: int) -> list[tuple[int, int]]:
    """Return the digits of n = Σ a · base^p as pairs (a, p) with a > 0, from the largest power."""
    digits = []
    p = 0
    while n:
        n, a = divmod(n, base)
        digits += [(a, p)] if a else []
        p += 1
    return digits[::-1]


def _simple_base(nodes: Sequence[int], k: int) -> list[Pairs]:
    """Return the rounds of the Simple Base-(k+1) graph (algorithm 2 of the paper).

    If the number of nodes has no prime factor above k+1, these are the rounds of a hyper-hypercube.
    Otherwise, nodes are divided into blocks V_1, V_2, … of a_l (k+1)^p_l nodes with p_1 > p_2 > …,
    and block l into a_l sub-blocks. First, each block averages internally. Then, for l = 1, 2, …,
    each node of the later blocks exchanges with one partner in each sub-block of V_l. The weight is
    chosen so that the mean of each sub-block, and the mean of the later blocks, becomes the mean of
    all nodes. Finally, the sub-blocks average internally.

    :param nodes: numbers of the nodes
    :param k: largest number of neighbours of a node in a round
    """
    if factors(len(nodes), k + 1) is not None:
        return _hyper_hypercube(nodes, k)
    blocks = []
    subs = []
    start = 0
    for a, p in _digits(len(nodes), k + 1):
        size = (k + 1) ** p
        starts = range(start, start + a * size, size)
        subs.append([nodes[first_node : first_node + size] for first_node in starts])
        blocks.append(nodes[start : start + a * size])
        start += a * size
    within = [_hyper_hypercube(block, k) for block in blocks]
    settling = [[_hyper_hypercube(sub, k) for sub in block] for block in subs[:-1]]
    first = len(within[0])
    length = max(first + b + 1 + len(cycles[0]) for b, cycles in enumerate(settling))
    rounds = []
    for t in range(length):
        pairs: Pairs = {}
        if t < first:
            for cycle in filter(None, within):
                pairs.update(cycle[t % len(cycle)])
        elif t - first < len(settling):
            _pull(pairs, blocks[t - first :], subs[t - first], k)
        for b, cycles in enumerate(settling[: max(0, t - first)]):
            for cycle in filter(None, cycles):
                pairs.update(cycle[(t - first - b - 1) % len(cycle)])
        rounds.append(pairs)
    return rounds


def _pull(
    pairs: Pairs, blocks: Sequence[Sequence[int]], subs: Sequence[Sequence[int]], k: int
) -> None:
    """Add edges from each node of blocks[1:] to one node of each sub-block of blocks[0].

    The remaining nodes of blocks[0] hold the same value, and form cliques of at most k+1 nodes (the
    inner edges of the paper). The cliques do not change the average, but they mix values further if
    the nodes take gradient steps between the rounds.

    :param pairs: round under construction, to which the edges are added
    :param blocks: nodes of the first block and of the later ones
    :param subs: sub-blocks of the first block
    :param k: largest number of neighbours of a node in a round
    """
    later = [i for block in blocks[1:] for i in block]
    weight = len(blocks[0]) / (len(blocks[0]) + len(later)) / len(subs)
    for sub in subs:
        for i, partner in zip(later, sub, strict=False):
            pairs[min(i, partner), max(i, partner)] = weight
    idle = [i for sub in subs for i in sub[len(later) :]]
    for first in range(0, len(idle), k + 1):
        _add_clique(pairs, idle[first : first + k + 1])


def _base(n: int, k: int) -> list[Pairs]:
    """Return the rounds of the Base-(k+1) graph (algorithm 3), by the better of two constructions.

    The first construction is Simple Base on all n nodes. In the second, p is the largest divisor of
    n whose prime factors are all ≤ k+1: first, p groups of q = n/p nodes average by Simple Base,
    then hyper-hypercubes average the p nodes that have the same number in their groups. The
    construction with fewer rounds is better, and then the one with fewer edges per period; if both
    are equal, it is the first.
    """
    simple = _simple_base(range(n), k)
    p = 1
    for prime in (f for f in range(2, k + 2) if all(f % d for d in range(2, f))):
        while n // p % prime == 0:
            p *= prime
    q = n // p
    groups = [_simple_base(range(g * q, g * q + q), k) for g in range(p)]
    across = [_hyper_hypercube(range(i, n, q), k) for i in range(q)]
    joined = [_union(side_by_side) for side_by_side in zip(*groups, strict=True)]
    joined += [_union(side_by_side) for side_by_side in zip(*across, strict=True)]
    return min(simple, joined, key=lambda rounds: (len(rounds), sum(map(len, rounds))))


def _union(parts: Sequence[Pairs]) -> Pairs:
    return {edge: weight for part in parts for edge, weight in part.items()}


def _graph(n: int, rounds: list[Pairs]) -> Graph:
    sparse_rounds = []
    for pairs in rounds:
        edges = np.array(list(pairs), np.int64).reshape(-1, 2)
        to, source = np.concatenate((edges, edges[:, ::-1])).T
        sparse_rounds.append(
            SparseMatrix.from_edges(n, to, source, np.tile(list(pairs.values()), 2))
        )
    return Graph(Cycle(tuple(sparse_rounds)))


def hyper_hypercube(n: int, seed: int = 0, *, p: int = 1) -> Graph:
    """Return the hyper-hypercube H_p(n): in round l, nodes that differ only in digit l average.

    n = f_1 · … · f_L is a product of the fewest factors f_l ≤ p+1, and the node numbers have digits
    0 … f_l − 1. In round l, f_l nodes average with weights 1/f_l. The graph has degree ≤ p and
    period L, and computes the exact average in each period.

    :param n: number of nodes, without prime factors above p+1
    :param seed: not used
    :param p: largest number of peers per round
    :raises GraphError: if p < 1, or n has a prime factor above p+1
    """
    if p < 1:
        raise GraphError(
            f'graph "hyper-hypercube" needs p ≥ 1 peers per round, got {p}; omit p for 1'
        )
    if factors(n, p + 1) is None:
        prime = max(f for f in range(2, n + 1) if n % f == 0 and all(f % d for d in range(2, f)))
        raise GraphError(
            f'graph "hyper-hypercube" with p = {p} needs prime factors of n ≤ {p + 1}, and '
            f'n = {n} has {prime}; set p = {prime - 1}, or use "base-{min(p + 1, 5)}", which is '
            "exact for any n"
        )
    return _graph(n, _hyper_hypercube(range(n), p))


def base(k: int) -> Callable[..., Graph]:
    """Return the builder of the Base-(k+1) graph, in which a node has at most k peers per round."""

    def build(n: int, seed: int = 0) -> Graph:
        return _graph(n, _base(n, k))

    build.__doc__ = f"""Return the Base-{k + 1} graph, which is exact for any n.

    Its rounds are symmetric, of degree ≤ {k}. The period is at most 2
    log_{k + 1} n + 2, and each period computes the exact average. `_simple_base` describes the
    weights.
    Takezawa et al., NeurIPS 2023, algorithm 3 with k = {k}.
    """
    return build


def tree(parents: Sequence[int]) -> Graph:
    """Return the rounds on a tree of at least two nodes whose product is the exact average.

    First, level by level from the deepest, each node sends its whole value to its parent and keeps
    nothing. Then, level by level from the root, a node u with d_u nodes in its subtree sends to
    each child c the fraction d_c/d_u of its value and keeps 1/d_u. All columns sum to one.

    :param parents: parent of each node, −1 for the root
    """
    n = len(parents)
    root = parents.index(-1)
    depth = np.array([_depth(parents, i) for i in range(n)])
    sizes = np.ones(n)
    for i in np.argsort(-depth, kind="stable"):
        if i != root:
            sizes[parents[i]] += sizes[i]
    gather = []
    spread = []
    for level in range(int(depth.max()), 0, -1):
        nodes = np.flatnonzero(depth == level)
        above = np.array(parents)[nodes]
        emptied = np.ones(n)
        own = np.ones(n)
        emptied[nodes] = 0.0
        own[above] = 1.0 / sizes[above]
        gather.append(SparseMatrix.from_edges(n, above, nodes, 1.0, emptied))
        spread.append(SparseMatrix.from_edges(n, nodes, above, sizes[nodes] / sizes[above], own))
    return Graph(Cycle((*gather, *reversed(spread))))


def _depth(parents: Sequence[int], i: int) -> int:
    depth = 0
    while parents[i] >= 0:
        i = parents[i]
        depth = depth + 1
    return depth


def breadth_first(over: Graph) -> list[int]:
    """Return the parent of each node in the breadth-first tree of least depth, −1 for the root.

    The tree uses the edges of all rounds of ``over``, in both directions.

    :raises GraphError: if ``over`` is not connected
    """
    from scipy.sparse import csgraph

    near = links(over)
    near = near + near.T
    depths = csgraph.shortest_path(near, unweighted=True).max(axis=1)
    if not np.isfinite(depths).all():
        raise GraphError(
            f'graph "spanning-tree": over = "{over.name}": this graph is not connected, so it has '
            "no spanning tree; name a connected graph"
        )
    root = int(depths.argmin())
    parents = csgraph.breadth_first_order(near, root)[1]
    parents[root] = -1
    return parents.tolist()


def ceca(n: int, seed: int = 0) -> Graph:
    """Return the ⌈log2 n⌉ permutations that the algorithm `ceca` uses (Ding et al., ICML 2023).

    There is one round for each binary digit d of n − 1, from the highest, and c is 0 in the first
    round. In a round, node i receives from node i − c − d; then c ← 2c + d. The rounds alone do not
    average; the algorithm does.

    :param n: number of nodes
    :param seed: not used
    """
    rounds = []
    c = 0
    for digit in map(int, f"{n - 1:b}"):
        rounds.append(Circulant(n, 0.0, (n - c - digit,), (1.0,)))
        c = 2 * c + digit
    return Graph(Cycle(tuple(rounds)))
