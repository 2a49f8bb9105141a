"""Example loops: lines that differ, a kill, other numbers of ranks per node, one average."""

import os
import re
import signal
import sys

import pytest
from safetensors.torch import load_file

from mpigossip.runs.model_export import export
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from tests import launch
from tests.cases import on_each

SCRIPTS = launch.REPO / "jobs/loops"
N = 4
STEPS = 7
CHANGED = {
    "gpt.py": 6,
    "fsdp.py": 5,
    "accelerate_loop.py": 6,
    "lightning_loop.py": 6,
    "trainer.py": 6,
}
"""Largest number of lines of a script that may be marked as changed."""


@on_each(("name", "most"), CHANGED.items())
def test_a_script_changes_few_lines(name, most):
    changed = [line for line in (SCRIPTS / name).read_text().splitlines() if line.endswith("# <-")]
    assert 0 < len(changed) <= most
    assert all(re.search(r"gossip|world|^ *\)", line) for line in changed), changed


def digests(text):
    matches = dict(re.findall(r"rank (\d): loss \S+, ([0-9a-f]{64})", text))
    return [matches[str(rank)] for rank in range(N)]


@pytest.mark.every
def test_gpt_resumes_bitwise_after_a_kill(mpirun, mpistart, tmp_path):
    def run(start, out, *more):
        words = ["--out", tmp_path / out, "--save-every", 3, *more]
        return start(N, [sys.executable, SCRIPTS / "gpt.py", *words])

    whole = run(mpirun, "whole", "--steps", STEPS)
    assert whole.returncode == 0, whole.stderr
    assert len(set(digests(whole.stdout))) == N
    # as long as the warm-up lasts, the schedule doesn't depend on the number of steps
    killed = run(mpistart, "part", "--steps", 100000)
    part = tmp_path / "part"
    launch.until(lambda: len([*part.glob("3-*.pt")]) == N, 60, "a checkpoint of all ranks")
    for pid in killed.ranks():
        os.kill(pid, signal.SIGKILL)
    killed.finish()
    again = run(mpirun, "part", "--steps", STEPS, "--resume", 3)
    assert again.returncode == 0, again.stderr
    assert digests(again.stdout) == digests(whole.stdout)


@pytest.mark.every
def test_the_loop_of_a_sharded_model_resumes_with_another_number_of_ranks(mpirun, tmp_path):
    def run(n, per, steps, *more):
        words = ["--ranks-per-node", per, "--steps", steps, "--save-every", 4, *more]
        script = [sys.executable, SCRIPTS / "fsdp.py", "--out", tmp_path]
        done = mpirun(n, [*script, *words], timeout=120)
        assert done.returncode == 0, done.stderr
        wires.append(re.findall(r"(\w+) on the wire", done.stdout))
        return float(re.search(r"averaged model (\S+)", done.stdout)[1])

    wires = list[list[str]]()
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
    run(4, 2, 24, "--bf16", "--wire", "bf16")
    assert wires == [[], [], [], ["bf16"]]  # --bf16 selects the type of the arithmetic only


@pytest.mark.every
def test_a_resnet_with_ema_and_batchnorm_has_one_average_on_all_ranks(pooled):
    done = pooled(3, SCRIPTS / "resnet.py", "--steps", 12, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("averaged", "EMA averaged"):
        matches = re.findall(rf", {name} (\d\.\d{{4}})", done.stdout)
        assert len(matches) == 3 and len(set(matches)) == 1, done.stdout


RECIPES = {
    "gan": (r"points (?P<x>\S+) (?P<y>\S+)$", {"x": (2.0, 4.0), "y": (-3.0, -1.0)}),
    "sam": (r"loss (?P<loss>\S+)$", {"loss": (0.0, 0.2)}),
    "by_hand": (r"loss (?P<loss>\S+)$", {"loss": (0.0, 0.2)}),
    "unequal": (r"node 0: (?P<steps>\d+) steps$", {"steps": (20, 20)}),
    "sparse": (r"all nodes (?P<error>\S+)$", {"error": (0.0, 0.4)}),
    "ema": (r"averaged SWA (?P<error>\S+)$", {"error": (0.0, 0.02)}),
}
"""Output of each recipe: a regular expression, and the limits of its groups."""


@on_each("name", RECIPES)
def test_a_recipe_trains_on_two_ranks(name, pooled):
    done = pooled(2, SCRIPTS / "recipes" / f"{name}.py")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    pattern, limits = RECIPES[name]
    values = re.search(pattern, done.stdout, re.MULTILINE).groupdict()
    for key, (low, high) in limits.items():
        assert low <= float(values[key]) <= high, done.stdout
    if name == "unequal":  # the iterator of node 1 is longer
        assert "node 1: 20 steps" in done.stdout
    if name == "ema":
        errors = re.findall(r"node \d: .* averaged (\w+ \S+)$", done.stdout, re.MULTILINE)
        assert len(errors) == 6 and len(set(errors)) == 3


def test_every_recipe_is_tested_and_shown():
    programs = {path.stem for path in (SCRIPTS / "recipes").glob("*.py")}
    page = (launch.REPO / "tools/docs/recipes.md").read_text()
    assert programs == RECIPES.keys()
    assert programs == set(re.findall(r"literalinclude\} jobs/loops/recipes/(\w+)\.py", page))
