"""The tasks of theory: functions with a known optimum, and noise of a known size in the gradient.

Their data are functions (data/problems.py). A test of a model x shows ``loss`` f(x) − f(x*),
``gradient_square`` ‖∇f(x)‖² and ``distance_square`` ‖x − x*‖²: of the averaged model x̄, and as
local_… of each node's own. In training the same is of the node's f_i, without the noise.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpigossip.config.limits import NotNegative
from mpigossip.data.pytree import Nested
from mpigossip.training.task import Metrics


class Theory(ABC):
    """A function of a sample, its gradient, and how far from the optimum a point is.

    The gradient that is trained with has normal noise of E ‖ξ‖² = σ², the same for all
    coordinates, drawn anew in each step by each node; evaluations have none.
    """

    def __init__(self, *, noise: NotNegative = 0.1):
        """``noise``: σ."""
        self.noise = noise

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        point = model()
        value, gradient, distance = self.function(point, batch)
        metrics = {
            "gradient_square": (gradient.detach().square().sum().double(), 1),
            "distance_square": (distance.detach().double(), 1),
        }
        if self.noise and torch.is_grad_enabled():
            along = (point * torch.randn_like(point)).sum() * (
                self.noise / math.sqrt(point.numel())
            )
            value = value + (along - along.detach())  # of the gradient alone
        return value, metrics

    @abstractmethod
    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        """Value, gradient (P,) and squared distance to the optimum."""


class Quadratics(Theory):
    """½ Σ_k a_k (x_k − b_k)²; samples are (b, a)."""

    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        centre, curvature = batch
        apart = point - centre
        pull = curvature * apart
        value = (pull * apart).sum(-1).mean() / 2
        return value, pull.mean(0), apart.square().sum(-1).mean()


class Logistic(Theory):
    """mean_m log(1 + exp(−z_mᵀ x)) + r/2 ‖x‖²; samples are (z, x*, r, f*), z = label · features."""

    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        signed, optimum, ridge, least = batch
        margins = signed @ point
        square = point.square().sum()
        value = nn.functional.softplus(-margins).mean(-1) + ridge / 2 * square - least
        wrong = torch.sigmoid(-margins)
        pull = ridge[:, None] * point - (wrong[..., None] * signed).mean(-2)
        return value.mean(), pull.mean(0), (point - optimum).square().sum(-1).mean()


class Factorization(Theory):
    """½ ‖A − U Vᵀ‖²; samples are A, the point is U over V. Its distance is that of U Vᵀ to A."""

    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        (whole,) = batch
        left = point[: whole.shape[1]]
        right = point[whole.shape[1] :]
        apart = left @ right.T - whole
        square = apart.square().sum((-2, -1)).mean()
        mean = apart.mean(0)
        return square / 2, torch.cat([mean @ right, mean.T @ left]).flatten(), square
