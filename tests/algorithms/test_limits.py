"""Limits and rates by formula, beside the methods on 16 quadratics in float64."""

import numpy as np
import pytest
import torch

from mpigossip import algorithms, graphs
from mpigossip.algorithms import Step
from mpigossip.data.problems import quadratics
from mpigossip.graphs.theory import quadratic_limit
from mpigossip.mixing import compressors
from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.simulated import Simulated
from tests.cases import on_each

N, LR = 16, 0.05
PROBLEM = quadratics(N, dimension=4, condition=2.0, bend=0.2)
CENTRE, CURVATURE = map(torch.from_numpy, PROBLEM.train)


def after(steps, graph, name, options, x=None, lr=LR, wire=None, every=0):
    """The models after so many steps; with ``every``, all of them."""
    method = algorithms.build(name, "sgd", options, 0, graph)
    given = {"dtype": torch.float64} if wire is None else {"wire": wire}
    x = torch.zeros_like(CENTRE) if x is None else x.clone()
    layout = Layout((x.shape[1],), method.vectors, method.scalars, **given)
    mixer, state, seen = Simulated(graph, layout), method.init(x), []
    for t in range(steps):
        step = Step(t, t, Kind.GOSSIP, lr)
        out = mixer.outbox(t)[0]
        g = CURVATURE * (x - CENTRE) if wire is None else torch.zeros_like(x)
        if method.ahead:
            state = method.send(x, None, state, out, step._replace(lr=None))
        else:
            state = method.send(x, g, state, out, step)
        mixer.start(Kind.GOSSIP, t)
        sent, mixed = mixer.finish()
        state = method.receive(x, g, state, sent[0], mixed[0], step)
        seen.append(x.clone())
    return torch.stack(seen) if every else x


@on_each("style", ["atc", "awc"])
@on_each("graph", ["ring", "exponential", "one-peer-exponential", "grid"])
def test_dsgd_is_off_by_what_the_formula_says(graph, style):
    made = graphs.graph(graph, N)
    limit = quadratic_limit(made, CENTRE.numpy(), CURVATURE.numpy(), LR, style)
    found = after(600, made, "dsgd", {"style": style}, torch.from_numpy(limit) + 0.1)
    assert np.abs(found.numpy() - limit).max() < 1e-6  # of 0.1, (1 − lr · 0.4)^600 is left
    assert np.abs(limit - PROBLEM.test[0]).max() > 1e-2


def test_choco_agrees_at_a_linear_rate_at_least_as_fast_as_its_theorem():
    made, kept, width = graphs.graph("ring", 8), 0.25, 512
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    wire = compressors.wire("top-k", 127, kept, 0)
    all_x = after(120, made, "choco", {"consensus_step": 0.3}, x, 1e-30, wire, every=1)
    apart = (all_x - x.mean(0)).square().sum((1, 2)).double()
    slope = [float((apart[b] / apart[a]) ** (1 / (b - a))) for a, b in ((20, 60), (60, 100))]
    gap = 1 - np.sort(np.abs(np.linalg.eigvalsh(made.matrix(0))))[-2]
    theorem = 1 - gap**2 * kept / 82  # Koloskova, Stich, Jaggi, ICML 2019, theorem 2
    assert slope[0] == pytest.approx(slope[1], abs=0.02) and slope[0] < theorem
    assert apart[100] < 1e-3 * apart[0]
