"""Exchanges of a rank in a round: one class for each combination of transfer and result.

=================== ============================= ==============================================
class               messages                      result
=================== ============================= ==============================================
`Local`             none                          own message
`ReadInPlace`       outboxes read on this host    sum, computed by the main thread
`Pair`              outboxes read on this host    sum, of which each of two ranks computes half
`Sent`              sent by the transport         sum, computed chunk by chunk by the pipeline
`Mixed`             both                          sum, usually computed by the main thread
`AverageInPlace`    outboxes read on this host    average, of which each rank computes one chunk
`AverageSent`       sent by the transport         average, computed by all ranks together
=================== ============================= ==============================================

`Synchronous` chooses the class of each round.
"""

from collections.abc import Sequence

import torch

from mpigossip.mixing.base import MessageArrays, MessageLayout
from mpigossip.mixing.combine import Source
from mpigossip.mixing.host_memory import HostBuffers, SharedOutboxes
from mpigossip.mixing.pipeline import Buffers, Pipeline
from mpigossip.mixing.plan import MessageChunk, RoundState
from mpigossip.mixing.transports import Transport


class Exchange:
    """Base class of the exchanges of a rank.

    The caller fills the outbox before it calls :meth:`begin`. It may compute between :meth:`begin`
    and :meth:`finish`, and must not change the outbox before :meth:`release` returns.
    """

    is_finished = False
    """True after the mixer has called :meth:`finish`."""
    waited = 0.0
    """Seconds for which :meth:`finish` waited for the transport."""

    def __init__(self, r: RoundState, buffers: Buffers):
        """Prepare the exchange of a round.

        :param r: plan and state of the round
        :param buffers: outbox and result of this rank
        """
        self.round = r
        self._buffers = buffers

    def begin(self) -> None:
        """Publish or send the outbox without waiting for other ranks."""

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        """Wait for the messages of other ranks and return the result.

        :param into: array to which the sum is written if the main thread computes it, and the
            messages have one vector and one slot; None: memory of the buffers
        """
        raise NotImplementedError

    def release(self) -> None:
        """Wait until no other rank of this host reads the outbox or the result of this rank."""


class Local(Exchange):
    """Exchange with no other rank: the result is this rank's message."""

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        return self._buffers.out


class ReadInPlace(Exchange):
    """Exchange between ranks of one host, which read each other's outboxes."""

    _buffers: HostBuffers

    def __init__(
        self, r: RoundState, buffers: HostBuffers, shared: SharedOutboxes, chunk: MessageChunk
    ):
        """Prepare the exchange of a round; :class:`Exchange` describes ``r`` and ``buffers``.

        :param shared: outboxes of the ranks of this host
        :param chunk: chunk that contains the whole message
        """
        super().__init__(r, buffers)
        self._shared = shared
        self._chunk = chunk

    def begin(self) -> None:
        self._shared.publish(self.round.plan.readers, self.round.t)

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        self.wait_ready()
        self.sum([self.message(j) for j in self.round.plan.sources], into)
        self.notify_read()
        return self._buffers.result

    def wait_ready(self) -> None:
        """Wait until the outboxes of the in-neighbours on this host are complete."""
        self._shared.wait_ready(self.round.plan.sources, self.round.t)

    def is_on_host(self, rank: int) -> bool:
        """Return whether a rank is on this host, so that its outbox can be read in place."""
        return rank in self._shared.local_index

    def message(self, rank: int) -> MessageArrays:
        """Return the outbox of a rank on this host."""
        return self._buffers.segments(self._shared.outbox(rank))

    def sum(self, received: Sequence[Sequence[Source]], into: torch.Tensor | None) -> None:
        """Compute the weighted sum of the messages of this rank and its in-neighbours.

        :param received: messages of the in-neighbours, in the order of the plan's ``sources``
        :param into: array for the sum; None: memory of the buffers
        """
        target = None if into is None else [(into,)]
        self._buffers.add(self.round.plan.weights, received, self._chunk, target)

    def notify_read(self) -> None:
        """Notify the in-neighbours on this host that this rank has read their outboxes."""
        self._shared.release(self.round.plan.sources, self.round.t)

    def release(self) -> None:
        self._shared.wait_read(self.round.plan.readers, self.round.t)


