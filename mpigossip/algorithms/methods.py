"""Table of algorithms and local steps, with the facts that a job needs before it builds them.

This module does not import torch: an entry names the module of its builder, which is imported at
its first use. To add an algorithm, write a function `builder(local, *, option=…) -> Algorithm` and
add an entry to `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpigossip.config.choices import LOCAL, BuilderSpec, spec_of
from mpigossip.graphs import Graph
from mpigossip.graphs.spectral import eigenvalues

if TYPE_CHECKING:
    from mpigossip.config import NodeSection

PACKAGE = "mpigossip.algorithms."


class Known(NamedTuple):
    """Values from which defaults of unset options are computed (`BuilderSpec.follows`)."""

    graph: Graph
    options: Mapping[str, Any]
    """Options of the algorithm or cadence that are set."""
    node: NodeSection | None = None
    """Section `[node]` of the job; None: unknown."""
    total: int | None = None
    """Number of steps of the run; None: unknown."""


def _consensus_step_of_wire(known: Known) -> float | None:
    """Return the ``consensus_step`` of CHOCO for the wire "random-k"; None otherwise."""
    node = known.node
    return min(0.5, node.density) if node and node.wire == "random-k" else None


BUILDERS: dict[str, BuilderSpec] = {
    "parallel": BuilderSpec(
        PACKAGE + "gossip:parallel", {"local.name": "momentum", "graph.name": "complete"}, only=True
    ),
    "dsgd": BuilderSpec(PACKAGE + "gossip:dsgd", {"local.name": "sgd"}),
    "dmsgd": BuilderSpec(PACKAGE + "gossip:dmsgd"),
    "dmsgd-vanilla": BuilderSpec(PACKAGE + "gossip:dsgd", {"local.name": "momentum"}),
    "qg-dmsgd": BuilderSpec(PACKAGE + "gossip:qg_dmsgd"),
    "decentlam": BuilderSpec(PACKAGE + "gossip:decentlam"),
    "d2": BuilderSpec(
        PACKAGE + "tracking:d2",
        {"local.name": "sgd"},
        follows={"lazy": lambda known: not above_minus_third(known.graph)},
    ),
    "dsgt": BuilderSpec(PACKAGE + "tracking:dsgt", {"local.name": "sgd"}),
    "momentum-tracking": BuilderSpec(PACKAGE + "tracking:momentum_tracking", {"local.name": "sgd"}),
    "detag": BuilderSpec(
        PACKAGE + "tracking:detag",
        follows={
            "eta": lambda known: momentum_of_gossip(known.graph, known.options.get("phase") or 2),
        },
    ),
    "defacto": BuilderSpec(
        PACKAGE + "tracking:defacto",
        implies={"cadence.name": "halves", "graph.name": "spanning-tree"},
        follows={"length": lambda known: known.graph.period or 1},
    ),
    "sgp": BuilderSpec(PACKAGE + "directed:sgp", {"local.name": "momentum"}),
    "ceca": BuilderSpec(
        PACKAGE + "directed:ceca",
        {"local.name": "sgd", "graph.name": "ceca"},
        follows={"nodes": lambda known: known.graph.n},
    ),
    "choco": BuilderSpec(
        PACKAGE + "compressed:choco",
        {"local.name": "sgd"},
        follows={"consensus_step": _consensus_step_of_wire},
    ),
    "slowmo": BuilderSpec(
        PACKAGE + "diloco:slowmo", {"local.name": "momentum", "cadence.name": "gossip-pga"}
    ),
    "diloco": BuilderSpec(
        PACKAGE + "diloco:diloco",
        {"local.name": "adamw", "cadence.name": "cpsgd"},
        follows={"nodes": lambda known: known.graph.n},
    ),
    "noloco": BuilderSpec(
        PACKAGE + "diloco:noloco",
        {"local.name": "adamw", "cadence.name": "every", "graph.name": "random-matching"},
    ),
    "gasloc": BuilderSpec(
        PACKAGE + "diloco:gasloc",
        {"local.name": "adamw", "cadence.name": "every", "graph.name": "one-peer-exponential"},
    ),
    "sparseloco": BuilderSpec(
        PACKAGE + "diloco:sparseloco",
        {
            "local.name": "adamw",
            "cadence.name": "cpsgd",
            "node.wire": "top-k-int2",
            "node.density": 0.03,
        },
    ),
    "sparta": BuilderSpec(
        PACKAGE + "diloco:sparta",
        {
            "local.name": "adamw",
            "cadence.name": "global",
            "node.wire": "shared-k",
            "node.density": 0.005,
        },
    ),
    # The remaining names combine an algorithm from above with the cadence or wire of a paper.
    "cpsgd": BuilderSpec(
        PACKAGE + "gossip:dsgd", {"local.name": "sgd", "cadence.name": "cpsgd"}, only=True
    ),
    "adpsgd": BuilderSpec(
        PACKAGE + "gossip:dsgd", {"local.name": "sgd", "cadence.name": "adpsgd"}, only=True
    ),
    "gossip-pga": BuilderSpec(
        PACKAGE + "gossip:dsgd", {"local.name": "sgd", "cadence.name": "gossip-pga"}, only=True
    ),
    "gossip-aga": BuilderSpec(
        PACKAGE + "gossip:dsgd", {"local.name": "sgd", "cadence.name": "gossip-aga"}, only=True
    ),
    "qsgd": BuilderSpec(
        PACKAGE + "gossip:parallel",
        {"local.name": "momentum", "graph.name": "complete", "node.wire": "qsgd"},
        only=True,
    ),
}
"""Specification of each algorithm, by its name in `algorithm.name`."""

LOCALS: dict[str, BuilderSpec] = {
    name: BuilderSpec(f"{PACKAGE}local:{name}") for name in ("sgd", "momentum", "nesterov")
} | {
    name: BuilderSpec(f"{PACKAGE}{module}:{name}", implies={"schedule.scale": "none"})
    for name, module in {"adamw": "local", "accumadam": "local", "muon": "muon"}.items()
}
"""Every local step by name, as in `local.name`: builder(decayed, *, option=…) -> Local.

