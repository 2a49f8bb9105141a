"""Windows between nodes whose vectors lie on GPUs; the CPU runs the same code in the tests.

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

from mpigossip.mixing.base import Kind, Layout, Segments
from mpigossip.mixing.device import averages
from mpigossip.mixing.device.memory import Kept, current
from mpigossip.mixing.device.nccl import NcclPush
from mpigossip.mixing.device.push import on
from mpigossip.mixing.device.routes import DeviceMemory
from mpigossip.mixing.device.sums import Source, Sums
from mpigossip.mixing.kernels import fused
from mpigossip.mixing.kernels.onepass import Coded
from mpigossip.mixing.plan import Exchange, Piece
from mpigossip.mixing.stream import Leg, Stream
from mpigossip.mixing.tokens import everybody, wait_all

PIECE = 1 << 24
"""Bytes of a slot that are copied and sent at once; a multiple of 4096 (whole buckets)."""


class DeviceWindows(DeviceMemory):
    """The mixer of one rank whose slots are on ``layout.devices``; ``routes``: to the others.

    What is summed lies on the devices: no averaging by halves.
    """

    halves = False

    def __init__(
        self, graph, layout: Layout, world, *, same_host="read", timeout_s=300.0, gpu_window="auto"
    ):
        """Collective. ``gpu_window``: "auto", "device", "nccl" or "host".

        Raises MemoryRefused where "device" or "nccl" is asked for and can't be had.
        """
        super().__init__(graph, layout, world, same_host, timeout_s, gpu_window)
        by_slot, slots = self.layout, range(len(self._devices))
        self._coded = [Coded(by_slot.of(s).views(self._own[s])[0]) for s in slots]
        self._out = list(self._coded)
        self._mixed = [by_slot.of(s).views(self._mixed_memory[s])[0] for s in slots]
        for s in slots if layout.wire.name == "bf16" else ():
            self._coded[s].codes = tuple(self._room(s, k)[None] for k in range(layout.vectors))
        self._sums = Sums(by_slot, self._lanes, self._mixed_memory)
        self._share = averages.pieces(self.n, max(own.numel() for own in self._own))
        self._averaged = 0
        self._kept = Kept(self._rooms())
        self._through = [torch.empty(self._share, dtype=torch.uint8) for _ in range(2)]
        self._courier = self._courier or self._open_courier(poll=False)
        self._pin_all()

    def _open_pieces(self) -> None:
        """As many on all ranks, whose tokens count them; a slot's whole where none is copied."""
        staged = any(self._comm.allgather(self._stages_out)) and not self._lossy
        size = max(memory.numel() for memory in [*self._own, *self._code])
        step = PIECE if staged else size
        begins = range(0, size, step)
        self._pieces = [Piece(slice(at, at + step), (), k) for k, at in enumerate(begins)]
        for route in filter(None, (self._host, self._push)):
            route.signals.count_in_pieces(len(self._pieces))
        if self._host:
            self._host.areas = [self.layout.span(slot) for slot in range(len(self._own))]

    def _encode(self, now: Exchange, piece: Piece | None = None) -> None:
        """Quantize the outbox of every slot in place, its codes beside it on the device."""
        if not self._lossy:
            return
        for slot in range(len(self.layout.widths)):
            layout, codes, parts = self.layout.of(slot), self._code[slot], self._coded[slot]
            with current(self._devices[slot]):
                for vector in () if parts.written else range(layout.vectors):
                    values, at = parts[vector][0], layout.place(0, vector)
                    if layout.wire.name == "bf16" and fused.encode(
                        values, self._room(slot, vector)
                    ):
                        continue
                    key = (now.number, self.rank, vector)
                    layout.wire.write(values, key, layout.begin(0), codes[at:])
                for k, value in enumerate(parts[layout.vectors :]):
                    at = layout.place(0, layout.vectors + k)
                    codes[at : at + 8].view(torch.float64).copy_(value[0])
            parts.written = False

    def _rooms(self) -> dict:
        """Memory that averages by messages from GPU to GPU need besides."""
        if not self._on_devices:
            return {}
        found = averages.rooms(self._devices, self._share)
        if self._codes_go_round:
            for slot, (device, codes) in enumerate(zip(self._devices, self._code, strict=True)):
                found[device, f"codes {slot}"] = self.n * codes.numel()
        return found

    @property
    def _codes_go_round(self) -> bool:
        """Whether in a global average everyone's codes are less than a sum's parts."""
        return self._lossy and self.n * self.layout.sent_bytes < 2 * self.layout.nbytes

    def _room(self, slot: int, vector: int) -> torch.Tensor:
        """Where a vector's bfloat16 codes go."""
        at, nbytes = self.layout.of(slot).place(0, vector), 2 * self.layout.widths[slot]
        return self._code[slot][at : at + nbytes].view(torch.bfloat16)

    def _start_gossip(self, now: Exchange) -> None:
        self._encode(now)
        if self._nccl:
            self._follow()
            memory, count = self._code if self._lossy else self._own, now.t - self._first
            self._nccl.begin(memory, now.targets, now.far, count)
        now.ticket = self._submit(lambda ready: self._exchange(now, ready))

    def _start_global(self, now: Exchange) -> None:
        self._encode(now)
        now.ticket = self._together(f"round {now.t}", lambda ready: self._average(now, ready))

    def _together(self, what: str, work: Callable[[list], None]) -> Future:
        """Let the courier do what all nodes take part in; NCCL's part in it is begun here."""
        if self._nccl is None:
            return self._submit(work)
        links, everyone = self._nccl.links, range(self.n)
        self._follow()
        work([])
        return self._submit(lambda ready: links.settle(what, everyone))

    @property
    def _nccl(self) -> NcclPush | None:
        return self._push if isinstance(self._push, NcclPush) else None

    def _follow(self) -> list:
        """Let the lanes follow what the devices have been given so far; events behind that."""
        ready = [lane.ready() for lane in self._lanes]
        for lane, event in zip(self._lanes, ready, strict=True):
            lane.follow(event)
        return ready

    def _submit(self, work: Callable[[list], None]) -> Future:
        """Let the courier do ``work(ready)`` behind what the devices have been given so far.

        Its sums are over when the job is.
        """
        ready = self._follow()

        def job() -> None:
            # a thread begins on device 0, and would open a context there
            with current(self._devices[0]):
                work(ready)
                for lane in self._lanes:
                    lane.drain()

        return self._courier.submit(job)

    def finish(self) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed`` of the open round."""
        now = self._round
        now.finished = True
        if now.kind is Kind.LOCAL:
            return self._out, self._out
        self._waited += self._courier.wait(now.ticket, f"round {now.t}")
        return self._out, self._mixed

    def finish_into(self, x: torch.Tensor) -> tuple[Segments, Segments]:
        """The same: sums are formed while messages come, in memory that was registered for it."""
        return self.finish()

    @property
    def waited(self) -> float:
        """Seconds that the training thread spent waiting for the exchange so far."""
        return self._waited

    def _exchange(self, now: Exchange, ready: list) -> None:
        """Send and receive piece by piece, sum as pieces come; runs in the courier."""
        # all copies out are begun at once, each awaited when its piece is to be sent
        copied = [self._copy_out(piece.sent) for piece in self._pieces]

        def prepare(piece: Piece) -> None:
            # the devices have filled the piece (and it is in host memory): MPI knows no stream
            for event in copied[piece.number] or ready:
                _ = event and event.synchronize()

        def add(piece: Piece) -> None:
            for slot, own in enumerate(self._own):
                sources = self._sources_in(now, slot, piece.sent)
                self._sums.add(now.weights, slot, piece.sent, [(own[piece.sent], False), *sources])

        legs, rest = self._legs(now), self._courier.rest
        Stream(legs, self._pieces, self._timeout_s, rest, prepare, add).run()
        # what was read in place is summed, not only begun: the sources may write again
        for lane in self._lanes:
            lane.drain()
        if self._host:
            self._host.release(self._on_host(now.sources), now.t)

    def _legs(self, now: Exchange) -> list[Leg]:
        """Those on this host, whom the outbox is said to be whole, and those that are pushed to."""
        legs, slots = [], range(len(self._own))
        if self._host:
            message = [self._message[self.layout.span(slot)] for slot in slots]
            areas, readers = self._own if self._mapped else message, self._on_host(now.readers)
            places = [(place, 0) for place in readers]
            legs.append(Leg(self._host, areas, now.t, places, self._on_host(now.sources)))
        if self._push:
            areas = self._code if self._lossy else self._own
            if not self._on_devices:
                whole = self._codes if self._lossy else self._message
                areas = [whole[self.layout.span(slot, sent=self._lossy)] for slot in slots]
            legs.append(Leg(self._push, areas, now.t - self._first, now.targets, now.far))
        return legs

    def _copy_out(self, piece: slice, *, whole: bool = False) -> list:
        """Begin to bring what is needed in host memory of every slot's piece; events behind it.

        ``whole``: also what only a global average needs there.
        """
        values = whole or self._stages_out
        codes = self._codes is not None and not self._on_devices
        for slot, lane in enumerate(self._lanes if values or codes else []):
            with current(lane.device), on(lane.out):
                if values:
                    self._in_message(slot, piece).copy_(self._own[slot][piece], non_blocking=True)
                if codes:
                    there = self._codes[self.layout.span(slot, sent=True)]
                    there.copy_(self._code[slot], non_blocking=True)
        return [lane.copied_out() for lane in self._lanes] if values or codes else []

    def _in_message(self, slot: int, piece: slice) -> torch.Tensor:
        return self._message[self.layout.span(slot)][piece]

    def _sources_in(self, now: Exchange, slot: int, piece: slice) -> list[Source]:
        """The in-neighbours' same piece, wherever it lies, in the graph's order."""
        found: list[Source] = []
        place, count = 0, now.t - self._first
        for j in now.sources:
            near = self._places_on_host.get(j)
            if near is not None and self._mapped:
                found.append((self._mapped[near].arrays[slot][piece], False))
            elif near is not None:
                found.append((self._host.inbox(count, near, slot)[piece], False))
            else:
                array = self._push.inbox(count, place, slot)
                found.append((array if self._lossy else array[piece], self._lossy))
                place += 1
        return found

    def _average(self, now: Exchange, ready: list) -> None:
        """Begin a global average, on the devices where they reach each other."""
        for event in ready:
            _ = event and event.synchronize()
        if self.n == 1:
            for lane, own, mixed in zip(self._lanes, self._own, self._mixed_memory, strict=True):
                with on(lane.into):
                    mixed.copy_(own)
        elif self._push is None and self._mapped:
            averages.by_peers(self._host, self._areas, self.layout, self._lanes, now.t)
        elif not self._on_devices:
            self._average_on_host(now)
        elif self._codes_go_round:
            everyone = averages.gather(self._on_devices, self._code, self._lanes, self._kept)
            for slot, (own, codes) in enumerate(zip(self._own, everyone, strict=True)):
                terms = [(row, True) for row in codes]
                terms[self.rank] = (own, False)
                self._sums.add([1 / self.n] * self.n, slot, self._pieces[0].sent, terms)
        else:
            averages.by_messages(
                self._on_devices, self._own, self._mixed_memory, self.layout, self._lanes,
                self._kept, self._share,
            )  # fmt: skip

    @property
    def _areas(self) -> list[Sequence[torch.Tensor]]:
        """What each rank of this host lets the others map, in their order: own, mixed, stage."""
        mine = [*self._own, *self._mixed_memory, *self._stage]
        return [self._mapped[p].arrays if p in self._mapped else mine for p in range(self.n)]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Exact average over nodes of x (1, p), summed in node order: (p,), equal bits.

        A vector on a slot's device stays there where devices reach each other.
        """
        by_peers = self._push is None and bool(self._mapped)
        if x.device not in self._devices:
            return super().mean(x)
        own, out = x[0].contiguous(), torch.empty_like(x[0])
        if not (by_peers or self._on_devices):
            averages.mean_through(self._comm, self._through, own, out, self._timeout_s)
            return out

        def work(ready: list) -> None:
            slot = self._devices.index(x.device)
            lane = self._lanes[slot]
            if by_peers:
                at = 2 * (len(self._devices) + self._staged_on.index(x.device))
                stages = [area[at : at + 2] for area in self._areas]
                args = self._host, stages, lane, own, out, self._averaged
                self._averaged += averages.mean_by_peers(*args)
            else:
                averages.mean_by_messages(
                    self._on_devices, slot, own, out, lane, self._kept, self._share
                )

        what = "the average of a vector"
        self._waited += self._courier.wait(self._together(what, work), what)
        return out

    def _average_on_host(self, now: Exchange) -> None:
        for events in [self._copy_out(piece.sent, whole=True) for piece in self._pieces]:
            for event in events:
                _ = event and event.synchronize()
        if self._push is None:
            self._host.publish(self._host.others, now.t)
            self._host.average(self.layout.parts, now.t)
        else:
            self._average_by_messages()
        for slot, lane in enumerate(self._lanes):
            with current(lane.device), on(lane.into):
                result = self._result[self.layout.span(slot)]
                self._mixed_memory[slot].copy_(result, non_blocking=True)

    def close(self) -> None:
        """Finish an open round, take in outstanding tokens, free the memory; collective."""
        if self._out is None:
            return
        if self._round is not None and not self._round.finished:
            self.finish()
        self._leave_round()
        for mapped in self._mapped.values():
            mapped.close()
        self._unpin()
        self._mapped, self._mixed = {}, []
        self._courier.close()
        # a neighbour may still have this rank's memory mapped: it is freed after all have let go
        late = "closing the exchange: not all ranks of this job come".format
        wait_all({0: self._comm.Ibarrier()}, self._timeout_s, late, everybody)
        super().close()
        self._own, self._mixed_memory, self._code, self._stage = [], [], [], []
        self._sums, self._kept, self._through = None, None, []
