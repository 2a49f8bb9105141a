"""Without CuPy and MPI: simulated training with slots, 16-bit arithmetic and graphs' fallback."""

import os
import subprocess
import sys
from pathlib import Path

import mpigossip

ROOT = Path(mpigossip.__file__).parent.parent
BLOCKED = """
import sys
sys.modules["cupy"] = sys.modules["mpi4py"] = None
import torch
from mpigossip.groups import devices
from mpigossip.mixing.device import memory
from mpigossip.mixing.kernels import gpu_sum
from mpigossip.training import capture, precision
assert devices.slots_of("cpu:2") == ("cpu", "cpu")
one = torch.ones(1, 8)
assert not gpu_sum.combine([0.5, 0.5], [one, one], one)
assert memory.private(16, torch.device("cpu")).numel() == 16
try:
    memory.private(16, torch.device("cuda", 0))
except memory.MemoryRefused as error:
    assert "node.exchange" in str(error), error
from mpigossip.cli import main
code = main({command!r})
assert not {{"cupy", "mpi4py"}} & {{name for name, module in sys.modules.items() if module}}
sys.exit(code)
"""


def simulate(tmp_path, *settings):
    command = ["simulate", str(ROOT / "jobs/digits.toml"), "--nodes", "3", "run.steps=3"]
    command += [f"run.output={tmp_path}/run", *settings]
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(command=command)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_slots_and_bf16_without_cupy_and_mpi(tmp_path):
    done = simulate(tmp_path, "node.devices=cpu:2", "node.shard=false", "node.precision=bf16")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/log.h5").exists()


def test_a_gpu_that_is_not_there_is_refused_in_one_line(tmp_path):
    done = simulate(tmp_path, "node.devices=cuda:0-7")
    if "sees no GPU" in done.stderr:
        assert done.returncode == 2 and "node.devices" in done.stderr
    else:  # there are GPUs, but neither eight of them nor CuPy
        assert done.returncode in (0, 2)
