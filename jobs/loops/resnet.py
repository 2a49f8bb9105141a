"""A small ResNet with EMA, BatchNorm and a cosine schedule.

    mpirun -n 4 python resnet.py

Most images of a rank belong to two of the classes. The statistics of its BatchNorm layers are
therefore wrong for the other classes, and its own model is less accurate. Within
``optimizer.averaged()``, the model is the exact average over nodes, including the means and
variances of BatchNorm; within ``averaged(ema)``, the same holds for the exponential moving average
of the model. Each of the two averages has the same accuracy on all ranks. Only the lines marked <-
make the training decentralized.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpigossip  # <-

CLASSES = 8
SIDE = 12
BATCH = 32
RATE = 0.1
NOISE = 1.5


class Block(nn.Module):
    """Residual block of two convolutions with BatchNorm; a stride of 2 halves the image size."""

    def __init__(self, before, after, stride=1):
        """Create the layers for the given numbers of input and output channels."""
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        """Return the outputs (batch, after, h / stride, w / stride) of (batch, before, h, w)."""
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet():
    """Build the model that maps images (batch, 1, SIDE, SIDE) to logits (batch, CLASSES)."""
    stem = [nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*stem, Block(8, 8), Block(8, 16, 2), *pool)


def pictures(count, draw, kinds):
    """Return noisy images of waves (count, 1, SIDE, SIDE), and their classes (count,).

    The direction, the brightness and the contrast of the waves depend on the class.

    :param count: number of images
    :param draw: generator of the random numbers
    :param kinds: classes to draw from with equal probability; a class may occur several times
    """
    kind = kinds[torch.randint(len(kinds), (count,), generator=draw)]
    angle = kind * torch.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=draw)
    waves = (1 + kind.view(-1, 1, 1) / 4) * torch.sin(1.5 * along + phase) + kind.view(-1, 1, 1) / 4
    return (waves + NOISE * torch.randn(count, SIDE, SIDE, generator=draw)).unsqueeze(1), kind


def of_rank(rank):
    """Return the classes to draw from: the rank's own two classes 20 times, the others once."""
    own = [(2 * rank) % CLASSES, (2 * rank + 1) % CLASSES]
    return torch.tensor(own * 20 + [kind for kind in range(CLASSES) if kind not in own])


@torch.no_grad()
def accuracy(model, images, kinds):
    """Return the fraction of images that the model classifies correctly in evaluation mode."""
    model.eval()
    right = (model(images).argmax(1) == kinds).double().mean()
    model.train()
    return float(right)


def main():
    """Train, then print on each rank the accuracies of its own and the averaged model and EMA."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with mpigossip.world() as world:  # <-
        rank = world.rank  # <-
        draw = torch.Generator().manual_seed(rank)
        local_kinds = of_rank(rank)
        test = pictures(400, torch.Generator().manual_seed(1000), torch.arange(CLASSES))
        model = resnet()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
        optimizer = mpigossip.Gossip(world, model, optimizer)  # <-
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        for _ in range(options.steps):
            images, kinds = pictures(BATCH, draw, local_kinds)
            optimizer.zero_grad()
            F.cross_entropy(model(images), kinds).backward()
            optimizer.step()
            rates.step()
            ema.update_parameters(model)
        own = accuracy(model, *test)
        own_ema = accuracy(ema, *test)
        with optimizer.averaged():  # <-
            whole = accuracy(model, *test)
        with optimizer.averaged(ema):  # <-
            whole_ema = accuracy(ema, *test)
        print(
            f"rank {rank}: own {own:.4f}, averaged {whole:.4f}, EMA {own_ema:.4f}, "
            f"EMA averaged {whole_ema:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
