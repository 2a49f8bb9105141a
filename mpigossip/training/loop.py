"""A job's step: gradients of replicas on batches, passed to the engine."""

from collections.abc import Callable, Sequence
from itertools import product

import torch

from mpigossip.config import Job
from mpigossip.config.errors import NotFinite
from mpigossip.data.philox import mixed
from mpigossip.data.pytree import Nested
from mpigossip.engine.measurements import Record, square_norms
from mpigossip.engine.step import Engine
from mpigossip.groups.base import Group, held
from mpigossip.mixing.base import Mixer
from mpigossip.training.precision import Precision
from mpigossip.training.replicas import Replicas


class Trainer:
    """Gradients of the nodes that live in this process, and the engine that steps along them.

    ``index - shift`` is the place in the data and the schedule (``shift`` is 0 unless the number
    of steps in an epoch has changed).
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        replicas: Replicas,
        precision: Precision,
        rate: Callable[[int], float],
        batches: Callable[[int], Sequence[Nested]],
    ):
        """``replicas``: the engine's vector; ``rate``: step -> learning rate.

        ``batches``: step -> batches, row after row, slot after slot of those here.
        """
        self.section, self.seed = job.algorithm, job.run.seed
        self.engine, self.replicas, self.precision = engine, replicas, precision
        self.rate, self.batches, self.shift = rate, batches, 0

    @property
    def index(self) -> int:
        """Steps done."""
        return self.engine.index

    @property
    def mixer(self) -> Mixer:
        """The communication backend between nodes."""
        return self.engine.mixer

    @property
    def group(self) -> Group:
        """The slots of a node."""
        return self.engine.group

    @property
    def resting(self) -> tuple[int, ...]:
        """Rows that skip the local step, as their nodes make fewer than others."""
        engine = self.engine
        return engine.cadence.resting(engine.index - engine.state_start, self.mixer.rows)

    def step(self) -> Record:
        """One gradient a node, one update, and the exchange that the cadence asks for."""
        self.engine.ahead()
        return self.take(self._gradients())

    def take(self, figures: torch.Tensor) -> Record:
        """The step that has begun, from the gradients that lie in the replicas.

        ``figures``: (rows, 1 + 2 metrics).
        """
        engine = self.engine
        lr = self.rate(engine.index - self.shift)
        engine.clock.lap("compute_s")
        if rested := self.resting:
            figures[list(rested)] = float("nan")
            for grads in self.replicas.grads:
                grads[list(rested)] = 0.0
        self.replicas.gather()
        skipped = tuple(sorted({*self._unscale(), *rested}))
        norm = self._clip_and_decay()
        engine.clock.lap("node_s")
        record = engine.step(lr, skipped, loss=figures[:, 0], gradient_norm=norm)
        record.rested = rested
        for at, name in enumerate(self.replicas.objective.metrics):
            record.figures[name] = figures[:, 1 + 2 * at] / figures[:, 2 + 2 * at]
        return record

    def average(self) -> None:
        """An exchange without a gradient: what a node that waits for others does asynchronously."""
        self.replicas.gather()
        self.engine.average(self.rate(self.engine.index - self.shift))

    def _gradients(self) -> torch.Tensor:
        """Forward and backward on all replicas: each node's figures, (rows, 1 + 2 metrics)."""
        index = self.engine.index
        figures = self.replicas.gradients(
            self.batches(index - self.shift), self.section.accumulate, self.precision,
            self.seeds(index), self.resting,
        )  # fmt: skip
        self.check(figures)
        return figures

    def check(self, figures: torch.Tensor) -> None:
        """NotFinite for a loss that is no number, where there is one."""
        index, resting = self.engine.index, self.resting
        for row, loss in enumerate(figures[:, 0].tolist()):
            if row not in resting and not abs(loss) < float("inf"):
                node = self.mixer.rows[row]
                raise NotFinite(
                    f"the loss of node {node} is {loss} at step {index}: the last checkpoint is "
                    "kept; a smaller schedule.lr or algorithm.clip_norm = 1.0 often helps"
                )

    def seeds(self, step: int) -> list[int]:
        """Random seeds of the replicas in a step: the same after a resume, and on ranks."""
        places = product(self.mixer.rows, self.group.mine)
        return [mixed(self.seed, step, node, slot) for node, slot in places]

    def _unscale(self) -> tuple[int, ...]:
        """Take the loss scale out of the gradients; the rows that skip their local step."""
        # gradients that all nodes average are used by all or by none
        method = self.engine.method
        together = self.mixer.mean_scalars if method.always_global else None
        return self.precision.unscale(self.replicas.g, self.group, together)

    def _decay(self, x: torch.Tensor, g: torch.Tensor, decayed: int) -> None:
        if self.section.weight_decay and decayed:
            g[:, :decayed].add_(x[:, :decayed], alpha=self.section.weight_decay)

    def _clip_and_decay(self) -> torch.Tensor | None:
        """Clip by the norm of the node's whole gradient, then add weight decay; norms (rows,)."""
        clip, g, norms, factors = self.section.clip_norm, self.replicas.g, None, None
        if clip is not None or self.engine.measuring:
            squares = self.group.on_shards(lambda s: square_norms(g[s]))
            norms = self.group.sum_scalars(squares).sqrt()
        if clip is not None and norms is not None:
            factors = (clip / norms.clamp(min=1e-300)).clamp(max=1.0).float()

        decayed = list(map(self.replicas.flat.decayed_in, held(self.group)))

        def work(slot: int) -> None:
            if factors is not None:
                g[slot].mul_(factors.to(g[slot].device))
            self._decay(self.replicas.x[slot], g[slot], decayed[slot])

        self.group.on_shards(work)
        return None if norms is None else norms[:, 0]
