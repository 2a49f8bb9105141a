"""Problems of theory with a known optimum: each node has a function f_i of its own.

f = (1/n) Σ f_i; nodes differ by ζ: mean_i ‖∇f_i(x*)‖² = ζ² exactly, where x* is the optimum of f.
A training sample is a whole f_i, so a gradient is exact but for the noise that the task adds; a
test sample is f itself, once for each node, its loss counted from the least: what a test shows is
f(x) − f(x*). Everything follows from n and the options, ``draw`` among them: a run's seed is left
for the noise alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

from mpigossip.config.limits import AboveZero, NotNegative, OneOrMore, Positive

Arrangement = Literal["random", "smooth"]
"""Differences between nodes: drawn, or cos(2π i/n), which a ring averages worst."""
NEWTON = 50
"""Steps at most to the optimum of a logistic regression; some ten are enough."""


@dataclass(frozen=True)
class Problem:
    """The functions of n nodes as samples, and the constants that rates are stated in."""

    train: tuple[np.ndarray, ...]
    """of each node, first dimension n"""
    test: tuple[np.ndarray, ...]
    """of f, without that dimension"""
    gap: float
    """Δ = f(x_0) − f(x*); NaN where x_0 is drawn by the model"""
    smoothness: float
    """L: the largest curvature of f (not of each f_i); a factorization's is that at its optimum"""
    heterogeneity: float
    """ζ"""
    steps: int
    """an epoch has"""

    def samples(self) -> dict[str, Any]:
        """As data sets: each node's function as often as an epoch has steps."""
        nodes = len(self.train[0])
        train = Functions(*(_float32(np.repeat(one, self.steps, axis=0)) for one in self.train))
        train.targets = np.repeat(np.arange(nodes), self.steps)
        test = Functions(*(one.expand(nodes, *one.shape) for one in map(_float32, self.test)))
        return {"train": train, "test": test}


class Functions(TensorDataset):
    """Samples that are functions; ``targets``, for a partition, are the nodes that have them."""

    targets: np.ndarray


def _float32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float32))


def _spread(
    nodes: int, shape: Sequence[int], size: float, arrangement: Arrangement, random: Any
) -> np.ndarray:
    """Arrays (n, *shape) whose mean over nodes is 0, their mean square norm size²."""
    if arrangement == "smooth":
        wave = np.cos(2 * np.pi * np.arange(nodes) / nodes)
        drawn = np.multiply.outer(wave, random.standard_normal(shape))
    else:
        drawn = random.standard_normal((nodes, *shape))
    drawn -= drawn.mean(axis=0)
    norm = math.sqrt(float((drawn**2).sum()) / nodes)
    return drawn * (size / norm) if nodes > 1 else np.zeros_like(drawn)


def quadratics(
    nodes: int,
    *,
    dimension: Positive = 20,
    heterogeneity: NotNegative = 1.0,
    condition: OneOrMore = 10.0,
    bend: NotNegative = 0.0,
    arrangement: Arrangement = "random",
    draw: int = 0,
    steps: Positive = 100,
) -> Problem:
    """f_i(x) = ½ Σ_k a_ik (x_k − b_ik)², ‖x*‖ = 1, x_0 = 0.

    The curvatures of f go from 1/``condition`` to 1 in equal ratios. ``bend``: deviation of
    log a_ik between nodes; with 0 all nodes have the same a, and x̄ moves as parallel SGD does.
    """
    random = np.random.default_rng((draw, 1))
    curvature = np.geomspace(1 / condition, 1, dimension) if condition > 1 else np.ones(dimension)
    each = curvature * np.exp(bend * random.standard_normal((nodes, dimension)))
    each *= curvature / each.mean(axis=0)
    optimum = random.standard_normal(dimension)
    optimum /= np.linalg.norm(optimum)
    gradients = _spread(nodes, (dimension,), heterogeneity, arrangement, random)
    gap = float(curvature @ optimum**2) / 2
    train = optimum - gradients / each, each
    return Problem(train, (optimum, curvature), gap, float(curvature.max()), heterogeneity, steps)


