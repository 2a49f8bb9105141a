"""jobs/claims/parity.py and the search of `designs.diloco_runs`: DiLoCo and searched graphs."""

import sys
from pathlib import Path

import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.mixing.base import ExchangeKind
from tests.cases import on_each

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs" / "claims"))

import designs  # noqa: E402
import parity  # noqa: E402
import parts  # noqa: E402, F401
import run_queue  # noqa: E402
import stored  # noqa: E402


def steps(name, options, count):
    """Return the models of two nodes after ``count`` steps of AdamW, averaged in each step."""
    method = algorithms.build(name, "adamw", options, 3)
    x = torch.zeros(2, 3)
    state = method.init(x)
    for t in range(count):
        now = Step(t, t, ExchangeKind.GLOBAL, 0.1)
        g = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -0.25]]) * (t + 1) + x
        out = (torch.empty(2, 3),)
        state = method.send(x, g, state, out, now)
        mixed = out[0].mean(0, keepdim=True).expand(2, 3).clone()
        state = method.receive(x, g, state, out, (mixed,), now)
    return x, state


def test_diloco_begins_with_the_model_and_adam_of_parallel():
    there, adam = steps("parallel", {}, 5)
    here, state = steps("parts:after_parallel", {"warm": 5}, 5)
    assert torch.equal(here, there) and torch.equal(state.anchor, there)
    assert all(torch.equal(a, b) for a, b in zip(state.inner, adam, strict=True))


def test_adams_state_is_dropped_where_diloco_begins():
    """The next step is then Adam's first: each element changes by the learning rate."""
    before, _ = steps("parallel", {}, 5)
    average = {"outer_lr": 1.0, "outer_beta": 0.0, "warm": 5}
    kept, dropped = (
        steps("parts:after_parallel", {**average, "drop": drop}, 6)[0] for drop in (False, True)
    )
    g = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -0.25]]) * 6 + before
    first = (before - 0.1 * g.sign()).mean(0, keepdim=True).expand(2, 3)
    torch.testing.assert_close(dropped, first)
    assert (kept - dropped).abs().max() > 1e-3


def loss_of(method, lr):
    """Return a synthetic loss, lowest at rate .006.

    DiLoCo after 10 % of the steps is 10 % above parallel SGD; if it begins later, .2 %.
    """
    loss = 2.0 + abs(lr - 0.006)
    if method == "parallel":
        return loss
    if method.startswith((designs.NO_MERGE, designs.NO_MOMENTUM, designs.ALONE)):
        return loss * 1.2
    far = "after 10 %" in method
    return loss * (1.1 if far else 1.002) + (0.001 if "0.4" in method else 0)


MODEL = "gpt of 0.07 M"


@pytest.fixture(scope="module", params=["short", "long"])
def searched(request):
    """Return all runs that the design requires, with the losses of :func:`loss_of`."""
    patch = pytest.MonkeyPatch()
    patch.setattr(designs, "SHORT", {MODEL} if request.param == "short" else set())
    request.addfinalizer(patch.undo)
    done = []
    for cell in [cell for cell in designs.diloco() if cell.labels["model"] == MODEL]:
        while missing := [
            one
            for one in run_queue.wanted_runs(cell, done)
            if run_queue.identity(one) not in {*map(run_queue.identity, done)}
        ]:
            line = missing[0]
            loss = loss_of(missing[0]["method"], missing[0]["lr"])
            figures = {"loss": loss + 1e-4 * line["seed"] * len(line["method"])}
            figures["accuracy"] = 1e-3 * len(done)
            if line["level"] == "search":
                figures["loss"] = loss
            settings = run_queue.settings(cell, line)
            done.append(line | {"figures": figures, "settings": settings})
    return done


def test_the_search_takes_the_fewest_bytes_within_one_percent(searched):
    """A start after 10 % is too early, so the result is 20 %, H = 32 and the better outer rate."""
    result = designs.search_result(MODEL, searched)
    assert result == designs.SearchResult(
        0.006, "H = 32 after 20 %, outer 0.7", 0.006, period=32, start=20
    )
    assert len(searched) <= 45 and stored.faults(searched) == []
    assert (
        designs.search_result(MODEL, [r for r in searched if "outer 0.4" not in r["method"]])
        is None
    )
    if not designs.SHORT:
        assert (
            designs.search_result(MODEL, [r for r in searched if "30 %" not in r["method"]]) is None
        )
    assert designs.vectors(32, 20, 640) == pytest.approx(0.2 + 0.8 / 32)
    seeds = [r["seed"] for r in searched if r["level"] != "search"]
    assert sorted(set(seeds)) == [1, 2, 3, 4, 5] and seeds.count(1) == 5


def test_the_controls_fail_and_the_finalist_holds(searched):
    rows = parity.diloco_verdicts(searched)
    assert [row.words for row in rows] == ["holds", *["**does not hold**"] * 3]
    page = parity.diloco_page(searched)
    assert page.count("| holds |") == 1 and page.count("| **does not hold** |") == 3
    assert [r.since for r in parity.parities(searched, MODEL)] == [1 / 32, 1 / 640, 1 / 32, 0]


def test_a_row_that_lacks_a_seed_is_not_judged(searched):
    less = [r for r in searched if (r["method"], r["seed"]) != (designs.ALONE, 5)]
    assert len(parity.diloco_verdicts(less)) == 3
    assert f"| {designs.ALONE} | 0.006 | 4 of 5 seeds |" in parity.diloco_page(less)


@on_each("better", [0.02, -0.02, 0.0])
def test_searched_graphs_are_ahead_of_what_they_beat_with_each_seed(better):
    runs = []
    (cell, *_) = designs.searched()
    for method in cell.methods:
        for level, seeds in (("search", [designs.SEARCH]), ("best", designs.SEEDS)):
            for seed in seeds:
                first = method == parity.FIRST
                noise = 0.001 * ((seed * (3 if first else 2)) % 5)
                line = {"study": "searched", "nodes": 16, "cell": cell.labels, "method": method}
                more = {"level": level, "lr": 0.1, "seed": seed}
                figures = {"accuracy": 0.5 + better * first + noise}
                runs.append({**line, **more, "figures": figures})
    words = {0.02: "holds", -0.02: "**does not hold**", 0.0: "cannot tell"}[better]
    assert [row.words for row in parity.searched_verdicts(runs)] == [words] * 4
    assert parity.searched_page(runs).count(f"| {words} |") == 4
    less = parity.searched_page([r for r in runs if r["method"] != "hypercube"])
    assert "| perceptron: hypercube |  | 0 of 5 seeds" in less
