"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def aligned(rows: Iterable[Iterable[object]], left: Collection[int] = (0,)) -> str:
    """Rows as lines: columns as wide as their longest cell, two spaces between.

    The columns ``left`` are aligned on the left, all others on the right.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [f"{{:{'<' if k in left else '>'}{width}}}" for k, width in enumerate(widths)]
    return "\n".join("  ".join(sides).format(*row).rstrip() for row in cells)
