"""Make the runs of `designs.py` that are not in runs.jsonl yet, one after the other.

    python jobs/claims/run_queue.py --data cifar10.h5 --scratch /tmp/claims --until 17:50
    python jobs/claims/run_queue.py --data cifar10.h5 --scratch /tmp/claims --estimate
    python jobs/claims/run_queue.py --data cifar10.h5 --scratch /tmp/claims --again 3

A finished run is stored as a line of JSON; an interrupted run is repeated the next time. Several
processes with the same --out share the runs, if each has its own --scratch. `--again` repeats the
given number of runs, drawn at random, and compares their digests with the stored ones.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import parts  # noqa: E402, F401  names of cadences
from designs import (  # noqa: E402
    JOB,
    REMOVED,
    SEARCH,
    SEEDS,
    STUDIES,
    Cell,
    best_rate,
    search_runs,
    searched_rates,
)
from inputs import packed_text, searched_graph  # noqa: E402

from mpigossip.cluster.process import end_with  # noqa: E402
from mpigossip.cluster.world import SingleProcess  # noqa: E402
from mpigossip.config.errors import NonFiniteError  # noqa: E402
from mpigossip.runs import start_and_resume  # noqa: E402
from mpigossip.store.log import read  # noqa: E402
from mpigossip.studies.running import RunResult  # noqa: E402
from mpigossip.training import assemble  # noqa: E402

RUNS = HERE / "runs.jsonl"
PACKAGE = "mpigossip"
FIGURES = ("accuracy", "loss", "bytes_sent", "steps", "seconds")
POLL = 5.0
"""Seconds after which a process looks again for a run that no other process is making."""
Line = dict[str, Any]


def lines(path: Path = RUNS) -> list[Line]:
    """Return all stored runs, without a last line that was written only partly.

    :param path: file with one JSON object per line
    """
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def identity(line: Line) -> str:
    """Return a text that identifies a run: its cell, method, level, learning rate and seed."""
    keys = ("study", "nodes", "cell", "method", "level", "lr", "seed")
    return json.dumps([line.get(key) for key in keys], sort_keys=True)


def wanted_runs(cell: Cell, runs: list[Line]) -> Iterator[Line]:
    """Yield all runs of a cell that are known by now: first the search, then the other runs.

    :param cell: the cell
    :param runs: all finished runs, whose results decide which further runs are known
    """
    about = {"study": cell.study, "nodes": cell.nodes, "cell": cell.labels}
    if cell.order:
        for method, level, lr, seed in cell.order(runs):
            yield about | {"method": method, "level": level, "lr": lr, "seed": seed}
        return
    best: dict[str, float] = {}
    for method in cell.methods:
        rates = searched_rates(cell, method, runs)
        for rate in rates:
            yield about | {"method": method, "level": "search", "lr": rate, "seed": SEARCH}
        if rates[-1] in (result := search_runs(cell, method, runs)):
            best[method] = best_rate([*result.values()], cell.metric)
    if len(best) < len(cell.methods):
        return
    for level, share in cell.levels.items():
        for seed in SEEDS:
            for method in cell.methods:
                rate = float(f"{best[method] * share:.3g}")
                yield about | {"method": method, "level": level, "lr": rate, "seed": seed}


def settings(cell: Cell, line: Line) -> list[str]:
    """Return the settings of a run.

    They contain placeholders for paths, so that the same settings are valid on all machines, and
    for the learning rate.
    """
    own = [f"schedule.lr={line['lr']!r}", f"run.seed={line['seed']}"]
    return [*cell.settings, *cell.methods[line["method"]].split(), *own]


def train(line: Line, options: argparse.Namespace) -> Line:
    """Train a run in this process; return its line with metrics and digest.

    The line of a run that diverges has neither. If the run is stopped by a signal, the program
    ends.

    :param line: the run with its settings
    :param options: options of the command line
    """
    folder = options.scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    filled = " ".join(line["settings"])
    values = {
        "{data}": lambda: options.data,
        "{searched}": lambda: searched_graph(options.scratch, line["nodes"]),
        "{text}": lambda: packed_text(options.scratch),
        "{lr}": lambda: line["lr"],
    }
    for placeholder, value in values.items():
        if placeholder in filled:
            filled = filled.replace(placeholder, str(value()))
    job = assemble.load(Path(JOB), [*filled.split(), f"run.output={folder}"])
    began = time.process_time()
    try:
        with SingleProcess() as world:
            summary = start_and_resume.train(job, world, line["nodes"])
        if not summary["finished"]:
            sys.exit(
                f"{identity(line)}: the run was stopped by a signal, so it was not stored; start "
                "this program again"
            )
    except NonFiniteError:
        return line | {"figures": {}, "diverged": True, "digest": None}
    result = RunResult(read(folder / "log.h5"))
    steps = result.log.steps
    # The log contains the distance relative to the norm of the averaged model.
    figures = {name: summary[name] for name in FIGURES} | {
        "train_loss": result.last("train_loss"),
        "distance": float(np.sqrt(np.nanmean(steps["consensus_distance"]))),
        "processor_s": time.process_time() - began,
    }
    rounded = {name: float(f"{value:.6g}") for name, value in figures.items()}
    more: Line = {"late": True} if result.late else {}
    if line["study"] == "time":
        curve = result.curve("step"), result.curve("accuracy")
        more["curve"] = [[int(t), round(a, 4)] for t, a in zip(*curve, strict=True)]
        more["exchanges"] = np.flatnonzero(steps["kind"][:, 0]).tolist()
    return line | {"figures": rounded, **more, "digest": summary["digest"]}


def train_in_child(line: Line, options: argparse.Namespace) -> Line:
    """Call `train` in a forked process, so that its memory and its signals affect no other run.

    If the process ends without a result, this program ends, too.
    """
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    child = fork.Process(target=_send, args=(sending, line, options))
    child.start()
    sending.close()
    try:
        result = receiving.recv()
    except EOFError:
        sys.exit(
            f"{identity(line)}: the run failed or was stopped, so it was not stored; read its "
            "message above, and start this program again"
        )
    child.join()
    return result


def _send(pipe: Any, line: Line, options: argparse.Namespace) -> None:
    """Train and send the line, in a child process that ends together with its parent."""
    end_with(os.getppid())
    pipe.send(train(line, options))


def origin() -> dict[str, str]:
    """Return the hash of the last commit that changed the package, and the version of torch."""
    git = ["git", "-C", str(HERE), "log", "-1", "--format=%h", "--", str(HERE.parents[1] / PACKAGE)]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {"commit": commit or "unknown", "torch": torch.__version__}


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of the chosen studies, in the order of their runs."""
    return [cell for name in options.study or studies() for cell in STUDIES[name]()]


