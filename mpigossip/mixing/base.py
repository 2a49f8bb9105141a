"""Interface of a mixer, the communication backend between nodes, and the layout of a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from mpigossip.graphs.rounds import exact_average
from mpigossip.mixing.wire import FP32, Wire

MessageArrays = list[tuple[torch.Tensor, ...]]
"""Arrays of a message: for each slot a tuple of its vectors, each of shape (rows, p), and then its
scalars, float64 arrays of shape (rows, 1). Each local node has one row."""


class ExchangeKind(Enum):
    """Kind of a step's exchange.

    LOCAL: there is no exchange; GOSSIP: an average over the neighbours of the round; GLOBAL: an
    average over all nodes.
    """

    LOCAL = 0
    GOSSIP = 1
    GLOBAL = 2


@dataclass(frozen=True)
class MessageLayout:
    """Layout of a node's message in one round.

    The message has a segment for each slot, whose bytes are contiguous: ``vectors`` arrays of the
    size of the slot's shard, followed by ``scalars`` single numbers.
    """

    widths: tuple[int, ...]
    """Number of elements of each slot's shard; all are equal, otherwise ValueError is raised."""
    vectors: int = 1
    """Number of vectors."""
    scalars: int = 0
    """Number of scalars, which are float64."""
    devices: tuple[str, ...] = ()
    """Device of each slot; empty: the CPU."""
    wire: Wire = FP32
    """Format in which vectors are sent. A lossy wire requires float32 vectors that consist of whole
    buckets."""
    dtype: torch.dtype = torch.float32
    """Type of the elements of vectors."""
    first: tuple[int, ...] = ()
    """Index of the first element of each shard in the node's vector, which determines the random
    numbers that a wire draws; empty: the shards are the whole vector."""

    def __post_init__(self) -> None:
        if len(set(self.widths)) != 1:
            raise ValueError(
                f"shards of a node must have equal widths, got {self.widths}: pad the vector"
            )

    @property
    def slots(self) -> int:
        """Number of the node's slots for which this process sends."""
        return len(self.widths)

    def begin(self, slot: int) -> int:
        """Return the index of the first element of a slot's shard in the node's vector."""
        return self.first[slot] if self.first else sum(self.widths[:slot])

    def vector_bytes(self, columns: int) -> int:
        """Return the number of bytes that are sent for ``columns`` elements of a vector."""
        return self.dtype.itemsize * columns if self.wire.exact else self.wire.nbytes(columns)

    @cached_property
    def slot_bytes(self) -> int:
        """Number of bytes of one slot's message in memory, before it is encoded."""
        return self.dtype.itemsize * self.vectors * self.widths[0] + 8 * self.scalars

    @property
    def slot_sent_bytes(self) -> int:
        """Number of bytes of one slot's message on the wire."""
        return self.vectors * self.vector_bytes(self.widths[0]) + 8 * self.scalars

    @property
    def nbytes(self) -> int:
        """Number of bytes of one node's message in memory, before it is encoded."""
        return self.slots * self.slot_bytes

    @property
    def raw_bytes(self) -> int | None:
        """Number of bytes of a decoded message; None if messages are not encoded.

        It is the parameter ``raw`` of :func:`bytes_per_exchange`.
        """
        return None if self.wire.exact else self.nbytes

    @cached_property
    def sent_bytes(self) -> int:
        """Number of bytes of one node's message on the wire."""
        return self.slots * self.slot_sent_bytes

    @cached_property
    def fields(self) -> list[tuple[int, slice]]:
        """Vectors and then scalars of a slot, in the order in which they are sent.

        Each of them is described by a pair: its index, which counts scalars after all vectors, and
        the slice of all its elements.
        """
        vectors = [(k, slice(0, self.widths[0])) for k in range(self.vectors)]
        return vectors + [(self.vectors + k, slice(0, 1)) for k in range(self.scalars)]

    def offset(self, field: int) -> int:
        """Return the byte at which a vector or scalar begins in a slot's encoded message.

        ``field`` is the index of the vector; scalars are counted after all vectors.
        """
        before = min(field, self.vectors)
        return before * self.vector_bytes(self.widths[0]) + 8 * (field - before)

    @property
    def slot_parts(self) -> list[tuple[torch.dtype, slice]]:
        """Ranges of one dtype in a slot's message in memory: pairs (dtype, slice of bytes)."""
        scalars_begin = self.slot_bytes - 8 * self.scalars
        parts = [(self.dtype, slice(0, scalars_begin))]
        if self.scalars:
            parts.append((torch.float64, slice(scalars_begin, self.slot_bytes)))
        return parts

    @cached_property
    def parts(self) -> list[tuple[torch.dtype, slice]]:
        """Ranges of one dtype in the node's message in memory: pairs (dtype, slice of bytes)."""
        begins = range(0, self.nbytes, self.slot_bytes) if self.nbytes else ()
        return [
            (dtype, slice(begin + part.start, begin + part.stop))
            for begin in begins
            for dtype, part in self.slot_parts
        ]

    def slot_views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the vectors and scalars of one slot's message as views of its memory.

        ``memory`` is a uint8 array (``slot_bytes``,). Each view has the shape (1, elements).
        """
        floats, *doubles = (memory[part].view(dtype) for dtype, part in self.slot_parts)
        vectors = floats.view(self.vectors, 1, self.widths[0]).unbind()
        return (*vectors, *(scalar.view(1, 1) for array in doubles for scalar in array))

    def views(self, memory: torch.Tensor) -> MessageArrays:
        """Return the vectors and scalars of one node's message as views of its memory.

        ``memory`` is a uint8 array (``nbytes``,). The result has a tuple for each slot, whose views
        have the shape (1, elements).
        """
        return [self.slot_views(slot_memory) for slot_memory in memory.split(self.slot_bytes)]

    def empty(self, rows: int) -> MessageArrays:
        """Return uninitialized arrays for the messages of ``rows`` nodes, on the slots' devices."""
        devices = self.devices or ("cpu",) * len(self.widths)
        arrays = []
        for width, device in zip(self.widths, devices, strict=True):
            columns = self.vectors * [(width, self.dtype)] + self.scalars * [(1, torch.float64)]
            arrays.append(
                tuple(torch.empty(rows, w, dtype=dtype, device=device) for w, dtype in columns)
            )
        return arrays


