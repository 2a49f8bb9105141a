"""MPI one-sided windows between nodes, synchronous: rank i is node i.

Neighbours on the same host are read in place (:mod:`mpigossip.mixing.shared`), or reached like
all others by pushes into their inboxes (:mod:`mpigossip.mixing.push`) with ``same_host="put"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from mpi4py import MPI

from mpigossip.mixing.base import (
    BLOCK,
    Kind,
    Layout,
    Segments,
    combine,
    is_average,
    traffic,
)
from mpigossip.mixing.messages import Job, average, gather, mean, mean_scalars
from mpigossip.mixing.push import PushWindow
from mpigossip.mixing.shared import SharedHost
from mpigossip.mixing.wire import decode, encode


@dataclass
class Round:
    """Who exchanges with this rank in the round at hand; ranks in the graph's order.

    ``partner``: the rank on this host that averages with this one alone, both by halves.
    """

    kind: Kind
    t: int
    average: bool
    sources: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    readers: tuple[int, ...] = ()
    partner: int | None = None
    ticket: Job | None = None
    finished: bool = False


class Windows:
    """The mixer of one rank (contract: :class:`mpigossip.mixing.base.Mixer`).

    Memory, in messages: read in place, an outbox and a result; pushed, an outbox and two inbox
    places an in-neighbour, the sum being formed in the inbox. Over a lossy wire what is pushed,
    and an inbox place, is an encoded message; neighbours on the same host read decoded ones.
    """

    def __init__(self, graph, layout: Layout, world, *, same_host="read", timeout_s=300.0):
        """Collective over ``world``; ``graph.n`` must be its size."""
        if graph.n != world.size:
            raise ValueError(f"a graph of {graph.n} nodes can't run on {world.size} ranks")
        self.graph, self.layout, self._timeout_s = graph, layout, timeout_s
        self.n, self.rank, self.rows = graph.n, world.rank, range(world.rank, world.rank + 1)
        self.bytes_sent, self._waited = [0], 0.0
        self.synchronous, self.staleness = True, [0.0]
        self._averages: dict[int, bool] = {}
        self._comm = world.comm.Dup()
        self._host = self._open_host(same_host)
        self._near = self._comm.allgather(frozenset(self._places_on_host))
        self._push = self._open_push(several_hosts=len(set(world.hosts)) > 1)
        self._lossy = not layout.wire.exact
        self._message, self._codes = self._own_memory()
        self._out: Segments | None = layout.views(self._message)
        self._round: Round | None = None
        # the graph's clock: the first and the last round of kind GOSSIP that this mixer ran
        self._first: int | None = None
        self._last: int | None = None

    def _open_host(self, same_host: str) -> SharedHost | None:
        """Shared memory with the ranks of this host, unless all of them are to be pushed to."""
        self._places_on_host: dict[int, int] = {}
        if same_host != "read":
            return None
        on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._places_on_host = {r: place for place, r in enumerate(on_host.allgather(self.rank))}
        host = SharedHost(on_host, self.layout.nbytes, self._timeout_s)
        on_host.Free()
        return host

    def _open_push(self, several_hosts: bool) -> PushWindow | None:
        """The inbox window, unless every rank of the job is on this host and read in place."""
        if len(self._near[self.rank]) == self.n:
            return None
        return PushWindow(
            self._comm,
            self.layout.sent_bytes,
            self._inbox_places(),
            outbox=self._host is None and self.layout.wire.exact,
            threaded=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            poll=several_hosts,
            timeout_s=self._timeout_s,
        )

    def _own_memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outbox, and what is pushed of it where that is something else."""
        layout, own = self.layout, self._host.own if self._host else self._push.outbox
        if own is None:
            own = torch.empty(layout.nbytes, dtype=torch.uint8)
        if self._lossy and self._push:
            return own, torch.zeros(layout.sent_bytes, dtype=torch.uint8)
        return own, None

    def _inbox_places(self) -> int:
        """In-neighbours that push to this rank in one round, at most."""
        if self.graph.period is None:
            return self.graph.degree
        rounds = [t for t in range(self.graph.period) if not self._is_average(t)]
        pushers = (self._far(self.rank, self.graph.neighbours(t, self.rank)[0]) for t in rounds)
        return max(map(len, pushers), default=0)

    def _is_average(self, t: int) -> bool:
        if self.graph.period is None:
            return is_average(self.graph, t)
        return self._averages.setdefault(
            t % self.graph.period, is_average(self.graph, t % self.graph.period)
        )

    def _far(self, rank: int, nodes) -> list[int]:
        """Those of ``nodes`` that ``rank`` doesn't share memory with."""
        return [int(j) for j in nodes if int(j) not in self._near[rank]]

    def _on_host(self, nodes) -> list[int]:
        """The places on this host of those of ``nodes`` that are read in place."""
        return [self._places_on_host[j] for j in nodes if j in self._places_on_host]

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other nodes so far."""
        return self._waited + (self._host.waited if self._host else 0.0)

    @cached_property
    def _result(self) -> torch.Tensor:
        """Where a sum goes that isn't formed in the inbox: one message, uint8."""
        if self._host:
            return self._host.result
        return torch.empty(self.layout.nbytes, dtype=torch.uint8)

    # -- a round ------------------------------------------------------------------------

    def outbox(self, t: int) -> Segments:
        """Arrays (1, p) to fill whole; waits until the last round's readers are done."""
        self._leave_round()
        return self._out

    def start(self, kind: Kind, t: int, exchange: int | None = None) -> None:
        """Publish the outbox, quantized if the wire does so, and begin the exchange of round t."""
        layout = self.layout
        self.bytes_sent[0] += traffic(
            self.graph, kind, t, self.rank, layout.sent_bytes, layout.raw_bytes
        )
        if self._lossy and kind is not Kind.LOCAL:
            self._encode(t if exchange is None else exchange)
        if kind is Kind.GOSSIP:
            self._first = t if self._first is None else self._first
        average = kind is Kind.GLOBAL or (kind is Kind.GOSSIP and self._is_average(t))
        now = self._round = Round(kind, t, average)
        if average:
            self._start_global(now)
        elif kind is Kind.GOSSIP:
            nodes, weights, own = self.graph.neighbours(t, self.rank)
            now.sources = tuple(map(int, nodes))
            now.weights = (float(own), *map(float, weights))
            now.readers = tuple(map(int, self.graph.receivers(t, self.rank)))
            now.partner = self._partner(now)
            self._start_gossip(now)

    def _encode(self, exchange: int) -> None:
        encode(self.layout, self._out, self.rows, exchange, self._codes)

    def _start_gossip(self, now: Round) -> None:
        if self._host:
            self._host.publish(self._on_host(now.readers), now.t)
        if self._push is None:
            return
        push, count, targets = self._push, now.t - self._first, self._targets(now)
        message = self._codes if self._lossy else self._message
        now.ticket = push.courier.submit(lambda: push.push(message, targets, count))
        if push.courier.threaded:
            now.ticket = self._submit_arrival(now)

    def _partner(self, now: Round) -> int | None:
        """The other of a pair on this host whose two averages are the same one."""
        if len(now.sources) != 1 or now.readers != now.sources:
            return None
        (other,), (own, weight) = now.sources, now.weights
        if other not in self._places_on_host or own != weight:
            return None
        sources, weights, theirs = self.graph.neighbours(now.t, other)
        same = len(sources) == 1 and sources[0] == self.rank and weights[0] == theirs == own
        return other if same else None

    def _targets(self, now: Round) -> list[tuple[int, int]]:
        """Rank and place in its inbox of the readers that are pushed to."""
        # a reader's places are numbered by those of its in-neighbours that push to it
        return [
            (r, self._far(r, self.graph.neighbours(now.t, r)[0]).index(self.rank))
            for r in now.readers
            if r not in self._near[self.rank]
        ]

    def _submit_arrival(self, now: Round) -> Job:
        sources, count = self._far(self.rank, now.sources), now.t - self._first
        return self._push.courier.submit(lambda: self._push.await_arrived(sources, count))

    def _start_global(self, now: Round) -> None:
        if self._push is None:
            self._host.publish(self._host.others, now.t)
        elif self._push.courier.threaded:
            now.ticket = self._push.courier.submit(self._average_by_messages)

    def _average_by_messages(self) -> None:
        # the same bits either way: decoded values summed in rank order
        if self._lossy and self.n * self.layout.sent_bytes < 2 * self.layout.nbytes:
            everyone, waited = gather(self._push.comm, self._codes, self._timeout_s)
            self._note(waited)
            sources = [
                (self._message, False) if rank == self.rank else (everyone[rank], True)
                for rank in range(self.n)
            ]
            _sum_decoded(self.layout, [1 / self.n] * self.n, sources, self._result)
            return
        for dtype, part in self.layout.parts:
            own, out = self._message[part].view(dtype), self._result[part].view(dtype)
            self._note(average(self._push.comm, own, out, self._timeout_s))

    def _note(self, waited: float) -> None:
        """Count waiting here, unless this is the courier: its waiting is that for its ticket."""
        if not self._push.courier.threaded:
            self._waited += waited

    def finish(self) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed`` of the open round."""
        now = self._round
        now.finished = True
        if now.kind is Kind.LOCAL:
            return self._out, self._out
        if now.average:
            self._finish_global(now)
            return self._out, self.layout.views(self._result)
        if now.partner is not None:
            partner = self._places_on_host[now.partner]
            self._host.average_pair(self.layout.parts, now.weights[0], partner, now.t)
            return self._out, self.layout.views(self._result)
        if self._host:
            self._host.await_ready(self._on_host(now.sources), now.t)
        if self._push:
            self._wait_for(now.ticket if self._push.courier.threaded else self._submit_arrival(now))
        mixed = self._combine(now)
        if self._host:
            self._host.release(self._on_host(now.sources), now.t)
        return self._out, mixed

    def _combine(self, now: Round) -> Segments:
        """The sum over own outbox, shared outboxes and inbox places, in the graph's order."""
        sources, count, place = [(self._message, False)], now.t - (self._first or 0), 0
        for j in now.sources:
            if j in self._places_on_host:
                sources.append((self._host.outboxes[self._places_on_host[j]], False))
            else:
                sources.append((self._push.inbox(count, place), self._lossy))
                place += 1
        if self._lossy:
            _sum_decoded(self.layout, now.weights, sources, self._result)
            return self.layout.views(self._result)
        in_inbox = self._host is None and len(sources) > 1
        result = sources[1][0] if in_inbox else self._result
        for dtype, part in self.layout.parts:
            rows = [message[part].view(dtype).unsqueeze(0) for message, _ in sources]
            combine(now.weights, rows, result[part].view(dtype).unsqueeze(0))
        return self.layout.views(result)

    def _finish_global(self, now: Round) -> None:
        if self._push is None:
            self._host.average(self.layout.parts, now.t)
        elif now.ticket:
            self._wait_for(now.ticket)
        else:
            self._average_by_messages()

    def _wait_for(self, ticket: Job) -> None:
        self._waited += self._push.courier.wait(ticket, f"round {self._round.t}")

    def _leave_round(self) -> None:
        """Wait until the last round's readers are done; tell the writers what is free again."""
        now, self._round = self._round, None
        if now is None or now.kind is not Kind.GOSSIP:
            return
        if self._host and now.partner is None:
            self._host.await_done(self._on_host(now.readers), now.t)
        if self._push and not self._is_average(now.t + 2):
            writers = self._far(self.rank, self.graph.neighbours(now.t + 2, self.rank)[0])
            count = now.t + 2 - self._first
            self._push.courier.submit(lambda: self._push.free(writers, count))
        self._last = now.t

    # -- averages off the hot path --------------------------------------------------------

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Exact average over nodes of x (1, p), summed in node order: (p,), equal bits."""
        return mean(self._comm, x, self._timeout_s)

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """Average over nodes of small float64 values (1, k), in node order: (k,)."""
        return mean_scalars(self._comm, values, self._timeout_s)

    def close(self) -> None:
        """Finish an open round, take in outstanding tokens, free the memory; collective."""
        if self._out is None:
            return
        last = self._round
        if last is not None and not last.finished:
            self.finish()
        self._leave_round()
        self._out, self._message = None, None
        self.__dict__.pop("_result", None)
        if self._push:
            self._take_in_free_tokens()
            self._push.close()
        if self._host:
            self._host.close()
        self._comm.Free()

    def _take_in_free_tokens(self) -> None:
        """Receive the tokens that freed places for rounds that will not be run."""
        if self._last is None:
            return
        for t in (self._last + 1, self._last + 2):
            if t - 2 >= self._first and not self._is_average(t):
                readers = self._far(self.rank, self.graph.receivers(t, self.rank))
                self._push.take_in_free(readers, t - self._first)


def _sum_decoded(
    layout: Layout,
    weights: Sequence[float],
    sources: Sequence[tuple[torch.Tensor, bool]],
    result: torch.Tensor,
) -> None:
    """The one sum over messages of which those marked True are encoded, block by block."""
    whole = [None if encoded else layout.views(message) for message, encoded in sources]
    for slot, segment in enumerate(layout.views(result)):
        for part, out in enumerate(segment):
            for begin in range(0, out.shape[1], BLOCK):
                columns = slice(begin, min(begin + BLOCK, out.shape[1]))
                arrays = [
                    decode(layout, message, slot, part, columns)
                    if views is None
                    else views[slot][part][:, columns]
                    for (message, _), views in zip(sources, whole, strict=True)
                ]
                combine(weights, arrays, out[:, columns])
