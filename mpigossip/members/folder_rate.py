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


def _seconds(value: float) -> str:
    """Format a number of seconds with two significant digits or, from 100 on, as a whole number."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def describe_slow_folder(folder_s: float, round_s: float, steps: int) -> str:
    """Return a hint if a round spends more than a tenth of its time on the folder; otherwise "".

    The smallest sensible number of steps is H = ⌈(1 − s)/s · f/c⌉, where s is `SHARE`, f the
    seconds for operations of the folder, and c the seconds of a step without them.

    :param folder_s: seconds that the operations of a round take
    :param round_s: seconds of a whole round
    :param steps: number H of steps in a round, `cadence.period`
    """
    if folder_s <= SHARE * round_s:
        return ""
    step_s = max(round_s - folder_s, 0.01 * round_s) / steps
    sensible = math.ceil((1 - SHARE) / SHARE * folder_s / step_s)
    return (
        f"hint (training continues): a round takes {_seconds(round_s)} s, of which "
        f"{_seconds(folder_s)} s are operations of the folder, more than a tenth; with "
        f"cadence.period = {sensible} or more instead of {steps}, a training in another folder "
        "would spend less time on them"
    )
