"""Models that are a point of a function: what the problems of theory train."""

import torch
from torch import Tensor, nn


class Point(nn.Module):
    """A parameter, given back as it is."""

    def __init__(self, start: Tensor):
        """``start``: x_0."""
        super().__init__()
        self.x = nn.Parameter(start)

    def forward(self) -> Tensor:
        """The parameter."""
        return self.x


def point(shape: tuple[int, ...]) -> nn.Module:
    """A point of as many entries as the last dimension of the samples, 0 at first."""
    return Point(torch.zeros(shape[-1]))


def factors(shape: tuple[int, ...], *, rank: int = 3, size: float = 0.3) -> nn.Module:
    """U (m, rank) over V (k, rank) for samples (m, k), normal numbers of deviation `size`."""
    return Point(size * torch.randn(sum(shape), rank))
