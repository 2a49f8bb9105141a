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
from mpigossip.training.replicas import Replicas

BATCH = 256


class Evaluation(NamedTuple):
    """What one evaluation found; the local figures are (rows,), one for each node here."""

    loss: float
    accuracy: float
    consensus_distance: float
    mean_local_accuracy: float
    local_loss: torch.Tensor
    local_accuracy: torch.Tensor


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
    )


def averaged_model(replicas: Replicas, mixer: Mixer) -> nn.Module:
    """The exact average as a module whose parameters lie in the memory of a gradient."""
    module = copy.deepcopy(replicas.modules[0][0])
    row = replicas.grads[0][0]
    row.copy_(mixer.mean(replicas.full[0]))
    replicas.flat.attach(module, row, None)
    values = mixer.mean(replicas.float_buffers())
    with torch.no_grad():
        replicas.set_float_buffers(module, values)
    return module


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
