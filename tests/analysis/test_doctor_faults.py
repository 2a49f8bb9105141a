"""Faults under `mpirun -n 2`: the doctor reports each within its time limit."""

import os
import sys
from pathlib import Path

import pytest

from tests.cases import every

FAULTS = Path(__file__).with_name("faults.py")
QUICK = ["--devices", "cpu:1", "--workers", "0", "--megabytes", "1", "--sizes", "1MB"]
LIMIT_S = 120
"""Seconds that the doctor may take, twice its default time limit of a test."""
OTHER_TORCH = """
if [ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ]; then export PYTHONPATH="$OTHER:$PYTHONPATH"; fi
exec "$@"
"""


def other_torch(folder):
    """Put another version of torch into a folder that precedes all others."""
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
    every("stop", alone, ["--timeout", "10"], 1, "the test of put took longer than 10 s"),
]
"""Faults that depend on the launcher; tests/tools runs them on a virtual Slurm, too."""
MORE = [
    every("early", alone, ["--timeout", "10"], 1, "wrong: ranks: "),
    every("folder", alone, ["--timeout", "10"], 1, "wrong: host: a driver hangs"),
    every("killed", alone, [], 1, "ok     routes "),
]


@pytest.mark.parametrize("fault, before, words, code, says", SHOWN + MORE)
def test_a_fault_is_reported_in_time(mpirun, tmp_path, fault, before, words, code, says):
    if before is one_core and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    command = [*before(tmp_path), sys.executable, str(FAULTS), fault, *QUICK, *words]
    warm = fault not in ("stop", "early")  # the launcher must be able to end the stopped process
    env = {"OTHER": str(tmp_path)}
    done = mpirun(2, command, timeout=LIMIT_S, cwd=tmp_path, env=env, warm=warm)
    assert (done.returncode != 0) == bool(code), done.stdout + done.stderr
    host = done.stdout.partition("rank on 1 host: ")[2].partition(" x")[0] or os.uname().nodename
    assert says.format(host) in done.stdout, done.stdout + done.stderr
    if fault != "killed":  # then only the findings before are printed
        # MPICH's launcher may append exit codes of ranks to standard output
        assert ("\nnot ready\n" if code else "\nready\n") in done.stdout
