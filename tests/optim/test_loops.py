"""Whole scripts of a user's own: equal to models mixed by the matrix, and killed and resumed."""

import hashlib
import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from mpigossip.graphs import graph
from mpigossip.mixing.combine import combine

SCRIPT = Path(__file__).parents[2] / "jobs/loops/gpt.py"
N, STEPS = 4, 7


def script():
    spec = importlib.util.spec_from_file_location("gpt_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_gpt_is_models_mixed_by_the_matrix_and_goes_on_after_a_kill(mpirun, mpistart, tmp_path):
    steps = ["--steps", str(STEPS), "--save-every", "3"]
    whole = run(mpirun, tmp_path / "whole", *steps)
    assert whole.returncode == 0, whole.stderr
    assert digests(whole.stdout) == mixed_here()

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


pytestmark = pytest.mark.usefixtures("one_thread")


def mixed_here():
    """The same script without Gossip, four times in one process, mixed by the graph's weights."""
    gpt = script()
    data = torch.tensor(list(SCRIPT.read_bytes()))
    models, draws = [], [torch.Generator().manual_seed(1337 + rank) for rank in range(N)]
    for _ in range(N):
        torch.manual_seed(1337)
        models.append(gpt.GPT())
    optimizers = [gpt.configure(model) for model in models]
    weights = graph("one-peer-exponential", N)
    for step in range(STEPS):
        for model, optimizer, draw in zip(models, optimizers, draws, strict=True):
            gpt.train_step(model, optimizer, data, draw, gpt.get_lr(step, STEPS))
        mix(models, weights, step)
    return [
        hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        ).hexdigest()
        for model in models
    ]


@torch.no_grad()
def mix(models, weights, t):
    """Each parameter by row i of W(t), own term first, then the in-neighbours in their order."""
    matrix = weights.matrix(t)
    for together in zip(*(model.parameters() for model in models), strict=True):
        rows = [p.reshape(1, -1).clone() for p in together]
        for i, p in enumerate(together):
            order = [i, *map(int, weights.neighbours(t, i)[0])]
            mixed = combine(
                [matrix[i, j] for j in order], [rows[j] for j in order], rows[i].clone()
            )
            p.copy_(mixed.view(p.shape))
