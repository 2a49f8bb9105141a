"""Limits and rates of methods on 16 quadratics in float64 equal the formulas."""

from itertools import islice

import numpy as np
import pytest
import torch

from mpigossip import algorithms, graphs
from mpigossip.data.problems import quadratics
from mpigossip.graphs.theory import quadratic_limit
from mpigossip.mixing import lossy_wires
from mpigossip.mixing.wire import FP32
from tests.battery import driven
from tests.cases import on_each

N = 16
LR = 0.05
PROBLEM = quadratics(N, dimension=4, condition=2.0, bend=0.2)
CENTRE, CURVATURE = map(torch.from_numpy, PROBLEM.train)


def after(count, graph, name, options, x=None, lr=LR, wire=FP32, every=0):
    """Return the models after ``count`` steps; with ``every``, also those before."""
    method = algorithms.build(name, "sgd", options, 0, graph)
    x = torch.zeros_like(CENTRE) if x is None else x.clone()

    def gradient(t):
        return CURVATURE * (x - CENTRE) if wire.exact else torch.zeros_like(x)

    seen = [x.clone() for _ in islice(driven(method, graph, x, gradient, lr, wire), count)]
    return torch.stack(seen) if every else x


@on_each("style", ["atc", "awc"])
@on_each("graph", ["ring", "exponential", "one-peer-exponential", "grid"])
def test_the_error_of_dsgd_is_that_of_the_formula(graph, style):
    made = graphs.graph(graph, N)
    limit = quadratic_limit(made, CENTRE.numpy(), CURVATURE.numpy(), LR, style)
    result = after(600, made, "dsgd", {"style": style}, torch.from_numpy(limit) + 0.1)
    assert np.abs(result.numpy() - limit).max() < 1e-6  # of 0.1, (1 − lr · 0.4)^600 is left
    assert np.abs(limit - PROBLEM.test[0]).max() > 1e-2


def test_choco_agrees_at_a_linear_rate_at_least_as_fast_as_its_theorem():
    made = graphs.graph("ring", 8)
    kept = 0.25
    width = 512
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    wire = lossy_wires.wire("top-k", 127, kept, 0)
    all_x = after(120, made, "choco", {"consensus_step": 0.3}, x, 1e-30, wire, every=1)
    square = (all_x - x.mean(0)).square().sum((1, 2)).double()
    slope = [float((square[b] / square[a]) ** (1 / (b - a))) for a, b in ((20, 60), (60, 100))]
    gap = 1 - np.sort(np.abs(np.linalg.eigvalsh(made.matrix(0))))[-2]
    theorem = 1 - gap**2 * kept / 82  # Koloskova, Stich, Jaggi, ICML 2019, theorem 2
    assert slope[0] == pytest.approx(slope[1], abs=0.02) and slope[0] < theorem
    assert square[100] < 1e-3 * square[0]
