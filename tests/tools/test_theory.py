"""jobs/claims/theory.py: formulas against runs of the package, and its page."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mpigossip.graphs import graph
from tests.cases import on_each

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "jobs" / "claims"))

import theory  # noqa: E402

PAGE = (ROOT / "jobs" / "claims" / "THEORY.md").read_text("utf-8")


def cells(line):
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip("| \n").split(" | ")]


@on_each("data", theory.DATA)
@on_each("name", ["ring", "one-peer-exponential"])
def test_a_run_settles_where_the_formula_says(data, name):
    """The gradient noise is random, so the test averages over 256 coordinates and 400 steps."""
    made = graph(name, 8)
    lr = 0.2
    formula = theory.expected(made, data, lr)
    found = theory.measured(made, data, lr)
    assert found == pytest.approx(formula, rel=0.03 if data == "noise" else 1e-6)
    assert formula > 0 and theory.expected(made, data, lr / 2) < formula / 1.5


def test_the_mean_of_the_nodes_is_parallel_sgd():
    """On any graph, the error of the mean is caused by the gradient noise alone."""
    n = 8
    lr = 0.2
    square = 0.0
    b = theory.minima(8, "noise")
    run = theory.models(graph("ring", n), "dsgd", {}, b, lr, 1.0)
    for t, x in zip(range(460), run, strict=False):
        square += float(x.mean(0).square().mean()) * (t >= 60) / 400
    assert square == pytest.approx(theory.parallel_error(n, lr), rel=0.05)


@on_each("data", theory.DATA)
def test_minima_have_mean_0_and_mean_square_1(data):
    b = theory.minima(16, data, 3)
    assert b.mean(0).abs().max() < 1e-12
    size = torch.zeros(()) if data == "noise" else torch.ones(())
    assert (b.square().mean(0) - size).abs().max() < 1e-12


@on_each(("power", "at"), [(1.0, 0.03), (2.0, 0.03), (1.5, 0.5)])
def test_the_rate_at_which_the_excess_is_parallels_error(power, at):
    """The excess error is a power of the rate, and equals parallel SGD's error at one rate."""
    made = graph("ring", 8)

    def excess(made, data, lr):
        return theory.parallel_error(made.n, lr) * (lr / at) ** power

    assert theory.rate_of_equal_errors(excess, made, "noise", 0.1) == pytest.approx(at, rel=0.01)
    assert np.isnan(theory.rate_of_equal_errors(lambda made, data, lr: 1e-9, made, "noise", 0.1))


@pytest.mark.every
def test_the_page_has_what_the_formulas_give():
    """Compare stationary errors of methods, and T* of the smallest graphs, with the formulas."""
    lines = []
    theory.limits(lines.append)
    rows = [cells(line) for line in lines if line.startswith("| ")]
    stored = {cells(line)[0]: cells(line) for line in PAGE.splitlines() if line.startswith("| ")}
    assert len(rows) == 14
    for name, measured, formula, apart in rows:
        assert float(apart) < 1e-12
        if formula != "0":
            assert [measured, formula] == stored[name][1:3]
    for data in theory.DATA:
        table = PAGE[PAGE.index(f"| T*, {data} |") :].split("\n\n")[0].splitlines()
        for line in table[2:]:
            name, smallest = cells(line)[:2]
            made = graph(name, 8)
            by_hand = theory.rate_of_equal_errors(theory.expected, made, data, 0.1 / 8)
            words = f"{8 / by_hand**2:.3g}".replace("nan", "none")
            assert smallest.split(", ")[1] == words, (data, name)


@pytest.mark.every
def test_gossip_with_differences_agrees_at_the_rate_of_the_page():
    """Each measured factor of CHOCO is below the bound of its theorem."""
    lines = []
    theory.choco(lines.append)
    rows = [line for line in lines if "% kept" in line]
    assert len(rows) == 4 and all(float(cells(r)[1]) < float(cells(r)[2]) for r in rows)
    pages = {cells(line)[0]: cells(line) for line in PAGE.splitlines() if "% kept" in line}
    for row in map(cells, rows):
        assert float(row[1]) == pytest.approx(float(pages[row[0]][1]), abs=1e-3)
        assert row[2] == pages[row[0]][2]
