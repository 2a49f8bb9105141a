"""Transient iterations of a study, and theory in its plots."""

import math

import pytest

import mpigossip
from mpigossip.config import JobError
from mpigossip.studies.theory import meeting
from tests.cases import naming

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


def test_the_meeting_is_the_first_step_from_which_the_curve_stays_near():
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
    assert (
        sum(line.get_linestyle() == ":" for line in axes.get_lines()) == 3
    )  # and one for the legend
    with pytest.raises(JobError, match=naming('y = "loss"')):
        study.plot("loss", theory=True)
    with pytest.raises(JobError, match=naming('against = "other"')):
        study.transient("other")


def test_each_problem_has_its_own_lower_bound_with_a_label(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    grid = {"task.noise": [0.01, 1.0], "graph.name": ["ring", "complete"]}
    study = mpigossip.study(
        tmp_path / "job.toml",
        grid,
        nodes=4,
        seeds=1,
        settings=["algorithm.name=dsgd"],
        output=tmp_path / "runs",
    )
    (axes,) = study.plot("gradient_square", theory=True).axes
    floors = {
        line.get_label(): line.get_ydata()
        for line in axes.get_lines()
        if "lower bound" in line.get_label()
    }
    assert list(floors) == [
        f"lower bound, diameter {diameter}, noise {noise}"
        for diameter in (1, 2)
        for noise in (0.01, 1)
    ]
    # noise and diameter increase the bound at each step
    last = [floor[-1] for floor in floors.values()]
    assert last[0] < last[1] and last[2] < last[3] and last[0] < last[2]


def test_rates_are_not_drawn_for_nodes_with_weights(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    study = mpigossip.study(
        tmp_path / "job.toml",
        {"algorithm.node_weights": ["equal", [1, 2, 3]]},
        nodes=3,
        seeds=1,
        settings=["algorithm.name=dsgd", "graph.name=ring"],
        output=tmp_path / "runs",
    )
    with pytest.raises(JobError, match=naming("algorithm.node_weights", "equal")):
        study.plot("gradient_square", theory=True)
    assert study.plot("gradient_square").axes
