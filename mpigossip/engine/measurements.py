"""Measurements of a step (record, norms and seconds), and the check of messages for NaN.

Norms are summed in blocks of fixed size, one row at a time. The norm of a row is therefore bitwise
identical, however many rows the array has.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpigossip.algorithms.base import Step
from mpigossip.config.errors import NonFiniteError
from mpigossip.groups.base import Group
from mpigossip.mixing.base import ExchangeKind, Mixer

NAN = float("nan")
EVERY = 10
EVERY_ON_GPUS = 100
"""Steps between two measurements, on CPUs and on GPUs, if `log.consensus_every` is "auto"."""


@dataclass
class StepMetrics:
    """Metrics of one step; tensors have the shape (rows,), with one row for each local node.

    An unknown loss or gradient norm is NaN.
    """

    index: int
    """Number of the step, from 0."""
    kind: ExchangeKind
    lr: float
    loss: torch.Tensor
    gradient_norm: torch.Tensor
    mixed_distance: torch.Tensor
    """‖mixed − sent‖ of the first vector of the message, by which the exchange moved it; NaN if it
    was not computed, and 0 if the step was measured but received nothing.
    """
    consensus_distance: float
    """Consensus distance; NaN if it was not measured."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by activity, as in the log: compute_s (forward and backward passes), node_s
    (averaging and gathering within the node), exchange_s (update of the model, and exchange with
    other nodes) and idle_s (waiting for other nodes).
    """
    bytes_sent: list[int] = field(default_factory=list)
    """Bytes that each row has sent to other nodes since the start of the run."""
    staleness: list[float] = field(default_factory=list)
    """Mean age, in rounds, of the models that each row received in its last GOSSIP exchange; NaN if
    it received none.
    """
    metrics: dict[str, Any] = field(default_factory=dict)
    """Further metrics by name: one value for this process, or one for each row."""
    idle_rows: tuple[int, ...] = ()
    """Rows that made no local step because of the cadence."""


def measured_every(setting: int | str, device: str) -> int:
    """Return the number of steps between two measurements of the consensus distance; 0: none.

    :param setting: value of `log.consensus_every`
    :param device: device of the slots
    """
    if isinstance(setting, int):
        return setting
    return EVERY_ON_GPUS if device.startswith("cuda") else EVERY


def square_norms(x: torch.Tensor, minus: torch.Tensor | None = None) -> torch.Tensor:
    """Return ‖x − minus‖² of each row, in float64 on the CPU: (rows, 1).

    It is summed in blocks of fixed size, one row at a time, because torch's sums depend on the
    shape of an array. The host waits for a GPU once, however many blocks there are.

    :param x: array (rows, p)
    :param minus: array (rows, p), or one row (p,) for all rows; None: zero
    """
    return _sum_blocks([_block_sums(x, minus)])


def _block(device: torch.device) -> int:
    """Return the number of elements that are summed at once; small blocks aid only a CPU."""
    return 1 << (16 if device.type == "cpu" else 24)


def _block_sums(x: torch.Tensor, minus: torch.Tensor | None) -> torch.Tensor:
    """Return ‖x − minus‖² of each block of each row, in float64 on the device: (rows, blocks)."""
    begins = range(0, x.shape[1], _block(x.device))
    sums = []
    for row in range(len(x)):
        for begin in begins:
            piece = x[row, begin : begin + begins.step].double()
            if minus is not None:
                other = minus[row] if minus.dim() > 1 else minus
                piece -= other[begin : begin + begins.step]
            sums.append((piece * piece).sum())
    if not sums:
        return torch.zeros(len(x), 0, dtype=torch.float64, device=x.device)
    return torch.stack(sums).view(len(x), len(begins))


def _sum_blocks(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each row, over all arrays (rows, blocks) in order: (rows, 1) on the CPU."""
    columns = torch.cat(list(sums), dim=1).cpu()
    totals = torch.zeros(len(columns), 1, dtype=torch.float64)
    for of_block in columns.unbind(1):
        totals[:, 0] += of_block
    return totals


def unmeasured(rows: int, value: float = NAN) -> torch.Tensor:
    """Return an array (rows,) of ``value``, for a metric that was not measured."""
    return torch.full((rows,), value, dtype=torch.float64)


