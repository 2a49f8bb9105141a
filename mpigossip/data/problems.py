"""Theory problems with a known optimum, in which each node has its own function f_i.

The objective is f = (1/n) Σ f_i, and x* its optimum. Nodes differ by ζ. For quadratics and logistic
regressions, mean_i ‖∇f_i(x*)‖² = ζ²; for factorizations, mean_i ‖A_i − A‖² = ζ². A training sample
is a whole f_i, so a gradient is exact except for the noise that the task adds. A test sample is f
itself, once for each node. Its loss is relative to the minimum, so an evaluation returns f(x) −
f(x*). The functions follow from n and the options, including ``draw``, and not from the seed of a
run.
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
"""Differences between nodes: drawn at random, or cos(2π i/n), which a ring averages most slowly."""
NEWTON = 50
"""Largest number of steps to the optimum of a logistic regression; about ten are sufficient."""


@dataclass(frozen=True)
class Problem:
    """Functions of n nodes as samples, and the constants that convergence rates depend on."""

    train: tuple[np.ndarray, ...]
    """Arrays of the functions f_i; the first dimension is n."""
    test: tuple[np.ndarray, ...]
    """Arrays of the function f, without that dimension."""
    gap: float
    """Gap Δ = f(x_0) − f(x*); NaN if the model draws x_0."""
    smoothness: float
    """Smoothness L: the largest curvature of f (not of each f_i); for a factorization, at its
    optimum."""
    heterogeneity: float
    """Heterogeneity ζ of more than one node."""
    steps: int
    """Number of steps per epoch."""

    def samples(self) -> dict[str, Any]:
        """Return the data sets; an epoch uses each node's function once per step."""
        nodes = len(self.train[0])
        train = Functions(*(_float32(np.repeat(array, self.steps, axis=0)) for array in self.train))
        train.targets = np.repeat(np.arange(nodes), self.steps)
        test = Functions(*(array.expand(nodes, *array.shape) for array in map(_float32, self.test)))
        return {"train": train, "test": test}


class Functions(TensorDataset):
    """Data set whose samples are functions; for training, ``targets`` are their nodes."""

    targets: np.ndarray


def _float32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float32))


def _spread(
    nodes: int, shape: Sequence[int], size: float, arrangement: Arrangement, random: Any
) -> np.ndarray:
    """Return an array (n, *shape) whose rows have the mean 0 and the mean square norm size².

    For one node, return zeros.

    :param nodes: number of nodes, n
    :param shape: shape of the row of a node
    :param size: root of the mean square norm
    :param arrangement: differences between nodes, see `Arrangement`
    :param random: generator of NumPy
    """
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
    """Return the quadratics f_i(x) = ½ Σ_k a_ik (x_k − b_ik)² with ‖x*‖ = 1 and x_0 = 0.

    The curvatures of f form a geometric sequence from 1/``condition`` to 1.

    :param nodes: number of nodes, n
    :param dimension: number of elements of x
    :param heterogeneity: ζ
    :param condition: ratio of the largest and the smallest curvature
    :param bend: standard deviation of log a_ik between nodes, before the curvatures are scaled to
        their mean; with 0, all nodes have the same a, and x̄ evolves as in parallel SGD
    :param arrangement: "random": differences between nodes are drawn at random; "smooth": they are
        proportional to cos(2π i/n) at node i
    :param draw: random seed of the problem
    :param steps: number of steps per epoch
    """
    random = np.random.default_rng((draw, 1))
    curvature = np.geomspace(1 / condition, 1, dimension) if condition > 1 else np.ones(dimension)
    curvatures = curvature * np.exp(bend * random.standard_normal((nodes, dimension)))
    curvatures *= curvature / curvatures.mean(axis=0)
    optimum = random.standard_normal(dimension)
    optimum /= np.linalg.norm(optimum)
    gradients = _spread(nodes, (dimension,), heterogeneity, arrangement, random)
    gap = float(curvature @ optimum**2) / 2
    train = optimum - gradients / curvatures, curvatures
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
    """Return logistic regressions f_i(x) = mean_m log(1 + exp(−y_m h_mᵀ x)) + ridge/2 ‖x‖².

    The mean is over the points of node i, and x_0 = 0. Features are standard normal divided by
    √dimension. Labels are drawn with the node's own vector v + ``heterogeneity`` · v_i. The optimum
    is computed by Newton's method.

    :param nodes: number of nodes, n
    :param dimension: number of elements of x
    :param points: number of points of each node
    :param heterogeneity: relative deviation of the nodes' vectors; ζ of the gradients is computed
    :param ridge: factor of the regularization
    :param draw: random seed of the problem
    :param steps: number of steps per epoch
    """
    random = np.random.default_rng((draw, 2))
    features = random.standard_normal((nodes, points, dimension)) / math.sqrt(dimension)
    common = 3 * random.standard_normal(dimension)
    vectors = common + 3 * heterogeneity * random.standard_normal((nodes, dimension))
    chance = 1 / (1 + np.exp(-np.einsum("nmd,nd->nm", features, vectors)))
    labels = np.where(random.random((nodes, points)) < chance, 1.0, -1.0)
    signed = features * labels[..., None]
    flat = signed.reshape(-1, dimension)
    optimum = _newton(flat, ridge)
    gradients = _logistic_gradients(signed, optimum, ridge)
    minimum, begin = (_logistic(signed, x, ridge) for x in (optimum, np.zeros(dimension)))
    zeta = math.sqrt(float((gradients**2).sum(1).mean()))
    smooth = float(np.linalg.norm(flat, 2) ** 2 / (4 * len(flat)) + ridge)  # at x = 0
    optima = np.broadcast_to(optimum, (nodes, dimension))
    train = signed, optima, np.full(nodes, ridge), np.zeros(nodes)
    test = flat, optimum, np.asarray(ridge), np.asarray(minimum)
    return Problem(train, test, begin - minimum, smooth, zeta, steps)


