"""The loops in jobs/loops/ of Accelerate, Lightning and the Trainer: trained, stopped, resumed."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

LOOPS = Path(__file__).parents[2] / "jobs/loops"
# For each loop, the packages that it imports, and its options for a short run on the CPU.
FRAMEWORKS = {
    "accelerate_loop.py": (
        ("accelerate",),
        ["--cpu", "--steps", "12", "--save-every", "6"],
    ),
    "lightning_loop.py": (
        ("lightning",),
        ["--device", "cpu", "--passes", "2"],
    ),
    "trainer.py": (
        ("transformers", "accelerate"),
        ["--cpu", "--steps", "12", "--save-every", "5"],
    ),
}
# Variables that a batch script often exports, or that Slurm sets in the environment of a rank. With
# MASTER_ADDR, Accelerate would join all ranks of the launcher without a message; Lightning rejects
# SLURM_NTASKS.
MISLEADING = {"MASTER_ADDR": "127.0.0.1", "SLURM_NTASKS": "3", "SLURM_JOB_NAME": "train"}


def need(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'mpigossip[frameworks]'")


def run(mpirun, name, n, out, *more, code=0):
    """Run a loop on ``n`` ranks; return its output, and the loss and digest of each rank."""
    needed, options = FRAMEWORKS[name]
    need(*needed)
    command = [sys.executable, str(LOOPS / name), "--out", str(out), *options, *more]
    done = mpirun(n, command, timeout=120, env=MISLEADING)
    assert done.returncode == code, done.stderr
    return done.stdout, {
        int(rank): (loss, digest)
        for rank, loss, digest in re.findall(r"rank (\d): loss (\S+), ([0-9a-f]{64})", done.stdout)
    }


@pytest.mark.every
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_loop_trains_stops_and_resumes_bitwise(mpirun, tmp_path, name):
    n = 3  # on two ranks, each round of the graph would compute the exact average
    _, whole = run(mpirun, name, n, tmp_path / "whole")
    losses, models = zip(*whole.values(), strict=True)
    assert sorted(whole) == list(range(n))
    assert len(set(losses)) == n  # each rank trains on different data
    assert len(set(models)) == n
    parts = tmp_path / "parts"
    (parts / "run").mkdir(parents=True)
    (parts / "run/STOP").touch()
    message, stopped = run(mpirun, name, n, parts, code=75)
    at = re.search(r"resumed at step (\d+)", message)
    assert at and not stopped, message
    # The loop for Lightning counts passes over the data, the others count steps.
    resumed = "1" if name == "lightning_loop.py" else at[1]
    again_told, again = run(mpirun, name, n, parts, "--resume", resumed)
    assert f"resuming at step {at[1]}" in again_told
    assert [again[rank][1] for rank in range(n)] == [whole[rank][1] for rank in range(n)]


@pytest.mark.every
def test_steps_closures_scalers_and_clipping_are_those_of_torch_alone(mpirun):
    need("accelerate", "lightning")
    done = mpirun(2, [sys.executable, str(Path(__file__).with_name("in_frameworks.py"))])
    assert done.returncode == 0, done.stderr
    # two ranks may stand in one line: the launcher forwards what it reads
    matches = re.findall(r"rank (\d): (.*?): (True|False)", done.stdout)
    assert [line for line in matches if line[2] == "False"] == []
    assert len(matches) == 2 * 11
