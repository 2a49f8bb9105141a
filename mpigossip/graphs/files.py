"""Graphs in files: results of searches (JSON), and networks in networkx's formats.

JSON: {"n": 4, "edges": [[0, 1], …], "weights": "laplacian"}; "rounds": [[[0, 1], …], …] instead of
"edges" for a sequence, "directed": true for pairs [sender, receiver]. What `save` writes has
more, which reading leaves alone: score, spectrum, history. `.graphml`, `.gml`, `.edgelist` and
`.adjlist` are read by networkx.
"""

import json
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.graphs.base import Cycle, Graph, GraphError
from mpigossip.graphs.networks import from_networkx
from mpigossip.graphs.rounds import Sparse
from mpigossip.graphs.search import Found
from mpigossip.graphs.weights import rule

NETWORKX = (".graphml", ".gml", ".edgelist", ".adjlist")
NODES, LARGEST = 1 << 16, 1 << 26
"""Most nodes of a graph in a file, and bytes of that."""


def save(found: Found, path: str | Path) -> Path:
    """Write a search's result as JSON; whole or not at all."""
    from mpigossip.store import StoreError, hdf5

    path = Path(path)
    check_target(path)
    try:
        with hdf5.replacing(path) as beside:
            beside.write_text(json.dumps(asdict(found)) + "\n")
    except StoreError as error:
        raise GraphError(str(error)) from error
    return path


def check_target(path: Path) -> None:
    """Return whether `save` can write a search's result there: before the search, not after it."""
    if path.suffix != ".json":
        raise GraphError(f'"{path}": a graph is saved as JSON; name it .json')
    if not path.parent.is_dir():
        raise GraphError(f'can\'t write "{path}": there is no folder "{path.parent}"; make it')


def load(path: str | Path) -> Found:
    """The result of a search that `save` wrote; GraphError for anything else."""
    content = _content(Path(path))
    try:
        content["edges"] = tuple((int(i), int(j)) for i, j in content["edges"])
        content["spectrum"] = tuple(float(v) for v in content["spectrum"])
        content["history"] = tuple((float(a), int(b), float(c)) for a, b, c in content["history"])
        return Found(**content)
    except (KeyError, TypeError, ValueError) as error:
        raise GraphError(f'"{path}" isn\'t the result of a search: {error}') from error


def _content(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    with _opened(path) as file:
        content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, which may be somebody else's; GraphError for what it isn't."""
    from mpigossip.store import StoreError, guard

    try:
        with guard.regular(path) as file:
            if (size := file.seek(0, os.SEEK_END)) > LARGEST:
                raise ValueError(f"it has {size} bytes, at most {LARGEST} are read")
            file.seek(0)
            yield file
    except GraphError:
        raise
    except FileNotFoundError as error:
        raise GraphError(f'graph file "{path}" doesn\'t exist') from error
    except PermissionError as error:
        raise GraphError(
            f'graph file "{path}" can\'t be read: {error.strerror}; ask its owner for it'
        ) from error
    except StoreError as error:
        raise GraphError(f"graph file {error}") from error
    except Exception as error:  # each format has errors of its own
        kind = {".json": "JSON"}.get(path.suffix, path.suffix[1:])
        raise GraphError(f'graph file "{path}" can\'t be read as {kind}: {error}') from error


def read(path: str | Path) -> Graph:
    """The graph in a file; its name is "file:PATH". GraphError names what is wrong in it."""
    path = Path(path)
    name = f"file:{path}"
    if path.suffix in NETWORKX:
        return from_networkx(_network(path), name=name)
    if path.suffix != ".json":
        raise GraphError(
            f'graph file "{path}" has an unknown suffix; known are .json, {", ".join(NETWORKX)}'
        )
    content = _content(path)
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
            f'graph file "{path}": "weights" names a rule, as "metropolis-hastings"; got {weights}'
        )
    made = [rule(weights)(_edges(edges, n, directed, path)) for edges in rounds]
    return Graph(Cycle(tuple(made)), name)


def _edges(edges: Any, n: int, directed: bool, path: Path) -> Sparse:
    """One round from pairs of nodes."""
    try:
        pairs = np.array(edges)
    except (TypeError, ValueError):
        pairs = np.array(None)
    if pairs.size and (pairs.dtype.kind not in "iu" or pairs.shape[1:] != (2,)):
        raise GraphError(f'graph file "{path}": edges have to be pairs of integers, as [0, 1]')
    pairs = pairs.astype(np.int64).reshape(-1, 2)
    ends = pairs if directed else np.sort(pairs, axis=1)
    if not 1 <= n <= NODES:
        raise GraphError(f'graph file "{path}": n = {n}, a graph in a file has 1 to {NODES} nodes')
    if len(pairs) and (pairs.min() < 0 or pairs.max() >= n):
        raise GraphError(f'graph file "{path}": an edge leads outside the nodes 0 … {n - 1}')
    if (pairs[:, 0] == pairs[:, 1]).any() or len(np.unique(ends, axis=0)) < len(ends):
        raise GraphError(f'graph file "{path}": an edge is named twice or leads to its own node')
    source, to = pairs.T
    if not directed:
        source, to = np.concatenate((pairs, pairs[:, ::-1])).T
    return Sparse.from_edges(n, to, source, 1.0)


def _network(path: Path) -> Any:
    import networkx

    reader = getattr(networkx, f"read_{path.suffix[1:]}")
    with _opened(path) as file:
        return networkx.convert_node_labels_to_integers(reader(file), ordering="sorted")
