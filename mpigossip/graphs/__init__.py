"""Graphs by name: mixing matrices W(t) of n nodes. This package imports neither MPI nor torch.

`graph(name, n)` returns a graph by the name that a job file uses; `BUILDERS` lists all names.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np

from mpigossip.config.errors import JobError
from mpigossip.config.limits import Positive
from mpigossip.config.structure import structure
from mpigossip.config.toml import near
from mpigossip.config.user_code import is_user_code
from mpigossip.graphs import classic, equitopo, exponential, finite_time
from mpigossip.graphs.base import Graph, GraphError, checked_seed
from mpigossip.graphs.base import from_matrices as from_matrices
from mpigossip.graphs.rounds import Circulant as Circulant
from mpigossip.graphs.rounds import SparseMatrix as SparseMatrix
from mpigossip.graphs.user_graphs import from_file, from_function, from_value
from mpigossip.graphs.user_graphs import from_networkx as from_networkx
from mpigossip.graphs.user_graphs import from_sequence as from_sequence
from mpigossip.graphs.weights import WEIGHTS as WEIGHTS
from mpigossip.graphs.weights import reweighted


def _builder(name: str, build: Callable[..., Graph]) -> Callable[..., Graph]:
    """Return a builder that adds to ``build`` the steps that all graphs have in common.

    The builder checks n, the seed, and the names and types of the options, returns the graph of a
    single node if n is 1, applies the option `slack`, and gives the graph its name. It raises
    GraphError if a check fails.

    :param name: name of the graph
    :param build: function (n, seed, option=…) that returns the graph for n > 1
    """
    build_signature = inspect.signature(build)
    kind = inspect.Parameter.KEYWORD_ONLY
    slack = inspect.Parameter("slack", kind, default=1.0, annotation=float)
    signature = build_signature.replace(parameters=[*build_signature.parameters.values(), slack])
    option_names = [p.name for p in signature.parameters.values() if p.kind is kind]
    option_types = get_type_hints(build, include_extras=True) | {"slack": float}

    @functools.wraps(build)
    def builder(n: int, seed: int = 0, *, slack: float = 1.0, **options: object) -> Graph:
        for option in options.keys() - set(option_names):
            raise GraphError(
                f'graph "{name}" has no option "{option}"; its options are '
                f"{', '.join(option_names)}"
            )
        for option, value in (options | {"slack": slack}).items():
            number = value.item() if isinstance(value, np.generic) else value
            try:
                structure(number, option_types[option], option)
            except JobError as error:
                raise GraphError(f'graph "{name}": {error}') from None
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
            raise GraphError(
                f'graph "{name}" needs at least one node, got {n!r}; pass n, the number of nodes'
            )
        n = operator.index(n)
        seed = checked_seed(seed, f'graph "{name}"')
        result = build(n, seed, **options) if n > 1 else classic.identity(n)
        return result.renamed(name, **options).slack(slack)

    typed: Any = builder
    typed.__signature__ = signature
    typed.__annotations__ = {**build.__annotations__, "slack": float}
    return typed


def spanning_tree(
    n: int, seed: int = 0, *, children: Positive = 2, over: str | None = None
) -> Graph:
    """Return rounds on a rooted tree whose product is the exact average 11ᵀ/n (Ko 2010).

    In the first half of a period, values are sent from the leaves to the root. In the second half,
    the average is sent back.

    :param n: number of nodes
    :param seed: seed of the graph ``over``
    :param children: largest number of children of a node, at least 1; not used with ``over``
    :param over: name of a graph whose breadth-first tree from a central node is used; None: a tree
        that is filled level by level. The period, 2 · depth, is between the diameter of that graph
        and twice its diameter, if its edges are taken in both directions
    :raises GraphError: if there is no graph ``over`` for n nodes, or if it is not connected
    """
    if over is None:
        return finite_time.tree([(i - 1) // children for i in range(n)])
    return finite_time.tree(finite_time.breadth_first(graph(over, n, seed=seed)))


BUILDERS: dict[str, Callable[..., Graph]] = {
    name: _builder(name, build)
    for name, build in {
        "exponential": exponential.exponential,
        "one-peer-exponential": exponential.one_peer_exponential,
        "one-peer-hypercube": exponential.one_peer_hypercube,
        "p-peer-exponential": exponential.p_peer_exponential,
        "alternating-exponential-ring": exponential.alternating_exponential_ring,
        "base-2": finite_time.base(1),
        "base-3": finite_time.base(2),
        "base-4": finite_time.base(3),
        "base-5": finite_time.base(4),
        "hyper-hypercube": finite_time.hyper_hypercube,
        "ring": classic.ring,
        "ring-lattice": classic.ring_lattice,
        "path": classic.path,
        "star": classic.star,
        "grid": classic.grid,
        "torus": classic.torus,
        "hypercube": classic.hypercube,
        "complete": classic.complete,
        "identity": classic.identity,
        "half-random": classic.half_random,
        "erdos-renyi": classic.erdos_renyi,
        "random-regular": classic.random_regular,
        "random-matching": classic.random_matching,
        "d-equistatic": equitopo.d_equistatic,
        "u-equistatic": equitopo.u_equistatic,
        "od-equidyn": equitopo.od_equidyn,
        "ou-equidyn": equitopo.ou_equidyn,
        "spanning-tree": spanning_tree,
        "ceca": finite_time.ceca,
    }.items()
}
"""Builder of each graph, by name: builder(n, seed=0, *, slack=1.0, option=…) -> Graph."""


def graph(
    name: Any,
    n: int | None = None,
    weights: str | None = None,
    seed: int = 0,
    lazy: bool = False,
    **options: Any,
) -> Graph:
    """Return the graph that ``name`` names or contains, over n nodes.

    :param name: name of a graph as in a job, such as "ring"; or "file:PATH" for a file that `graph
        search` has saved or networkx can read; or a function ``(n, seed, t) -> W(t)``, or ``(n,
        seed)`` that returns all rounds, or its name "module:function"; or a `Graph`, a networkx
        graph, a mixing matrix (n, n), or a list of matrices or networkx graphs, one for each round
    :param n: number of nodes; required if ``name`` is the name of a graph or a function. None: the
        number of nodes of the given graph
    :param weights: rule that replaces the weights of the graph, as `graph.weights` of a job; None:
        the graph keeps its weights
    :param seed: seed of graphs that are drawn at random
    :param lazy: return the graph of (I + W)/2 instead of W
    :param options: options of the graph, as in a job, or of the function; a function of t needs
        ``period`` or ``degree``. ``slack=κ`` gives κW + (1−κ)I
    :raises GraphError: if there is no such graph or rule, a file can't be read, an option is
        unknown or outside its range, or the given graph does not have n nodes
    """
    if isinstance(name, str) and name.startswith("file:"):
        return _finished(from_file(name.removeprefix("file:")), n, weights, lazy, **options)
    slack = options.pop("slack", 1.0)
    if callable(name) or isinstance(name, str) and is_user_code(name):
        return _finished(from_function(name, n, seed, **options), n, weights, lazy, slack)
    if not isinstance(name, str):
        return _finished(from_value(name), n, weights, lazy, slack, **options)
    if name not in BUILDERS:
        raise GraphError(f'graph "{name}" is unknown; {near(name, BUILDERS)}')
    return _finished(BUILDERS[name](n, seed, **options), n, weights, lazy, slack=slack)


def _finished(
    result: Graph,
    n: int | None,
    weights: str | None,
    lazy: bool,
    slack: float = 1.0,
    **options: object,
) -> Graph:
    """Check the number of nodes, then apply ``weights``, ``slack`` and ``lazy``, in this order.

    :raises GraphError: if ``n`` is given and differs from the number of nodes, if the rule or the
        slack is invalid, or if there are further ``options``
    """
    for option in options:
        raise GraphError(
            f'graph "{result.name}" has no option "{option}"; its only option is slack, so omit '
            f"{option}"
        )
    if n is not None and n != result.n:
        raise GraphError(
            f'graph "{result.name}" has {result.n} nodes, but {n} are needed; run on {result.n} '
            "nodes, or choose a graph by name"
        )
    try:
        structure(slack, float, "slack")
    except JobError as error:
        raise GraphError(f'graph "{result.name}": {error}') from None
    result = reweighted(result, weights) if weights is not None else result
    result = result.slack(slack)
    return result.lazy() if lazy else result
