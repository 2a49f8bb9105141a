"""Algorithms by name: `build` makes one from its section of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpigossip.algorithms import compressed, directed, gossip, periodic, tracking
from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.local import LOCALS, Local, skipping
from mpigossip.algorithms.spectrum import above_minus_third, momentum_of_gossip
from mpigossip.config import JobError
from mpigossip.config.named import imported, is_own
from mpigossip.graphs import Graph

__all__ = [
    "BUILDERS",
    "DEFAULT_LOCAL",
    "LOCALS",
    "Algorithm",
    "Step",
    "build",
    "over_wire",
    "parts",
]

BUILDERS: dict[str, Callable[..., Algorithm]] = {
    "parallel": gossip.parallel,
    "dsgd": gossip.dsgd,
    "dmsgd": gossip.dmsgd,
    "dmsgd-vanilla": gossip.dmsgd_vanilla,
    "qg-dmsgd": gossip.qg_dmsgd,
    "decentlam": gossip.decentlam,
    "d2": tracking.d2,
    "dsgt": tracking.dsgt,
    "momentum-tracking": tracking.momentum_tracking,
    "detag": tracking.detag,
    "defacto": tracking.defacto,
    "sgp": directed.sgp,
    "ceca": directed.ceca,
    "choco": compressed.choco,
    "slowmo": periodic.slowmo,
    "diloco": periodic.diloco,
    "noloco": periodic.noloco,
    "cpsgd": gossip.dsgd,
    "adpsgd": gossip.dsgd,
    "gossip-pga": gossip.dsgd,
    "gossip-aga": gossip.dsgd,
    "qsgd": gossip.parallel,
}
"""Every algorithm by name: builder(local, *, option=…) -> Algorithm.

The last five are the methods above them with a cadence or a wire that `config.BRINGS` names.
"""

DEFAULT_LOCAL = {
    "parallel": "momentum",
    "dsgd": "sgd",
    "dmsgd-vanilla": "momentum",
    "d2": "sgd",
    "dsgt": "sgd",
    "momentum-tracking": "sgd",
    "sgp": "momentum",
    "ceca": "sgd",
    "choco": "sgd",
    "slowmo": "momentum",
    "diloco": "adamw",
    "noloco": "adamw",
    "cpsgd": "sgd",
    "adpsgd": "sgd",
    "gossip-pga": "sgd",
    "gossip-aga": "sgd",
    "qsgd": "momentum",
}
"""The local step of those methods that take one; the others have their own."""

FROM_GRAPH: dict[str, dict[str, Callable[[Graph, Mapping], Any]]] = {
    "d2": {"lazy": lambda graph, options: not above_minus_third(graph)},
    "detag": {"eta": lambda graph, options: momentum_of_gossip(graph, options.get("phase", 2))},
    "defacto": {"length": lambda graph, options: graph.period or 1},
    "ceca": {"nodes": lambda graph, options: graph.n},
}
"""Options that are computed from the graph (and the other options) where the job leaves them."""


def parts(section: Mapping) -> tuple[Callable, ...]:
    """The callables whose keyword-only parameters are the options of this `[algorithm]`."""
    name = section.get("name", "dmsgd")
    builder = BUILDERS[name]
    local = section.get("local") or DEFAULT_LOCAL.get(name)
    return (builder, LOCALS[local]) if local in LOCALS else (builder,)


def build(
    name: str,
    local: str | Local | None,
    options: Mapping,
    decayed: int,
    graph: Graph | None = None,
) -> Algorithm:
    """The algorithm for a segment whose first ``decayed`` columns take weight decay.

    ``local``: a name of `LOCALS`, or a local step itself. Without ``graph`` the options of
    `FROM_GRAPH` keep their cautious defaults.
    """
    given = local if isinstance(local, Local) else None
    chosen = None if isinstance(local, Local) else local or DEFAULT_LOCAL.get(name)
    make, step = _builder(name), given
    mine = {key: value for key, value in options.items() if key in (make.__kwdefaults__ or ())}
    if chosen:
        others = {key: value for key, value in options.items() if key not in mine}
        step = skipping(LOCALS[chosen](decayed, **others))
    elif options.keys() - mine.keys():
        raise JobError(
            [
                f'algorithm.{key}: unknown; options of "{name}" are its keyword-only parameters: '
                f"{', '.join(make.__kwdefaults__ or ()) or 'it has none'}"
                for key in sorted(options.keys() - mine.keys())
            ]
        )
    for key, compute in FROM_GRAPH.get(name, {}).items():
        if graph is not None and mine.get(key) is None:
            mine[key] = compute(graph, options)
    return make(step, **mine)


def _builder(name: str) -> Callable[..., Algorithm]:
    """One of `BUILDERS`, or "package.module:factory": (local, *, option=…) -> Algorithm."""
    if name in BUILDERS or not is_own(name):
        return BUILDERS[name]
    return imported("algorithm.name", name, "(local, *, option=…) that returns an Algorithm")


def over_wire(method: Algorithm, *, biased: bool, meets: bool = False) -> Algorithm:
    """The method as it bears a lossy wire: by differences, or by error feedback.

    ``meets``: the cadence has GLOBAL rounds, which then travel as differences too.
    """
    if "own-wire" in method.needs:
        return method
    if "sends-gradients" in method.needs:
        return compressed.error_feedback(method) if biased else method
    if meets and method.vectors == 1:
        method = compressed.anchored(method)
    return compressed.difference(method)
