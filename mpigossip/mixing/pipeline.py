"""Execution of a round of exchanges chunk by chunk: encode, send, notify, receive, sum.

While one chunk is being sent, the thread that runs the round sums the chunks that have been
received. The network is therefore hardly ever idle, and little work remains when the last chunk
arrives.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, world_ranks
from mpigossip.config.errors import NonFiniteError
from mpigossip.mixing.base import MessageArrays
from mpigossip.mixing.combine import Source
from mpigossip.mixing.notifications import keep_alive
from mpigossip.mixing.plan import MessageChunk, RoundState
from mpigossip.mixing.progress_thread import ProgressThread
from mpigossip.mixing.transports import Transport

REMEDY = (
    "models were exchanged by {} of GPU memory: if MPI does not support that here, set "
    'node.exchange = "host"'
)
"""Note that :meth:`Pipeline.wait` adds to the error of a round in which MPI sends GPU memory;
``{}`` is replaced by the name of the transport."""


class Buffers(Protocol):
    """Messages of a rank in the memory of its slots, and their sums, on the host or on GPUs.

    On GPUs, a method launches its work on streams and returns at once, unless its docstring says
    that it waits. :meth:`complete` waits for all work that was launched.
    """

    out: MessageArrays
    """Arrays of the outbox."""
    sent: list[torch.Tensor]
    """For each slot, the bytes to send (uint8), which the slot's stream writes."""

    def begin(self, number: int, average: bool = False) -> None:
        """Begin an exchange: encode the outbox, unless :meth:`prepare` encodes it chunk by chunk.

        All work that is launched later runs after the work that fills the outbox.

        :param number: number of the exchange, which seeds the random rounding
        :param average: whether the exchange is an average over all nodes
        """

    def stage(self, chunk: MessageChunk) -> None:
        """Begin to copy a chunk from the GPUs to host memory, if the transport sends it from there.

        The pipeline calls this while the previous chunk is in flight.
        """

    def prepare(self, number: int, chunk: MessageChunk) -> list[torch.Tensor]:
        """Encode a chunk if necessary, and wait until it can be sent.

        :return: for each slot, the message that contains the chunk, uint8
        """

    def add(
        self,
        weights: Sequence[float],
        received: Sequence[Sequence[Source]],
        chunk: MessageChunk,
        into: MessageArrays | None = None,
    ) -> None:
        """Compute the weighted sum of this rank's message and the received ones, for one chunk.

        :param weights: weight of this rank's message, then the weights of the received ones
        :param received: for each in-neighbour, its message for each slot
        :param chunk: chunk to sum
        :param into: arrays to which the sum is written; None: memory of these buffers
        """

    @property
    def result(self) -> MessageArrays:
        """Arrays of the last sum or average."""

    def average(self, transport: Transport, weights: Sequence[float]) -> float:
        """Compute the average over all nodes as the result; return the seconds waited.

        :param transport: transport that sends the messages
        :param weights: weight of each node
        """

    def record_reader(self) -> None:
        """Record the current CUDA stream of each slot, on which the caller will read the result.

        The next round overwrites the result only after all work of this stream is done.
        """

    def complete(self) -> None:
        """Wait until all launched work is done."""

    def close(self) -> None:
        """Release all memory, which must not be used afterwards."""


