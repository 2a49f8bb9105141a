"""Windows between nodes whose vectors lie on GPUs; the CPU runs the same code in the tests.

Three ways to a neighbour, chosen at start (`node.gpu_window`):

* "ipc": on the same host, its GPU memory is mapped and read in place, as shared memory is on the
  CPU (CUDA IPC);
* "device": MPI puts from GPU memory into GPU memory, where it is proven to be able to;
* "host": through pinned memory in pieces; copy out, wire and copy in run at the same time.

A round is one job of the communication thread: for each piece it waits until the piece is there
to be sent, sends it, takes in the neighbours' same piece and sums on the receiver's stream. MPI
never touches memory that a stream still writes: an event is waited for first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.aware import proven
from mpigossip.mixing.base import Kind, Layout, Segments, combine
from mpigossip.mixing.memory import Mapped, MemoryRefused, handles, pin, private
from mpigossip.mixing.messages import Courier
from mpigossip.mixing.pieces import BySlot, DevicePush, Lane, PiecePush, current, on
from mpigossip.mixing.push import PushWindow
from mpigossip.mixing.shared import SharedHost
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
        self._notes: list[str] = []
        self._unpin: list[Callable[[], None]] = []
        self._mapped: dict[int, Mapped] = {}
        given = {f: getattr(layout, f) for f in Layout.__dataclass_fields__}
        by_slot = BySlot(**given | {"devices": tuple(names)})
        self._own = [torch.empty(0)] * len(names)
        self._memory_of_own(by_slot)
        super().__init__(graph, by_slot, world, same_host=same_host, timeout_s=timeout_s)
        slots = range(len(names))
        self._mixed_memory = [torch.empty_like(memory) for memory in self._own]
        self._out = [by_slot.of(s).views(self._own[s])[0] for s in slots]
        self._mixed = [by_slot.of(s).views(self._mixed_memory[s])[0] for s in slots]
        self._scratch: dict[tuple[int, int], torch.Tensor] = {}
        through_host = self._stages_out and not self._lossy
        size = self._own[0].numel()
        step = PIECE if through_host else size
        self._pieces = [slice(at, min(at + step, size)) for at in range(0, size, step)]
        threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._courier = self._push.courier if self._push else Courier(
            self._comm, threaded=threaded, poll=False, timeout_s=timeout_s
        )  # fmt: skip
        self._pin_all()

    # -- ways to the neighbours -----------------------------------------------------------

    def _memory_of_own(self, layout: BySlot) -> None:
        """The outbox of each slot: an allocation of its own where it may be shared."""
        sizes = [layout.of(slot).nbytes for slot in range(len(self._devices))]
        if self._asked != "host":
            try:
                self._own = [private(*pair) for pair in zip(sizes, self._devices, strict=True)]
                return
            except MemoryRefused as error:
                self._notes.append(str(error))
        self._own = [
            torch.zeros(size, dtype=torch.uint8, device=device)
            for size, device in zip(sizes, self._devices, strict=True)
        ]

    def _open_host(self, same_host: str) -> SharedHost | None:
        """Shared memory with the ranks of this host, and their GPUs' memory where it maps."""
        host = super()._open_host(same_host)
        if host is None or self._asked == "host":
            return host
        on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            self._map(on_host)
        finally:
            on_host.Free()
        return host

    def _map(self, on_host: MPI.Comm) -> None:
        mine: list[bytes] | None = None
        if all(device.type == "cuda" for device in self._devices) and not self._notes:
            try:
                mine = handles(self._own)
            except RuntimeError as error:
                self._notes.append(f"cudaIpcGetMemHandle failed: {error}")
        everyone = on_host.allgather(mine)
        failed = "" if all(everyone) else "not all ranks of this host offer their memory"
        for place, given in enumerate(everyone):
            if place == on_host.rank or failed:
                continue
            try:
                self._mapped[place] = Mapped(given, self._own[0].numel(), self._devices)
            except MemoryRefused as error:
                failed = str(error)
        # all or none on a host: a reader that maps and one that doesn't need other outboxes
        if any(on_host.allgather(failed)):
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped = {}
            if failed:
                self._notes.append(failed)

    def _open_push(self, several_hosts: bool) -> PushWindow | None:
        """The inbox window: on the devices where MPI is proven able, else in host memory."""
        if len(self._near[self.rank]) == self.n:
            return None
        wanted = self._asked != "host" and self.layout.wire.exact
        able, why = proven(self._comm, self._devices[0]) if wanted else (False, "not asked for")
        if self._asked == "device" and wanted and not able:
            raise MemoryRefused(
                f'node.gpu_window = "device": {why}; use a GPU-aware MPI (`mpigossip doctor` says '
                'what was asked), or "auto"'
            )
        self._notes.append(why)
        options = {
            "threaded": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            "poll": several_hosts,
            "timeout_s": self._timeout_s,
        }
        places = self._inbox_places()
        if able:
            return DevicePush(self._comm, self.layout, self._devices, places, **options)
        outbox = self._host is None and self.layout.wire.exact
        return PiecePush(self._comm, self.layout.sent_bytes, places, outbox=outbox, **options)

    @property
    def _stages_out(self) -> bool:
        """Whether gossip needs the message in host memory."""
        by_host = self._host is not None and self._host.size > 1 and not self._mapped
        by_push = self._push is not None and not isinstance(self._push, DevicePush)
        return by_host or (by_push and not self._lossy)

    @property
    def routes(self) -> dict[int, str]:
        """The way to each other rank, and why: "ipc", "device" or "host", then a reason."""
        near = "ipc" if self._mapped else "host"
        far = "device" if isinstance(self._push, DevicePush) else "host"
        why = f" ({'; '.join(self._notes)})" if self._notes else ""
        ranks = (rank for rank in range(self.n) if rank != self.rank)
        return {r: (near if r in self._places_on_host else far) + why for r in ranks}

    def _pin_all(self) -> None:
        """Lock the host memory that copies use; what can't be locked is noted and slower."""
        stretches = [*self._host.outboxes, self._host.result] if self._host else [self._message]
        if self._push is not None and self._push.memory.numel():
            stretches.append(self._push.memory)
        pinned: set[int] = set()
        for memory in stretches:
            inside = self._push is not None and self._push.outbox is memory
            if memory.data_ptr() in pinned or inside:
                continue
            pinned.add(memory.data_ptr())
            try:
                self._unpin.append(pin(memory, self._devices[0]))
            except MemoryRefused as error:
                self._notes.append(str(error))

    # -- a round ------------------------------------------------------------------------

    def _partner(self, now: Round) -> None:
        """No averaging by halves: what is summed lies on the devices."""

    def _start_gossip(self, now: Round) -> None:
        ready = [lane.ready() for lane in self._lanes]
        now.ticket = self._courier.submit(lambda: self._exchange(now, ready))

    def _start_global(self, now: Round) -> None:
        ready = [lane.ready() for lane in self._lanes]
        now.ticket = self._courier.submit(lambda: self._average(now, ready))

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
        push, host, many = self._push, self._host, len(self._pieces)
        count, targets = now.t - self._first, self._targets(now)
        readers, sources = self._on_host(now.readers), self._on_host(now.sources)
        far = self._far(self.rank, now.sources)
        for lane, event in zip(self._lanes, ready, strict=True):
            lane.follow(event)
        copied = [self._copy_out(piece) for piece in self._pieces] if self._stages_out else []
        if push:
            push.await_room([rank for rank, _ in targets], count)
        for k, piece in enumerate(self._pieces):
            for event in copied[k] if copied else ready:
                _ = event and event.synchronize()
            if host:
                host.publish(readers, now.t * many + k)
            if push:
                self._put(piece, targets, count)
                push.sent([rank for rank, _ in targets], count * many + k)
                push.await_arrived(far, count * many + k)
            if host:
                host.await_ready(sources, now.t * many + k)
            self._sum(now, piece)
        for lane in self._lanes:
            lane.drain()
        if host:
            host.release(sources, now.t)

    def _copy_out(self, piece: slice) -> list:
        """Begin to bring a piece of every slot to host memory; events behind it."""
        for slot, lane in enumerate(self._lanes):
            with on(lane.out):
                self._in_message(slot, piece).copy_(self._own[slot][piece], non_blocking=True)
        return [lane.copied_out() for lane in self._lanes]

    def _in_message(self, slot: int, piece: slice) -> torch.Tensor:
        return self._message[self.layout.span(slot)][piece]

    def _put(self, piece: slice, targets: Sequence[tuple[int, int]], count: int) -> None:
        if isinstance(self._push, DevicePush):
            self._push.put_slots(self._own, targets, count)
        elif self._lossy:
            self._push.put(self._codes, [slice(0, self._codes.numel())], targets, count)
        else:
            starts = [self.layout.span(slot).start for slot in range(len(self._lanes))]
            spans = [slice(at + piece.start, at + piece.stop) for at in starts]
            self._push.put(self._message, spans, targets, count)

    def _sum(self, now: Round, piece: slice) -> None:
        """The one sum over a piece of every slot, behind the copies in on the same stream."""
        for slot, lane in enumerate(self._lanes):
            with current(lane.device), on(lane.into):
                arrays = [self._own[slot][piece], *self._sources(now, slot, piece)]
                for dtype, part in self.layout.of(slot).parts:
                    low, high = max(part.start, piece.start), min(part.stop, piece.stop)
                    if low >= high:
                        continue
                    inside = slice(low - piece.start, high - piece.start)
                    rows = [array[inside].view(dtype).unsqueeze(0) for array in arrays]
                    out = self._mixed_memory[slot][low:high].view(dtype).unsqueeze(0)
                    combine(now.weights, rows, out)

    def _sources(self, now: Round, slot: int, piece: slice) -> list[torch.Tensor]:
        """The in-neighbours' same piece on the slot's device, in the graph's order."""
        found, place, count = [], 0, now.t - self._first
        span = self.layout.span(slot)
        for index, j in enumerate(now.sources):
            near = self._places_on_host.get(j)
            if near is not None and self._mapped:
                array = self._mapped[near].arrays[slot][piece]
            elif near is not None:
                array = self._host.outboxes[near][span][piece]
            elif isinstance(self._push, DevicePush):
                array = self._push.slot_inbox(count, place, slot)[piece]
            elif self._lossy:
                array = self._decoded(self._push.inbox(count, place), slot, index)
            else:
                array = self._push.inbox(count, place)[span][piece]
            place += near is None
            found.append(self._brought(array, slot, index))
        return found

    def _brought(self, array: torch.Tensor, slot: int, index: int) -> torch.Tensor:
        """The array itself where the slot's device reaches it, else a copy there."""
        device = self._lanes[slot].device
        if array.device == device:
            return array
        copy = self._room(slot, index, array.numel())
        return copy.copy_(array, non_blocking=True)

    def _room(self, slot: int, index: int, size: int) -> torch.Tensor:
        """Scratch on the slot's device for the ``index``-th source; reused in stream order."""
        key, largest = (slot, index), self._own[slot].numel()
        if key not in self._scratch:
            whole = largest if self._lossy else self._pieces[0].stop
            self._scratch[key] = torch.empty(
                whole, dtype=torch.uint8, device=self._lanes[slot].device
            )
        return self._scratch[key][:size]

    def _decoded(self, codes: torch.Tensor, slot: int, index: int) -> torch.Tensor:
        """A slot's part of an encoded message, decoded on the slot's device."""
        layout = self.layout.of(slot)
        codes = codes[self.layout.span(slot, sent=True)].to(self._lanes[slot].device)
        out = self._room(slot, index, layout.nbytes)
        width = layout.widths[0]
        for part, array in enumerate(layout.views(out)[0]):
            at = layout.place(0, part)
            if part < layout.vectors:
                layout.wire.unpack(codes[at:], width, slice(0, width), array)
            else:
                array.copy_(codes[at : at + 8].view(torch.float64).view(1, 1))
        return out

    def _average(self, now: Round, ready: list) -> None:
        """A global average, in host memory; runs in the courier."""
        for lane, event in zip(self._lanes, ready, strict=True):
            lane.follow(event)
        for events in [self._copy_out(piece) for piece in self._pieces]:
            for event in events:
                _ = event and event.synchronize()
        if self._push is None:
            self._host.publish(self._host.others, now.t)
            self._host.average(self.layout.parts, now.t)
        else:
            self._average_by_messages()
        for slot, lane in enumerate(self._lanes):
            with on(lane.into):
                result = self._result[self.layout.span(slot)]
                self._mixed_memory[slot].copy_(result, non_blocking=True)
            lane.drain()

    def close(self) -> None:
        """Finish an open round, take in outstanding tokens, free the memory; collective."""
        if self._out is None:
            return
        if self._round is not None and not self._round.finished:
            self.finish()
        self._leave_round()
        for mapped in self._mapped.values():
            mapped.close()
        for undo in self._unpin:
            undo()
        self._mapped, self._unpin, self._mixed = {}, [], []
        if self._push is None:
            self._courier.close()
        # a neighbour may still have this rank's memory mapped: it is freed after all have let go
        self._comm.Barrier()
        super().close()
        self._own, self._mixed_memory, self._scratch = [], [], {}
