"""The memory of a rank's slots and the routes to its neighbours, chosen at start and explained.

:mod:`mpigossip.mixing.device.slots` says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mpigossip.mixing.device.aware import proven
from mpigossip.mixing.device.mapping import reaches
from mpigossip.mixing.device.memory import Mapped, MemoryRefused, can_map, handles, private
from mpigossip.mixing.device.nccl import NcclPush
from mpigossip.mixing.device.push import BySlot, DevicePush, Lane
from mpigossip.mixing.host.push import PushWindow
from mpigossip.mixing.host.shared import SharedHost
from mpigossip.mixing.stream import Reach

WAYS = {"auto": ("device", "nccl"), "device": ("device",), "nccl": ("nccl",), "host": ()}
"""What is tried by `node.gpu_window` to reach other nodes, before host memory or a refusal."""
STAGE = 1 << 24
"""Bytes of a vector that are averaged at once where other ranks map the memory."""
Push = PushWindow | DevicePush | NcclPush


class Areas:
    """Outbox, result and codes of each slot, uint8; allocations of their own where shared."""

    def __init__(self, layout: BySlot, devices: Sequence[torch.device], *, shared: bool):
        """``refused``: why they aren't shared, where they should have been."""
        parts = [layout.of(slot) for slot in range(len(devices))]
        coded = 0 if layout.wire.exact else 1
        self._sizes = [(part.nbytes, part.nbytes, coded * part.sent_bytes) for part in parts]
        self._devices, self.staged_on = devices, list(dict.fromkeys(devices))
        # on each device a vector's piece and its average: the mean of vectors that lie elsewhere
        self.stage: list[torch.Tensor] = []
        self.refused = ""
        if shared:
            try:
                self._take(private)
                room = min(STAGE, parts[0].nbytes)
                self.stage = [private(room, on) for on in self.staged_on for _ in range(2)]
                return
            except MemoryRefused as error:
                self.refused = str(error)
        self._take(lambda size, on: torch.zeros(size, dtype=torch.uint8, device=on))

    def _take(self, allocate: Callable) -> None:
        taken = [
            [allocate(size, device) for size in three]
            for three, device in zip(self._sizes, self._devices, strict=True)
        ]
        self.own, self.mixed, self.code = map(list, zip(*taken, strict=True))

    @property
    def shared(self) -> list[torch.Tensor]:
        """What other ranks of the host may map, in their order."""
        return [*self.own, *self.mixed, *self.stage]

    @property
    def where(self) -> list[torch.device]:
        """On which device each of them is."""
        return [*self._devices, *self._devices, *(on for on in self.staged_on for _ in range(2))]


class Peers:
    """GPU memory of this host's other ranks, mapped and read where it lies.

    Contract: :class:`mpigossip.mixing.stream.Route`; what is said goes by the host's signals.
    """

    def __init__(self, host: SharedHost, mapped: Mapping[int, Mapped]):
        """``mapped``: by place on the host, in the order of `Areas.shared`."""
        self.signals, self.put, self.sent, self.sync = host.signals, host.put, host.sent, host.sync
        self._mapped = mapped

    def inbox(self, count: int, place: int, area: int) -> torch.Tensor:
        """The outbox of a slot."""
        return self._mapped[place].arrays[area]

    def shared(self, mine: Sequence[torch.Tensor], size: int) -> list[Sequence[torch.Tensor]]:
        """Everyone's areas by place on the host, this rank's own among them."""
        return [self._mapped[k].arrays if k in self._mapped else mine for k in range(size)]

    def close(self) -> None:
        """Unmap; others may still have this rank's memory mapped."""
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped = {}


def peers(
    host: SharedHost, areas: Areas, devices: Sequence[torch.device]
) -> tuple[Peers | None, str]:
    """The memory of this host's GPUs, mapped, or None; and why. Collective on the host."""
    on_host, mine, mapped, why = host.signals.comm, None, dict[int, Mapped](), ""
    if can_map(devices) and not areas.refused:
        try:
            mine = handles(areas.shared)
        except RuntimeError as error:
            why = f"cudaIpcGetMemHandle failed: {error}; "
    everyone = on_host.allgather(mine)
    failed = "" if all(everyone) else "not all ranks of this host offer their memory"
    for place, given in enumerate(everyone):
        if place == on_host.rank or failed:
            continue
        try:
            sizes = [memory.numel() for memory in areas.shared]
            mapped[place] = Mapped(given, sizes, areas.where)
        except MemoryRefused as error:
            failed = str(error)
    # all or none on a host: a reader that maps and one that doesn't need other outboxes
    reasons = [text for text in on_host.allgather(failed) if text]
    if not reasons:
        failed = reaches(on_host, areas.shared, mapped)
        reasons = [text for text in on_host.allgather(failed) if text]
    found = Peers(host, mapped)
    if not reasons:
        return found, "mapped from a process of the same host"
    found.close()
    return None, why + (failed or f"another rank of this host: {reasons[0]}")


def inboxes(
    asked: str, reach: Reach, layout: BySlot, lanes: Sequence[Lane], places: int
) -> tuple[Push, str, list[str]]:
    """Inboxes on the devices where something is proven able to fill them, else in host memory.

    With the way's name, and why. MemoryRefused where "device" or "nccl" is asked for in vain.
    """
    why: list[str] = []
    for way in WAYS[asked]:
        try:
            push, said = _on_devices(way, reach, layout, lanes, places)
            return push, way, [said, *why]
        except MemoryRefused as error:
            why.append(str(error))
    if asked in ("device", "nccl"):
        raise MemoryRefused(
            f'node.gpu_window = "{asked}": {why[0]}; "auto" takes the best way there is '
            "(`mpigossip doctor` says what was asked)"
        )
    own, sizes = reach.host is None and layout.wire.exact, layout.sizes
    staged = PushWindow(reach.comm, sizes, places, reach.timeout_s, outbox=own)
    return staged, "host", why or ['node.gpu_window = "host"']


def _on_devices(
    way: str, reach: Reach, layout: BySlot, lanes: Sequence[Lane], places: int
) -> tuple[DevicePush | NcclPush, str]:
    """Inboxes on the devices, filled this way, and why; MemoryRefused where it can't be."""
    given = reach.comm, layout, lanes, places, reach.timeout_s
    if way == "nccl":
        return NcclPush(*given), "NCCL brought a message to every slot's GPU"
    able, why = proven(reach.comm, [lane.device for lane in lanes])
    if not able:
        raise MemoryRefused(f"{why}; use a GPU-aware MPI")
    return DevicePush(*given), why
