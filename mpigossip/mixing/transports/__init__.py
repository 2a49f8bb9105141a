"""Transports between nodes, by the names of `node.exchange`: MPI windows, MPI messages, NCCL."""

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.averages import ByRank, swap_by_messages
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import agreed, ordinary
from mpigossip.mixing.notifications import Notifications
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState, chunks


class Transport:
    """Sends chunks to the readers' inbox buffers; what needs nothing to be done is done here.

    Used by one thread at a time: the progress thread in a round, else the main thread.
    """

    halves = 1
    """Inbox buffers for each source."""
    on_device = False
    """Whether inbox buffers lie on the slots' devices."""
    allocate = staticmethod(ordinary)
    """Makes memory on a slot's device for what is sent."""
    in_main = False
    """Whether averages are begun by the main thread."""
    memory: Sequence[torch.Tensor] = ()
    """All of its memory on the host, uint8."""
    outbox: torch.Tensor | None = None
    """Memory, uint8, that is best sent from."""

    def __init__(self, comm: MPI.Intracomm, layout: MessageLayout, buffers: int, timeout_s: float):
        """Collective. ``buffers``: the most sources of a round."""
        self.layout = layout
        self.buffers = buffers
        self.timeout_s = timeout_s
        self.notifications = Notifications(comm, timeout_s)
        self.comm = self.notifications.comm
        self.set_chunk_size(float("inf"))

    def set_chunk_size(self, size: float) -> None:
        """Send in chunks of about so many bytes of a slot, the same on all ranks."""
        self.chunks = chunks(self.layout, size)
        self.notifications.per_round = len(self.chunks)

    def number(self, r: RoundState, chunk: MessageChunk | None = None) -> int:
        """Return the number of a chunk's notification; unset: of the round's first."""
        return r.index * len(self.chunks) + (chunk.number if chunk else 0)

    def begin(self, r: RoundState, memory: Sequence[torch.Tensor]) -> None:
        """Begin to receive, in the main thread; ``memory``: what is sent, in stream order."""

    def is_free(self, r: RoundState, rank: int) -> bool:
        """Return whether the reader's inbox buffer for this round may be written."""
        return True

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Begin to send a chunk of each slot's message to all readers.

        When the requests are complete, the memory has been read, or is kept until :meth:`free`.
        """
        raise NotImplementedError

    def notify(self, r: RoundState, chunk: MessageChunk) -> None:
        """Complete the chunk at the readers, then notify them."""

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        """Return whether a source's chunk has arrived."""
        raise NotImplementedError

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        """Return for each slot an inbox buffer; reads that begin now see what has arrived."""
        raise NotImplementedError

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        """Let go of a round, in the main thread; ``coming``: the plan of round t + 2."""

    def swap(self, out: ByRank, into: ByRank) -> float:
        """Send arrays to other ranks and receive theirs, all at once; seconds waited."""
        return swap_by_messages(self.comm, self.timeout_s, out, into)

    def pending(self, r: RoundState) -> list[MPI.Request]:
        """Return the requests whose completion may let the round go on."""
        return self.notifications.pending()

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        """Return the message for a round in which these ranks are late; one is named."""
        raise NotImplementedError

    def wait_for_swaps(self, what: str) -> None:
        """Wait until swaps that were begun in the main thread are done."""

    def abandon(self) -> None:
        """End what still holds a device, after a failure; not collective."""

    def close(self, coming: Sequence[tuple[int, RoundPlan]] = ()) -> None:
        """Release all; collective. ``coming``: rounds that won't be run, but were freed buffers."""
        self.notifications.close()


def inboxes(
    comm: MPI.Intracomm,
    layout: MessageLayout,
    buffers: int,
    devices: Sequence[torch.device],
    allocate: Callable[[int, torch.device], torch.Tensor] = ordinary,
) -> list[torch.Tensor]:
    """Allocate room for so many messages on each slot's device, uint8 (buffers, bytes).

    Collective. Raises TransportUnavailable, on all ranks, where one has no room.
    """
    size = layout.slot_sent_bytes
    return agreed(
        comm, lambda: [allocate(size * buffers, device).view(buffers, size) for device in devices]
    )
