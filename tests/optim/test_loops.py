"""A whole script of a user's own, killed and resumed."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "jobs/loops/gpt.py"
N, STEPS = 4, 7


def digests(text):
    found = dict(re.findall(r"rank (\d): loss \S+, ([0-9a-f]{64})", text))
    return [found[str(rank)] for rank in range(N)]


def run(start, out, *more):
    return start(N, [sys.executable, str(SCRIPT), "--out", str(out), *more])


def test_the_script_changes_six_lines_at_most():
    changed = [line for line in SCRIPT.read_text().splitlines() if line.endswith("# <-")]
    assert 0 < len(changed) <= 6
    assert all("mpigossip" in line or "world" in line for line in changed)


@pytest.mark.every
def test_gpt_goes_on_to_the_bit_after_a_kill(mpirun, mpistart, tmp_path):
    steps = ["--steps", str(STEPS), "--save-every", "3"]
    whole = run(mpirun, tmp_path / "whole", *steps)
    assert whole.returncode == 0, whole.stderr
    assert len(set(digests(whole.stdout))) == N
    # as long as the warm-up lasts, the schedule doesn't depend on the number of steps
    killed = run(mpistart, tmp_path / "part", "--steps", "100000", "--save-every", "3")
    until = time.monotonic() + 60
    while time.monotonic() < until and len(list((tmp_path / "part").glob("3-*.pt"))) < N:
        time.sleep(0.02)
    for pid in killed.ranks():
        os.kill(pid, signal.SIGKILL)
    killed.finish()
    again = run(mpirun, tmp_path / "part", *steps, "--resume", "3")
    assert again.returncode == 0, again.stderr
    assert digests(again.stdout) == digests(whole.stdout)
