"""Algorithms and local steps by name, with what a job must know before one is made.

No torch here: a line names the module of the builder, which is imported at its first use. A new
algorithm is a function `builder(local, *, option=…) -> Algorithm` and a line in `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpigossip.config.choices import BuilderSpec, spec_of
from mpigossip.graphs import Graph
from mpigossip.graphs.spectral import eigenvalues

if TYPE_CHECKING:
    from mpigossip.config import NodeSection

HERE = "mpigossip.algorithms."


class Known(NamedTuple):
    """Known values that unset options follow from (`Part.follows`)."""

    graph: Graph
    options: Mapping[str, Any]
    """the other options of the algorithm or cadence"""
    node: NodeSection | None = None
    total: int | None = None
    """steps of the run"""


def _bearable(known: Known) -> float | None:
    """The step of CHOCO that a random-k wire bears."""
    node = known.node
    return min(0.5, node.density) if node and node.wire == "random-k" else None


BUILDERS: dict[str, BuilderSpec] = {
    "parallel": BuilderSpec(
        HERE + "gossip:parallel", "momentum", {"graph.name": "complete"}, only=True
    ),
    "dsgd": BuilderSpec(HERE + "gossip:dsgd", "sgd"),
    "dmsgd": BuilderSpec(HERE + "gossip:dmsgd"),
    "dmsgd-vanilla": BuilderSpec(HERE + "gossip:dsgd", "momentum"),
    "qg-dmsgd": BuilderSpec(HERE + "gossip:qg_dmsgd"),
    "decentlam": BuilderSpec(HERE + "gossip:decentlam"),
    "d2": BuilderSpec(
        HERE + "tracking:d2",
        "sgd",
        follows={"lazy": lambda known: not above_minus_third(known.graph)},
    ),
    "dsgt": BuilderSpec(HERE + "tracking:dsgt", "sgd"),
    "momentum-tracking": BuilderSpec(HERE + "tracking:momentum_tracking", "sgd"),
    "detag": BuilderSpec(
        HERE + "tracking:detag",
        follows={
            "eta": lambda known: momentum_of_gossip(known.graph, known.options.get("phase") or 2),
        },
    ),
    "defacto": BuilderSpec(
        HERE + "tracking:defacto",
        implies={"cadence.name": "halves", "graph.name": "spanning-tree"},
        follows={"length": lambda known: known.graph.period or 1},
    ),
    "sgp": BuilderSpec(HERE + "directed:sgp", "momentum"),
    "ceca": BuilderSpec(
        HERE + "directed:ceca",
        "sgd",
        {"graph.name": "ceca"},
        follows={"nodes": lambda known: known.graph.n},
    ),
    "choco": BuilderSpec(HERE + "compressed:choco", "sgd", follows={"consensus_step": _bearable}),
    "slowmo": BuilderSpec(HERE + "diloco:slowmo", "momentum", {"cadence.name": "gossip-pga"}),
    "diloco": BuilderSpec(
        HERE + "diloco:diloco",
        "adamw",
        {"cadence.name": "cpsgd"},
        follows={"nodes": lambda known: known.graph.n},
    ),
    "noloco": BuilderSpec(
        HERE + "diloco:noloco",
        "adamw",
        {"cadence.name": "every", "graph.name": "random-matching"},
    ),
    "gasloc": BuilderSpec(
        HERE + "diloco:gasloc",
        "adamw",
        {"cadence.name": "every", "graph.name": "one-peer-exponential"},
    ),
    "sparseloco": BuilderSpec(
        HERE + "diloco:sparseloco",
        "adamw",
        {"cadence.name": "cpsgd", "node.wire": "top-k-int2", "node.density": 0.03},
    ),
    "sparta": BuilderSpec(
        HERE + "diloco:sparta",
        "adamw",
        {"cadence.name": "global", "node.wire": "shared-k", "node.density": 0.005},
    ),
    # methods from above, with a cadence or a wire that makes them those of the papers
    "cpsgd": BuilderSpec(HERE + "gossip:dsgd", "sgd", {"cadence.name": "cpsgd"}, only=True),
    "adpsgd": BuilderSpec(HERE + "gossip:dsgd", "sgd", {"cadence.name": "adpsgd"}, only=True),
    "gossip-pga": BuilderSpec(
        HERE + "gossip:dsgd", "sgd", {"cadence.name": "gossip-pga"}, only=True
    ),
    "gossip-aga": BuilderSpec(
        HERE + "gossip:dsgd", "sgd", {"cadence.name": "gossip-aga"}, only=True
    ),
    "qsgd": BuilderSpec(
        HERE + "gossip:parallel",
        "momentum",
        {"graph.name": "complete", "node.wire": "qsgd"},
        only=True,
    ),
}
"""Every algorithm by name: what `algorithm.name` can be."""

LOCALS: dict[str, BuilderSpec] = {
    name: BuilderSpec(f"{HERE}local:{name}") for name in ("sgd", "momentum", "nesterov")
} | {
    name: BuilderSpec(f"{HERE}{module}:{name}", implies={"schedule.scale": "none"})
    for name, module in {"adamw": "local", "accumadam": "local", "muon": "muon"}.items()
}
"""Every local step by name, builder(decayed, *, option=…) -> Local: what `local.name` can be.

One that takes whole parameters has a second argument, the vector's layout. The length of adaptive
steps does not follow that of the gradient: their rates are not scaled with the batch."""

DIVIDES = {"slowmo", "qg-dmsgd", "decentlam"}
"""Methods that divide by the learning rate."""

KEEPS_MODEL = {"detag", "defacto"}
"""Methods whose state has the model that is trained: they copy it over the parameters at times."""


def takes_local(name: str) -> bool:
    """Return whether a method of this name takes a local step; the others have their own."""
    part = spec_of(BUILDERS, name)
    return part is not None and part.local is not None


LARGEST = 2048
"""Nodes up to which a graph without structure is diagonalized; beyond, the cautious choice."""


def real_eigenvalues(graph: Graph) -> np.ndarray | None:
    """Eigenvalues of a static symmetric W by falling modulus, (n,); None for other graphs."""
    if not {"static", "symmetric"} <= graph.facts or graph.n > LARGEST:
        return None
    return eigenvalues(graph).real


def above_minus_third(graph: Graph) -> bool:
    """Return whether W is static and symmetric with all eigenvalues above −1/3, as D² needs."""
    values = real_eigenvalues(graph)
    return values is not None and float(values.min()) > -1 / 3 + 1e-9


def momentum_of_gossip(graph: Graph, steps: int) -> float:
    """η of accelerated gossip that is restarted every ``steps`` steps.

    η = (1 − √(1−λ²))/(1 + √(1−λ²)), λ = max(|λ_2|, |λ_n|) (Liu & Morse 2011), where so many steps
    then shrink disagreement more than plain gossip does; else, and for graphs that aren't static
    and symmetric, 0: z_0 = z_{−1} is a start from which a short phase may even grow.
    """
    values = real_eigenvalues(graph)
    if values is None or graph.n == 1:
        return 0.0
    others = np.delete(values, np.abs(values - 1).argmin())  # all but the 1 of the mean
    largest = min(float(np.abs(others).max()), 1.0)
    eta = (1 - sqrt(1 - largest**2)) / (1 + sqrt(1 - largest**2))
    z = np.ones_like(others)
    before = np.ones_like(others)
    for _ in range(steps):
        z, before = (1 + eta) * others * z - eta * before, z
    return eta if np.abs(z).max() < largest**steps else 0.0
