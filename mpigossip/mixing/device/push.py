"""What exchanges of GPU memory are made of: layout by slot, copy streams, inboxes, MPI's puts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.mixing.averages import Swap, raw, swapped
from mpigossip.mixing.base import Layout, Segments
from mpigossip.mixing.device.memory import MemoryRefused, arrived_whole, current, private
from mpigossip.mixing.host.push import ARRIVED, CUT, FREE
from mpigossip.mixing.notifications import Signals, Tokens


@dataclass(frozen=True)
class BySlot(Layout):
    """A message in which a slot's bytes stand together: they lie on one device."""

    def of(self, slot: int) -> Layout:
        """What slot ``slot`` alone sends."""
        return Layout(
            self.widths[slot : slot + 1], self.vectors, self.scalars,
            self.devices[slot : slot + 1], self.wire, self.dtype, (self.begin(slot),),
        )  # fmt: skip

    def segments(self, memory: Sequence[torch.Tensor]) -> Segments:
        """The views of a message of which every slot has its bytes on its own device."""
        return [self.of(slot).views(mine)[0] for slot, mine in enumerate(memory)]

    @property
    def sizes(self) -> list[int]:
        """Bytes that each slot sends."""
        return [self.of(slot).sent_bytes for slot in range(len(self.widths))]

    def span(self, slot: int, *, sent: bool = False) -> slice:
        """Where a slot's bytes are in the message, in memory or as sent."""
        sizes = [part.sent_bytes if sent else part.nbytes for part in map(self.of, range(slot + 1))]
        return slice(sum(sizes[:-1]), sum(sizes))

    @property
    def parts(self) -> list[tuple[torch.dtype, slice]]:
        """The message's stretches of one type, as (dtype, bytes from-to)."""
        found = []
        for slot in range(len(self.widths)):
            at = self.span(slot).start
            found += [
                (dtype, slice(at + part.start, at + part.stop))
                for dtype, part in self.of(slot).parts
            ]
        return found

    def views(self, memory: torch.Tensor) -> Segments:
        """Cut one node's message into segments of one row."""
        return self.segments([memory[self.span(slot)] for slot in range(len(self.widths))])

    def place(self, slot: int, part: int) -> int:
        """Where in the encoded message a slot's vector or (part ≥ vectors) scalar begins."""
        return self.span(slot, sent=True).start + self.of(slot).place(0, part)


