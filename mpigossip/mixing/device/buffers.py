"""Messages on the devices of a rank's slots, and their sums there; see `pipeline.Buffers`.

Before MPI accesses memory that a CUDA stream writes, the thread waits for an event of the stream.
If the inboxes of the transport are in host memory, chunks are copied from and to the devices while
other chunks are being sent. The tests run the same code on the CPU.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from mpigossip.mixing.base import MessageArrays, MessageLayout
from mpigossip.mixing.combine import Source, sum_messages
from mpigossip.mixing.device.memory import (
    TransportUnavailable,
    device_context,
    flush_rdma_writes,
    ordinary,
    pin,
)
from mpigossip.mixing.device.streams import Streams
from mpigossip.mixing.exact_average import ByRank, average, average_encoded
from mpigossip.mixing.host_memory import HostBuffers, host_buffers
from mpigossip.mixing.plan import MessageChunk
from mpigossip.mixing.transports import Transport
from mpigossip.mixing.wire import encode_slot

SHARE = 1 << 24
"""Largest size, in bytes, of the memory for received data of a slot in an average of decoded
values. It is only exceeded if 8 bytes for each node take more."""


class DeviceBuffers:
    """Outbox, encoded message and result of every slot on its device.

    If the transport sends from host memory, there are staging buffers on the host in addition.
    """

    def __init__(
        self,
        layout: MessageLayout,
        rank: int,
        n: int,
        transport: Transport,
        streams: Sequence[Streams],
    ):
        """Allocate all buffers.

        :param layout: layout of the message
        :param rank: number of this rank
        :param n: number of ranks
        :param transport: transport that sends the messages
        :param streams: streams of each slot
        :raises TransportUnavailable: if memory that MPI may access can't be allocated
        """
        self._layout = layout
        self._rank = rank
        self._n = n
        self._streams = streams
        allocate = transport.allocate
        lossy = not layout.wire.exact
        devices = [slot_streams.device for slot_streams in streams]
        own = [allocate(layout.slot_bytes, device) for device in devices]
        self._mixed = [allocate(layout.slot_bytes, device) for device in devices]
        size = layout.slot_sent_bytes
        self.encoded = [allocate(size, device) for device in devices] if lossy else None
        self.sent = self.encoded or own
        self._own = own
        self.out: MessageArrays = [layout.slot_views(memory) for memory in own]
        self.result: MessageArrays = [layout.slot_views(memory) for memory in self._mixed]
        self._ready: list[torch.cuda.Event | None] = []
        self._copied: list[list[torch.cuda.Event | None]] = []
        self.host: HostBuffers | None = None
        self._average_inboxes: list[torch.Tensor] = []
        self._means_memory: dict[tuple[str, int], torch.Tensor] = {}
        self._totals: dict[int, torch.Tensor] = {}
        self._checks: dict[int, Callable[[], None]] = {}
        self._unpin: Callable[[], None] = lambda: None
        if n > 1 and not transport.on_device:
            self.host = host_buffers(layout, rank, n, None, transport)
            self._inbox = [
                [ordinary(size, device) for device in devices] for _ in range(transport.buffers)
            ]
        elif n > 1:
            self._share = max(min(SHARE, layout.slot_bytes), 8 * n)
            gathers = n * size if self._gathers else 0
            self._average_inboxes = [
                allocate(max(self._share, gathers), device) for device in devices
            ]

    def pin(self, memory: Sequence[torch.Tensor]) -> str:
        """Lock the host memory from and to which GPUs copy messages, so that copies are faster.

        Return an empty string. If it fails, return the reason; copies are then only slower.

        :param memory: host memory of the transport
        """
        arrays = [*memory]
        if self.host:
            arrays += [self.host.own, self.host.memory, *(self.host.encoded or [])]
        try:
            self._unpin = pin(arrays, self._streams[0].device)
        except TransportUnavailable as error:
            return str(error)
        return ""

    @property
    def _gathers(self) -> bool:
        """True if an average sends less by encoded messages of all nodes than by decoded values."""
        layout = self._layout
        return not layout.wire.exact and self._n * layout.sent_bytes < 2 * layout.nbytes

    def begin(self, number: int, average: bool = False) -> None:
        """Encode the outbox on the current stream of each slot.

        The streams of copies and sums wait for this work.
        """
        for slot, parts in enumerate(self.out if self.encoded else ()):
            with device_context(self._streams[slot].device):
                encode_slot(self._layout, slot, parts, [self._rank], number, self.encoded[slot])
        self._ready = [slot_streams.ready() for slot_streams in self._streams]
        self._copied = []
        for slot_streams, event in zip(self._streams, self._ready, strict=True):
            slot_streams.follow(event)

    def stage(self, chunk: MessageChunk) -> None:
        """Launch the copies of a chunk to host memory, unless they were launched before."""
        if self.host is not None and chunk.number == len(self._copied):
            self._copied.append(self._copy_out(self.sent, self.host.sent, chunk.span))

    def check_later(
        self, segment: int, totals: torch.Tensor, check: Callable[[torch.Tensor], None]
    ) -> None:
        """Let :meth:`prepare` call ``check`` with ``totals`` on the host, before a chunk is sent.

        :param segment: index of the segment; checks are called in this order
        :param totals: values on the segment's device, computed on its current stream
        :param check: function that raises an error if the message must not be sent
        """
        if segment not in self._totals:
            self._totals[segment] = torch.empty(totals.shape, dtype=totals.dtype).pin_memory()
        # :meth:`begin` records an event behind this copy
        on_host = self._totals[segment].copy_(totals, non_blocking=True)
        self._checks[segment] = partial(check, on_host)

    def prepare(self, number: int, chunk: MessageChunk) -> list[torch.Tensor]:
        """Wait until a chunk can be sent: the slots' streams have written it.

        If the transport sends from host memory, also wait until the chunk is copied there.

        :raises NonFiniteError: if a check of :meth:`check_later` fails
        """
        if self.host is None:
            _wait(self._ready)  # waits for the slots' streams, which fill the outbox
        else:
            self.stage(chunk)
            _wait(self._copied[chunk.number])  # waits for the copies to host memory
        checks, self._checks = self._checks, {}
        for segment in sorted(checks):
            checks[segment]()
        return self.sent if self.host is None else self.host.sent

    def _copy_out(
        self, sources: Sequence[torch.Tensor], to: Sequence[torch.Tensor], span: slice
    ) -> list[torch.cuda.Event | None]:
        for source, target, slot_streams in zip(sources, to, self._streams, strict=True):
            with slot_streams.outgoing():
                target[span].copy_(source[span], non_blocking=True)
        return [slot_streams.copied_out() for slot_streams in self._streams]

    def add(
        self,
        weights: Sequence[float],
        received: Sequence[Sequence[Source]],
        chunk: MessageChunk,
        into: MessageArrays | None = None,
    ) -> None:
        for slot, slot_streams in enumerate(self._streams):
            sources: list[Source] = [self.out[slot]]
            with slot_streams.incoming():
                for k, messages in enumerate(received):
                    message = messages[slot]
                    if self.host and isinstance(message, torch.Tensor):
                        inbox = self._inbox[k][slot]
                        inbox[chunk.span].copy_(message[chunk.span], non_blocking=True)
                        message = inbox
                    is_complete = self.encoded or not isinstance(message, torch.Tensor)
                    sources.append(message if is_complete else self._layout.slot_views(message))
                sum_messages(self._layout, weights, sources, self.result[slot], chunk.fields)

    def average(self, transport: Transport, weights: Sequence[float]) -> float:
        """Average on the devices if the transport accesses them, otherwise in host memory."""
        if self._n == 1:
            for own, mixed, slot_streams in zip(self._own, self._mixed, self._streams, strict=True):
                with slot_streams.incoming():
                    mixed.copy_(own)
            return 0.0
        if self.host:
            return self._on_host(self.host, transport, weights)
        layout = self._layout
        rank = self._rank
        n = self._n
        swap = self._swap(transport)

        if self._gathers:

            def on(s: int) -> AbstractContextManager[None]:
                return self._streams[s].incoming()

            size = layout.slot_sent_bytes
            rows = [inbox[: n * size].view(n, size) for inbox in self._average_inboxes]
            return average_encoded(
                layout, rank, weights, self.sent, rows, self.out, self.result, swap, on
            )
        waited = 0.0
        for dtype, part in layout.slot_parts:
            own, out = (
                [array[part].view(dtype) for array in arrays] for arrays in (self._own, self._mixed)
            )
            waited += self._average_arrays(weights, own, out, swap)
        return waited

    def _average_arrays(
        self,
        weights: Sequence[float],
        own: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        swap: Callable[[ByRank, ByRank], float],
    ) -> float:
        """Average an array of each slot on the devices; return the seconds waited."""
        dtype = own[0].dtype
        inboxes = [inbox[: self._share].view(dtype) for inbox in self._average_inboxes]
        share = len(inboxes[0]) // self._n

        def on(s: int) -> AbstractContextManager[None]:
            return self._streams[s].incoming()

        return average(self._rank, weights, own, out, swap, share=share, inboxes=inboxes, on=on)

    def means(self, arrays: Sequence[torch.Tensor], transport: Transport) -> list[torch.Tensor]:
        """Return the exact mean over all nodes of an array of each slot, on the slots' devices.

        The transport must access the devices, and no round may be in flight. This waits until the
        means are complete. MPI gets memory of the transport only, because the proof at the start of
        the run has tried no other memory; the next call may overwrite the result.

        :param arrays: for each slot, an array (p,) on its device, written by its current stream
        :param transport: transport that sends the arrays
        """
        if transport.in_main:
            own = [array.contiguous() for array in arrays]
            out = [torch.empty_like(array) for array in own]
        else:
            own = self._like(arrays, transport, "own")
            out = self._like(arrays, transport, "mean")
            for memory, array in zip(own, arrays, strict=True):
                memory.copy_(array)
        for slot_streams in self._streams:
            slot_streams.follow(slot_streams.ready())
        self._average_arrays([1 / self._n] * self._n, own, out, self._swap(transport))
        transport.wait_for_swaps("average of models")
        self.complete()
        return out

    def _like(
        self, arrays: Sequence[torch.Tensor], transport: Transport, name: str
    ) -> list[torch.Tensor]:
        """Return memory of the transport for each slot, with the length and dtype of its array.

        :param arrays: for each slot, an array (p,) on its device
        :param transport: transport that allocates the memory
        :param name: name of the memory, which later calls use again
        """
        views = []
        for slot, array in enumerate(arrays):
            needed = array.numel() * array.element_size()
            memory = self._means_memory.get((name, slot))
            if memory is None or len(memory) < needed:
                memory = transport.allocate(needed, array.device)
                self._means_memory[name, slot] = memory
            views.append(memory[:needed].view(array.dtype))
        return views

    def _on_host(self, host: HostBuffers, transport: Transport, weights: Sequence[float]) -> float:
        layout = self._layout
        all_bytes = slice(0, layout.slot_bytes)
        _wait(self._copy_out(self._own, host.own.split(layout.slot_bytes), all_bytes))
        if self.encoded and host.encoded:
            _wait(self._copy_out(self.encoded, host.encoded, slice(0, layout.slot_sent_bytes)))
        waited = host.average(transport, weights)  # waits for all ranks
        results = host.memory.split(layout.slot_bytes)
        for mixed, result, slot_streams in zip(self._mixed, results, self._streams, strict=True):
            with slot_streams.incoming():
                mixed.copy_(result, non_blocking=True)
        return waited

    def _swap(self, transport: Transport) -> Callable[[ByRank, ByRank], float]:
        """Return the transport's ``swap`` for device memory, ordered with the slots' streams."""
        if transport.in_main:
            return transport.swap

        def swap(out: ByRank, into: ByRank) -> float:
            self.complete()
            waited = transport.swap(out, into)  # waits for all ranks
            for slot_streams in self._streams if into else ():
                flush_rdma_writes(slot_streams.device)
            return waited

        return swap

    def record_reader(self) -> None:
        for slot_streams in self._streams:
            slot_streams.record_reader()

    def complete(self) -> None:
        for slot_streams in self._streams:
            slot_streams.drain()

    def close(self) -> None:
        self._unpin()
        self.out = []
        self.result = []
        self.sent = []
        self._own = []
        self._mixed = []
        self._inbox = []
        self._average_inboxes = []
        self.encoded = None
        if self.host:
            self.host.close()
            self.host = None


def _wait(events: Sequence[torch.cuda.Event | None]) -> None:
    for event in events:
        if event is not None:
            event.synchronize()
