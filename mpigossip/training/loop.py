"""Training step of a job, which computes the gradients of all replicas for the engine."""

from collections.abc import Callable, Sequence
from itertools import product

import torch

from mpigossip.config import Job
from mpigossip.config.errors import NonFiniteError
from mpigossip.data.philox import mixed
from mpigossip.data.pytree import Nested
from mpigossip.engine.measurements import StepMetrics, square_norms
from mpigossip.engine.step import Engine
from mpigossip.groups.base import local_shards
from mpigossip.mixing.base import Mixer
from mpigossip.training.precision import Precision
from mpigossip.training.replicas import Replicas


class Trainer:
    """Trainer of the local nodes: it computes their gradients, and its engine updates the models.

    The data step determines batches and random seeds, and the rate step determines the learning
    rate. Both are the engine's step, unless :meth:`step` gets others, for example from a member
    that trains a chunk. ``shift`` is subtracted from both to find batches and rates, but not seeds.
    It is 0 unless the number of steps per epoch has changed when the run was resumed.
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
        """Store the parts of a step.

        :param job: the job
        :param engine: algorithm and exchange
        :param replicas: model copies whose parameters lie in the engine's flat parameters
        :param precision: arithmetic of the forward and backward passes
        :param rate: function that returns the learning rate of a step
        :param batches: function that returns the batches of a step; for each local node, one batch
            for each local slot
        """
        self.section = job.algorithm
        self.seed = job.run.seed
        self.engine = engine
        self.replicas = replicas
        self.precision = precision
        self.rate = rate
        self.batches = batches
        self.shift = 0

    @property
    def mixer(self) -> Mixer:
        """Communication between nodes, by which the engine exchanges."""
        return self.engine.mixer

    def step(self, data_step: int | None = None, rate_step: int | None = None) -> StepMetrics:
        """Compute the gradients, update the models, and exchange if the cadence says so.

        :param data_step: step whose batches and random seeds are used; None: the engine's step
        :param rate_step: step whose learning rate is used; None: the data step
        :return: metrics of the step
        :raises NonFiniteError: before the update, if the loss of a node that is not idle is NaN or
            infinite
        :raises Failure: if the data or the task fail
        """
        engine = self.engine
        replicas = self.replicas
        data_step = engine.index if data_step is None else data_step
        rate_step = data_step if rate_step is None else rate_step
        engine.ahead()
        # A cadence can let nodes make fewer local steps than others; they are idle in other steps.
        idle_rows = engine.cadence.idle_nodes(
            engine.index - engine.state_start, self.mixer.local_nodes
        )
        figures = replicas.gradients(
            self.batches(data_step - self.shift),
            self.section.accumulate,
            self.precision,
            self._seeds(data_step),
            idle_rows,
        )
        self._check(figures, idle_rows, data_step)
        lr = self.rate(rate_step - self.shift)
        engine.clock.lap("compute_s")
        if idle_rows:
            figures[list(idle_rows)] = float("nan")
            for grads in replicas.grads:
                grads[list(idle_rows)] = 0.0
        replicas.gather()
        # If gradients are averaged over all nodes, an overflow on one node concerns all nodes.
        mean = self.mixer.mean_scalars if engine.method.always_global else None
        overflowed = self.precision.unscale(replicas.g, engine.group, mean)
        norm = self._clip_and_decay()
        engine.clock.lap("node_s")
        skipped = tuple(sorted({*overflowed, *idle_rows}))
        record = engine.step(lr, skipped, loss=figures[:, 0], gradient_norm=norm)
        record.idle_rows = idle_rows
        for index, name in enumerate(replicas.objective.metrics):
            record.metrics[name] = figures[:, 1 + 2 * index] / figures[:, 2 + 2 * index]
        return record

    def average(self) -> None:
        """Exchange without a gradient, as an asynchronous node does while it waits for others."""
        self.replicas.gather()
        self.engine.average(self.rate(self.engine.index - self.shift))

    def _check(self, figures: torch.Tensor, idle_rows: tuple[int, ...], data_step: int) -> None:
        """Check that the loss of each node that is not idle is finite.

        :param figures: result of `Replicas.gradients`, with the losses in its first column
        :param idle_rows: rows of idle nodes, whose losses have no meaning
        :param data_step: number of the step, for the message
        :raises NonFiniteError: if the loss of a node is NaN or infinite
        """
        for row, loss in enumerate(figures[:, 0].tolist()):
            if row not in idle_rows and not abs(loss) < float("inf"):
                raise NonFiniteError(
                    f"the loss of node {self.mixer.local_nodes[row]} is {loss} at step "
                    f"{data_step}: the last checkpoint is kept; a smaller schedule.lr or "
                    "algorithm.clip_norm = 1.0 often helps"
                )

    def _seeds(self, data_step: int) -> list[int]:
        """Return one random seed for each replica.

        A seed depends on the data step, the node and the slot only, so that a resumed run and any
        distribution of nodes over ranks use the same seeds.
        """
        replicas = product(self.mixer.local_nodes, self.engine.group.local_slots)
        return [mixed(self.seed, data_step, node, slot) for node, slot in replicas]

    def _clip_and_decay(self) -> torch.Tensor | None:
        """Clip each node's gradients by the norm of its whole gradient, then add weight decay.

        The result is the norms before clipping, (rows,), or None if they are neither needed nor
        measured.
        """
        group = self.engine.group
        replicas = self.replicas
        g = self.replicas.g
        clip = self.section.clip_norm
        decay = self.section.weight_decay
        norms = None
        factors: list[float] = []
        if clip is not None or self.engine.measuring:
            squares = group.on_shards(lambda s: square_norms(g[s]))
            norms = group.sum_scalars(squares).sqrt()
        if clip is not None and norms is not None:
            factors = (clip / norms.clamp(min=1e-300)).clamp(max=1.0).float()[:, 0].tolist()

        decayed = list(map(replicas.flat.decayed_in, local_shards(group)))

        def work(slot: int) -> None:
            # A number reaches a GPU without a wait of the host, unlike an array.
            for row, factor in enumerate(factors):
                if factor != 1.0:
                    g[slot][row].mul_(factor)
            if decay and (width := decayed[slot]):
                g[slot][:, :width].add_(replicas.x[slot][:, :width], alpha=decay)

        group.on_shards(work)
        return None if norms is None else norms[:, 0]