def mixed_distance(sent: Sequence, mixed: Sequence, group: Group) -> torch.Tensor:
    """Return ‖mixed − sent‖ of the first vector for each row, (rows,); collective over slots."""
    per_slot = group.on_shards(lambda k: square_norms(mixed[k][0], sent[k][0]))
    return group.sum_scalars(per_slot).sqrt()[:, 0]


def consensus_distance(x: Sequence[torch.Tensor], mixer: Mixer, group: Group) -> float:
    """Return the consensus distance (1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖², or 0 if x̄ = 0.

    ``x`` holds the local shards, (rows, p) each. The call is collective over nodes and their slots.
    """
    # On a GPU, the means take the memory of one block instead of the whole vector.
    width = x[0].shape[1]
    step = _block(x[0].device) if x[0].is_cuda else max(1, width)
    distance_sums: list[list[torch.Tensor]] = [[] for _ in x]
    size_sums: list[list[torch.Tensor]] = [[] for _ in x]

    def add(k: int) -> None:
        distance_sums[k].append(_block_sums(parts[k], means[k]))
        size_sums[k].append(_block_sums(means[k].unsqueeze(0), None))

    for begin in range(0, max(1, width), step):
        parts = [shard[:, begin : begin + step] for shard in x]
        means = mixer.means(parts)
        group.on_shards(add)
    distances = group.on_shards(lambda k: _sum_blocks(distance_sums[k]))
    sizes = group.on_shards(lambda k: _sum_blocks(size_sums[k]))
    total = float(mixer.mean_scalars(group.sum_scalars(distances)))
    size = float(group.sum_scalars(sizes))
    return total / size if size else 0.0


def make_record(
    engine: Any, now: Any, loss: torch.Tensor | None, norm: torch.Tensor | None
) -> tuple[StepMetrics, dict[str, float]]:
    """Return the metrics of a step, and averages over nodes, by name, that the cadence needs.

    The averages are empty unless the step was GLOBAL. The stopwatch of the engine stops. If the
    step is GLOBAL or is measured, the call can be collective over nodes.

    :param engine: engine that has made the step
    :param now: the step
    :param loss: loss of each row, (rows,); None: unknown
    :param norm: norm of the gradient of each row, (rows,); None: unknown
    """
    mixer = engine.mixer
    rows = len(engine.mixer.local_nodes)
    exchange_distance = engine.mixed_distance
    loss, norm = (unmeasured(rows) if value is None else value for value in (loss, norm))
    if exchange_distance is None:
        # Nothing was exchanged, or the distance was not needed.
        exchange_distance = unmeasured(rows, 0.0 if engine.measuring else NAN)
    averages: dict[str, float] = {}
    names = sorted(engine.cadence.measures)
    # Averages make all nodes wait for each other. A GLOBAL exchange does that anyway.
    if names and now.kind is ExchangeKind.GLOBAL:
        wanted = {"loss": loss, "variance": exchange_distance**2}
        means = mixer.mean_scalars(torch.stack([wanted[name] for name in names], dim=1))
        averages = dict(zip(names, means.tolist(), strict=True))
    distance = NAN
    if engine.measuring and mixer.synchronous:  # asynchronous nodes measure only at evaluations
        distance = consensus_distance(engine.vector.x, mixer, engine.group)
    record = StepMetrics(engine.index, now.kind, now.lr, loss, norm, exchange_distance, distance)
    record.seconds = engine.clock.end()
    record.bytes_sent = list(mixer.bytes_sent)
    record.staleness = list(mixer.staleness)
    return record, averages


