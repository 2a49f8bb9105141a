"""Outer steps against their formulas in numpy, on quadratics that differ between nodes."""

import copy

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.cluster.ranks import SingleProcess
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated
from tests.cases import on_each

STEPS = 40
PERIOD = 4
LR = 0.1
WIDTH = 16
pytestmark = pytest.mark.usefixtures("one_thread")


class Quadratics:
    """Functions f_i(x) = Σ_k a_ik (x_k − b_ik)²/2 of n nodes, which start at the same x."""

    def __init__(self, n):
        rng = np.random.default_rng([7, n])
        self.a = rng.uniform(0.2, 2, (n, WIDTH))
        self.b = rng.standard_normal((n, WIDTH))
        self.x = np.repeat(rng.standard_normal((1, WIDTH)), n, 0)

    def descend(self, x):
        """Return x after a period of steps of gradient descent."""
        for _ in range(PERIOD):
            x = x - LR * self.a * (x - self.b)
        return x


def trained(n, **options):
    """Return the float64 models of n nodes after 40 steps of ``diloco`` with SGD inside."""
    problem = Quadratics(n)
    method = algorithms.build("diloco", "sgd", options, 0, graph("complete", n))
    x, a, b = (torch.from_numpy(array) for array in (problem.x, problem.a, problem.b))
    mixer = Simulated(graph("complete", n), MessageLayout((WIDTH,), 1, 0, dtype=x.dtype))
    state = method.init(x)
    exchanges = 0
    for t in range(STEPS):
        g = a * (x - b)
        if (t + 1) % PERIOD:
            state = method.local_update(x, g, state, Step(t, 0, ExchangeKind.LOCAL, LR))
            continue
        now = Step(t, 0, ExchangeKind.GLOBAL, LR)
        (out,) = mixer.outbox(exchanges)
        state = method.send(x, g, state, out, now)
        mixer.start(ExchangeKind.GLOBAL, exchanges)
        (sent,), (mixed,) = mixer.finish()
        state = method.receive(x, g, state, sent, mixed, now)
        exchanges += 1
    return x.numpy()


def error(ours, theirs):
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@on_each("n", [1, 2, 3, 5, 8])
def test_diloco_is_its_formula_and_with_one_node_snoo(n):
    """SNOO: s = w − w̃_K; b ← μ b + s; w ← w − η (μ b + s), where w̃_K is w after K local steps."""
    problem = Quadratics(n)
    w = problem.x[:1]
    b = np.zeros_like(w)
    for _ in range(STEPS // PERIOD):
        s = w - problem.descend(np.repeat(w, n, 0)).mean(0, keepdims=True)
        b = 0.9 * b + s
        w = w - 0.7 * (0.9 * b + s)
    assert error(trained(n), np.repeat(w, n, 0)) < 1e-12


def backward(model, optimizer, node, t):
    """Compute the gradients of step t on the data of a node."""
    rng = np.random.default_rng([t, node])
    inputs = torch.from_numpy(rng.standard_normal((8, 3), np.float32))
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :2]).square().mean().backward()


def loop(world, steps, saved=None, **options):
    """Return model and optimizer after the steps of a loop of ``diloco`` with AdamW inside."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    gossip = mpigossip.Gossip(world, model, inner, "diloco", period=PERIOD, **options)
    if saved is not None:
        gossip.load_state_dict(saved)
    for t in steps:
        backward(model, gossip, world.rank, t)
        gossip.step()
    return model, gossip


def values(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def reference(n, steps, make_outer):
    """Return the model of the same loop of n nodes, written with two torch optimizers."""
    torch.manual_seed(0)
    outer = torch.nn.Linear(3, 2)
    models = [copy.deepcopy(outer) for _ in range(n)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    optimizer = make_outer(outer.parameters())
    for t in range(steps):
        for node, (model, local) in enumerate(zip(models, inner, strict=True)):
            backward(model, local, node, t)
            local.step()
        if (t + 1) % PERIOD:
            continue
        with torch.no_grad():
            for p, *copies in zip(
                outer.parameters(), *(m.parameters() for m in models), strict=True
            ):
                p.grad = p - torch.stack(copies).mean(0)
            optimizer.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
    return values(models[0])


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def test_a_loop_of_one_rank_is_snoo_and_resumes_within_a_period():
    with SingleProcess() as world:
        whole, _ = loop(world, range(14))
        _, gossip = loop(world, range(6))
        again, _ = loop(world, range(6, 14), copy.deepcopy(gossip.state_dict()))
    assert torch.equal(values(again), values(whole))
    assert torch.allclose(values(whole), reference(1, 14, nesterov), atol=1e-6)
