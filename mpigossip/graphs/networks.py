"""Graphs from networkx graphs, and from sequences of them or of matrices."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpigossip.graphs.base import Cycle, Graph, GraphError, from_matrices, static
from mpigossip.graphs.rounds import Round, Sparse
from mpigossip.graphs.weights import rule


def is_network(value: object) -> bool:
    """Whether this is a networkx graph (told without importing networkx)."""
    return hasattr(value, "is_directed") and hasattr(value, "edges")


def _round(network: Any, weights: str | None, order: Sequence[object]) -> Round:
    """One networkx graph as a round; see `from_networkx`."""
    number = {label: i for i, label in enumerate(order)}
    given: dict[tuple[int, int], float | None] = {}
    for u, v, data in network.edges(data=True):
        for a, b in ((u, v),) if network.is_directed() else ((u, v), (v, u)):
            if a != b:
                given[number[b], number[a]] = data.get("weight")
    to, source = np.array(list(given), np.int64).reshape(-1, 2).T
    n = len(order)
    if weights is None and given and None not in given.values():
        return Sparse.from_edges(n, to, source, np.array(list(given.values()), np.float64))
    chosen = weights or ("uniform" if network.is_directed() else "metropolis-hastings")
    return rule(chosen)(Sparse.from_edges(n, to, source, 1.0))


def _order(network: Any) -> list[object]:
    """Nodes 0 … n−1 in that order if these are the labels, else as the network lists them."""
    labels = list(network.nodes)
    if not labels:
        raise GraphError("a networkx graph without nodes can't be a graph; add one at least")
    return sorted(labels) if set(labels) == set(range(len(labels))) else labels


def from_networkx(network: Any, weights: str | None = None, name: str = "networkx") -> Graph:
    """The static graph of a networkx graph; a directed edge (u, v) means that v receives from u.

    `weights` names a rule (see `weights.WEIGHTS`). Without it edges that all carry the attribute
    "weight" keep them (own weights fill the rows up to one); others get "metropolis-hastings",
    directed ones "uniform". Self-loops are left out: the own weight is what remains.
    """
    return static(_round(network, weights, _order(network)), name)


def from_sequence(
    items: Sequence[Any], weights: str | None = None, name: str = "sequence"
) -> Graph:
    """The graph that goes in turn through networkx graphs (over the same nodes) or matrices."""
    items = list(items)
    if not any(is_network(item) for item in items):
        return from_matrices(items, name)
    order = _order(next(item for item in items if is_network(item)))
    rounds = []
    for t, item in enumerate(items):
        if not is_network(item):
            raise GraphError(
                f"item {t} of a sequence of networkx graphs is a {type(item).__name__}"
            )
        if set(item.nodes) != set(order):
            raise GraphError(f"networkx graph {t} of the sequence has other nodes than the first")
        rounds.append(_round(item, weights, order))
    return Graph(Cycle(tuple(rounds)), name)
