"""Findings of the doctor: merged over ranks, printed as text or JSON."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpigossip.config.readable import tell


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    text: str
    """what is the case"""
    level: str = "good"
    """good; note: works, but slower or with less; wrong: has to be fixed"""
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def merged(everyone: Sequence[Sequence[Finding]] | None) -> list[Finding]:
    """One finding for each thing and level, with the ranks where they aren't all."""
    if everyone is None:
        return []
    result = []
    for place, example in enumerate(everyone[0]):
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, findings in enumerate(everyone):
            one = findings[place]
            # figures differ from rank to rank: what matters is whether it's good, and why not
            groups.setdefault((one.level, one.remedy), []).append(rank)
        for (level, remedy), ranks in groups.items():
            one = everyone[ranks[0]][place]
            many = len(groups) > 1
            text = f"{_some(ranks)}: {one.text}" if many else one.text
            data = {"ranks": ranks, "of_each_rank": [everyone[r][place].data for r in ranks]}
            result.append(Finding(example.name, text, level, remedy, data))
    return result


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


SIGN = {"good": "ok", "note": "note", "wrong": "WRONG"}


def as_text(found: Sequence[Finding]) -> str:
    """A line for each finding, then what is wrong and what to do."""
    lines = [f"{SIGN[one.level]:5}  {one.name:9}  {one.text}" for one in found]
    notes = [
        f"note: {one.name}: {one.remedy}" for one in found if one.level == "note" and one.remedy
    ]
    wrong = [f"wrong: {one.name}: {one.remedy}" for one in found if one.level == "wrong"]
    end = [*wrong, "not ready"] if wrong else ["ready"]
    return "\n".join([*lines, "", *notes, *end])


def report(found: Sequence[Finding], json_asked: bool) -> None:
    """Print the findings."""
    tell(as_json(found) if json_asked else as_text(found), flush=True)


def as_json(found: Sequence[Finding]) -> str:
    """The same for programs."""
    rows = [vars(one) for one in found]
    wrong = [one.name for one in found if one.level == "wrong"]
    return json.dumps({"findings": rows, "wrong": wrong, "ready": not wrong}, indent=1, default=str)


def complain(text: str) -> None:
    """One line on stderr in one write, so that ranks don't mix."""
    sys.stderr.flush()
    os.write(2, f"mpigossip doctor: {text}\n".encode(errors="replace"))
