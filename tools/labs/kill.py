"""Kill ranks of real runs, and check that the runs end as they should.

    python tools/labs/kill.py checkpoints [--count 200]
    python tools/labs/kill.py start [--count 50] [--tolerant]
    python tools/labs/kill.py signals [--signals STOP]
    python tools/labs/kill.py ranks [--count 50] [--losses 2] [--victim 0] [--hosts]
    python tools/labs/kill.py places [--where flush] [--losses 2]
    python tools/labs/kill.py loop [--folder]

* `checkpoints` kills a rank while it writes a checkpoint.
* `start` kills a rank before, in or after MPI_Init; `--tolerant` adds Open MPI's `--with-ft ulfm`.
* `signals` sends SIGKILL, SIGSTOP or SIGTERM to a rank in each of PHASES.
* `ranks` kills ranks in training, and the other ranks continue. `--losses` is the number of killed
  ranks of a run, `--victim` the first one; `--hosts` runs each rank on a host of tools/labs/net.sh.
* `places` kills ranks inside an evaluation, a global average, a flush, or a training step.
* `loop` kills a rank of jobs/loops/survive.py; with `--folder`, the loop has a run directory.

The launcher is MPIGOSSIP_MPIEXEC, as in the tests; `ranks`, `places` and `loop` need the launcher
of Open MPI, to which the tool adds `--with-ft ulfm`. The tool prints a table at the end. Its exit
code is 1 if it has found one of these problems:

* a run that does not end in time;
* a log or a checkpoint that lacks steps or nodes;
* for `checkpoints` and `signals`: a resumed run whose digest differs from an uninterrupted run;
* for `signals`: another exit code than expected, or no message that names the stopped rank;
* for `ranks`: an accuracy that is more than --points percentage points below the accuracy of a run
  without a failure;
* for `loop`: a process that does not end, missing steps, or models that are not bitwise identical
  to the result of a computation without MPI for the same failures.
"""

import argparse
import contextlib
import hashlib
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import numpy as np  # noqa: E402

from mpigossip.store import StoreError, checkpoint  # noqa: E402
from mpigossip.store.log import read  # noqa: E402
from mpigossip.training.assemble import COMPILER_LOCK_S  # noqa: E402
from tests import launch, survivors  # noqa: E402

LIMIT_S = 60.0  # Seconds without new output after which a run counts as hanging.
START_S = 180.0  # Seconds within which a run has to reach its first step, even on few cores.
STARTS_S = 8.0  # Value of node.timeout_s, in seconds, of runs in which a rank dies at the start.
BEGUN_S = 4.0  # Seconds after the launch within which these ranks are killed.
TINY = [
    *("model.name=mlp", "model.hidden=[256]", "data.batch=8", "data.workers=0", "run.epochs=1000"),
    *("run.evaluate_every=0", "log.flush_steps=1000", "checkpoint.every_steps=1"),
]
WITH_SIGNAL = [*TINY, "run.evaluate_every=1"]
"""Settings of runs in which a rank gets a signal."""
PHASES = ("start", "compile", "exchange", "evaluation", "checkpoint", "end")
"""Phases of a run in which a rank gets a signal; consecutive runs use consecutive phases."""
DIGITS = [
    "model.name=mlp",  # It takes a fifth of LeNet's time.
    *("data.batch=16", "run.survive=true", "log.flush_steps=20", "node.timeout_s=20"),
]


