"""Every algorithm and local step by name, with all that is to be known of it before it is made.

No torch here: a line names the module of the builder, which is imported at its first use. A new
algorithm is a function `builder(local, *, option=…) -> Algorithm` and a line in `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mpigossip.algorithms.spectrum import above_minus_third, momentum_of_gossip
from mpigossip.config.choices import Part, part_of

if TYPE_CHECKING:
    from mpigossip.config import NodeSection
    from mpigossip.graphs import Graph

ROOM = "mpigossip.algorithms."


class Known(NamedTuple):
    """What options may follow from where a job leaves them unset (`Part.follows`)."""

    graph: Graph
    options: Mapping[str, Any]
    """the other options of the algorithm"""
    node: NodeSection | None = None


def _bearable(known: Known) -> float | None:
    """The step of CHOCO that a random-k wire bears."""
    node = known.node
    return min(0.5, node.kept) if node and node.wire == "random-k" else None


BUILDERS: dict[str, Part] = {
    "parallel": Part(ROOM + "gossip:parallel", "momentum", {"graph.name": "complete"}, only=True),
    "dsgd": Part(ROOM + "gossip:dsgd", "sgd"),
    "dmsgd": Part(ROOM + "gossip:dmsgd"),
    "dmsgd-vanilla": Part(ROOM + "gossip:dmsgd_vanilla", "momentum"),
    "qg-dmsgd": Part(ROOM + "gossip:qg_dmsgd"),
    "decentlam": Part(ROOM + "gossip:decentlam"),
    "d2": Part(
        ROOM + "tracking:d2",
        "sgd",
        follows={"lazy": lambda known: not above_minus_third(known.graph)},
    ),
    "dsgt": Part(ROOM + "tracking:dsgt", "sgd"),
    "momentum-tracking": Part(ROOM + "tracking:momentum_tracking", "sgd"),
    "detag": Part(
        ROOM + "tracking:detag",
        follows={
            "eta": lambda known: momentum_of_gossip(known.graph, known.options.get("phase") or 2),
        },
    ),
    "defacto": Part(
        ROOM + "tracking:defacto",
        brings={"cadence.name": "halves", "graph.name": "spanning-tree"},
        follows={"length": lambda known: known.graph.period or 1},
    ),
    "sgp": Part(ROOM + "directed:sgp", "momentum"),
    "ceca": Part(
        ROOM + "directed:ceca",
        "sgd",
        {"graph.name": "ceca"},
        follows={"nodes": lambda known: known.graph.n},
    ),
    "choco": Part(ROOM + "compressed:choco", "sgd", follows={"consensus_step": _bearable}),
    "slowmo": Part(ROOM + "periodic:slowmo", "momentum", {"cadence.name": "gossip-pga"}),
    "diloco": Part(
        ROOM + "periodic:diloco",
        "adamw",
        {"cadence.name": "cpsgd"},
        follows={"nodes": lambda known: known.graph.n},
    ),
    "noloco": Part(
        ROOM + "periodic:noloco",
        "adamw",
        {"cadence.name": "every", "graph.name": "random-matching"},
    ),
    "gasloc": Part(
        ROOM + "periodic:gasloc",
        "adamw",
        {"cadence.name": "every", "graph.name": "one-peer-exponential"},
    ),
    "sparseloco": Part(
        ROOM + "periodic:sparseloco",
        "adamw",
        {"cadence.name": "cpsgd", "node.wire": "top-k-int2", "node.kept": 0.03},
    ),
    "sparta": Part(
        ROOM + "periodic:sparta",
        "adamw",
        {"cadence.name": "global", "node.wire": "shared-k", "node.kept": 0.005},
    ),
    # methods from above, with a cadence or a wire that makes them those of the papers
    "cpsgd": Part(ROOM + "gossip:dsgd", "sgd", {"cadence.name": "cpsgd"}, only=True),
    "adpsgd": Part(ROOM + "gossip:dsgd", "sgd", {"cadence.name": "adpsgd"}, only=True),
    "gossip-pga": Part(ROOM + "gossip:dsgd", "sgd", {"cadence.name": "gossip-pga"}, only=True),
    "gossip-aga": Part(ROOM + "gossip:dsgd", "sgd", {"cadence.name": "gossip-aga"}, only=True),
    "qsgd": Part(
        ROOM + "gossip:parallel",
        "momentum",
        {"graph.name": "complete", "node.wire": "qsgd"},
        only=True,
    ),
}
"""Every algorithm by name: what `algorithm.name` can be."""

LOCALS: dict[str, Part] = {
    name: Part(f"{ROOM}local:{name}") for name in ("sgd", "momentum", "nesterov")
} | {
    name: Part(f"{ROOM}{module}:{name}", brings={"schedule.scale": "none"})
    for name, module in {"adamw": "local", "accumadam": "local", "muon": "muon"}.items()
}
"""Every local step by name, builder(decayed, *, option=…) -> Local: what `local.name` can be.

One that takes whole parameters has a second argument, the vector's layout. The length of adaptive
steps does not follow that of the gradient: their rates are not scaled with the batch."""


def takes_local(name: str) -> bool:
    """Whether a method of this name takes a local step; the others have their own."""
    part = part_of(BUILDERS, name)
    return part is not None and part.local is not None
