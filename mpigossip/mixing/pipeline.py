"""A round of exchanges chunk by chunk: encode, send, notify, receive, sum.

Chunks are what the progress thread works on: while one is on the wire, those received are summed.
So the wire is hardly ever idle, and little is left to do when the last chunk arrives.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, world_ranks
from mpigossip.mixing.base import MessageArrays
from mpigossip.mixing.combine import Source
from mpigossip.mixing.notifications import keep_alive
from mpigossip.mixing.plan import MessageChunk, RoundState
from mpigossip.mixing.progress_thread import ProgressThread
from mpigossip.mixing.transports import Transport

REMEDY = 'models went by {} of GPU memory: if MPI can\'t do that here, use node.exchange = "host"'
"""What an error of such a round says besides."""


class Buffers(Protocol):
    """A rank's messages in the memory of its slots, and the sums of them: on the host or on GPUs.

    What isn't said to wait is only begun, on GPUs, and :meth:`complete` waits for it.
    """

    out: MessageArrays
    """The outbox."""
    sent: list[torch.Tensor]
    """For each slot the message as sent, in the order of the slot's work."""

    def begin(self, number: int, average: bool = False) -> None:
        """Follow what fills the outbox; encode what isn't encoded chunk by chunk."""

    def prepare(self, number: int, chunk: MessageChunk) -> list[torch.Tensor]:
        """Return for each slot the message as sent, of which this chunk is ready; waits for it."""

    def add(
        self,
        weights: Sequence[float],
        received: Sequence[Sequence[Source]],
        chunk: MessageChunk,
        into: MessageArrays | None = None,
    ) -> None:
        """Add up a chunk of the own message and the sources', each given by slot."""

    @property
    def result(self) -> MessageArrays:
        """The sum that was formed last."""

    def average(self, transport: Transport) -> float:
        """Form the average over all nodes as the result; seconds waited for other ranks."""

    def complete(self) -> None:
        """Wait until all that was begun is done."""

    def close(self) -> None:
        """Let go of all memory; it must not be used any more."""


class Pipeline:
    """Runs rounds: in the progress thread, or small ones where they are waited for."""

    def __init__(self, transport: Transport, buffers: Buffers, thread: ProgressThread):
        """``thread``: whose waits are used."""
        self._transport = transport
        self._buffers = buffers
        self._thread = thread
        self.threaded = thread.threaded

    def begin(self, r: RoundState) -> None:
        """Begin to receive and to send; of a round done inline what needs no waiting."""
        r.arrived = dict.fromkeys(r.plan.remote_sources, 0)
        self._transport.notifications.first = r.t - r.index
        r.blocked_readers = [rank for rank, _ in r.plan.targets]
        self._transport.begin(r, self._buffers.sent)
        if r.inline:
            self._kept(self._advance, r)
        else:
            r.future = self._thread.submit(partial(self.run, r))

    def run(self, r: RoundState) -> None:
        """Send and receive all chunks.

        Waits for free buffers at the readers, then for the chunks of the sources.

        :raises WaitTimeoutError: if no chunk moves within the time limit, with the name of a rank
        """
        self._kept(self._run, r)

    def _run(self, r: RoundState) -> None:
        advance = partial(self._advance, r)
        late = partial(self._late, r)
        pause = partial(self._pause, r)
        whom = partial(self._awaited_ranks, r)
        while not self._is_finished(r):
            Deadline(self._transport.timeout_s).wait(advance, late, pause, whom)
        self._buffers.complete()

    def _kept(self, work: Callable[[RoundState], Any], r: RoundState) -> None:
        """Do the work; after a failure, keep the memory that MPI may still write into."""
        try:
            work(r)
        except BaseException:
            keep_alive.append(self._transport)
            raise

    def wait(self, r: RoundState) -> float:
        """Wait until the round has been run; seconds waited. Errors of GPU memory say a remedy."""
        began = time.perf_counter()
        try:
            if r.future:
                return self._thread.wait(r.future, f"round {r.t}")
            self.run(r)
        except Exception as error:
            if self._transport.on_device and not self._transport.in_main:  # NCCL's have their own
                note = REMEDY.format(type(self._transport).__name__.lower())
                if note not in getattr(error, "__notes__", ()):  # raised for each round after it
                    error.add_note(note)
            raise
        return time.perf_counter() - began

    def _is_finished(self, r: RoundState) -> bool:
        many = len(self._transport.chunks)
        return r.sent == many and r.added == many

    def _advance(self, r: RoundState) -> bool:
        """Do what can be done now without waiting; return whether there was anything."""
        sent = self._send(r)
        came = self._receive(r)
        return self._add(r) or sent or came

    def _pause(self, r: RoundState) -> bool:
        return self._thread.rest([*filter(None, r.in_flight), *self._transport.pending(r)])

    def _send(self, r: RoundState) -> bool:
        # a reader frees the buffer of this round when it has summed round t - 2: without its
        # notification the put would overwrite what it still reads
        transport = self._transport
        r.blocked_readers = [rank for rank in r.blocked_readers if not transport.is_free(r, rank)]
        if r.blocked_readers or r.sent == len(transport.chunks):
            return False
        chunk = transport.chunks[r.sent]
        if r.prepared == r.sent:
            # encoded here and not before: while it is, the chunk before is on the wire
            memory = self._buffers.prepare(r.number, chunk)
            r.prepared += 1
            r.in_flight = transport.send(r, chunk, memory)
        # a flush of what still flies would spin, on the core that others compute on
        if r.in_flight and not MPI.Request.Testall(r.in_flight):
            return False
        # flushed, then notified: a notification may overtake what isn't at the reader yet
        transport.notify(r, chunk)
        r.sent += 1
        return True

    def _receive(self, r: RoundState) -> bool:
        # from each source its next chunk; the sources needn't be equally far
        moved = False
        chunks = self._transport.chunks
        for rank, count in r.arrived.items():
            if count < len(chunks) and self._transport.arrived(r, rank, chunks[count]):
                r.arrived[rank] += 1
                moved = True
        return moved

    def _add(self, r: RoundState) -> bool:
        # one at a time, so that between two the next chunk can be sent; the sum is written over an
        # inbox buffer, and the own chunk must have been encoded, so all of them must be there
        if r.added == min([r.prepared, *r.arrived.values()]):
            return False
        if not r.sum_in_main:
            received = [self._transport.received(r, k) for k in range(len(r.plan.remote_sources))]
            self._buffers.add(r.plan.weights, received, self._transport.chunks[r.added])
        r.added += 1
        return True

    def _awaited(self, r: RoundState) -> Sequence[int]:
        """Return the ranks without a free buffer, else those whose chunks are missing."""
        many = len(self._transport.chunks)
        missing = [source for source, count in r.arrived.items() if count < many]
        return r.blocked_readers or missing or [rank for rank, _ in r.plan.targets]

    def _awaited_ranks(self, r: RoundState) -> list[int]:
        return sorted(world_ranks(self._transport.comm, self._awaited(r)))

    def _late(self, r: RoundState) -> str:
        return self._transport.describe_late(r, self._awaited(r))
