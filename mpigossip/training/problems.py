"""Theory tasks, which are functions with a known optimum and gradient noise of known variance.

The data of such a task are functions f_i, one per node (data/problems.py); f is their mean, and x*
its optimum. An evaluation of a model x returns ``loss``, f(x) − f(x*), ``gradient_square``,
‖∇f(x)‖², and ``distance_square``, ‖x − x*‖². These are evaluated at the averaged model x̄ and, with
the prefix local_, at the models of the nodes. During training, the loss and the metrics of a node
belong to its function f_i, and do not contain the noise.
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
    """Base class of theory tasks, which minimize a function with a known optimum.

    In training, each call of :meth:`loss` adds normal noise ξ to the gradient, with E ‖ξ‖² = σ² and
    equal variance in all coordinates. If a node computes several gradients per step, on several
    slots or with `algorithm.accumulate`, it averages them, and so their independent ξ. Evaluations
    have no noise.
    """

    def __init__(self, *, noise: NotNegative = 0.1):
        """Create the task.

        :param noise: σ, standard deviation of the gradient noise
        """
        self.noise = noise

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """Return the value of the function at the model's point, and the two metrics.

        With gradients enabled, the gradient of the value has noise.
        """
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
            # This term adds the noise to the gradient, but not to the value.
            value = value + (along - along.detach())
        return value, metrics

    @abstractmethod
    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value, the gradient, and the squared distance to the optimum at a point.

        The value and the distance are scalars; the gradient has shape (P,) for P parameters.

        :param point: point x at which the function is evaluated, of shape (P,)
        :param batch: data that define the function
        """


class Quadratics(Theory):
    """Quadratic function ½ Σ_k a_k (x_k − b_k)², defined by a sample (b, a)."""

    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        centre, curvature = batch
        difference = point - centre
        pull = curvature * difference
        value = (pull * difference).sum(-1).mean() / 2
        return value, pull.mean(0), difference.square().sum(-1).mean()


class Logistic(Theory):
    """Logistic regression, mean_m log(1 + exp(−z_mᵀ x)) + r/2 ‖x‖².

    A sample (z, x*, r, f*) defines the function: z = label · features, x* is the optimum, r the
    regularization, and f* the value at the optimum.
    """

    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        signed, optimum, ridge, minimum = batch
        margins = signed @ point
        square = point.square().sum()
        value = nn.functional.softplus(-margins).mean(-1) + ridge / 2 * square - minimum
        errors = torch.sigmoid(-margins)
        pull = ridge[:, None] * point - (errors[..., None] * signed).mean(-2)
        return value.mean(), pull.mean(0), (point - optimum).square().sum(-1).mean()


class Factorization(Theory):
    """Matrix factorization, ½ ‖A − U Vᵀ‖².

    A sample is the matrix A, and the point x consists of U stacked on V. The distance to the
    optimum is the distance of U Vᵀ to A.
    """

    def function(self, point: Tensor, batch: Nested) -> tuple[Tensor, Tensor, Tensor]:
        (matrix,) = batch
        left = point[: matrix.shape[1]]
        right = point[matrix.shape[1] :]
        difference = left @ right.T - matrix
        square = difference.square().sum((-2, -1)).mean()
        mean = difference.mean(0)
        return square / 2, torch.cat([mean @ right, mean.T @ left]).flatten(), square