def _behind(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event behind what a stream was given so far; none where there are no streams."""
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)
    stream.record_event(event)
    return event


class Lane:
    """The copy streams of one slot; on the CPU all is done at once and there is no stream."""

    def __init__(self, device: torch.device):
        """Streams for copies out of the device and for copies in and the sum."""
        self.device = device
        gpu = device.type == "cuda"
        self.out = torch.cuda.Stream(device) if gpu else None
        self.into = torch.cuda.Stream(device) if gpu else None

    def ready(self) -> torch.cuda.Event | None:
        """An event behind all that the slot's own work has been given so far.

        Slots work on the default stream; a user's own loop may fill the outbox on another one.
        """
        if self.out is None:
            return None
        stream = torch.cuda.current_stream(self.device)
        if stream != torch.cuda.default_stream(self.device):
            stream.wait_stream(torch.cuda.default_stream(self.device))
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Let both streams begin after the event."""
        for stream in (self.out, self.into) if event else ():
            stream.wait_event(event)

    def copied_out(self) -> torch.cuda.Event | None:
        """An event behind the copies out."""
        return _behind(self.out)

    def summed(self) -> torch.cuda.Event | None:
        """An event behind what has come in and its sums."""
        return _behind(self.into)

    def drain(self) -> None:
        """Wait until what came in is summed."""
        if (event := self.summed()) is not None:
            event.synchronize()


def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    """The context of work on a lane's stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class Inboxes:
    """An inbox on every slot's device, in private memory; the places are those of `PushWindow`."""

    def __init__(self, comm: MPI.Intracomm, layout: BySlot, lanes: Sequence[Lane], places: int):
        """Collective. Raises MemoryRefused, on all ranks, where one has no room."""
        self.places, self.others_places = places, comm.allgather(places)
        self.sizes = layout.sizes
        self.memory: list[torch.Tensor] = []
        refused = ""
        try:
            for size, lane in zip(self.sizes, lanes, strict=True):
                self.memory.append(private(size * 2 * places, lane.device))
        except MemoryRefused as error:
            refused = str(error)
        if any(comm.allgather(refused)):  # all or none: what follows is collective
            raise MemoryRefused(refused or "another rank has no room for its inbox on a GPU")

    def of(self, count: int, place: int, slot: int) -> torch.Tensor:
        """A slot's part of the message in a place of the ``count``-th round."""
        size = self.sizes[slot]
        at = ((count % 2) * self.places + place) * size
        return self.memory[slot][at : at + size]


class DevicePush:
    """Inboxes on the devices that MPI puts into: one window a slot.

    Contract: :class:`mpigossip.mixing.stream.Route`, and :meth:`swap`.
    """

    def __init__(
        self, comm: MPI.Intracomm, layout: BySlot, lanes: Sequence[Lane], places: int,
        timeout_s: float,
    ):  # fmt: skip
        """Collective. Raises MemoryRefused, on all ranks, where one has no room."""
        self._inboxes, self._lanes = Inboxes(comm, layout, lanes, places), lanes
        self._devices = [lane.device for lane in lanes]
        self.signals = Signals(Tokens(comm, timeout_s), ARRIVED, FREE)
        self.inbox = self._inboxes.of
        self._windows: list[MPI.Win] = []
        for memory, device in zip(self._inboxes.memory, self._devices, strict=True):
            with current(device):
                self._windows.append(open_window(MPI.Win.Create, raw(memory), comm))

    def swap(self, slot: int) -> Swap:
        """What brings arrays of a slot's device to other ranks and theirs here."""

        def swap(out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> float:
            self._lanes[slot].drain()  # MPI doesn't wait for what computes there
            waited = swapped(self.signals.comm, self.signals.timeout_s, out, into)
            if into:
                arrived_whole(self._devices[slot])
            return waited

        return swap

    def put(
        self, areas: Sequence[torch.Tensor], span: slice, targets: Sequence[tuple[int, int]],
        number: int,
    ) -> Sequence[MPI.Request]:  # fmt: skip
        """Put a piece of every slot from device to device, each slot's device being current."""
        half = self.signals.round(number) % 2
        for rank, place in targets:
            places = half * self._inboxes.others_places[rank] + place
            for slot, (source, device) in enumerate(zip(areas, self._devices, strict=True)):
                base, window = places * self._inboxes.sizes[slot], self._windows[slot]
                with current(device):
                    for at in range(span.start, min(span.stop, source.numel()), CUT):
                        part = raw(source[at : min(at + CUT, span.stop)])
                        window.Put([part, MPI.BYTE], rank, [base + at, len(part), MPI.BYTE])
        return ()

    def sent(self, targets: Sequence[tuple[int, int]], number: int) -> None:
        """Flush every slot's window to each target, then tell it."""
        for rank, _ in targets:
            for device, window in zip(self._devices, self._windows, strict=True):
                with current(device):
                    window.Flush(rank)
            self.signals.tell([rank], number)

    def sync(self, number: int) -> None:
        """Let what has arrived be seen by the devices' work from now on."""
        for window, device in zip(self._windows, self._devices, strict=True):
            window.Sync()
            arrived_whole(device)

    def close(self) -> None:
        """Free windows and memory; collective. The communication thread has ended."""
        for window in self._windows:
            close_window(window, self.signals.comm)
        self._windows, self._inboxes.memory = [], []
        self.signals.close()
