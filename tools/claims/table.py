"""Rows of the table of claims and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One claim: what is expected, what was measured, and whether it holds.

    ``holds`` is None where it can't be told; ``judged`` is false where nothing is to be judged:
    measured only, or not run. ``table``: the heading under which it stands, "" for the first table.
    """

    claim: str
    source: str
    expected: str
    measured: str
    holds: bool | None
    judged: bool = True
    table: str = ""

    @property
    def verdict(self) -> str:
        """The last column in a word."""
        if not self.judged:
            return "not run" if self.measured.startswith("not run") else "as measured"
        return {None: "cannot tell", True: "holds", False: "**does not hold**"}[self.holds]


HEAD = ("claim", "source", "expected", "measured", "verdict")


def markdown(rows: Sequence[Row]) -> str:
    """The tables in Markdown."""
    lines: list[str] = []
    for table in dict.fromkeys(row.table for row in rows):
        lines += ["", f"## {table}", ""] if table else []
        lines += [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
        for row in (row for row in rows if row.table == table):
            cells = (row.claim, row.source, row.expected, row.measured, row.verdict)
            lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write(rows: Sequence[Row], out: Path, head: str = "") -> None:
    """Replace the file: an interrupted run keeps the rows that it had."""
    beside = out.with_name(f".{out.name}.part")
    beside.write_text(head + markdown(rows), encoding="utf-8")
    beside.replace(out)
