"""A physics-informed network for the damped oscillator u'' + 2 d u' + w² u = 0.

    PYTHONPATH=. mpirun -n 4 mpigossip train oscillator.toml

The initial conditions are u(0) = 1 and u'(0) = 0. The network is not fitted to the solution: the
loss is the residual of the equation at random times plus the errors of the two initial conditions.
The test measures the distance to the closed form.
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

DAMPING = 0.4
FREQUENCY = 2.0
END = 4.0


def solution(t):
    """Return the closed form of u(t)."""
    w = math.sqrt(FREQUENCY**2 - DAMPING**2)
    return torch.exp(-DAMPING * t) * (torch.cos(w * t) + DAMPING / w * torch.sin(w * t))


def times(samples, test_samples):
    """Return a dict of data sets: random times for training, and a regular grid for the test.

    A sample is a pair (time, solution) of tensors of shape (1,).
    """
    grid = torch.linspace(0, END, test_samples).unsqueeze(1)
    train = END * torch.rand(samples, 1)
    return {
        # The loss does not use this solution; it only measures the error.
        "train": TensorDataset(train, solution(train)),
        "test": TensorDataset(grid, solution(grid)),
    }


def network(width=32):
    """Build the network that maps times (B, 1) to u (B, 1)."""
    return nn.Sequential(
        nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


class Residual:
    """The task: the loss is the mean square of the residual, plus the weighted initial errors."""

    def __init__(self, *, start=3.0):
        """Set the weight of the two squared errors at t = 0 in the loss to ``start``."""
        self.start = start

    def loss(self, model, batch):
        """Return the loss, and for each metric a sum and a count.

        The metrics are the mean squares of the residual and of the error of the solution.
        """
        t, known = batch
        with torch.enable_grad():  # Even an evaluation needs the derivatives with respect to t.
            t = torch.cat([torch.zeros_like(t[:1]), t]).requires_grad_()
            u = model(t)
            (speed,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            (force,) = torch.autograd.grad(speed.sum(), t, create_graph=True)
            residual = (force + 2 * DAMPING * speed + FREQUENCY**2 * u)[1:] / FREQUENCY**2
            first = (u[0] - 1).square().sum() + (speed[0] / FREQUENCY).square().sum()
            loss = residual.square().mean() + self.start * first
        error = (u[1:].detach() - known).square().sum()
        return loss, {
            "residual": (residual.detach().square().sum(), len(known)),
            "squared_error": (error, len(known)),
        }