def studies() -> list[str]:
    """Return the names of the studies whose runs this version of the package can make."""
    return [name for name in STUDIES if name not in REMOVED]


def time_of_day(text: str) -> str:
    """Return a time of day as HH:MM with two digits each, so that such texts can be compared."""
    return datetime.strptime(text, "%H:%M").strftime("%H:%M")


class Claims:
    """Claims on runs, by which several processes with the same ``--out`` share the work.

    A claim is a lock on one byte of a file, whose position is a hash of the run. The operating
    system releases it when the process ends, in any way.

    :param path: file of the locks; it is created and stays empty
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._file.close()

    def take(self, run: Line) -> bool:
        """Claim a run; return whether no other process has claimed it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._position(run))
        except BlockingIOError:
            return False
        return True

    def release(self, run: Line) -> None:
        """Give up the claim on a run."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._position(run))

    @staticmethod
    def _position(run: Line) -> int:
        return int.from_bytes(hashlib.sha256(identity(run).encode()).digest()[:7])


def missing_runs(options: argparse.Namespace) -> Iterator[tuple[Cell, Line]]:
    """Yield the runs that are known and not stored, cell by cell."""
    runs = lines(options.out)
    stored = {identity(line) for line in runs}
    for cell in cells(options):
        for run in wanted_runs(cell, runs):
            if identity(run) not in stored:
                yield cell, run


def queue(options: argparse.Namespace) -> int:
    """Make the missing runs, cell by cell, until --until; return the number of runs made.

    While other processes make all runs that are known, this process waits for them, because their
    results may make further runs known.
    """
    versions = origin()
    count = 0
    with Claims(options.out.with_suffix(".lock")) as claims:
        while not (options.until and datetime.now().strftime("%H:%M") >= options.until):
            missing = [*missing_runs(options)]
            if not missing:
                break
            claimed = next(((cell, run) for cell, run in missing if claims.take(run)), None)
            if claimed is None:
                time.sleep(POLL)
                continue
            cell, run = claimed
            # Another process may have stored this run after `missing_runs` had read the file.
            if identity(run) not in {identity(line) for line in lines(options.out)}:
                line = run | {"settings": settings(cell, run)}
                store(options.out, train_in_child(line, options) | versions)
                count += 1
            claims.release(run)
    return count


def store(path: Path, line: Line) -> None:
    """Append a line to a file of runs, and wait until it is on the disk."""
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())


def repeat(options: argparse.Namespace) -> int:
    """Repeat the stored runs that ``options`` select, and compare their digests.

    Return exit code 1 if any digest differs from the stored digest, otherwise 0.
    """
    candidates = [
        line for line in lines(options.out) if line.get("digest") and line["study"] in studies()
    ]
    different = 0
    for line in random.Random().sample(candidates, min(options.again, len(candidates))):
        result = train(line, options)["digest"]
        different += result != line["digest"]
        outcome = "equal" if result == line["digest"] else f"another digest, {result}"
        print(f"{identity(line)}: {outcome}", flush=True)
    return int(different > 0)


def estimate(options: argparse.Namespace) -> None:
    """Print for each cell how many of its runs are stored, and how many are known to be needed."""
    stored = {identity(line) for line in lines(options.out)}
    for cell in cells(options):
        total = len(cell.methods) * (len(cell.rates) + len(SEEDS) * len(cell.levels))
        if cell.order is not None:  # Further runs depend on results, so count only those known now.
            total = sum(1 for _ in wanted_runs(cell, lines(options.out)))
        finished = sum(identity(run) in stored for run in wanted_runs(cell, lines(options.out)))
        print(f"{cell.study:10} n = {cell.nodes:3} {cell.labels}: {finished} of {total} runs")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line.

    :param arguments: arguments of the program; None: the arguments of this process
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="CIFAR-10, packed by `mpigossip data pack`")
    add("--scratch", type=Path, required=True, help="folder for temporary logs")
    add("--out", type=Path, default=RUNS, help="lines of JSON; default: runs.jsonl of this folder")
    add("--study", action="append", choices=studies(), help="repeatable; default: all in order")
    add("--until", metavar="HH:MM", type=time_of_day, help="start no run after this time of today")
    add("--again", type=int, default=0, metavar="N", help="repeat N runs and compare their digests")
    add("--estimate", action="store_true", help="print the numbers of finished and of all runs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Make the missing runs, repeat stored runs, or count runs; return the exit code."""
    options = parse(arguments)
    torch.set_num_threads(1)
    options.scratch.mkdir(parents=True, exist_ok=True)
    if options.estimate:
        estimate(options)
        return 0
    if options.again:
        return repeat(options)
    print(f"number of runs made: {queue(options)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
