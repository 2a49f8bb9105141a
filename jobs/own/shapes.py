"""Segmentation: which pixels of a noisy image belong to a bright disc; images are made here.

    PYTHONPATH=. mpirun -n 4 mpigossip train shapes.toml

A Dataset as torch's tutorials have it: `__getitem__` makes one sample, as a dict.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Discs(Dataset):
    """Images (1, size, size) with a disc each, and its mask (size, size); sample i is from i."""

    def __init__(self, samples, size, noise, first=0):
        """Samples ``first`` to ``first + samples``."""
        self.samples = samples
        self.size = size
        self.noise = noise
        self.first = first

    def __len__(self):
        """Number of samples."""
        return self.samples

    def __getitem__(self, index):
        """One sample; the noise is drawn anew each time."""
        draw = torch.Generator().manual_seed(self.first + index)
        x, y = torch.meshgrid(*[torch.linspace(-1, 1, self.size)] * 2, indexing="ij")
        a, b, radius = torch.rand(3, generator=draw) * torch.tensor([1.0, 1.0, 0.35])
        mask = (x - a + 0.5) ** 2 + (y - b + 0.5) ** 2 < (radius + 0.2) ** 2
        image = mask + self.noise * torch.randn(self.size, self.size)
        return {"image": image.unsqueeze(0), "mask": mask.float()}


def discs(samples, test_samples, size=32, noise=0.8):
    """The data sets; `samples` and `test_samples` are settings of every job, the others ours."""
    return {
        "train": Discs(samples, size, noise),
        "test": Discs(test_samples, size, noise, first=samples),
    }


def network(width=8):
    """Images (B, 1, H, W) to scores (B, H, W)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(width, width, 5, padding=4, dilation=2),
        nn.ReLU(),
        nn.Conv2d(width, 1, 5, padding=2),
        nn.Flatten(1, 2),
    )


class Overlap:
    """The task: cross-entropy of each pixel; pixels that are right, and intersection over union."""

    units = {"loss": "nat"}

    def loss(self, model, batch):
        """Means over pixels; the overlap is summed over all images, not averaged over them."""
        scores = model(batch["image"])
        mask = batch["mask"]
        found = scores.detach() > 0
        both = (found * mask).sum()
        either = (found + mask).clamp(max=1).sum()
        right = (found == mask.bool()).sum()
        return F.binary_cross_entropy_with_logits(scores, mask), {
            "overlap": (both, either),
            "pixels": (right, mask.numel()),
        }
