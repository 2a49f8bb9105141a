"""Kills ranks of a user's own loop, jobs/loops/survive.py, at random moments, and counts.

python tools/labs/kill_loop.py [--count 20] [--nodes 4] [--losses 2] [--folder]

The launcher is MPIGOSSIP_MPIEXEC, Open MPI's (`--with-ft ulfm` is added). Every run has to end by
itself, with no process left, all steps done, and on each survivor the model that a computation
without MPI has for these losses, to the last bit. With `--folder` the loop has a run's folder:
its last checkpoint is to be whole and of these models, its log of all steps. Exit code 1 else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from mpigossip.store import checkpoint  # noqa: E402
from mpigossip.store.log import read  # noqa: E402
from tests import launch, survivors  # noqa: E402

LIMIT_S = 120.0
"""Seconds that a run has to its first line and, after a kill, to its end."""
EVERY = 50
"""Steps between two evaluations."""


def one(
    nodes: int, losses: int, steps: int, draw: random.Random, folder: Path | None
) -> list[float]:
    """A run that loses so many ranks; seconds from each kill to going on. AssertionError."""
    words = [sys.executable, survivors.SCRIPT, "--steps", steps, "--evaluate-every", EVERY]
    words += ["--out", folder] if folder else []
    run = launch.Launch(nodes, words, REPO)
    waits, alive = [], list(range(nodes))
    try:
        until(run, lambda: "step " in run.output()[0], "its first evaluation")
        ranks = run.ranks()
        for number in range(losses):
            begun = run.output()[0].count("step ")
            until(run, lambda: run.output()[0].count("step ") > begun, "an evaluation")  # noqa: B023
            time.sleep(draw.random() * 0.15)
            chosen = draw.choice(alive)
            alive.remove(chosen)
            began = time.monotonic()
            os.kill(ranks[chosen], signal.SIGKILL)
            until(run, lambda: len(survivors.lost(run.output()[1])) > number, "going on")  # noqa: B023
            waits.append(time.monotonic() - began)
        done = run.process.wait(LIMIT_S)
        out, err = run.output()
        left = run._stragglers()
    finally:
        run.close()
    lost = survivors.lost(err)
    assert done == 0, f"exit code {done}: {err[-1500:]}"
    assert not left, f"left running: {left}"
    assert {name for names, _ in lost for name in names} == set(range(nodes)) - set(alive), lost
    assert survivors.digests(out) == survivors.expected(nodes, steps, lost), f"{lost}: {out}{err}"
    assert f"step {steps}: " in out, f"not at its end: {out}"
    if folder:
        check_run(folder, steps, survivors.digests(out))
    return waits


def check_run(folder: Path, steps: int, models: dict[int, str]) -> None:
    """AssertionError unless log and last checkpoint are those of the nodes that are left."""
    path, log = checkpoint.latest(folder), read(folder / "log.h5")
    assert path is not None and path.name == f"step-{steps:08d}", path
    assert not checkpoint.verify(path), checkpoint.verify(path)
    states = [checkpoint.read_node(path, node).parameters for node in range(len(models))]
    written = [hashlib.sha256(state.tobytes()).hexdigest() for state in states]
    assert written == [models[name] for name in sorted(models)], "other models in the checkpoint"
    assert checkpoint.read_manifest(path).n == len(models) == log.summary["nodes"]
    assert log.steps["step"].tolist() == list(range(steps)), "the log lacks steps"


def until(run: launch.Launch, so, what: str) -> None:
    """Wait; AssertionError where the run has ended, or is late."""
    end = time.monotonic() + LIMIT_S
    while not so():
        text = "".join(run.output())[-1500:]
        assert run.process.poll() is None, f"ended by itself before {what}: {text}"
        assert time.monotonic() < end, f"no {what} within {LIMIT_S:g} s: {text}"
        time.sleep(0.002)


def main() -> int:
    """Run the series, print its line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="runs")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--losses", type=int, default=1, help="in each run")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", action="store_true", help="with a run's folder")
    options = parser.parse_args()
    tolerant = shlex.join([*launch.launcher(), "--with-ft", "ulfm"])
    os.environ |= launch.beside_launcher() | {"MPIGOSSIP_MPIEXEC": tolerant}
    draw, waits, wrong = random.Random(options.seed), list[float](), list[str]()
    began = time.monotonic()
    for at in range(options.count):
        if time.monotonic() - began > options.seconds:
            break
        try:
            with tempfile.TemporaryDirectory() as scratch:
                place = Path(scratch) / "run" if options.folder else None
                waits += one(options.nodes, options.losses, options.steps, draw, place)
        except (AssertionError, TimeoutError, OSError) as error:
            wrong.append(f"run {at}: {error}")
            print(f"WRONG {wrong[-1]}", flush=True)
        else:
            print(f"run {at}: going on after {waits[-1]:.2f} s", flush=True)
    print(
        f"a user's loop, {options.nodes} ranks: {len(waits)} kills, {len(wrong)} wrong; s from "
        f"kill to going on, median {statistics.median(waits or [0]):.2f}, "
        f"most {max(waits, default=0):.2f}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
