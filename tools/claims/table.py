"""Rows of the table of claims, and their formats."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpigossip.runs.recorder import environment


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


WIDE = 120
"""Characters in a cell, at most."""
HEAD = "| claim | source | expected | measured | verdict |\n|---|---|---|---|---|"


def verdicts(page: str) -> dict[str, str]:
    """Those of a table of before, by claim."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    # of a claim in two tables the first's
    return {row[0]: row[-1].partition(" (before")[0] for row in reversed(rows)}


def markdown(rows: Sequence[Row], before: Mapping[str, str]) -> str:
    """The tables in Markdown; a verdict of the first that isn't what it was before says so."""
    lines: list[str] = []
    for table in dict.fromkeys(row.table for row in rows):
        lines += ["", f"## {table}", ""] if table else []
        cells = []
        for row in (row for row in rows if row.table == table):
            given = [cell.replace("|", "¦") for cell in row[:4]]
            was = row.verdict if table else before.get(given[0], row.verdict)
            cells.append([*given, row.verdict + f" (before: {was})" * (was != row.verdict)])
        lines += laid_out(cells)
    return "\n".join(lines) + "\n"


def laid_out(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table without long cells, and below it in full the rows that were shortened."""
    lines = [HEAD]
    below = []
    for claim, source, expected, measured, verdict in rows:
        if max(len(expected), len(measured)) > WIDE:
            below += ["", f"**{claim}** ({source}). Expected: {expected}. Measured:", ""]
            below += [f"* {part}" for part in measured.split("; ")]
            intervals = "; ".join(part for part in measured.split("; ") if part.endswith("]"))
            if len(expected) > WIDE:
                expected = "see below"
            if len(measured) > WIDE:
                measured = intervals if 0 < len(intervals) <= WIDE else "see below"
        lines.append(f"| {claim} | {source} | {expected} | {measured} | {verdict} |")
    return lines + below


def origin() -> str:
    """When, by which program and on what something is measured."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    on = environment()
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, torch {on['torch']}, Python "
        f"{on['python']}, {os.cpu_count()} {on['machine']} cores, no GPU used"
    )
