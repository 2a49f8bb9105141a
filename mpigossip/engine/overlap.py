"""Adapt-then-combine by blocks of layers: each is sent as soon as its gradient is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.config import JobError
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
        instead: str = "set node.overlap = false",
    ):
        """``module``: whose parameters ``flat`` names; its gradients are watched from now on.

        ``instead``: what to do where gradients change after they were sent.
        """
        self.mixer, self.columns, self.methods = mixer, mixer.blocks, methods
        columns, self._instead = self.columns, instead
        parameters = dict(module.named_parameters())
        layer = {name: place for place, name in enumerate(parameters)}
        found = [
            [b for b, c in enumerate(columns) if c.start < place.stop and place.start < c.stop]
            for place in flat.places
        ]
        self.within = [
            tuple(k for k, into in enumerate(found) if b in into) for b in range(len(columns))
        ]
        """of each block the parameters, by their place in ``flat``, that lie in it or reach in"""
        self._total = [len(inside) for inside in self.within]
        first = [
            min(layer[name] for name, into in zip(flat.names, found, strict=True) if b in into)
            for b in range(len(columns))
        ]
        self.order = tuple(sorted(range(len(columns)), key=lambda b: first[b], reverse=True))
        """of blocks, backward going from the last layer to the first"""
        self._missing = list(self._total)
        self._ready: Callable[[int], None] | None = None
        self._paused = False
        self._hooks = [
            parameters[name].register_post_accumulate_grad_hook(partial(self._final, name, into))
            for name, into in zip(flat.names, found, strict=True)
        ]

    @contextmanager
    def watched(self, passes: int, ready: Callable[[int], None]) -> Iterator[None]:
        """:meth:`watch`, and :meth:`rest` at the end."""
        self.watch(passes, ready)
        try:
            yield
            self.rest()
        finally:
            self.unwatch()

    def watch(self, passes: int, ready: Callable[[int], None]) -> None:
        """Call ``ready(block)`` once for each, as soon as so many backward passes went over it."""
        self._missing, self._ready = [passes * count for count in self._total], ready

    def rest(self) -> None:
        """The blocks that aren't ready are, and the watch is over.

        No gradient came to them: frozen in this pass, or fewer passes than said.
        """
        ready, self._ready = self._ready, None
        for block in self.order if ready else ():
            if self._missing[block] > 0:
                ready(block)

    def unwatch(self) -> None:
        """Leave the blocks that aren't ready alone."""
        self._ready = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward passes don't count."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _final(self, name: str, into: Sequence[int], parameter: torch.Tensor) -> None:
        if self._ready is None or self._paused:
            return
        for block in into:
            self._missing[block] -= 1
            if self._missing[block] == 0:
                self._ready(block)
            elif self._missing[block] < 0:
                raise JobError(
                    [f"the gradient of {name} changed after it was sent: backward went over it "
                     f"more often than said, as checkpointed layers do; {self._instead}"]
                )  # fmt: skip

    def send(self, block: int, x, g, state: Any, out: Sequence, step: Step) -> None:
        """The algorithm's send on one block; ``g`` is None where its local step has its own."""
        c = self.columns[block]
        g = None if g is None else g[:, c]
        parts = tuple(part[:, c] for part in out)
        self.methods[block].send(x[:, c], g, _columns(state, c), parts, step)

    def receive(self, x, g, state: Any, sent: Sequence, mixed: Sequence, step: Step) -> None:
        """The algorithm's receive, block by block."""
        for c, method in zip(self.columns, self.methods, strict=True):
            part = None if g is None else g[:, c]
            both = (tuple(one[:, c] for one in parts) for parts in (sent, mixed))
            method.receive(x[:, c], part, _columns(state, c), *both, step)

    def close(self) -> None:
        """Watch no gradient any more."""
        for hook in self._hooks:
            hook.remove()


def _columns(state: Any, columns: slice) -> Any:
    """Views of a nested state's arrays."""
    if isinstance(state, torch.Tensor):
        return state[:, columns]
    return type(state)(*(_columns(part, columns) for part in state))
