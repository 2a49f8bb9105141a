"""jobs/claims/gap.py and its designs: runs at equal rates, remedies, and the rule of thumb."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind
from tests.cases import on_each

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs" / "claims"))

import designs  # noqa: E402
import gap  # noqa: E402
import parts  # noqa: E402, F401
import run_queue  # noqa: E402
import stored  # noqa: E402


def fake(line, count):
    """Return a run with synthetic metrics; the best rate is .025 for parallel, otherwise .05."""
    method = line["method"]
    lr = line["lr"]
    best = 0.025 if method.startswith("parallel") else 0.05
    accuracy = 0.5 - 0.01 * abs(np.log2(lr / best))
    accuracy += {"EMA": 0.02, "exact every 16": 0.01, "no exchange": -0.1}.get(method, 0.0)
    if line["level"] != "search":
        accuracy += 0.002 * (line["seed"] + 7 * len(method) % 5)
    return {
        "accuracy": accuracy + 1e-7 * count,
        "loss": 1.0 + 1e-4 * count,
        "distance": 0.2 * lr,
        "bytes_sent": 100.0 + len(method),
    }


@pytest.fixture(scope="module")
def done():
    """Return all runs of the perceptron with 16 nodes and batches of 16 samples."""
    runs = []
    for cell in designs.gap():
        if (cell.nodes, cell.labels["model"], cell.labels["batch"]) != (16, "perceptron", "16"):
            continue
        known = {*map(run_queue.identity, runs)}
        while missing := [
            one for one in run_queue.wanted_runs(cell, runs) if run_queue.identity(one) not in known
        ]:
            line = missing[0] | {"settings": run_queue.settings(cell, missing[0])}
            runs.append(line | {"figures": fake(line, len(runs)), "digest": str(len(runs))})
            known.update(map(run_queue.identity, runs))
    return runs


def test_no_run_of_equal_rates_or_remedies_is_another_cells(done):
    """A run that has the settings of another one would count twice."""
    settings = [tuple(sorted(run["settings"])) for run in done]
    assert len(set(settings)) == len(settings) and stored.faults(done) == []
    at = {(r["method"], r["lr"]) for r in done if r["cell"].get("of") == designs.EQUAL}
    assert at == {
        ("parallel", 0.05),
        ("one-peer", 0.025),
        ("parallel", 0.0125),
        ("one-peer", 0.0125),
    }


def test_rows_at_equal_rates_are_those_at_which_both_ran(done):
    rows = {one.lr: one for one in gap.equals(done)}
    assert {*rows} == {(0.05, 0.05), (0.025, 0.025), (0.0125, 0.0125)}
    assert np.mean(rows[0.025, 0.025].values) == pytest.approx(1.0, abs=0.01)
    less = [r for r in done if (r["method"], r["lr"], r["seed"]) != ("one-peer", 0.025, 3)]
    assert {one.lr for one in gap.equals(less)} == {(0.05, 0.05), (0.0125, 0.0125)}


def test_a_remedy_holds_and_no_exchange_does_not(done):
    rows = gap.remedies(done)
    assert len(rows) == 14 and {x.where for x in rows} == {"own best rate", "parallel's rate"}
    assert {x.lr for x in rows if x.where == "parallel's rate"} == {0.025}
    words = {
        (x.method, x.where): v.words for x, v in zip(rows, gap.remedy_verdicts(rows), strict=True)
    }
    for where in ("own best rate", "parallel's rate"):
        assert words["EMA", where] == "holds"
        assert words["no exchange", where] == "**does not hold**"
    assert next(x for x in rows if x.method == "parallel, EMA").base == "parallel"
    assert gap.remedy_page(done).count("| holds |") >= 4
    less = [r for r in done if (r["method"], r["seed"]) != ("EMA", 2)]
    assert len(gap.remedies(less)) == 12


def row(distance, *values):
    return gap.Gap(f"at {distance}", (0.1, 0.1), (50.0, 50.0), list(values), [distance / 100])


@on_each(
    ("slope", "more", "words"),
    [
        (0.5, [], "below a distance of 0.60 %"),
        (0.0, [], "includes 0 or less"),
        (-0.5, [], "includes 0 or less"),
        (0.5, [row(0.1, 0.9, 0.91, 0.92, 0.9, 0.9)], "against it: at 0.1"),
    ],
)
def test_the_rule_of_thumb_can_fail(slope, more, words):
    rows = [
        row(d, *(slope * d + 0.01 * s * (-1) ** k for s in (-2, -1, 0, 1, 2)))
        for k, d in enumerate((0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5))
    ]
    assert words in gap.rule([*rows, *more])
    assert "too few" in gap.rule(rows[:5])


def test_the_static_graph_is_before_the_one_peer_rounds():
    made = graph("parts:static_first", 8, period=12, first=5)
    for t, name in ((4, "exponential"), (5, "one-peer-exponential"), (11, "one-peer-exponential")):
        np.testing.assert_array_equal(made.matrix(t), graph(name, 8).matrix(t))


@on_each("name", ["dmsgd", "parallel"])
def test_the_last_model_is_the_average_over_time(name):
    """Only the last model is the average over time; all others are the models of the method."""
    runs = []
    for method in (name, f"parts:ema_{name}"):
        options = {} if method == name else {"decay": 0.75, "total": 4}
        made = algorithms.build(method, "momentum" if name == "parallel" else None, options, 3)
        x = torch.zeros(2, 3)
        models = []
        state = made.init(x)
        for t in range(4):
            now = Step(t, t, ExchangeKind.GLOBAL, 0.1)
            out = [torch.empty(2, 3) for _ in range(made.vectors)]
            state = made.send(x, torch.full((2, 3), t + 1.0), state, out, now)
            state = made.receive(x, torch.full((2, 3), t + 1.0), state, out, out, now)
            models.append(x.clone())
        runs.append(models)
    own, ended = runs
    mean = torch.zeros(2, 3)
    for x in own:
        mean = 0.75 * mean + 0.25 * x
    assert all(torch.equal(a, b) for a, b in zip(own[:3], ended[:3], strict=True))
    torch.testing.assert_close(ended[3], mean)
    assert not torch.equal(ended[3], own[3])
