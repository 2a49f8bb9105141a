"""The mixer of one member: a gossip step publishes its model and averages with one other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpigossip.mixing.base import Kind, Layout, Segments
from mpigossip.mixing.combine import combine
from mpigossip.mixing.simulated import Simulated


class Members(Simulated):
    """x ← ½ (x + x_j), j the member that ``receive`` finds; x where it finds none."""

    def __init__(
        self,
        graph,
        layout: Layout,
        send: Callable[[Segments], int],
        receive: Callable[[Segments], bool],
    ):
        """``send(message)`` publishes it and returns its bytes, ``receive(into)`` reads one."""
        super().__init__(graph, layout)
        self._send, self._receive = send, receive

    def start(self, kind: Kind, t: int, exchange: int | None = None) -> None:
        """Publish the model in a gossip step; writing goes on in the background."""
        super().start(Kind.LOCAL, t, exchange)
        self._open = kind, t
        if kind is Kind.GOSSIP:
            self.bytes_sent[0] += self._send(self._out)

    def finish(self, into: torch.Tensor | None = None) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed``; reads the model of one other member in a gossip step."""
        kind, _ = self._open
        if kind is not Kind.GOSSIP or not self._receive(self._mixed):
            return self._out, self._out
        for sent, mixed in zip(self._out, self._mixed, strict=True):
            combine((0.5, 0.5), [sent[0], mixed[0]], mixed[0])
        return self._out, self._mixed
