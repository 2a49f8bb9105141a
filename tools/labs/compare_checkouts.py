"""Check that two checkouts of this package give bitwise identical results for the same jobs.

    python tools/labs/compare_checkouts.py OLD NEW [--only JOB …] [--may-differ NAME …]
                                           [--cache FOLDER] [--at-once K] [--json]

Each job of compare_checkouts.txt is trained in both checkouts (folders that contain mpigossip/ and
jobs/) on this machine, in this Python environment, through the command line only. The comparison
covers

* the digest: SHA-256 of the parameters of all nodes, as printed and as in the checkpoint;
* the columns of the log, except times;
* the digest that each checkout reaches if it resumes OLD's run from the second last checkpoint.

Then NEW has to read the files that OLD has written: log, plot, report, checkpoint. A job that OLD
rejects and NEW trains counts as new, not as different. The exit code is 1 if anything fails or
differs, and 2 if the arguments are wrong. Jobs and columns of the log that `--may-differ` names are
expected to differ, and do not count.

The launcher is MPIGOSSIP_MPIEXEC, or the mpiexec in the folder of this Python or on PATH. With
`--cache`, the results of OLD are kept and used again, if OLD has no local changes. They are stored
under OLD's commit and a hash of all other facts on which the bits of results depend.
"""

import argparse
import difflib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from checkouts import (
    REFUSED,
    ArgumentError,
    Checkout,
    Job,
    Result,
    Store,
    hash_environment,
    run_job,
)

COMMON = """
model.name=mlp schedule.warmup_epochs=0 run.steps=24 checkpoint.every_steps=12 run.epochs=30
algorithm.name=dmsgd local.name=none schedule.name=milestones schedule.lr=0.2 schedule.scale=linear
schedule.milestones=[20,26]
log.flush_steps=6 log.consensus_every=2
"""
"""Settings of all jobs. The settings of a job follow, and can replace them."""
COLUMNS = ("steps/", "evaluations/")
"""Prefixes of the names of columns of the log."""

TABLE = Path(__file__).with_suffix(".txt")


def table() -> dict[str, Job]:
    """Return the jobs by name, in the order of the table."""
    rows: list[list[str]] = []
    for line in TABLE.read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            if not line.startswith(" "):
                rows.append([])
            rows[-1] += line.split()
    return {row[0]: _job(*row) for row in rows}


def _job(name: str, how: str, of: str, *words: str) -> Job:
    """Return the job of a row of the table.

    :param name: name of the job
    :param how: kind of the job, as in `Job.how`
    :param of: number of nodes, or the name of another job, as in `Job.of`
    :param words: settings, flags, or arguments of a command
    """
    if how == "read":
        return Job(name, how, of, words)
    settings = [word for word in words if "=" in word]
    marks = frozenset(words) - set(settings)
    common = [] if "whole" in marks else COMMON.split()
    return Job(name, how, of, (*common, *settings), marks)


def compare_job(job: Job, store: Store, new: Checkout, work: Path, ignored: Sequence[str]) -> dict:
    """Run a job in both checkouts; return a row with the verdict, its reasons, and both results.

    :param job: the job
    :param store: results of OLD
    :param new: the checkout NEW
    :param work: temporary folder for the files of NEW
    :param ignored: names of columns that may differ; other names have no effect here
    """
    before = store.get(job)
    after = run_job(new, job, work / job.name, store.run)
    shutil.rmtree(work / job.name)
    word, reasons = verdict(before, after, ignored)
    return {
        "job": job.name,
        "verdict": word,
        "reasons": reasons,
        "old": asdict(before),
        "new": asdict(after),
    }


def verdict(old: Result, new: Result, ignored: Sequence[str] = ()) -> tuple[str, str]:
    """Return the verdict ("equal", "new", "differs" or "failed") and its reasons.

    :param old: result of a job in OLD
    :param new: result of the same job in NEW
    :param ignored: columns of the log that may differ
    """
    if old.code == REFUSED and not new.code:
        return "new", "OLD rejects the job"
    failed = [f"{name}: {r.message}" for name, r in (("OLD", old), ("NEW", new)) if r.code]
    if failed:
        return "failed", "; ".join(failed)
    differences = ["parameters"] if old.digest != new.digest else []
    both = [c for c in old.figures if c in new.figures and c not in ignored]
    columns = [c for c in both if new.figures[c] != old.figures[c]]
    differences += [f"log: {', '.join(columns)}"] if columns else []
    # If OLD did not resume exactly, NEW may be better than OLD, and reach the digest of the run.
    if new.onward not in (old.onward, old.digest):
        differences.append(f"resumed: {new.onward[:8]}, in OLD {old.onward[:8]}")
    if differences:
        return "differs", "; ".join(differences)
    return "equal", "OLD resumes inexactly" if old.onward not in (old.digest, "") else ""


