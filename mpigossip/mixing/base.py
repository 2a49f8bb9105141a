"""Contract of a mixer, the communication backend between nodes; layout of a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from mpigossip.mixing.wire import FP32, Wire

MessageArrays = list[tuple[torch.Tensor, ...]]
"""Per slot: the vectors, arrays (rows, p), then the scalars, float64 arrays (rows, 1)."""


class ExchangeKind(Enum):
    """What a step exchanges: nothing, with the neighbours of the round, or with all nodes."""

    LOCAL = 0
    GOSSIP = 1
    GLOBAL = 2


@dataclass(frozen=True)
class MessageLayout:
    """The message of a node in a round: for each slot ``vectors`` arrays, then ``scalars``.

    ``widths`` are the shard lengths in elements, one a slot, all equal; each slot's bytes are
    contiguous. ``wire`` encodes the vectors (whole buckets of float32 only); the simulator takes
    any ``dtype``. ``first`` are the shards' first columns in the node's vector, by which a wire
    draws: unset, they are all of it.
    """

    widths: tuple[int, ...]
    vectors: int = 1
    scalars: int = 0
    devices: tuple[str, ...] = ()
    wire: Wire = FP32
    dtype: torch.dtype = torch.float32
    first: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.widths)) != 1:
            raise ValueError(f"shards of a node must have equal widths, got {self.widths}")

    @property
    def slots(self) -> int:
        """Number of the node's slots that this process sends for."""
        return len(self.widths)

    def begin(self, slot: int) -> int:
        """Return the first column of a shard in the node's vector."""
        return self.first[slot] if self.first else sum(self.widths[:slot])

    def vector_bytes(self, columns: int) -> int:
        """Return the bytes on the wire of so many columns of a vector."""
        return self.dtype.itemsize * columns if self.wire.exact else self.wire.nbytes(columns)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot's message in memory: its vectors in full, scalars in float64."""
        return self.dtype.itemsize * self.vectors * self.widths[0] + 8 * self.scalars

    @property
    def slot_sent_bytes(self) -> int:
        """Bytes of one slot's message on the wire."""
        return self.vectors * self.vector_bytes(self.widths[0]) + 8 * self.scalars

    @property
    def nbytes(self) -> int:
        """Bytes of one node's message in memory."""
        return self.slots * self.slot_bytes

    @property
    def raw_bytes(self) -> int | None:
        """``nbytes`` where messages are encoded, for :func:`traffic`; else None."""
        return None if self.wire.exact else self.nbytes

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of one node's message on the wire."""
        return self.slots * self.slot_sent_bytes

    @cached_property
    def fields(self) -> list[tuple[int, slice]]:
        """A slot's vectors, then its scalars, in the order sent: (index, all of its columns)."""
        vectors = [(k, slice(0, self.widths[0])) for k in range(self.vectors)]
        return vectors + [(self.vectors + k, slice(0, 1)) for k in range(self.scalars)]

    def offset(self, field: int) -> int:
        """Return where in a slot's encoded message a vector or scalar begins."""
        before = min(field, self.vectors)
        return before * self.vector_bytes(self.widths[0]) + 8 * (field - before)

    @property
    def slot_parts(self) -> list[tuple[torch.dtype, slice]]:
        """The ranges of one type in a slot's message in memory, as (dtype, bytes from-to)."""
        scalars_at = self.slot_bytes - 8 * self.scalars
        parts = [(self.dtype, slice(0, scalars_at))]
        if self.scalars:
            parts.append((torch.float64, slice(scalars_at, self.slot_bytes)))
        return parts

    @cached_property
    def parts(self) -> list[tuple[torch.dtype, slice]]:
        """The ranges of one type in the node's message in memory."""
        begins = range(0, self.nbytes, self.slot_bytes) if self.nbytes else ()
        return [
            (dtype, slice(at + part.start, at + part.stop))
            for at in begins
            for dtype, part in self.slot_parts
        ]

    def slot_views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut one slot's message, uint8 of ``slot_bytes`` bytes, into arrays of one row."""
        floats, *doubles = (memory[part].view(dtype) for dtype, part in self.slot_parts)
        vectors = floats.view(self.vectors, 1, self.widths[0]).unbind()
        return (*vectors, *(scalar.view(1, 1) for array in doubles for scalar in array))

    def views(self, memory: torch.Tensor) -> MessageArrays:
        """Cut one node's message, uint8 of ``nbytes`` bytes, into segments of one row."""
        return [self.slot_views(one) for one in memory.split(self.slot_bytes)]

    def empty(self, rows: int) -> MessageArrays:
        """New uninitialized segments for ``rows`` nodes, each on its slot's device."""
        devices = self.devices or ("cpu",) * len(self.widths)
        made = []
        for width, device in zip(self.widths, devices, strict=True):
            kinds = self.vectors * [(width, self.dtype)] + self.scalars * [(1, torch.float64)]
            made.append(tuple(torch.empty(rows, w, dtype=kind, device=device) for w, kind in kinds))
        return made


