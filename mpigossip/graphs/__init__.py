"""Graphs by name: mixing matrices W(t) of n nodes. No MPI, no torch.

`graph(name, n)` makes any of them by the name that a job file uses; `BUILDERS` lists the names.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

from mpigossip.config.limits import Positive
from mpigossip.config.toml import near
from mpigossip.config.user_code import is_user_code
from mpigossip.graphs import classic, equitopo, exponential, finite_time
from mpigossip.graphs.base import Graph, GraphError, checked_seed
from mpigossip.graphs.base import from_matrices as from_matrices
from mpigossip.graphs.rounds import Circulant as Circulant
from mpigossip.graphs.rounds import Sparse as Sparse
from mpigossip.graphs.user_graphs import from_file, from_function, from_value
from mpigossip.graphs.user_graphs import from_networkx as from_networkx
from mpigossip.graphs.user_graphs import from_sequence as from_sequence
from mpigossip.graphs.weights import WEIGHTS as WEIGHTS
from mpigossip.graphs.weights import reweighted


def _builder(name: str, build: Callable[..., Graph]) -> Callable[..., Graph]:
    """Give a builder what all of them share: checks, n = 1, the option `slack`, the name."""
    given = inspect.signature(build)
    kind = inspect.Parameter.KEYWORD_ONLY
    slack = inspect.Parameter("slack", kind, default=1.0, annotation=float)
    signature = given.replace(parameters=[*given.parameters.values(), slack])
    known = [p.name for p in signature.parameters.values() if p.kind is kind]

    @functools.wraps(build)
    def builder(n: int, seed: int = 0, *, slack: float = 1.0, **options: object) -> Graph:
        for option in options.keys() - set(known):
            raise GraphError(
                f'graph "{name}" has no option "{option}"; its options are {", ".join(known)}'
            )
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < 1:
            raise GraphError(f'graph "{name}" needs at least one node, got {n!r}')
        n = operator.index(n)
        seed = checked_seed(seed, f'graph "{name}"')
        made = build(n, seed, **options) if n > 1 else classic.identity(n)
        return made.renamed(name, **options).slack(slack)

    named: Any = builder
    named.__signature__ = signature
    named.__annotations__ = {**build.__annotations__, "slack": float}
    return named


def spanning_tree(
    n: int, seed: int = 0, *, children: Positive = 2, over: str | None = None
) -> Graph:
    """Factors of 11ᵀ/n on a rooted tree, gathered to the root and spread again (Ko 2010).

    The tree has `children` children a node; with `over`, the name of a graph, it is that graph's
    breadth-first tree from a node in its middle, so that 2 · depth rounds are between its
    diameter and twice that.
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
"""Every graph by name: builder(n, seed=0, *, slack=1.0, option=…) -> Graph."""


def graph(
    name: Any,
    n: int | None = None,
    weights: str | None = None,
    seed: int = 0,
    lazy: bool = False,
    **options: Any,
) -> Graph:
    """Return the graph of this name over n nodes.

    :param name: a name that jobs use, such as "ring"; "file:PATH" (what `graph search` saved, or a
        network in a format of networkx); a function ``(n, seed, t) -> W(t)``, or
        "module:function"; a `Graph`, a networkx graph, a mixing matrix (n, n), or a list of
        matrices or networks, one a round
    :param n: nodes; may be left out where ``name`` isn't a name, else has to match
    :param weights: a rule that replaces the graph's own weights, as `graph.weights` of a job
    :param seed: of graphs that are drawn at random
    :param lazy: take (I + W)/2
    :param options: of the graph, as in a job; ``slack=κ`` gives κW + (1−κ)I
    :raises GraphError: for a graph that can't be; it names the value, the limit and the remedy
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
    made: Graph,
    n: int | None,
    weights: str | None,
    lazy: bool,
    slack: float = 1.0,
    **options: object,
) -> Graph:
    """Check the size, then weigh, slacken and make lazy, in this order."""
    for option in options:
        raise GraphError(f'graph "{made.name}" has no option "{option}"; its only option is slack')
    if n is not None and n != made.n:
        raise GraphError(
            f'graph "{made.name}" has {made.n} nodes, and {n} are asked for; run on {made.n}, or '
            "choose a graph by name"
        )
    made = reweighted(made, weights) if weights is not None else made
    made = made.slack(slack)
    return made.lazy() if lazy else made
