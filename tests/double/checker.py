"""Happens-before: who touches which bytes, and whether an event or a wait stands between.

Each stream, and the host (all its threads as one), is a timeline with a vector clock. Work given
to a stream comes after what the host knew by then; an event carries its stream's clock to who
waits for it. Two accesses of a byte on two timelines, one of them a write, have to be ordered.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

HOST = "the host"
Clock = dict[str, int]
Span = tuple[int, int]


class Unordered(RuntimeError):
    """Two accesses with nothing between them that orders them."""


class Access(NamedTuple):
    """Bytes from-to that a timeline touched."""

    span: Span
    writes: bool
    timeline: str
    tick: int
    what: str


def spans(tensor: torch.Tensor) -> list[Span]:
    """The bytes of a tensor on the CPU's memory: a stretch for every run of neighbours."""
    if not tensor.numel():
        return []
    size, width = tensor.element_size(), 1
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    outer = []
    for stride, length in dims:
        if length == 1 or stride == 0:
            continue
        if stride == width:
            width *= length
        else:
            outer.append((stride, length))
    starts = [0]
    for stride, length in outer:
        starts = [s + k * stride for s in starts for k in range(length)]
        if len(starts) > 256:  # rather too much than too slow
            last = sum((n - 1) * step for step, n in outer)
            return [(tensor.data_ptr(), tensor.data_ptr() + size * (last + width))]
    return [(tensor.data_ptr() + size * s, tensor.data_ptr() + size * (s + width)) for s in starts]


class Checker:
    """All timelines of a process and the accesses that may still be raced."""

    def __init__(self) -> None:
        """Nothing has happened."""
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.touched: dict[int, list[Access]] = defaultdict(list)
        self.count = 0
        self._owners: dict[int, StorageWeakRef] = {}
        self._lock = threading.RLock()

    def know(self, timeline: str, other: Clock) -> None:
        """``timeline`` goes on after all that ``other`` stands for."""
        with self._lock:
            mine = self.clocks[timeline]
            for name, tick in other.items():
                mine[name] = max(mine.get(name, 0), tick)

    def clock(self, timeline: str) -> Clock:
        """What has happened before this point of a timeline."""
        with self._lock:
            return dict(self.clocks[timeline])

    def begin(self, timeline: str) -> None:
        """Work is given to a stream by the host."""
        with self._lock:
            self.know(timeline, self.clocks[HOST])
            self.clocks[timeline][timeline] = self.clocks[timeline].get(timeline, 0) + 1

    def owned(self, tensor: torch.Tensor) -> int:
        """The allocation's key; what was at its address before it was freed is forgotten."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if isinstance(storage, torch.UntypedStorage):
            with self._lock:
                if key not in self._owners or self._owners[key].expired():
                    self.touched.pop(key, None)
                    self._owners[key] = StorageWeakRef(storage)
        return key

    def touch(
        self, timeline: str, key: int, where: Iterable[Span], writes: bool, what: str
    ) -> None:
        """An access; ``key``: the allocation. Raises Unordered."""
        with self._lock:
            mine, tick = self.clocks[timeline], self.clocks[timeline].get(timeline, 0)
            self.count += 1
            for low, high in where:
                kept = []
                for old in self.touched[key]:
                    apart = old.span[1] <= low or high <= old.span[0]
                    raced = (writes or old.writes) and old.timeline != timeline
                    if not apart and raced and mine.get(old.timeline, 0) < old.tick:
                        raise Unordered(self._said(timeline, writes, what, old))
                    inside = low <= old.span[0] and old.span[1] <= high
                    again = old.timeline == timeline and old.writes == writes
                    if apart or not inside or not (writes or again):
                        kept.append(old)
                kept.append(Access((low, high), writes, timeline, tick, what))
                self.touched[key] = kept

    def host_must_know(
        self, keys: Iterable[int], what: str, reads: bool, inside: list[Span] | None = None
    ) -> None:
        """All writes to (or ``reads``: accesses of) these allocations are over for the host.

        ``inside``: only what touches these bytes.
        """
        with self._lock:
            mine = self.clocks[HOST]
            for key in keys:
                for old in list(self.touched.get(key, ())):
                    if inside is not None and not any(
                        low < old.span[1] and old.span[0] < high for low, high in inside
                    ):
                        continue
                    matters = (old.writes or reads) and old.timeline != HOST
                    if matters and mine.get(old.timeline, 0) < old.tick:
                        raise Unordered(self._said(HOST, False, what, old))

    @staticmethod
    def _said(timeline: str, writes: bool, what: str, old: Access) -> str:
        verb = "writes" if writes else "reads"
        before = "wrote" if old.writes else "read"
        return (
            f"{what} on {timeline} {verb} what {old.what} {before} on {old.timeline}, "
            "and nothing stands between them"
        )


checker = Checker()