def _logistic(signed: np.ndarray, x: np.ndarray, ridge: float) -> float:
    """Return the value of the logistic regression over all nodes at x.

    :param signed: features of all points, each multiplied by its label ±1, (…, d)
    :param x: position, (d,)
    :param ridge: factor of the regularization
    """
    return float(np.logaddexp(0, -(signed @ x)).mean() + ridge / 2 * x @ x)


def _logistic_gradients(signed: np.ndarray, x: np.ndarray, ridge: float) -> np.ndarray:
    """Return the gradient of each node at x, (n, d).

    :param signed: features of each node's points, each multiplied by its label ±1, (n, points, d)
    :param x: position, (d,)
    :param ridge: factor of the regularization
    """
    errors = 1 / (1 + np.exp(signed @ x))
    return ridge * x - np.einsum("nm,nmd->nd", errors, signed) / signed.shape[1]


def _newton(signed: np.ndarray, ridge: float) -> np.ndarray:
    """Return the optimum of the logistic regression over all nodes, (d,), by Newton's method.

    :param signed: features of all points, each multiplied by its label ±1, (n · points, d)
    :param ridge: factor of the regularization
    """
    x = np.zeros(signed.shape[1])
    for _ in range(NEWTON):
        errors = 1 / (1 + np.exp(signed @ x))
        weights = (errors * (1 - errors))[:, None]
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
    """Return matrix factorizations f_i(U, V) = ½ ‖A_i − U Vᵀ‖².

    The mean A of all A_i has rank ``rank`` and the largest singular value 1. f − ½ ‖A − U Vᵀ‖² is
    constant, so the minimum is known: it is reached if U Vᵀ = A. The problem is not convex. Here ζ²
    is mean_i ‖A_i − A‖².

    :param nodes: number of nodes, n
    :param height: number of rows of A
    :param width: number of columns of A
    :param rank: rank of A
    :param heterogeneity: ζ
    :param draw: random seed of the problem
    :param steps: number of steps per epoch
    """
    random = np.random.default_rng((draw, 3))
    left = random.standard_normal((height, rank))
    right = random.standard_normal((width, rank))
    mean = left @ right.T
    mean /= np.linalg.norm(mean, 2)
    matrices = mean + _spread(nodes, (height, width), heterogeneity, "random", random)
    return Problem((matrices,), (mean,), math.nan, 2.0, heterogeneity, steps)
