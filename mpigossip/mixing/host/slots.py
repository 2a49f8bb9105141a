"""A rank's slots in host memory: their message, and what a round does with it there.

Neighbours on the same host are summed by the thread that trains, as it reads their outboxes; all
others push, in the courier, which also sums where all comes so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property, partial

import torch

from mpigossip.mixing.averages import average_message, gather, swapped
from mpigossip.mixing.base import Layout, Segments
from mpigossip.mixing.combine import add_up
from mpigossip.mixing.host.push import PushWindow
from mpigossip.mixing.host.shared import rounded
from mpigossip.mixing.plan import Exchange, Piece, Plans, cut, piece_size
from mpigossip.mixing.stream import Leg, Reach, Stream, measured_rate
from mpigossip.mixing.wire import encode

INLINE = 1 << 14
"""Bytes of a message up to which no thread is woken for it: that would take longer than it."""


class Message:
    """A rank's message in host memory: its outbox, codes where others are pushed them, a result."""

    def __init__(self, layout: Layout, reach: Reach):
        """In memory of a route where one has room for it."""
        self._layout, self._reach = layout, reach
        lossy, own = not layout.wire.exact, reach.host.own if reach.host else None
        if isinstance(reach.push, PushWindow) and reach.push.outbox is not None:
            own = reach.push.outbox
        self.own = torch.empty(layout.nbytes, dtype=torch.uint8) if own is None else own
        coded = lossy and reach.push
        self.codes = torch.zeros(layout.sent_bytes, dtype=torch.uint8) if coded else None
        self._views: dict[int, Segments] = {}

    @cached_property
    def result(self) -> torch.Tensor:
        """Where a sum goes that isn't formed in the inbox: one message, uint8."""
        own = self._reach.host.result if self._reach.host else None
        return torch.empty(self._layout.nbytes, dtype=torch.uint8) if own is None else own

    def segments(self, memory: torch.Tensor) -> Segments:
        """The layout's views of a message in memory that stays, made once."""
        place = memory.data_ptr()
        if place not in self._views:
            self._views[place] = self._layout.views(memory)
        return self._views[place]

    def average(self) -> float:
        """``result`` = the exact average of all ranks', by messages; seconds waited.

        The same bits either way: decoded values summed in rank order.
        """
        layout, n, timeout_s = self._layout, self._reach.n, self._reach.timeout_s
        comm = self._reach.push.signals.comm
        if self.codes is None or n * layout.sent_bytes >= 2 * layout.nbytes:
            return average_message(comm, layout, self.own, self.result, timeout_s)
        everyone = torch.empty(n, layout.sent_bytes, dtype=torch.uint8)
        waited = gather(comm, self.codes, everyone, partial(swapped, comm, timeout_s))
        mine = self.segments(self.own)
        sources = [mine if rank == self._reach.rank else everyone[rank] for rank in range(n)]
        out = self.segments(self.result)
        add_up(layout, [1 / n] * n, sources, out, layout.stretches)
        return waited


