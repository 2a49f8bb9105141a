"""Time that a round of a member spends on the folder, measured when the member starts."""

from __future__ import annotations

import math
import secrets
import statistics
import time

from mpigossip.members.records import RecordStore

REPEATS = 3
"""Number of measured rounds, of which the median counts."""
LISTINGS = 4
"""Number of listings in a round: places, closed places, and the chain of the peer, whose newest
record is read; the ledger and the models are listed less often."""
RECORD = b"0" * 400
"""Content of about the size of a record."""
SHARE = 0.1
"""Largest sensible fraction of a round for operations of the folder."""


def seconds_per_round(disk: RecordStore) -> float:
    """Return the seconds that a round's operations on the folder take, without the model's bytes.

    Files with unguessable names are published, read and removed again in the folder `tmp`.

    :param disk: folder of a training that has begun
    :raises FolderUnreachable: if the file system fails for too long
    """
    return statistics.median(_round(disk) for _ in range(REPEATS))


def _round(disk: RecordStore) -> float:
    """Return the seconds for a record, a model, four listings and two reads."""
    record, model = (f"tmp/{secrets.token_hex(8)}" for _ in range(2))
    began = time.perf_counter()
    for name in (record, model):
        disk.publish(name, RECORD)
    for _ in range(LISTINGS):
        disk.names("tmp")
    for name in (record, model):
        disk.read(name)
        disk.remove(name)
    return time.perf_counter() - began


def describe_slow_folder(folder_s: float, round_s: float, steps: int | None = None) -> str:
    """Return a hint if a round spends more than a tenth of its time on the folder; otherwise "".

    The smallest sensible number of steps is H = ⌈(1 − s)/s · f/c⌉, where s is `SHARE`, f the
    seconds for operations of the folder, and c the seconds of a step without them.

    :param folder_s: seconds that the operations of a round take
    :param round_s: seconds of a whole round
    :param steps: number H of steps in a round, `cadence.period`; None: the round is a chunk of a
        program, whose number of steps is not known
    """
    # A subtracted outage may make the time of a short round 0 or negative.
    if round_s <= 0 or folder_s <= SHARE * round_s:
        return ""
    step_s = max(round_s - folder_s, 0.01 * round_s) / (steps or 1)
    sensible = math.ceil((1 - SHARE) / SHARE * folder_s / step_s)
    longer = f"chunks that are {sensible} times as long"
    if steps:
        longer = f"cadence.period = {sensible} or more instead of {steps}"
    return (
        f"hint (training continues): a round takes {_short(round_s)} s, of which "
        f"{_short(folder_s)} s are operations of the folder, more than a tenth; with {longer}, a "
        "training in another folder would spend less time on them"
    )


def _short(seconds: float) -> str:
    """Format a number of seconds with two digits, or as an integer if it has more."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"
