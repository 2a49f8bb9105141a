"""The memory of a rank's slots and the routes to its neighbours, chosen at start and explained.

Part of :class:`mpigossip.mixing.device.windows.DeviceWindows`; its docstring says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.base import Layout
from mpigossip.mixing.device.aware import proven
from mpigossip.mixing.device.mapping import reaches
from mpigossip.mixing.device.memory import Mapped, MemoryRefused, can_map, handles, pin, private
from mpigossip.mixing.device.nccl import NcclPush
from mpigossip.mixing.device.push import BySlot, DevicePush, Lane
from mpigossip.mixing.push import PushWindow
from mpigossip.mixing.shared import SharedHost
from mpigossip.mixing.windows import Windows

WAYS = {"auto": ("device", "nccl"), "device": ("device",), "nccl": ("nccl",), "host": ()}
"""What is tried by `node.gpu_window` to reach other nodes, before host memory or a refusal."""
STAGE = 1 << 24
"""Bytes of a vector that are averaged at once where other ranks map the memory."""


class DeviceMemory(Windows):
    """Outbox, result and codes of each slot, windows and mapped memory; ``routes``."""

    layout: BySlot
    _through: list[torch.Tensor]
    _far = "host"

    def __init__(
        self, graph, layout: Layout, world, same_host: str, timeout_s: float, gpu_window: str
    ):
        """Collective; see :class:`mpigossip.mixing.device.windows.DeviceWindows`."""
        names = layout.devices or ("cpu",) * len(layout.widths)
        self._devices = [torch.device(name) for name in names]
        self._staged_on = list(dict.fromkeys(self._devices))
        self._lanes = [Lane(device) for device in self._devices]
        self._asked = gpu_window
        self._why: dict[str, list[str]] = {"near": [], "far": [], "all": []}
        self._unpin: Callable[[], None] = lambda: None
        self._mapped: dict[int, Mapped] = {}
        given = {f: getattr(layout, f) for f in Layout.__dataclass_fields__}
        by_slot = BySlot(**given | {"devices": tuple(names)})
        self._memory_of_own(by_slot)
        super().__init__(graph, by_slot, world, same_host=same_host, timeout_s=timeout_s)

    @staticmethod
    def holds(graph, layout: Layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: outbox, result, codes of the slots on their devices, stages to average vectors.

        "host": the messages in host memory, which neighbours need that no device is reached from.
        """
        host = Windows.holds(graph, layout, node, near, averages)
        inbox, first = host.pop("inbox"), Layout(layout.widths[:1], layout.vectors, layout.scalars)
        return {
            "outbox": layout.nbytes,
            "result": layout.nbytes,
            "encoded": 0 if layout.wire.exact else layout.sent_bytes,
            "stages": 2 * min(STAGE, first.nbytes) * len(set(layout.devices) or {"cpu"}),
            "inbox": inbox,
            "host": sum(host.values()),
        }

    def _memory_of_own(self, layout: BySlot) -> None:
        """Outbox, result and codes of each slot: allocations of their own where they are shared."""
        parts = [layout.of(slot) for slot in range(len(self._devices))]
        coded = 0 if layout.wire.exact else 1
        sizes = [(part.nbytes, part.nbytes, coded * part.sent_bytes) for part in parts]
        # on each device a vector's piece and its average: the mean of vectors that lie elsewhere
        self._stage: list[torch.Tensor] = []
        if self._asked != "host":
            try:
                self._take(sizes, private)
                room = min(STAGE, parts[0].nbytes)
                self._stage = [private(room, on) for on in self._staged_on for _ in range(2)]
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
        shared = [*self._own, *self._mixed_memory, *self._stage]
        where = [*self._devices * 2, *(on for on in self._staged_on for _ in range(2))]
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
                self._mapped[place] = Mapped(given, sizes, where)
            except MemoryRefused as error:
                failed = str(error)
        # all or none on a host: a reader that maps and one that doesn't need other outboxes
        reasons = [text for text in on_host.allgather(failed) if text]
        if not reasons:
            failed = reaches(on_host, shared, self._mapped)
            reasons = [text for text in on_host.allgather(failed) if text]
        if reasons:
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped = {}
            self._why["near"].append(failed or f"another rank of this host: {reasons[0]}")
        else:
            self._why["near"].append("mapped from a process of the same host")

    def _open_push(self) -> PushWindow | DevicePush | NcclPush | None:
        """The inboxes: on the devices where MPI is proven able, else in host memory."""
        if len(self._near[self.rank]) == self.n:
            return None
        why: list[str] = []
        for way in WAYS[self._asked]:
            try:
                push, said = self._open_way(way)
                self._far, self._why["far"] = way, [said, *why]
                return push
            except MemoryRefused as error:
                why.append(str(error))
        if self._asked in ("device", "nccl"):
            raise MemoryRefused(
                f'node.gpu_window = "{self._asked}": {why[0]}; "auto" takes the best way there is '
                "(`mpigossip doctor` says what was asked)"
            )
        self._why["far"] = why or ['node.gpu_window = "host"']
        own = self._host is None and not self._lossy
        sizes = [self.layout.of(slot).sent_bytes for slot in range(len(self._lanes))]
        return PushWindow(self._comm, sizes, self._plans.places, self._timeout_s, outbox=own)

    def _open_way(self, way: str) -> tuple[DevicePush | NcclPush, str]:
        """Inboxes on the devices, filled this way, and why; MemoryRefused where it can't be."""
        given = self._comm, self.layout, self._lanes, self._plans.places, self._timeout_s
        if way == "nccl":
            return NcclPush(*given), "NCCL brought a message to every slot's GPU"
        able, why = proven(self._comm, self._devices)
        if not able:
            raise MemoryRefused(f"{why}; use a GPU-aware MPI")
        return DevicePush(*given), why

    @property
    def _on_devices(self) -> DevicePush | NcclPush | None:
        """What brings messages from device to device, by MPI or NCCL; None where nothing does."""
        return None if isinstance(self._push, PushWindow) else self._push

    @property
    def _stages_out(self) -> bool:
        """Whether gossip needs the message, not encoded, in host memory."""
        by_host = self._host is not None and self._host.size > 1 and not self._mapped
        by_push = self._push is not None and not self._on_devices
        return by_host or (by_push and not self._lossy)

    @property
    def routes(self) -> dict[int, str]:
        """How each other rank is reached, and why: "ipc", "device", "nccl" or "host"; a reason."""
        found, far = {}, self._far
        for rank in range(self.n):
            near = rank in self._places_on_host
            route = ("ipc" if self._mapped else "host") if near else far
            reasons = [*self._why["near" if near else "far"], *self._why["all"]]
            found[rank] = route + (f" ({'; '.join(reasons)})" if reasons else "")
        del found[self.rank]
        return found

    def _pin_all(self) -> None:
        """Lock the host memory that copies use; what can't be locked is noted and slower."""
        if not self._stages_out and (self._push is None or self._on_devices):
            return
        stretches = [*self._through]
        stretches += [*self._host.outboxes, self._host.result] if self._host else [self._message]
        stretches += [self._codes] if self._codes is not None else []
        stretches += [self._push.memory] if isinstance(self._push, PushWindow) else []
        try:
            self._unpin = pin(stretches, self._devices[0])
        except MemoryRefused as error:
            self._why["all"].append(str(error))
