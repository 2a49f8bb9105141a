"""Measure again what the papers claim, and print one table.

    python tools/claims/measure.py --quick     # graphs, limits, speed: about a minute
    python tools/claims/measure.py --search --data cifar10.h5   # rates for the training claims
    python tools/claims/measure.py --data cifar10.h5 --out jobs/claims/RESULTS.md       # all of it

The columns: claim, its source, what is expected, what was measured, whether it holds. The table
is written after each row, and finished training runs are kept in files, so that an interrupted
run goes on where it was. Protocols and how to pack CIFAR-10: jobs/claims/PROTOCOL.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import equal
import graphs
import learning
import torch
import toy
from table import Row, write
from training import Protocol, Runs, search

import mpigossip

PROTOCOLS = Path(__file__).resolve().parents[2] / "jobs" / "claims"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(function.__name__ for function in _functions())
    parser.add_argument("--quick", action="store_true", help="short searches, no training")
    parser.add_argument(
        "--search", action="store_true", help="find the learning rates of the training claims"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", default=[], help=f"one of {names}; repeatable"
    )
    parser.add_argument("--data", type=Path, help="CIFAR-10, packed by `mpigossip data pack`")
    parser.add_argument("--out", type=Path, help="write the table there, in Markdown")
    parser.add_argument("--plot", type=Path, help="write the curves there, a PNG")
    parser.add_argument(
        "--runs", type=Path, default=PROTOCOLS, help="folder where finished runs are kept"
    )
    parser.add_argument("--workers", type=int, default=2, help="training runs at a time (2)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no training run after so many (60)"
    )
    options = parser.parse_args(given)
    unknown = set(options.only) - {function.__name__ for function in _functions()}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))} is unknown; choose one of {names}")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data} is no file; make it with: mpigossip data pack")
    options.full, options.protocols = not options.quick, PROTOCOLS
    return options


def _functions():
    return graphs.CLAIMS + toy.CLAIMS + equal.CLAIMS + learning.CLAIMS


def measure(options: argparse.Namespace, runs: Runs) -> Iterator[Row]:
    """The rows, one after the other as they are measured."""
    learned = False
    for function in _functions():
        about_learning = function in learning.CLAIMS
        long = about_learning or function in equal.CLAIMS
        if options.only and function.__name__ not in options.only or long and options.quick:
            continue
        if about_learning and not learned:
            learning.do(options, runs)
            learned = True
        yield from function(options, runs) if about_learning else function(options)


def head(given: list[str], minutes: float, done: int) -> str:
    """What was run, when, on what, and how long it took with how many training runs done anew."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        "# What the papers claim, measured\n\n"
        f"`python tools/claims/measure.py {' '.join(given)}`, {now:%Y-%m-%d}, mpigossip "
        f"{mpigossip.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} {platform.machine()} cores, no GPU used: {minutes:.0f} minutes, {done} "
        "training runs done in them. Protocols, seeds and what was reduced: "
        "[PROTOCOL.md](PROTOCOL.md).\n\n"
    )


def main(given: list[str] | None = None) -> int:
    """Measure, print and write; 1 where a claim doesn't hold."""
    given = sys.argv[1:] if given is None else given
    options = arguments(given)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        until = began + 60 * options.minutes
        runs = Runs(options.runs, options.data, Path(folder), until, options.workers)
        if options.search:
            search(runs, map(Protocol.read, sorted(PROTOCOLS.glob("*.toml"))))
            return 0
        for row in measure(options, runs):
            rows.append(row)
            print(f"{row.verdict:<18} {row.claim}: {row.measured} (expected: {row.expected})")
            sys.stdout.flush()
            if options.out:
                minutes = (time.monotonic() - began) / 60
                write(rows, options.out, head(given, minutes, runs.done))
        if options.plot:
            learning.draw(options, runs, options.plot)
    failed = sum(row.holds is False for row in rows)
    print(f"{len(rows)} claims, {failed} of them do not hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
