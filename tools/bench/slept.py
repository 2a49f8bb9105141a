"""A model whose computing is slept, as on a device: the few cores of this machine stay free.

`tools.bench.slept:layers` as model.name, started where the repository is.
"""

from __future__ import annotations

import time

import torch
from torch import nn

WIDTH, LAYERS = 512, 4
"""4 layers of 512 x 512: 1.05 M parameters with the first and the last."""


class _Sleep(torch.autograd.Function):
    """The identity; forward takes a third of the seconds, backward the rest."""

    @staticmethod
    def forward(ctx, x, seconds):
        """Wait, and go on."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Wait twice as long."""
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


class Layer(nn.Linear):
    """A linear layer that takes so many seconds."""

    def __init__(self, seconds: float):
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x):
        """As the layer would, later."""
        return torch.relu(super().forward(_Sleep.apply(x, self.seconds)))


def layers(shape, classes: int, *, seconds: float = 0.2, times: float = 1.0, slow: int = -1):
    """The model; the process whose rank is ``slow`` takes ``times`` as long."""
    first = nn.Linear(shape[0] * shape[1] * shape[2], WIDTH)
    own = seconds * (times if slow >= 0 and _rank() == slow else 1.0)
    body = [Layer(own / LAYERS) for _ in range(LAYERS)]
    return nn.Sequential(nn.Flatten(), first, *body, nn.Linear(WIDTH, classes))


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank if MPI.Is_initialized() else 0
