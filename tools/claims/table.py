"""Rows of the table of claims and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One claim: what is expected, what was measured, and whether it holds.

    ``holds`` is None where nothing is to be judged: measured only, or not run.
    """

    name: str
    claim: str
    source: str
    expected: str
    measured: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        """The last column in a word."""
        if self.holds is None:
            return "not run" if self.measured.startswith("not run") else "as measured"
        return "holds" if self.holds else "**does not hold**"


HEAD = ("claim", "source", "expected", "measured", "verdict")


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for row in rows:
        cells = (row.claim, row.source, row.expected, row.measured, row.verdict)
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write(rows: Sequence[Row], out: Path, head: str = "") -> None:
    """Replace the file: an interrupted run keeps the rows that it had."""
    beside = out.with_name(f".{out.name}.part")
    beside.write_text(head + markdown(rows), encoding="utf-8")
    beside.replace(out)
