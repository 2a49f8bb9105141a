"""Measure again what the papers claim, and print one table.

    python tools/claims/measure.py --quick     # graphs, limits, speed: about a minute
    python tools/claims/measure.py --estimate  # runs and hours of the training claims
    python tools/claims/measure.py --data cifar10.h5 --out jobs/claims/RESULTS.md       # all of it
    python tools/claims/measure.py --only slack --rehearse      # a claim of training in little

The columns: claim, its source, what is expected, what was measured, whether it holds. The table
is written after each row, and training runs are those of studies, kept under --runs, so that an
interrupted run goes on where it was. Protocols and how to pack CIFAR-10: jobs/claims/PROTOCOL.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import beyond
import equal
import graphs
import torch
import toy
from learning import Protocol
from table import Row, write

import mpigossip

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "claims"
PROTOCOLS = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
FUNCTIONS = {f.__name__: f for room in (graphs, toy, beyond, equal) for f in room.CLAIMS}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join([*FUNCTIONS, *PROTOCOLS])
    parser.add_argument("--quick", action="store_true", help="short searches, no training")
    parser.add_argument(
        "--only", action="append", metavar="NAME", default=[], help=f"one of {names}; repeatable"
    )
    parser.add_argument("--data", type=Path, help="CIFAR-10, packed by `mpigossip data pack`")
    parser.add_argument("--out", type=Path, help="write the table there, in Markdown")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/claims"), help="where training runs are kept"
    )
    parser.add_argument("--workers", type=int, default=2, help="training runs at a time (2)")
    parser.add_argument(
        "--rehearse", action="store_true", help="train an epoch of digits with two seeds"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="print what training takes, and do nothing"
    )
    parser.add_argument(
        "--asynchronous", type=Path, nargs="+", help="what tools/bench/asynchronous.py --json gave"
    )
    options = parser.parse_args(given)
    unknown = set(options.only) - {*FUNCTIONS, *PROTOCOLS}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))} is unknown; choose one of {names}")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data} is no file; make it with: mpigossip data pack")
    options.full = not options.quick
    return options


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The rows, one after the other as they are measured."""
    for name, function in FUNCTIONS.items():
        long = function in equal.CLAIMS and options.quick
        if not long and (not options.only or name in options.only):
            yield from function(options)
    for protocol in protocols(options):
        yield from protocol.rows()


def protocols(options: argparse.Namespace) -> list[Protocol]:
    """The training claims that were chosen."""
    chosen = options.only or ([] if options.quick else PROTOCOLS)
    return [Protocol(path, options) for name, path in PROTOCOLS.items() if name in chosen]


def head(given: list[str], minutes: float) -> str:
    """What was run, when, on what, and how long it took."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        "# What the papers claim, measured\n\n"
        f"`python tools/claims/measure.py {' '.join(given)}`, {now:%Y-%m-%d}, mpigossip "
        f"{mpigossip.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} {platform.machine()} cores, no GPU used: {minutes:.0f} minutes. "
        "Protocols, seeds and what was reduced: [PROTOCOL.md](PROTOCOL.md).\n\n"
    )


def main(given: list[str] | None = None) -> int:
    """Measure, print and write; 1 where a claim doesn't hold."""
    given = sys.argv[1:] if given is None else given
    options = arguments(given)
    torch.set_num_threads(1)
    if options.estimate:
        found = {one.name: one.estimate() for one in protocols(options)}
        found["together"] = tuple(map(sum, zip(*found.values(), strict=True)))
        for name, (runs, hours) in found.items():
            print(f"{name:<12} {runs:5} runs  {hours:.2f} hours, {options.workers} at a time")
        return 0
    rows: list[Row] = []
    began = time.monotonic()
    for row in measure(options):
        rows.append(row)
        print(f"{row.verdict:<18} {row.claim}: {row.measured} (expected: {row.expected})")
        sys.stdout.flush()
        if options.out:
            write(rows, options.out, head(given, (time.monotonic() - began) / 60))
    failed = sum(row.judged and row.holds is False for row in rows)
    print(f"{len(rows)} claims, {failed} of them do not hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
