"""Every algorithm and local step by name, with all that is to be known of it before it is made.

No torch here: a line names the module of the builder, which is imported at its first use. A new
algorithm is a function `builder(local, *, option=…) -> Algorithm` and a line in `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpigossip.config.choices import Part, part_of
from mpigossip.graphs import Graph
from mpigossip.graphs.spectral import eigenvalues

if TYPE_CHECKING:
    from mpigossip.config import NodeSection

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


LARGEST = 2048
"""Nodes up to which a graph without structure is diagonalized; beyond, the cautious choice."""


def real_eigenvalues(graph: Graph) -> np.ndarray | None:
    """Eigenvalues of a static symmetric W by falling modulus, (n,); None for other graphs."""
    if not {"static", "symmetric"} <= graph.facts or graph.n > LARGEST:
        return None
    return eigenvalues(graph).real


def above_minus_third(graph: Graph) -> bool:
    """Whether W is proven static and symmetric with all eigenvalues above −1/3, as D² needs."""
    return least_eigenvalue(graph) > -1 / 3 + 1e-9


def least_eigenvalue(graph: Graph) -> float:
    """λ_n of a static symmetric graph, −inf where it isn't known."""
    values = real_eigenvalues(graph)
    return -inf if values is None else float(values.min())


def momentum_of_gossip(graph: Graph, steps: int) -> float:
    """η of accelerated gossip that is restarted every ``steps`` steps.

    η = (1 − √(1−λ²))/(1 + √(1−λ²)), λ = max(|λ_2|, |λ_n|) (Liu & Morse 2011), where so many steps
    then shrink disagreement more than plain gossip does; else, and for graphs that aren't static
    and symmetric, 0: z_0 = z_{−1} is a start from which a short phase may even grow.
    """
    others = _others(graph)
    if others is None:
        return 0.0
    largest = min(float(np.abs(others).max()), 1.0)
    eta = (1 - sqrt(1 - largest**2)) / (1 + sqrt(1 - largest**2))
    z, before = np.ones_like(others), np.ones_like(others)
    for _ in range(steps):
        z, before = (1 + eta) * others * z - eta * before, z
    return eta if np.abs(z).max() < largest**steps else 0.0


def _others(graph: Graph) -> np.ndarray | None:
    """The eigenvalues without the 1 of the mean, (n − 1,); None where they aren't known."""
    values = real_eigenvalues(graph)
    if values is None or graph.n == 1:
        return None
    return np.delete(values, np.abs(values - 1).argmin())
