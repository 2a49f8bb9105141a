"""`mpigossip plan --members`: H, files and waits of members that train through a folder."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mpigossip import cli
from mpigossip.analysis.plan.members import advise, text
from mpigossip.config import JobError
from mpigossip.training import assemble
from mpigossip.training.costs import subject
from tests.cases import naming

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
SETTINGS = ["algorithm.style=atc", "cadence.name=every", "cadence.period=50", "local.name=adamw"]


@pytest.fixture(scope="module")
def what():
    return subject(assemble.load(JOB, SETTINGS))[0]


def test_the_smallest_h_limits_reading_to_a_twentieth_of_the_time(what):
    advice = advise(what, 4, 0.005, 1e7, 400)
    assert advice.model == 3 * 4 * what.flat.size  # the model and the two moments of Adam
    read = advice.model * 4 / 1e7
    assert read / (advice.min_period * 0.005 + read) <= 0.05
    assert read / ((advice.min_period - 1) * 0.005 + read) > 0.05
    assert advice.lease_s >= 5 * advice.min_period * 0.005
    assert advice.share == pytest.approx(read / (50 * 0.005 + read))
    steps = 400 * what.steps_per_epoch(1)
    assert advice.files(50, 16) >= math.ceil(steps / 50) * (1 + 2 / 16)
    assert max(map(len, text(what, [advice]).splitlines())) <= 80


def test_more_members_than_the_folder_supports_are_rejected(what):
    with pytest.raises(JobError, match=naming("1,000 members")) as error:
        advise(what, 1000, 0.005, 1e7, 400)
    limit = int(re.findall(r"(\d+) members", str(error.value))[-1])
    assert advise(what, limit, 0.005, 1e7, 400)


def test_jobs_that_members_do_not_support_are_rejected():
    with pytest.raises(
        JobError, match=naming('algorithm.style = "awc"', 'algorithm.style = "atc"')
    ):
        advise(subject(assemble.load(JOB))[0], 4, 0.005, 1e9, 100)


def test_the_command_needs_the_rate_of_the_folder(capsys):
    command = ["plan", str(JOB), "--members", "--nodes", "2,4", "--compute", "5ms", *SETTINGS]
    assert cli.main(command) == 2 and "--bandwidth" in capsys.readouterr().err
    assert cli.main([*command, "--bandwidth", "1GB/s"]) == 0
    assert "H for 5 %" in capsys.readouterr().out


def test_kept_models_are_counted(what):
    advice = advise(what, 4, 0.005, 1e9, 400)
    kept = replace(advice, keep_every=2)
    rounds = math.ceil(advice.steps / 50)
    assert kept.files(50, 16) == advice.files(50, 16) + rounds // 2
    assert kept.disk == advice.disk + rounds // 2 * advice.model
    assert f"members.keep_every = 2 keeps up to {rounds // 2} models" in text(what, [kept])
    assert max(map(len, text(what, [kept]).splitlines())) <= 80
