"""Mixer for the ranks of a node that each have the whole vector: each exchanges a shard of it.

So a loop whose gradients are equal in all ranks of a node (DDP inside it) steps on whole tensors
with any optimizer, and the model crosses the network once a node, by all of its network cards.
"""

from collections.abc import Callable, Sequence

import torch

from mpigossip.groups.base import Group, shard_views
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout, Mixer
from mpigossip.mixing.wire import BUCKET


class Gathered(Mixer):
    """Mixer of a single segment.

    What gathers, ``finish`` and ``close``, is collective over the node's ranks, too. Bits are
    those of the whole vector exchanged by one rank. What is sent is counted by rank.
    """

    def __init__(self, layout: MessageLayout, group: Group, make: Callable[[MessageLayout], Mixer]):
        """``layout``: of the whole vector; ``make``: the column's mixer, by a shard's layout."""
        (size,), slots = layout.widths, group.slots
        # whole buckets, as wires see them, equally many of each rank
        width = -(-size // (slots * BUCKET)) * BUCKET
        (slot,) = group.local_slots
        self.layout = layout
        self._group = group
        self._size = size
        own = MessageLayout(
            (width,),
            layout.vectors,
            layout.scalars,
            layout.devices,
            layout.wire,
            layout.dtype,
            (width * slot,),
        )
        self._inner = make(own)
        self._own = slice(min(width * slot, size), min(width * (slot + 1), size))
        both = [[group.zeros(1, width * slots)[0] for _ in range(layout.vectors)] for _ in range(2)]
        self._sent, self._mixed = both
        device = group.devices[0]
        self._out = [torch.zeros(1, size, device=device) for _ in range(layout.vectors)]
        one = torch.zeros(1, 1, dtype=torch.float64, device=device)
        self._scalars = [one.clone() for _ in range(layout.scalars)]
        self._kind = ExchangeKind.LOCAL
        self.n = self._inner.n
        self.local_nodes = self._inner.local_nodes
        self.bytes_sent = self._inner.bytes_sent
        self.staleness = self._inner.staleness

    @property
    def exchange_seconds(self) -> float:
        return self._inner.exchange_seconds

    @property
    def wait_seconds(self) -> float:
        return self._inner.wait_seconds

    def outbox(self, t: int) -> MessageArrays:
        return [(*self._out, *self._scalars)]

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        self._kind = kind
        at = self._own
        (inner,) = self._inner.outbox(t)
        for whole, part in zip(self._out, inner, strict=False):
            part[:, : at.stop - at.start].copy_(whole[:, at])
            part[:, max(0, at.stop - at.start) :].zero_()
        for value, place in zip(self._scalars, inner[self.layout.vectors :], strict=True):
            place.copy_(value)
        self._inner.start(kind, t, exchange)

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """``sent`` and ``mixed``, whole: the node's ranks gather their shards."""
        (sent,), (mixed,) = self._inner.finish()
        own = [(*self._out, *self._scalars)]
        if self._kind is ExchangeKind.LOCAL:
            return own, own
        vectors = self.layout.vectors
        if not self.layout.wire.exact:
            own = [(*self._gather(self._sent, sent[:vectors]), *sent[vectors:])]
        return own, [(*self._gather(self._mixed, mixed[:vectors]), *mixed[vectors:])]

    def _gather(
        self, rooms: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The whole vectors, (1, P), from all ranks' shards."""
        for room, part in zip(rooms, parts, strict=True):
            (place,) = shard_views([room], self._group.slots, self._group.local_slots)
            self._group.all_gather([place.copy_(part)], [room])
        return [room[:, : self._size] for room in rooms]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.mean(x)

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.mean_scalars(values)

    def memory(self, averages: bool = True) -> dict[str, int]:
        each = self.layout.dtype.itemsize * self.layout.vectors
        whole = each * (self._size + sum(room.shape[1] for room in self._mixed + self._sent))
        return self._inner.memory(averages) | {"gathered": whole}

    def close(self) -> None:
        self._inner.close()
        self._sent = []
        self._mixed = []
        self._group.close()
