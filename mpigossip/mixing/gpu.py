"""Windows between nodes whose vectors lie on GPUs; the CPU runs the same code in the tests.

Three ways to a neighbour, chosen at start (`node.gpu_window`):

* "ipc": on the same host, its GPU memory is mapped and read in place, as shared memory is on the
  CPU (CUDA IPC);
* "device": MPI puts from GPU memory into GPU memory, where it is proven to be able to;
* "host": through pinned memory in pieces; copy out, wire and copy in run at the same time.

A round is one job of the communication thread: for each piece it waits until the piece is there
to be sent, sends it, takes in the neighbours' same piece and sums on the receiver's stream. MPI
never touches memory that a stream still writes: an event is waited for first. Over a lossy wire
what travels is encoded on the device and decoded there (bfloat16 within the sum), in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing import fused, gpu_average
from mpigossip.mixing.aware import proven
from mpigossip.mixing.base import Kind, Layout, Segments
from mpigossip.mixing.gpu_sum import Source, Sums
from mpigossip.mixing.memory import Mapped, MemoryRefused, can_map, current, handles, pin, private
from mpigossip.mixing.messages import Courier, Job, wait_all
from mpigossip.mixing.pieces import BySlot, DevicePush, Lane, PiecePush, on
from mpigossip.mixing.push import PushWindow
from mpigossip.mixing.shared import SharedHost
from mpigossip.mixing.stream import Piece
from mpigossip.mixing.windows import Round, Windows

PIECE = 1 << 24
"""Bytes of a slot that are copied and sent at once; a multiple of 4096 (whole buckets)."""


class DeviceWindows(Windows):
    """The mixer of one rank whose slots are on ``layout.devices``; ``routes`` says the ways."""

    layout: BySlot
    _push: PiecePush | None

    def __init__(
        self, graph, layout: Layout, world, *, same_host="read", timeout_s=300.0, memory="auto"
    ):
        """Collective. ``memory``: "auto", "device" or "host" (`node.gpu_window`).

        Raises MemoryRefused where "device" is asked for and MPI can't.
        """
        names = layout.devices or ("cpu",) * len(layout.widths)
        self._devices = [torch.device(name) for name in names]
        self._lanes = [Lane(device) for device in self._devices]
        self._asked = memory
        self._why: dict[str, list[str]] = {"near": [], "far": [], "all": []}
        self._unpin: Callable[[], None] = lambda: None
        self._mapped: dict[int, Mapped] = {}
        given = {f: getattr(layout, f) for f in Layout.__dataclass_fields__}
        by_slot = BySlot(**given | {"devices": tuple(names)})
        self._memory_of_own(by_slot)
        super().__init__(graph, by_slot, world, same_host=same_host, timeout_s=timeout_s)
        slots = range(len(names))
        self._out = [by_slot.of(s).views(self._own[s])[0] for s in slots]
        self._mixed = [by_slot.of(s).views(self._mixed_memory[s])[0] for s in slots]
        self._sums = Sums(by_slot, self._lanes, self._mixed_memory)
        size = self._own[0].numel()
        # the same number of pieces on all ranks: tokens count them
        staged = any(self._comm.allgather(self._stages_out)) and not self._lossy
        step = PIECE if staged else size
        self._spans = [slice(at, min(at + step, size)) for at in range(0, size, step)]
        if self._push:
            self._push.count_in_pieces(len(self._spans))
        threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._courier = self._push.courier if self._push else Courier(
            self._comm, threaded=threaded, poll=False, timeout_s=timeout_s
        )  # fmt: skip
        self._pin_all()

    # -- ways to the neighbours -----------------------------------------------------------

    def _memory_of_own(self, layout: BySlot) -> None:
        """Outbox, result and codes of each slot: allocations of their own where they are shared."""
        parts = [layout.of(slot) for slot in range(len(self._devices))]
        coded = 0 if layout.wire.exact else 1
        sizes = [(part.nbytes, part.nbytes, coded * part.sent_bytes) for part in parts]
        if self._asked != "host":
            try:
                self._take(sizes, private)
                return
            except MemoryRefused as error:
                self._why["all"].append(str(error))
        self._take(sizes, lambda size, on: torch.zeros(size, dtype=torch.uint8, device=on))

    def _take(self, sizes: Sequence[tuple[int, ...]], allocate: Callable) -> None:
        taken = [
            [allocate(size, device) for size in three]
            for three, device in zip(sizes, self._devices, strict=True)
        ]
        self._own, self._mixed_memory, self._code = map(list, zip(*taken, strict=True))

    def _open_host(self, same_host: str) -> SharedHost | None:
        """Shared memory with the ranks of this host, and their GPUs' memory where it maps."""
        host = super()._open_host(same_host)
        if host is None or self._asked == "host":
            self._why["near"].append('node.gpu_window = "host"')
            return host
        on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            self._map(on_host)
        finally:
            on_host.Free()
        return host

    def _map(self, on_host: MPI.Comm) -> None:
        mine: list[bytes] | None = None
        shared = self._own + self._mixed_memory
        if can_map(self._devices) and not self._why["all"]:
            try:
                mine = handles(shared)
            except RuntimeError as error:
                self._why["near"].append(f"cudaIpcGetMemHandle failed: {error}")
        everyone = on_host.allgather(mine)
        failed = "" if all(everyone) else "not all ranks of this host offer their memory"
        for place, given in enumerate(everyone):
            if place == on_host.rank or failed:
                continue
            try:
                sizes = [memory.numel() for memory in shared]
                self._mapped[place] = Mapped(given, sizes, self._devices * 2)
            except MemoryRefused as error:
                failed = str(error)
        # all or none on a host: a reader that maps and one that doesn't need other outboxes
        reasons = [text for text in on_host.allgather(failed) if text]
        if reasons:
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped = {}
            self._why["near"].append(failed or f"another rank of this host: {reasons[0]}")
        else:
            self._why["near"].append("mapped from a process of the same host")

    def _open_push(self, several_hosts: bool) -> PushWindow | None:
        """The inbox window: on the devices where MPI is proven able, else in host memory."""
        if len(self._near[self.rank]) == self.n:
            return None
        options = {
            "threaded": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            "poll": several_hosts,
            "timeout_s": self._timeout_s,
        }
        able, why, places = False, 'node.gpu_window = "host"', self._inbox_places()
        if self._asked != "host":
            able, why = proven(self._comm, self._devices[0])
        if able:
            try:
                push = DevicePush(self._comm, self.layout, self._devices, places, **options)
                self._why["far"].append(why)
                return push
            except MemoryRefused as error:
                why = str(error)
        if self._asked == "device":
            raise MemoryRefused(
                f'node.gpu_window = "device": {why}; use a GPU-aware MPI (`mpigossip doctor` says '
                'what was asked), or "auto"'
            )
        self._why["far"].append(why)
        outbox = self._host is None and self.layout.wire.exact
        return PiecePush(self._comm, self.layout, places, outbox=outbox, **options)

    @property
    def _on_devices(self) -> bool:
        """Whether MPI puts from device to device."""
        return isinstance(self._push, DevicePush)

    @property
    def _stages_out(self) -> bool:
        """Whether gossip needs the message, not encoded, in host memory."""
        by_host = self._host is not None and self._host.size > 1 and not self._mapped
        by_push = self._push is not None and not self._on_devices
        return by_host or (by_push and not self._lossy)

    @property
    def routes(self) -> dict[int, str]:
        """The way to each other rank, and why: "ipc", "device" or "host", then a reason."""
        found, far = {}, "device" if self._on_devices else "host"
        for rank in range(self.n):
            near = rank in self._places_on_host
            way = ("ipc" if self._mapped else "host") if near else far
            reasons = [*self._why["near" if near else "far"], *self._why["all"]]
            found[rank] = way + (f" ({'; '.join(reasons)})" if reasons else "")
        del found[self.rank]
        return found

    def _pin_all(self) -> None:
        """Lock the host memory that copies use; what can't be locked is noted and slower."""
        if not self._stages_out and (self._push is None or self._on_devices):
            return
        stretches = [*self._host.outboxes, self._host.result] if self._host else [self._message]
        stretches += [self._codes] if self._codes is not None else []
        stretches += [self._push.memory] if self._push is not None else []
        try:
            self._unpin = pin(stretches, self._devices[0])
        except MemoryRefused as error:
            self._why["all"].append(str(error))

    # -- a round ------------------------------------------------------------------------

    def _partner(self, now: Round) -> None:
        """No averaging by halves: what is summed lies on the devices."""

    def _encode(self, now: Round, piece: Piece | None = None) -> None:
        """Quantize the outbox of every slot in place, its codes beside it on the device."""
        first = 0
        if not self._lossy:
            return
        for slot, width in enumerate(self.layout.widths):
            layout, codes, parts = self.layout.of(slot), self._code[slot], self._out[slot]
            with current(self._devices[slot]):
                for vector in range(layout.vectors):
                    values, at = parts[vector][0], layout.place(0, vector)
                    if layout.wire.name == "bf16":
                        room = codes[at : at + 2 * width].view(torch.bfloat16)
                        if fused.encode(values, room):
                            continue
                    key = (now.exchange, self.rank, vector)
                    layout.wire.write(values, key, first, codes[at:])
                for k, value in enumerate(parts[layout.vectors :]):
                    at = layout.place(0, layout.vectors + k)
                    codes[at : at + 8].view(torch.float64).copy_(value[0])
            first += width

    def _start_gossip(self, now: Round) -> None:
        self._encode(now)
        now.ticket = self._submit(self._exchange, now)

    def _start_global(self, now: Round) -> None:
        self._encode(now)
        now.ticket = self._submit(self._average, now)

    def _submit(self, work: Callable[[Round, list], None], now: Round) -> Job:
        """Let the courier do a round's work behind what the devices have been given so far."""
        ready = [lane.ready() for lane in self._lanes]

        def job() -> None:
            # a thread begins on device 0, and would open a context there
            with current(self._devices[0]):
                for lane, event in zip(self._lanes, ready, strict=True):
                    lane.follow(event)
                work(now, ready)

        return self._courier.submit(job)

    def finish(self) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed`` of the open round."""
        now = self._round
        now.finished = True
        if now.kind is Kind.LOCAL:
            return self._out, self._out
        self._waited += self._courier.wait(now.ticket, f"round {now.t}")
        return self._out, self._mixed

    @property
    def waited(self) -> float:
        """Seconds that the training thread spent waiting for the exchange so far."""
        return self._waited

    def _exchange(self, now: Round, ready: list) -> None:
        """Send and receive piece by piece, sum as pieces come; runs in the courier."""
        push, host, many = self._push, self._host, len(self._spans)
        count, targets = now.t - self._first, now.targets
        readers, sources = self._on_host(now.readers), self._on_host(now.sources)
        far = self._far(self.rank, now.sources)
        copied = [self._copy_out(piece) for piece in self._spans]
        if push:
            push.await_room([rank for rank, _ in targets], count)
        for k, piece in enumerate(self._spans):
            for event in copied[k] or ready:
                _ = event and event.synchronize()
            if host:
                host.publish(readers, now.t * many + k)
            if push:
                self._put(piece, targets, count)
                push.sent([rank for rank, _ in targets], count * many + k)
                push.await_arrived(far, count * many + k)
            if host:
                host.await_ready(sources, now.t * many + k)
            for slot in range(len(self._lanes)):
                terms = [(self._own[slot][piece], False), *self._sources_in(now, slot, piece)]
                self._sums.add(now.weights, slot, piece, terms)
        for lane in self._lanes:
            lane.drain()
        if host:
            host.release(sources, now.t)

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

    def _put(self, piece: slice, targets: Sequence[tuple[int, int]], count: int) -> None:
        if isinstance(self._push, DevicePush):
            memory = self._code if self._lossy else [own[piece] for own in self._own]
            self._push.put_slots(memory, 0 if self._lossy else piece.start, targets, count)
        elif self._lossy:
            self._push.put(self._codes, [slice(0, self._codes.numel())], targets, count)
        else:
            starts = [self.layout.span(slot).start for slot in range(len(self._lanes))]
            spans = [slice(at + piece.start, at + piece.stop) for at in starts]
            self._push.put(self._message, spans, targets, count)

    def _sources_in(self, now: Round, slot: int, piece: slice) -> list[Source]:
        """The in-neighbours' same piece, wherever it lies, in the graph's order."""
        found: list[Source] = []
        place, count = 0, now.t - self._first
        for j in now.sources:
            near = self._places_on_host.get(j)
            if near is not None and self._mapped:
                found.append((self._mapped[near].arrays[slot][piece], False))
            elif near is not None:
                found.append((self._host.outboxes[near][self.layout.span(slot)][piece], False))
            else:
                array = self._push.slot_inbox(count, place, slot)
                found.append((array if self._lossy else array[piece], self._lossy))
                place += 1
        return found

    def _average(self, now: Round, ready: list) -> None:
        """A global average, on the devices where they reach each other; runs in the courier."""
        for event in ready:
            _ = event and event.synchronize()
        timeout_s, comm = self._timeout_s, self._push.comm if self._push else self._comm
        if self.n == 1:
            for lane, own, mixed in zip(self._lanes, self._own, self._mixed_memory, strict=True):
                with on(lane.into):
                    mixed.copy_(own)
        elif self._push is None and self._mapped:
            mine = [*self._own, *self._mixed_memory]
            areas = [self._mapped[p].arrays if p in self._mapped else mine for p in range(self.n)]
            gpu_average.by_peers(self._host, areas, self.layout, self._lanes, now.t)
        elif not self._on_devices:
            self._average_on_host(now)
        elif self._lossy and self.n * self.layout.sent_bytes < 2 * self.layout.nbytes:
            everyone = gpu_average.gather(comm, self._code, self._lanes, timeout_s)
            for slot, (own, codes) in enumerate(zip(self._own, everyone, strict=True)):
                terms = [(row, True) for row in codes]
                terms[self.rank] = (own, False)
                self._sums.add([1 / self.n] * self.n, slot, self._spans[0], terms)
        else:
            memory = self._own, self._mixed_memory
            gpu_average.by_messages(comm, *memory, self.layout, self._lanes, timeout_s)
        for lane in self._lanes:
            lane.drain()

    def _average_on_host(self, now: Round) -> None:
        for events in [self._copy_out(piece, whole=True) for piece in self._spans]:
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
        if self._push is None:
            self._courier.close()
        # a neighbour may still have this rank's memory mapped: it is freed after all have let go
        late = "closing the exchange: not all ranks of this job come".format
        wait_all({0: self._comm.Ibarrier()}, self._timeout_s, late)
        super().close()
        self._own, self._mixed_memory, self._code, self._sums = [], [], [], None
