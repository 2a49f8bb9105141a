"""The memory of a rank's slots and the routes to its neighbours, chosen at start and explained.

:mod:`mpigossip.mixing.device.slots` says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mpigossip.mixing.device.aware import proven
from mpigossip.mixing.device.memory import MemoryRefused, private
from mpigossip.mixing.device.nccl import NcclPush
from mpigossip.mixing.device.push import BySlot, DevicePush, Lane
from mpigossip.mixing.host.push import PushWindow
from mpigossip.mixing.stream import Reach

WAYS = {"auto": ("device", "nccl"), "device": ("device",), "nccl": ("nccl",), "host": ()}
"""What is tried by `node.gpu_window` to reach other nodes, before host memory or a refusal."""
Push = PushWindow | DevicePush | NcclPush


class Areas:
    """Outbox, result and codes of each slot, uint8; allocations of their own where MPI reaches."""

    def __init__(self, layout: BySlot, devices: Sequence[torch.device], *, own: bool):
        """``own``: as allocations of their own; ``refused``: why they aren't."""
        parts = [layout.of(slot) for slot in range(len(devices))]
        coded = 0 if layout.wire.exact else 1
        self._sizes = [(part.nbytes, part.nbytes, coded * part.sent_bytes) for part in parts]
        self._devices, self.refused = devices, ""
        if own:
            try:
                self._take(private)
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


def inboxes(
    asked: str, reach: Reach, layout: BySlot, lanes: Sequence[Lane], places: int
) -> tuple[Push, str, list[str]]:
    """Inboxes on the devices where something is proven able to fill them, else in host memory.

    With the way's name, and why. MemoryRefused where "device" or "nccl" is asked for in vain.
    """
    why: list[str] = []
    for way in WAYS[asked] if reach.n > 1 else ():
        try:
            push, said = _on_devices(way, reach, layout, lanes, places)
            return push, way, [said, *why]
        except MemoryRefused as error:
            why.append(str(error))
    if why and asked in ("device", "nccl"):
        raise MemoryRefused(
            f'node.gpu_window = "{asked}": {why[0]}; "auto" takes the best way there is '
            "(`mpigossip doctor` says what was asked)"
        )
    own = layout.wire.exact and reach.n > 1
    staged = PushWindow(reach.comm, layout.sizes, places, reach.timeout_s, outbox=own)
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
