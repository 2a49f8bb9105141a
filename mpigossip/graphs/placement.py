"""Renumber the nodes of a graph so that few messages cross between racks.

Messages between ranks in the same rack are cheaper than messages between racks. Rank i stays node
i, but the nodes of the graph are permuted: W'[i, j] = W[p(i), p(j)], where p(i) is the node of the
given graph that rank i gets.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from mpigossip.graphs.base import Drawn, Graph, GraphError
from mpigossip.graphs.rounds import Round, SparseMatrix
from mpigossip.graphs.weights import as_sparse, links

WORK = 1 << 28
"""Limit of the work of a search: number of swaps times n², the size of the table of each swap."""


def usage(graph: Graph) -> np.ndarray:
    """Return the number of messages from node j (column) to node i (row) in a period, (n, n).

    For a drawn graph, a sample of its rounds is used.
    """
    return links(graph).toarray().T


def cross_rack_fraction(graph: Graph, racks: Sequence[Hashable]) -> float:
    """Return the fraction of a graph's messages that are sent from a rack to another.

    :param graph: graph over the ranks
    :param racks: rack of each node
    """
    counts = usage(graph)
    label = _labels(racks, graph.n)
    total = counts.sum()
    return _crossing(counts, label) / float(total) if total else 0.0


def renumber_for_racks(
    graph: Graph, racks: Sequence[Hashable], order: Sequence[int] | None = None
) -> Graph:
    """Return the graph, renumbered so that few messages cross between racks.

    :func:`graph_nodes_for` has the same parameters.
    """
    return renumbered(graph, graph_nodes_for(graph, racks, order))


def graph_nodes_for(
    graph: Graph, racks: Sequence[Hashable], order: Sequence[int] | None = None
) -> np.ndarray:
    """Return the graph node of each rank, (n,), so that few messages cross between racks.

    The search starts once with node i for rank i, and once with the ranks in the order ``order``.
    It swaps the graph nodes of two ranks as long as this reduces the number of messages between
    racks. The better of both results is returned. A graph that is drawn in each round is not
    renumbered, because all of its nodes are equivalent. The function allocates several arrays (n,
    n) of float64, so one rank should compute the result for all.

    :param graph: graph to renumber
    :param racks: rack of each rank
    :param order: order of the ranks for the second starting point; None: by rack
    """
    label = _labels(racks, graph.n)
    if isinstance(graph.schedule, Drawn) or graph.n < 3:
        return np.arange(graph.n)
    ranks = np.argsort(label, kind="stable") if order is None else np.asarray(order)
    counts = usage(graph)
    both = counts + counts.T
    candidates = [_improved(both, label, p) for p in (np.arange(graph.n), np.argsort(ranks))]
    return min(candidates, key=lambda p: _crossing(both, label[np.argsort(p)]))


def _crossing(counts: np.ndarray, rack_of: np.ndarray) -> float:
    return float((counts * (rack_of[:, None] != rack_of[None, :])).sum())


def _labels(racks: Sequence[Hashable], n: int) -> np.ndarray:
    """Return a number for the rack of each node, (n,); racks are numbered as they first occur."""
    if len(racks) != n:
        raise GraphError(f"{len(racks)} racks are named for {n} nodes; name one rack for each node")
    numbers = {rack: k for k, rack in enumerate(dict.fromkeys(racks))}
    return np.array([numbers[rack] for rack in racks])


def _improved(counts: np.ndarray, label: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Swap the graph nodes of two ranks as long as this reduces the messages between racks.

    :param counts: number of messages between each pair of graph nodes, (n, n), symmetric
    :param label: number of the rack of each rank, (n,)
    :param places: graph node of each rank at the start, (n,)
    :return: graph node of each rank, (n,)
    """
    n = len(places)
    rack_of = np.empty(n, np.int64)  # rack of each graph node
    rack_of[places] = label
    for _ in range(max(1, WORK // n**2)):
        # inside[p, q] counts the messages that would stay inside rack q if graph node p were in it.
        inside = counts @ (rack_of[:, None] == np.arange(label.max() + 1)[None, :])
        stays = inside[np.arange(n), rack_of]
        gain = inside[:, rack_of] + inside[:, rack_of].T - stays[:, None] - stays[None, :]
        gain = gain - 2 * counts * (rack_of[:, None] != rack_of[None, :])
        gain[rack_of[:, None] == rack_of[None, :]] = 0.0
        p, q = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[p, q] <= 1e-9:
            break
        rack_of[[p, q]] = rack_of[[q, p]]
    # Within a rack, ranks get graph nodes in ascending order of the nodes that they had before.
    places = places.copy()
    for rack in range(int(label.max()) + 1):
        ranks = np.flatnonzero(label == rack)
        places[ranks[np.argsort(places[ranks], kind="stable")]] = np.flatnonzero(rack_of == rack)
    return places


def renumbered(graph: Graph, places: Sequence[int] | np.ndarray) -> Graph:
    """Return the graph whose node i is node ``places[i]`` of the given graph."""
    where = np.asarray(places, np.int64)
    if np.array_equal(where, np.arange(graph.n)):
        return graph
    node_at = np.argsort(where)

    def change(r: Round) -> Round:
        edges = as_sparse(r)
        to = node_at[edges.edge_receivers]
        source = node_at[edges.indices]
        return SparseMatrix.from_edges(graph.n, to, source, edges.weights, edges.own[where])

    if isinstance(graph.schedule, Drawn):
        raise GraphError(
            f'graph "{graph.name}" is drawn again in each round, so it can\'t be renumbered; use '
            "it with the order of the ranks"
        )
    return replace(graph, schedule=graph.schedule.mapped(change))