class Pipeline:
    """Executor of rounds that use a transport.

    The progress thread runs a round. The main thread runs it instead if there is no progress
    thread, or if the message is so small that waking a thread would take longer than sending.
    """

    def __init__(self, transport: Transport, buffers: Buffers, thread: ProgressThread):
        """Connect the parts that a round uses.

        :param transport: transport between the ranks
        :param buffers: messages of this rank and their sum
        :param thread: progress thread; a round in the main thread only uses its :meth:`rest`
        """
        self._transport = transport
        self._buffers = buffers
        self._thread = thread
        self.threaded = thread.threaded

    def begin(self, r: RoundState, *, inline: bool, sums: bool = True) -> None:
        """Begin to receive and to send the messages of a round, without waiting.

        :param r: state of the round
        :param inline: True: run the round in the calling thread, now as far as possible without
            waiting, and the rest in :meth:`wait`; False: run it in the progress thread
        :param sums: True: sum the chunks that have arrived; False: only receive them
        """
        r.sums = sums
        r.arrived = dict.fromkeys(r.plan.remote_sources, 0)
        self._transport.notifications.first = r.t - r.index
        r.blocked_readers = [rank for rank, _ in r.plan.targets]
        self._transport.begin(r, self._buffers.sent)
        if inline:
            self._call_and_keep(self._advance, r)
        else:
            r.future = self._thread.submit(partial(self.run, r))

    def run(self, r: RoundState) -> None:
        """Send, receive and sum all chunks of a round.

        This waits for free inbox buffers of the out-neighbours and for chunks of the in-neighbours.

        :raises WaitTimeoutError: if no chunk is sent, received or summed within the time limit; the
            message names a rank
        """
        self._call_and_keep(self._run, r)

    def _run(self, r: RoundState) -> None:
        advance = partial(self._advance, r)
        late = partial(self._describe_late, r)
        pause = partial(self._pause, r)
        awaited = partial(self._awaited_ranks, r)
        while not self._is_finished(r):
            Deadline(self._transport.timeout_s).wait(advance, late, pause, awaited)
        self._buffers.complete()

    def _call_and_keep(self, work: Callable[[RoundState], Any], r: RoundState) -> None:
        """Call ``work(r)``; if it fails, keep alive the memory to which MPI may still write."""
        try:
            work(r)
        except BaseException:
            keep_alive.append(self._transport)
            raise

    def wait(self, r: RoundState) -> float:
        """Wait until the round has been run; return the seconds waited.

        If the round fails and MPI sends GPU memory in it, the error gets the note `REMEDY`, unless
        it is a NonFiniteError.

        :raises WaitTimeoutError: if the round reaches a time limit
        """
        began = time.perf_counter()
        try:
            if r.future:
                return self._thread.wait(r.future, f"round {r.t}")
            self.run(r)
        except Exception as error:
            by_mpi = self._transport.on_device and not self._transport.in_main  # NCCL has a note
            if by_mpi and not isinstance(error, NonFiniteError):
                note = REMEDY.format(type(self._transport).__name__.lower())
                if note not in getattr(error, "__notes__", ()):  # later rounds raise it again
                    error.add_note(note)
            raise
        return time.perf_counter() - began

    def begin_average(self, r: RoundState) -> None:
        """Begin an average over all nodes.

        The progress thread computes it. If the transport has to start averages in the main thread
        (NCCL), this method starts it, and the progress thread only waits for its end. If there is
        no progress thread, nothing happens before :meth:`wait_average`.
        """
        average = partial(self._buffers.average, self._transport, r.plan.weights)
        if self._transport.in_main:
            average()
            wait_for_swaps = partial(self._transport.wait_for_swaps, f"round {r.t}")
            r.future = self._thread.submit(wait_for_swaps)
        elif self.threaded:
            r.future = self._thread.submit(average)

    def wait_average(self, r: RoundState) -> float:
        """Wait until the result of the buffers is the average; return the seconds waited.

        :raises WaitTimeoutError: if a rank does not answer within the time limit
        """
        if r.future:
            waited = self.wait(r)
        else:
            waited = self._buffers.average(self._transport, r.plan.weights)
        self._buffers.complete()  # the thread has launched the last sum, without waiting for it
        return waited

    def _is_finished(self, r: RoundState) -> bool:
        count = len(self._transport.chunks)
        return r.sent == count and r.added == count

    def _advance(self, r: RoundState) -> bool:
        """Send, receive and sum as much as is possible without waiting.

        Return whether anything was done.
        """
        sent = self._send(r)
        received = self._receive(r)
        return self._add(r) or sent or received

    def _pause(self, r: RoundState) -> bool:
        return self._thread.rest([*filter(None, r.in_flight), *self._transport.pending(r)])

    def _send(self, r: RoundState) -> bool:
        # An out-neighbour frees the inbox buffer of this round after it has summed round t - 2.
        # Without this notification, the put could overwrite a message that is still being read.
        transport = self._transport
        r.blocked_readers = [rank for rank in r.blocked_readers if not transport.is_free(r, rank)]
        if r.blocked_readers or r.sent == len(transport.chunks):
            return False
        chunk = transport.chunks[r.sent]
        if r.prepared == r.sent:
            # prepare one chunk at a time, because it can be sent before the others are encoded
            memory = self._buffers.prepare(r.number, chunk)
            r.prepared += 1
            r.in_flight = transport.send(r, chunk, memory)
            if r.prepared < len(transport.chunks):
                self._buffers.stage(transport.chunks[r.prepared])
        # a flush of requests in flight would spin on a core that other threads compute on
        if r.in_flight and not MPI.Request.Testall(r.in_flight):
            return False
        # flush before the notification, which could otherwise overtake the chunk
        transport.notify(r, chunk)
        r.sent += 1
        return True

    def _receive(self, r: RoundState) -> bool:
        # Test for the next chunk of each in-neighbour, because some send faster than others.
        moved = False
        chunks = self._transport.chunks
        for rank, count in r.arrived.items():
            if count < len(chunks) and self._transport.arrived(r, rank, chunks[count]):
                r.arrived[rank] += 1
                moved = True
        return moved

    def _add(self, r: RoundState) -> bool:
        # Add one chunk per call, so that the next chunk can be sent in between. The sum is written
        # over an inbox buffer and uses the own encoded chunk, so all terms must be there.
        if r.added == min([r.prepared, *r.arrived.values()]):
            return False
        if r.sums:
            received = [self._transport.received(r, k) for k in range(len(r.plan.remote_sources))]
            self._buffers.add(r.plan.weights, received, self._transport.chunks[r.added])
        r.added += 1
        return True

    def _awaited(self, r: RoundState) -> Sequence[int]:
        """Return the ranks for which the round waits, as ranks of the transport's communicator.

        These are the out-neighbours without a free inbox buffer. If there are none, they are the
        in-neighbours whose chunks are missing, and otherwise all out-neighbours.
        """
        chunk_count = len(self._transport.chunks)
        missing = [source for source, count in r.arrived.items() if count < chunk_count]
        return r.blocked_readers or missing or [rank for rank, _ in r.plan.targets]

    def _awaited_ranks(self, r: RoundState) -> list[int]:
        return sorted(world_ranks(self._transport.comm, self._awaited(r)))

    def _describe_late(self, r: RoundState) -> str:
        return self._transport.describe_late(r, self._awaited(r))
