"""Kills ranks of real runs and counts what comes of it.

python tools/labs/kill.py checkpoints [--count 200]   a rank dies while checkpoints are written
python tools/labs/kill.py start [--count 50]          a rank dies before, in or after MPI's start
python tools/labs/kill.py start --tolerant            … with Open MPI's --with-ft ulfm
python tools/labs/kill.py ranks [--count 50]          a rank dies in training, the others go on
python tools/labs/kill.py places [--where flush]      a rank dies inside an evaluation, a global
                                                      average, a flush, or in training; --losses 2
python tools/labs/kill.py ranks --losses 2            … and another one
python tools/labs/kill.py ranks --victim 0            … and it is always rank 0
python tools/labs/kill.py ranks --hosts               … each rank a host of tools/labs/net.sh

The launcher is MPIGOSSIP_MPIEXEC, as in the tests; `ranks` needs Open MPI's mpiexec (`--with-ft
ulfm` is added). Ends with a table, and with exit code 1 if anything was not as it must be: no end
in time, a log or checkpoint with gaps, accuracy more than --points below that of a whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import numpy as np  # noqa: E402

from mpigossip.store import StoreError, checkpoint  # noqa: E402
from mpigossip.store.log import read  # noqa: E402
from tests import launch  # noqa: E402

LIMIT_S = 60.0  # seconds without a sign of life that count as a hang
START_S = 180.0  # seconds that a run has to its first step, on a machine with few cores
STARTS_S = 8.0  # node.timeout_s of runs that lose a rank while they start
TINY = [
    "model.name=mlp",
    "model.hidden=[256]",
    "data.batch=8",
    "data.workers=0",
    "run.epochs=1000",
    "run.evaluate_every=0",
    "log.flush_steps=1000",
    "checkpoint.every_steps=1",
]
DIGITS = [
    "model.name=mlp",  # a fifth of LeNet's time a run
    "data.batch=16",
    "run.survive=true",
    "log.flush_steps=20",
    "node.timeout_s=20",
]


@dataclass
class Found:
    """What a series of kills showed."""

    title: str
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """One row of the table."""
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return (
            f"{self.title}: {self.kills} kills, {len(self.wrong)} wrong{'; ' * bool(facts)}{facts}"
        )


# -- while checkpoints are written ----------------------------------------------------------------


def checkpoints(count: int, ranks: int, chain: int, seed: int, top: Path, until: float) -> Found:
    """Lives of one run, each killed while it writes; the last one runs to its end.

    Each chain ends with the digest of a run that was never killed.
    """
    draw, found = random.Random(seed), Found(f"checkpoints, {ranks} ranks")
    torn = 0
    while found.kills < count and time.monotonic() < until:
        folder = top / f"chain-{found.kills}"
        for _ in range(min(chain, count - found.kills)):
            torn += _one_life(folder, ranks, draw, found)
            found.kills += 1
        newest = checkpoint.latest(folder)
        if newest is None:
            found.wrong.append(f"{folder}: no whole checkpoint")
            continue
        steps = checkpoint.read_manifest(newest).step + 5
        digests = []
        for where in (folder, top / "whole"):
            job = _job(where, "jobs/digits.toml", [*TINY, f"run.steps={steps}"])
            settings = ["checkpoint.every_steps=0"] if where != folder else []
            command = "train" if where != folder else "resume"
            words = [*job, *settings] if where != folder else [str(where), f"run.steps={steps}"]
            done = launch.mpirun(ranks, ["mpigossip", command, *words], START_S, REPO)
            digests += re.findall(r"digest +([0-9a-f]{64})", done.stdout)
        if len(digests) != 2 or digests[0] != digests[1]:
            found.wrong.append(f"{folder}: digests {digests} at step {steps}")
        shutil.rmtree(top / "whole")
    found.facts["while writing"] = str(torn)
    return found


def _one_life(folder: Path, ranks: int, draw: random.Random, found: Found) -> bool:
    """Start or resume, kill a rank while it writes; whether that left a half-written one."""
    before = _last(folder)
    run = launch.Launch(
        ranks, ["mpigossip", "train", *_job(folder, "jobs/digits.toml", TINY)], REPO
    )
    try:
        _wait(lambda: _last(folder) > before + 1, START_S, run)
        time.sleep(draw.random() * 0.1)
        _wait(lambda: any(folder.glob("checkpoints/*.writing")), 10, run)
        time.sleep(draw.random() * 0.01)
        os.kill(draw.choice(run.ranks()), signal.SIGKILL)
        _watch(lambda: run.process.poll() is not None, LIMIT_S, run)
    finally:
        run.close()
    newest = checkpoint.latest(folder)
    problems = checkpoint.verify(newest) if newest else ["none"]
    if problems or _last(folder) <= before:
        found.wrong.append(f"{folder}: {problems}, step {_last(folder)} after {before}")
    return any(folder.glob("checkpoints/*.writing"))


def _last(folder: Path) -> int:
    """Step of the newest checkpoint by its name, -1 for none."""
    names = [path.name for path in folder.glob("checkpoints/step-*")]
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=-1)


# -- while MPI starts -----------------------------------------------------------------------------


def starts(count: int, ranks: int, seed: int, top: Path, until: float, begun: float) -> Found:
    """Runs that lose a rank within their first ``begun`` seconds: they end in words, or go on.

    Every other one loses it within 0.3 s of its coming to MPI_Init, which takes no longer. In time
    means ``STARTS_S`` (node.timeout_s) and 10 s from the kill. A run that has ended well has lost
    nobody, or has a whole log.
    """
    draw, found = random.Random(seed), Found(f"start, {ranks} ranks")
    settings = [*TINY[:-1], "run.steps=1500", "run.survive=true", f"node.timeout_s={STARTS_S:g}"]
    phases: dict[str, int] = {}
    waits: list[float] = []
    named = 0
    for at in range(count):
        if time.monotonic() > until:
            break
        folder = top / f"start-{at}"
        words = ["mpigossip", "train", *_job(folder, "jobs/digits.toml", settings)]
        run, chosen = launch.Launch(ranks, words, REPO), draw.randrange(ranks)
        try:
            _wait(lambda: len(run.ranks()) == ranks, LIMIT_S, run)  # noqa: B023
            entered = f".ranks-*/{chosen}.*+"
            if at % 2:
                _wait(lambda: any(folder.glob(entered)), LIMIT_S, run)  # noqa: B023
            time.sleep(draw.random() * (0.3 if at % 2 else begun))
            told, phase = "".join(run.output()), "before its hello"
            if "parameters" in told:
                phase = "in training"
            elif any(folder.glob(entered)):
                phase = "in MPI's start"
            elif any(folder.glob(f".ranks-*/{chosen}.*")):
                phase = "behind its hello"
            began = time.monotonic()
            os.kill(run.ranks()[chosen], signal.SIGKILL)
            _ended(run, STARTS_S + 10)
            waits.append(time.monotonic() - began)
            out, err = run.output()
            if run.process.returncode == 0:
                _checked(folder, 1)
                phase += ", went on"
            found.kills += 1
            phases[phase] = phases.get(phase, 0) + 1
            ours = re.search(rf"rank {chosen} of {ranks} on|ranks: (\d, )*{chosen}\b", err)
            named += bool(ours)
            if not ours:
                print(f"rank {chosen} is not named, {phase}: {err[-500:]}", flush=True)
        except (AssertionError, StoreError, OSError, IndexError) as error:
            found.wrong.append(f"{folder}, rank {chosen}: {error}")
        finally:
            run.close()
    found.facts |= {name: str(number) for name, number in sorted(phases.items())}
    found.facts["with the rank's number in our own words"] = str(named)
    found.facts["s from kill to end, most"] = f"{max(waits, default=0):.1f}"
    return found


def _ended(run: launch.Launch, limit: float) -> None:
    """Until the launcher has ended; AssertionError after so many seconds, whatever is written."""
    end = time.monotonic() + limit
    while run.process.poll() is None:
        if time.monotonic() > end:
            _stuck(f"no end within {limit:g} s", run)
        time.sleep(0.01)


# -- at a given place of a run ---------------------------------------------------------------------


def places(where: str, count: int, ranks: int, lost: int, seed: int, top: Path, until: float,
           ) -> Found:  # fmt: skip
    """Runs in which ranks die inside an evaluation, a global average or a flush, or in training.

    The others come to the end, with a whole log; that the rank died there, it has said itself.
    """
    draw, found = random.Random(seed), Found(f"in {where}, {ranks} ranks, {lost} at once")
    mark = {"evaluation": "e", "average": "g", "flush": "!", "training": ""}[where]
    settings = [*DIGITS, "data.batch=60", "data.workers=0", "run.steps=20", "log.flush_steps=5"]
    settings += ['log.hooks=["victim:Victim"]', "run.epochs=100"]
    settings += ["cadence.name=gossip-pga", "cadence.period=3"] if where == "average" else []
    path = os.pathsep.join([str(REPO / "tests"), os.environ.get("PYTHONPATH", "")])
    waits: list[float] = []
    for at in range(count):
        if time.monotonic() > until:
            break
        # the log is written by the first rank that lives; two at once are two in one step
        step, chosen = draw.randrange(2, 14), draw.sample(range(ranks), lost)
        if where == "flush":
            chosen = list(range(lost))
        plan = " ".join(f"{one}@{step}{mark}" for one in chosen)
        folder = top / f"{where}-{at}"
        words = ["mpigossip", "train", *_job(folder, "jobs/digits.toml", settings)]
        run = launch.Launch(ranks, words, REPO, {"VICTIMS": plan, "PYTHONPATH": path})
        try:
            _wait(lambda: "parameters" in run.output()[0], START_S, run)  # noqa: B023
            _watch(lambda: run.process.poll() is not None, LIMIT_S, run)  # noqa: B023
            err = run.output()[1]
            assert run.process.returncode == 0, f"exit code {run.process.returncode}: {err[-900:]}"
            died = err.count("a victim dies in ")
            assert died == lost, f"{died} victims, not {lost}: {err[-900:]}"
            waits += _checked(folder, lost)["lost_s"]
        except (AssertionError, StoreError, OSError) as error:
            found.wrong.append(f"{folder}, {plan}: {error}")
        finally:
            run.close()
        found.kills += lost
    found.facts["s lost as logged, most"] = f"{max(waits, default=0):.2f}"
    return found


# -- in training ----------------------------------------------------------------------------------


def losses(
    count: int,
    ranks: int,
    lost: int,
    victim: int | None,
    seed: int,
    top: Path,
    epochs: int,
    until: float,
    allowed: float,
    known: Path | None,
) -> Found:
    """Runs in which ``lost`` ranks die one after the other; the others must come to the end.

    Their accuracy may be ``allowed`` points below that of a run without a loss, and no more. That
    run's summary is kept in the file ``known``, for the next series.
    """
    who = "a random rank" if victim is None else f"rank {victim}"
    draw, found = random.Random(seed), Found(f"training, {ranks} ranks, {lost} x {who}")
    # the job's schedule, for as many epochs: at a high rate accuracies differ by chance alone
    milestones = f"schedule.milestones=[{2 * epochs // 3},{13 * epochs // 15}]"
    settings = [*DIGITS, f"run.epochs={epochs}", milestones]
    if known and known.exists():
        whole = json.loads(known.read_text())
    else:
        whole = _trained(ranks, settings, top / f"whole-{ranks}", draw, [], None, epochs)
        if known:
            known.write_text(json.dumps(whole))
    points: list[float] = []
    waits: list[float] = []
    spent: list[float] = []
    for at in range(count):
        folder = top / f"lost-{ranks}-{at}"
        if time.monotonic() > until:
            break
        try:
            one = _trained(
                ranks, settings, folder, draw, waits, victim, epochs, lost, whole["seconds"]
            )
        except (AssertionError, StoreError, OSError) as error:
            found.wrong.append(f"{folder}: {error}")
        else:
            points.append(100 * (one["accuracy"] - whole["accuracy"]))
            spent += one["lost_s"]
            going = ", ".join(f"{wait:.2f}" for wait in waits[-lost:])
            found.kills += lost
            text = f"run {at + 1}: accuracy {one['accuracy']:.4f}, going on after {going} s"
            print(text, flush=True)
            if points[-1] < -allowed:
                found.wrong.append(f"{folder}: accuracy {-points[-1]:.2f} points below the whole's")
    found.facts |= {
        "accuracy of the whole run": f"{whole['accuracy']:.4f}",
        "points apart, mean": f"{statistics.mean(points):+.2f}" if points else "none",
        "points apart, worst": f"{min(points):+.2f}" if points else "none",
        "s from kill to going on, median": f"{statistics.median(waits):.2f}" if waits else "none",
        "s from kill to going on, most": f"{max(waits):.2f}" if waits else "none",
        "s lost as logged, median": f"{statistics.median(spent):.2f}" if spent else "none",
        "s lost as logged, most": f"{max(spent):.2f}" if spent else "none",
    }
    return found


def _trained(
    ranks: int,
    settings: list[str],
    folder: Path,
    draw: random.Random,
    waits: list[float],
    victim: int | None,
    epochs: int,
    lost: int = 0,
    seconds: float = 0.0,
) -> dict:
    """The summary of one run, ``lost`` ranks killed on the way. AssertionError if it is wrong."""
    run = launch.Launch(
        ranks, ["mpigossip", "train", *_job(folder, "jobs/digits.toml", settings)], REPO
    )
    try:
        _wait(lambda: "parameters" in run.output()[0], START_S, run)
        alive = list(range(ranks))
        # epochs behind which one dies, and how far into the next
        ends = sorted(draw.sample(range(epochs - 2), lost))
        for number, done in enumerate(ends):
            _wait(lambda: _epochs(run) >= done, LIMIT_S, run)  # noqa: B023
            time.sleep(0.3 * draw.random() * seconds / epochs)
            chosen = draw.choice(alive) if victim is None or number else victim
            alive.remove(chosen)
            began = time.monotonic()
            os.kill(_of_rank(run, chosen), signal.SIGKILL)
            _wait(lambda: run.output()[1].count("go on from") > number, LIMIT_S, run)  # noqa: B023
            waits.append(time.monotonic() - began)
        _watch(lambda: run.process.poll() is not None, LIMIT_S, run)
        err = run.output()[1]
        assert run.process.returncode == 0, f"exit code {run.process.returncode}: {err[-600:]}"
    finally:
        run.close()
    return _checked(folder, lost)


def _checked(folder: Path, lost: int) -> dict:
    """The summary, once log and checkpoint are found whole."""
    log = read(folder / "log.h5")
    steps = log.steps["step"]
    assert log.summary.get("finished"), f"the log has no summary of a finished run: {log.summary}"
    assert len(steps) == log.summary["steps"], f"{len(steps)} of {log.summary['steps']} steps"
    assert np.array_equal(steps, np.arange(len(steps))), f"steps missing or doubled: {steps}"
    assert not np.isnan(log.steps["loss"]).all(axis=1).any(), "a step that no node has logged"
    problems = checkpoint.verify(checkpoint.latest(folder))
    assert not problems, problems
    times = [float(one) for one in re.findall(r"\(([0-9.]+) s lost\)", log.summary.get("lost", ""))]
    assert len(times) == lost, f"{lost} losses, the log has {log.summary.get('lost')}"
    return dict(log.summary) | {"lost_s": times}


def _epochs(run: launch.Launch) -> int:
    """Rows of the run's table: an epoch each."""
    return len(re.findall(r"(?:\n|\r|2K) +\d+\.\d\d +\d+ ", run.output()[0]))


