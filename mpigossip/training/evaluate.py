"""Accuracy and loss: of the exactly averaged model, and of each node's own."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from mpigossip.data.loader import Loader
from mpigossip.engine.consensus import consensus_distance
from mpigossip.groups.base import held, shards
from mpigossip.mixing.base import Mixer
from mpigossip.models import loss_and_correct
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
    nodes together run through the test set once for each; its slot 0 does. Uses the gradients'
    memory. Collective over nodes and their slots.
    """
    averaged, group = averaged_model(replicas, mixer), replicas.group
    rows = torch.zeros(len(mixer.rows), 6, dtype=torch.float64)
    for row, node in enumerate(mixer.rows if 0 in group.mine else ()):
        rows[row] = torch.cat([
            measure(averaged, loader, node, mixer.n),
            measure(replicas.modules[row][0], loader, node, mixer.n),
        ])  # fmt: skip
    nothing = torch.zeros_like(rows)
    rows = group.sum_scalars([nothing if slot else rows for slot in group.mine])
    total = mixer.mean_scalars(rows)
    share = rows[:, 5].clamp(min=1)
    return Evaluation(
        loss=float(total[0] / total[2]),
        accuracy=float(total[1] / total[2]),
        consensus_distance=consensus_distance(replicas.x, mixer, group),
        mean_local_accuracy=float(total[4] / total[5]),
        local_loss=rows[:, 3] / share,
        local_accuracy=rows[:, 4] / share,
        share_accuracy=rows[:, 1] / share,
    )


def averaged_model(replicas: Replicas, mixer: Mixer) -> nn.Module:
    """The exact average as a module whose parameters lie in the memory of a gradient.

    In float64 and in the order of slots and nodes, as :mod:`mpigossip.store.average` has it: what
    is tested here and what is exported or gone on from are the same bits. Every slot averages its
    shard; collective over nodes and their slots.
    """
    module, group = copy.deepcopy(replicas.modules[0][0]), replicas.group
    rows = [grads[:1] for grads in replicas.grads]
    means = shards(rows, group.segments, held(group))
    for mean, x in zip(means, replicas.x, strict=True):
        for at in range(0, x.shape[1], PIECE):
            mean[0, at : at + PIECE].copy_(mixer.mean(x[:, at : at + PIECE].double()))
    group.all_gather(means, rows)
    replicas.flat.attach(module, rows[0][0], None)
    buffers = _floats(dict(module.named_buffers()))
    if buffers:
        each = [_buffers_of(replicas, k) for k in range(len(group.mine))]
        mine = group.sum_scalars(each) * (1 / group.slots)
        values = mixer.mean(mine).split([one.numel() for one in buffers.values()])
        with torch.no_grad():
            for buffer, value in zip(buffers.values(), values, strict=True):
                buffer.copy_(value.view(buffer.shape))
    return module


def _buffers_of(replicas: Replicas, place: int) -> torch.Tensor:
    """The floating-point buffers of one slot of those here: float64 (rows, B) on the CPU."""
    rows = [replicas.buffers(row)[place] for row in range(replicas.rows)]
    return torch.stack([
        torch.cat([one.double().cpu().reshape(-1) for one in _floats(buffers).values()])
        for buffers in rows
    ])  # fmt: skip


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
