"""Findings of the doctor: merged over ranks, printed as text or JSON."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpigossip.cluster.world import World
from mpigossip.config.readable import print_safe, wrapped

GRACE_S = 10.0
"""Seconds by which the other ranks wait longer than rank 0, so that it can print the findings."""


@dataclass(frozen=True)
class Finding:
    """The result of one test."""

    name: str
    text: str
    """Description of the result."""
    level: str = "good"
    """Level of the result: "good"; "note" if the thing works, but is slow or limited; "wrong" if
    it has to be fixed."""
    remedy: str = ""
    """Text on the reason and on what to do; "" if nothing has to be done."""
    data: dict[str, Any] = field(default_factory=dict)
    """Values for the JSON output."""


UNTESTED = "untested"
"""Name of the finding that names the tests that were omitted."""

SIGN = {"good": "ok", "note": "note", "wrong": "WRONG"}
"""Word for each level, with which the line of a finding begins."""


class Findings(list[Finding]):
    """A list of findings, of which the first ``shown`` have been printed."""

    shown = 0

    def show(self) -> None:
        """Print a line for each finding that has not been printed yet.

        Findings are printed before each test, because a test may end the process.
        """
        for finding in self[self.shown :]:
            head = f"{SIGN[finding.level]:5}  {finding.name:9}  "
            print_safe(wrapped(head + finding.text, len(head) * " "), flush=True)
        self.shown = len(self)


def merged(findings_by_rank: Sequence[Sequence[Finding]] | None) -> list[Finding]:
    """Merge the findings of all ranks; findings of a test with equal level and remedy become one.

    If the findings of a test differ between ranks, each merged finding names its ranks.

    :param findings_by_rank: findings of each rank, in the same order of tests; None on ranks other
        than 0
    :return: the merged findings, with the text of the first of their ranks; [] on ranks other than
        0
    """
    if findings_by_rank is None:
        return []
    result = []
    for index, example in enumerate(findings_by_rank[0]):
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, findings in enumerate(findings_by_rank):
            finding = findings[index]
            # The texts contain measured numbers, so compare only the level and the remedy.
            groups.setdefault((finding.level, finding.remedy), []).append(rank)
        for (level, remedy), ranks in groups.items():
            finding = findings_by_rank[ranks[0]][index]
            differ = len(groups) > 1
            text = f"{_some(ranks)}: {finding.text}" if differ else finding.text
            data = {
                "ranks": ranks,
                "of_each_rank": [findings_by_rank[r][index].data for r in ranks],
            }
            result.append(Finding(example.name, text, level, remedy, data))
    return result


def _some(ranks: Sequence[int]) -> str:
    """Return a text that names at most four ranks, and the number of ranks if it is above 1."""
    shown = ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


def verdict(findings: Sequence[Finding]) -> str:
    """Return a text with the remedies of all notes and problems, and the verdict as its last line.

    The verdict is "ready" or "not ready". If nothing is wrong, but tests were omitted because there
    is one rank or one node, it is "ready, but not fully tested".
    """
    notes = [
        f"note: {finding.name}: {finding.remedy}"
        for finding in findings
        if finding.level == "note" and finding.remedy
    ]
    problems = [
        f"wrong: {finding.name}: {finding.remedy}"
        for finding in findings
        if finding.level == "wrong"
    ]
    is_partial = any(finding.name == UNTESTED for finding in findings)
    ready = "ready, but not fully tested" if is_partial else "ready"
    end = [*problems, "not ready"] if problems else [ready]
    return "\n".join(["", *(wrapped(line, "  ") for line in [*notes, *end])])


def report(findings: Findings, json_requested: bool) -> None:
    """Print the findings and the verdict.

    :param findings: all findings
    :param json_requested: whether to print JSON instead of text
    """
    if not json_requested:
        findings.show()
    print_safe(as_json(findings) if json_requested else verdict(findings), flush=True)


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings and the verdict as JSON."""
    rows = [vars(finding) for finding in findings]
    problems = [finding.name for finding in findings if finding.level == "wrong"]
    return json.dumps(
        {"findings": rows, "wrong": problems, "ready": not problems}, indent=1, default=str
    )


def complain(text: str) -> None:
    """Write one line to stderr in a single call, so that lines of ranks are not interleaved."""
    sys.stderr.flush()
    os.write(2, f"mpigossip doctor: {text}\n".encode(errors="replace"))


@contextlib.contextmanager
def watched(
    world: World, options, name: str, findings: Findings, hint="check the network between hosts"
) -> Iterator[list[str]]:
    """Return a context manager that ends the whole job if its block takes too long.

    In MPI and NCCL, a wait for a host that does not answer never returns and can't be cancelled.
    The context manager yields a list, to which the block appends a text for each activity that it
    begins; the message at the time limit names the last one. Rank 0 then also prints the findings
    so far.

    :param world: all ranks
    :param options: options of the command; `timeout` is the time limit in seconds
    :param name: name of the finding that is printed at the time limit
    :param findings: findings so far
    :param hint: remedy in that finding
    """
    activities = ["starting"]

    def late() -> None:
        problem = f"{activities[-1]} took longer than {options.timeout:g} s"
        complain(f"rank {world.rank} on {world.hosts[world.rank]}: {problem}; ending the job")
        if world.rank == 0:
            findings.append(
                Finding(name, problem, "wrong", f"{hint}, or pass a longer --timeout SECONDS")
            )
            report(findings, options.json)
        if world.comm is not None:
            from mpi4py import MPI

            if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
                world.abort()  # It gives the launcher time to forward the printed text.
        os._exit(1)

    timer = threading.Timer(options.timeout + GRACE_S * (world.rank > 0), late)
    timer.daemon = True
    timer.start()
    try:
        yield activities
    finally:
        timer.cancel()
