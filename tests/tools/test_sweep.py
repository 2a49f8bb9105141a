"""The command line of jobs/sweep.py."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[2]


def sweep(*words):
    command = [sys.executable, ROOT / "jobs/sweep.py", ROOT / "jobs/digits.toml", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_line_for_each_combination():
    made = sweep("graph.name=ring,base-2", "run.steps=2")
    assert made.stdout.splitlines() == [
        "graph.name=ring run.steps=2",
        "graph.name=base-2 run.steps=2",
    ]


def test_a_line_that_makes_no_job_is_said_first():
    for axis, fragment in (("graph.name=ring,rung", "rung"), ("graph", "section.key=value,value")):
        made = sweep(axis)
        assert made.returncode == 2 and not made.stdout and fragment in made.stderr
