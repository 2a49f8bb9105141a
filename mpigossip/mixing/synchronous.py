"""Synchronous mixer between MPI ranks: each round waits for the messages of the neighbours."""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.captures import settle_before_captures
from mpigossip.cluster.collectives import round_up_to_pages
from mpigossip.cluster.cores import pick_communication_core
from mpigossip.cluster.process import check_process
from mpigossip.cluster.world import World
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout
from mpigossip.mixing.exact_average import RankMixer
from mpigossip.mixing.exchanges import (
    AverageInPlace,
    AverageSent,
    Exchange,
    Local,
    Mixed,
    Pair,
    ReadInPlace,
    Sent,
)
from mpigossip.mixing.host_memory import HostBuffers, SharedOutboxes, host_buffers, share_memory
from mpigossip.mixing.notifications import wait_all
from mpigossip.mixing.pipeline import Pipeline
from mpigossip.mixing.plan import (
    SMALLEST,
    Near,
    RoundPlan,
    RoundState,
    chunk_size,
    chunks,
    inbox_buffers,
    ranks_by_host,
    sums_in_inbox,
)
from mpigossip.mixing.progress_thread import ProgressThread
from mpigossip.mixing.transports import Transport
from mpigossip.mixing.transports.messages import Messages
from mpigossip.mixing.transports.windows import Windows

INLINE_BYTES = 1 << 14
"""Largest message, in bytes, that the main thread exchanges although there is a progress thread,
because waking the thread would take longer."""
CACHED_PLANS = 128
"""Number of round plans that are kept in memory, because computing the neighbours of a round from
the graph takes longer than sending a small message."""
PROBE_TIMEOUT = "measuring the network: a neighbour doesn't answer"
STAGING_BYTES = 1 << 24
"""Size, in bytes, of the message chunks if the messages of GPUs are sent from host memory: each
chunk is copied from the GPU, sent, and copied to the GPU of the receiver."""


