"""MPI one-sided windows between nodes, synchronous: rank i is node i.

Neighbours on the same host are read in place (shared.py), all others get pushes (push.py); who
they are in a round is planned (plan.py), and pushes travel in pieces (stream.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.cores import own_core
from mpigossip.cluster.world import World
from mpigossip.mixing.averages import OfRank, gather, swapped
from mpigossip.mixing.base import Kind, Layout, Segments
from mpigossip.mixing.combine import add_up
from mpigossip.mixing.courier import Courier
from mpigossip.mixing.plan import Exchange, Piece, Plans, cut, piece_size
from mpigossip.mixing.push import PushWindow
from mpigossip.mixing.shared import SharedHost, open_host, rounded
from mpigossip.mixing.stream import Leg, Stream, measured_rate
from mpigossip.mixing.wire import encode

INLINE = 1 << 14
"""Bytes of a message up to which no thread is woken for it: that would take longer than it."""


class Windows(OfRank):
    """The mixer of one rank (contract: :class:`mpigossip.mixing.base.Mixer`)."""

    halves = True
    """Whether pairs on one host average by halves."""

    def __init__(self, graph, layout: Layout, world: World, *, same_host="read", timeout_s=300.0):
        """Collective over ``world``; ``graph.n`` must be its size."""
        super().__init__(graph, layout, world, timeout_s)
        self._host = self._open_host(same_host)
        self._near = self._comm.allgather(frozenset(self._places_on_host))
        self._plans = Plans(graph, layout, self.rank, self._near, halves=self.halves)
        self._pieces: list[Piece] = []
        self._inline, self.blocks = False, tuple[slice, ...]()
        self._lossy = not layout.wire.exact
        self._push = self._open_push()
        poll = len(set(world.hosts)) > 1
        self._courier = self._open_courier(poll) if self._push else None
        self._open_pieces()
        self._message, self._codes = self._own_memory()
        self._views: dict[int, Segments] = {}
        self._out: Segments | None = self._segments(self._message)
        self._round: Exchange | None = None
        # the graph's clock: the first and the last round of kind GOSSIP that this mixer ran
        self._first: int | None = None
        self._last: int | None = None

    @staticmethod
    def holds(graph, layout: Layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: read in place, an outbox and a result; pushed, two inbox places a source.

        There the sum is formed in the inbox; a result is for averages. Over a lossy wire what is
        pushed, and an inbox place, is an encoded message; neighbours on the host read decoded ones.
        """
        plans, wire = Plans(graph, layout, node, near), layout.wire
        host, push = bool(near and near[node]), not near or len(near[node]) < graph.n
        area = rounded(layout.nbytes) if host else layout.nbytes
        apart = host or averages or not wire.exact or not plans.pushed_only
        return {
            "outbox": area,
            "result": area * apart,
            "encoded": layout.sent_bytes * (push and not wire.exact),
            "inbox": 2 * layout.sent_bytes * (plans.places if push else 0),
        }

    def _open_host(self, same_host: str) -> SharedHost | None:
        """Shared memory with the ranks of this host, unless all of them are to be pushed to."""
        host, self._places_on_host = None, dict[int, int]()
        if same_host == "read":
            found = open_host(self._comm, self.layout.nbytes, self._timeout_s)
            host, self._places_on_host = found
        return host

    def _open_push(self) -> Any:
        """The inbox window, unless every rank of the job is on this host and read in place."""
        if len(self._near[self.rank]) == self.n:
            return None
        own = self._host is None and not self._lossy
        sizes, places = [self.layout.sent_bytes], self._plans.places
        return PushWindow(self._comm, sizes, places, self._timeout_s, outbox=own)

    def _open_courier(self, poll: bool) -> Courier:
        """The communication thread; ``poll``: some of the pushes come from other hosts."""
        comm = self._push.signals.comm if self._push else self._comm
        computing = torch.get_num_threads() * len(self.layout.widths)
        cores = own_core(comm, computing, self._beside) if poll else frozenset()
        threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        return Courier(comm, threaded=threaded, poll=poll, timeout_s=self._timeout_s, cores=cores)

    def _open_pieces(self) -> None:
        """What is pushed at once: as the wire is found to be."""
        if self._push:
            rate = measured_rate(self._comm, self.layout.sent_bytes, self._timeout_s)
            self._cut(self._push, piece_size(self.layout.sent_bytes, rate))

    def _own_memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outbox, and what is pushed of it where that is something else."""
        layout, own = self.layout, self._host.own if self._host else None
        if isinstance(self._push, PushWindow) and self._push.outbox is not None:
            own = self._push.outbox
        if own is None:
            own = torch.empty(layout.nbytes, dtype=torch.uint8)
        coded = self._lossy and self._push
        return own, torch.zeros(layout.sent_bytes, dtype=torch.uint8) if coded else None

    def _cut(self, push: PushWindow, size: int) -> None:
        """Push in pieces of about so many bytes, the same on all ranks."""
        self._pieces = cut(self.layout, size)
        push.signals.count_in_pieces(len(self._pieces))
        self._inline = self.layout.sent_bytes <= INLINE or not self._courier.threaded
        # as all ranks have to send in the same order, no two of them may share a host
        if not any(self._near) and not self._inline and len(self.layout.widths) == 1:
            each = self._pieces[: len(self._pieces) // self.layout.vectors]
            self.blocks = tuple(piece.stretches[0][2] for piece in each if len(each) > 1)

    def _segments(self, message: torch.Tensor) -> Segments:
        """The layout's views of a message in memory that stays, made once."""
        place = message.data_ptr()
        if place not in self._views:
            self._views[place] = self.layout.views(message)
        return self._views[place]

    def _on_host(self, nodes) -> list[int]:
        """The places on this host of those of ``nodes`` that are read in place."""
        return [self._places_on_host[j] for j in nodes if j in self._places_on_host]

    @property
    def flown(self) -> float:
        """Seconds that the communication thread was busy so far; 0 where there is none."""
        return self._courier.busy if self._courier else 0.0

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other nodes so far."""
        return self._waited + (self._host.waited if self._host else 0.0)

    @cached_property
    def _result(self) -> torch.Tensor:
        """Where a sum goes that isn't formed in the inbox: one message, uint8."""
        own = self._host.result if self._host else None
        return torch.empty(self.layout.nbytes, dtype=torch.uint8) if own is None else own

    # -- a round: outbox, start (by blocks), finish ------------------------------------------

    def outbox(self, t: int) -> Segments:
        """Arrays (1, p) to fill whole; waits until the last round's readers are done."""
        self._leave_round()
        return self._out

    def start(self, kind: Kind, t: int, exchange: int | None = None) -> None:
        """Publish the outbox, quantized if the wire does so, and begin the exchange of round t."""
        self._open(kind, t, t if exchange is None else exchange)
        self._begin(self._round)

    def start_by_blocks(self, t: int, exchange: int, order: Sequence[int]) -> None:
        """Begin the GOSSIP exchange of round t, of an outbox that is still to be filled."""
        self._open(Kind.GOSSIP, t, exchange, tuple(order))

    def _open(self, kind: Kind, t: int, number: int, order: tuple[int, ...] = ()) -> None:
        if kind is Kind.GOSSIP and self._first is None:
            self._first = t
        self._round = self._plans.of(kind, t).at(t, number, order)
        self.bytes_sent[0] += self._round.nbytes

    def filled(self, block: int) -> None:
        """These columns of every vector are filled: they may be sent."""
        now = self._round
        now.empty.discard(block)
        # an idle thread costs less than one that waits for the first block; averages go whole
        if now.ticket is None and not (now.average and now.empty):
            self._begin(now)
        elif now.ticket:
            self._courier.wake()

    def _begin(self, now: Exchange) -> None:
        if now.average:
            self._start_global(now)
        elif now.kind is Kind.GOSSIP:
            self._start_gossip(now)

    def _encode(self, now: Exchange, piece: Piece | None = None) -> None:
        """Quantize the outbox, or a piece of it, if the wire does so."""
        if self._lossy:
            stretches = piece.stretches if piece else None
            encode(self.layout, self._out, self.rows, now.number, self._codes, stretches)

    def _start_gossip(self, now: Exchange) -> None:
        # readers on this host may begin to read: their tokens are awaited in `_leave_round`
        if self._host:
            self._encode(now)
            self._host.publish(self._on_host(now.readers), now.t)
        # pushes, and what others push here, go on in the courier; of a small message the main
        # thread sends now what has room, and does the rest in `finish`
        if self._push and (now.targets or now.far or not self._host):
            stream = self._stream(now)
            if self._inline:
                now.rest = stream.run
                if self._courier.threaded:  # else MPI can't be entered while it computes
                    stream.begin()
            else:
                now.ticket = self._courier.submit(stream.run)

    def _stream(self, now: Exchange) -> Stream:
        """What the courier does in this round: push, take in, and sum where all comes by pushes."""
        layout, count, far = self.layout, now.t - self._first, now.far
        sources, result = self._sources(now), self._segments(self._result_of(now))

        def prepare(piece: Piece) -> None:
            if not self._host:  # else it is encoded, as neighbours read it in place
                self._encode(now, piece)

        def add(piece: Piece) -> None:
            if far and len(far) == len(now.sources):
                add_up(layout, now.weights, sources, result, piece.stretches)

        message = self._codes if self._lossy else self._message
        pieces, blocks = self._pieces, len(self.blocks)
        if now.order:
            pieces = sorted(pieces, key=lambda piece: now.order.index(piece.number % blocks))

        def ready(piece: Piece) -> bool:
            return not now.empty or piece.number % blocks not in now.empty

        leg = Leg(self._push, [message], count, now.targets, far)
        return Stream([leg], pieces, self._timeout_s, self._courier.rest, prepare, add, ready)

    def _start_global(self, now: Exchange) -> None:
        self._encode(now)
        if self._push is None:
            self._host.publish(self._host.others, now.t)
        elif self._courier.threaded:
            now.ticket = self._courier.submit(self._average_by_messages)

    def _average_by_messages(self) -> float:
        """Seconds waited. The same bits either way: decoded values summed in rank order."""
        layout, comm = self.layout, self._push.signals.comm
        if not self._lossy or self.n * layout.sent_bytes >= 2 * layout.nbytes:
            return self._average_whole(comm, self._message, self._result)
        everyone = torch.empty(self.n, layout.sent_bytes, dtype=torch.uint8)
        waited = gather(comm, self._codes, everyone, partial(swapped, comm, self._timeout_s))
        own = self._segments(self._message)  # in host memory, also where the outbox is a GPU's
        sources = [own if rank == self.rank else everyone[rank] for rank in range(self.n)]
        out, weights = self._segments(self._result), [1 / self.n] * self.n
        add_up(layout, weights, sources, out, layout.stretches)
        return waited

    def finish(self) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed`` of the open round."""
        return self._finish(None)

    def finish_into(self, x: torch.Tensor) -> tuple[Segments, Segments]:
        """The same, ``mixed`` being ``x`` where neighbours' outboxes are summed now."""
        return self._finish(x)

    def _finish(self, into: torch.Tensor | None) -> tuple[Segments, Segments]:
        now = self._round
        now.finished = True
        for block in tuple(now.empty):
            self.filled(block)
        if now.kind is Kind.LOCAL:
            return self._out, self._out
        if now.average:
            self._finish_global(now)
            return self._out, self._segments(self._result)
        # a pair on this host: the partner's outbox, then its half of the one result
        if now.partner is not None and into is None:
            other, parts = self._places_on_host[now.partner], self.layout.parts
            shared = self._host.average_pair(parts, now.weights[0], other, now.t)
            return self._out, self._segments(shared)
        now.partner = None  # summed here alone: less to write than two halves and a copy
        # the sources on this host: their outboxes are whole
        if self._host:
            self._host.await_ready(self._on_host(now.sources), now.t)
        # the others: what they pushed is in, and the own pushes have room at the readers and are
        # out; where all came so, the sum is done too
        if now.ticket:
            self._wait_for(now.ticket)
        elif now.rest:
            # taken out first: a circle of references would be left to the collector
            began, (rest, now.rest) = time.perf_counter(), (now.rest, None)
            rest()
            self._waited += time.perf_counter() - began
        mixed = self._segments(self._result_of(now))
        if not now.sources or self._on_host(now.sources):
            sources = self._sources(now)
            mixed = mixed if into is None else [(into,)]
            add_up(self.layout, now.weights, sources, mixed, self.layout.stretches)
        if self._host:
            self._host.release(self._on_host(now.sources), now.t)
        return self._out, mixed

    def _sources(self, now: Exchange) -> list[Segments | torch.Tensor]:
        """Own outbox, shared outboxes and inbox places, in the graph's order."""
        found: list[Segments | torch.Tensor] = [self._out]
        count, place = now.t - (self._first or 0), 0
        for j in now.sources:
            if j in self._places_on_host:
                found.append(self._segments(self._host.outboxes[self._places_on_host[j]]))
            else:
                message = self._push.inbox(count, place)
                found.append(message if self._lossy else self._segments(message))
                place += 1
        return found

    def _result_of(self, now: Exchange) -> torch.Tensor:
        """Where the sum goes: the first inbox place, where all come in full from other hosts."""
        if self._host or self._lossy or not now.sources:
            return self._result
        return self._push.inbox(now.t - self._first, 0)

    def _finish_global(self, now: Exchange) -> None:
        if self._push is None:
            self._host.average(self.layout.parts, now.t)
        elif now.ticket:
            self._wait_for(now.ticket)
        else:
            self._waited += self._average_by_messages()

    def _wait_for(self, ticket: Future) -> None:
        self._waited += self._courier.wait(ticket, f"round {self._round.t}")

    def _leave_round(self) -> None:
        """Wait until the last round's readers are done; tell the writers what is free again.

        Here, as the courier has nothing to do now: to wake it takes longer.
        """
        now, self._round = self._round, None
        if now is None or now.kind is not Kind.GOSSIP:
            return
        # readers of this outbox on this host; those that were pushed to have their own copy
        if now.partner is not None:
            self._host.leave_pair(self._places_on_host[now.partner], now.t)
        elif self._host:
            self._host.await_done(self._on_host(now.readers), now.t)
        # the inbox half of this round is that of round t + 2: who writes then awaits this token
        coming = self._plans.of(Kind.GOSSIP, now.t + 2)
        if self._push and not coming.average:
            self._push.signals.free(coming.far, now.t + 2 - self._first)
        self._last = now.t

    def close(self) -> None:
        """Finish an open round, take in outstanding tokens, free the memory; collective."""
        if self._out is None:
            return
        if self._round and not self._round.finished:
            self.finish()
        self._leave_round()
        self._out, self._message, self._views = None, None, {}
        self.__dict__.pop("_result", None)
        if self._push:
            self._take_in_free_tokens()
        if self._courier:
            self._courier.close()
        if self._push:
            self._push.close()
        if self._host:
            self._host.close()
        self._comm.Free()

    def _take_in_free_tokens(self) -> None:
        """Receive the tokens that freed places for rounds that will not be run."""
        for t in () if self._last is None else (self._last + 1, self._last + 2):
            coming = self._plans.of(Kind.GOSSIP, t)
            if t - 2 >= self._first and not coming.average:
                readers = [rank for rank, _ in coming.targets]
                self._push.signals.take_in_free(readers, t - self._first)
