"""One step of decentralized training: the only place where group, mixer and algorithm meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.cadence import Cadence
from mpigossip.config.errors import Failure
from mpigossip.data.loader import Batch
from mpigossip.groups.base import Group
from mpigossip.mixing.base import ByBlocks, Kind, Mixer
from mpigossip.mixing.kernels import onepass
from mpigossip.training.blocks import Blocks
from mpigossip.training.evaluate import consensus_distance, square_norms
from mpigossip.training.precision import Precision
from mpigossip.training.replicas import Replicas


class NotFinite(Failure, ArithmeticError):
    """A loss that is no number any more: step and node are named."""


@dataclass
class Settings:
    """What the loop needs to know of the job."""

    rate: Callable[[int], float]
    """step -> learning rate"""
    batches: Callable[[int], Sequence[Batch]]
    """step -> inputs and targets, row after row, slot after slot"""
    precision: Precision
    accumulate: int = 1
    weight_decay: float = 0.0
    clip_norm: float | None = None
    measure_every: int = 10
    by_blocks: Callable[[Sequence[slice]], list[Algorithm]] | None = None
    """blocks of columns -> the algorithm of each; None where the gradient is needed whole"""


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


class Trainer:
    """The nodes that live in this process, and their steps.

    ``index`` counts steps, ``born`` is the step at which the algorithm's state began, ``round``
    is the graph's clock, and ``index - shift`` the place in the data and the schedule (``shift``
    is 0 unless the number of steps in an epoch has changed). These and the cadence's state are
    all that a checkpoint needs besides arrays.
    """

    def __init__(
        self,
        mixer: Mixer,
        group: Group,
        replicas: Replicas,
        algorithms: Sequence[Algorithm],
        cadence: Cadence,
        settings: Settings,
    ):
        """``algorithms``: one a slot (they differ in which columns take weight decay)."""
        self.mixer, self.group, self.replicas = mixer, group, replicas
        self.algorithms, self.cadence, self.settings = algorithms, cadence, settings
        self.method = algorithms[0]
        self.states: list[Any] = [
            algorithm.init(x) for algorithm, x in zip(algorithms, replicas.x, strict=True)
        ]
        self.rhythm = cadence.init()
        self.index, self.born, self.round, self.shift = 0, 0, 0, 0
        self._blocks: Blocks | None = None
        self._blocks_of: Mixer | None = None

    def step(self) -> Record:
        """One gradient a node, one update, and the exchanges that the cadence asks for."""
        kind = self.cadence.kind(self.rhythm, self.index - self.born)
        lr = self.settings.rate(self.index - self.shift)
        clock = Clock(self.mixer)
        if self.method.ahead:
            self._send(None, self._now(kind, None))
        clock.lap("exchange_s")
        blocks = self._by_blocks()
        early = bool(blocks) and kind is Kind.GOSSIP and not self._whole_norm()
        loss = self._gradients_sent_early(blocks, lr) if blocks and early else self._gradients()
        clock.lap("compute_s")
        g = self.group.reduce_scatter_mean(self.replicas.grads)
        skipped = self._unscale(g)
        norm = self._unmeasured() if early else self._clip_and_decay(g)
        clock.lap("node_s")
        now = self._now(kind, lr)._replace(skipped=skipped)
        if not self.method.ahead and not early:
            self._send(g, now)
        sent, mixed = self.mixer.finish()
        apart = self._distance(sent, mixed, kind)
        self._receive(g, sent, mixed, now)
        self.round += kind is Kind.GOSSIP
        clock.lap("exchange_s")
        self.group.all_gather(self.replicas.x, self.replicas.full)
        clock.lap("node_s")
        self.rhythm = self.cadence.observe(self.rhythm, now, self._measured(kind, loss, apart))
        record = Record(self.index, kind, lr, loss, norm, apart, self._consensus(), clock.seconds)
        record.bytes_sent = list(self.mixer.bytes_sent)
        record.staleness = list(self.mixer.staleness)
        self.index += 1
        return record

    def average(self) -> None:
        """An exchange without a gradient: what a node that waits for others does asynchronously.

        Were it silent, whom it waits for would go on alone, and drift away on its own data.
        """
        every = tuple(range(len(self.mixer.rows)))
        for g in self.replicas.grads:
            g.zero_()
        lr = self.settings.rate(self.index - self.shift)
        now = self._now(Kind.GOSSIP, lr)._replace(skipped=every)
        g = self.group.reduce_scatter_mean(self.replicas.grads)
        self._send(None if self.method.ahead else g, now)
        self._receive(g, *self.mixer.finish(), now)
        self.round += 1
        self.group.all_gather(self.replicas.x, self.replicas.full)

    def _unscale(self, g: list[torch.Tensor]) -> tuple[int, ...]:
        """Take the loss scale out of the gradients; the rows that skip their local step."""
        # gradients that all nodes average are used by all or by none
        together = self.mixer.mean_scalars if "always-global" in self.method.needs else None
        return self.settings.precision.unscale(g, self.group, together)

    def _now(self, kind: Kind, lr: float | None) -> Step:
        return Step(self.index - self.born, self.round, kind, lr)

    def _send(self, g: list | None, now: Step) -> None:
        """Let the algorithm fill the outbox, shard by shard, and begin the exchange."""
        out, x = self.mixer.outbox(now.round), self.replicas.x

        def send(slot: int):
            gradient = None if g is None else g[slot]
            if self._blocks is not None:
                for block in self._blocks.order:
                    self._blocks.send(block, x[slot], gradient, self.states[slot], out[slot], now)
                return self.states[slot]
            arguments = x[slot], gradient, self.states[slot], out[slot], now
            local = now.kind is Kind.LOCAL
            return onepass.send(self.algorithms[slot].send, *arguments, local=local)

        self.states = self.group.on_shards(send)
        self.mixer.start(now.kind, now.round, self.index)

    def _receive(self, g: list, sent: list, mixed: list, now: Step) -> None:
        x = self.replicas.x

        def receive(slot: int):
            if self._blocks is not None:
                self._blocks.receive(
                    x[slot], g[slot], self.states[slot], sent[slot], mixed[slot], now
                )
                return self.states[slot]
            arguments = x[slot], g[slot], self.states[slot], sent[slot], mixed[slot], now
            return onepass.receive(self.algorithms[slot].receive, *arguments)

        self.states = self.group.on_shards(receive)

    def _gradients(self) -> torch.Tensor:
        """Forward and backward on all replicas: mean loss of each node, (rows,)."""
        settings, index = self.settings, self.index
        batches = settings.batches(index - self.shift)
        losses = self.replicas.gradients(batches, settings.accumulate, settings.precision)[:, 0]
        for node, loss in zip(self.mixer.rows, losses.tolist(), strict=True):
            if not abs(loss) < float("inf"):
                raise NotFinite(
                    f"the loss of node {node} is {loss} at step {index}: the last checkpoint is "
                    "kept; a smaller schedule.lr or algorithm.clip_norm = 1.0 often helps"
                )
        return losses

    # -- by blocks, where all is elementwise and the mixer sends them one by one ----------------

    def _by_blocks(self) -> Blocks | None:
        """The blocks that the present mixer sends, if it, the method and the node can."""
        mixer, make, replicas = self.mixer, self.settings.by_blocks, self.replicas
        if mixer is not self._blocks_of:
            if self._blocks is not None:
                self._blocks.close()
            self._blocks, self._blocks_of = None, mixer
            if make and self.method.by_columns and isinstance(mixer, ByBlocks) and mixer.blocks:
                methods = make(mixer.blocks)
                self._blocks = Blocks(mixer, methods, replicas.flat, replicas.modules[0][0])
        return self._blocks

    def _whole_norm(self) -> bool:
        """Whether this step needs all of the gradient before it can use any."""
        return self.settings.precision.scaler is not None or self._measuring()

    def _gradients_sent_early(self, blocks: Blocks, lr: float) -> torch.Tensor:
        """Forward and backward; each block is sent when backward is through with it."""
        now, mixer = self._now(Kind.GOSSIP, lr), blocks.mixer
        (out,), (x,), (g,) = mixer.outbox(now.round), self.replicas.x, self.replicas.grads
        mixer.start_by_blocks(now.round, self.index, blocks.order)

        def ready(block: int) -> None:
            with torch.no_grad():
                c = blocks.columns[block]
                self._decay(x[:, c], g[:, c], self.replicas.flat.decayed_among(c))
                blocks.send(block, x, g, self.states[0], out, now)
            mixer.filled(block)

        with blocks.watched(self.settings.accumulate, ready):
            return self._gradients()

    def _unmeasured(self) -> torch.Tensor:
        return torch.full((len(self.mixer.rows),), float("nan"), dtype=torch.float64)

    def _decay(self, x: torch.Tensor, g: torch.Tensor, decayed: int) -> None:
        """Add the weight decay of the first ``decayed`` columns to their gradient."""
        if self.settings.weight_decay and decayed:
            g[:, :decayed].add_(x[:, :decayed], alpha=self.settings.weight_decay)

    def _clip_and_decay(self, g: list[torch.Tensor]) -> torch.Tensor:
        """Clip by the norm of the node's whole gradient, then add weight decay; norms (rows,)."""
        settings = self.settings
        if settings.clip_norm is None and not self._measuring():
            norms = torch.full((len(g[0]), 1), float("nan"), dtype=torch.float64)
        else:
            norms = self.group.sum_scalars(
                self.group.on_shards(lambda s: square_norms(g[s]))
            ).sqrt()
        factors = None
        if settings.clip_norm is not None:
            factors = (settings.clip_norm / norms.clamp(min=1e-300)).clamp(max=1.0).float()

        def work(slot: int) -> None:
            if factors is not None:
                g[slot].mul_(factors.to(g[slot].device))
            self._decay(self.replicas.x[slot], g[slot], self.replicas.flat.decayed_in(slot))

        self.group.on_shards(work)
        return norms[:, 0]

    # -- what is measured on the way --------------------------------------------------------

    def _measuring(self) -> bool:
        every = self.settings.measure_every
        return bool(every) and self.index % every == 0

    def _distance(self, sent: list, mixed: list, kind: Kind) -> torch.Tensor:
        """‖mixed − sent‖ of the first vector where it is asked for, else NaN: (rows,)."""
        wanted = "variance" in self.cadence.measures and kind is Kind.GLOBAL
        if not wanted and not self._measuring():
            return self._unmeasured()
        per_slot = self.group.on_shards(lambda s: square_norms(mixed[s][0], sent[s][0]))
        return self.group.sum_scalars(per_slot).sqrt()[:, 0]

    def _consensus(self) -> float:
        # asynchronous nodes don't meet for it: evaluations measure it too
        if not self._measuring() or not self.mixer.synchronous:
            return float("nan")
        return consensus_distance(self.replicas.full[0], self.mixer)

    def _measured(self, kind: Kind, loss: torch.Tensor, apart: torch.Tensor) -> dict[str, float]:
        """The node averages that the cadence asks for, equal on all nodes; of GLOBAL steps only.

        At any other step they would make all nodes wait for each other.
        """
        if kind is not Kind.GLOBAL:
            return {}
        wanted = {"loss": loss, "variance": apart**2}
        values = {name: wanted[name] for name in sorted(self.cadence.measures)}
        if not values:
            return {}
        means = self.mixer.mean_scalars(torch.stack(list(values.values()), dim=1))
        return dict(zip(values, means.tolist(), strict=True))


class Clock:
    """Seconds of a step by what they went to; waiting for other nodes is told apart as idle."""

    def __init__(self, mixer: Mixer):
        """Start the first lap."""
        self.seconds = {"compute_s": 0.0, "node_s": 0.0, "exchange_s": 0.0, "idle_s": 0.0}
        self._mixer, self._waited = mixer, mixer.waited
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap."""
        at, waited = time.perf_counter(), self._mixer.waited
        idle = min(waited - self._waited, at - self._at)
        self.seconds[name] += at - self._at - idle
        self.seconds["idle_s"] += idle
        self._at, self._waited = at, waited