class Synchronous(RankMixer):
    """Mixer of one rank that waits for the messages of the same round; rank i is node i.

    In round t, the rank publishes its outbox and receives the messages of its in-neighbours. It
    then computes the weighted sum ``mixed_i = Σ_j W(t)[i, j] · sent_j`` over its own message and
    theirs, in the graph's order. If W(t) averages over all nodes, the round is an exact average, as
    GLOBAL exchanges are.

    A message takes one of two ways. If the slots are CPUs and ``same_host`` is "read", ranks on one
    host read each other's outboxes in shared memory, without a copy. All other messages, and
    averages over several hosts, go through one transport: MPI windows, MPI messages or NCCL.
    Usually the progress thread sends them in chunks, and sums the chunks that have arrived while
    the main thread computes. The main thread does this for messages up to `INLINE_BYTES`, and it
    sums if messages are read in place (see the table in `exchanges`). Both ways end in the same
    weighted sum, so the result is bitwise identical to the result of
    :class:`~mpigossip.mixing.simulated.Simulated`.
    """

    def __init__(
        self,
        graph,
        layout: MessageLayout,
        world: World,
        *,
        same_host="read",
        exchange="auto",
        timeout_s=300.0,
        on_devices: bool | None = None,
    ):
        """Open shared memory, transport and progress thread; collective over ``world``.

        :param graph: graph of ``world.size`` nodes
        :param layout: layout of a node's message
        :param world: world whose ranks are the nodes
        :param same_host: "read": read neighbours on the same host in place; "put": send to them
        :param exchange: transport of GPU memory, as `node.exchange` of a job
        :param timeout_s: seconds that each wait for other ranks may take
        :param on_devices: keep messages on the slots' devices; None: if the layout names a GPU.
            Tests pass True to run the GPU code on CPUs
        :raises TransportUnavailable: on all ranks, if the transport named by ``exchange`` can't be
            used
        :raises ValueError: if the graph or the layout does not fit (:class:`RankMixer`)
        """
        super().__init__(graph, layout, world, timeout_s)
        if on_devices is None:
            on_devices = bool(set(layout.devices) - {"cpu"})
        self._shared: SharedOutboxes | None = None
        if same_host == "read" and not on_devices:
            self._shared = share_memory(self._comm, layout.nbytes, timeout_s)
        local_ranks = frozenset(self._shared.local_index) if self._shared else frozenset[int]()
        self._near: Near = ranks_by_host(self._comm.allgather(min(local_ranks, default=-1)))
        self._plan = lru_cache(CACHED_PLANS)(
            partial(RoundPlan.of, graph, layout, self.rank, near=self._near, halves=not on_devices)
        )
        self._period = graph.period
        self._transport: Transport | None = None
        self._buffers: Any
        self.routes: dict[int, str] = {}
        """For slots on GPUs: the transport to each other rank, and the reason for its choice."""
        buffers = inbox_buffers(graph, self.rank, self._near)
        if on_devices:
            self._open_on_devices(exchange, buffers, world)
        else:
            if len(local_ranks) < self.n:
                self._transport = self._open_on_host(buffers, world)
            self._buffers = host_buffers(layout, self.rank, self.n, self._shared, self._transport)
        self._full_message = chunks(layout, float("inf"))[0]
        self._open_thread(world)
        # Number t of the graph's round of this mixer's first GOSSIP exchange; None: none yet.
        self._first: int | None = None
        self._exchange: Exchange | None = None
        # Index of the last GOSSIP round that ended, counted from 0 since the mixer was opened.
        self._last_index: int | None = None
        if set(layout.devices) - {"cpu"}:
            settle_before_captures(self)

    def _open_on_host(self, buffers: int, world: World) -> Transport:
        """Open windows in host memory, with message chunks that fit the bandwidth; collective.

        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param world: world whose ranks are the nodes; not used here
        """
        layout = self.layout
        outbox = not (self._shared and layout.wire.exact)
        windows = Windows(self._comm, layout, buffers, self._timeout_s, outbox=outbox)
        rate = measured_rate(self._comm, layout.sent_bytes, self._timeout_s)
        windows.set_chunk_size(chunk_size(layout.sent_bytes, rate) / layout.slots)
        return windows

    def _open_on_devices(self, exchange: str, buffers: int, world: World) -> None:
        """Open the requested transport between GPUs, or for "auto" the fastest one that works.

        The call is collective.

        :param exchange: name of the transport, or "auto", as in `node.exchange`
        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param world: world whose ranks are the nodes
        :raises TransportUnavailable: on all ranks, if the requested transport can't be used
        """
        from mpigossip.mixing.transports import probe

        def on_host(buffers: int) -> Transport:
            transport = self._open_on_host(buffers, world)
            transport.set_chunk_size(STAGING_BYTES)
            return transport

        opened = probe.open_transport(exchange, self._comm, self.layout, buffers, world, on_host)
        self._transport = opened.transport
        self._buffers = opened.buffers
        self.routes = {j: opened.text for j in range(self.n) if j != self.rank}

    def _open_thread(self, world: World) -> None:
        """Start the progress thread, unless all neighbours are read in place.

        Only if there is a transport, this also sets ``_pipeline``, which runs the rounds of the
        transport, and ``_inline``, which is True if the main thread runs them: the messages are
        small, or there is no thread. :meth:`_exchange_of` uses the two only if it has found
        messages that go through the transport.
        """
        self._thread: ProgressThread | None = None
        transport = self._transport
        layout = self.layout
        if transport is None:
            return
        poll = len(set(world.hosts)) > 1
        computing = torch.get_num_threads() * layout.slots
        cores = (
            pick_communication_core(transport.comm, computing, world.node_position)
            if poll
            else frozenset()
        )
        self._thread = ProgressThread(
            transport.comm,
            timeout_s=self._timeout_s,
            threaded=not world.survives,
            poll=poll,
            cores=cores,
            device=layout.devices[0] if layout.devices else "cpu",
        )
        on_host = isinstance(self._buffers, HostBuffers)
        self._inline = not self._thread.threaded or (on_host and layout.sent_bytes <= INLINE_BYTES)
        self._pipeline = Pipeline(transport, self._buffers, self._thread)

    @staticmethod
    def estimate_memory(
        graph,
        layout: MessageLayout,
        node: int,
        near: Near = (),
        averages: bool = True,
        halves: int = 2,
    ) -> dict[str, int]:
        """Return the bytes that a node's messages will occupy, by purpose; no mixer is opened.

        The purposes are "outbox" (the message to send), "result" (the weighted sum), "encoded" (the
        message in the format of a lossy wire) and "inbox" (the buffers of received messages).
        On CPUs without a lossy wire and without neighbours on the same host, the weighted sum is
        written over an inbox buffer, so that only global averages and rounds without an
        in-neighbour need memory for a result. For GPUs, "host" is the host memory that the
        transport "host" needs in addition.

        :param graph: graph of the nodes
        :param layout: layout of a node's message
        :param node: number of the node
        :param near: for each rank, the set of ranks whose memory it reads in place, including
            itself; empty: no rank reads the memory of another
        :param averages: whether GLOBAL exchanges may follow
        :param halves: number of inbox buffers for each in-neighbour
        """
        lossy = not layout.wire.exact
        gpu = bool(set(layout.devices) - {"cpu"})
        shared = bool(near and near[node])
        sends = not near or len(near[node]) < graph.n
        area = round_up_to_pages(layout.nbytes) if shared else layout.nbytes
        averages = averages or not sums_in_inbox(graph, node)
        separate = shared or averages or lossy
        inbox = sends * layout.sent_bytes * inbox_buffers(graph, node, near)
        sizes = {
            "outbox": area,
            "result": area * (separate or gpu),
            "encoded": layout.sent_bytes * (sends and lossy),
            "inbox": halves * inbox,
        }
        # The result in host memory is pinned when the buffers open, even if no average uses it.
        staged = 2 * layout.nbytes + sizes["encoded"] + inbox
        return sizes | ({"host": staged} if gpu else {})

    def memory(self, averages: bool = True) -> dict[str, int]:
        halves = self._transport.halves if self._transport else 0
        arguments = self.graph, self.layout, self.rank, self._near, averages
        return self.estimate_memory(*arguments, halves=halves)

    @property
    def exchange_seconds(self) -> float:
        return self._thread.busy if self._thread else 0.0

    @property
    def wait_seconds(self) -> float:
        others = [self._shared.waited] if self._shared else []
        others += [self._transport.notifications.waited] if self._transport else []
        return self._waited + sum(others)

    # -- a round: outbox, start, finish ------------------------------------------------------

    def outbox(self, t: int) -> MessageArrays:
        """End the previous round, and return the outbox, which no out-neighbour reads any more."""
        check_process()
        self._end_round()
        return self._buffers.out

    def check_later(
        self,
        kind: ExchangeKind,
        t: int,
        segment: int,
        totals: torch.Tensor,
        check: Callable[[torch.Tensor], None],
    ) -> bool:
        # An average may begin in the main thread. A lossy wire overwrites the outbox, so that a
        # later report would show rounded values.
        if not (totals.is_cuda and self._thread and self._thread.threaded):
            return False
        plan = self._plan_of(kind, t)
        if plan.average or not plan.targets or not self.layout.wire.exact:
            return False
        self._buffers.check_later(segment, totals, check)
        return True

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        if kind is ExchangeKind.GOSSIP and self._first is None:
            self._first = t
        plan = self._plan_of(kind, t)
        # t counts rounds of the graph. ``number`` is the seed of a lossy wire. The last argument of
        # `RoundState` counts rounds since this mixer has opened; notifications contain it.
        number = t if exchange is None else exchange
        r = RoundState(plan, t, number, t - (self._first or 0))
        self._exchange = self._exchange_of(r)
        self.bytes_sent[0] += plan.nbytes
        if kind is not ExchangeKind.LOCAL:
            self._buffers.begin(number, plan.average)
        self._exchange.begin()

    def skip(self, t: int) -> None:
        check_process()
        self._end_round()
        # Before the first round, all inbox buffers are free without a notification.
        if self._transport is None or self._first is None:
            return
        plan = self._plan_of(ExchangeKind.GOSSIP, t)
        r = RoundState(plan, t, t, t - self._first)
        self._transport.skip(r, self._plan_of(ExchangeKind.GOSSIP, t + 2))
        self._last_index = r.index

    def settle(self) -> None:
        """Wait until the progress thread has run the round in flight; `finish` is still required.

        A capture of a CUDA graph by the user's program calls this, see `cluster.captures`.
        """
        exchange = self._exchange
        if exchange is not None and exchange.round.future and not exchange.is_finished:
            self._waited += self._pipeline.wait(exchange.round)

    def _plan_of(self, kind: ExchangeKind, t: int) -> RoundPlan:
        return self._plan(kind, t % self._period if self._period else t)

    def _exchange_of(self, r: RoundState) -> Exchange:
        """Return the exchange of a round, by its plan and by what is open on this rank."""
        plan = r.plan
        buffers = self._buffers
        shared = self._shared
        if plan.kind is ExchangeKind.LOCAL:
            return Local(r, buffers)
        if plan.average and self._transport:
            return AverageSent(r, buffers, self._pipeline)
        if plan.average:
            return AverageInPlace(r, buffers, shared, self.layout)
        if shared is None:
            return Sent(r, buffers, self._pipeline, inline=self._inline)
        if plan.partner is not None:
            return Pair(r, buffers, shared, self._full_message, self.layout)
        read = ReadInPlace(r, buffers, shared, self._full_message)
        if not (plan.targets or plan.remote_sources):
            return read
        # the pipeline can sum only if all messages come by the transport
        sums = 0 < len(plan.remote_sources) == len(plan.sources)
        sent = Sent(r, buffers, self._pipeline, inline=self._inline, sums=sums)
        return Mixed(read, sent, self._transport)

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        exchange = self._exchange
        exchange.is_finished = True
        self._buffers.record_reader()
        result = exchange.finish(into)
        self._waited += exchange.waited
        return self._buffers.out, result

    def means(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        transport = self._transport
        thread = self._thread
        on_device = transport is not None and transport.on_device
        # Without the thread, a round in flight could not be completed first.
        ready = on_device and thread is not None and thread.threaded
        if not ready or self.n == 1 or len(shards) != self.layout.slots:
            return super().means(shards)
        check_process()
        self.settle()  # Only one thread may use the transport.
        return self._buffers.means([shard[0] for shard in shards], transport)

    def _end_round(self) -> None:
        """Wait until the last round's message has been read; free the inbox buffers of that round.

        With the transport `Windows`, the inbox has two buffers for each in-neighbour, which rounds
        use in turn. The buffers of round t are therefore written again in round t + 2. This method
        notifies the ranks that send to this rank in round t + 2; they may be other ranks than in
        round t. The other transports have one buffer and send no notification, so that their
        ``release`` ignores the plan of round t + 2. The main thread calls this method, because
        waking the idle progress thread would take longer.
        """
        exchange = self._exchange
        self._exchange = None
        if exchange is None:
            return
        exchange.release()
        r = exchange.round
        if r.plan.kind is not ExchangeKind.GOSSIP:
            return
        if self._transport:
            self._transport.release(r, self._plan_of(ExchangeKind.GOSSIP, r.t + 2))
        self._last_index = r.index

    def close(self) -> None:
        if self._buffers is None:
            return
        check_process()
        if self._exchange and not self._exchange.is_finished:
            self.finish()
        self._end_round()
        self._buffers.close()
        self._buffers = None
        if self._thread:
            self._pipeline = None
            self._thread.close()
        if self._transport:
            self._transport.close(self._unused_rounds())
        if self._shared:
            self._shared.close()
        self._comm.Free()

    def _unused_rounds(self) -> list[tuple[int, RoundPlan]]:
        """Return index and plan of the rounds whose buffers were freed but that will not be run.

        Only the transport `Windows` uses them. With it, the end of round ``index`` frees the
        buffers of round ``index + 2``. After the last round, these are the rounds ``last + 1`` and
        ``last + 2``. Out-neighbours have sent notifications for them, which have to be received
        before the transport is closed. Nothing frees the buffers of rounds 0 and 1, because they
        are free from the beginning.
        """
        last = self._last_index
        indexes = () if last is None else range(max(2, last + 1), last + 3)
        first = self._first or 0
        return [(index, self._plan_of(ExchangeKind.GOSSIP, first + index)) for index in indexes]


class FaultTolerant(Synchronous):
    """Synchronous mixer for runs that survive rank failures.

    It uses MPI messages only. A request can be abandoned, whereas a window that was opened with a
    failed rank can be neither flushed nor freed.
    """

    estimate_memory = staticmethod(partial(Synchronous.estimate_memory, halves=1))

    def __init__(
        self, graph, layout: MessageLayout, world: World, *, timeout_s=300.0, on_devices=None
    ):
        """Open the transport; collective. Messages of GPUs go through host memory.

        :class:`Synchronous` describes the parameters.
        """
        super().__init__(
            graph,
            layout,
            world,
            same_host="put",
            exchange="host",
            timeout_s=timeout_s,
            on_devices=on_devices,
        )

    def _open_on_host(self, buffers: int, world: World) -> Transport:
        transport = Messages(self._comm, self.layout, buffers, self._timeout_s, hosts=world.hosts)
        # The transport has duplicated the communicator for its messages. Replace the duplicate by
        # the mixer's communicator, which is revoked after a rank failure: this ends all waits, also
        # those for live ranks.
        transport.comm = self._comm
        return transport


def measured_rate(comm: MPI.Comm, nbytes: int, timeout_s: float) -> float:
    """Measure the bandwidth of the network in bytes per second; collective.

    Each rank sends `SMALLEST` bytes to the next rank. The result is the bandwidth of the slowest
    rank, and all ranks return it. If a message of ``nbytes`` bytes fits into one chunk, the chunk
    size does not depend on the bandwidth: it is not measured, and the result is infinite.

    :param comm: communicator of the nodes
    :param nbytes: size of a message in bytes
    :param timeout_s: time limit of each wait, in seconds
    :raises WaitTimeoutError: if a rank does not answer within this time
    """
    if comm.size == 1 or nbytes <= SMALLEST:
        return float("inf")
    out = np.zeros(SMALLEST, np.uint8)
    into = np.empty(SMALLEST, np.uint8)
    for _ in range(2):  # the first repetition opens the connections
        comm.Barrier()
        began = time.perf_counter()
        source = (comm.rank - 1) % comm.size
        to = (comm.rank + 1) % comm.size
        pending = {(source, 0): comm.Irecv(into, source), (to, 1): comm.Isend(out, to)}
        wait_all(pending, timeout_s, lambda _: PROBE_TIMEOUT, comm=comm)
        slowest = comm.allreduce(time.perf_counter() - began, MPI.MAX)
    return SMALLEST / slowest
