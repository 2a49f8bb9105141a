"""Every pair of algorithm, optimizer, mixer and wire that `Gossip` takes: equal to simulations."""

import re
import sys
from pathlib import Path

import pytest

from tests.cases import every

LAB = Path(__file__).parents[2] / "tools/labs/optimizer_pairs.py"


@pytest.mark.parametrize("n", [3, every(5)])
def test_pairs_of_what_is_taken_have_the_bits_of_a_simulation(mpirun, n):
    done = mpirun(n, [sys.executable, str(LAB), "--pairs"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = {k: int(v) for k, v in re.findall(r"'([\w ]+)': (\d+)", done.stdout)}
    assert (
        counted["equal bits"] > 30
        and counted["ends"] > 5
        and set(counted)
        == {
            "equal bits",
            "ends",
        }
    )
