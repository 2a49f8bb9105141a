"""Segmentation: find the pixels of a noisy image that belong to a bright disc.

    PYTHONPATH=. mpirun -n 4 mpigossip train shapes.toml

The images are generated here. The data set is a Dataset as in PyTorch's tutorials: `__getitem__`
returns one sample, as a dict.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Discs(Dataset):
    """Images (1, size, size) with one disc each, and its mask (size, size); i seeds sample i."""

    def __init__(self, samples, size, noise, first=0):
        """Prepare the samples ``first`` to ``first + samples - 1``."""
        self.samples = samples
        self.size = size
        self.noise = noise
        self.first = first

    def __len__(self):
        """Return the number of samples."""
        return self.samples

    def __getitem__(self, index):
        """Return one sample; its noise is different each time."""
        draw = torch.Generator().manual_seed(self.first + index)
        x, y = torch.meshgrid(*[torch.linspace(-1, 1, self.size)] * 2, indexing="ij")
        a, b, radius = torch.rand(3, generator=draw) * torch.tensor([1.0, 1.0, 0.35])
        mask = (x - a + 0.5) ** 2 + (y - b + 0.5) ** 2 < (radius + 0.2) ** 2
        image = mask + self.noise * torch.randn(self.size, self.size)
        return {"image": image.unsqueeze(0), "mask": mask.float()}


def discs(samples, test_samples, size=32, noise=0.8):
    """Return the data sets; every job sets `samples` and `test_samples`, and may set the others."""
    return {
        "train": Discs(samples, size, noise),
        "test": Discs(test_samples, size, noise, first=samples),
    }


def network(width=8):
    """Build the network that maps images (B, 1, H, W) to scores (B, H, W)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(width, width, 5, padding=4, dilation=2),
        nn.ReLU(),
        nn.Conv2d(width, 1, 5, padding=2),
        nn.Flatten(1, 2),
    )


class Overlap:
    """The task: cross-entropy per pixel; its metrics are accuracy and intersection over union."""

    units = {"loss": "nat"}

    def loss(self, model, batch):
        """Return the mean loss per pixel, and the sums whose quotients are the metrics.

        The quotients are formed over all images together, not averaged over images.
        """
        scores = model(batch["image"])
        mask = batch["mask"]
        predicted = scores.detach() > 0
        intersection = (predicted * mask).sum()
        union = (predicted + mask).clamp(max=1).sum()
        correct = (predicted == mask.bool()).sum()
        return F.binary_cross_entropy_with_logits(scores, mask), {
            "overlap": (intersection, union),
            "pixels": (correct, mask.numel()),
        }
