"""Transports between nodes, by their names in `node.exchange`: MPI windows, MPI messages, NCCL."""

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.averages import ByRank, swap_by_messages
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import agreed, ordinary
from mpigossip.mixing.notifications import Notifications
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState, chunks


class Transport:
    """Base class of the objects that send chunks to the inbox buffers of readers.

    A method with a body here does what is right for a transport that needs no such action. A
    transport is used by one thread at a time: the progress thread during a round, otherwise the
    main thread.
    """

    halves = 1
    """Inbox buffers for each source."""
    on_device = False
    """True if inbox buffers are on the slots' devices."""
    allocate = staticmethod(ordinary)
    """Function that allocates memory to send from on a slot's device."""
    in_main = False
    """True if the main thread starts averages."""
    memory: Sequence[torch.Tensor] = ()
    """All host memory of the transport, uint8."""
    outbox: torch.Tensor | None = None
    """Memory, uint8, from which sending is fastest; None: any memory is equally good."""

    def __init__(self, comm: MPI.Intracomm, layout: MessageLayout, buffers: int, timeout_s: float):
        """Duplicate the communicator; collective.

        :param comm: communicator of the nodes
        :param layout: layout of a node's message
        :param buffers: largest number of sources in a round
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
        """Return the number of a chunk's notification; None: of the first chunk of the round."""
        return r.index * len(self.chunks) + (chunk.number if chunk else 0)

    def begin(self, r: RoundState, memory: Sequence[torch.Tensor]) -> None:
        """Begin to receive, in the main thread; the slots' streams still write ``memory``."""

    def is_free(self, r: RoundState, rank: int) -> bool:
        """Return whether the reader's inbox buffer for this round may be written."""
        return True

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Begin to send a chunk of each slot's message to all readers.

        When the returned requests are complete, the memory has been read, or it must not be changed
        before :meth:`release`.
        """
        raise NotImplementedError

    def notify(self, r: RoundState, chunk: MessageChunk) -> None:
        """Complete the transfer of the chunk to all readers, then notify them."""

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        """Return whether the chunk of a source has arrived."""
        raise NotImplementedError

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        """Return for each slot an inbox buffer; reads from now on return what has arrived."""
        raise NotImplementedError

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        """Free the buffers of a round, in the main thread; ``coming``: the plan of round t + 2."""

    def swap(self, out: ByRank, into: ByRank) -> float:
        """Send arrays to other ranks and receive theirs at once; return the seconds waited."""
        return swap_by_messages(self.comm, self.timeout_s, out, into)

    def pending(self, r: RoundState) -> list[MPI.Request]:
        """Return the requests whose completion may allow the round to continue."""
        return self.notifications.pending()

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        """Return the error message for a round in which ``ranks`` are late; it names one."""
        raise NotImplementedError

    def wait_for_swaps(self, what: str) -> None:
        """Wait until the swaps that the main thread has started are done."""

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
    """Allocate uint8 memory for ``buffers`` messages on each slot's device: (buffers, bytes).

    It is collective.

    :raises TransportUnavailable: on all ranks, if the allocation fails on one
    """
    size = layout.slot_sent_bytes
    return agreed(
        comm, lambda: [allocate(size * buffers, device).view(buffers, size) for device in devices]
    )
