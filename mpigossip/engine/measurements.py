"""Measurements of a step; norms have bits that don't depend on an array's shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpigossip.groups.base import Group
from mpigossip.mixing.base import Kind, Mixer

NAN = float("nan")
EVERY, EVERY_ON_GPUS = 10, 100
"""Steps between two measurements where `log.consensus_every` is "auto"."""


@dataclass
class Record:
    """What one step showed; arrays are (rows,) float64."""

    index: int
    kind: Kind
    lr: float
    loss: torch.Tensor
    gradient_norm: torch.Tensor
    mixed_distance: torch.Tensor
    consensus_distance: float
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_sent: list[int] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """what else is known of the step, by name: a number of this process, or one a row. A job's
    task counts its metrics, a user's own loop says what it likes"""
    rested: tuple[int, ...] = ()
    """rows that made no local step, as the cadence wants it"""


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


def unmeasured(rows: int, value: float = NAN) -> torch.Tensor:
    """(rows,) of what wasn't measured."""
    return torch.full((rows,), value, dtype=torch.float64)


def mixed_distance(sent: Sequence, mixed: Sequence, group: Group) -> torch.Tensor:
    """‖mixed − sent‖ of the first vector of a message, (rows,); collective over a node's slots."""
    per_slot = group.on_shards(lambda k: square_norms(mixed[k][0], sent[k][0]))
    return group.sum_scalars(per_slot).sqrt()[:, 0]


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


def node_averages(
    names: Iterable[str], mixer: Mixer, kind: Kind, loss: torch.Tensor, apart: torch.Tensor
) -> dict[str, float]:
    """The node averages that the cadence asks for, equal on all nodes; of GLOBAL steps only.

    At any other step they would make all nodes wait for each other.
    """
    if kind is not Kind.GLOBAL:
        return {}
    wanted = {"loss": loss, "variance": apart**2}
    values = {name: wanted[name] for name in sorted(names)}
    if not values:
        return {}
    means = mixer.mean_scalars(torch.stack(list(values.values()), dim=1))
    return dict(zip(values, means.tolist(), strict=True))


def measured(
    engine: Any, now: Any, loss: torch.Tensor | None, norm: torch.Tensor | None
) -> tuple[Record, dict[str, float]]:
    """The record of a step that an engine has just made, and the averages of its cadence."""
    mixer, rows, apart = engine.mixer, len(engine.mixer.rows), engine.mixed_distance
    loss, norm = (unmeasured(rows) if value is None else value for value in (loss, norm))
    if apart is None:
        apart = unmeasured(rows, 0.0 if engine.measuring else NAN)  # nothing was exchanged
    averages = node_averages(engine.cadence.measures, mixer, now.kind, loss, apart)
    distance = NAN
    if engine.measuring and mixer.synchronous:  # others don't meet for it: evaluations do it
        distance = consensus_distance(engine.vector.x, mixer, engine.group)
    record = Record(engine.index, now.kind, now.lr, loss, norm, apart, distance)
    record.seconds = engine.clock.end()
    record.bytes_sent, record.staleness = list(mixer.bytes_sent), list(mixer.staleness)
    return record, averages
