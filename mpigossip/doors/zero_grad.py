"""Whether a loop forgot `zero_grad`: gradients of the last step would add to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpigossip.config import JobError
from mpigossip.engine.sharded import is_cut, local


class Stale:
    """Watches one parameter's gradient between steps, by torch's count of changes in place."""

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self._parameter: torch.Tensor | None = None
        self._spent: tuple[torch.Tensor, int, int] | None = None
        self._added = False

    def watch(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Choose the smallest parameter that has a gradient."""
        having = [p for p in parameters if p.grad is not None] or list(parameters)
        self._parameter = min(having, key=torch.Tensor.numel)
        self._parameter.register_post_accumulate_grad_hook(self._accumulated)

    def spent(self) -> None:
        """A step has used the gradients."""
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

    def check(self) -> None:
        """JobError where backward added to the gradients that the last step had used."""
        if self._added:
            self._added = False
            raise JobError(
                ["the gradients of the last step are still in those of this one: write "
                 "optimizer.zero_grad() before backward (Gossip.step() once did it)"]
            )  # fmt: skip
