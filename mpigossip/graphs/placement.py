"""Renumber the nodes of a graph so that few messages cross between racks.

Messages between ranks in the same rack are cheaper than messages between racks. Rank i stays node
i, but the nodes of the graph are permuted: W'[i, j] = W[p(i), p(j)], where p(i) is the node of the
given graph that rank i gets.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError
from mpigossip.graphs.rounds import Round, SparseMatrix, as_sparse
from mpigossip.graphs.weights import links

WORK = 1 << 28
"""Limit of the work of a search: number of swaps times n², the number of pairs of each swap."""
BLOCK = 1 << 20
"""Largest number of pairs of graph nodes that are compared at once, or n if it is larger."""


def usage(graph: Graph) -> Any:
    """Count the messages of a period from node j (column) to node i (row).

    For a drawn graph, a sample of its rounds is used.

    :return: a scipy csr_array of shape (n, n)
    """
    return links(graph).T.tocsr()


def cross_rack_fraction(graph: Graph, racks: Sequence[Hashable]) -> float:
    """Return the fraction of a graph's messages that are sent from a rack to another.

    The fraction is 0 if no messages are sent.

    :param graph: graph over the ranks
    :param racks: rack of each rank
    :raises GraphError: if ``racks`` does not have one entry per node
    """
    counts = usage(graph)
    label = _labels(racks, graph.n)
    total = counts.sum()
    return _crossing(counts, label) / float(total) if total else 0.0


def renumber_for_racks(
    graph: Graph, racks: Sequence[Hashable], order: Sequence[int] | None = None
) -> Graph:
    """Return the graph, renumbered so that few messages cross between racks.

    :func:`graph_nodes_for` has the same parameters and errors, and describes the search.
    """
    return renumbered(graph, graph_nodes_for(graph, racks, order))


def graph_nodes_for(
    graph: Graph, racks: Sequence[Hashable], order: Sequence[int] | None = None
) -> np.ndarray:
    """Return the graph node of each rank, (n,), so that few messages cross between racks.

    The search starts once with node i for rank i, and once with the ranks in the order ``order``.
    It swaps the graph nodes of two ranks as long as this reduces the number of messages between
    racks, up to a limit of work for large n. The better of both results is returned. For a graph
    that is drawn in each round, or has fewer than three nodes, the result is 0 … n−1. The time of a
    swap grows with n², so one rank should compute the result for all. The memory grows with the
    number of edges.

    :param graph: graph to renumber
    :param racks: rack of each rank
    :param order: ranks that get nodes 0, 1, … at the second starting point; None: ranks by rack
    :raises GraphError: if ``racks`` does not have one entry per node
    """
    label = _labels(racks, graph.n)
    if isinstance(graph.schedule, Drawn) or graph.n < 3:
        return np.arange(graph.n)
    ranks = np.argsort(label, kind="stable") if order is None else np.asarray(order)
    counts = usage(graph)
    both = (counts + counts.T).tocsr()
    candidates = [_improved(both, label, p) for p in (np.arange(graph.n), np.argsort(ranks))]
    return min(candidates, key=lambda p: _crossing(both, label[np.argsort(p)]))


def _crossing(counts: Any, rack_of: np.ndarray) -> float:
    """Return the sum of ``counts`` over the pairs of graph nodes in different racks.

    :param counts: number of messages between each pair of graph nodes, a csr_array (n, n)
    :param rack_of: number of the rack of each graph node, (n,)
    """
    pairs = counts.tocoo()
    return float(pairs.data[rack_of[pairs.row] != rack_of[pairs.col]].sum())


def _labels(racks: Sequence[Hashable], n: int) -> np.ndarray:
    """Return the number of the rack of each rank, (n,); racks are numbered as they first occur.

    :raises GraphError: if ``racks`` does not have n entries
    """
    if len(racks) != n:
        raise GraphError(f"{len(racks)} racks are named for {n} nodes; name one rack for each node")
    numbers = {rack: k for k, rack in enumerate(dict.fromkeys(racks))}
    return np.array([numbers[rack] for rack in racks])


def _improved(counts: Any, label: np.ndarray, graph_nodes: np.ndarray) -> np.ndarray:
    """Swap the graph nodes of two ranks as long as this reduces the messages between racks.

    :param counts: number of messages between each pair of graph nodes, a symmetric csr_array (n, n)
    :param label: number of the rack of each rank, (n,)
    :param graph_nodes: graph node of each rank at the start, (n,)
    :return: graph node of each rank, (n,)
    """
    n = len(graph_nodes)
    rack_of = np.empty(n, np.int64)  # rack of each graph node
    rack_of[graph_nodes] = label
    for _ in range(max(1, WORK // n**2)):
        gain, p, q = _best_swap(counts, rack_of)
        if gain <= 0:
            break
        rack_of[[p, q]] = rack_of[[q, p]]
    # Within a rack, ranks get graph nodes in ascending order of the nodes that they had before.
    graph_nodes = graph_nodes.copy()
    for rack in range(int(label.max()) + 1):
        ranks = np.flatnonzero(label == rack)
        ascending = ranks[np.argsort(graph_nodes[ranks], kind="stable")]
        graph_nodes[ascending] = np.flatnonzero(rack_of == rack)
    return graph_nodes


def _best_swap(counts: Any, rack_of: np.ndarray) -> tuple[float, int, int]:
    """Return the swap of the racks of two graph nodes that saves most messages between racks.

    If c(p, q) messages are exchanged by graph nodes p and q, and I(p, r) by p and all graph nodes
    in rack r, then a swap of p in rack r with q in another rack s saves

        I(p, s) + I(q, r) − I(p, r) − I(q, s) − 2 c(p, q)

    messages. All numbers are integers, so that the result does not depend on the order of sums.

    :param counts: c, a symmetric csr_array (n, n)
    :param rack_of: number of the rack of each graph node, (n,)
    :return: number of saved messages, p and q; if no swap saves a message, the number is 0. If
        several swaps are best, p is the lowest possible, and then q
    """
    from scipy.sparse import csr_array

    n = len(rack_of)
    nodes = np.arange(n)
    inside = counts @ csr_array((np.ones(n), (nodes, rack_of)), (n, int(rack_of.max()) + 1))
    by_rack = inside.tocsc()
    pairs = counts.tocoo()
    within = rack_of[pairs.row] == rack_of[pairs.col]
    stays = np.bincount(pairs.row[within], pairs.data[within], n)
    best = 0.0, 0, 0
    rows = max(1, BLOCK // n)
    for first in range(0, n, rows):
        block = nodes[first : first + rows]
        gain = inside[block].toarray()[:, rack_of]
        gain += by_rack[:, rack_of[block]].toarray().T
        gain -= stays[block, None]
        gain -= stays
        edges = counts[block].tocoo()
        gain[edges.row, edges.col] -= 2 * edges.data
        gain[rack_of[block, None] == rack_of] = 0.0
        p, q = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[p, q] > best[0]:
            best = float(gain[p, q]), first + int(p), int(q)
    return best


def renumbered(graph: Graph, graph_nodes: Sequence[int] | np.ndarray) -> Graph:
    """Return the graph whose node i is node ``graph_nodes[i]`` of the given graph.

    :param graph: graph to renumber
    :param graph_nodes: the n nodes of ``graph``, each once, in their new order
    :raises GraphError: if ``graph_nodes`` changes the order of the nodes, and the rounds of the
        graph are drawn at random, or its nodes have weights
    """
    given_nodes = np.asarray(graph_nodes, np.int64)
    if np.array_equal(given_nodes, np.arange(graph.n)):
        return graph
    if graph.node_weights:
        raise GraphError(
            f'renumbered: the nodes of graph "{graph.name}" have weights: renumber the graph '
            "first, and then weigh its nodes"
        )
    node_at = np.argsort(given_nodes)

    def change(r: Round) -> Round:
        edges = as_sparse(r)
        to = node_at[edges.edge_receivers]
        source = node_at[edges.indices]
        return SparseMatrix.from_edges(graph.n, to, source, edges.weights, edges.own[given_nodes])

    if isinstance(graph.schedule, Drawn):
        raise GraphError(
            f'renumbered: the rounds of graph "{graph.name}" are drawn at random, so its nodes '
            f"can't be renumbered: pass graph_nodes=range({graph.n}), or choose another graph"
        )
    return replace(graph, schedule=graph.schedule.mapped(change))
