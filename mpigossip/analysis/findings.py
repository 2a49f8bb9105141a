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
from mpigossip.config.readable import print_safe

GRACE_S = 10.0
"""Seconds that other ranks wait longer than rank 0, which prints the findings."""


@dataclass(frozen=True)
class Finding:
    """The result of one test."""

    name: str
    text: str
    """Description of the result."""
    level: str = "good"
    """"good"; "note": it works, but is slower or limited; "wrong": it has to be fixed."""
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


SIGN = {"good": "ok", "note": "note", "wrong": "WRONG"}


class Findings(list[Finding]):
    """A list of findings, of which the first ``shown`` have been printed."""

    shown = 0

    def show(self) -> None:
        """Print a line for each new finding now, since the next test may end the process."""
        for one in self[self.shown :]:
            print_safe(f"{SIGN[one.level]:5}  {one.name:9}  {one.text}", flush=True)
        self.shown = len(self)


def merged(everyone: Sequence[Sequence[Finding]] | None) -> list[Finding]:
    """Merge the findings of all ranks: one for each test and level, with the ranks if they differ.

    :param everyone: findings of each rank, in the same order; None on ranks other than 0
    """
    if everyone is None:
        return []
    result = []
    for place, example in enumerate(everyone[0]):
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, findings in enumerate(everyone):
            one = findings[place]
            # Numbers differ between ranks, so compare the level and the remedy only.
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


def verdict(found: Sequence[Finding]) -> str:
    """Return the remedies of all problems, and whether the machine is ready."""
    notes = [
        f"note: {one.name}: {one.remedy}" for one in found if one.level == "note" and one.remedy
    ]
    wrong = [f"wrong: {one.name}: {one.remedy}" for one in found if one.level == "wrong"]
    end = [*wrong, "not ready"] if wrong else ["ready"]
    return "\n".join(["", *notes, *end])


def report(found: Findings, json_asked: bool) -> None:
    """Print the findings and the verdict."""
    if not json_asked:
        found.show()
    print_safe(as_json(found) if json_asked else verdict(found), flush=True)


def as_json(found: Sequence[Finding]) -> str:
    """Return the findings and the verdict as JSON."""
    rows = [vars(one) for one in found]
    wrong = [one.name for one in found if one.level == "wrong"]
    return json.dumps({"findings": rows, "wrong": wrong, "ready": not wrong}, indent=1, default=str)


def complain(text: str) -> None:
    """Write one line to stderr in a single call, so that lines of ranks are not interleaved."""
    sys.stderr.flush()
    os.write(2, f"mpigossip doctor: {text}\n".encode(errors="replace"))


@contextlib.contextmanager
def watched(
    world: World, options, name: str, found: Findings, hint="look at the network between hosts"
) -> Iterator[list[str]]:
    """Return a context manager that ends the job if the block takes too long.

    MPI and NCCL offer no other way out: a wait for a host that does not answer never returns. The
    message names the last activity, as added by the block to the list that this yields. Rank 0,
    which waits for all others in every test, prints the findings so far.

    :param world: all ranks
    :param options: options of the command; `timeout` is the time limit in seconds
    :param name: name of the finding
    :param found: findings so far
    :param hint: remedy
    """
    now = ["starting"]

    def late() -> None:
        said = f"no end of {now[-1]} within {options.timeout:g} s"
        complain(f"rank {world.rank} on {world.hosts[world.rank]}: {said}; ending the job")
        if world.rank == 0:
            found.append(Finding(name, said, "wrong", f"{hint}, or give --timeout SECONDS"))
            report(found, options.json)
        if world.comm is not None:
            from mpi4py import MPI

            if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
                world.abort()  # leaves the launcher time to forward the line
        os._exit(1)

    timer = threading.Timer(options.timeout + GRACE_S * (world.rank > 0), late)
    timer.daemon = True
    timer.start()
    try:
        yield now
    finally:
        timer.cancel()
