"""Averaging between nodes over MPI, synchronous: rank i is node i.

Neighbours on the same host are read in place, all others get pushes; who they are in a round is
planned (plan.py), and what is sent and awaited goes over routes (stream.py). What a round does
with the memory is its slots' business: in host memory (host/slots.py) or on GPUs (device/slots.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from mpi4py import MPI

from mpigossip.cluster.cores import own_core
from mpigossip.cluster.world import World
from mpigossip.mixing.averages import OfRank
from mpigossip.mixing.base import Kind, Layout, Segments
from mpigossip.mixing.host.shared import open_host
from mpigossip.mixing.host.slots import HostSlots
from mpigossip.mixing.plan import Exchange, Plans
from mpigossip.mixing.progress_thread import Courier
from mpigossip.mixing.stream import Reach, Route


class Slots(Protocol):
    """The memory of a rank's slots, and what a round does there; opened in the order below."""

    layout: Layout
    out: Segments | None
    """The outbox; from :meth:`open` to :meth:`close`."""
    halves: bool
    """Whether neighbours on one host read each other's memory, and pairs average by halves."""
    threaded: bool
    """Whether all is done in the courier."""

    def open_far(self, reach: Reach, places: int) -> Route:
        """Inboxes for so many sources in a round, and the way to those of others."""

    def open(self, reach: Reach) -> None:
        """All is there to be used."""

    @property
    def routes(self) -> dict[int, str]:
        """How each other rank is reached, and why; none where that is plain."""

    @property
    def waited(self) -> float:
        """Seconds waited beside the courier so far."""

    def gossip(self, now: Exchange) -> None:
        """Begin a round with the neighbours."""

    def average(self, now: Exchange) -> None:
        """Begin an average over all nodes."""

    def finish(self, now: Exchange, into: torch.Tensor | None) -> Segments:
        """The sum that was begun; in ``into``, where it is formed only now."""

    def mean(self, x: torch.Tensor) -> torch.Tensor | None:
        """The exact average of x (1, p), where it is better formed here than by messages."""

    def close(self) -> None:
        """Let go of all memory; collective."""


def slots_of(layout: Layout, on_devices: bool | None = None) -> Any:
    """The class for a layout's slots; ``on_devices`` unset: as the layout names them."""
    if on_devices or (on_devices is None and set(layout.devices) - {"cpu"}):
        from mpigossip.mixing.device.slots import DeviceSlots

        return DeviceSlots
    return HostSlots


