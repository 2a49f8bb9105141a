"""A rank's messages in host memory: outbox, codes and result; contract: `pipeline.Buffers`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from mpigossip.mixing.averages import average_message, gather
from mpigossip.mixing.base import Layout, Segments
from mpigossip.mixing.combine import Source, add_up
from mpigossip.mixing.host.shared import SharedMemory
from mpigossip.mixing.plan import Chunk
from mpigossip.mixing.transports import Transport
from mpigossip.mixing.wire import encode


class HostBuffers:
    """Neighbours on the same host read the outbox in place; others are sent it, or its codes."""

    def __init__(
        self, layout: Layout, rank: int, n: int, shared: SharedMemory | None,
        transport: Transport | None,
    ):  # fmt: skip
        """In memory that is shared, or that the transport prefers."""
        self._layout, self._rank, self._n, self._shared = layout, rank, n, shared
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        lossy, own = not layout.wire.exact, shared.own if shared else None
        preferred = transport.outbox if transport else None
        self.codes: list[torch.Tensor] | None = None
        if lossy and transport:
            if preferred is None:
                preferred = torch.empty(layout.sent_bytes, dtype=torch.uint8)
            self.codes = list(preferred.zero_().split(layout.slot_sent_bytes))
        elif own is None:
            own = preferred
        if own is None:
            own = torch.empty(layout.nbytes, dtype=torch.uint8)
        self.own = own
        self._by_slot = own.split(layout.slot_bytes)
        self.sent = self.codes or list(self._by_slot)
        self.out: Segments = self.segments(own)
        # in full and by the transport alone: the sum is formed in the first inbox buffer
        self._in_inbox = not shared and not lossy
        self.result: Segments = self.out

    @cached_property
    def memory(self) -> torch.Tensor:
        """Where a sum goes that isn't formed in the inbox: one message, uint8."""
        if self._shared:
            return self._shared.result
        return torch.empty(self._layout.nbytes, dtype=torch.uint8)

    def segments(self, memory: torch.Tensor) -> Segments:
        """The views of a message in memory that stays."""
        return [self._slot_views(one) for one in memory.split(self._layout.slot_bytes)]

    def _slot_views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The views of a slot's message in memory that stays, made once."""
        place = memory.data_ptr()
        if place not in self._views:
            self._views[place] = self._layout.slot_views(memory)
        return self._views[place]

    def begin(self, number: int, average: bool = False) -> None:
        """Encode the outbox, where others read it in place or all of it is averaged."""
        if (self._shared or average) and not self._layout.wire.exact:
            encode(self._layout, self.out, [self._rank], number, self.codes)

    def prepare(self, number: int, chunk: Chunk) -> list[torch.Tensor]:
        """Encode the chunk, unless all is."""
        if self.codes and not self._shared:
            encode(self._layout, self.out, [self._rank], number, self.codes, chunk.fields)
        return self.sent

    def add(
        self, weights: Sequence[float], received: Sequence[Sequence[Source]], chunk: Chunk,
        into: Segments | None = None,
    ) -> None:  # fmt: skip
        """Add up a chunk; of exact messages into the first source's buffer, if nobody reads it."""
        if not self.codes:
            received = [[self._source(one) for one in each] for each in received]
        if into is not None:
            self.result = into
        elif self._in_inbox and received:
            self.result = received[0]  # type: ignore[assignment]
        else:
            self.result = self.segments(self.memory)
        for slot, out in enumerate(self.result):
            sources = [self.out[slot], *(each[slot] for each in received)]
            add_up(self._layout, weights, sources, out, chunk.fields)

    def _source(self, message: Source) -> Source:
        return self._slot_views(message) if isinstance(message, torch.Tensor) else message

    def average(self, transport: Transport) -> float:
        """The same bits either way: decoded values summed in rank order."""
        layout, rank, n = self._layout, self._rank, self._n
        self.result = self.segments(self.memory)
        result = self.memory.split(layout.slot_bytes)
        if self.codes is None or n * layout.sent_bytes >= 2 * layout.nbytes:
            return average_message(layout, rank, n, self._by_slot, result, transport.swap)
        everyone = torch.empty(layout.slots, n, layout.slot_sent_bytes, dtype=torch.uint8)
        waited = gather(rank, self.codes, list(everyone), transport.swap)
        for slot, (own, out) in enumerate(zip(self.out, self.result, strict=True)):
            sources = [own if j == rank else everyone[slot, j] for j in range(n)]
            add_up(layout, [1 / n] * n, sources, out, layout.fields)
        return waited

    def complete(self) -> None:
        """Nothing: all is done at once."""

    def close(self) -> None:
        """Let go of the transports' memory."""
        self._views, self.out, self.result, self.sent = {}, [], [], []
        self.codes = self._shared = None
        del self.own, self._by_slot
        self.__dict__.pop("memory", None)
