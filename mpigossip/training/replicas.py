"""The replicas of a model: one for each node that lives here and each slot, on flat memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from math import prod

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from mpigossip.data.loader import Batch
from mpigossip.engine.vector import Flat
from mpigossip.groups.base import Group, held, shards
from mpigossip.models import loss_and_correct
from mpigossip.training.capture import CannotCapture, Captured, Pass
from mpigossip.training.precision import Precision


class Replicas:
    """``modules[row][slot]`` with parameters in ``full[slot][row]``, gradients in ``grads``.

    Slots are those that live here. ``full`` and ``grads`` are, per slot, arrays (rows, P); ``x``
    are the slots' shards of ``full``. Buffers (norm statistics) belong to each replica.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: Flat,
        rows: int,
        group: Group,
        *,
        together: bool = False,
        graphs: str = "never",
    ):
        """Copy ``module`` to every row and slot; all begin with its parameters.

        ``together``: gradients of all rows by one `torch.func.vmap` in place of one after the
        other. Sums are then rounded in another order: close to the loop, not its bits. For
        models without norm statistics, which vmap can't update. ``graphs``: whether replicas on
        GPUs become CUDA graphs, "always", "never" or (where they can) "auto".
        """
        self.flat, self.group, self.rows, self.together = flat, group, rows, together
        self.graphs = graphs
        self._captured: Captured | None = None
        self.full, self.grads = group.zeros(rows, flat.size), group.zeros(rows, flat.size)
        self.x = shards(self.full, group.segments, held(group))
        self.g = shards(self.grads, group.segments, held(group))
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
        """The first column of each segment."""
        width = self.flat.size // self.group.segments
        return tuple(width * segment for segment in held(self.group))

    def gather(self) -> None:
        """The mean over slots of their gradients, as shards; uses ``grads`` up."""
        self.g = self.group.reduce_scatter_mean(self.grads)

    def check(self) -> None:
        """Nothing: nobody else has these modules."""

    def gradients(
        self, batches: Sequence[Batch], accumulate: int, precision: Precision
    ) -> torch.Tensor:
        """Forward and backward of all replicas on their own batches, into ``grads``.

        ``batches``: inputs and targets row after row, slot after slot; each is cut into
        ``accumulate`` parts whose gradients are averaged. Returns each row's mean loss,
        float64 (rows, 1).
        """
        slots = len(self.group.mine)

        def one(row: int, slot: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self._one(row, slot, inputs, targets, accumulate, precision)

        def work(slot: int) -> torch.Tensor:
            if self.together:
                return self._all_rows(slot, batches[slot::slots], accumulate, precision)
            losses = [one(row, slot, *batches[row * slots + slot]) for row in range(self.rows)]
            return torch.stack(losses).unsqueeze(1).cpu()

        captured = self._capture(one, batches)
        per_slot = (
            list(captured.replay(batches).split(1, dim=1)) if captured else self.group.run(work)
        )
        return self.group.sum_scalars(per_slot) / self.group.slots

    def _one(
        self,
        row: int,
        slot: int,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        accumulate: int,
        precision: Precision,
    ) -> torch.Tensor:
        """One replica's gradient and its mean loss, float64 (); nothing here waits for a GPU."""
        self.grads[slot][row].zero_()
        module = self.modules[row][slot].train()
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        parts = (tensor.chunk(accumulate) for tensor in (inputs, targets))
        for part, wanted in zip(*parts, strict=True):
            with precision.autocast():
                loss, _ = loss_and_correct(module(part), wanted)
            precision.scaled(loss / accumulate, row, slot).backward()
            total += loss.detach().double() / accumulate
        return total

    def _capture(self, one: Pass, batches: Sequence[Batch]) -> Captured | None:
        """The replicas as CUDA graphs, recorded at the first step; None: a thread a slot."""
        if self._captured is None and self.graphs != "never":
            try:
                self._captured = Captured(one, self.modules, batches)
            except CannotCapture as error:
                if self.graphs == "always":
                    raise
                self.graphs = "never"
                warnings.warn(f"{error}; training goes on with a thread a slot", stacklevel=2)
        return self._captured

    def _all_rows(
        self,
        slot: int,
        batches: Sequence[Batch],
        accumulate: int,
        precision: Precision,
    ) -> torch.Tensor:
        """One slot's gradients of all rows in one vmap; each row's mean loss, (rows, 1)."""
        self.grads[slot].zero_()
        losses = torch.zeros(self.rows, 1, dtype=torch.float64)
        module, names = self.modules[0][slot].train(), self.flat.names
        parameters = dict(zip(names, self._stacked(self.full[slot]), strict=True))
        targets_of = self._stacked(self.grads[slot])

        def loss_of(parameters, inputs, targets):
            with precision.autocast():
                outputs = functional_call(module, parameters, (inputs,))
                return loss_and_correct(outputs, targets)[0]

        stacked = [torch.stack(tensors) for tensors in zip(*batches, strict=True)]
        for inputs, targets in zip(*(t.chunk(accumulate, dim=1) for t in stacked), strict=True):
            gradients, loss = vmap(grad_and_value(loss_of))(parameters, inputs, targets)
            for name, target in zip(names, targets_of, strict=True):
                target.add_(gradients[name], alpha=1 / accumulate)
            losses += loss.double().cpu().unsqueeze(1) / accumulate
        return losses

    def _stacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in rows (rows, P) as views (rows, …) without copies."""
        return [
            rows[:, at : at + prod(shape)].view(len(rows), *shape)
            for at, shape in zip(self.flat.offsets, self.flat.shapes, strict=True)
        ]

    def buffers(self, row: int) -> list[dict[str, torch.Tensor]]:
        """Per slot the named buffers that belong to a checkpoint."""
        return [dict(module.named_buffers()) for module in self.modules[row]]
