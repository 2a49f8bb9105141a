"""How far nodes are from each other: norms whose bits don't depend on an array's shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpigossip.groups.base import Group
from mpigossip.mixing.base import Mixer

EVERY, EVERY_ON_GPUS = 10, 100
"""Steps between two measurements where `log.consensus_every` is "auto"."""


def measured_every(setting: int | str, device: str) -> int:
    """Steps between two measurements on such a device; 0: none."""
    if isinstance(setting, int):
        return setting
    return EVERY_ON_GPUS if device.startswith("cuda") else EVERY


def square_norms(x: torch.Tensor, minus: torch.Tensor | None = None) -> torch.Tensor:
    """‖x − minus‖² of each row, in float64: (rows, 1).

    Summed in fixed blocks, one row at a time: torch's sums depend on an array's shape.
    """
    # a GPU has nothing to gain from small blocks, and is waited for after each
    block = 1 << (16 if x.device.type == "cpu" else 24)
    totals = torch.zeros(len(x), 1, dtype=torch.float64)
    for row in range(len(x)):
        for at in range(0, x.shape[1], block):
            piece = x[row, at : at + block].double()
            if minus is not None:
                other = minus[row] if minus.dim() > 1 else minus
                piece -= other[at : at + block]
            totals[row, 0] += float((piece * piece).sum())
    return totals


def consensus_distance(x: Sequence[torch.Tensor], mixer: Mixer, group: Group) -> float:
    """(1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖², the mean square distance from the average, relative.

    ``x``: the shards that live here, (rows, p) each; collective over nodes and their slots.
    """
    means = [mixer.mean(shard) for shard in x]
    apart = group.on_shards(lambda k: square_norms(x[k], means[k]))
    sizes = group.on_shards(lambda k: square_norms(means[k].unsqueeze(0)))
    total = float(mixer.mean_scalars(group.sum_scalars(apart)))
    size = float(group.sum_scalars(sizes))
    return total / size if size else 0.0
