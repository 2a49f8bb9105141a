"""Sweep a grid of settings on real ranks, and compare the runs in one report.

    python tools/sweep.py grid jobs/digits.toml graph.name=ring,exponential run.seed=0,1 >sweep.txt
    sbatch --array=1-4 --nodes=4 --time=2:00:00 jobs/sweep.sbatch jobs/digits.toml sweep.txt
    python tools/sweep.py run jobs/digits.toml sweep.txt --nodes 4      # without a scheduler
    python tools/sweep.py report jobs/digits.toml sweep.txt --out runs/sweep

`grid` prints a line of settings for each combination, after checking that each makes a job; values
stand between commas. Line k trains in runs/JOB-k, here and in jobs/sweep.sbatch; `run` simulates.
"""

import argparse
import itertools
import shlex
import sys
from pathlib import Path

from mpigossip import cli
from mpigossip.analysis.report import write
from mpigossip.config import JobError
from mpigossip.config.errors import WRONG, Mistake
from mpigossip.config.readable import aligned
from mpigossip.runs.summary import metrics_of
from mpigossip.store import StoreError
from mpigossip.store.log import read
from mpigossip.training import assemble


def main() -> int:
    """Run one of the three; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="grid|run|report", required=True)
    for name, work in (("grid", grid), ("run", run), ("report", report)):
        command = commands.add_parser(name, help=work.__doc__)
        command.set_defaults(work=work)
        command.add_argument("job", type=Path, metavar="JOB.toml")
        if name == "grid":
            command.add_argument("axes", nargs="+", metavar="section.key=value,value")
        else:
            command.add_argument("file", type=Path, metavar="SWEEP.txt")
    commands.choices["run"].add_argument("--nodes", type=int, required=True, metavar="N")
    commands.choices["report"].add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    try:
        return options.work(options)
    except (Mistake, OSError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return WRONG


def grid(options) -> int:
    """Print a line of settings for each point of a grid."""
    axes = []
    for axis in options.axes:
        key, equals, values = axis.partition("=")
        if not equals:
            raise JobError([f'"{axis}" is no axis: it needs the form section.key=value,value'])
        axes.append([f"{key}={value}" for value in values.split(",")])
    points = list(itertools.product(*axes))
    for point in points:
        assemble.load(options.job, point)
    for point in points:
        print(" ".join(point))
    return 0


def run(options) -> int:
    """Train all lines one after another, simulated."""
    worst = 0
    for folder, settings in lines(options.job, options.file):
        words = ["simulate", str(options.job), *settings, "--nodes", str(options.nodes)]
        words.append(f"run.output={folder}")
        print(f"$ mpigossip {shlex.join(words)}", flush=True)
        worst = max(worst, cli.main(words))
    return worst


def report(options) -> int:
    """Print a table and write OUT/report.html."""
    there, rows = [], []
    for folder, settings in lines(options.job, options.file):
        try:
            found = read(folder / "log.h5", points=1).summary
        except StoreError:
            found = {}
        rows.append((folder, settings, found))
        there += [folder] if found.get("finished") else []
    tested = [name for _, _, found in rows if found.get("finished") for name in metrics_of(found)]
    names = [*dict.fromkeys(tested or ["accuracy"]), "loss", "seconds"]
    table = [("run", *names, "settings")]
    for folder, settings, found in rows:
        figures = ["not finished", *["–"] * (len(names) - 1)]
        if found.get("finished"):
            figures = [f"{found.get(name, float('nan')):.4f}" for name in names]
        table.append((str(folder), *figures, " ".join(settings)))
    print(aligned(table, left=(0, len(names) + 1)))
    if not there:
        raise StoreError(f"no run of {options.file} has finished; train them first")
    options.out.mkdir(parents=True, exist_ok=True)
    write(there, options.out / "report.html")
    print(options.out / "report.html")
    return 0


def lines(job: Path, file: Path) -> list[tuple[Path, list[str]]]:
    """Folder and settings of each line of a sweep's file, as jobs/sweep.sbatch has them."""
    texts = file.read_text("utf-8").splitlines()
    return [(Path(f"runs/{job.stem}-{k}"), text.split()) for k, text in enumerate(texts, 1)]


if __name__ == "__main__":
    sys.exit(main())
