"""The replicas of a model: one for each node that lives here and each slot, on flat memory."""

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from mpigossip.data.pytree import Nested, parts, stacked
from mpigossip.engine.vector import ParameterLayout
from mpigossip.groups.base import Group, local_shards, shard_views
from mpigossip.training.capture import CannotCapture, Captured, Pass
from mpigossip.training.precision import Precision
from mpigossip.training.task import Objective


class Replicas:
    """``modules[row][slot]`` with parameters in ``full[slot][row]``, gradients in ``grads``.

    Slots are those that live here. ``full`` and ``grads`` are, per slot, arrays (rows, P); ``x``
    are the slots' shards of ``full``. Buffers (norm statistics) belong to each replica.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: ParameterLayout,
        rows: int,
        group: Group,
        *,
        together: bool,
        graphs: str,
        objective: Objective,
    ):
        """Copy ``module`` to every row and slot; all begin with its parameters.

        ``together``: gradients of all rows by one `torch.func.vmap` in place of one after the
        other. Sums are then rounded in another order: close to the loop, not its bits. For
        models without norm statistics, which vmap can't update. ``graphs``: whether replicas on
        GPUs become CUDA graphs, "always", "never" or (where they can) "auto". ``objective``: what
        they are trained for.
        """
        self.flat = flat
        self.group = group
        self.rows = rows
        self.together = together
        self.graphs = graphs
        self.objective = objective
        self._captured: Captured | None = None
        self.full = group.zeros(rows, flat.size)
        self.grads = group.zeros(rows, flat.size)
        self.x = shard_views(self.full, group.segments, local_shards(group))
        self.g = shard_views(self.grads, group.segments, local_shards(group))
        self.modules: list[list[nn.Module]] = []
        start = dict(module.named_parameters())
        for row in range(rows):
            self.modules.append([])
            for slot, device in enumerate(group.devices):
                with torch.no_grad():
                    for name, view in zip(
                        flat.names, flat.views(self.full[slot][row]), strict=True
                    ):
                        view.copy_(start[name])
                replica = copy.deepcopy(module).to(device)
                flat.attach(replica, self.full[slot][row], self.grads[slot][row])
                self.modules[row].append(replica)

    @property
    def first(self) -> tuple[int, ...]:
        width = self.flat.size // self.group.segments
        return tuple(width * segment for segment in local_shards(self.group))

    def gather(self) -> None:
        self.g = self.group.reduce_scatter_mean(self.grads)

    def gradients(
        self,
        batches: Sequence[Nested],
        accumulate: int,
        precision: Precision,
        seeds: Sequence[int] = (),
        resting: Sequence[int] = (),
    ) -> torch.Tensor:
        """Forward and backward of all replicas on their own batches, into ``grads``.

        ``batches``: row after row, slot after slot; each is cut into ``accumulate`` parts whose
        gradients are averaged. ``seeds``: of what each replica draws (dropout); exact where
        replicas of a device run one after the other and aren't captured. Returns each row's mean
        loss, and of each metric the sum and the count over its slots: (rows, 1 + 2 metrics),
        float64. What rows that are ``resting`` get is of no meaning.
        """
        slots = len(self.group.local_slots)

        def one(row: int, slot: int, batch: Nested) -> torch.Tensor:  # waits for no GPU
            gradient = self.grads[slot][row]
            module = self.modules[row][slot]
            found = torch.zeros(self.objective.width, dtype=torch.float64, device=gradient.device)
            if row in resting:
                return found
            if seeds and self.graphs == "never":  # never inside a capture
                draw_from(gradient.device, seeds[row * slots + slot])
            gradient.zero_()
            module.train()
            for part in parts(batch, accumulate):
                with precision.autocast():
                    loss, metrics = self.objective(module, part)
                precision.scaled(loss / accumulate, row, slot).backward()
                found += self.objective.figures(loss, metrics, accumulate)
            return found

        def work(slot: int) -> torch.Tensor:
            if self.together:
                if seeds:
                    draw_from(self.grads[slot].device, seeds[slot])
                cuts = [parts(batch, accumulate) for batch in batches[slot::slots]]
                return self._vectorized(slot, cuts, precision)
            found = [one(row, slot, batches[row * slots + slot]) for row in range(self.rows)]
            return torch.stack(found).cpu()

        # graphs compute all rows
        per_slot = None if resting else self._replayed(one, batches)
        figures = self.group.sum_scalars(self.group.run(work) if per_slot is None else per_slot)
        figures[:, 0] /= self.group.slots
        return figures

    def _replayed(self, one: Pass, batches: Sequence[Nested]) -> list[torch.Tensor] | None:
        """Figures of the CUDA graphs, recorded at the first step; None: a thread a slot."""
        if self.graphs == "never":
            return None
        try:
            self._captured = self._captured or Captured(one, self.modules, batches)
            return list(self._captured.replay(batches).unbind(1))
        except CannotCapture as error:
            if self.graphs == "always":
                raise
            self.graphs = "never"
            self._captured = None
            warnings.warn(f"{error}; training goes on with a thread a slot", stacklevel=2)
            return None

    def _vectorized(
        self, slot: int, cuts: Sequence[Sequence[Nested]], precision: Precision
    ) -> torch.Tensor:
        """Gradients of a slot's replicas in all rows, by one vmap; figures (rows, 1 + 2 metrics).

        ``cuts``: of each row the parts whose gradients are averaged.
        """
        module = self.modules[0][slot]
        full = self.full[slot]
        grads = self.grads[slot].zero_()
        accumulate = len(cuts[0])
        found = torch.zeros(len(full), self.objective.width, dtype=torch.float64)
        parameters = dict(zip(self.flat.names, self.flat.stacked(full), strict=True))
        targets = dict(zip(self.flat.names, self.flat.stacked(grads), strict=True))
        module.train()

        def loss_of(parameters, batch):
            def model(*given, **named):
                return functional_call(module, parameters, given, named)

            with precision.autocast():
                loss, metrics = self.objective(model, batch)
            return loss, self.objective.figures(loss, metrics, accumulate)

        work = vmap(grad_and_value(loss_of, has_aux=True), randomness="different")
        for batch in map(stacked, zip(*cuts, strict=True)):
            gradients, (_, figures) = work(parameters, batch)
            for name, target in targets.items():
                target.add_(gradients[name], alpha=1 / accumulate)
            found += figures.cpu()
        return found

    def buffers(self, row: int) -> list[dict[str, torch.Tensor]]:
        """Per slot the named buffers that belong to a checkpoint."""
        return [dict(module.named_buffers()) for module in self.modules[row]]


def draw_from(device: torch.device, seed: int) -> None:
    """Let random numbers on a device begin anew."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
