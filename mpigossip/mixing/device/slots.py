"""A rank's slots on GPUs: their memory, and what a round does there; the CPU does so in the tests.

Three routes to all neighbours, chosen at start (`node.gpu_window`):

* "device": MPI puts from GPU memory into GPU memory, where it is proven to be able to;
* "nccl": NCCL sends and receives from GPU memory to GPU memory, between MPI's tokens;
* "host": through pinned memory in pieces; copy out, wire and copy in run at the same time.

A round is one job of the communication thread: for each piece it waits until the piece is there
to be sent, sends it, takes in the neighbours' same piece and sums on the receiver's stream. MPI
never touches memory that a stream still writes: an event is waited for first. Over a lossy wire
what travels is encoded on the device and decoded there (bfloat16 within the sum), in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from mpigossip.mixing.base import Layout, Segments
from mpigossip.mixing.device import averages
from mpigossip.mixing.device.memory import Kept, MemoryRefused, current, pin
from mpigossip.mixing.device.nccl import NcclPush
from mpigossip.mixing.device.push import BySlot, DevicePush, Lane, on
from mpigossip.mixing.device.routes import Areas, Push, inboxes
from mpigossip.mixing.device.sums import Source, Sums
from mpigossip.mixing.host.slots import HostSlots, Message
from mpigossip.mixing.plan import Exchange, Piece
from mpigossip.mixing.stream import Leg, Reach, Stream
from mpigossip.mixing.wire import encode

PIECE = 1 << 24
"""Bytes of a slot that are copied and sent at once; a multiple of 4096 (whole buckets)."""


class DeviceSlots:
    """Contract: :class:`mpigossip.mixing.windows.Slots`.

    What is summed lies on the devices: no averaging by halves.
    """

    halves, threaded = False, True
    waited = 0.0

    def __init__(self, layout: Layout, gpu_window: str):
        """``gpu_window``: "auto", "device", "nccl" or "host"."""
        names = layout.devices or ("cpu",) * len(layout.widths)
        self.devices = [torch.device(name) for name in names]
        self.lanes = [Lane(device) for device in self.devices]
        given = {f: getattr(layout, f) for f in Layout.__dataclass_fields__}
        self.layout = by_slot = BySlot(**given | {"devices": tuple(names)})
        self._asked, self._lossy = gpu_window, not layout.wire.exact
        self.areas = Areas(by_slot, self.devices, own=gpu_window != "host")
        self.out: Segments | None = by_slot.segments(self.areas.own)
        self._mixed = by_slot.segments(self.areas.mixed)
        self._sums = Sums(by_slot, self.lanes, self.areas.mixed)
        self._way = "host"
        self._why = [self.areas.refused] if self.areas.refused else []
        self._unpin: Callable[[], None] = lambda: None

    @staticmethod
    def holds(graph, layout: Layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: outbox, result, codes of the slots on their devices.

        "host": the messages in host memory, which neighbours need that no device is reached from.
        """
        host = HostSlots.holds(graph, layout, node, near, averages)
        inbox = host.pop("inbox")
        return {
            "outbox": layout.nbytes,
            "result": layout.nbytes,
            "encoded": 0 if layout.wire.exact else layout.sent_bytes,
            "inbox": inbox,
            "host": sum(host.values()),
        }

    # -- opening: the way to the others, then what is exchanged through it -------------------

    def open_far(self, reach: Reach, places: int) -> Push:
        """Inboxes on the devices where they can be filled there, else in host memory."""
        found = inboxes(self._asked, reach, self.layout, self.lanes, places)
        push, self._way, why = found
        self._why = [*why, *self._why]
        return push

    def open(self, reach: Reach) -> None:
        """Pieces, as many on all ranks; memory for averages and on the host, pinned."""
        self._reach, push = reach, reach.push
        self._on_devices = push if isinstance(push, DevicePush | NcclPush) else None
        self._nccl = push if isinstance(push, NcclPush) else None
        # whether gossip goes through host memory: the message, or its codes
        self._staged = self._on_devices is None and reach.n > 1
        self._cut()
        self._message = Message(self.layout, reach)
        self._share = averages.pieces(reach.n, max(own.numel() for own in self.areas.own))
        self._kept = Kept(self._rooms())
        self._through = [torch.empty(self._share, dtype=torch.uint8) for _ in range(2)]
        if self._staged:
            self._pin()

    def _cut(self) -> None:
        """Cut the slots: tokens count the pieces. A slot whole where none is copied."""
        size = max(memory.numel() for memory in [*self.areas.own, *self.areas.code])
        step = PIECE if self._staged and not self._lossy else size
        begins = range(0, size, step)
        self.pieces = [Piece(slice(at, at + step), (), k) for k, at in enumerate(begins)]
        self._reach.push.signals.count_in_pieces(len(self.pieces))

    def _rooms(self) -> dict:
        """Memory that averages by messages from GPU to GPU need besides."""
        if not self._on_devices:
            return {}
        found = averages.rooms(self.devices, self._share)
        if self._codes_go_round:
            for slot, (device, codes) in enumerate(zip(self.devices, self.areas.code, strict=True)):
                found[device, f"codes {slot}"] = self._reach.n * codes.numel()
        return found

    @property
    def _codes_go_round(self) -> bool:
        """Whether in a global average everyone's codes are less than a sum's parts."""
        return self._lossy and self._reach.n * self.layout.sent_bytes < 2 * self.layout.nbytes

    def _pin(self) -> None:
        """Lock the host memory that copies use; what can't be locked is noted and slower."""
        codes = self._message.codes
        stretches = [*self._through, self._message.own, self._reach.push.memory]
        stretches += [codes] if codes is not None else []
        try:
            self._unpin = pin(stretches, self.devices[0])
        except MemoryRefused as error:
            self._why.append(str(error))

    @property
    def routes(self) -> dict[int, str]:
        """How each other rank is reached, and why: "device", "nccl" or "host"; a reason."""
        route = self._way + (f" ({'; '.join(self._why)})" if self._why else "")
        return {rank: route for rank in range(self._reach.n) if rank != self._reach.rank}

    # -- a round with the neighbours ----------------------------------------------------------

    def _follow(self) -> list:
        """Let the lanes follow what the devices have been given so far; events behind that."""
        ready = [lane.ready() for lane in self.lanes]
        for lane, event in zip(self.lanes, ready, strict=True):
            lane.follow(event)
        return ready

    def _submit(self, work: Callable[[list], None]) -> Future:
        """Let the courier do ``work(ready)`` behind what the devices have been given so far.

        Its sums are over when the job is.
        """
        ready = self._follow()

        def job() -> None:
            # a thread begins on device 0, and would open a context there
            with current(self.devices[0]):
                work(ready)
                for lane in self.lanes:
                    lane.drain()

        return self._reach.courier.submit(job)

    def _encode(self, number: int) -> None:
        """Quantize every slot's outbox in place, its codes beside it, if the wire does so."""
        assert self.out is not None
        for slot, parts in enumerate(self.out if self._lossy else ()):
            with current(self.devices[slot]):
                layout, codes = self.layout.of(slot), self.areas.code[slot]
                encode(layout, [parts], [self._reach.rank], number, codes)

    def gossip(self, now: Exchange) -> None:
        """Begin a round with the neighbours; NCCL's part in it here."""
        self._encode(now.number)
        if self._nccl:
            self._follow()
            memory = self.areas.code if self._lossy else self.areas.own
            self._nccl.begin(memory, now.targets, now.far, self._reach.count(now.t))
        now.ticket = self._submit(lambda ready: self._exchange(now, ready))

    def _exchange(self, now: Exchange, ready: list) -> None:
        """Send and receive piece by piece, sum as pieces come; runs in the courier."""
        # all copies out are begun at once, each awaited when its piece is to be sent
        copied = [self._copy_out(piece.sent) for piece in self.pieces]

        def prepare(piece: Piece) -> None:
            # the devices have filled the piece (and it is in host memory): MPI knows no stream
            for event in copied[piece.number] or ready:
                _ = event and event.synchronize()

        def add(piece: Piece) -> None:
            for slot, own in enumerate(self.areas.own):
                sources = self._sources(now, slot, piece.sent)
                self._sums.add(now.weights, slot, piece.sent, [(own[piece.sent], False), *sources])

        reach = self._reach
        leg = Leg(reach.push, self._areas(), reach.count(now.t), now.targets, now.far)
        Stream(leg, self.pieces, reach.timeout_s, reach.courier.rest, prepare, add).run()

    def _areas(self) -> list[torch.Tensor]:
        """What is sent of every slot, where it is sent from."""
        if self._on_devices:
            return self.areas.code if self._lossy else self.areas.own
        whole = self._message.codes if self._lossy else self._message.own
        return [whole[self.layout.span(s, sent=self._lossy)] for s in range(len(self.lanes))]

    def _copy_out(self, piece: slice, *, whole: bool = False) -> list:
        """Begin to bring what is needed in host memory of every slot's piece; events behind it.

        ``whole``: also what only a global average needs there.
        """
        message = self._message
        values = whole or (self._staged and not self._lossy)
        codes = self._staged and self._lossy
        for slot, lane in enumerate(self.lanes if values or codes else []):
            with current(lane.device), on(lane.out):
                if values:
                    there = message.own[self.layout.span(slot)][piece]
                    there.copy_(self.areas.own[slot][piece], non_blocking=True)
                if codes:
                    there = message.codes[self.layout.span(slot, sent=True)]
                    there.copy_(self.areas.code[slot], non_blocking=True)
        return [lane.copied_out() for lane in self.lanes] if values or codes else []

    def _sources(self, now: Exchange, slot: int, piece: slice) -> list[Source]:
        """The in-neighbours' same piece, wherever it lies, in the graph's order."""
        push, count = self._reach.push, self._reach.count(now.t)
        found = [push.inbox(count, place, slot) for place in range(len(now.far))]
        return [(array if self._lossy else array[piece], self._lossy) for array in found]

    def finish(self, now: Exchange, into: torch.Tensor | None) -> Segments:
        """The sums, formed while messages came, in memory that was registered for it."""
        self._reach.wait(now.ticket, f"round {now.t}")
        return self._mixed

    # -- averages over all nodes --------------------------------------------------------------

    def average(self, now: Exchange) -> None:
        """Begin a global average."""
        self._encode(now.number)
        now.ticket = self._together(f"round {now.t}", lambda ready: self._average(now))

    def _together(self, what: str, work: Callable[[list], None]) -> Future:
        """Let the courier do what all nodes take part in; NCCL's part in it is begun here."""
        if self._nccl is None:
            return self._submit(work)
        links, everyone = self._nccl.links, range(self._reach.n)
        self._follow()
        work([])
        return self._submit(lambda ready: links.settle(what, everyone))

    def _average(self, now: Exchange) -> None:
        """Begin a global average, on the devices where they reach each other.

        All of it is done on the lanes, which follow what fills the outbox.
        """
        reach, areas = self._reach, self.areas
        if reach.n == 1:
            for lane, own, mixed in zip(self.lanes, areas.own, areas.mixed, strict=True):
                with on(lane.into):
                    mixed.copy_(own)
        elif not self._on_devices:
            self._average_on_host(now)
        elif self._codes_go_round:
            everyone = averages.gather(self._on_devices, areas.code, self.lanes, self._kept)
            for slot, (own, codes) in enumerate(zip(areas.own, everyone, strict=True)):
                terms = [(row, True) for row in codes]
                terms[reach.rank] = (own, False)
                self._sums.add([1 / reach.n] * reach.n, slot, self.pieces[0].sent, terms)
        else:
            averages.by_messages(
                self._on_devices, areas.own, areas.mixed, self.layout, self.lanes, self._kept,
                self._share,
            )  # fmt: skip

    def _average_on_host(self, now: Exchange) -> None:
        for events in [self._copy_out(piece.sent, whole=True) for piece in self.pieces]:
            for event in events:
                _ = event and event.synchronize()
        self._message.average()
        for slot, lane in enumerate(self.lanes):
            with current(lane.device), on(lane.into):
                result = self._message.result[self.layout.span(slot)]
                self.areas.mixed[slot].copy_(result, non_blocking=True)

    def mean(self, x: torch.Tensor) -> torch.Tensor | None:
        """Of a vector on a slot's device, which stays there where devices reach each other."""
        if x.device not in self.devices:
            return None
        reach, own, out = self._reach, x[0].contiguous(), torch.empty_like(x[0])
        if not self._on_devices:
            averages.mean_through(reach.comm, self._through, own, out, reach.timeout_s)
            return out

        def work(ready: list) -> None:
            slot = self.devices.index(x.device)
            averages.mean_by_messages(
                self._on_devices, slot, own, out, self.lanes[slot], self._kept, self._share
            )

        what = "the average of a vector"
        reach.wait(self._together(what, work), what)
        return out

    def close(self) -> None:
        """Unpin and let go."""
        self._unpin()
        self.out = self._mixed = self._message = self._sums = self._kept = None
        self.areas, self._through = None, []
