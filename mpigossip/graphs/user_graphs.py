"""Graphs from users: networkx graphs, matrices, sequences of either, functions, and files.

A graph file is JSON: {"n": 4, "edges": [[0, 1], …], "weights": "laplacian"}. A sequence has
"rounds": [[[0, 1], …], …] instead of "edges". With "directed": true, pairs are [sender, receiver].
The file of a search result has further keys, which are ignored. Files in the formats `.graphml`,
`.gml`, `.edgelist` and `.adjlist` are read by networkx.
"""

import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config.errors import UserError
from mpigossip.config.user_code import call_factory, describe_exception, import_object, parameters
from mpigossip.graphs.base import Cycle, Drawn, Graph, GraphError, from_matrices, static
from mpigossip.graphs.rounds import Round, SparseMatrix
from mpigossip.graphs.weights import rule

NETWORKX = (".graphml", ".gml", ".edgelist", ".adjlist")
NODES = 1 << 16
LARGEST = 1 << 26
"""Largest number of nodes of a graph in a JSON file (NODES), and of bytes of a file (LARGEST)."""


def is_network(value: object) -> bool:
    """Return whether ``value`` is a networkx graph, without importing networkx."""
    return hasattr(value, "is_directed") and hasattr(value, "edges")


def _round(network: Any, weights: str | None, order: Sequence[object]) -> Round:
    """Return a networkx graph as a round.

    :param network: networkx graph
    :param weights: as in :func:`from_networkx`
    :param order: labels of the nodes in the order of their numbers
    :raises GraphError: if a weight is not a number, or the rule is unknown or cannot be applied
    """
    number = {label: i for i, label in enumerate(order)}
    weight_of: dict[tuple[int, int], float | None] = {}
    for u, v, data in network.edges(data=True):
        for a, b in ((u, v),) if network.is_directed() else ((u, v), (v, u)):
            if a != b:
                weight_of[number[b], number[a]] = data.get("weight")
    to, source = np.array(list(weight_of), np.int64).reshape(-1, 2).T
    n = len(order)
    if weights is None and weight_of and None not in weight_of.values():
        try:
            values = np.array(list(weight_of.values()), np.float64)
        except (TypeError, ValueError) as error:
            raise GraphError(
                f'the "weight" of an edge must be a number: {error}; set it to a number such as 0.5'
            ) from None
        return SparseMatrix.from_edges(n, to, source, values)
    chosen = weights or ("uniform" if network.is_directed() else "metropolis-hastings")
    return rule(chosen)(SparseMatrix.from_edges(n, to, source, 1.0))


def _order(network: Any) -> list[object]:
    """Return the labels of the nodes in the order of their numbers.

    The labels 0 … n−1 are the numbers themselves. Other labels are numbered in the order of the
    network.

    :raises GraphError: if there are no nodes
    """
    labels = list(network.nodes)
    if not labels:
        raise GraphError("a networkx graph without nodes can't be used; add at least one node")
    return sorted(labels) if set(labels) == set(range(len(labels))) else labels


def from_networkx(network: Any, weights: str | None = None, name: str = "networkx") -> Graph:
    """Return the static graph of a networkx graph.

    Self-loops are ignored, because the weights of a row determine its own weight.

    :param network: networkx graph; a directed edge (u, v) means that v receives from u
    :param weights: rule of `weights.WEIGHTS`; None: if all edges have the attribute "weight", these
        weights, with own weights that make the rows sum to one, and otherwise
        "metropolis-hastings", or "uniform" for directed graphs
    :param name: name of the graph in messages
    :raises GraphError: if the graph has no nodes, a weight is not a number, or the rule is unknown
        or cannot be applied to the graph
    """
    return static(_round(network, weights, _order(network)), name)


def from_sequence(
    items: Sequence[Any], weights: str | None = None, name: str = "sequence"
) -> Graph:
    """Return the graph that cycles through networkx graphs over the same nodes, or matrices.

    :param items: networkx graphs, or matrices of shape (n, n)
    :param weights: rule for networkx graphs, as in :func:`from_networkx`
    :param name: name of the graph in messages
    :raises GraphError: if networkx graphs have different nodes or are mixed with matrices, if an
        item is no valid graph or matrix, or if there are no items
    """
    items = list(items)
    if not any(is_network(item) for item in items):
        return from_matrices(items, name)
    order = _order(next(item for item in items if is_network(item)))
    rounds = []
    for t, item in enumerate(items):
        if not is_network(item):
            raise GraphError(
                f"item {t} of a sequence of networkx graphs is a {type(item).__name__}; use "
                "networkx graphs only"
            )
        if set(item.nodes) != set(order):
            raise GraphError(
                f"networkx graph {t} of the sequence has different nodes than the first "
                f"({len(item.nodes)} and {len(order)}); use the same node names in all graphs"
            )
        rounds.append(_round(item, weights, order))
    return Graph(Cycle(tuple(rounds)), name)