@dataclass
class Series:
    """Runs of one kind in which ranks are killed; each series is a row of the table."""

    title: str
    """First cell of the row."""
    kills: int = 0
    """Number of killed ranks in runs without a problem."""
    problems: list[str] = field(default_factory=list)
    """Text about each run with a problem."""
    facts: dict[str, object] = field(default_factory=dict)
    """Further values of the row, by name."""

    @contextlib.contextmanager
    def run(self, what: object, kills: int) -> Iterator[None]:
        """Return a context manager for one run: count its kills, or record its error as a problem.

        :param what: description of the run
        :param kills: number of ranks that are killed in the run
        """
        try:
            yield
            self.kills += kills
        except (AssertionError, StoreError, OSError, IndexError, TimeoutError) as error:
            self.problems.append(f"{what}: {error}")
            print(f"WRONG {self.problems[-1]}", flush=True)

    def seconds(self, what: str, values: Sequence[float]) -> None:
        """Add the median and the maximum of times to the facts.

        :param what: text about the times
        :param values: the times in seconds
        """
        middle = statistics.median(values or [0])
        most = max(values, default=0)
        self.facts[f"seconds {what} (median, maximum)"] = f"{middle:.2f}, {most:.2f}"

    def line(self) -> str:
        """Return the row of this series as text."""
        facts = "; ".join(f"{name}: {value}" for name, value in self.facts.items())
        return f"{self.title}: {self.kills} kills, {len(self.problems)} problems; {facts}"


@contextlib.contextmanager
def running(ranks: int, words: Sequence, **env: str) -> Iterator[launch.Launch]:
    """Return a context manager that starts a command on ``ranks`` ranks and ends all processes.

    :param ranks: number of ranks
    :param words: words of the command
    :param env: additional environment variables
    """
    run = launch.Launch(ranks, [*map(str, words)], REPO, env)
    try:
        yield run
    finally:
        run.close()


def job(folder: Path, settings: Sequence[str]) -> list[str]:
    """Return the words of a command that trains on digits in the run directory ``folder``."""
    return ["mpigossip", "train", "jobs/digits.toml", *settings, f"run.output={folder}"]


# -- while checkpoints are written ----------------------------------------------------------------


def checkpoints(options, top: Path, draw: random.Random) -> Iterator[Series]:
    """Kill a rank of a run while it writes a checkpoint, resume the run, and repeat both.

    After ``--chain`` kills, the run is resumed once more, without a kill. Its digest has to equal
    the digest of an uninterrupted run.

    :param options: options of the command line
    :param top: temporary folder
    :param draw: random numbers
    """
    ranks = 2
    count = options.count or 200
    torn = 0
    series = Series(f"checkpoints, {ranks} ranks")
    while series.kills + len(series.problems) < count:
        folder = top / f"chain-{series.kills}"
        for _ in range(min(options.chain, count - series.kills)):
            with series.run(folder, 1):
                torn += one_life(folder, ranks, draw)
        with series.run(folder, 0):
            assert checkpoint.latest(folder) is not None, "the run has no complete checkpoint"
            check_resumed(folder, ranks, TINY)
    series.facts["kills that left an incomplete checkpoint"] = torn
    yield series


def one_life(folder: Path, ranks: int, draw: random.Random) -> bool:
    """Start or resume a run, kill a rank while it writes a checkpoint, and verify the newest one.

    :param folder: the run directory
    :param ranks: number of ranks
    :param draw: random numbers
    :return: whether an incomplete checkpoint is left, besides the complete ones
    """
    before = newest_step(folder)
    with running(ranks, job(folder, TINY)) as run:
        wait(lambda: newest_step(folder) > before + 1, START_S, run)
        time.sleep(draw.random() * 0.1)
        wait(lambda: any(folder.glob("checkpoints/*.writing")), 10, run)
        time.sleep(draw.random() * 0.01)
        os.kill(draw.choice(run.ranks()), signal.SIGKILL)
        watch(lambda: run.process.poll() is not None, LIMIT_S, run)
    newest = checkpoint.latest(folder)
    problems = checkpoint.verify(newest) if newest else ["the run has no checkpoint"]
    assert not problems, problems
    step = newest_step(folder)
    assert step > before, f"the newest checkpoint has step {step}, but step {before} existed before"
    return any(folder.glob("checkpoints/*.writing"))


def newest_step(folder: Path) -> int:
    """Return the step in the name of the newest checkpoint of a run; -1 if there is none."""
    names = [path.name for path in folder.glob("checkpoints/step-*")]
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=-1)


# -- while MPI starts -----------------------------------------------------------------------------


