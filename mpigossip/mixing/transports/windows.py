"""Transport by MPI_Put into the inbox buffers of out-neighbours, on the host or on GPUs.

A rank puts a chunk, flushes the window, and then notifies the out-neighbour.
"""

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window, register_windows
from mpigossip.cluster.deadline import world_ranks
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import (
    TransportUnavailable,
    create,
    device_context,
    flush_rdma_writes,
    private,
)
from mpigossip.mixing.exact_average import CUT, raw
from mpigossip.mixing.notifications import ARRIVED, FREE
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState
from mpigossip.mixing.progress_thread import run_on_all_ranks
from mpigossip.mixing.transports import Transport, inboxes

FLIGHT = 1 << 18
"""Smallest intended size, in bytes, of the puts into which a chunk in host memory is divided. A
chunk has about sixteen puts to each out-neighbour, or fewer if they would be smaller than this."""
CPU = torch.device("cpu")
LIMIT_S = 60.0
"""Largest time limit, in seconds, for opening windows over GPU memory."""
CREATING = "MPI_Win_create of GPU memory"


class Windows(Transport):
    """Transport with double-buffered inboxes in MPI windows.

    On the host, one window holds all slots in memory that MPI allocates; on GPUs, each slot has a
    window. In the round with a given index, the message of the k-th in-neighbour that sends to this
    rank is in buffer k of half ``index mod 2``. The rank that owns the buffer frees it after the
    sum of round t, for the rank that writes to it in round t + 2. A rank notifies its out-neighbour
    after ``Win.Flush``, because the completion of a put does not mean that the data has arrived.
    """

    halves = 2

    def __init__(
        self,
        comm: MPI.Intracomm,
        layout: MessageLayout,
        buffers: int,
        timeout_s: float,
        *,
        devices: Sequence[torch.device] = (),
        outbox: bool = False,
    ):
        """Open the windows; collective.

        :param comm: communicator of the nodes
        :param layout: layout of a node's message
        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param timeout_s: time limit of each wait, in seconds
        :param devices: devices of the slots' windows; empty: memory that MPI allocates on the host
        :param outbox: whether the window also has memory for the message that this rank sends
        :raises TransportUnavailable: on all ranks, if windows over GPU memory can't be opened on
            one
        """
        count = 2 * buffers
        size = layout.slot_sent_bytes
        slots = layout.slots
        self._devices = devices or [CPU] * slots
        self.on_device = bool(devices)
        self._windows: list[MPI.Win] = []
        self._buffer_counts = comm.allgather(buffers)
        if devices:
            self.allocate = private
            areas = inboxes(comm, layout, count, devices, private)
            own = comm.Dup()

            def open_all() -> None:
                for area, device in zip(areas, devices, strict=True):
                    with device_context(device):
                        self._windows.append(create(raw(area), own))

            keep = (self._windows, areas)
            limit_s = min(timeout_s, LIMIT_S)
            if problem := run_on_all_ranks(
                comm, open_all, lambda: CREATING, limit_s, devices[0], keep
            ):
                raise TransportUnavailable(problem)
            own.Free()
            register_windows(self._windows)
            # distance between two buffers, and offset of each slot in a buffer
            self._stride = size
            self._begins = [0] * slots
        else:
            nbytes = size * slots * (count + outbox)
            window = open_window(MPI.Win.Allocate, max(nbytes, 8), comm)
            memory = torch.frombuffer(window.tomemory(), dtype=torch.uint8)[:nbytes]
            self.outbox = memory[size * slots * count :] if outbox else None
            self.memory = [memory]
            all_buffers = memory[: size * slots * count].view(count, slots, size)
            areas = list(all_buffers.unbind(1))
            self._windows = [window] * slots
            self._stride = size * slots
            self._begins = [size * slot for slot in range(slots)]
        self._inbox = [[area[k] for area in areas] for k in range(count)]
        self._opened = self._windows if devices else self._windows[:1]
        super().__init__(comm, layout, buffers, timeout_s)

    def is_free(self, r: RoundState, rank: int) -> bool:
        return r.index < 2 or self.notifications.arrived(rank, FREE, self.number(r))

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Put a chunk of every slot's message into the windows of the out-neighbours.

        All puts are started at once. If a put waited for the completion of an earlier one, it would
        wait for a reply that queues behind the message of the other rank; this took 1.5 times as
        long at 35 Mbit/s.
        """
        in_flight: list[MPI.Request] = []
        span = chunk.span
        half = r.index % 2
        step = min(CUT, max(FLIGHT, (span.stop - span.start) // 16))
        for rank, buffer in r.plan.targets:
            base = (half * self._buffer_counts[rank] + buffer) * self._stride
            for slot, message in enumerate(memory):
                offset = base + self._begins[slot]
                if self.on_device:
                    self._put(slot, message, span, rank, offset)
                    continue
                array = message.numpy()
                window = self._windows[slot]
                for begin in range(span.start, span.stop, step):
                    piece = array[begin : min(begin + step, span.stop)]
                    target = [offset + begin, piece.size, MPI.BYTE]
                    in_flight.append(window.Rput([piece, MPI.BYTE], rank, target))
        return in_flight

    def _put(self, slot: int, memory: torch.Tensor, span: slice, rank: int, offset: int) -> None:
        """Put bytes of a slot's message from device to device; a flush completes the transfer.

        :param slot: index of the slot
        :param memory: message of the slot, on its device, which is made current
        :param span: range of bytes of the message
        :param rank: rank whose window is written
        :param offset: offset in that window of the first byte of the message
        """
        with device_context(self._devices[slot]):
            for begin in range(span.start, span.stop, CUT):
                piece = raw(memory[begin : min(begin + CUT, span.stop)])
                target = [offset + begin, len(piece), MPI.BYTE]
                self._windows[slot].Put([piece, MPI.BYTE], rank, target)

    def notify(self, r: RoundState, chunk: MessageChunk) -> None:
        for rank, _ in r.plan.targets:
            for device, window in zip(self._devices, self._opened, strict=False):
                with device_context(device):
                    window.Flush(rank)  # waits until the data is in the reader's memory
            self.notifications.send([rank], ARRIVED, self.number(r, chunk))

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        return self.notifications.arrived(source, ARRIVED, self.number(r, chunk))

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        for device, window in zip(self._devices, self._opened, strict=False):
            window.Sync()
            if self.on_device:
                flush_rdma_writes(device)
        return self._inbox[(r.index % 2) * self.buffers + buffer]

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        number = self.number(r) + 2 * len(self.chunks)
        self.notifications.send(coming.remote_sources, FREE, number)

    def skip(self, r: RoundState, coming: RoundPlan) -> None:
        """Pass the notifications on with which a round would have begun and ended.

        This waits until the out-neighbours have freed the buffers of round t, as they do at the end
        of round t − 2.
        """
        if r.index >= 2:
            readers = [rank for rank, _ in r.plan.targets]
            self.notifications.wait(readers, FREE, self.number(r))
        self.release(r, coming)

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        rank = min(ranks)
        chunk_count = len(self.chunks)
        if r.blocked_readers:
            return self.notifications.describe_late(rank, FREE, self.number(r))
        if (count := r.arrived.get(rank, chunk_count)) < chunk_count:
            return self.notifications.describe_late(
                rank, ARRIVED, self.number(r, self.chunks[count])
            )
        return f"a put to ranks {world_ranks(self.comm, ranks)} doesn't complete (round {r.t})"

    def close(self, coming: Sequence[tuple[int, RoundPlan]] = ()) -> None:
        for index, plan in coming:
            readers = [rank for rank, _ in plan.targets]
            self.notifications.wait(readers, FREE, index * len(self.chunks))
        self.memory = []
        self.outbox = None
        self._inbox = []
        for window in self._opened:
            close_window(window, self.comm)
        self._windows = self._opened = []
        super().close()
