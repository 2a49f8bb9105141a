"""Measurements of a step: its record, norms, seconds; and no message has NaN or infinity.

Norms have bits that don't depend on an array's shape.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mpigossip.config.errors import NonFiniteError
from mpigossip.groups.base import Group
from mpigossip.mixing.base import ExchangeKind, Mixer

NAN = float("nan")
EVERY = 10
EVERY_ON_GPUS = 100
"""Steps between two measurements where `log.consensus_every` is "auto"."""


@dataclass
class Record:
    """Metrics of one step; tensors are float64 of shape (rows,), the nodes in this process."""

    index: int
    """the step, from 0"""
    kind: ExchangeKind
    lr: float
    loss: torch.Tensor
    gradient_norm: torch.Tensor
    mixed_distance: torch.Tensor
    """‖mixed − sent‖: what the exchange changed"""
    consensus_distance: float
    """NaN where it wasn't measured"""
    seconds: dict[str, float] = field(default_factory=dict)
    """by purpose: compute_s, node_s, exchange_s, idle_s"""
    bytes_sent: list[int] = field(default_factory=list)
    """of each row, between nodes"""
    staleness: list[float] = field(default_factory=list)
    """age in rounds of the models that each row averaged with"""
    metrics: dict[str, Any] = field(default_factory=dict)
    """further metrics by name: a number of this process, or one a row"""
    idle_rows: tuple[int, ...] = ()
    """rows that made no local step because of the cadence"""


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


def make_record(
    engine: Any, now: Any, loss: torch.Tensor | None, norm: torch.Tensor | None
) -> tuple[Record, dict[str, float]]:
    """The record of a step that an engine has just made, and the averages of its cadence."""
    mixer = engine.mixer
    rows = len(engine.mixer.local_nodes)
    apart = engine.mixed_distance
    loss, norm = (unmeasured(rows) if value is None else value for value in (loss, norm))
    if apart is None:
        apart = unmeasured(rows, 0.0 if engine.measuring else NAN)  # nothing was exchanged
    averages: dict[str, float] = {}
    names = sorted(engine.cadence.measures)
    # at any other step all nodes would wait for each other
    if names and now.kind is ExchangeKind.GLOBAL:
        wanted = {"loss": loss, "variance": apart**2}
        means = mixer.mean_scalars(torch.stack([wanted[name] for name in names], dim=1))
        averages = dict(zip(names, means.tolist(), strict=True))
    distance = NAN
    if engine.measuring and mixer.synchronous:  # others don't meet for it: evaluations do it
        distance = consensus_distance(engine.vector.x, mixer, engine.group)
    record = Record(engine.index, now.kind, now.lr, loss, norm, apart, distance)
    record.seconds = engine.clock.end()
    record.bytes_sent = list(mixer.bytes_sent)
    record.staleness = list(mixer.staleness)
    return record, averages


class Clock:
    """Seconds of a step by what they went to; waiting for other nodes is told apart as idle."""

    def __init__(self, mixer: Mixer):
        self._mixer = mixer
        self.counting = False
        self.seconds: dict[str, float] = {}
        self._at = self._waited = 0.0

    def begin(self) -> None:
        """Time from now on is the next step's, unless that is counted already."""
        if self.counting:
            return
        self.seconds = {"compute_s": 0.0, "node_s": 0.0, "exchange_s": 0.0, "idle_s": 0.0}
        self.counting = True
        self.skip()

    def lap(self, name: str) -> None:
        """Book the time since the last lap."""
        at = time.perf_counter()
        waited = self._mixer.wait_seconds
        idle = min(waited - self._waited, at - self._at)
        self.seconds[name] += at - self._at - idle
        self.seconds["idle_s"] += idle
        self._at = at
        self._waited = waited

    def skip(self) -> None:
        """The time since the last lap is none of the step's."""
        self._at = time.perf_counter()
        self._waited = self._mixer.wait_seconds

    def end(self) -> dict[str, float]:
        self.counting = False
        return self.seconds

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager whose time is none of a step's."""
        if self.counting:
            self.lap("compute_s")
        try:
            yield
        finally:
            self.skip()


def check_message(
    engine: Any, segment: int, out: Sequence[torch.Tensor], columns: Sequence[slice]
) -> None:
    """Raise NonFiniteError where what a segment is about to send has NaN or infinite values.

    ``out``: its part of the outbox; ``columns``: those of the segment that lie there side by side.
    """
    # one pass over each; large values may overflow: then look at each
    for part, total in [(part, part.sum()) for part in out[: engine.method.vectors]]:
        if math.isfinite(total):
            continue
        for node, row in zip(engine.mixer.local_nodes, part, strict=True):
            if len(wrong := row.isfinite().logical_not().nonzero()):
                raise NonFiniteError(
                    f"step {engine.index}: {len(wrong):,} values that node {node} was about to "
                    "send are NaN or infinite, the first in "
                    f"{_parameter(engine.vector, segment, columns, int(wrong[0]))}; the other "
                    "nodes have got none of them. Its data or its gradients are at fault, or too "
                    "high a learning rate: clip (algorithm.clip_norm = 1.0 in a job), lower it, "
                    "or let torch.amp.GradScaler leave such steps out"
                )


def _parameter(vector: Any, segment: int, columns: Sequence[slice], at: int) -> str:
    """Return the name of the parameter that has element ``at`` of a message."""
    flat = vector.flat.local_layout
    for c in columns:
        if at < c.stop - c.start:
            # what FSDP2 has sharded lies at the same offsets in all slots
            column = (vector.first[segment] + c.start + at) % flat.size
            return next(
                n for n, p in zip(flat.names, flat.column_ranges, strict=True) if column < p.stop
            )
        at -= c.stop - c.start
    return "the padding"
