"""A real Slurm of virtual nodes (tools/labs/slurm.sh): the printed scripts, stopping, requeueing.

Skipped unless the lab is up, or MPIGOSSIP_SLURM_LAB=1 allows to start it (root, apt).
"""

import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from mpigossip.store.log import read
from tests.analysis import test_doctor_faults as staged

REPO = Path(__file__).parents[2]
LAB = str(REPO / "tools" / "labs" / "slurm.sh")
START_S = 150
"""Time limit of Slurm's start, four launches and four imports of torch while another lab runs."""
MAIN = [sys.executable, "-m", "mpigossip"]
pytestmark = pytest.mark.launcher
SMALL = ["data.batch=4", "data.workers=0", "node.devices=cpu:1", "log.flush_steps=20"]


def bash(*words, cwd=None, timeout=120, check=True):
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, cwd=cwd, timeout=timeout
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def lab():
    """Return a function that runs a command with the lab's Slurm, and returns its output."""
    try:
        metadata.version("mpich")
    except metadata.PackageNotFoundError:
        pytest.skip("the lab starts ranks of the mpich wheel, which isn't installed")
    up = bash(LAB, "run", "true", check=False).returncode == 0
    if not up:
        if os.environ.get("MPIGOSSIP_SLURM_LAB") != "1":
            pytest.skip(
                "no Slurm lab: tools/labs/slurm.sh up, or MPIGOSSIP_SLURM_LAB=1 to let it start"
            )
        if os.getuid() != 0 or not (shutil.which("slurmd") or shutil.which("apt-get")):
            pytest.skip("the Slurm lab needs root, and slurm-wlm or apt-get to install it")
        started = bash(LAB, "up", timeout=600, check=False)
        if "could not install" in started.stdout + started.stderr:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stdout + started.stderr
    yield lambda *words, **more: bash(LAB, "run", *words, **more).stdout
    if not up:
        bash(LAB, "down")


@pytest.fixture(autouse=True)
def no_job_is_left(lab):
    """Cancel the jobs that a failed test has left: they would take the nodes of the next tests."""
    yield
    lab("scancel", "--user=root")
    wait_for(lambda: not lab("squeue", "--noheader"), 60, lambda: f"end of {lab('squeue')}")


def wait_for(condition, seconds, what):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"no {what()} within {seconds} s"
        time.sleep(0.5)
    return result


def state(lab, job):
    """Return the state of a job, and its number of restarts."""
    text = lab("scontrol", "show", "job", job)
    return re.search(r"JobState=(\w+)", text)[1], int(re.search(r"Restarts=(\d+)", text)[1])


def submit(lab, folder, *settings, options=(), time_limit="5m", nodes=4):
    """Submit a script of `mpigossip job`; return the ID of the batch job."""
    made = bash(
        *MAIN,
        "job",
        "generic-slurm",
        REPO / "jobs" / "digits.toml",
        "node.devices=cpu:1",
        *settings,
        "--nodes",
        nodes,
        "--time",
        time_limit,
        cwd=folder,
    )
    (folder / "job.sbatch").write_text(made.stdout)
    return lab("sbatch", "--parsable", *options, "job.sbatch", cwd=folder).strip()


def requeued(lab, job, life, said, name="USR2"):
    """Send a signal to a job, wait until it has queued itself again, and let it start soon."""
    lab("scancel", f"--signal={name}", job)
    wait_for(lambda: state(lab, job) == ("PENDING", life), 120, said)
    # Slurm delays a requeued job by two minutes; without a delay, its credential would be revoked.
    time.sleep(5)
    lab("scontrol", "update", f"JobId={job}", "StartTime=now+5")


def same(folder, name):
    """Check that an interrupted run has the losses and the digest of an uninterrupted one."""
    cut, whole = (read(folder / each / "log.h5") for each in (name, "whole"))
    assert cut.summary["digest"] == whole.summary["digest"]
    return cut.steps["loss"], whole.steps["loss"]


def test_a_job_that_is_signalled_queues_itself_and_ends_with_the_same_bits(lab, tmp_path):
    settings = [*SMALL, "run.steps=400", "run.evaluate_every=0"]
    job = submit(lab, tmp_path, *settings)
    report = lab(
        "sbatch",
        "--parsable",
        f"--dependency=afterok:{job}",
        REPO / "jobs" / "report.sbatch",
        "runs/digits",
        cwd=tmp_path,
    ).strip()
    output = tmp_path / f"digits-{job}.out"

    def said():
        return output.read_text() if output.exists() else ""

    wait_for(lambda: "lenet, " in said(), START_S, lambda: f"start of training: {said()}")
    requeued(lab, job, 1, said)
    assert "next attempt resumes" in said()
    assert state(lab, report)[0] == "PENDING"  # a requeue isn't an end
    wait_for(lambda: state(lab, job)[0] == "COMPLETED", 120, said)
    assert said().count("resuming at step") == 1 and "batch: training has finished" in said()
    whole = [*settings, "run.output=whole"]
    bash(*MAIN, "simulate", REPO / "jobs" / "digits.toml", "--nodes", 4, *whole, cwd=tmp_path)
    cut, whole = same(tmp_path, "runs/digits")
    assert cut.shape == (400, 4) and np.array_equal(cut, whole)


