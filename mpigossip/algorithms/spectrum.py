"""What methods take from the eigenvalues of a graph: is W safe for D², how fast may gossip go."""

from __future__ import annotations

from math import inf, sqrt

import numpy as np

from mpigossip.graphs import Graph
from mpigossip.graphs.spectral import eigenvalues

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
