"""Neighbours by plain messages, without windows: what can be left behind when a rank is lost.

A `Flush` to a dead rank may never return, and a window with a dead member can't be freed. A
request can be given up at any time, so a run that is to survive the loss of a rank exchanges by
Isend and Irecv, each waited for under a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.cluster.world import World
from mpigossip.mixing.averages import OfRank
from mpigossip.mixing.base import Kind, Layout, Segments
from mpigossip.mixing.combine import add_up
from mpigossip.mixing.host.push import CUT
from mpigossip.mixing.notifications import wait_all
from mpigossip.mixing.plan import Exchange, Plans
from mpigossip.mixing.wire import encode

ROUNDS, FIRST_TAG = 1 << 14, 64
"""Tags tell rounds apart, modulo this number (MPI promises 32,767 tags), so that they never mix."""


class Messages(OfRank):
    """The mixer of one rank (contract: :class:`mpigossip.mixing.base.Mixer`).

    Segments on GPUs are copied to and from host memory (untested where there is no GPU). Its bits
    are those of every other mixer.
    """

    def __init__(self, graph, layout: Layout, world: World, *, timeout_s=300.0, staged=None):
        """Collective over ``world``; ``staged``: segments apart from what is sent (unset: GPUs)."""
        super().__init__(graph, layout, world, timeout_s)
        self._hosts, self._plans = world.hosts, Plans(graph, layout, self.rank)
        self._message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._result = torch.zeros(layout.nbytes, dtype=torch.uint8)
        lossy = not layout.wire.exact
        self._codes = torch.zeros(layout.sent_bytes, dtype=torch.uint8) if lossy else None
        sent = self._message if self._codes is None else self._codes
        self._inbox = [torch.empty_like(sent) for _ in range(self._plans.places)]
        on_gpu = any(device != "cpu" for device in layout.devices)
        self._staged = on_gpu if staged is None else staged
        self._out = layout.empty(1) if self._staged else layout.views(self._message)
        self._mixed = layout.empty(1) if self._staged else layout.views(self._result)
        self._round: Exchange | None = None
        self._sends: dict = {}
        self._receives: dict = {}
        self._reached: dict[int, int] = {}

    @staticmethod
    def holds(graph, layout: Layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: an outbox, a result, an inbox place for each source of a round; GPUs' own."""
        places, on_gpu = Plans(graph, layout, node).places, set(layout.devices) - {"cpu"}
        return {
            "outbox": layout.nbytes,
            "result": layout.nbytes,
            "encoded": 0 if layout.wire.exact else layout.sent_bytes,
            "inbox": places * layout.sent_bytes,
            "on GPUs": 2 * layout.nbytes if on_gpu else 0,
        }

    def outbox(self, t: int) -> Segments:
        """Arrays (1, p) to fill whole; waits until the last round's messages have left."""
        self._settle(self._sends, "takes no message")
        return self._out

    def start(self, kind: Kind, t: int, exchange: int | None = None) -> None:
        """Begin the exchange of round t; a lossy wire quantizes the outbox, unless LOCAL."""
        now = self._plans.of(kind, t).at(t, t if exchange is None else exchange)
        self._round = now
        self.bytes_sent[0] += now.nbytes
        if kind is Kind.LOCAL:
            return
        if self._codes is not None:
            encode(self.layout, self._out, self.rows, now.number, self._codes)
        if self._staged:
            _copy(self._out, self.layout.views(self._message))
        if not now.average:
            self._post(now)

    def _post(self, now: Exchange) -> None:
        """Ask for the sources' messages, awaited in `finish`; send to the readers' likewise."""
        sent = self._message if self._codes is None else self._codes
        tag = FIRST_TAG + now.t % ROUNDS
        self._receives = {
            (rank, at): self._comm.Irecv([part, MPI.BYTE], rank, tag)
            for rank, place in zip(now.sources, self._inbox, strict=False)
            for at, part in _cut(place)
        }
        self._sends = {
            (rank, at): self._comm.Isend([part, MPI.BYTE], rank, tag)
            for rank in now.readers
            for at, part in _cut(sent)
        }

    def finish(self, into: torch.Tensor | None = None) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed`` of the open round."""
        now = self._round
        if now.kind is not Kind.LOCAL:
            self._exchange(now)
        self._round = None
        return self._out, self._out if now.kind is Kind.LOCAL else self._mixed

    def _exchange(self, now: Exchange) -> None:
        if now.average:
            self._waited += self._average_whole(self._comm, self._message, self._result)
        else:
            self._settle(self._receives, "sends no model", now.t)
            self._reached |= dict.fromkeys(now.sources, now.t)
            self._combine(now)
        if self._staged:
            _copy(self.layout.views(self._result), self._mixed)

    def _combine(self, now: Exchange) -> None:
        """The sum over own message and inbox, in the graph's order."""
        layout, sources = self.layout, [self.layout.views(self._message)]
        for place in self._inbox[: len(now.sources)]:
            sources.append(place if self._codes is not None else layout.views(place))
        add_up(layout, now.weights, sources, layout.views(self._result), layout.stretches)

    def _settle(self, requests: dict, fault: str, t: int | None = None) -> None:
        def late(key: tuple[int, int]) -> str:
            reached = self._reached.get(key[0])
            last = "not heard of yet" if reached is None else f"last heard of in round {reached}"
            where = f"rank {key[0]} on {self._hosts[key[0]]}"
            return f"{where} {fault}{'' if t is None else f' of round {t}'} ({last})"

        self._waited += wait_all(requests, self._timeout_s, late)

    def close(self) -> None:
        """Finish an open round and free the communicator; collective."""
        if self._round is not None:
            self.finish()
        self._settle(self._sends, "takes no message")
        self._comm.Free()


def _cut(message: torch.Tensor) -> list[tuple[int, object]]:
    """The message in pieces that every MPI can count, as NumPy arrays by where they begin."""
    cuts = range(0, message.numel(), CUT)
    return [(at, message[at : at + CUT].numpy()) for at in cuts]


def _copy(source: Segments, target: Sequence[Sequence[torch.Tensor]]) -> None:
    for parts, places in zip(source, target, strict=True):
        for part, place in zip(parts, places, strict=True):
            place.copy_(part)
