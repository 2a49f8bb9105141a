"""`mpigossip plan --members`: H, files and waits of members that train through a folder."""

import math
from pathlib import Path

import pytest

from mpigossip import cli
from mpigossip.analysis.plan.members import advise, text
from mpigossip.config import JobError
from mpigossip.training import assemble
from mpigossip.training.costs import subject

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
OWN = ["algorithm.style=atc", "cadence.name=every", "cadence.period=50", "local.name=adamw"]


@pytest.fixture(scope="module")
def what():
    return subject(assemble.load(JOB, OWN))[0]


def test_h_keeps_reading_under_a_twentieth_and_no_smaller_one_does(what):
    found = advise(what, 4, 0.005, 1e7, 400)
    assert found.model == 3 * 4 * what.flat.size  # model, and two moments of Adam
    read = found.model * 4 / 1e7
    assert read / (found.least * 0.005 + read) <= 0.05
    assert read / ((found.least - 1) * 0.005 + read) > 0.05
    assert found.lease_s >= 5 * found.least * 0.005
    assert found.share == pytest.approx(read / (50 * 0.005 + read))
    steps = 400 * what.steps_per_epoch(1)
    assert found.files(50, 16) >= math.ceil(steps / 50) * (1 + 2 / 16)
    assert max(map(len, text(what, [found]).splitlines())) <= 80


def test_more_members_than_the_folder_carries_are_rejected(what):
    with pytest.raises(JobError, match=r"take at most (\d+) members") as told:
        advise(what, 1000, 0.005, 1e7, 400)
    most = int(str(told.value).split("at most ")[1].split()[0])
    assert advise(what, most, 0.005, 1e7, 400)


def test_jobs_that_members_do_not_take_are_rejected():
    with pytest.raises(JobError, match="members need"):
        advise(subject(assemble.load(JOB))[0], 4, 0.005, 1e9, 100)


def test_the_command_needs_the_rate_of_the_folder(capsys):
    command = ["plan", str(JOB), "--members", "--nodes", "2,4", "--compute", "5ms", *OWN]
    assert cli.main(command) == 2 and "--bandwidth" in capsys.readouterr().err
    assert cli.main([*command, "--bandwidth", "1GB/s"]) == 0
    assert "H for 5 %" in capsys.readouterr().out