class Stopwatch:
    """Stopwatch that splits the seconds of a step by activity.

    Waits for other nodes are counted as idle.
    """

    def __init__(self, mixer: Mixer):
        self._mixer = mixer
        self.counting = False
        self.seconds: dict[str, float] = {}
        self._at = self._waited = 0.0

    def begin(self) -> None:
        """Begin to count time for the next step, unless it is counted already."""
        if self.counting:
            return
        self.seconds = {"compute_s": 0.0, "node_s": 0.0, "exchange_s": 0.0, "idle_s": 0.0}
        self.counting = True
        self.skip()

    def lap(self, name: str) -> None:
        """Count the time since the last lap for the activity ``name``."""
        now = time.perf_counter()
        waited = self._wait_seconds()
        idle = min(waited - self._waited, now - self._at)
        self.seconds[name] += now - self._at - idle
        self.seconds["idle_s"] += idle
        self._at = now
        self._waited = waited

    def skip(self) -> None:
        """Exclude the time since the last lap from the step."""
        self._at = time.perf_counter()
        self._waited = self._wait_seconds()

    def _wait_seconds(self) -> float:
        """Return the seconds for which the mixers have waited for other nodes so far."""
        others = self._mixer.state_mixers.values()
        return self._mixer.wait_seconds + sum(mixer.wait_seconds for mixer in others)

    def end(self) -> dict[str, float]:
        """Stop counting; return the seconds of the step by activity."""
        self.counting = False
        return self.seconds

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Return a context manager whose time is excluded from all steps."""
        if self.counting:
            self.lap("compute_s")
        try:
            yield
        finally:
            self.skip()


def check_message(
    engine: Any, segment: int, out: Sequence[torch.Tensor], columns: Sequence[slice], now: Step
) -> None:
    """Raise NonFiniteError if vectors of a segment's message contain NaN or infinite values.

    If the progress thread sends the message from a GPU, this thread makes the check when the GPU
    has filled the outbox, so that this call does not wait for the GPU. The mixer's ``finish`` then
    raises the error. In both cases, the message is not sent.

    :param engine: engine that is about to send
    :param segment: index of the segment
    :param out: outbox of the segment
    :param columns: ranges of elements of the segment's x that the message contains, in this order
    :param now: step that sends the message
    :raises NonFiniteError: if there are such values; the message names their node and parameter
    """
    # Test the sum first, which needs one pass. It may overflow, so look at the elements only then.
    vectors = out[: engine.method.vectors]
    if not vectors:
        return
    totals = torch.stack([part.sum() for part in vectors])
    check = partial(reject_non_finite, engine, engine.index, segment, vectors, columns)
    if not engine.mixer.check_later(now.kind, now.round, segment, totals, check):
        check(totals.cpu())  # the host waits for the GPU only here


def reject_non_finite(
    engine: Any,
    step: int,
    segment: int,
    vectors: Sequence[torch.Tensor],
    columns: Sequence[slice],
    totals: torch.Tensor,
    array: str = "",
) -> None:
    """Raise NonFiniteError if a vector, whose sum is in ``totals``, has non-finite elements.

    :param engine: engine that is about to send
    :param step: number of the step, for the message
    :param segment: index of the segment
    :param vectors: arrays (local nodes, elements of the message)
    :param columns: ranges of elements of the segment's x that the message contains, in this order
    :param totals: sum of all elements of each vector, (vectors,), on the CPU
    :param array: name of the array of the local step that the vectors contain; "": a message
    :raises NonFiniteError: if there are such elements; the error names the first node that has any,
        and the parameter of its first one
    """
    values = f"values of the array {array}" if array else "values"
    for part, total in zip(vectors, totals.tolist(), strict=True):
        if math.isfinite(total):
            continue
        for node, row in zip(engine.mixer.local_nodes, part, strict=True):
            if len(invalid := row.isfinite().logical_not().nonzero()):
                raise NonFiniteError(
                    f"step {step}: {len(invalid):,} {values} that node {node} was about to "
                    "send are NaN or infinite, the first in "
                    f"{_parameter(engine.vector, segment, columns, int(invalid[0]))}; they "
                    "were not sent. The cause may be the data or the gradients of the "
                    "node, or a learning rate that is too high: clip the gradients "
                    "(algorithm.clip_norm = 1.0 in a job), "
                    "reduce the learning rate, or let torch.amp.GradScaler skip such steps"
                )


def _parameter(vector: Any, segment: int, columns: Sequence[slice], index: int) -> str:
    """Return the name of the parameter to which an element of a message belongs.

    The result is "the padding" if the element comes after the ranges in ``columns``.

    :param vector: flat parameters
    :param segment: index of the segment
    :param columns: ranges of elements of the segment's x that the message contains, in this order
    :param index: index of the element in a vector of the segment's message
    """
    flat = vector.flat
    slot = vector.first[segment] // flat.width
    for c in columns:
        if index < c.stop - c.start:
            column = c.start + index
            ranges = zip(flat.names, flat.ranges_in(slot), strict=True)
            return next(name for name, columns in ranges if column < columns.stop)
        index -= c.stop - c.start
    return "the padding"