class Mixer:
    """Object that exchanges and averages messages between nodes, for one graph and message layout.

    An exchange consists of four steps: call ``outbox(t)``, fill all of its arrays, call
    ``start(kind, t)``, and call ``finish()``, which returns the result. The caller can compute
    between the last two. GOSSIP rounds have consecutive numbers t; a LOCAL or GLOBAL exchange is
    started with the number of the next GOSSIP round.
    """

    layout: Any
    """Layout of the messages: a `MessageLayout`, or an object with the same ``widths``, ``nbytes``,
    ``sent_bytes`` and ``raw_bytes``."""
    bytes_sent: list[int]
    """Number of bytes that each local node has sent so far."""
    synchronous = True
    """True if a round waits for its neighbours."""
    staleness: list[float]
    """Mean age, in rounds, of the models that each local node received in the last GOSSIP exchange.
    It is 0 for a synchronous mixer, NaN if the node received none, and negative if its neighbours
    are ahead of it."""
    state_mixers: Mapping[str, Mixer] = {}
    """Mixers of the arrays of the local step that are averaged, too, by name; `close_mixer` closes
    them together with this mixer."""
    _near: Sequence[frozenset[int]] = ()

    def __init__(self, graph, layout: Any, rows: Sequence[int]):
        """Set all counters to zero.

        :param graph: graph of the nodes
        :param layout: layout of the messages
        :param rows: numbers of the local nodes
        """
        self.graph = graph
        self.layout = layout
        self.n = graph.n
        self.local_nodes = rows
        self.bytes_sent = [0] * len(rows)
        self.staleness = [0.0] * len(rows)
        self._waited = 0.0

    @property
    def sent_layout(self) -> Any:
        """Layout of the messages of this process: ``layout``, or the layout of its shard."""
        return self.layout

    @property
    def exchange_seconds(self) -> float:
        """Seconds that exchanges have taken so far in a separate thread; 0 if there is no thread.

        The part that exceeds the waits of the main thread was overlapped with computation.
        """
        return 0.0

    @property
    def wait_seconds(self) -> float:
        """Seconds spent so far waiting for other nodes."""
        return self._waited

    def outbox(self, t: int) -> MessageArrays:
        """Return the arrays of the message for round t, after the last message has been read.

        A synchronous mixer between ranks waits for the nodes that read the last message. The caller
        must fill all arrays, because their contents are undefined.

        :raises WaitTimeoutError: if such a node has not read it at the time limit
        """
        raise NotImplementedError

    def check_later(
        self,
        kind: ExchangeKind,
        t: int,
        segment: int,
        totals: torch.Tensor,
        check: Callable[[torch.Tensor], None],
    ) -> bool:
        """Let the mixer check the message before it sends it, if it can do so without a wait here.

        :param kind: kind of the exchange that follows
        :param t: number of the graph's round
        :param segment: index of the segment that is checked
        :param totals: values on the segment's device, computed on its current stream
        :param check: function of ``totals`` on the CPU, which raises an error for a wrong message;
            :meth:`finish` raises this error
        :return: whether the mixer will call ``check``; otherwise the caller has to call it
        """
        return False

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Publish the outbox and begin the exchange of round t, without waiting for it.

        A lossy wire quantizes the outbox in place, except for a LOCAL exchange.

        :param kind: kind of the exchange
        :param t: number of the graph's round
        :param exchange: number of this exchange, counted over all kinds from the start of the run,
            which seeds the random rounding of a wire; None: t
        """
        raise NotImplementedError

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """Wait for the exchange and return ``sent`` and ``mixed``.

        ``sent`` is the node's own message as the other nodes decode it. After a GOSSIP exchange of
        a synchronous mixer, ``mixed`` is the weighted sum, ``mixed[i] = Σ_j W[i, j] sent_j``; an
        asynchronous mixer also subtracts corrections (`asynchronous`). After a GLOBAL exchange,
        ``mixed`` is the average over all nodes, weighted if the graph has weights of nodes, and
        after a LOCAL exchange, it is ``sent``. Both must not be changed, and are valid until the
        next call of :meth:`outbox`.

        :param into: array to which the mixer may write the sum if it has not computed it yet, so
            that ``mixed`` is this array; None: the mixer's memory. It may only be given in a GOSSIP
            round whose message is one float32 vector, and on all ranks or on none
        :raises WaitTimeoutError: if a message has not arrived at the time limit
        """
        raise NotImplementedError

    def skip(self, t: int) -> None:
        """Leave out round t, so that round t + 1 may follow; collective over the neighbours.

        No exchange may be open. A mixer whose rounds do not depend on each other does nothing.

        :param t: number of the graph's round, the next one of this mixer
        :raises WaitTimeoutError: if a neighbour has not ended an earlier round at the time limit
        """

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the exact mean of ``x`` over all nodes, an array (p,); collective.

        The rows are summed in node order, so that the mean is bitwise identical on all ranks.

        :param x: array (rows, p) with one row for each local node
        """
        raise NotImplementedError

    def means(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return :meth:`mean` of an array of each slot; collective.

        A mixer whose transport accesses GPU memory can compute the means there.

        :param shards: for each slot an array (rows, p) on its device; all have the same width
        """
        return [self.mean(shard) for shard in shards]

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """Return the exact mean over all nodes of small float64 arrays, an array (k,); collective.

        :param values: array (rows, k) with one row for each local node
        """
        return self.mean(values)

    @staticmethod
    def estimate_memory(graph, layout, node: int, near: Sequence = (), averages: bool = True):
        """Return the bytes of a node's messages by purpose, without a mixer.

        :meth:`memory` of an open mixer takes into account which transport the mixer uses. A purpose
        may have 0 bytes.

        :param graph: graph of the nodes
        :param layout: layout of a node's message
        :param node: number of the node
        :param near: for each node, the set of nodes whose memory it reads, including itself; empty:
            no node reads the memory of another
        :param averages: whether GLOBAL exchanges may follow
        """
        return {"outbox": layout.nbytes, "result": layout.nbytes}

    def memory(self, averages: bool = True) -> dict[str, int]:
        """Return the bytes of a node's messages by purpose.

        :param averages: whether GLOBAL exchanges may follow
        """
        return self.estimate_memory(
            self.graph, self.layout, self.local_nodes[0], self._near, averages
        )

    def close(self) -> None:
        """Finish an open round, receive outstanding notifications, free the memory; collective."""


def is_average(graph, t: int) -> bool:
    """Return whether round t is a global average, with n > 2 nodes.

    W(t) is then 11ᵀ/n, or 1wᵀ if the nodes have weights w.
    """
    if graph.n <= 2 or graph.degree < graph.n - 1:
        return False
    if graph.complete:
        return True
    if graph.node_weights:
        r = graph.round(t)
        # Other rounds need no comparison of n² elements.
        is_complete = r.edge_count == graph.n * (graph.n - 1)
        return is_complete and r == exact_average(graph.node_weights)
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
    """Return the bytes that ``node`` sends in one exchange of a message.

    GOSSIP sends one message to each out-neighbour. GLOBAL, like a round that averages over all
    nodes, is a reduce-scatter followed by an all-gather and sends 2(n − 1)/n messages. A sum of
    encoded messages cannot be encoded again. A global average of encoded messages therefore sends
    either the decoded values in this way, or the encoded message to all n − 1 other nodes; the
    cheaper of the two is used.

    :param graph: graph of the nodes
    :param kind: kind of the exchange
    :param t: round of the graph
    :param node: number of the sending node
    :param nbytes: bytes of a message on the wire
    :param raw: bytes of a decoded message; None: messages are not encoded
    :param waits: False for an asynchronous mixer: a node then reads a copy of each neighbour's
        model and sends a correction back
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
