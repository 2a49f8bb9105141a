"""Rows of the table of claims, and their formats."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from judging import VERDICTS

from mpigossip.runs.recorder import environment


class Row(NamedTuple):
    """Row of a table: a claim with its expected and measured value, and whether it holds.

    ``holds`` is None if this can't be decided. ``judged`` is false if the value was only measured,
    or not measured at all, so that there is nothing to decide. ``table`` is the heading of the
    row's table, "" for the first table.
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
        """Text of the row's last column."""
        if not self.judged:
            return "not run" if self.measured.startswith("not run") else "as measured"
        return VERDICTS[self.holds]


WIDTH = 120
"""Largest number of characters in a cell."""
HEAD = "| claim | source | expected | measured | verdict |\n|---|---|---|---|---|"


def verdicts(page: str) -> dict[str, str]:
    """Return the verdict of each claim in an older page."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    # If a claim is in two tables, the verdict of the first one counts.
    return {row[0]: row[-1].partition(" (before")[0] for row in reversed(rows)}


def markdown(rows: Sequence[Row], before: Mapping[str, str]) -> str:
    """Return the tables in Markdown; changed verdicts of the first table have the former one added.

    :param rows: all rows
    :param before: earlier verdicts by claim
    """
    lines: list[str] = []
    for table in dict.fromkeys(row.table for row in rows):
        lines += ["", f"## {table}", ""] if table else []
        cells = []
        for row in (row for row in rows if row.table == table):
            texts = [cell.replace("|", "¦") for cell in row[:4]]
            old = row.verdict if table else before.get(texts[0], row.verdict)
            cells.append([*texts, row.verdict + f" (before: {old})" * (old != row.verdict)])
        lines += format_rows(cells)
    return "\n".join(lines) + "\n"


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown.

    Rows with long cells are shortened, and their full texts follow after the table.
    """
    lines = [HEAD]
    below = []
    for claim, source, expected, measured, verdict in rows:
        if max(len(expected), len(measured)) > WIDTH:
            below += ["", f"**{claim}** ({source}). Expected: {expected}. Measured:", ""]
            below += [f"* {part}" for part in measured.split("; ")]
            intervals = "; ".join(part for part in measured.split("; ") if part.endswith("]"))
            if len(expected) > WIDTH:
                expected = "see below"
            if len(measured) > WIDTH:
                measured = intervals if 0 < len(intervals) <= WIDTH else "see below"
        lines.append(f"| {claim} | {source} | {expected} | {measured} | {verdict} |")
    return lines + below


def origin() -> str:
    """Return a text for a page: today's date, the commit, versions, and the cores of this host."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    machine = environment()
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, torch {machine['torch']}, Python "
        f"{machine['python']}, {os.cpu_count()} {machine['machine']} cores, no GPU used"
    )