def starts(options, top: Path, draw: random.Random) -> Iterator[Series]:
    """Kill a random rank within the first seconds of a run.

    In every other run, the rank is killed within 0.3 s after it has entered MPI_Init, which takes
    about this time. Each run has to end within node.timeout_s (``STARTS_S``) plus 10 s after the
    kill. If its exit code is 0, its log and its checkpoint have to be complete.

    :param options: options of the command line
    :param top: temporary folder
    :param draw: random numbers
    """
    settings = [*TINY[:-1], "run.steps=1500", "run.survive=true", f"node.timeout_s={STARTS_S:g}"]
    for ranks in options.nodes:
        series = Series(f"start, {ranks} ranks")
        phases = Counter[str]()
        waits = []
        named = 0
        for at in range(options.count or 50):
            folder = top / f"start-{ranks}-{at}"
            chosen = draw.randrange(ranks)
            with (
                series.run(f"{folder}, rank {chosen}", 1),
                running(ranks, job(folder, settings)) as run,
            ):
                entered = f".ranks-*/{chosen}.*+"
                wait(lambda: len(run.ranks()) == ranks, LIMIT_S, run)  # noqa: B023
                if at % 2:
                    wait(lambda: any(folder.glob(entered)), LIMIT_S, run)  # noqa: B023
                time.sleep(draw.random() * (0.3 if at % 2 else BEGUN_S))
                output = "".join(run.output())
                phase = "before its first file"
                if "parameters" in output:
                    phase = "in training"
                elif any(folder.glob(entered)):
                    phase = "in MPI_Init or soon after it"
                elif any(folder.glob(f".ranks-*/{chosen}.*")):
                    phase = "before MPI_Init"
                began = time.monotonic()
                os.kill(run.ranks()[chosen], signal.SIGKILL)
                while run.process.poll() is None:
                    if time.monotonic() > began + STARTS_S + 10:
                        stuck(f"the run did not end within {STARTS_S + 10:g} s", run)
                    time.sleep(0.01)
                waits.append(time.monotonic() - began)
                if run.process.returncode == 0:
                    check_files(folder, 1)
                    phase += ", others continued"
                phases[phase] += 1
                err = run.output()[1]
                message = re.search(rf"rank {chosen}\b", err)
                named += bool(message)
                if not message:
                    print(
                        f"killed {phase}: no message names rank {chosen}: {err[-500:]}", flush=True
                    )
        series.facts |= phases
        series.facts["runs with a message that names the rank"] = named
        series.seconds("from the kill to the end of the run", waits)
        yield series


# -- signals in the phases of a run ----------------------------------------------------------------


def signals(options, top: Path, draw: random.Random) -> Iterator[Series]:
    """Send a signal to a random rank of a run in one of the phases of `PHASES`.

    The run has to end in time. The limit allows for two waits of node.timeout_s, because the other
    ranks may wait for a stopped rank in two collective calls; a busy machine extends the limit
    (``tests.launch.patience``). From the phase "exchange" on, there has to be a complete
    checkpoint, and after SIGTERM the exit code has to be 75, or 0 if the run was at its end. If
    there is a checkpoint, the run is then resumed for five steps; its digest has to equal the
    digest of an uninterrupted run.

    :param options: options of the command line
    :param top: temporary folder
    :param draw: random numbers
    """
    ranks = options.nodes[0]
    for name in options.signals:
        series = Series(f"SIG{name}, {ranks} ranks")
        ends = Counter[str]()
        waits = []
        for at in range(options.count or 20):
            phase = PHASES[at % len(PHASES)]
            folder = top / f"{name}-{at}"
            chosen = draw.randrange(ranks)
            with series.run(f"{folder}, rank {chosen}, {phase}", 1):
                end, seconds = interrupt(folder, name, phase, ranks, chosen, draw)
                ends[f"{phase}: {end}"] += 1
                print(f"SIG{name}, rank {chosen}, {phase}: {end}, {seconds:.1f} s", flush=True)
                waits.append(seconds)
                compiled = ["node.compile=true"] * (phase == "compile")
                check_resumed(folder, ranks, [*WITH_SIGNAL, *compiled])
            shutil.rmtree(folder, ignore_errors=True)
        series.facts |= ends
        series.seconds("from the signal to the end of the run", waits)
        yield series