def from_value(value: Any) -> Graph:
    """Return the graph of a networkx graph, a mixing matrix, or a sequence of either.

    A `Graph` is returned unchanged, and a round becomes a static graph.

    :raises GraphError: if the value has another type, or is no valid graph
    """
    if isinstance(value, Graph) or is_network(value):
        return value if isinstance(value, Graph) else from_networkx(value)
    if isinstance(value, Round):
        return static(value)
    if isinstance(value, np.ndarray | list | tuple):
        return from_sequence([value] if getattr(value, "ndim", 3) == 2 else list(value))
    raise GraphError(
        f"graph: a {type(value).__name__} is not a graph: give a matrix, a networkx graph, a list "
        "of matrices, or a list of networkx graphs"
    )


def _call(function: Callable, name: str, options: Mapping[str, Any], **arguments: int) -> Graph:
    """Call a user's function and return its result as a graph.

    The function is called with all ``options``, and with those ``arguments`` for which it has
    parameters. If it has other parameters without defaults, it gets ``arguments`` by position.

    :param function: function of a user
    :param name: name of the function in messages
    :param options: options of the graph that the user has set
    :param arguments: n, seed and, for a function that returns one round, t
    :raises GraphError: if the function raises an error or returns no graph
    """
    try:
        return from_value(call_factory(function, arguments, options))
    except Exception as error:
        message = str(error) if isinstance(error, UserError) else describe_exception(error)
        raise GraphError(f'graph "{name}", called with {arguments}: {message}') from error


def from_function(function: Any, n: int, seed: int = 0, **options: Any) -> Graph:
    """Return the graph that a function defines.

    function(n, seed) returns all rounds of the graph, in any form that :func:`from_value` accepts.
    If the function has a parameter t, it returns round t only. With the option ``period``, it is
    called at once for the rounds 0 … period − 1, which then repeat. With the option ``degree``,
    which requires that the function is given by its name, it is called for each round when the
    round is needed.

    :param function: function, or its name "module:function"
    :param n: number of nodes
    :param seed: seed that is passed to the function
    :param options: options of the function. A function of t also needs ``period``, or ``degree``,
        the largest number of in-neighbours of a node in any round
    :raises GraphError: if the function fails or returns no graph, if ``period`` or ``degree`` is
        missing or invalid for a function of t, or if round 0 differs between two calls
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", "function")
    if is_named := function is name:
        function = import_object(
            "graph.name", name, "n, seed and, for one round, t, returning matrices"
        )
    if "t" not in parameters(function)[0]:
        return _call(function, name, options, n=n, seed=seed)
    period = options.pop("period", None)
    degree = options.pop("degree", None)
    stated = period or degree

    def draw(n: int, seed: int, t: int) -> Round:
        return _call(function, name, options, n=n, seed=seed, t=t).round(t)

    if type(stated) is not int or not 0 < stated <= 1 << 16 or not (is_named or period):
        raise GraphError(
            f'graph "{name}" is a function of t: give an integer period, of 1 to {1 << 16} rounds, '
            'which then repeat; or, if the graph is given by its name "module:function", a degree, '
            f"the largest number of in-neighbours; got period = {period}, degree = {degree}; for "
            "example mpigossip.graph(function, n, period=4)"
        )
    if period:
        return Graph(Cycle(tuple(draw(n, seed, t) for t in range(period))), name)
    result = Graph(Drawn(draw, n, seed), name, stated=min(stated, n - 1))
    if draw(n, seed, 0) != result.round(0):
        raise GraphError(
            f'graph "{name}": round 0 differs between two calls; use n, seed and t only'
        )
    return result


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a graph file of unknown origin; if this or reading fails, raise GraphError."""
    from mpigossip.store import StoreError, guard

    try:
        with guard.regular(path) as file:
            if (size := file.seek(0, os.SEEK_END)) > LARGEST:
                raise ValueError(f"it has {size} bytes, at most {LARGEST} are allowed")
            file.seek(0)
            yield file
    except GraphError:
        raise
    except FileNotFoundError as error:
        raise GraphError(f'graph file "{path}" doesn\'t exist; check the path') from error
    except PermissionError as error:
        raise GraphError(
            f'graph file "{path}" can\'t be read: {error.strerror}; ask its owner for access'
        ) from error
    except StoreError as error:
        raise GraphError(f"graph file {error}") from error
    except Exception as error:  # readers raise many kinds of errors
        kind = {".json": "JSON"}.get(path.suffix, path.suffix[1:])
        raise GraphError(
            f'graph file "{path}" can\'t be read as {kind}: {error}; check its content'
        ) from error


