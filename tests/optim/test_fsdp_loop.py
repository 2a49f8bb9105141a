"""The loop of a model cut inside nodes: trains, goes on with other ranks per node, exports."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mpigossip.runs.model_export import export
from mpigossip.store import checkpoint
from mpigossip.store.log import read

SCRIPT = Path(__file__).parents[2] / "jobs/loops/fsdp.py"


@pytest.mark.every
def test_the_loop_trains_and_goes_on_with_another_number_of_ranks(mpirun, tmp_path):
    def run(n, per, steps, *more):
        words = ["--ranks-per-node", str(per), "--steps", str(steps), "--save-every", "4"]
        done = mpirun(n, [sys.executable, SCRIPT, "--out", tmp_path, *words, *more], timeout=120)
        assert done.returncode == 0, done.stderr
        return float(re.search(r"averaged model (\S+)", done.stdout)[1])

    first = run(4, 2, 8)
    assert checkpoint.latest(tmp_path).name == "step-00000008"
    assert run(6, 3, 16) < first < 6.0  # ln 256 = 5.5 and the head's first scores
    losses = read(tmp_path / "log.h5").steps["loss"]
    assert losses.shape == (16, 2)
    assert losses[-1].max() < losses[0].min()
    export(checkpoint.latest(tmp_path), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["tokens.weight"].shape == (256, 64)
    run(4, 2, 20, "--bf16")


def test_few_lines_decentralize_it():
    changed = [line for line in SCRIPT.read_text().splitlines() if line.endswith("# <-")]
    assert 0 < len(changed) <= 5
