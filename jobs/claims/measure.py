"""Measure the claims of the papers with this package, and print a table.

    python jobs/claims/measure.py --quick     # graphs, limits, speed: about a minute
    python jobs/claims/measure.py --estimate  # runs and hours of the training claims
    python jobs/claims/measure.py --data cifar10.h5 --out table.md   # all claims
    python jobs/claims/measure.py --only slack --rehearse      # a small training claim

The columns are: claim, source, expected, measured, verdict. The table is written after each row,
and finished training runs are kept in the folder --runs, so that an interrupted measurement
continues where it stopped. PROTOCOL.md contains the protocols, and how to pack CIFAR-10.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import costs
import equal
import graphs
import quadratics
import torch
from protocols import Protocol
from table import Row, markdown, origin, verdicts

from mpigossip.store.hdf5 import replacing

FOLDER = Path(__file__).resolve().parent
PROTOCOLS = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
HEAD = (
    "# Claims of papers, measured\n\n`python jobs/claims/measure.py {}`, {}: {:.0f} minutes. "
    "Protocols, seeds and what was reduced: [PROTOCOL.md](PROTOCOL.md).\n\n"
)
FUNCTIONS = {
    function.__name__: function
    for module in (graphs, quadratics, costs, equal)
    for function in module.CLAIMS
}
"""Functions that measure the claims without training, by name."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="short searches, no training")
    add(
        "--only",
        action="append",
        metavar="NAME",
        default=[],
        choices=[*FUNCTIONS, *PROTOCOLS],
        help="one of %(choices)s; repeatable",
    )
    add("--data", type=Path, help="CIFAR-10, packed by `mpigossip data pack`")
    add("--out", type=Path, help="file to which the table is written, in Markdown")
    add("--before", type=Path, help="older table: the verdicts that have changed are marked")
    add(
        "--runs",
        type=Path,
        default=Path("runs/claims"),
        help="folder of the training runs (runs/claims)",
    )
    add("--workers", type=int, default=2, help="number of simultaneous training runs (2)")
    add("--rehearse", action="store_true", help="train an epoch of digits with two seeds")
    add(
        "--estimate",
        action="store_true",
        help="print the runs and hours of the training claims, and do nothing else",
    )
    options = parser.parse_args(arguments)
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data {options.data} does not exist; make it with `mpigossip data pack`")
    return options


def chosen_names(options: argparse.Namespace) -> list[str]:
    """Return the names of the claims to measure.

    These are the claims that --only names. Without it, --quick selects the claims that are
    measured without training and without ranks; otherwise, all claims are measured.
    """
    short = [name for name, function in FUNCTIONS.items() if function not in equal.CLAIMS]
    return options.only or (short if options.quick else [*FUNCTIONS, *PROTOCOLS])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the chosen claims; yield each row as soon as it is measured."""
    for name in chosen_names(options):
        function = FUNCTIONS.get(name)
        yield from function(options) if function else Protocol(PROTOCOLS[name], options).rows()


def protocols(options: argparse.Namespace) -> list[Protocol]:
    """Return the protocols of the chosen claims that need training."""
    return [
        Protocol(PROTOCOLS[name], options) for name in chosen_names(options) if name in PROTOCOLS
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen claims, and print and write their table.

    :param arguments: words of the command line; None: the words of ``sys.argv``
    :return: exit code, which is 1 if a judged claim does not hold, otherwise 0
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    if options.estimate:
        estimates = {protocol.name: protocol.estimate() for protocol in protocols(options)}
        estimates["together"] = tuple(map(sum, zip(*estimates.values(), strict=True)))
        for name, (runs, hours) in estimates.items():
            print(f"{name:<12} {runs:5} runs  {hours:.2f} hours, {options.workers} at a time")
        return 0
    before = verdicts(options.before.read_text("utf-8")) if options.before else {}
    rows = list[Row]()
    begin = time.monotonic()
    for row in measure(options):
        rows.append(row)
        print(f"{row.verdict:<18} {row.claim}: {row.measured} (bar: {row.expected})", flush=True)
        if options.out:
            # An interrupted run must not destroy the rows of the previous one.
            with replacing(options.out) as temporary:
                head = HEAD.format(" ".join(arguments), origin(), (time.monotonic() - begin) / 60)
                temporary.write_text(head + markdown(rows, before), encoding="utf-8")
    failed = sum(row.judged and row.holds is False for row in rows)
    print(f"{len(rows)} claims, {failed} of them do not hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
