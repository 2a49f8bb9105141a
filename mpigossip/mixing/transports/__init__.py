"""Transports between nodes, by their names in `node.exchange`: MPI windows, MPI messages, NCCL."""

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import agreed, ordinary
from mpigossip.mixing.exact_average import ByRank, swap_by_messages
from mpigossip.mixing.notifications import Notifications
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState, chunks


class Transport:
    """Base class of transports, which send message chunks to the inbox buffers of out-neighbours.

    The methods that do not raise NotImplementedError are right for a transport that needs no such
    action. Only one thread uses a transport at a time: the progress thread during a round that it
    runs, otherwise the main thread.
    """

    halves = 1
    """Number of inbox buffers for each in-neighbour."""
    on_device = False
    """True if inbox buffers are on the slots' devices."""
    allocate = staticmethod(ordinary)
    """Function that allocates memory to send from on a slot's device."""
    in_main = False
    """True if averages must be started in the main thread, as NCCL requires."""
    memory: Sequence[torch.Tensor] = ()
    """All host memory of the transport, uint8."""
    outbox: torch.Tensor | None = None
    """Memory, uint8, from which sending is fastest; None: any memory is equally good."""

    def __init__(self, comm: MPI.Intracomm, layout: MessageLayout, buffers: int, timeout_s: float):
        """Duplicate the communicator; collective.

        :param comm: communicator of the nodes
        :param layout: layout of a node's message
        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param timeout_s: time limit of each wait, in seconds
        """
        self.layout = layout
        self.buffers = buffers
        self.timeout_s = timeout_s
        self.notifications = Notifications(comm, timeout_s)
        self.comm = self.notifications.comm
        self.set_chunk_size(float("inf"))

    def set_chunk_size(self, size: float) -> None:
        """Send in chunks of about ``size`` bytes of a slot's message, equal on all ranks."""
        self.chunks = chunks(self.layout, size)
        self.notifications.per_round = len(self.chunks)

    def number(self, r: RoundState, chunk: MessageChunk | None = None) -> int:
        """Return the number of the notification of a chunk in a round.

        :param r: state of the round
        :param chunk: chunk of the message; None: the first one
        """
        return r.index * len(self.chunks) + (chunk.number if chunk else 0)

    def begin(self, r: RoundState, memory: Sequence[torch.Tensor]) -> None:
        """Begin to receive the messages of a round; the main thread calls this.

        :param r: state of the round
        :param memory: for each slot, the message to send, which the slot's stream may still write
        """

    def is_free(self, r: RoundState, rank: int) -> bool:
        """Return whether the reader's inbox buffer for this round may be written."""
        return True

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Begin to send a chunk of each slot's message to all out-neighbours.

        :param r: state of the round
        :param chunk: chunk to send
        :param memory: for each slot, the message; it must not be changed before :meth:`release`
        :return: requests that must be complete before :meth:`notify` is called
        """
        raise NotImplementedError

    def notify(self, r: RoundState, chunk: MessageChunk) -> None:
        """Complete the transfer of a chunk to all out-neighbours, then notify them."""

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        """Return whether a chunk of in-neighbour ``source`` has arrived."""
        raise NotImplementedError

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        """Return the inbox buffer with the index ``buffer``, as one array for each slot.

        Afterwards, reads of this memory see all chunks that have arrived before this call.
        """
        raise NotImplementedError

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        """Free the inbox buffers of a round, after its sum; the main thread calls this.

        :param r: state of the round, with the number t
        :param coming: plan of round t + 2, which uses the same buffers
        """

    def skip(self, r: RoundState, coming: RoundPlan) -> None:
        """Leave out a round, so that the next one may follow; the main thread calls this.

        :param r: state of the round, which has not begun
        :param coming: plan of round t + 2, which uses the same buffers
        """

    def swap(self, out: ByRank, into: ByRank) -> float:
        """Send arrays to other ranks, receive theirs, and return the seconds waited.

        :param out: arrays to send, by rank and slot
        :param into: arrays for received data, by rank and slot
        :raises WaitTimeoutError: if a rank does not answer within the time limit
        """
        return swap_by_messages(self.comm, self.timeout_s, out, into)

    def pending(self, r: RoundState) -> list[MPI.Request]:
        """Return the requests whose completion may allow the round to continue."""
        return self.notifications.pending()

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        """Return the error message for a round in which ``ranks`` are late, with some names."""
        raise NotImplementedError

    def wait_for_swaps(self, what: str) -> None:
        """Wait until all calls of :meth:`swap` are done that the main thread has started.

        :param what: description of the transfers, which begins the error message
        :raises WaitTimeoutError: if they are not done within the time limit
        """

    def abandon(self) -> None:
        """After a failure, end all calls that still occupy a device; not collective."""

    def close(self, coming: Sequence[tuple[int, RoundPlan]] = ()) -> None:
        """Release all memory; collective.

        :param coming: index and plan of rounds for which buffers were freed but that will not be
            run
        """
        self.notifications.close()


def inboxes(
    comm: MPI.Intracomm,
    layout: MessageLayout,
    buffers: int,
    devices: Sequence[torch.device],
    allocate: Callable[[int, torch.device], torch.Tensor] = ordinary,
) -> list[torch.Tensor]:
    """Allocate memory for received messages on each slot's device; collective.

    :param comm: communicator of the nodes
    :param layout: layout of a node's message
    :param buffers: number of messages for which each slot gets memory
    :param devices: device of each slot
    :param allocate: function (bytes, device) that returns uint8 memory
    :return: for each slot, a uint8 array (buffers, bytes)
    :raises TransportUnavailable: on all ranks, if the allocation fails on one
    """
    size = layout.slot_sent_bytes
    return agreed(
        comm, lambda: [allocate(size * buffers, device).view(buffers, size) for device in devices]
    )