def interrupt(
    folder: Path, name: str, phase: str, ranks: int, chosen: int, draw: random.Random
) -> tuple[str, float]:
    """Send a signal to one rank in a phase of a run, and check how the run ends.

    :param folder: the run directory
    :param name: name of the signal without "SIG"
    :param phase: one of `PHASES`
    :param ranks: number of ranks
    :param chosen: rank that gets the signal
    :param draw: random numbers
    :return: text about the end of the run; seconds from the signal to this end
    :raises AssertionError: if the run does not end in time, or with a wrong exit code, message or
        checkpoint
    """
    steps = 400 if phase == "end" else 100000
    settings = [*WITH_SIGNAL, f"run.steps={steps}", f"node.timeout_s={STARTS_S:g}"]
    env = {}
    if phase == "compile":
        settings.append("node.compile=true")
        # Use a new cache, because nothing would be compiled if the code were in the cache.
        env["TORCHINDUCTOR_CACHE_DIR"] = str(folder.with_name(f"{folder.name}-cache"))
    mark = {"exchange": "x", "evaluation": "e"}.get(phase)
    if mark:
        settings.append('log.hooks=["victim:Victim"]')
        env |= {
            "VICTIMS": f"{chosen}@{draw.randrange(20, 60)}{mark}",
            "VICTIM_SIGNAL": name,
            "PYTHONPATH": os.pathsep.join([str(REPO / "tests"), *sys.path[:1]]),
        }
    with running(ranks, job(folder, settings), **env) as run:
        wait(lambda: len(run.ranks()) == ranks, START_S, run)
        if mark:
            wait(lambda: "a victim dies in" in run.output()[1], START_S, run)
        elif phase == "compile":
            wait(lambda: has_compiler(run.ranks()[chosen]), START_S, run)
        elif phase == "checkpoint":
            wait(lambda: newest_step(folder) > 0, START_S, run)
            wait(lambda: any(folder.glob("checkpoints/*.writing")), 30, run)
        elif phase == "end":
            wait(lambda: newest_step(folder) >= 395, START_S, run)
        if not mark:
            time.sleep(draw.random() * (BEGUN_S if phase == "start" else 0.2))
        if run.process.poll() is not None:
            return "the run ended before the signal", 0.0
        began = time.monotonic()
        if not mark:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(run.ranks()[chosen], getattr(signal, f"SIG{name}"))
        limit_s = (2 * max(STARTS_S, 10) + 30) * launch.patience()
        # Other ranks may wait for a lock of the compiler's cache that a stopped rank holds.
        limit_s += COMPILER_LOCK_S * (phase == "compile")
        while run.process.poll() is None:
            if time.monotonic() > began + limit_s:
                stuck(f"the run did not end within {limit_s:g} s", run)
            time.sleep(0.01)
        seconds = time.monotonic() - began
        code = run.process.returncode
        errors = run.output()[1]
    newest = checkpoint.latest(folder)
    assert newest is None or not checkpoint.verify(newest), "the newest checkpoint is damaged"
    early = phase in ("start", "compile")
    assert early or newest is not None, "the run has no checkpoint"
    if name == "TERM" and not early:
        assert code in (75, 0), f"exit code {code}: {errors[-900:]}"
    named = re.search(rf"rank {chosen}\b", errors) is not None
    # If all other ranks wait for the lock inside torch, none of them can know who holds it.
    names_lock = phase == "compile" and ".lock" in errors
    if name == "STOP" and code:
        assert named or names_lock, f"no message names rank {chosen}: {errors[-900:]}"
    what = "the rank" if named else "the compiler's lock" if names_lock else ""
    return f"exit code {code}{what and f', message names {what}'}", seconds


def has_compiler(rank: int) -> bool:
    """Return whether a C++ compiler runs as a descendant of a process.

    :param rank: process number of a rank
    """
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            fields = text.rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            names[pid] = text[text.index("(") + 1 : text.rindex(")")]
    for pid, program in names.items():
        if program.startswith(("cc1plus", "g++", "c++", "clang")):
            while pid in parents and pid != rank:
                pid = parents[pid]
            if pid == rank:
                return True
    return False