The builder of a local step that takes whole parameters has a second argument, the parameter layout.
The length of an adaptive step, such as a step by AdamW, is not proportional to the length of the
gradient, so its learning rate is not scaled with the batch size.
"""

DIVIDES = {"slowmo", "qg-dmsgd", "decentlam"}
"""Algorithms that divide by the learning rate, which must therefore not be 0."""

KEEPS_MODEL = {"detag", "defacto"}
"""Algorithms that keep the trained model in their state and copy it to the parameters once per
phase.
"""


def takes_local(name: str) -> bool:
    """Return whether ``name`` is an algorithm of the package that takes any local step.

    The result is False for an algorithm with its own update, and for every custom algorithm
    ("module:function"): whether its step is the local step is not known.
    """
    spec = spec_of(BUILDERS, name)
    return spec is not None and LOCAL in spec.implies


def same_state(name: str, other: str) -> bool:
    """Return whether the states of two algorithms have the same meaning.

    They do if both names stand for the same function, such as "dsgd" and "cpsgd". The states of
    other algorithms may have the same names and shapes, but a different meaning: the outer momentum
    of "diloco" sums changes of the model, while "slowmo" sums changes divided by the rate. For a
    custom algorithm, the result is True only if the names are equal.
    """
    spec, other_spec = spec_of(BUILDERS, name), spec_of(BUILDERS, other)
    if spec is None or other_spec is None:
        return name == other
    return spec.made_by == other_spec.made_by


LARGEST = 2048
"""Largest number of nodes for which the eigenvalues of a graph are computed. Options of algorithms
that depend on eigenvalues keep their safe defaults on larger graphs.
"""


def real_eigenvalues(graph: Graph) -> np.ndarray | None:
    """Return the eigenvalues of a static symmetric W by falling modulus, (n,).

    The result is None for other graphs, and for graphs of more than `LARGEST` nodes.
    """
    if not {"static", "symmetric"} <= graph.facts or graph.n > LARGEST:
        return None
    return eigenvalues(graph).real


def above_minus_third(graph: Graph) -> bool:
    """Return whether W is static and symmetric with all eigenvalues above −1/3, as D² needs.

    The result is False for graphs of more than `LARGEST` nodes, whose eigenvalues are not computed.
    """
    values = real_eigenvalues(graph)
    return values is not None and float(values.min()) > -1 / 3 + 1e-9


def momentum_of_gossip(graph: Graph, steps: int) -> float:
    """Return the factor η of accelerated gossip that restarts every ``steps`` steps.

    Accelerated gossip computes z_{r+1} = (1 + η) W z_r − η z_{r−1}.

    The result is η = (1 − √(1−λ²))/(1 + √(1−λ²)), λ = max(|λ_2|, |λ_n|) (Liu & Morse 2011), if
    ``steps`` steps with this η reduce disagreement more than plain gossip does. Otherwise, the
    result is 0: acceleration starts with z_{−1} = z_0, and within few steps it may even increase
    disagreement. It is 0, too, for one node and for graphs without :func:`real_eigenvalues`.
    """
    values = real_eigenvalues(graph)
    if values is None or graph.n == 1:
        return 0.0
    # Leave out the eigenvalue 1, whose eigenvector is the constant vector.
    others = np.delete(values, np.abs(values - 1).argmin())
    largest = min(float(np.abs(others).max()), 1.0)
    eta = (1 - sqrt(1 - largest**2)) / (1 + sqrt(1 - largest**2))
    z = np.ones_like(others)
    before = np.ones_like(others)
    for _ in range(steps):
        z, before = (1 + eta) * others * z - eta * before, z
    return eta if np.abs(z).max() < largest**steps else 0.0
