"""Transient iterations of a study, and theory beside its curves."""

import math

import pytest

import mpigossip
from mpigossip.config import JobError
from mpigossip.studies.theory import meeting

pytestmark = pytest.mark.usefixtures("warm")

JOB = """
[task]
name = "quadratics"
noise = 0.5
[data]
heterogeneity = 0.5
steps = 5
[schedule]
name = "constant"
lr = 0.05
[run]
epochs = 4
"""
METHODS = {
    "parallel": "algorithm.name=parallel local.name=sgd",
    "ring": "algorithm.name=dsgd graph.name=ring",
}


def test_the_meeting_is_the_first_step_behind_which_all_is_near():
    steps = [10, 20, 30, 40]
    assert meeting(steps, [9, 3, 5, 2], [2, 2, 2, 2], 2.0) == 40
    assert meeting(steps, [4, 3, 2, 2], [2, 2, 2, 2], 2.0) == 10
    assert meeting(steps, [1, 1, 1, 5], [2, 2, 2, 2], 2.0) == math.inf
    assert meeting(steps, [1, 1, math.nan, 1], [2, 2, 2, 2], 2.0) == 40


def test_a_study_measures_transients_and_draws_rates(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    study = mpigossip.study(
        tmp_path / "job.toml", {"method": METHODS}, nodes=4, seeds=1, output=tmp_path / "runs"
    )
    (row,) = study.transient(y="local_distance_square", within=1e9)
    assert (row["method"], row["nodes"], row["transient"]) == ("ring", 4, 5)
    assert row["iid"] < row["non_iid"]
    assert study.transient(y="local_distance_square", within=1e-9)[0]["transient"] == math.inf
    figure = study.plot("gradient_square", theory=True)
    (axes,) = figure.axes
    labels = [line.get_label() for line in axes.get_lines()]
    assert sum("lower bound" in label for label in labels) == 2  # two diameters
    assert sum(line.get_linestyle() == ":" for line in axes.get_lines()) == 3  # and its legend
    with pytest.raises(JobError, match='not of "loss"'):
        study.plot("loss", theory=True)
    with pytest.raises(JobError, match='against = "nobody"'):
        study.transient("nobody")
