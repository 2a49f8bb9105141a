"""What exchanges of GPU memory are made of: layout by slot, copy streams, pushes by pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI

from mpigossip.mixing.averages import Swap, raw, swapped
from mpigossip.mixing.base import Layout, Segments
from mpigossip.mixing.device.memory import MemoryRefused, current, private
from mpigossip.mixing.device.ordering import arrived_whole
from mpigossip.mixing.push import ARRIVED, ARRIVING, CUT, PushWindow


@dataclass(frozen=True)
class BySlot(Layout):
    """A message in which a slot's bytes stand together: they lie on one device."""

    def of(self, slot: int) -> Layout:
        """What slot ``slot`` alone sends."""
        return Layout(
            self.widths[slot : slot + 1], self.vectors, self.scalars,
            self.devices[slot : slot + 1], self.wire, self.dtype, (self.begin(slot),),
        )  # fmt: skip

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
        slots = range(len(self.widths))
        return [self.of(slot).views(memory[self.span(slot)])[0] for slot in slots]

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


class PiecePush(PushWindow):
    """An inbox in host memory that is filled piece by piece, each with a token of its own."""

    def __init__(self, comm: MPI.Intracomm, layout: BySlot, places: int, **options):
        """Collective; ``options`` as :class:`~mpigossip.mixing.push.PushWindow` has them."""
        super().__init__(comm, layout.sent_bytes, places, **options)
        self._spans = [layout.span(slot, sent=True) for slot in range(len(layout.widths))]

    def slot_inbox(self, count: int, place: int, slot: int) -> torch.Tensor:
        """A slot's part of the message in a place of the ``count``-th round."""
        return self.inbox(count, place)[self._spans[slot]]

    def put(
        self, memory: torch.Tensor, spans: Sequence[slice], targets: Sequence[tuple[int, int]],
        count: int,
    ) -> None:  # fmt: skip
        """Put these stretches of the message; :meth:`sent` completes them."""
        for rank, place in targets:
            base = self._base(rank, count, place)
            for span in spans:
                for at in range(span.start, span.stop, CUT):
                    part = memory[at : min(at + CUT, span.stop)].numpy()
                    self._window.Put([part, MPI.BYTE], rank, [base + at, part.size, MPI.BYTE])

    def await_arrived(self, sources: Sequence[int], number: int) -> None:
        """Wait for what has this number from each source; runs in the courier."""
        self._tokens.wait(sources, ARRIVED, number, ARRIVING)
        self.sync()


class DevicePush(PiecePush):
    """The same with an inbox on every slot's device: one window a slot over private memory."""

    def __init__(
        self, comm: MPI.Intracomm, layout: BySlot, lanes: Sequence[Lane], places: int, **options
    ):
        """Collective. Raises MemoryRefused, on all ranks, where one has no room."""
        # tokens and an empty window: no inbox in host memory
        PushWindow.__init__(self, comm, 0, places, outbox=False, **options)
        self._sizes = [layout.of(slot).sent_bytes for slot in range(len(lanes))]
        self._lanes, self._devices = lanes, [lane.device for lane in lanes]
        self._inboxes: list[torch.Tensor] = []
        self._windows: list[MPI.Win] = []
        refused = ""
        try:
            for size, device in zip(self._sizes, self._devices, strict=True):
                self._inboxes.append(private(size * 2 * places, device))
        except MemoryRefused as error:
            refused = str(error)
        if any(comm.allgather(refused)):  # all or none: what follows is collective
            DevicePush.close(self)  # of a subclass nothing is open yet
            raise MemoryRefused(refused or "another rank has no room for its inbox on a GPU")
        self._open_windows(comm)

    def swap(self, slot: int) -> Swap:
        """What brings arrays of a slot's device to other ranks and theirs here."""

        def swap(out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> float:
            self._lanes[slot].drain()  # MPI doesn't wait for what computes there
            waited = swapped(self.comm, self.timeout_s, out, into)
            if into:
                arrived_whole(self._devices[slot])
            return waited

        return swap

    def _open_windows(self, comm: MPI.Intracomm) -> None:
        for memory, device in zip(self._inboxes, self._devices, strict=True):
            with current(device):
                self._windows.append(MPI.Win.Create(raw(memory), 1, comm=comm))
                self._windows[-1].Lock_all()

    def await_arrived(self, sources: Sequence[int], count: int) -> None:
        """Wait for the messages of a piece; runs in the courier."""
        super().await_arrived(sources, count)
        for window, device in zip(self._windows, self._devices, strict=True):
            window.Sync()
            arrived_whole(device)

    def slot_inbox(self, count: int, place: int, slot: int) -> torch.Tensor:
        """A slot's part of the message in a place of the ``count``-th round."""
        size = self._sizes[slot]
        at = ((count % 2) * self.places + place) * size
        return self._inboxes[slot][at : at + size]

    def put_slots(
        self, memory: Sequence[torch.Tensor], begin: int, targets: Sequence[tuple[int, int]],
        count: int,
    ) -> None:  # fmt: skip
        """Put a piece of every slot from device to device, each slot's device being current.

        ``begin``: where in a slot's message the piece begins.
        """
        for rank, place in targets:
            half = (count % 2) * self._others_places[rank] + place
            for slot, (source, device) in enumerate(zip(memory, self._devices, strict=True)):
                base, window = half * self._sizes[slot] + begin, self._windows[slot]
                with current(device):
                    for at in range(0, source.numel(), CUT):
                        part = raw(source[at : at + CUT])
                        there = [base + at, len(part), MPI.BYTE]
                        window.Put([part, MPI.BYTE], rank, there)

    def _flush(self, rank: int) -> None:
        for device, window in zip(self._devices, self._windows, strict=True):
            with current(device):
                window.Flush(rank)

    def close(self) -> None:
        """Free windows and memory; collective."""
        self.courier.close()
        for window in self._windows:
            window.Unlock_all()
            window.Free()
        self._windows, self._inboxes = [], []
        super().close()