def check_resumed(folder: Path, ranks: int, settings: Sequence[str]) -> None:
    """Resume an interrupted run for five steps, and compare it with an uninterrupted run.

    If the run has no checkpoint, it is not resumed.

    :param folder: the run directory
    :param ranks: number of ranks
    :param settings: settings of the run, without hooks
    :raises AssertionError: if a command prints no digest, or if the two digests differ
    """
    newest = checkpoint.latest(folder)
    if newest is None:
        return
    steps = f"run.steps={checkpoint.read_manifest(newest).step + 5}"
    whole = folder.with_name(f"{folder.name}-whole")
    digests = []
    for words in (
        ["mpigossip", "resume", folder, steps, "log.hooks=[]"],
        [*job(whole, settings), steps, "checkpoint.every_steps=0"],
    ):
        output = launch.mpirun(ranks, words, START_S, REPO).stdout
        digests += re.findall(r"digest +([0-9a-f]{64})", output)
    shutil.rmtree(whole, ignore_errors=True)
    assert len(digests) == 2 and digests[0] == digests[1], (
        f"the digests of the resumed and the uninterrupted run must be equal: {digests}, {steps}"
    )


# -- in a given part of a run ----------------------------------------------------------------------


def places(options, top: Path, draw: random.Random) -> Iterator[Series]:
    """Let ranks kill themselves inside an evaluation, a global average, a flush or a step.

    The other ranks have to finish the run, with a complete log and checkpoint. A rank prints a line
    before it kills itself.

    :param options: options of the command line
    :param top: temporary folder
    :param draw: random numbers
    """
    lost = options.losses
    path = os.pathsep.join([str(REPO / "tests"), *sys.path[:1]])
    common = [*DIGITS, "data.batch=60", "data.workers=0", "run.steps=20", "log.flush_steps=5"]
    common += ['log.hooks=["victim:Victim"]', "run.epochs=100"]
    for ranks, where in ((n, where) for n in options.nodes for where in options.where):
        series = Series(f"in {where}, {ranks} ranks, {lost} at once")
        waits = []
        mark = {"evaluation": "e", "average": "g", "flush": "!", "training": ""}[where]
        average = ["algorithm.style=atc", "cadence.name=gossip-pga", "cadence.period=3"] * (
            where == "average"
        )
        for at in range(options.count or 20):
            # The log is written by the lowest surviving rank. To hit a flush, kill the lowest
            # ranks, all of them in the same step.
            step = draw.randrange(2, 14)
            chosen = draw.sample(range(ranks), lost)
            victims = range(lost) if where == "flush" else chosen
            plan = " ".join(f"{victim}@{step}{mark}" for victim in victims)
            folder = top / f"{where}-{ranks}-{at}"
            with (
                series.run(f"{folder}, {plan}", lost),
                running(
                    ranks, job(folder, [*common, *average]), VICTIMS=plan, PYTHONPATH=path
                ) as run,
            ):
                wait(lambda: "parameters" in run.output()[0], START_S, run)  # noqa: B023
                wait_for_success(run)
                died = run.output()[1].count("a victim dies in ")
                assert died == lost, (
                    f"{died} ranks killed themselves instead of {lost}: {run.output()[1][-900:]}"
                )
                waits += check_files(folder, lost)["lost_s"]
        series.seconds("lost according to the log", waits)
        yield series


# -- in training ----------------------------------------------------------------------------------


