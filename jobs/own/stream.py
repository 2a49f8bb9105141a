"""Training data as an endless stream of samples: an IterableDataset, different on each node.

    PYTHONPATH=. mpirun -n 4 mpigossip train stream.toml

The built-in network fits the function y = sin(3 a) b from noisy samples.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset


class Measurements(IterableDataset):
    """Endless measurements of one instrument, with random numbers from its seed."""

    def __init__(self, seed):
        """Prepare the measurements of the instrument with this seed."""
        self.seed = seed

    def __iter__(self):
        """Yield pairs of points (2,) and values (1,)."""
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            x = 2 * torch.rand(2, generator=draw) - 1
            yield x, (torch.sin(3 * x[:1]) * x[1:] + 0.05 * torch.randn(1, generator=draw))


def measurements(seed, node, nodes, test_samples):
    """Return the data sets of one node: its own stream, and the test set that all nodes share.

    Because this function has a parameter `node`, mpigossip calls it once for each node.

    :param seed: seed of the run
    :param node: number of the node
    :param nodes: number of nodes
    :param test_samples: number of test samples, the setting data.test_samples
    """
    points = 2 * torch.rand(test_samples, 2, generator=torch.Generator().manual_seed(7)) - 1
    return {
        "train": Measurements(seed * nodes + node),
        "test": TensorDataset(points, torch.sin(3 * points[:, :1]) * points[:, 1:]),
    }


class Squares:
    """The task of a regression: mean squared error; its metric is the mean absolute error."""

    def loss(self, model, batch):
        """Return the loss and the metric of a batch of (inputs, values)."""
        inputs, values = batch
        outputs = model(inputs)
        distance = (outputs.detach() - values).abs().sum()
        return F.mse_loss(outputs, values), {"distance": (distance, values.numel())}