class Pair(ReadInPlace):
    """Exchange between two ranks of one host that average only with each other.

    Each rank computes one half of a result that both read. If the caller passes an array ``into``
    to :meth:`finish`, each rank computes the whole sum instead, because the other rank cannot write
    to that array.
    """

    _is_halved = False

    def __init__(
        self,
        r: RoundState,
        buffers: HostBuffers,
        shared: SharedOutboxes,
        chunk: MessageChunk,
        layout: MessageLayout,
    ):
        """Prepare the exchange of a round whose plan has a partner.

        :class:`Exchange` describes ``r`` and ``buffers``.

        :param shared: outboxes of the ranks of this host
        :param chunk: chunk that contains the whole message
        :param layout: layout of the message
        """
        super().__init__(r, buffers, shared, chunk)
        self._layout = layout

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        if into is not None:
            return super().finish(into)
        plan = self.round.plan
        self._is_halved = True
        # This waits for the partner's outbox, then for the partner's half of the result.
        result = self._shared.average_pair(
            self._layout.parts, plan.weights[0], plan.partner, self.round.t
        )
        return self._buffers.segments(result)

    def release(self) -> None:
        if self._is_halved:
            self._shared.release_pair(self.round.plan.partner, self.round.t)
        else:
            super().release()


class Sent(Exchange):
    """Exchange by the transport, which sends a copy of the message to each out-neighbour.

    Usually, the progress thread sends and receives. If the exchange is inline, the main thread does
    so: in :meth:`begin` as far as is possible without waiting, and the rest in :meth:`finish`.
    """

    def __init__(
        self,
        r: RoundState,
        buffers: Buffers,
        pipeline: Pipeline,
        *,
        inline: bool,
        sums: bool = True,
    ):
        """Prepare the exchange of a round; :class:`Exchange` describes ``r`` and ``buffers``.

        :param pipeline: pipeline of the transport
        :param inline: True: the main thread sends and receives
        :param sums: True: the pipeline also computes the weighted sum; False: the caller does
        """
        super().__init__(r, buffers)
        self._pipeline = pipeline
        self._inline = inline
        self.sums = sums

    def begin(self) -> None:
        self._pipeline.begin(self.round, inline=self._inline, sums=self.sums)

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        self.waited = self._pipeline.wait(self.round)
        return self._buffers.result


class Mixed(Exchange):
    """Exchange that reads neighbours on this host in place and uses the transport for all others.

    If ``sent.sums`` is False, the main thread computes the sum after all messages have arrived, in
    the graph's order. Otherwise, all in-neighbours are on other hosts, and only out-neighbours,
    which read the outbox of this rank, are on this host.
    """

    def __init__(self, read: ReadInPlace, sent: Sent, transport: Transport):
        """Compose two exchanges of the same round.

        :param read: exchange with the neighbours on this host
        :param sent: exchange with all other neighbours
        :param transport: transport of ``sent``, which holds the messages that it received
        """
        super().__init__(read.round, read._buffers)
        self._read = read
        self._sent = sent
        self._transport = transport

    def begin(self) -> None:
        self._read.begin()
        self._sent.begin()

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        self._read.wait_ready()
        self._sent.finish()
        self.waited = self._sent.waited
        if not self._sent.sums:
            self._read.sum([self._message(j) for j in self.round.plan.sources], into)
        self._read.notify_read()
        return self._buffers.result

    def _message(self, rank: int) -> Sequence[Source]:
        if self._read.is_on_host(rank):
            return self._read.message(rank)
        return self._transport.received(self.round, self.round.plan.remote_sources.index(rank))

    def release(self) -> None:
        self._read.release()


class AverageInPlace(Exchange):
    """Average over all ranks, which are on one host.

    Each rank averages one chunk of the message and writes it to the results of all ranks.
    """

    _buffers: HostBuffers

    def __init__(
        self, r: RoundState, buffers: HostBuffers, shared: SharedOutboxes, layout: MessageLayout
    ):
        """Prepare the average of a round; :class:`Exchange` describes ``r`` and ``buffers``.

        :param shared: outboxes and results of the ranks of this host
        :param layout: layout of the message
        """
        super().__init__(r, buffers)
        self._shared = shared
        self._layout = layout

    def begin(self) -> None:
        self._shared.publish_to_all(self.round.t)

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        self._shared.average(self._layout.parts, self.round.plan.weights, self.round.t)
        return self._buffers.segments(self._shared.result)


class AverageSent(Exchange):
    """Average over all ranks by the transport, on one host or several."""

    def __init__(self, r: RoundState, buffers: Buffers, pipeline: Pipeline):
        """Prepare the average of a round; :class:`Exchange` describes ``r`` and ``buffers``.

        :param pipeline: pipeline of the transport
        """
        super().__init__(r, buffers)
        self._pipeline = pipeline

    def begin(self) -> None:
        self._pipeline.begin_average(self.round)

    def finish(self, into: torch.Tensor | None = None) -> MessageArrays:
        self.waited = self._pipeline.wait_average(self.round)
        return self._buffers.result
