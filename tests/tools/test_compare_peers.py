"""Test that all contenders of tools/bench/compare_peers.py average exactly."""

import os
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench" / "compare_peers.py"


@pytest.mark.every
@pytest.mark.skipif("MPIGOSSIP_MPIEXEC" in os.environ, reason="once is enough: gloo is the same")
def test_all_contenders_average_exactly(mpirun):
    words = [sys.executable, TOOL, "average", "--megabytes", "1", "--seconds", "0.1"]
    done = mpirun(2, list(map(str, words)), timeout=120)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("medians", 1)[1].splitlines()[2:]
    exact = [line.split()[-3] for line in table if line and "limit" not in line]
    assert len(exact) == 10 and set(exact) == {"True"}
