"""The one weighted sum on the slots' devices, of terms there or in host memory, also encoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpigossip.mixing.base import Layout
from mpigossip.mixing.combine import combine
from mpigossip.mixing.device.memory import current
from mpigossip.mixing.device.push import BySlot, Lane, on
from mpigossip.mixing.kernels import gpu_sum

Source = tuple[torch.Tensor, bool]
"""Bytes of a slot's message, or of a piece of it, and whether they are encoded."""


class Sums:
    """Sums into one result a slot, each on its slot's stream for what comes in."""

    def __init__(self, layout: BySlot, lanes: Sequence[Lane], results: Sequence[torch.Tensor]):
        """``results``: per slot uint8 of its whole message, decoded."""
        self._layout, self._lanes, self._results = layout, lanes, results
        self._scratch: dict[tuple[int, int, str], torch.Tensor] = {}

    def add(
        self, weights: Sequence[float], slot: int, piece: slice, terms: Sequence[Source]
    ) -> None:
        """``Σ_k weights[k] · terms[k]`` over a piece of a slot's message, begun on its stream.

        Encoded terms are whole, and so must the piece be.
        """
        lane, layout = self._lanes[slot], self._layout.of(slot)
        with current(lane.device), on(lane.into):
            brought = [self._brought(term, slot, k) for k, term in enumerate(terms)]
            for dtype, part in layout.parts:
                low, high = max(part.start, piece.start), min(part.stop, piece.stop)
                if low >= high:
                    continue
                inside = slice(low - piece.start, high - piece.start)
                rows = [self._row(source, layout, dtype, inside) for source in brought]
                out = self._results[slot][low:high].view(dtype).unsqueeze(0)
                if not (out.is_cuda and gpu_sum.combine(weights, rows, out)):
                    combine(weights, [row.to(dtype) for row in rows], out)

    def _brought(self, source: Source, slot: int, index: int) -> Source:
        """The bytes where the slot's device reaches them, decoded unless they are bfloat16."""
        (array, coded), device = source, self._lanes[slot].device
        if array.device != device:
            array = self._room(slot, index, "in", array.numel()).copy_(array, non_blocking=True)
        if not coded or self._layout.wire.name == "bf16":
            return array, coded
        layout = self._layout.of(slot)
        out, width = self._room(slot, index, "decoded", layout.nbytes), layout.widths[0]
        for part, values in enumerate(layout.views(out)[0]):
            at = layout.place(0, part)
            if part < layout.vectors:
                layout.wire.unpack(array[at:], width, slice(0, width), values)
            else:
                values.copy_(array[at : at + 8].view(torch.float64).view(1, 1))
        return out, False

    def _row(
        self, source: Source, layout: Layout, dtype: torch.dtype, inside: slice
    ) -> torch.Tensor:
        """A stretch of one type, (1, p); ``inside`` counts the bytes of the decoded piece."""
        array, coded = source
        if not coded:
            return array[inside].view(dtype).unsqueeze(0)
        at = layout.place(0, layout.vectors if dtype == torch.float64 else 0)
        if dtype == torch.float64:
            return array[at : at + inside.stop - inside.start].view(dtype).unsqueeze(0)
        return array[at : at + (inside.stop - inside.start) // 2].view(torch.bfloat16).unsqueeze(0)

    def _room(self, slot: int, index: int, use: str, size: int) -> torch.Tensor:
        """Scratch on the slot's device for the ``index``-th source; reused in stream order."""
        key = (slot, index, use)
        if key not in self._scratch or self._scratch[key].numel() < size:
            self._scratch[key] = torch.empty(
                size, dtype=torch.uint8, device=self._lanes[slot].device
            )
        return self._scratch[key][:size]
