"""Warnings and stops: the clock, stragglers, divergence, requests to stop."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import load
from mpigossip.runs.alarms import CadenceWarning, Divergence, Straggler, watchers
from mpigossip.runs.run import Run
from mpigossip.runs.stopper import Reserve, Stopper, end_of_allocation
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from tests import launch

pytestmark = pytest.mark.both


JOB = str(Path(__file__).parents[2] / "jobs" / "digits.toml")
MAIN = [sys.executable, "-m", "mpigossip"]
SHORT = ["data.batch=4", "data.workers=0", "run.evaluate_every=0"]


def test_the_end_of_the_allocation_is_the_earliest_one():
    now = time.time()
    assert end_of_allocation(0, {}) is None
    assert end_of_allocation(0, {"SLURM_JOB_END_TIME": "nonsense"}) is None
    later = str(int(now) + 500)
    soon = str(int(now) + 100)
    assert end_of_allocation(0, {"SLURM_JOB_END_TIME": later}) == pytest.approx(499.5, abs=2)
    both = {"SLURM_JOB_END_TIME": later, "MPIGOSSIP_END_TIME": soon}
    assert end_of_allocation(0, both) == pytest.approx(99.5, abs=2)
    assert end_of_allocation(10, both) == 10
    assert end_of_allocation(0, {"MPIGOSSIP_END_TIME": str(int(now) - 5)}) is None


def test_an_end_that_has_passed_is_ignored_but_reported(alone, monkeypatch):
    """`date -d ""` of a batch script gives the beginning of this day."""
    passed = str(int(time.time()) - 7200)
    monkeypatch.setenv("MPIGOSSIP_END_TIME", passed)
    done = alone("simulate", JOB, "--nodes", "2", *SHORT, "run.steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"mpigossip: MPIGOSSIP_END_TIME={passed} was 2:00:0") == 1
    monkeypatch.setenv("MPIGOSSIP_END_TIME", str(int(time.time()) + 7200))
    assert (
        "MPIGOSSIP_END_TIME"
        not in alone("simulate", JOB, "--nodes", "2", *SHORT, "run.steps=2", "run.output=b").stderr
    )


def clock(end, gaps, lag=0):
    """Return the time at which a clock asks to stop, for steps that take ``gaps`` seconds."""
    at = [0.0]
    watch = Reserve(end, lag, now=lambda: at[0])
    for gap in gaps:
        if watch.over():
            return at[0]
        at[0] += gap
    return None


def test_the_reserve_grows_with_steps_saves_and_the_agreement():
    assert clock(None, [1.0] * 1000) is None
    assert clock(1000.0, [1.0] * 2000) == pytest.approx(948, abs=1)  # 5 % and two steps
    assert clock(1000.0, [1.0] * 2000, lag=8) == pytest.approx(940, abs=1)
    assert clock(60.0, [1.0] * 200) == pytest.approx(53, abs=1)  # 5 s at least
    assert clock(100_000.0, [10.0] * 20_000) == pytest.approx(99_860, abs=10)  # 2 min at most
    slow_save = [1.0] * 100 + [40.0] + [1.0] * 2000
    assert clock(1000.0, slow_save) == pytest.approx(870, abs=2)


def test_the_reserve_of_asynchronous_nodes_counts_rounds(tmp_path):
    made = load({"run": {"output": str(tmp_path)}, "node": {"mixer": "asynchronous"}})
    with SingleProcess() as world, ExitStack() as resources:
        world.comm = object()
        lag = Run(world, made, None, resources).stopper._clock._lag
        world.comm = None
    assert clock(10_000.0, [50.0] * 300, lag) == pytest.approx(9680, abs=50)


def rows(compute, idle=None):
    compute = np.asarray(compute, float)
    longest = compute.max(axis=1, keepdims=True)
    return {"compute_s": compute, "idle_s": longest - compute, "loss": np.ones_like(compute)}


def test_a_straggler_is_reported_after_a_while_and_again_after_a_recovery():
    watch = Straggler(times=2.0, seconds=25.0, hosts=("a", "b", "c", "d"))
    even = rows([[1, 1, 1, 1]] * 10)
    slow = rows([[1, 1, 3, 1]] * 5)
    assert watch.see(0, even) == []
    assert watch.see(10, slow) == []  # 15 s
    (line,) = watch.see(15, slow)
    for text in ("node 2 on c", "3 s of compute", "3.0 x the median of 4 nodes", "30 s", "step 20"):
        assert text in line
    assert watch.see(20, slow) == []  # reported already
    assert watch.see(25, even) == []
    assert watch.see(35, slow) == []
    assert len(watch.see(40, slow)) == 1


def test_stragglers_among_two_nodes_one_node_and_switched_off():
    slow = rows([[1, 3]] * 20)
    (line,) = Straggler(2.0, 10.0, ("same", "same")).see(0, slow)
    assert line.startswith("node 1 is a straggler")
    assert Straggler(2.0, 0.0).see(0, rows([[5]] * 20)) == []
    assert Straggler(0.0, 0.0).see(0, slow) == []
    assert len(Straggler(2.0, 1.0).see(0, rows([[1, 1, 1, 9, 9]] * 5))) == 2


def test_idle_steps_of_a_node_do_not_make_stragglers_of_others():
    nan = float("nan")
    columns = rows([[4, 1], [4, 4]] * 10) | {"loss": np.array([[1, nan], [1, 1]] * 10)}
    assert Straggler(1.5, 1.0).see(0, columns) == []  # node 1 computes in every other step
    columns["loss"][:, 1] = nan
    assert Straggler(1.5, 1.0).see(0, columns) == []  # here it computes in no step
    columns["loss"][:] = nan  # a program that logs no loss: all nodes compute
    (line,) = Straggler(1.5, 1.0).see(0, columns)
    assert line.startswith("node 0 is a straggler")


def distances(values):
    return {"consensus_distance": np.repeat(np.asarray(values, float)[:, None], 3, axis=1)}


def test_divergence_is_growth_within_the_window_from_a_large_enough_distance():
    nan = float("nan")
    watch = Divergence(times=10.0, steps=100)
    assert (
        watch.see(0, distances([1e-9, nan, 5e-3, 9e-3])) == []
    )  # growth from zero to a small value
    (line,) = watch.see(4, distances([nan, 0.02, 0.03]))
    assert "2.00e-02 at step 5" in line and "20 x the value of step 0" in line
    assert watch.see(7, distances([0.04])) == []  # reported already
    assert watch.see(300, distances([0.05])) == []  # the start has left the window
    assert len(watch.see(310, distances([0.6]))) == 1
    assert len(Divergence(10.0, 100).see(0, distances([1.0, float("inf")]))) == 1
    assert Divergence(0.0, 100).see(0, distances([1e-3, 1e9])) == []


def test_a_job_sets_the_limits_of_the_warnings():
    straggler, divergence, _ = watchers(
        load({"log": {"straggler_times": 3, "diverging_times": 0}}).log
    )
    assert straggler.see(0, rows([[1, 2.9]] * 100)) == []
    assert len(straggler.see(100, rows([[1, 3.1]] * 100))) == 1
    assert divergence.see(0, distances([1e-3, 1e9])) == []


JUMP = """
import time
real, shift = time.time, [0.0]
time.time = lambda: real() + shift[0]  # before anybody could keep the old one
from pathlib import Path
from mpigossip.cluster.world import SingleProcess
from mpigossip.runs.stopper import Stopper, end_of_allocation
end = end_of_allocation(0, {"MPIGOSSIP_END_TIME": str(int(real()) + 2000)})
stopper = Stopper(SingleProcess(), Path("nowhere"), end)
found = [stopper.wants_stop(done) for done in range(1, 10)]
shift[0] = 900.0
print(any(found), any(stopper.wants_stop(done) for done in range(10, 30)))
"""


def test_a_jump_of_the_wall_clock_is_not_a_long_step():
    """With such a step, the reserve would be 2 x 900 s of the available 2,000 s."""
    done = subprocess.run(
        launch.warmed([sys.executable, "-c", JUMP], {}), capture_output=True, text=True
    )
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize("how", ["signal", "file", "folder", "clock", "nothing"])
def test_every_request_to_stop_takes_effect_at_a_step_boundary(tmp_path, capsys, how):
    end = 1.0 if how == "clock" else None
    before = signal.getsignal(signal.SIGUSR2)
    with Stopper(SingleProcess(), tmp_path, end) as stopper:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR2)
        if how == "file":
            (tmp_path / "STOP").touch()
        if how == "folder":
            (tmp_path / "STOP").mkdir()
        stopped = [done for done in range(1, 20) if stopper.wants_stop(done)]
    assert stopped[:1] == ([] if how == "nothing" else [8])
    assert (tmp_path / "STOP").exists() == (how == "folder")
    assert ("STOP can't be removed" in capsys.readouterr().err) == (how == "folder")
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_short_failure_of_the_file_system_does_not_stop_a_run():
    with Stopper(SingleProcess(), Path("long" * 100)) as stopper:
        assert not any(stopper.wants_stop(done) for done in range(1, 20))


def test_a_rank_stops_after_its_launcher_has_exited(tmp_path, monkeypatch):
    for size, stops in ((2, [8]), (1, [])):  # a program without a launcher may lose its shell
        world = SingleProcess()
        progress = SimpleNamespace(warnings=[])
        world.size = size
        with monkeypatch.context() as patch, Stopper(world, tmp_path) as stopper:
            stopper.start(progress, None)
            assert not stopper.wants_stop(1)
            patch.setattr(os, "getppid", lambda: 1)
            assert [done for done in range(2, 12) if stopper.wants_stop(done)] == stops
        assert len(progress.warnings) == len(stops)


def parent(process):
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1])


def test_ranks_end_with_a_checkpoint_if_their_launcher_is_killed(mpistart, tmp_path):
    words = [*SHORT, "model.name=mlp", "run.epochs=100000", "checkpoint.every_steps=4"]
    run = mpistart(2, [*MAIN, "train", JOB, *words, f"run.output={tmp_path}"], cwd=tmp_path)
    launch.until(lambda: checkpoint.latest(tmp_path), 60, "a first checkpoint")
    ranks = run.ranks()
    assert len(ranks) == 2
    for process in {parent(rank) for rank in ranks}:
        os.kill(process, signal.SIGKILL)
    launch.until(lambda: not set(ranks) & set(run.ranks()), 60, "the ranks' end")
    if not launch.is_open_mpi():  # Open MPI's library ends them itself
        log = read(tmp_path / "log.h5")
        newest = checkpoint.latest(tmp_path)
        assert "launcher's process" in log.summary["warnings"]
        assert checkpoint.verify(newest) == []
        assert checkpoint.read_manifest(newest).step == log.steps["step"][-1] + 1


def test_ranks_stop_before_the_end_and_resume_to_the_same_bits(pooled, alone):
    settings = [*SHORT, "run.steps=12"]
    whole = alone("simulate", JOB, "--nodes", 2, *settings, "run.output=whole")
    # less time than the reserve
    wall_clock = [*settings, "run.output=cut", "checkpoint.wall_clock_s=1"]
    cut = pooled(2, "train", JOB, *wall_clock, timeout=120)
    assert cut.returncode == 75, cut.stderr
    assert "resumed at step 8" in cut.stdout
    again = pooled(2, "resume", "cut", "checkpoint.wall_clock_s=0", timeout=120)
    assert again.returncode == 0, again.stderr
    digest = [re.search(r"digest +(\w{64})", done.stdout)[1] for done in (whole, again)]
    assert digest[0] == digest[1]


def test_a_warning_of_the_cadence_is_printed_once_until_it_ends():
    said = iter(["", "too often", "too often", "", "too often"])
    rhythm = CadenceWarning(lambda: next(said))
    rows = {"loss": np.zeros((5, 2))}
    lines = [rhythm.see(5 * k, rows) for k in range(5)]
    assert lines == [[], ["too often (step 10)"], [], [], ["too often (step 25)"]]
