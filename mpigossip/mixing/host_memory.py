"""Messages of a rank in host memory, and shared memory between the ranks of a host.

In shared memory, ranks read the outboxes of their neighbours in place. `HostBuffers` implements
`pipeline.Buffers`.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_shared, round_up_to_pages
from mpigossip.mixing.base import MessageArrays, MessageLayout
from mpigossip.mixing.combine import Source, sum_messages, weighted_sum
from mpigossip.mixing.exact_average import average_encoded, average_message
from mpigossip.mixing.notifications import DONE, HALF, READY, REDUCED, Notifications
from mpigossip.mixing.plan import MessageChunk
from mpigossip.mixing.transports import Transport
from mpigossip.mixing.wire import encode


class SharedOutboxes:
    """Shared memory of all ranks of one host: an outbox and a result area for each rank.

    In each round, a rank fills its outbox and notifies its out-neighbours (READY). An out-neighbour
    sums the outboxes of its in-neighbours and notifies their owners (DONE). An owner waits for this
    notification before it writes to its outbox again. ``Win.Sync`` orders memory accesses and
    notifications. READY also means that the result area of the rank is free. If two ranks average
    only with each other, each of them writes one half of the result to the result area of one of
    them, where both read it.

    Methods take the ranks of the mixer, and not of the host's communicator, except
    :meth:`wait_half`. In sequences of ranks, ranks on other hosts are ignored; a single rank must
    be on this host. ``t`` is the number of the round. A wait raises WaitTimeoutError at the time
    limit.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], nbytes: int, timeout_s: float):
        """Open the window; collective.

        :param comm: communicator of the ranks of this host
        :param ranks: ranks of the mixer, in the order of ``comm``
        :param nbytes: bytes of a message
        :param timeout_s: time limit of each wait, in seconds
        """
        self.size = comm.size
        self.rank = comm.rank
        self.local_index = {rank: index for index, rank in enumerate(ranks)}
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        area_bytes = round_up_to_pages(nbytes)
        self._window, memory = open_shared(comm, 2 * area_bytes)
        areas = [torch.frombuffer(area, dtype=torch.uint8) for area in memory]
        self._notifications = Notifications(comm, timeout_s)
        self.outboxes = [area[:nbytes] for area in areas]
        self._results = [area[area_bytes : area_bytes + nbytes] for area in areas]
        self.own = self.outboxes[self.rank]
        self.result = self._results[self.rank]
        self._halves: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other ranks."""
        return self._notifications.waited

    def _local_indices(self, ranks: Iterable[int]) -> list[int]:
        return [self.local_index[j] for j in ranks if j in self.local_index]

    def outbox(self, rank: int) -> torch.Tensor:
        return self.outboxes[self.local_index[rank]]

    def publish(self, readers: Iterable[int], t: int) -> None:
        """Notify out-neighbours that the outbox of round t is complete.

        :param readers: ranks of the out-neighbours; ranks on other hosts are ignored
        :param t: number of the round
        """
        self._window.Sync()
        self._notifications.send(self._local_indices(readers), READY, t)

    def publish_to_all(self, t: int) -> None:
        """Notify all other ranks of this host that the outbox of round t is complete."""
        self._window.Sync()
        self._notifications.send(self._others, READY, t)

    def wait_ready(self, sources: Iterable[int], t: int) -> None:
        """Wait until the outboxes of in-neighbours are complete for round t.

        :param sources: ranks of the in-neighbours; ranks on other hosts are ignored
        :param t: number of the round
        :raises WaitTimeoutError: at the time limit
        """
        self._notifications.wait(self._local_indices(sources), READY, t)
        self._window.Sync()

    def release(self, sources: Iterable[int], t: int) -> None:
        """Notify in-neighbours that their outboxes were read.

        :param sources: ranks of the in-neighbours; ranks on other hosts are ignored
        :param t: number of the round
        """
        self._notifications.send(self._local_indices(sources), DONE, t)

    def wait_read(self, readers: Iterable[int], t: int) -> None:
        """Wait until out-neighbours have read the outbox of round t.

        :param readers: ranks of the out-neighbours; ranks on other hosts are ignored
        :param t: number of the round
        :raises WaitTimeoutError: at the time limit
        """
        self._notifications.wait(self._local_indices(readers), DONE, t)

    def average_pair(
        self, parts: Sequence[tuple[torch.dtype, slice]], weight: float, partner: int, t: int
    ) -> torch.Tensor:
        """Compute ``weight · (own + partner's)``, one half in each of two ranks; return the result.

        The partner makes the same call at the same time. Each rank does half of the arithmetic, and
        the two read and write less memory than if each computed the whole sum. The result is an
        uint8 array in the result area of one of the two ranks, and both read it there; call
        :meth:`release_pair` afterwards.

        :param parts: parts of the message that have one dtype: pairs (dtype, slice of bytes)
        :param weight: weight of both messages
        :param partner: the other rank
        :param t: number of the round
        """
        # A partner whose outbox is complete no longer reads the old result: this half is free.
        self.wait_ready([partner], t)
        index = self.local_index[partner]
        if index not in self._halves:
            self._halves[index] = self._half(parts, index)
        for own, other, out in self._halves[index]:
            weighted_sum([weight] * 2, [own, other], out)
        # the partner's half completes the result
        self._window.Sync()
        self._notifications.send([index], HALF, t)
        self.wait_half(index, t)
        return self._results[min(self.rank, index)]

    def _half(
        self, parts: Sequence[tuple[torch.dtype, slice]], partner: int
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return the arrays that this rank sums and writes in an average with ``partner``.

        For each dtype, they are views (1, elements) of one half of three areas: the outbox of this
        rank, the outbox of the partner, and the common result.
        """
        halves = []
        for dtype, part in parts:
            count = (part.stop - part.start) // dtype.itemsize
            middle = count // 2 // 16 * 16  # no cache line belongs to both halves
            half = slice(0, middle) if self.rank < partner else slice(middle, count)
            areas = (self.own, self.outboxes[partner], self._results[min(self.rank, partner)])
            if half.start < half.stop:
                views = (area[part].view(dtype)[half].unsqueeze(0) for area in areas)
                halves.append(tuple(views))
        return halves

    def release_pair(self, partner: int, t: int) -> None:
        """Declare that this rank has read the result of :meth:`average_pair`.

        The rank whose result area it is waits until the other one has read it; the other one only
        sends a notification.
        """
        index = self.local_index[partner]
        if self.rank > index:
            self._notifications.send([index], DONE, t)
        else:
            self._notifications.wait([index], DONE, t)

    def wait_half(self, index: int, t: int) -> None:
        """Wait until the partner has written its half of the result of round t.

        Afterwards, the partner no longer reads the outbox of this rank. ``index`` is the partner's
        rank in the communicator of the host.
        """
        self._notifications.wait([index], HALF, t)
        self._window.Sync()

    def average(
        self, parts: Sequence[tuple[torch.dtype, slice]], weights: Sequence[float], t: int
    ) -> None:
        """Average all outboxes exactly, in rank order, into the result areas of all ranks.

        The rank with the index r on this host sums chunk r and writes it to the result areas of all
        ranks, which takes one pass over the memory.

        :param parts: ranges of bytes of a message that have one dtype
        :param weights: weight of each rank
        :param t: number of the round
        """
        # All outboxes are complete, and no rank reads an old result, so chunks may be written.
        self._notifications.wait(self._others, READY, t)
        self._window.Sync()
        for dtype, part in parts:
            sources = [area[part].view(dtype).chunk(self.size) for area in self.outboxes]
            targets = [area[part].view(dtype).chunk(self.size) for area in self._results]
            if self.rank >= len(targets[0]):
                continue
            own_chunk = targets[self.rank][self.rank]
            rows = [chunks[self.rank].unsqueeze(0) for chunks in sources]
            copies = [targets[rank][self.rank].unsqueeze(0) for rank in self._others]
            weighted_sum(weights, rows, own_chunk.unsqueeze(0), *copies)
        # wait until every rank has written its chunk to this result and has read this outbox
        self._window.Sync()
        self._notifications.send(self._others, REDUCED, t)
        self._notifications.wait(self._others, REDUCED, t)
        self._window.Sync()

    def close(self) -> None:
        """Free window and communicator; collective. The memory must not be used afterwards."""
        self.outboxes = []
        self._results = []
        self._halves = {}
        del self.own, self.result
        close_window(self._window, self._notifications.comm)
        self._notifications.close()


def share_memory(comm: MPI.Intracomm, nbytes: int, timeout_s: float) -> SharedOutboxes | None:
    """Open the shared memory of the ranks of this host; collective over ``comm``.

    Return None if no other rank is on this host, although ``comm`` has several ranks.

    :param comm: communicator of all nodes
    :param nbytes: bytes of a message
    :param timeout_s: time limit of each wait, in seconds
    """
    on_host: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        if on_host.size == 1 < comm.size:
            return None
        return SharedOutboxes(on_host, on_host.allgather(comm.rank), nbytes, timeout_s)
    finally:
        on_host.Free()


class HostBuffers:
    """Messages of a rank in host memory.

    The outbox ``own`` holds the values that this rank sums, and that other ranks of this host may
    read in place. The transport sends ``sent``, which is the outbox itself or, with a lossy wire,
    the encoded message ``encoded``. :func:`host_buffers` chooses the memory.
    """

    def __init__(
        self,
        layout: MessageLayout,
        rank: int,
        n: int,
        own: torch.Tensor,
        *,
        encoded: torch.Tensor | None = None,
        shared_result: torch.Tensor | None = None,
    ):
        """Use the given uint8 arrays as memory.

        :param layout: layout of the message
        :param rank: number of this rank
        :param n: number of ranks
        :param own: memory of the outbox, ``layout.nbytes`` bytes
        :param encoded: memory of the encoded message, ``layout.sent_bytes`` bytes; None: the outbox
            itself is sent
        :param shared_result: memory of sums, which the ranks of this host share like the outbox;
            None: this rank does not share its memory
        """
        self._layout = layout
        self._rank = rank
        self._n = n
        self._is_shared = shared_result is not None
        self._shared_result = shared_result
        # if messages are not encoded and only the transport is used, sum in the first inbox buffer
        self._in_inbox = not self._is_shared and layout.wire.exact
        # views are cached, because making them takes longer than sending a small message
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._segments: dict[int, MessageArrays] = {}
        self.own = own
        self._by_slot = own.split(layout.slot_bytes)
        self.encoded = None if encoded is None else list(encoded.split(layout.slot_sent_bytes))
        self.sent = self.encoded or list(self._by_slot)
        self.out: MessageArrays = self.segments(own)
        self.result: MessageArrays = self.out

    @cached_property
    def memory(self) -> torch.Tensor:
        """Memory of one message, uint8, for a sum that is not written over a received message."""
        if self._shared_result is not None:
            return self._shared_result
        return _empty(self._layout.nbytes)

    def segments(self, memory: torch.Tensor) -> MessageArrays:
        """Return the vectors and scalars of a node's message as views of ``memory``, uint8.

        The views are cached by address, so the memory must not be freed before :meth:`close`.
        """
        address = memory.data_ptr()
        if address not in self._segments:
            parts = memory.split(self._layout.slot_bytes)
            self._segments[address] = [self._slot_views(slot_memory) for slot_memory in parts]
        return self._segments[address]

    def _slot_views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the vectors and scalars of a slot's message as views of ``memory``, uint8.

        The views are cached by address, so the memory must not be freed before :meth:`close`.
        """
        address = memory.data_ptr()
        if address not in self._views:
            self._views[address] = self._layout.slot_views(memory)
        return self._views[address]

    def begin(self, number: int, average: bool = False) -> None:
        """Encode the outbox if the wire is lossy and the whole message is needed at once.

        This is so if neighbours on this host read the decoded outbox in place, or if the exchange
        is an average. Otherwise, :meth:`prepare` encodes the message chunk by chunk.
        """
        if (self._is_shared or average) and not self._layout.wire.exact:
            encode(self._layout, self.out, [self._rank], number, self.encoded)

    def stage(self, chunk: MessageChunk) -> None:
        """Do nothing: the message is in host memory."""

    def prepare(self, number: int, chunk: MessageChunk) -> list[torch.Tensor]:
        if self.encoded and not self._is_shared:
            encode(self._layout, self.out, [self._rank], number, self.encoded, chunk.fields)
        return self.sent

    def add(
        self,
        weights: Sequence[float],
        received: Sequence[Sequence[Source]],
        chunk: MessageChunk,
        into: MessageArrays | None = None,
    ) -> None:
        """Compute the weighted sum of one chunk.

        If messages are not encoded, and no neighbour on this host is read in place, the sum is
        written over the message of the first in-neighbour, unless ``into`` is given.
        """
        if not self.encoded:
            received = [[self._source(message) for message in messages] for messages in received]
        if into is not None:
            self.result = into
        elif self._in_inbox and received:
            self.result = received[0]  # type: ignore[assignment]
        else:
            self.result = self.segments(self.memory)
        for slot, out in enumerate(self.result):
            sources = [self.out[slot], *(messages[slot] for messages in received)]
            sum_messages(self._layout, weights, sources, out, chunk.fields)

    def _source(self, message: Source) -> Source:
        return self._slot_views(message) if isinstance(message, torch.Tensor) else message

    def average(self, transport: Transport, weights: Sequence[float]) -> float:
        """Average over all nodes, by decoded values or encoded messages, whichever sends less.

        The two results are bitwise identical.
        """
        layout = self._layout
        rank = self._rank
        n = self._n
        self.result = self.segments(self.memory)
        result = self.memory.split(layout.slot_bytes)
        if self.encoded is None or n * layout.sent_bytes >= 2 * layout.nbytes:
            return average_message(layout, rank, weights, self._by_slot, result, transport.swap)
        all_encoded = torch.empty(layout.slots, n, layout.slot_sent_bytes, dtype=torch.uint8)
        arguments = self.encoded, list(all_encoded), self.out, self.result
        return average_encoded(layout, rank, weights, *arguments, transport.swap)

    def record_reader(self) -> None:
        """Do nothing: there are no streams."""

    def complete(self) -> None:
        """Do nothing: on the host, every method does its work before it returns."""

    def close(self) -> None:
        self._views = {}
        self._segments = {}
        self.out = []
        self.result = []
        self.sent = []
        self.encoded = self._shared_result = None
        del self.own, self._by_slot
        self.__dict__.pop("memory", None)


def host_buffers(
    layout: MessageLayout,
    rank: int,
    n: int,
    shared: SharedOutboxes | None,
    transport: Transport | None,
) -> HostBuffers:
    """Return the buffers of a rank, in memory that depends on the case.

    ============= ================ ================ =============== ======================
    case          ``own``          ``encoded``      ``sent``        sum of a GOSSIP round
    ============= ================ ================ =============== ======================
    shared exact  shared outbox    none             own             shared result
    shared lossy  shared outbox    transport or new encoded         shared result
    private exact transport or new none             own             first inbox, if any
    private lossy new              transport or new encoded         new
    ============= ================ ================ =============== ======================

    "transport" is ``transport.outbox``, from which it sends fastest; if it is None, the memory is
    new. If all ranks share memory, there is no transport, and no ``encoded`` either.

    :param layout: layout of the message
    :param rank: number of this rank
    :param n: number of ranks
    :param shared: shared memory of this host; None: private memory
    :param transport: transport to other ranks; None: there is none
    """
    lossy = not layout.wire.exact
    if shared and lossy:
        return _shared_lossy(layout, rank, n, shared, transport)
    if shared:
        return _shared_exact(layout, rank, n, shared)
    if lossy:
        return _private_lossy(layout, rank, n, transport)
    return _private_exact(layout, rank, n, transport)


def _shared_exact(layout: MessageLayout, rank: int, n: int, shared: SharedOutboxes) -> HostBuffers:
    """Return buffers whose outbox is read on this host and sent to other hosts."""
    return HostBuffers(layout, rank, n, shared.own, shared_result=shared.result)


def _shared_lossy(
    layout: MessageLayout, rank: int, n: int, shared: SharedOutboxes, transport: Transport | None
) -> HostBuffers:
    """Return buffers whose decoded values are read on this host; other hosts get ``encoded``."""
    encoded = _memory_to_send(transport, layout.sent_bytes).zero_() if transport else None
    return HostBuffers(layout, rank, n, shared.own, encoded=encoded, shared_result=shared.result)


def _private_exact(
    layout: MessageLayout, rank: int, n: int, transport: Transport | None
) -> HostBuffers:
    """Return buffers whose outbox is sent; the sum overwrites the first message received."""
    return HostBuffers(layout, rank, n, _memory_to_send(transport, layout.nbytes))


def _private_lossy(
    layout: MessageLayout, rank: int, n: int, transport: Transport | None
) -> HostBuffers:
    """Return buffers whose encoded message is sent; the own values have memory of their own."""
    encoded = _memory_to_send(transport, layout.sent_bytes).zero_()
    return HostBuffers(layout, rank, n, _empty(layout.nbytes), encoded=encoded)


def _memory_to_send(transport: Transport | None, nbytes: int) -> torch.Tensor:
    if transport is None or transport.outbox is None:
        return _empty(nbytes)
    return transport.outbox


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