def test_two_ranks_a_node_queue_themselves_and_one_a_node_goes_on(lab, tmp_path):
    settings = [*SMALL, "run.steps=600", "run.evaluate_every=0"]
    job = submit(lab, tmp_path, *settings, "node.ranks_per_node=2", nodes=2)
    assert "#SBATCH --ntasks-per-node=2\n" in (tmp_path / "job.sbatch").read_text()
    output = tmp_path / f"digits-{job}.out"

    def said():
        return output.read_text() if output.exists() else ""

    for life, begun in ((1, "2 nodes, 2 slots each"), (2, "resuming at step")):
        wait_for(lambda: begun in said(), START_S, said)  # noqa: B023 - called here and now
        requeued(lab, job, life, said)
        if life == 2:
            lab("scancel", job)
    assert said().count("next attempt resumes") == 2
    at = int(re.findall(r"resumed at step (\d+)", said())[-1])
    assert 0 < at < 600
    shape = ["node.ranks_per_node=1", "node.devices=cpu:2"]
    done = lab(
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        *MAIN,
        "resume",
        "runs/digits",
        *shape,
        cwd=tmp_path,
    )
    assert "2 slots each" in done
    whole = [*settings, "node.devices=cpu:2", "run.output=whole"]
    bash(*MAIN, "simulate", REPO / "jobs" / "digits.toml", "--nodes", 2, *whole, cwd=tmp_path)
    assert np.array_equal(*same(tmp_path, "runs/digits"))


def test_the_time_limit_is_seen_coming(lab, tmp_path):
    job = submit(lab, tmp_path, *SMALL, "run.epochs=100000", time_limit="1m")
    output = tmp_path / f"digits-{job}.out"
    wait_for(lambda: state(lab, job)[1] == 1, 150, lambda: f"requeue: {state(lab, job)}")
    lab("scancel", job)
    assert "resumed at step" in output.read_text()
    assert list((tmp_path / "runs/digits/checkpoints").glob("step-*/checkpoint.h5"))


def test_a_loop_of_ones_own_queues_itself_and_ends_with_the_same_bits(lab, tmp_path):
    loops = REPO / "jobs" / "loops"

    def queued(out, *options):
        return lab(
            "sbatch",
            "--parsable",
            "--nodes=2",
            *options,
            loops / "loop.sbatch",
            loops / "classify.py",
            "--out",
            out,
            "--steps",
            1500,
            "--save-every",
            9999,
            cwd=tmp_path,
        ).strip()

    job = queued("cut")
    output = tmp_path / f"loop-{job}.out"
    wait_for(lambda: output.exists() and "files " in output.read_text(), START_S, lambda: "start")
    time.sleep(2)
    requeued(lab, job, 1, output.read_text, "USR1")
    assert "resumed at step" in output.read_text()
    wait_for(lambda: state(lab, job)[0] == "COMPLETED", 180, output.read_text)
    assert output.read_text().count("resuming at step") == 1
    whole = queued("whole")
    wait_for(lambda: state(lab, whole)[0] == "COMPLETED", 180, lambda: "end of the other")
    same(tmp_path, "cut")


def test_the_doctor_finds_two_nodes_ready(lab, tmp_path):
    words = ["srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *MAIN, "doctor"]
    said = lab(*words, cwd=tmp_path, timeout=120)  # exit code 0
    assert "2 ranks" in said and "20 steps of 2 nodes" in said and said.endswith("\nready\n"), said


@pytest.mark.parametrize("fault, before, words, code, says", staged.SHOWN)
def test_the_doctor_names_a_staged_fault(lab, tmp_path, fault, before, words, code, says):
    command = [*before(tmp_path), sys.executable, staged.FAULTS, fault, *staged.QUICK, *words]
    run = ["env", f"OTHER={tmp_path}", "srun", "-N2", "--kill-on-bad-exit=1", *command]
    done = bash(LAB, "run", *run, cwd=tmp_path, timeout=staged.LIMIT_S, check=False)
    assert (done.returncode != 0) == bool(code), done.stdout + done.stderr
    assert says.partition("{}")[0] in done.stdout, done.stdout + done.stderr


def test_a_job_that_is_cancelled_stays_so(lab, tmp_path):
    job = submit(lab, tmp_path, *SMALL, "run.epochs=100000")
    output = tmp_path / f"digits-{job}.out"
    wait_for(lambda: output.exists() and "lenet, " in output.read_text(), START_S, lambda: "start")
    lab("scancel", job)
    wait_for(lambda: state(lab, job)[0] == "CANCELLED", 60, lambda: f"end: {state(lab, job)}")
    time.sleep(3)
    assert state(lab, job) == ("CANCELLED", 0)