def _of_rank(run: launch.Launch, rank: int) -> int:
    for pid, env in launch.marked(run.token).items():
        if env.get(b"OMPI_COMM_WORLD_RANK") == str(rank).encode() and _is_python(pid):
            return pid
    raise AssertionError(f"rank {rank} is not there")


def _is_python(pid: int) -> bool:
    return b"mpigossip\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _job(folder: Path, job: str, settings: list[str]) -> list[str]:
    return [job, *settings, f"run.output={folder}"]


def _wait(ready: Callable[[], bool], limit: float, run: launch.Launch) -> None:
    """Until it is so, in a run that goes on."""

    def so() -> bool:
        if ready():
            return True
        assert run.process.poll() is None, f"ended by itself: {''.join(run.output())[-800:]}"
        return False

    _watch(so, limit, run)


def _watch(ready: Callable[[], bool], limit: float, run: launch.Launch) -> None:
    """Until it is so; AssertionError after ``limit`` seconds without a further line of the run.

    One that trains writes a line each 30 s: a busy machine is not taken for a hang.
    """
    end, seen = time.monotonic() + limit, 0
    while not ready():
        written = sum(map(len, run.output()))
        if written > seen:
            end, seen = time.monotonic() + limit, written
        if time.monotonic() > end:
            _stuck(f"nothing within {limit:g} s", run)
        time.sleep(0.01)


