"""Happens-before relation of accesses to memory, given by events and waits.

Each stream, and the host (all its threads as one), is a timeline with a vector clock. Work given
to a stream comes after what the host knew by then; an event carries its stream's clock to who
waits for it. Two accesses of a byte on two timelines, one of them a write, must be ordered.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.RLock()


class Unordered(RuntimeError):
    """Two accesses that no event or wait orders."""


class Timeline:
    """Stream, or host, with its own tick and the ticks of others that happened before it."""

    def __init__(self, name: str):
        self.name = name
        self.tick = 0
        self.knows = dict[Timeline, int]()
        self._met = self.knows

    def clock(self) -> dict[Timeline, int]:
        """Return the clock of all work that happened before this point."""
        return {**self.knows, self: self.tick}

    def follow(self, clock: dict[Timeline, int]) -> None:
        """Continue after all work that a clock contains."""
        with _lock:
            news = {line: at for line, at in clock.items() if at > self.knows.get(line, 0)}
            self.knows = {**self.knows, **news} if news else self.knows

    def given(self, what: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Record work that the host submits to this stream or does itself; may raise Unordered."""
        with _lock:
            if self._met is not HOST.knows:
                self._met = HOST.knows
                self.follow(self._met)
            self.tick += self is not HOST
            for tensor in read:
                self._touch(tensor, False, what)
            for tensor in written:
                self._touch(tensor, True, what)

    def _touch(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        storage, (low, high), kept = tensor.untyped_storage(), span(tensor), []
        for old in vars(storage).get("touched", ()):
            first, last, wrote, line, tick, past = old
            disjoint = last <= low or high <= first
            same_line = line is self
            raced = not disjoint and not same_line and (writes or wrote)
            if raced and self.knows.get(line, 0) < tick:
                raise Unordered(
                    f"{what} on {self.name} {'writes' if writes else 'reads'} what {past} "
                    f"{'wrote' if wrote else 'read'} on {line.name}, and nothing stands "
                    "between them"
                )
            inside = low <= first and last <= high
            if not inside or not (writes or (same_line and not wrote)):
                kept.append(old)
        # a storage keeps the accesses that may still race
        storage.touched = [*kept, (low, high, writes, self, self.tick, what)]


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range from the first to the last byte of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in steps) if tensor.numel() else -1
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * (last + 1)


HOST = Timeline("the host")
