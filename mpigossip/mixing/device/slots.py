"""A rank's slots on GPUs: their memory, and what a round does there; the CPU does so in the tests.

Four routes to a neighbour, chosen at start (`node.gpu_window`):

* "ipc": on the same host, its GPU memory is mapped and read in place, as shared memory is on the
  CPU (CUDA IPC);
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
from mpigossip.mixing.device.outbox import Outbox
from mpigossip.mixing.device.push import BySlot, DevicePush, Lane, on
from mpigossip.mixing.device.routes import STAGE, Areas, Peers, Push, inboxes, peers
from mpigossip.mixing.device.sums import Source, Sums
from mpigossip.mixing.host.push import PushWindow
from mpigossip.mixing.host.slots import HostSlots, Message
from mpigossip.mixing.plan import Exchange, Piece
from mpigossip.mixing.stream import Leg, Reach, Stream
from mpigossip.mixing.tokens import everybody, wait_all

PIECE = 1 << 24
"""Bytes of a slot that are copied and sent at once; a multiple of 4096 (whole buckets)."""


class DeviceSlots:
    """Contract: :class:`mpigossip.mixing.windows.Slots`.

    What is summed lies on the devices: no averaging by halves.
    """

    halves, threaded = False, True
    blocks: tuple[slice, ...] = ()
    waited = 0.0

    def __init__(self, layout: Layout, gpu_window: str):
        """``gpu_window``: "auto", "device", "nccl" or "host"."""
        names = layout.devices or ("cpu",) * len(layout.widths)
        self.devices = [torch.device(name) for name in names]
        self.lanes = [Lane(device) for device in self.devices]
        given = {f: getattr(layout, f) for f in Layout.__dataclass_fields__}
        self.layout = by_slot = BySlot(**given | {"devices": tuple(names)})
        self._asked, self._lossy = gpu_window, not layout.wire.exact
        self.areas = Areas(by_slot, self.devices, shared=gpu_window != "host")
        self._outbox = Outbox(by_slot, self.areas)
        self.out: Segments | None = list(self._outbox.segments)
        self._mixed = [by_slot.of(s).views(mixed)[0] for s, mixed in enumerate(self.areas.mixed)]
        self._sums = Sums(by_slot, self.lanes, self.areas.mixed)
        self._peers: Peers | None = None
        self._way, self._averaged = "host", 0
        refused = [self.areas.refused] if self.areas.refused else []
        self._why: dict[str, list[str]] = {"near": [], "far": [], "all": refused}
        self._unpin: Callable[[], None] = lambda: None

    @staticmethod
    def holds(graph, layout: Layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: outbox, result, codes of the slots on their devices, stages to average vectors.

        "host": the messages in host memory, which neighbours need that no device is reached from.
        """
        host = HostSlots.holds(graph, layout, node, near, averages)
        inbox, first = host.pop("inbox"), Layout(layout.widths[:1], layout.vectors, layout.scalars)
        return {
            "outbox": layout.nbytes,
            "result": layout.nbytes,
            "encoded": 0 if layout.wire.exact else layout.sent_bytes,
            "stages": 2 * min(STAGE, first.nbytes) * len(set(layout.devices) or {"cpu"}),
            "inbox": inbox,
            "host": sum(host.values()),
        }

    # -- opening: near, far, then what is exchanged through them ------------------------------

    def open_near(self, reach: Reach) -> None:
        """Map the GPU memory of this host's other ranks, where that can be done."""
        why = 'node.gpu_window = "host"'
        if reach.host is not None and self._asked != "host":
            self._peers, why = peers(reach.host, self.areas, self.devices)
        self._why["near"].append(why)

    def open_far(self, reach: Reach, places: int) -> Push:
        """Inboxes on the devices where they can be filled there, else in host memory."""
        found = inboxes(self._asked, reach, self.layout, self.lanes, places)
        push, self._way, self._why["far"] = found
        return push

    def open(self, reach: Reach, apart: bool) -> None:
        """Pieces, as many on all ranks; memory for averages and on the host, pinned."""
        self._reach, push = reach, reach.push
        self._on_devices = push if isinstance(push, DevicePush | NcclPush) else None
        self._nccl = push if isinstance(push, NcclPush) else None
        # what gossip needs in host memory: the message, or its codes
        by_host = reach.host is not None and reach.host.size > 1 and not self._peers
        by_push = isinstance(push, PushWindow)
        self._stages_out = by_host or (by_push and not self._lossy)
        self._cut()
        self._message = Message(self.layout, reach)
        self._share = averages.pieces(reach.n, max(own.numel() for own in self.areas.own))
        self._kept = Kept(self._rooms())
        self._through = [torch.empty(self._share, dtype=torch.uint8) for _ in range(2)]
        if self._stages_out or by_push:
            self._pin()

    def _cut(self) -> None:
        """Cut the slots: tokens count the pieces. A slot whole where none is copied."""
        reach, layout = self._reach, self.layout
        staged = any(reach.comm.allgather(self._stages_out)) and not self._lossy
        size = max(memory.numel() for memory in [*self.areas.own, *self.areas.code])
        step = PIECE if staged else size
        begins = range(0, size, step)
        self.pieces = [Piece(slice(at, at + step), (), k) for k, at in enumerate(begins)]
        for route in filter(None, (reach.host, reach.push)):
            route.signals.count_in_pieces(len(self.pieces))
        if reach.host:
            reach.host.areas = [layout.span(slot) for slot in range(len(self.lanes))]

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
        host, push, codes = self._reach.host, self._reach.push, self._message.codes
        stretches = [*self._through]
        stretches += [*host.outboxes, host.result] if host else [self._message.own]
        stretches += [codes] if codes is not None else []
        stretches += [push.memory] if isinstance(push, PushWindow) else []
        try:
            self._unpin = pin(stretches, self.devices[0])
        except MemoryRefused as error:
            self._why["all"].append(str(error))

    @property
    def routes(self) -> dict[int, str]:
        """How each other rank is reached, and why: "ipc", "device", "nccl" or "host"; a reason."""
        found = {}
        for rank in range(self._reach.n):
            near = rank in self._reach.places
            route = ("ipc" if self._peers else "host") if near else self._way
            reasons = [*self._why["near" if near else "far"], *self._why["all"]]
            found[rank] = route + (f" ({'; '.join(reasons)})" if reasons else "")
        del found[self._reach.rank]
        return found

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

    def gossip(self, now: Exchange) -> None:
        """Begin a round with the neighbours; NCCL's part in it here."""
        self._outbox.encode(now.number, self._reach.rank)
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

        reach, legs = self._reach, self._legs(now)
        Stream(legs, self.pieces, reach.timeout_s, reach.courier.rest, prepare, add).run()
        # what was read in place is summed, not only begun: the sources may write again
        for lane in self.lanes:
            lane.drain()
        if reach.host:
            reach.host.release(reach.near(now.sources), now.t)

    def _legs(self, now: Exchange) -> list[Leg]:
        """Those on this host, whom the outbox is said to be whole, and those that are pushed to."""
        legs, reach, own = [], self._reach, self.areas.own
        if reach.host:
            areas = own if self._peers else self._in_host_memory(self._message.own, coded=False)
            targets = [(place, 0) for place in reach.near(now.readers)]
            near = self._peers or reach.host
            legs.append(Leg(near, areas, now.t, targets, reach.near(now.sources)))
        if reach.push:
            areas = self.areas.code if self._lossy else own
            if not self._on_devices:
                whole = self._message.codes if self._lossy else self._message.own
                areas = self._in_host_memory(whole, coded=self._lossy)
            legs.append(Leg(reach.push, areas, reach.count(now.t), now.targets, now.far))
        return legs

    def _in_host_memory(self, message: torch.Tensor, *, coded: bool) -> list[torch.Tensor]:
        """Every slot's part of a message."""
        return [message[self.layout.span(s, sent=coded)] for s in range(len(self.lanes))]

    def _copy_out(self, piece: slice, *, whole: bool = False) -> list:
        """Begin to bring what is needed in host memory of every slot's piece; events behind it.

        ``whole``: also what only a global average needs there.
        """
        values, message = whole or self._stages_out, self._message
        codes = message.codes is not None and not self._on_devices
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
        found: list[Source] = []
        reach, near, place = self._reach, self._peers or self._reach.host, 0
        for j in now.sources:
            if j in reach.places:
                found.append((near.inbox(now.t, reach.places[j], slot)[piece], False))
            else:
                array = reach.push.inbox(reach.count(now.t), place, slot)
                found.append((array if self._lossy else array[piece], self._lossy))
                place += 1
        return found

    def finish(self, now: Exchange, into: torch.Tensor | None) -> Segments:
        """The sums, formed while messages came, in memory that was registered for it."""
        self._reach.wait(now.ticket, f"round {now.t}")
        return self._mixed

    # -- averages over all nodes --------------------------------------------------------------

    def average(self, now: Exchange) -> None:
        """Begin a global average."""
        self._outbox.encode(now.number, self._reach.rank)
        now.ticket = self._together(f"round {now.t}", lambda ready: self._average(now, ready))

    def _together(self, what: str, work: Callable[[list], None]) -> Future:
        """Let the courier do what all nodes take part in; NCCL's part in it is begun here."""
        if self._nccl is None:
            return self._submit(work)
        links, everyone = self._nccl.links, range(self._reach.n)
        self._follow()
        work([])
        return self._submit(lambda ready: links.settle(what, everyone))

    def _average(self, now: Exchange, ready: list) -> None:
        """Begin a global average, on the devices where they reach each other."""
        for event in ready:
            _ = event and event.synchronize()
        reach, areas = self._reach, self.areas
        if reach.n == 1:
            for lane, own, mixed in zip(self.lanes, areas.own, areas.mixed, strict=True):
                with on(lane.into):
                    mixed.copy_(own)
        elif self._by_peers:
            averages.by_peers(reach.host, self._everyones, self.layout, self.lanes, now.t)
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
        reach = self._reach
        if reach.push is None:
            reach.host.publish(reach.host.others, now.t)
            reach.host.average(self.layout.parts, now.t)
        else:
            self._message.average()
        for slot, lane in enumerate(self.lanes):
            with current(lane.device), on(lane.into):
                result = self._message.result[self.layout.span(slot)]
                self.areas.mixed[slot].copy_(result, non_blocking=True)

    @property
    def _by_peers(self) -> bool:
        """Whether every rank's memory is mapped here."""
        return self._reach.push is None and self._peers is not None

    @property
    def _everyones(self) -> list[Sequence[torch.Tensor]]:
        """What each rank of this host lets the others map."""
        return self._peers.shared(self.areas.shared, self._reach.n)

    def mean(self, x: torch.Tensor) -> torch.Tensor | None:
        """Of a vector on a slot's device, which stays there where devices reach each other."""
        if x.device not in self.devices:
            return None
        reach, own, out = self._reach, x[0].contiguous(), torch.empty_like(x[0])
        if not (self._by_peers or self._on_devices):
            averages.mean_through(reach.comm, self._through, own, out, reach.timeout_s)
            return out

        def work(ready: list) -> None:
            slot = self.devices.index(x.device)
            lane = self.lanes[slot]
            if self._by_peers:
                at = 2 * (len(self.devices) + self.areas.staged_on.index(x.device))
                stages = [area[at : at + 2] for area in self._everyones]
                args = reach.host, stages, lane, own, out, self._averaged
                self._averaged += averages.mean_by_peers(*args)
            else:
                averages.mean_by_messages(
                    self._on_devices, slot, own, out, lane, self._kept, self._share
                )

        what = "the average of a vector"
        reach.wait(self._together(what, work), what)
        return out

    def close(self) -> None:
        """Unmap and unpin; free what others had mapped when all have let go."""
        if self._peers:
            self._peers.close()
        self._unpin()
        # a neighbour may still have this rank's memory mapped
        late = "closing the exchange: not all ranks of this job come".format
        request = self._reach.comm.Ibarrier()
        wait_all({0: request}, self._reach.timeout_s, late, everybody)
        self.out = self._mixed = self._message = self._sums = self._kept = self._peers = None
        self.areas, self._outbox, self._through = None, None, []
