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
    """Images (1, size, size) with one disc each, and the mask (size, size) of the disc.

    The number of a sample is the seed of its disc.
    """

    def __init__(self, samples, size, noise, first=0):
        """Prepare the data set.

        :param samples: number of samples
        :param size: side of the images in pixels
        :param noise: standard deviation of the noise
        :param first: number of the first sample, so that training and test samples differ
        """
        self.samples = samples
        self.size = size
        self.noise = noise
        self.first = first

    def __len__(self):
        """Return the number of samples."""
        return self.samples

    def __getitem__(self, index):
        """Return sample ``index``; the disc is always the same, but the noise changes each time."""
        draw = torch.Generator().manual_seed(self.first + index)
        x, y = torch.meshgrid(*[torch.linspace(-1, 1, self.size)] * 2, indexing="ij")
        a, b, radius = torch.rand(3, generator=draw) * torch.tensor([1.0, 1.0, 0.35])
        mask = (x - a + 0.5) ** 2 + (y - b + 0.5) ** 2 < (radius + 0.2) ** 2
        image = mask + self.noise * torch.randn(self.size, self.size)
        return {"image": image.unsqueeze(0), "mask": mask.float()}


def discs(samples, test_samples, size=32, noise=0.8):
    """Return the data sets of training and test, as a dict.

    :param samples: number of training samples, the setting data.samples
    :param test_samples: number of test samples, the setting data.test_samples
    :param size: side of the images in pixels; a job may set data.size
    :param noise: standard deviation of the noise; a job may set data.noise
    """
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
        """Return the mean loss per pixel, and for each metric a sum and a count.

        A metric is the quotient of its sum and its count over all images of the test set, and not
        the mean of the quotients of single images.
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