def losses(options, top: Path, draw: random.Random) -> Iterator[Series]:
    """Kill ranks in training, one after the other; the other ranks have to finish the run.

    Their accuracy may be at most ``--points`` percentage points below the accuracy of a run without
    a failure.

    :param options: options of the command line
    :param top: temporary folder
    :param draw: random numbers
    """
    lost = options.losses
    epochs = options.epochs
    victim = options.victim
    first = "a random rank" if victim is None else f"rank {victim}"
    # The schedule of the job is scaled to this number of epochs. With a high learning rate at
    # the end, accuracies would differ by chance alone.
    milestones = f"schedule.milestones=[{2 * epochs // 3},{13 * epochs // 15}]"
    settings = [*DIGITS, f"run.epochs={epochs}", milestones]
    for ranks in options.nodes:
        series = Series(f"training, {ranks} ranks, {lost} failures, the first of {first}")
        points = []
        waits = []
        spent = []
        train(ranks, job(top / f"whole-{ranks}", settings), draw, [])
        whole = check_files(top / f"whole-{ranks}", 0)
        for at in range(-(-(options.count or 50) // len(options.nodes))):
            folder = top / f"lost-{ranks}-{at}"
            ends = sorted(draw.sample(range(epochs - 2), lost))
            with series.run(folder, lost):
                pause = 0.3 * whole["seconds"] / epochs
                waits += train(ranks, job(folder, settings), draw, ends, victim, pause)
                summary = check_files(folder, lost)
                points.append(100 * (summary["accuracy"] - whole["accuracy"]))
                spent += summary["lost_s"]
                print(f"run {at + 1}: accuracy {summary['accuracy']:.4f}", flush=True)
                assert points[-1] >= -options.points, (
                    f"the accuracy changed by {points[-1]:+.2f} percentage points, but "
                    f"--points allows -{options.points:g}"
                )
        series.facts["accuracy without a failure"] = f"{whole['accuracy']:.4f}"
        mean = statistics.mean(points or [0])
        worst = min(points, default=0)
        name = "change of accuracy in percentage points (mean, worst)"
        series.facts[name] = f"{mean:+.2f}, {worst:+.2f}"
        series.seconds("from a kill until the others continue", waits)
        series.seconds("lost according to the log", spent)
        yield series


def train(
    ranks: int,
    words: list[str],
    draw: random.Random,
    ends: Sequence[int],
    victim: int | None = None,
    pause: float = 0.0,
) -> list[float]:
    """Run a training, and kill ranks of it.

    :param ranks: number of ranks
    :param words: command of the training
    :param draw: random numbers
    :param ends: numbers of finished epochs, after each of which a rank is killed
    :param victim: rank that is killed first; None: a random rank
    :param pause: longest random delay of a kill after its epoch, in seconds
    :return: for each kill, the seconds until the other ranks continued
    """
    waits = list[float]()
    alive = list(range(ranks))
    with running(ranks, words) as run:
        wait(lambda: "parameters" in run.output()[0], START_S, run)
        pids = run.ranks()
        for number, done in enumerate(ends):
            wait(lambda: epochs_of(run) >= done, LIMIT_S, run)  # noqa: B023
            time.sleep(pause * draw.random())
            chosen = draw.choice(alive) if victim is None or number else victim
            alive.remove(chosen)
            count_lost = lambda: run.output()[1].count("continue from")  # noqa: B023, E731
            waits.append(kill(run, pids[chosen], count_lost, number))
        wait_for_success(run)
    return waits


def kill(run: launch.Launch, pid: int, count_lost: Callable[[], int], before: int) -> float:
    """Kill a rank; return the seconds until the other ranks print that they continue.

    :param run: the run
    :param pid: process number of the rank
    :param count_lost: function that counts the failures after which ranks have printed that they
        continue
    :param before: number of failures before this one
    """
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait(lambda: count_lost() > before, LIMIT_S, run)
    return time.monotonic() - began


def epochs_of(run: launch.Launch) -> int:
    """Return the number of finished epochs; a run prints a row of a table for each of them."""
    return len(re.findall(r"(?:\n|\r|2K) +\d+\.\d\d +\d+ ", run.output()[0]))


def check_files(folder: Path, lost: int) -> dict:
    """Check that the log and the newest checkpoint of a run are complete.

    :param folder: the run directory
    :param lost: number of ranks that were killed
    :return: summary in the log; its key "lost_s" has the seconds that each failure took
    :raises AssertionError: if the log or the checkpoint is not complete, or if the log does not
        contain ``lost`` failures
    """
    log = read(folder / "log.h5")
    steps = log.steps["step"]
    assert log.summary.get("finished"), f"the log has no summary of a finished run: {log.summary}"
    assert len(steps) == log.summary["steps"], f"{len(steps)} of {log.summary['steps']} steps"
    assert np.array_equal(steps, np.arange(len(steps))), f"steps missing or doubled: {steps}"
    assert not np.isnan(log.steps["loss"]).all(axis=1).any(), "the log has a step without any loss"
    problems = checkpoint.verify(checkpoint.latest(folder))
    assert not problems, problems
    failures = log.summary.get("lost", "")
    times = [float(seconds) for seconds in re.findall(r"\(([0-9.]+) s lost\)", failures)]
    assert len(times) == lost, f"{lost} ranks were killed, but the log has: {failures!r}"
    return dict(log.summary) | {"lost_s": times}


# -- in a custom loop -----------------------------------------------------------------------------


def loops(options, top: Path, draw: random.Random) -> Iterator[Series]:
    """Kill ranks of custom loops; compare the survivors' models with a computation without MPI.

    :param options: options of the command line
    :param top: temporary folder
    :param draw: random numbers
    """
    steps = 600
    lost = options.losses
    for nodes in options.nodes:
        series = Series(f"custom loop, {nodes} ranks, {lost} failures of random ranks")
        waits = []
        for at in range(options.count or 20):
            folder = top / f"loop-{nodes}-{at}"
            alive = list(range(nodes))
            words = [sys.executable, survivors.SCRIPT, "--steps", steps, "--evaluate-every", 50]
            words += ["--out", folder] * options.folder
            with series.run(folder, lost), running(nodes, words) as run:
                wait(lambda: "step " in run.output()[0], START_S, run)  # noqa: B023
                pids = run.ranks()
                for number in range(lost):
                    count = run.output()[0].count("step ")
                    wait(lambda: run.output()[0].count("step ") > count, LIMIT_S, run)  # noqa: B023
                    time.sleep(draw.random() * 0.15)
                    chosen = alive.pop(draw.randrange(len(alive)))
                    count_lost = lambda: len(survivors.lost(run.output()[1]))  # noqa: B023, E731
                    waits.append(kill(run, pids[chosen], count_lost, number))
                wait_for_success(run)
                out, err = run.output()
                assert not (left := run._stragglers()), f"processes that did not end: {left}"
                failed = survivors.lost(err)
                failed_ranks = {rank for ranks, _ in failed for rank in ranks}
                assert failed_ranks == {*range(nodes)} - {*alive}, failed
                models = survivors.digests(out)
                assert models == survivors.expected(nodes, steps, failed), f"{failed}: {out}{err}"
                assert f"step {steps}: " in out, f"the loop did not print step {steps}: {out}"
                if options.folder:
                    check_folder(folder, steps, models)
        series.seconds("from a kill until the others continue", waits)
        yield series


def check_folder(folder: Path, steps: int, models: dict[int, str]) -> None:
    """Check that the log is complete and the newest checkpoint contains the survivors' models.

    :param folder: the run directory
    :param steps: number of steps of the run
    :param models: digest of each survivor's model, by its rank at the start
    :raises AssertionError: if the log is not complete, or if a model in the checkpoint has another
        digest
    """
    path = checkpoint.latest(folder)
    log = read(folder / "log.h5")
    assert path is not None and path.name == f"step-{steps:08d}", path
    assert not checkpoint.verify(path), checkpoint.verify(path)
    states = [checkpoint.read_node(path, node).parameters for node in range(len(models))]
    written = [hashlib.sha256(state.tobytes()).hexdigest() for state in states]
    assert written == [models[rank] for rank in sorted(models)], (
        f"the models in the checkpoint have the digests {written}, not {models}"
    )
    assert checkpoint.read_manifest(path).n == len(models) == log.summary["nodes"]
    assert log.steps["step"].tolist() == list(range(steps)), "the log lacks steps"


# -- waiting --------------------------------------------------------------------------------------


def wait_for_success(run: launch.Launch) -> None:
    """Wait until a run has ended, and check that its exit code is 0.

    :raises AssertionError: if the exit code is not 0, or as described for :func:`watch`
    """
    watch(lambda: run.process.poll() is not None, LIMIT_S, run)
    code = run.process.returncode
    assert code == 0, f"exit code {code}: {run.output()[1][-1500:]}"


def wait(ready: Callable[[], bool], limit: float, run: launch.Launch) -> None:
    """Wait until ``ready()`` is true while a run goes on.

    :param ready: function that returns whether to end the wait
    :param limit: time limit in seconds, as in :func:`watch`
    :param run: the run
    :raises AssertionError: if the run ends before, or as described for :func:`watch`
    """

    def ready_while_running() -> bool:
        if ready():
            return True
        assert run.process.poll() is None, (
            f"the run ended too early: {''.join(run.output())[-1500:]}"
        )
        return False

    watch(ready_while_running, limit, run)


def watch(ready: Callable[[], bool], limit: float, run: launch.Launch) -> None:
    """Wait until ``ready()`` is true.

    A run prints a line every 30 s, even on a busy machine, so the time limit begins again with each
    output.

    :param ready: function that returns whether to end the wait
    :param limit: time limit in seconds
    :param run: the run
    :raises AssertionError: if the run prints nothing for ``limit`` seconds
    """
    end = time.monotonic() + limit
    seen = 0
    while not ready():
        written = sum(map(len, run.output()))
        if written > seen:
            end = time.monotonic() + limit
            seen = written
        if time.monotonic() > end:
            stuck(f"the run printed nothing for {limit:g} s", run)
        time.sleep(0.005)


def stuck(text: str, run: launch.Launch) -> NoReturn:
    """Abort all ranks, so that faulthandler prints the stacks of their threads, and raise an error.

    :param text: first words of the message; the output of the run follows
    :param run: the run
    :raises AssertionError: always
    """
    for pid in run.ranks():
        os.kill(pid, signal.SIGABRT)
    time.sleep(1)
    out, err = run.output()
    raise AssertionError(f"{text}: {out[-800:]}{err[-12000:]}")


def set_launcher(options, top: Path) -> None:
    """Set MPIGOSSIP_MPIEXEC for all runs: add ULFM if the series needs it.

    With `--hosts`, the launcher starts each rank on a separate host of tools/labs/net.sh.

    :param options: options of the command line
    :param top: folder for a script
    """
    os.environ |= launch.beside_launcher() | {"PYTHONFAULTHANDLER": "1"}
    if options.what in ("checkpoints", "signals") or (
        options.what == "start" and not options.tolerant
    ):
        return
    tolerant = shlex.join([*launch.launcher(), "--with-ft", "ulfm"])
    if options.hosts:
        script = top / "launcher"
        script.write_text(
            f"#!/bin/bash\nexport MPIGOSSIP_MPIEXEC={shlex.quote(tolerant)}\nshift\n"
            f'exec {shlex.quote(str(REPO / "tools/labs/net.sh"))} run "$@"\n'
        )
        script.chmod(0o700)
        tolerant = str(script)
    os.environ["MPIGOSSIP_MPIEXEC"] = tolerant


SERIES = {
    "checkpoints": checkpoints,
    "start": starts,
    "signals": signals,
    "ranks": losses,
    "places": places,
    "loop": loops,
}


def main() -> int:
    """Run the series, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=SERIES)
    parser.add_argument("--count", type=int, help="number of kills (checkpoints) or runs (others)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4], help="numbers of ranks")
    parser.add_argument("--losses", type=int, default=1, help="ranks that are killed in each run")
    parser.add_argument("--victim", type=int, help="rank that is killed first (default: random)")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--folder", action="store_true")
    known = ["evaluation", "average", "flush", "training"]
    parser.add_argument("--where", nargs="+", default=known, choices=known)
    names = ["KILL", "STOP", "TERM"]
    parser.add_argument("--signals", nargs="+", default=names, choices=names)
    parser.add_argument("--tolerant", action="store_true")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--points", type=float, default=1.0, help="percentage points of accuracy that may be lost"
    )
    parser.add_argument(
        "--chain", type=int, default=20, help="kills of a run that is resumed again and again"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-lab-") as top:
        set_launcher(options, Path(top))
        series = list(SERIES[options.what](options, Path(top), random.Random(options.seed)))
    print(*(part.line() for part in series), sep="\n")
    return int(any(part.problems for part in series))


if __name__ == "__main__":
    sys.exit(main())
