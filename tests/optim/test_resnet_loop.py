"""A ResNet with EMA and BatchNorm on skewed data: the average is as good on every rank."""

import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "jobs/loops/resnet.py"


@pytest.mark.every
def test_the_script_prints_one_average_for_all_ranks(mpirun):
    done = mpirun(3, [sys.executable, str(SCRIPT), "--steps", "12"], timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("averaged", "EMA averaged"):
        found = re.findall(rf", {name} (\d\.\d{{4}})", done.stdout)
        assert len(found) == 3 and len(set(found)) == 1, done.stdout
