"""The outboxes of slots on their devices, and what a lossy wire makes of them there."""

from __future__ import annotations

import torch

from mpigossip.mixing.device.memory import current
from mpigossip.mixing.device.push import BySlot
from mpigossip.mixing.device.routes import Areas
from mpigossip.mixing.kernels import fused
from mpigossip.mixing.kernels.onepass import Coded


class Outbox:
    """``segments`` to fill; a kernel that fills them may write bfloat16 codes beside them."""

    def __init__(self, layout: BySlot, areas: Areas):
        """Views of the areas."""
        self._layout, self._areas = layout, areas
        self.segments = [Coded(layout.of(s).views(own)[0]) for s, own in enumerate(areas.own)]
        for s, coded in enumerate(self.segments if layout.wire.name == "bf16" else ()):
            coded.codes = tuple(self._room(s, k)[None] for k in range(layout.vectors))

    def encode(self, number: int, rank: int) -> None:
        """Quantize the outbox of every slot in place, its codes beside it, if the wire does so."""
        for slot, parts in enumerate(() if self._layout.wire.exact else self.segments):
            layout, codes = self._layout.of(slot), self._areas.code[slot]
            with current(codes.device):
                for vector in () if parts.written else range(layout.vectors):
                    values, at = parts[vector][0], layout.place(0, vector)
                    if layout.wire.name == "bf16" and fused.encode(
                        values, self._room(slot, vector)
                    ):
                        continue
                    key = (number, rank, vector)
                    layout.wire.write(values, key, layout.begin(0), codes[at:])
                for k, value in enumerate(parts[layout.vectors :]):
                    at = layout.place(0, layout.vectors + k)
                    codes[at : at + 8].view(torch.float64).copy_(value[0])
            parts.written = False

    def _room(self, slot: int, vector: int) -> torch.Tensor:
        """Where a vector's bfloat16 codes go."""
        at, nbytes = self._layout.of(slot).place(0, vector), 2 * self._layout.widths[slot]
        return self._areas.code[slot][at : at + nbytes].view(torch.bfloat16)