def removed_columns(rows: Sequence[dict]) -> list[str]:
    """Return the names of log columns that only OLD writes; they do not count as a difference."""
    pairs = [(row["old"]["figures"], row["new"]["figures"]) for row in rows]
    return sorted({name for old, new in pairs if new for name in old.keys() - new.keys()})


def format_row(job: Job, row: dict) -> str:
    """Format the result of `compare_job` as a line of the table."""
    old = row["old"]
    new = row["new"]
    shown = (old["digest"], new["digest"], new["onward"])
    digests = " ".join(f"{text[:8] or '-':8}" for text in shown)
    seconds = f"{old['seconds']:6.1f} {new['seconds']:6.1f}"
    outcome = f"{row['verdict']}: {row['reasons']}" if row["reasons"] else row["verdict"]
    return f"{job.name:18} {f'{job.how} {job.of}':15} {digests} {seconds}  {outcome}"


def select_jobs(only: Sequence[str]) -> list[Job]:
    """Return the jobs with these names, or all jobs if there are no names.

    :raises ArgumentError: if the table does not contain one of the names
    """
    jobs = table()
    for name in only:
        if name not in jobs:
            near = difflib.get_close_matches(name, jobs, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"pass a name from {TABLE.name}"
            raise ArgumentError(f'there is no job "{name}": {remedy}')
    return [job for name, job in jobs.items() if name in only or not only]


def main() -> int:
    """Compare both checkouts, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="run only these jobs")
    parser.add_argument(
        "--may-differ", nargs="+", default=[], metavar="NAME", help="jobs and columns to ignore"
    )
    parser.add_argument("--cache", type=Path, help="folder for results of OLD")
    parser.add_argument("--at-once", type=int, default=1, metavar="K", help="jobs at the same time")
    parser.add_argument("--json", action="store_true", help="print rows as JSON, not as a table")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="checkouts-") as work:
            return compare(options, Path(work))
    except ArgumentError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def compare(options: argparse.Namespace, work: Path) -> int:
    """Compare the selected jobs, print a line for each, and return the exit code.

    :param options: options of the command line
    :param work: temporary folder
    :raises ArgumentError: if an option names an unknown job, or a folder is not a checkout
    """
    begin = time.monotonic()
    jobs = select_jobs(options.only)
    select_jobs([name for name in options.may_differ if not name.startswith(COLUMNS)])
    old = Checkout(options.old)
    new = Checkout(options.new)
    commit = old.commit() if options.cache else None
    if options.cache and commit is None:
        print(
            f"--cache is ignored, because {options.old} has local changes or is not in a Git "
            "repository: commit the changes",
            file=sys.stderr,
        )
    stored = work / "old"
    if commit:
        stored = options.cache.resolve() / f"{commit[:12]}-{hash_environment()}"
    store = Store(old, stored)
    rows = []
    say: Callable = (lambda text: None) if options.json else lambda text: print(text, flush=True)
    say(f"{'job':18} {'':15} {'OLD':8} {'NEW':8} {'resumed':8} {'OLD s':>6} {'NEW s':>6}")
    for name in {job.of for job in jobs if job.how == "read"}:
        store.get(table()[name])
    with ThreadPoolExecutor(options.at_once) as pool:
        results = pool.map(
            lambda job: compare_job(job, store, new, work / "new", options.may_differ), jobs
        )
        for job, row in zip(jobs, results, strict=True):
            rows.append(row)
            say(format_row(job, row))
    bad = [row for row in rows if row["verdict"] in ("differs", "failed")]
    expected = [r for r in bad if r["verdict"] == "differs" and r["job"] in options.may_differ]
    if removed := removed_columns(rows):
        say(f"columns that only OLD's logs contain: {', '.join(removed)}")
    for row in bad:
        say(f"\n{row['job']} {row['verdict']}:\n  {row['new']['command']}")
    say(
        f"\n{len(rows)} jobs, {len(bad)} differ or fail, {len(expected)} of them are expected to "
        f"differ; {time.monotonic() - begin:.0f} s, "
        f"{len(store.known)} of OLD's results were read from the cache"
    )
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(len(bad) > len(expected))


if __name__ == "__main__":
    sys.exit(main())
