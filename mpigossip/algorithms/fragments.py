"""Fragments: columns of the model that travel together, each at steps of its own in the period."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Turns(NamedTuple):
    """Which of P fragments is sent at a step, and when what comes is taken in.

    Of a period of H steps, counted from 1, fragment p = 0 … P − 1 is sent at step ⌊(p + 1) H/P⌋,
    and what comes is taken in τ ≤ ⌊H/P⌋ steps later: no two exchanges are open at once.
    """

    period: int = 1
    """H"""
    fragments: int = 1
    """P ≤ H"""
    delay: int = 0
    """τ"""

    @property
    def plain(self) -> bool:
        """Whether the whole model travels at once, and is waited for."""
        return self.fragments == 1 and not self.delay

    def due(self, index: int) -> int | None:
        """The fragment that is sent at step ``index``, counted from 0."""
        place = index % self.period + 1
        fragment = -(-place * self.fragments // self.period) - 1
        return fragment if (fragment + 1) * self.period // self.fragments == place else None

    def arriving(self, index: int) -> int | None:
        """The fragment that was sent τ steps before step ``index``, where τ > 0."""
        return self.due(index - self.delay) if 0 < self.delay <= index else None


def cut(layers: Sequence[slice], count: int, width: int) -> tuple[tuple[slice, ...], ...]:
    """The columns of ``count`` fragments, at most ``width`` each, which is room enough for all.

    Layers go to the fragments in turn, so that each has some of all depths. A layer for which a
    fragment has no room left is cut, and its rest is the next one's.
    """
    found: list[list[slice]] = [[] for _ in range(count)]
    room, turn = [width] * count, 0
    for layer in layers:
        at = layer.start
        while at < layer.stop:
            while not room[turn % count]:
                turn += 1
            fragment = turn % count
            end = min(layer.stop, at + room[fragment])
            room[fragment] -= end - at
            before = found[fragment][-1:]
            if before and before[0].stop == at:
                found[fragment][-1] = slice(before[0].start, end)
            else:
                found[fragment].append(slice(at, end))
            at, turn = end, turn + 1
    return tuple(map(tuple, found))
