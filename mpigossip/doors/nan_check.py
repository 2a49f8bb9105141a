"""What isn't a number on one node is said there, before it travels to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpigossip.config.errors import Failure
from mpigossip.engine.vector import Flat


class Finite:
    """Looks at what is about to be sent: one pass over it, which finds no more than whether."""

    def __init__(self, flat: Flat, node: int):
        """``flat``: the layout of the vectors that are sent; ``node``: who sends them."""
        self._flat, self._node = flat, node

    def __call__(self, vectors: Sequence[torch.Tensor], columns: slice, step: int) -> None:
        """Failure where some of these columns of a vector, (1, columns), are NaN or infinite."""
        for vector in vectors:
            if not bool(torch.isfinite(vector.sum())):  # or large: then all are looked at
                wrong = torch.isfinite(vector[0]).logical_not().nonzero().flatten()
                if len(wrong):
                    raise self._failure(columns.start + int(wrong[0]), len(wrong), step)

    def _failure(self, column: int, count: int, step: int) -> Failure:
        places = zip(self._flat.names, self._flat.places, strict=True)
        name = next((name for name, place in places if column < place.stop), "its padding")
        return Failure(
            f"step {step}: {count:,} values that node {self._node} was about to send are NaN or "
            f"infinite, the first in {name}; the other nodes have got none of them. Its data or "
            "its gradients of this step are at fault, or too high a learning rate: clip, lower it, "
            "or let torch.amp.GradScaler leave such steps out"
        )
