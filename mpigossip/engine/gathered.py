"""Mixer for nodes whose ranks all hold the whole model: each rank exchanges one shard of it.

If the gradients are equal on all ranks of a node, as with DDP, each rank can update whole tensors
with any optimizer. All ranks of a node together still send hardly more than a single rank would,
and they can use all network cards of the node.
"""

from collections.abc import Callable, Sequence

import torch

from mpigossip.groups.base import Group, shard_views
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout, Mixer
from mpigossip.mixing.wire import WIRE_BUCKET


class Gathered(Mixer):
    """Mixer that exchanges the shard of this rank, then gathers the shards of all ranks of a node.

    ``finish`` and ``close`` are collective over the ranks of the node, too. The result is bitwise
    identical to the exchange of the whole vector by one rank. Sent bytes are counted for each
    rank.
    """

    def __init__(self, layout: MessageLayout, group: Group, make: Callable[[MessageLayout], Mixer]):
        """Open the mixer of a shard.

        :param layout: layout of the message with the whole vector
        :param group: group of the ranks of the node
        :param make: function that is called with the layout of a shard and opens the mixer of the
            inter-node ranks
        """
        (size,), slots = layout.widths, group.slots
        # Shards consist of equally many buckets of the wire, because lossy wires encode these.
        width = -(-size // (slots * WIRE_BUCKET)) * WIRE_BUCKET
        (slot,) = group.local_slots
        self.layout = layout
        self._group = group
        self._size = size
        shard_layout = MessageLayout(
            (width,),
            layout.vectors,
            layout.scalars,
            layout.devices,
            layout.wire,
            layout.dtype,
            (width * slot,),
        )
        self._inner = make(shard_layout)
        self._own = slice(min(width * slot, size), min(width * (slot + 1), size))

        def whole_vectors() -> list[torch.Tensor]:
            return [group.zeros(1, width * slots)[0] for _ in range(layout.vectors)]

        self._mixed = whole_vectors()
        # With an exact wire, the sent message is equal to the outbox, which holds whole vectors.
        self._sent = [] if layout.wire.exact else whole_vectors()
        device = group.devices[0]
        self._out = [
            torch.zeros(1, size, dtype=torch.float32, device=device) for _ in range(layout.vectors)
        ]
        scalar = torch.zeros(1, 1, dtype=torch.float64, device=device)
        self._scalars = [scalar.clone() for _ in range(layout.scalars)]
        self._kind = ExchangeKind.LOCAL
        self.n = self._inner.n
        self.local_nodes = self._inner.local_nodes
        self.bytes_sent = self._inner.bytes_sent
        self.staleness = self._inner.staleness

    @property
    def sent_layout(self) -> MessageLayout:
        return self._inner.layout

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
        span = self._own
        (inner,) = self._inner.outbox(t)
        for full, part in zip(self._out, inner, strict=False):
            part[:, : span.stop - span.start].copy_(full[:, span])
            part[:, max(0, span.stop - span.start) :].zero_()
        for value, target in zip(self._scalars, inner[self.layout.vectors :], strict=True):
            target.copy_(value)
        self._inner.start(kind, t, exchange)

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """Return ``sent`` and ``mixed`` with whole vectors, gathered from the node's ranks.

        ``into`` is not used.
        """
        (sent,), (mixed,) = self._inner.finish()
        local_message = [(*self._out, *self._scalars)]
        if self._kind is ExchangeKind.LOCAL:
            return local_message, local_message
        vectors = self.layout.vectors
        if not self.layout.wire.exact:
            local_message = [(*self._gather(self._sent, sent[:vectors]), *sent[vectors:])]
        return local_message, [(*self._gather(self._mixed, mixed[:vectors]), *mixed[vectors:])]

    def _gather(
        self, arrays: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the whole vectors, (1, P), gathered from the shards of all ranks.

        :param arrays: memory of the whole vectors, with padding
        :param parts: shard of each vector that this rank has exchanged
        """
        for array, part in zip(arrays, parts, strict=True):
            (shard,) = shard_views([array], self._group.slots, self._group.local_slots)
            self._group.all_gather([shard.copy_(part)], [array])
        return [array[:, : self._size] for array in arrays]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.mean(x)

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.mean_scalars(values)

    def memory(self, averages: bool = True) -> dict[str, int]:
        bytes_per_element = self.layout.dtype.itemsize * self.layout.vectors
        nbytes = bytes_per_element * (
            self._size + sum(array.shape[1] for array in self._mixed + self._sent)
        )
        return self._inner.memory(averages) | {"gathered": nbytes}

    def close(self) -> None:
        self._inner.close()
        self._sent = []
        self._mixed = []
        self._group.close()
