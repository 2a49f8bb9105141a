"""Staged faults under `mpirun -n 2`: the doctor names each in time, with its exit code."""

import os
import sys
from pathlib import Path

import pytest

from tests.cases import every

FAULTS = Path(__file__).with_name("faults.py")
QUICK = ["--devices", "cpu:1", "--workers", "0", "--megabytes", "1", "--sizes", "1MB"]
LIMIT_S = 120
"""Seconds that the doctor may take, its default limit of a test being half of that."""
OTHER_TORCH = """
if [ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ]; then export PYTHONPATH="$OTHER:$PYTHONPATH"; fi
exec "$@"
"""


def other_torch(folder):
    """A folder before all others in which torch has another version."""
    (folder / "torch-9.9.dist-info").mkdir()
    (folder / "torch-9.9.dist-info/METADATA").write_text("Name: torch\nVersion: 9.9\n")
    return ["sh", "-c", OTHER_TORCH, "sh"]


def one_core(folder):
    return ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def alone(folder):
    return []


SHOWN = [
    ("window", alone, [], 1, "wrong: put: rank 0 on {} and 1 more: MPI_ERR_WIN"),
    every("link", alone, [], 0, "x slower than the median link"),
    every("none", alone, ["--folder", "/proc"], 1, "wrong: disk: "),
    every("none", one_core, ["--devices", "cpu:8"], 1, "wrong: cores: the launcher pins"),
    every("none", other_torch, [], 1, "wrong: alike: ranks 0 and 1 have different versions"),
    every("stop", alone, ["--timeout", "10"], 1, "no end of the test of put within 10 s"),
]
"""What a launcher changes: on the nodes of the virtual Slurm, too (tests/tools)."""
MORE = [
    every("early", alone, ["--timeout", "10"], 1, "wrong: ranks: "),
    every("folder", alone, ["--timeout", "10"], 1, "wrong: host: a driver hangs"),
    every("killed", alone, [], 1, "ok     routes "),
]


@pytest.mark.parametrize("fault, before, words, code, says", SHOWN + MORE)
def test_a_staged_fault_is_named_in_time(mpirun, tmp_path, fault, before, words, code, says):
    if before is one_core and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    command = [*before(tmp_path), sys.executable, str(FAULTS), fault, *QUICK, *words]
    warm = fault not in ("stop", "early")  # the launcher has to end the process that stopped
    env = {"OTHER": str(tmp_path)}
    done = mpirun(2, command, timeout=LIMIT_S, cwd=tmp_path, env=env, warm=warm)
    assert (done.returncode != 0) == bool(code), done.stdout + done.stderr
    here = done.stdout.partition("rank on 1 host: ")[2].partition(" x")[0] or os.uname().nodename
    assert says.format(here) in done.stdout, done.stdout + done.stderr
    if fault != "killed":  # that leaves what was found before
        # MPICH's launcher may add to standard output how ranks have ended
        assert ("\nnot ready\n" if code else "\nready\n") in done.stdout
