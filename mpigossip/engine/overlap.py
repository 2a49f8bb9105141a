"""Adapt-then-combine by blocks of layers: each is sent as soon as its gradient is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.engine.vector import Flat
from mpigossip.mixing.base import ByBlocks


class Blocks:
    """The columns of a node's only slot in blocks, and when backward is through with each.

    Every block has an algorithm of its own, which differs from the others in what it keeps
    between send and receive and in its columns with weight decay; their state is one.
    """

    def __init__(
        self,
        mixer: ByBlocks,
        methods: Sequence[Algorithm],
        flat: Flat,
        module: nn.Module,
    ):
        """``module``: whose parameters ``flat`` names; its gradients are watched from now on."""
        self.mixer, self.columns, self.methods = mixer, mixer.blocks, methods
        columns = self.columns
        parameters = dict(module.named_parameters())
        layer = {name: place for place, name in enumerate(parameters)}
        found = [
            [b for b, c in enumerate(columns) if c.start < place.stop and place.start < c.stop]
            for place in flat.places
        ]
        self._total = [sum(b in into for into in found) for b in range(len(columns))]
        first = [
            min(layer[name] for name, into in zip(flat.names, found, strict=True) if b in into)
            for b in range(len(columns))
        ]
        self.order = tuple(sorted(range(len(columns)), key=lambda b: first[b], reverse=True))
        """of blocks, backward going from the last layer to the first"""
        self._missing = list(self._total)
        self._ready: Callable[[int], None] | None = None
        self._hooks = [
            parameters[name].register_post_accumulate_grad_hook(partial(self._final, name, into))
            for name, into in zip(flat.names, found, strict=True)
        ]

    @contextmanager
    def watched(self, passes: int, ready: Callable[[int], None]) -> Iterator[None]:
        """Call ``ready(block)`` once for each, as soon as so many backward passes went over it.

        At the end for what no gradient came to: frozen in this pass, or fewer passes than said.
        """
        self._missing, self._ready = [passes * count for count in self._total], ready
        try:
            yield
            for block in self.order:
                if self._missing[block] > 0:
                    ready(block)
        finally:
            self._ready = None

    def _final(self, name: str, into: Sequence[int], parameter: torch.Tensor) -> None:
        if self._ready is None:
            return
        for block in into:
            self._missing[block] -= 1
            if self._missing[block] == 0:
                self._ready(block)
            elif self._missing[block] < 0:
                raise RuntimeError(
                    f"the gradient of {name} changed after it was sent: backward went over it more "
                    "than once in a pass, as checkpointed layers do; set node.overlap = false"
                )

    def send(self, block: int, x, g, state: Any, out: Sequence, step: Step) -> None:
        """The algorithm's send on one block."""
        c = self.columns[block]
        parts = tuple(part[:, c] for part in out)
        self.methods[block].send(x[:, c], g[:, c], _columns(state, c), parts, step)

    def receive(self, x, g, state: Any, sent: Sequence, mixed: Sequence, step: Step) -> None:
        """The algorithm's receive, block by block."""
        for c, method in zip(self.columns, self.methods, strict=True):
            both = (tuple(part[:, c] for part in parts) for parts in (sent, mixed))
            method.receive(x[:, c], g[:, c], _columns(state, c), *both, step)

    def close(self) -> None:
        """Watch no gradient any more."""
        for hook in self._hooks:
            hook.remove()


def _columns(state: Any, columns: slice) -> Any:
    """Views of a nested state's arrays."""
    if isinstance(state, torch.Tensor):
        return state[:, columns]
    return type(state)(*(_columns(part, columns) for part in state))
