"""Write figures and tables of one or many runs; a dependent batch job calls it.

    python tools/postprocess.py runs/digits
    python tools/postprocess.py runs/sweep-* --out runs/sweep

Into DIR (default: the run's folder; of several runs, what the first is in): log.png, report.html,
and of each run NAME.csv, NAME-evaluations.csv and NAME.txt. Runs without a log are named and left
out; exit code 2 if none has one, 1 if some have none or a checkpoint is damaged.
"""

import argparse
import sys
from pathlib import Path

from mpigossip.analysis import plot, report
from mpigossip.analysis.compared import log_of, short_names
from mpigossip.store import StoreError, checkpoint, log_export
from mpigossip.store.log import read


def main() -> int:
    """Do all of it; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write")
    parser.add_argument(
        "--no-verify", action="store_true", help="don't read checkpoints to compare checksums"
    )
    options = parser.parse_args()
    there, problems = [], []
    for run in options.runs:
        try:
            read(log_of(run), points=1)
            there.append(run)
        except StoreError as error:
            problems.append(str(error))
    if there:
        out = options.out or (there[0] if len(there) == 1 else there[0].parent)
        try:
            out.mkdir(parents=True, exist_ok=True)
            problems += write(there, out, verify=not options.no_verify)
        except (StoreError, OSError) as error:
            problems.append(str(error))
    for problem in problems:
        print(f"postprocess: {problem}", file=sys.stderr)
    return 0 if not problems else 1 if there else 2


def write(runs: list[Path], out: Path, *, verify: bool) -> list[str]:
    """The files of these runs, named on standard output; problems of their checkpoints."""
    problems = []
    for run, name in zip(runs, short_names([run.resolve() for run in runs]), strict=True):
        log, name = read(log_of(run)), name.replace("/", "-").replace("…", "")
        log_export.to_csv(log, out / f"{name}.csv")
        (out / f"{name}.txt").write_text(report.table(log) + "\n", "utf-8")
        print(f"{out / name}.csv, -evaluations.csv, .txt")
        newest, damaged = checkpoint.newest(run) if verify and run.is_dir() else (None, {})
        problems += [*damaged.values(), *(checkpoint.verify(newest) if newest else [])]
    plot.plot(runs, out / "log.png")
    report.write(runs, out / "report.html")
    print(f"{out / 'log.png'}\n{out / 'report.html'}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
