"""A stream of samples without an end or a length: an IterableDataset, each node with its own.

    PYTHONPATH=. mpirun -n 4 mpigossip train stream.toml

A function of which one needs the samples of a neighbourhood: y = sin(3 a) b + noise, fitted by the
built-in network.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset


class Measurements(IterableDataset):
    """What one instrument measures, for ever; random numbers are its own for each seed."""

    def __init__(self, seed):
        """From a seed."""
        self.seed = seed

    def __iter__(self):
        """Pairs of points (2,) and values (1,)."""
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            x = 2 * torch.rand(2, generator=draw) - 1
            yield x, (torch.sin(3 * x[:1]) * x[1:] + 0.05 * torch.randn(1, generator=draw))


def measurements(seed, node, nodes, test_samples):
    """A function that takes `node` is asked once for each; all have one test set."""
    points = 2 * torch.rand(test_samples, 2, generator=torch.Generator().manual_seed(7)) - 1
    return {
        "train": Measurements(seed * nodes + node),
        "test": TensorDataset(points, torch.sin(3 * points[:, :1]) * points[:, 1:]),
    }


class Squares:
    """The task of every regression: the mean square, and the mean distance."""

    def loss(self, model, batch):
        """Batches are (inputs, values)."""
        inputs, values = batch
        found = model(inputs)
        distance = (found.detach() - values).abs().sum()
        return F.mse_loss(found, values), {"distance": (distance, values.numel())}