class Mixer:
    """Between nodes; built once from graph, layout and wire.

    Use: ``outbox(t)``, fill it whole, ``start(kind, t)``, compute, ``finish()``. Rounds of kind
    GOSSIP are consecutive; LOCAL and GLOBAL exchanges carry the clock's present value.
    """

    layout: Any
    """Of the messages: a `Layout`, or what has its widths, nbytes, sent_bytes and raw_bytes."""
    bytes_sent: list[int]
    """Bytes that each local node has put on the wire so far."""
    synchronous = True
    """Whether a round waits for its neighbours."""
    staleness: list[float]
    """Rounds that what each local node saw of others in the last GOSSIP exchange was behind its
    own (mean over those seen): 0 where synchronous, NaN where it saw none, < 0 of nodes ahead."""
    _near: Sequence[frozenset[int]] = ()

    def __init__(self, graph, layout: Any, rows: Sequence[int]):
        """Nothing sent, nothing waited; ``rows``: the nodes that live here."""
        self.graph = graph
        self.layout = layout
        self.n = graph.n
        self.local_nodes = rows
        self.bytes_sent = [0] * len(rows)
        self.staleness = [0.0] * len(rows)
        self._waited = 0.0

    @property
    def exchange_seconds(self) -> float:
        """Seconds that exchanges took so far in a thread of their own; 0 where there is none.

        What of them wasn't waited for was hidden behind computing.
        """
        return 0.0

    @property
    def wait_seconds(self) -> float:
        """Seconds spent waiting for other nodes so far."""
        return self._waited

    def outbox(self, t: int) -> MessageArrays:
        """Arrays to fill whole; old contents undefined. Waits until their readers are done."""
        raise NotImplementedError

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Publish the outbox and begin the exchange of round t; returns at once.

        A lossy wire quantizes the outbox in place, unless LOCAL. ``exchange`` numbers exchanges
        of all kinds since the run's beginning and keys the random rounding (unset: t).
        """
        raise NotImplementedError

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """``sent``, ``mixed``: read-only, valid until the next :meth:`outbox`.

        ``sent`` is the own message as the others decode it; ``mixed[i] = Σ_j W[i, j] sent_j``.
        After a LOCAL start ``mixed`` is ``sent``. ``into``, an array of a GOSSIP round whose
        message is one float32 vector, on all ranks alike: ``mixed`` may be it, where the sum is
        formed only now.
        """
        raise NotImplementedError

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Exact average over nodes of x (rows, p), in node order: shape (p,), equal bits."""
        raise NotImplementedError

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """The same for small float64 arrays (rows, k) -> (k,)."""
        return self.mean(values)

    @staticmethod
    def estimate_memory(graph, layout, node: int, near: Sequence = (), averages: bool = True):
        """:meth:`memory` of a mixer that isn't opened: the one formula; unused purposes are 0.

        ``near``: for each node those whose memory it reads, itself too; unset: none at all.
        """
        return {"outbox": layout.nbytes, "result": layout.nbytes}

    def memory(self, averages: bool = True) -> dict[str, int]:
        """Bytes by purpose of a node's messages; ``averages``: GLOBAL rounds are to come, too."""
        return self.estimate_memory(
            self.graph, self.layout, self.local_nodes[0], self._near, averages
        )

    def close(self) -> None:
        """Finish an open round, receive outstanding notifications, free the memory; collective."""


def is_average(graph, t: int) -> bool:
    """Return whether W(t) = 11ᵀ/n, so that round t is one global average (n > 2)."""
    if graph.n <= 2 or graph.degree < graph.n - 1:
        return False
    if graph.complete:
        return True
    for i in range(graph.n):
        sources, weights, own = graph.neighbours(t, i)
        if len(sources) < graph.n - 1 or any(w != own for w in weights):
            return False
    return True


def bytes_per_exchange(
    graph,
    kind: ExchangeKind,
    t: int,
    node: int,
    nbytes: int,
    raw: int | None = None,
    waits: bool = True,
) -> int:
    """Bytes that a node sends in one exchange of a message of ``nbytes`` bytes on the wire.

    Gossip: one message a receiver. Global, and rounds whose W is 11ᵀ/n: reduce-scatter and
    all-gather, 2(n−1)/n messages. Of an encoded message, ``raw`` bytes when decoded, that is what
    decoded values cost; encoded they go to all others, n − 1 messages, as a sum of codes has no
    code. The cheaper is done. Where nobody ``waits``, gossip fetches a copy from each neighbour and
    puts a deposit there.
    """
    n = graph.n
    if kind is ExchangeKind.LOCAL:
        return 0
    if kind is ExchangeKind.GOSSIP and not waits:
        return 2 * len(graph.receivers(t, node)) * nbytes
    if kind is ExchangeKind.GLOBAL or is_average(graph, t):
        summed = 2 * (n - 1) * (raw or nbytes) // n
        return summed if raw is None else min(summed, (n - 1) * nbytes)
    return len(graph.receivers(t, node)) * nbytes
