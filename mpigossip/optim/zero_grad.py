"""Detection of steps on stale gradients, which `zero_grad` did not clear, and without any."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mpigossip.config import JobError
from mpigossip.engine.sharded import is_cut, local
from mpigossip.optim.arguments import report


class Stale:
    """Watch of one parameter's gradient between steps, by torch's count of in-place changes."""

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self._parameter: torch.Tensor | None = None
        self._spent: tuple[torch.Tensor, int, int] | None = None
        self._added = False

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Choose the smallest of the optimizer's parameters that has a gradient, if one has."""
        having = [p for p in parameters if p.grad is not None and p.requires_grad]
        self._parameter = min(having, key=torch.Tensor.numel, default=None)
        if self._parameter is not None:
            self._parameter.register_post_accumulate_grad_hook(self._accumulated)

    def spent(self) -> None:
        """Note that a step has used the gradients."""
        grad = None if self._parameter is None else self._parameter.grad
        self._spent = None if grad is None else (grad, grad._version, local(grad)._version)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """The first backward pass after a step: between the two, zeroing would have counted."""
        if self._spent is not None:
            grad, version, of_local = self._spent
            self._added = parameter.grad is grad and grad._version == version + 1
            if is_cut(grad):  # whose part alone torch adds to, and whose zeroing counts for itself
                same = parameter.grad is grad and grad._version == version
                self._added = same and local(grad)._version > of_local
            self._spent = None

    def check(self, parameters: Iterable[torch.Tensor], rank: int) -> None:
        """JobError where backward added to gradients that were used; report if there are none."""
        if all(p.grad is None for p in parameters):  # a rank without data may mean it
            report(f"step() on rank {rank} without any gradient: only the exchange changes its "
                   "model; call zero_grad() before backward(), and that on the model given to "
                   "Gossip, not on a copy")  # fmt: skip
        if self._added:
            self._added = False
            raise JobError(
                ["backward() accumulated into the previous step's gradients; call "
                 "optimizer.zero_grad() first"]
            )  # fmt: skip