def logistic(
    nodes: int,
    *,
    dimension: Positive = 10,
    points: Positive = 50,
    heterogeneity: NotNegative = 1.0,
    ridge: AboveZero = 0.01,
    draw: int = 0,
    steps: Positive = 100,
) -> Problem:
    """f_i(x) = mean_m log(1 + exp(−y_m h_mᵀ x)) + ridge/2 ‖x‖² over ``points`` of node i, x_0 = 0.

    Features are standard normal over √dimension, labels drawn with the node's own vector v + ζ v_i:
    ``heterogeneity`` is the deviation of those here; ζ of the gradients is measured. The optimum
    is Newton's.
    """
    random = np.random.default_rng((draw, 2))
    features = random.standard_normal((nodes, points, dimension)) / math.sqrt(dimension)
    true = 3 * random.standard_normal(dimension)
    own = true + 3 * heterogeneity * random.standard_normal((nodes, dimension))
    chance = 1 / (1 + np.exp(-np.einsum("nmd,nd->nm", features, own)))
    labels = np.where(random.random((nodes, points)) < chance, 1.0, -1.0)
    signed = features * labels[..., None]
    flat = signed.reshape(-1, dimension)
    optimum = _newton(flat, ridge)
    apart = _logistic_gradients(signed, optimum, ridge)
    least, begin = (_logistic(signed, x, ridge) for x in (optimum, np.zeros(dimension)))
    zeta = math.sqrt(float((apart**2).sum(1).mean()))
    smooth = float(np.linalg.norm(flat, 2) ** 2 / (4 * len(flat)) + ridge)  # at x = 0
    there = np.broadcast_to(optimum, (nodes, dimension))
    train = signed, there, np.full(nodes, ridge), np.zeros(nodes)
    test = flat, optimum, np.asarray(ridge), np.asarray(least)
    return Problem(train, test, begin - least, smooth, zeta, steps)


def _logistic(signed: np.ndarray, x: np.ndarray, ridge: float) -> float:
    return float(np.logaddexp(0, -(signed @ x)).mean() + ridge / 2 * x @ x)


def _logistic_gradients(signed: np.ndarray, x: np.ndarray, ridge: float) -> np.ndarray:
    """Of each node: (n, d)."""
    wrong = 1 / (1 + np.exp(signed @ x))
    return ridge * x - np.einsum("nm,nmd->nd", wrong, signed) / signed.shape[1]


def _newton(signed: np.ndarray, ridge: float) -> np.ndarray:
    """The optimum."""
    x = np.zeros(signed.shape[1])
    for _ in range(NEWTON):
        wrong = 1 / (1 + np.exp(signed @ x))
        weights = (wrong * (1 - wrong))[:, None]
        curvature = signed.T @ (weights * signed) / len(signed) + ridge * np.eye(len(x))
        step = np.linalg.solve(curvature, _logistic_gradients(signed[None], x, ridge)[0])
        x = x - step
        if np.linalg.norm(step) < 1e-13:
            break
    return x


def factorization(
    nodes: int,
    *,
    height: Positive = 12,
    width: Positive = 10,
    rank: Positive = 3,
    heterogeneity: NotNegative = 1.0,
    draw: int = 0,
    steps: Positive = 100,
) -> Problem:
    """f_i(U, V) = ½ ‖A_i − U Vᵀ‖², mean_i A_i = A of this rank and largest singular value 1.

    f − ½ ‖A − U Vᵀ‖² is constant, so the least is known where U Vᵀ = A. Not convex. ζ² here is
    mean_i ‖A_i − A‖².
    """
    random = np.random.default_rng((draw, 3))
    left = random.standard_normal((height, rank))
    right = random.standard_normal((width, rank))
    whole = left @ right.T
    whole /= np.linalg.norm(whole, 2)
    each = whole + _spread(nodes, (height, width), heterogeneity, "random", random)
    return Problem((each,), (whole,), math.nan, 2.0, heterogeneity, steps)
