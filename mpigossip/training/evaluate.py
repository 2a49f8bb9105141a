"""Accuracy and loss: of the exactly averaged model, and of each node's own."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from mpigossip.data.loader import Loader
from mpigossip.engine.consensus import consensus_distance
from mpigossip.mixing.base import Mixer
from mpigossip.models import loss_and_correct
from mpigossip.store.average import average
from mpigossip.training.replicas import Replicas

BATCH = 256
PIECE = 1 << 18
"""Parameters averaged at a time: of n simulated nodes float64 takes 8 n bytes for each."""


class Evaluation(NamedTuple):
    """What one evaluation found; the local figures are (rows,), one for each node here."""

    loss: float
    accuracy: float
    consensus_distance: float
    mean_local_accuracy: float
    local_loss: torch.Tensor
    local_accuracy: torch.Tensor
    share_accuracy: torch.Tensor
    """of the averaged model on the samples that the node tests: what its own compares with"""


def evaluate(replicas: Replicas, mixer: Mixer, loader: Loader) -> Evaluation:
    """Average parameters and norm buffers exactly, and test on the shared test set.

    Node i tests on samples i, i + n, i + 2n, …, the averaged model and its own, so that all
    nodes together run through the test set once for each. Uses the gradients' memory.
    """
    averaged = averaged_model(replicas, mixer)
    sums = [
        torch.cat([
            measure(averaged, loader, node, mixer.n),
            measure(replicas.modules[row][0], loader, node, mixer.n),
        ])
        for row, node in enumerate(mixer.rows)
    ]  # fmt: skip
    rows = torch.stack(sums)
    total = mixer.mean_scalars(rows)
    share = rows[:, 5].clamp(min=1)
    return Evaluation(
        loss=float(total[0] / total[2]),
        accuracy=float(total[1] / total[2]),
        consensus_distance=consensus_distance(replicas.full[0], mixer),
        mean_local_accuracy=float(total[4] / total[5]),
        local_loss=rows[:, 3] / share,
        local_accuracy=rows[:, 4] / share,
        share_accuracy=rows[:, 1] / share,
    )


def averaged_model(replicas: Replicas, mixer: Mixer) -> nn.Module:
    """The exact average as a module whose parameters lie in the memory of a gradient.

    In float64 and in the order of slots and nodes, as :mod:`mpigossip.store.average` has it: what
    is tested here and what is exported or gone on from are the same bits.
    """
    module = copy.deepcopy(replicas.modules[0][0])
    row, full = replicas.grads[0][0], replicas.full[0]
    for at in range(0, len(row), PIECE):
        row[at : at + PIECE].copy_(mixer.mean(full[:, at : at + PIECE].double()))
    replicas.flat.attach(module, row, None)
    buffers = _floats(dict(module.named_buffers()))
    if buffers:
        mine = [_buffers_of(replicas, node) for node in range(len(mixer.rows))]
        values = mixer.mean(torch.stack(mine)).split([one.numel() for one in buffers.values()])
        with torch.no_grad():
            for buffer, value in zip(buffers.values(), values, strict=True):
                buffer.copy_(value.view(buffer.shape))
    return module


def _buffers_of(replicas: Replicas, row: int) -> torch.Tensor:
    """A node's floating-point buffers averaged over its slots: float64 (B,) on the CPU."""
    slots = [_floats(buffers) for buffers in replicas.buffers(row)]
    mean = average({name: one.double().cpu().numpy() for name, one in s.items()} for s in slots)
    return torch.cat([torch.from_numpy(array).reshape(-1) for array in mean.values()])


def _floats(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in buffers.items() if one.is_floating_point()}


def measure(module: nn.Module, loader: Loader, node: int, n: int) -> torch.Tensor:
    """Sum of losses, number right and number of targets on the node's share, float64 (3,)."""
    training = module.training
    module.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for inputs, targets in loader.test(np.arange(node, loader.source.test_size, n), BATCH):
            loss, correct = loss_and_correct(module(inputs), targets)
            count = targets.numel()
            sums += torch.tensor([float(loss) * count, float(correct), count], dtype=torch.float64)
    module.train(training)
    return sums