def _stuck(text: str, run: launch.Launch) -> NoReturn:
    """AssertionError with where each thread of each rank is, as Python's fault handler has it."""
    for pid in run.ranks():
        os.kill(pid, signal.SIGABRT)
    time.sleep(1)
    out, err = run.output()
    raise AssertionError(f"{text}: {out[-800:]}{err[-12000:]}") from None


def series(options: argparse.Namespace, top: Path) -> Iterator[Found]:
    """What the command line asks for."""
    until = time.monotonic() + options.seconds
    if options.what == "checkpoints":
        yield checkpoints(options.count or 200, 2, options.chain, options.seed, top, until)
        return
    os.environ |= launch.beside_launcher()
    if options.what == "start":
        if options.tolerant:
            os.environ["MPIGOSSIP_MPIEXEC"] = shlex.join([*launch.launcher(), "--with-ft", "ulfm"])
        for ranks in options.nodes:
            yield starts(options.count or 50, ranks, options.seed, top, until, options.begun)
        return
    tolerant = shlex.join([*launch.launcher(), "--with-ft", "ulfm"])
    if options.hosts:
        words = ["exec", str(REPO / "tools" / "labs" / "net.sh"), "run"]
        script = top / "launcher"
        script.write_text(
            f"#!/bin/bash\nexport MPIGOSSIP_MPIEXEC={shlex.quote(tolerant)}\nshift\n"
            f'{shlex.join(words)} "$@"\n'
        )
        script.chmod(0o700)
        tolerant = str(script)
    os.environ["MPIGOSSIP_MPIEXEC"] = tolerant
    if options.what == "places":
        for ranks in options.nodes:
            for where in options.where:
                yield places(where, options.count or 20, ranks, options.losses, options.seed, top,
                             until)  # fmt: skip
        return
    each = -(-(options.count or 50) // len(options.nodes))
    for ranks in options.nodes:
        yield losses(
            each, ranks, options.losses, options.victim, options.seed, top, options.epochs, until,
            options.points, options.whole,
        )  # fmt: skip


def main() -> int:
    """Run the series, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["checkpoints", "start", "ranks", "places"])
    parser.add_argument("--count", type=int, help="kills (checkpoints) or runs (ranks)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--losses", type=int, default=1)
    parser.add_argument("--victim", type=int)
    parser.add_argument("--hosts", action="store_true")
    known = ["evaluation", "average", "flush", "training"]
    parser.add_argument("--where", nargs="+", default=known, choices=known)
    parser.add_argument("--tolerant", action="store_true")
    parser.add_argument("--begun", type=float, default=4.0, help="seconds within which one dies")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--points", type=float, default=1.0, help="of accuracy that a run may end below the whole's"
    )
    parser.add_argument("--whole", type=Path, help="file that keeps the run without a loss")
    parser.add_argument("--chain", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    with tempfile.TemporaryDirectory(prefix="kill-lab-") as top:
        found = list(series(options, Path(top)))
    for one in found:
        for line in one.wrong:
            print(f"WRONG {line}")
        print(one.line())
    return int(any(one.wrong for one in found))


if __name__ == "__main__":
    sys.exit(main())
