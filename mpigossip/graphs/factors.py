"""Sequences of directed rounds: factors of the exact average on a tree, permutations for CECA.

They belong to one method each (`defacto`, `ceca`): their rounds alone don't average.
"""

from collections.abc import Sequence

import numpy as np

from mpigossip.graphs.base import Cycle, Graph, GraphError
from mpigossip.graphs.rounds import Circulant, Sparse
from mpigossip.graphs.weights import as_sparse


def factors(parents: Sequence[int]) -> Graph:
    """The rounds for a tree: parents[i] is i's parent, the root's is −1.

    Gather, deepest level first: each node of the level gives all to its parent and keeps nothing.
    Spread, the root's level first: node u with d_u nodes in its subtree gives each child c the
    part d_c/d_u of what it has and keeps 1/d_u. All columns sum to one.
    """
    n, root = len(parents), parents.index(-1)
    depth = np.array([_depth(parents, i) for i in range(n)])
    sizes = np.ones(n)
    for i in np.argsort(-depth, kind="stable"):
        if i != root:
            sizes[parents[i]] += sizes[i]
    gather, spread = [], []
    for level in range(int(depth.max()), 0, -1):
        nodes = np.flatnonzero(depth == level)
        above = np.array(parents)[nodes]
        emptied, kept = np.ones(n), np.ones(n)
        emptied[nodes] = 0.0
        kept[above] = 1.0 / sizes[above]
        gather.append(Sparse.from_edges(n, above, nodes, 1.0, emptied))
        spread.append(Sparse.from_edges(n, nodes, above, sizes[nodes] / sizes[above], kept))
    return Graph(Cycle((*gather, *reversed(spread))))


def _depth(parents: Sequence[int], i: int) -> int:
    depth = 0
    while parents[i] >= 0:
        i, depth = parents[i], depth + 1
    return depth


def breadth_first(over: Graph) -> list[int]:
    """Parents in the breadth-first tree of least depth, along edges of any round."""
    from scipy.sparse import csgraph, csr_array

    n = over.n
    rounds = [as_sparse(r) for r in over.schedule.rounds]
    ends = np.concatenate([(r.edge_receivers, r.indices) for r in rounds], axis=1)
    near = csr_array((np.ones(ends.shape[1]), ends), (n, n))
    near = csr_array(near + near.T)
    depths = csgraph.shortest_path(near, unweighted=True).max(axis=1)
    if not np.isfinite(depths).all():
        raise GraphError(f'graph "{over.name}" is not connected; a spanning tree needs it to be')
    root = int(depths.argmin())
    parents = csgraph.breadth_first_order(near, root)[1]
    parents[root] = -1
    return parents.tolist()


def ceca(n: int, seed: int = 0) -> Graph:
    """Permutations for the method `ceca` (Ding et al., ICML 2023), ⌈log2 n⌉ of them.

    By the binary digits d of n − 1 from the top, c = 0 at first: node i gets what node
    i − c − d sent, then c ← 2c + d. The method, not the graph, does the averaging.
    """
    rounds, c = [], 0
    for digit in map(int, f"{n - 1:b}"):
        rounds.append(Circulant(n, 0.0, (n - c - digit,), (1.0,)))
        c = 2 * c + digit
    return Graph(Cycle(tuple(rounds)))