def from_file(path: str | Path) -> Graph:
    """Return the graph in a file, with the name "file:PATH".

    :raises GraphError: if the file cannot be read or its content is wrong
    """
    path = Path(path)
    name = f"file:{path}"
    path = Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises if ~user is unknown
    if path.suffix in NETWORKX:
        return from_networkx(_network(path), name=name)
    if path.suffix != ".json":
        suffixes = f"use .json, {', '.join(NETWORKX)}"
        suffixes += "; .h5 was removed, use `graph search --out FILE.json`" * (path.suffix == ".h5")
        raise GraphError(f'graph file "{path}" has an unknown suffix; {suffixes}')
    with _opened(path) as file:
        content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("it contains no JSON object")
    try:
        if isinstance(content["n"], bool):
            raise TypeError('"n" is true or false')
        n = operator.index(content["n"])
        rounds = content["rounds"] if "rounds" in content else [content["edges"]]
        if not isinstance(rounds, list) or not rounds:
            raise TypeError(f'"rounds" is {rounds!r:.40}')
        directed = bool(content.get("directed", False))
    except (KeyError, TypeError) as error:
        raise GraphError(
            f'graph file "{path}" needs "n" (a number) and "edges" (or "rounds"); missing or '
            f"wrong: {error}"
        ) from error
    weights = content.get("weights", "uniform" if directed else "metropolis-hastings")
    if not isinstance(weights, str):
        raise GraphError(
            f'graph file "{path}": "weights" must name a rule, such as "metropolis-hastings"; '
            f"got {weights}"
        )
    weighted = [rule(weights)(_edges(edges, n, directed, path)) for edges in rounds]
    return Graph(Cycle(tuple(weighted)), name)


def _edges(edges: Any, n: int, directed: bool, path: Path) -> SparseMatrix:
    """Return the round, with weights 1, of the pairs of nodes in a file.

    :param edges: pairs of node numbers, as read from JSON
    :param n: number of nodes
    :param directed: True: pairs are (sender, receiver); False: messages go both ways
    :param path: path of the file, for messages
    :raises GraphError: if ``edges`` is not a list of distinct pairs of different nodes, or if n is
        not from 1 to `NODES`
    """
    try:
        pairs = np.array(edges)
    except (TypeError, ValueError):
        pairs = np.array(None)
    if pairs.size and (pairs.dtype.kind not in "iu" or pairs.shape[1:] != (2,)):
        raise GraphError(f'graph file "{path}": edges must be pairs of integers, such as [0, 1]')
    pairs = pairs.astype(np.int64).reshape(-1, 2)
    ends = pairs if directed else np.sort(pairs, axis=1)
    if not 1 <= n <= NODES:
        raise GraphError(
            f'graph file "{path}": n = {n}: a graph in a file must have 1 to {NODES} nodes'
        )
    if len(pairs) and (pairs.min() < 0 or pairs.max() >= n):
        outside = pairs[((pairs < 0) | (pairs >= n)).any(axis=1)][0].tolist()
        raise GraphError(
            f'graph file "{path}": the edge {outside} leads outside the nodes 0 … {n - 1}: number '
            "the nodes from 0, or increase n"
        )
    if (pairs[:, 0] == pairs[:, 1]).any() or len(np.unique(ends, axis=0)) < len(ends):
        raise GraphError(
            f'graph file "{path}": an edge occurs twice or joins a node to itself: list each edge '
            "once; in an undirected graph, [0, 1] and [1, 0] are the same edge"
        )
    source, to = pairs.T
    if not directed:
        source, to = np.concatenate((pairs, pairs[:, ::-1])).T
    return SparseMatrix.from_edges(n, to, source, 1.0)


def _network(path: Path) -> Any:
    """Return the networkx graph in a file, with the nodes 0 … n−1.

    Labels that are these numbers are kept; other labels are numbered in their ascending order.

    :raises GraphError: if the file can't be read
    """
    import networkx

    reader = getattr(networkx, f"read_{path.suffix[1:]}")
    with _opened(path) as file:
        network = reader(file)
        number = {label: int(label) for label in network if str(label).isdecimal()}
        # Labels are strings in most formats, and sorting strings would put "10" before "2".
        if sorted(number.values()) == [*range(len(network))]:
            return networkx.relabel_nodes(network, number)
        return networkx.convert_node_labels_to_integers(network, ordering="sorted")