class HostSlots:
    """Contract: :class:`mpigossip.mixing.windows.Slots`."""

    halves, threaded = True, False
    routes: dict[int, str] = {}

    def __init__(self, layout: Layout):
        """Nothing is allocated yet."""
        self.layout, self._lossy = layout, not layout.wire.exact
        self._pieces: list[Piece] = []
        self._inline = False

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

    def open_far(self, reach: Reach, places: int) -> PushWindow:
        """The inbox window."""
        own, sizes = reach.host is None and not self._lossy, [self.layout.sent_bytes]
        return PushWindow(reach.comm, sizes, places, reach.timeout_s, outbox=own)

    def open(self, reach: Reach) -> None:
        """Cut the message in pieces as the wire is found to be; allocate it."""
        self._reach, layout = reach, self.layout
        if reach.push:
            rate = measured_rate(reach.comm, layout.sent_bytes, reach.timeout_s)
            self.cut(piece_size(layout.sent_bytes, rate))
        self.message = Message(layout, reach)
        self.out: Segments | None = self.message.segments(self.message.own)

    def cut(self, size: int) -> None:
        """Push in pieces of about so many bytes, the same on all ranks."""
        self._pieces = cut(self.layout, size)
        self._reach.push.signals.count_in_pieces(len(self._pieces))
        self._inline = self.layout.sent_bytes <= INLINE or not self._reach.courier.threaded

    @property
    def waited(self) -> float:
        """Seconds spent waiting for neighbours' outboxes, and for their readers, so far."""
        return self._reach.host.waited if self._reach.host else 0.0

    def _encode(self, now: Exchange, piece: Piece | None = None) -> None:
        """Quantize the outbox, or a piece of it, if the wire does so."""
        if self._lossy:
            stretches = piece.stretches if piece else None
            rows = range(self._reach.rank, self._reach.rank + 1)
            encode(self.layout, self.out, rows, now.number, self.message.codes, stretches)

    def gossip(self, now: Exchange) -> None:
        """Begin a round with the neighbours."""
        # readers on this host may begin to read: the mixer awaits their tokens when it leaves
        reach = self._reach
        if reach.host:
            self._encode(now)
            reach.host.publish(reach.near(now.readers), now.t)
        # pushes, and what others push here, go on in the courier; of a small message the main
        # thread sends now what has room, and does the rest in `finish`
        if reach.push and (now.targets or now.far or not reach.host):
            stream = self._stream(now)
            if self._inline:
                now.rest = stream.run
                if reach.courier.threaded:  # else MPI can't be entered while it computes
                    stream.begin()
            else:
                now.ticket = reach.courier.submit(stream.run)

    def _stream(self, now: Exchange) -> Stream:
        """What the courier does in this round: push, take in, and sum where all comes by pushes."""
        layout, reach, far = self.layout, self._reach, now.far
        sources, result = self._sources(now), self.message.segments(self._result_of(now))

        def prepare(piece: Piece) -> None:
            if not reach.host:  # else it is encoded, as neighbours read it in place
                self._encode(now, piece)

        def add(piece: Piece) -> None:
            if far and len(far) == len(now.sources):
                add_up(layout, now.weights, sources, result, piece.stretches)

        areas = [self.message.codes if self._lossy else self.message.own]
        leg = Leg(reach.push, areas, reach.count(now.t), now.targets, far)
        return Stream(leg, self._pieces, reach.timeout_s, reach.courier.rest, prepare, add)

    def average(self, now: Exchange) -> None:
        """Begin an average over all nodes."""
        self._encode(now)
        if self._reach.push is None:
            self._reach.host.publish(self._reach.host.others, now.t)
        elif self._reach.courier.threaded:
            now.ticket = self._reach.courier.submit(self.message.average)

    def finish(self, now: Exchange, into: torch.Tensor | None) -> Segments:
        """The sum of the open round, in ``into`` where neighbours' outboxes are summed now."""
        reach, message = self._reach, self.message
        if now.average:
            self._finish_average(now)
            return message.segments(message.result)
        # a pair on this host: the partner's outbox, then its half of the one result
        if now.partner is not None and into is None:
            other, parts = reach.places[now.partner], self.layout.parts
            shared = reach.host.average_pair(parts, now.weights[0], other, now.t)
            return message.segments(shared)
        now.partner = None  # summed here alone: less to write than two halves and a copy
        # the sources on this host: their outboxes are whole
        if reach.host:
            reach.host.await_ready(reach.near(now.sources), now.t)
        # the others: what they pushed is in, and the own pushes have room at the readers and are
        # out; where all came so, the sum is done too
        if now.ticket:
            reach.wait(now.ticket, f"round {now.t}")
        elif now.rest:
            # taken out first: a circle of references would be left to the collector
            began, (rest, now.rest) = time.perf_counter(), (now.rest, None)
            rest()
            reach.waited += time.perf_counter() - began
        mixed = message.segments(self._result_of(now))
        if not now.sources or reach.near(now.sources):
            sources = self._sources(now)
            mixed = mixed if into is None else [(into,)]
            add_up(self.layout, now.weights, sources, mixed, self.layout.stretches)
        if reach.host:
            reach.host.release(reach.near(now.sources), now.t)
        return mixed

    def _finish_average(self, now: Exchange) -> None:
        reach = self._reach
        if reach.push is None:
            reach.host.average(self.layout.parts, now.t)
        elif now.ticket:
            reach.wait(now.ticket, f"round {now.t}")
        else:
            reach.waited += self.message.average()

    def _sources(self, now: Exchange) -> list[Segments | torch.Tensor]:
        """Own outbox, shared outboxes and inbox places, in the graph's order."""
        found: list[Segments | torch.Tensor] = [self.out]
        reach, place = self._reach, 0
        for j in now.sources:
            if j in reach.places:
                found.append(self.message.segments(reach.host.outboxes[reach.places[j]]))
            else:
                message = reach.push.inbox(reach.count(now.t), place)
                found.append(message if self._lossy else self.message.segments(message))
                place += 1
        return found

    def _result_of(self, now: Exchange) -> torch.Tensor:
        """Where the sum goes: the first inbox place, where all come in full from other hosts."""
        if self._reach.host or self._lossy or not now.sources:
            return self.message.result
        return self._reach.push.inbox(self._reach.count(now.t), 0)

    def mean(self, x: torch.Tensor) -> torch.Tensor | None:
        """None: an average by messages is as good."""

    def close(self) -> None:
        """Let go of the routes' memory."""
        self.out = self.message = None