class Windows(OfRank):
    """The mixer of one rank (contract: :class:`mpigossip.mixing.base.Mixer`)."""

    def __init__(
        self, graph, layout: Layout, world: World, *, same_host="read", gpu_window="auto",
        timeout_s=300.0, on_devices: bool | None = None,
    ):  # fmt: skip
        """Collective over ``world``; ``graph.n`` must be its size.

        ``gpu_window``: "auto", "device", "nccl" or "host"; MemoryRefused where "device" or "nccl"
        is asked for and can't be had. ``on_devices``: see :func:`slots_of`; the CPU may stand in.
        """
        made = slots_of(layout, on_devices)
        slots: Slots = made(layout) if made is HostSlots else made(layout, gpu_window)
        super().__init__(graph, slots.layout, world, timeout_s)
        self._slots = slots
        self._reach = reach = Reach(self._comm, self.rank, self.n, timeout_s)
        if same_host == "read" and slots.halves:
            reach.host, reach.places = open_host(self._comm, self.layout.nbytes, timeout_s)
        self._near = self._comm.allgather(frozenset(reach.places))
        self._plans = Plans(graph, self.layout, self.rank, self._near, halves=self._slots.halves)
        if len(reach.places) < self.n:
            reach.push = self._slots.open_far(reach, self._plans.places)
        if reach.push or self._slots.threaded:
            reach.courier = self._open_courier(reach, len(set(world.hosts)) > 1)
        self._slots.open(reach)
        self._round: Exchange | None = None
        # the graph's clock: the first and the last round of kind GOSSIP that this mixer ran
        self._first: int | None = None
        self._last: int | None = None

    def _open_courier(self, reach: Reach, hosts: bool) -> Courier:
        """The communication thread; ``hosts``: there are several."""
        comm, poll = (
            reach.push.signals.comm if reach.push else reach.comm,
            bool(reach.push and hosts),
        )
        computing = torch.get_num_threads() * len(self.layout.widths)
        cores = own_core(comm, computing, self._beside) if poll else frozenset()
        threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        return Courier(comm, threaded=threaded, poll=poll, timeout_s=self._timeout_s, cores=cores)

    @staticmethod
    def holds(graph, layout: Layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory by purpose, of the slots that the layout names."""
        return slots_of(layout).holds(graph, layout, node, near, averages)

    def memory(self, averages: bool = True) -> dict[str, int]:
        """Bytes by purpose that the messages take, at most."""
        made: Any = self._slots
        return made.holds(self.graph, self.layout, self.rank, self._near, averages)

    @property
    def routes(self) -> dict[int, str]:
        """How each other rank is reached, where its GPUs are: the way, and why."""
        return self._slots.routes

    @property
    def flown(self) -> float:
        """Seconds that the communication thread was busy so far; 0 where there is none."""
        return self._reach.courier.busy if self._reach.courier else 0.0

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other nodes so far."""
        return self._reach.waited + self._slots.waited

    # -- a round: outbox, start, finish ------------------------------------------------------

    def outbox(self, t: int) -> Segments:
        """Arrays (1, p) to fill whole; waits until the last round's readers are done."""
        self._leave_round()
        return self._slots.out

    def start(self, kind: Kind, t: int, exchange: int | None = None) -> None:
        """Publish the outbox, quantized if the wire does so, and begin the exchange of round t."""
        if kind is Kind.GOSSIP and self._first is None:
            self._first = self._reach.first = t
        now = self._plans.of(kind, t).at(t, t if exchange is None else exchange)
        self._round = now
        self.bytes_sent[0] += now.nbytes
        if now.average:
            self._slots.average(now)
        elif now.kind is Kind.GOSSIP:
            self._slots.gossip(now)

    def finish(self, into: torch.Tensor | None = None) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed``, which is ``into`` where neighbours' outboxes are summed now."""
        now = self._round
        now.finished = True
        out = self._slots.out
        return out, out if now.kind is Kind.LOCAL else self._slots.finish(now, into)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Exact average over nodes of x (1, p), summed in node order: (p,), equal bits."""
        found = self._slots.mean(x)
        return super().mean(x) if found is None else found

    def _leave_round(self) -> None:
        """Wait until the last round's readers are done; tell the writers what is free again.

        Here, as the courier has nothing to do now: to wake it takes longer.
        """
        now, self._round = self._round, None
        if now is None or now.kind is not Kind.GOSSIP:
            return
        # readers of this outbox on this host; those that were pushed to have their own copy
        reach = self._reach
        if now.partner is not None:
            reach.host.leave_pair(reach.places[now.partner], now.t)
        elif reach.host:
            reach.host.await_done(reach.near(now.readers), now.t)
        # the inbox half of this round is that of round t + 2: who writes then awaits this token
        coming = self._plans.of(Kind.GOSSIP, now.t + 2)
        if reach.push and not coming.average:
            reach.push.signals.free(coming.far, reach.count(now.t + 2))
        self._last = now.t

    def close(self) -> None:
        """Finish an open round, take in outstanding tokens, free the memory; collective."""
        if self._slots.out is None:
            return
        if self._round and not self._round.finished:
            self.finish()
        self._leave_round()
        self._slots.close()
        reach = self._reach
        if reach.push:
            self._take_in_free_tokens()
        if reach.courier:
            reach.courier.close()
        for route in filter(None, (reach.push, reach.host)):
            route.close()
        self._comm.Free()

    def _take_in_free_tokens(self) -> None:
        """Receive the tokens that freed places for rounds that will not be run."""
        for t in () if self._last is None else (self._last + 1, self._last + 2):
            coming = self._plans.of(Kind.GOSSIP, t)
            if t - 2 >= self._first and not coming.average:
                readers = [rank for rank, _ in coming.targets]
                self._reach.push.signals.take_in_free(readers, self._reach.count(t))
