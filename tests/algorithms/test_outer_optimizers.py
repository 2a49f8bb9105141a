"""Outer steps against their formulas in numpy, on quadratics that differ between nodes."""

import contextlib
import copy
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.algorithms.outer_optimizers import OuterOptimizer, setting_of
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated
from mpigossip.runs import start_and_resume
from mpigossip.training import assemble
from tests.battery import Driver, on_ranks
from tests.cases import naming, on_each, with_world
from tests.jobs import train

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


OUTER = {"name": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True}
"""DiLoCo's outer step as an optimizer of torch."""


@on_each("n", [1, 2, 3, 5, 8])
def test_outer_adamw_is_its_formula(n):
    problem = Quadratics(n)
    w = problem.x[:1]
    m, v = np.zeros_like(w), np.zeros_like(w)
    for k in range(1, STEPS // PERIOD + 1):
        d = w - problem.descend(np.repeat(w, n, 0)).mean(0, keepdims=True)
        w = w * (1 - 0.3 * 0.02)
        m = 0.9 * m + 0.1 * d
        v = 0.95 * v + 0.05 * d * d
        w = w - 0.3 * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.95**k)) + 1e-8)
    outer = {"name": "AdamW", "lr": 0.3, "betas": [0.9, 0.95], "weight_decay": 0.02}
    assert error(trained(n, outer=outer), np.repeat(w, n, 0)) < 1e-12


def test_outer_sgd_is_the_built_in_outer_step():
    assert error(trained(3, outer=OUTER), trained(3)) < 1e-12


OUTERS = (
    'SGD",lr=0.7',
    'SGD",lr=0.5,momentum=0.9,dampening=0.0,weight_decay=0.01',
    'Adam",lr=0.1,amsgrad=true',
    'NAdam",lr=0.1',
    'RAdam",lr=0.1',
    'Adamax",lr=0.1',
    'Adagrad",lr=0.1,initial_accumulator_value=0.1',
    'Adadelta"',
    'RMSprop",lr=0.01,momentum=0.5,centered=true',
    'Rprop"',
    'ASGD"',
)
FORMS = ("period=2", "period=4 cadence.fragments=2", "period=4 cadence.fragments=2 cadence.delay=1")
SETTINGS = [
    f'algorithm.name=diloco cadence.{form} algorithm.outer={{name="{outer}}}'
    for outer in ('SGD",lr=0.7,momentum=0.9,nesterov=true', 'Adam",lr=0.1')
    for form in FORMS
]


@on_each("outer", OUTERS)
def test_a_step_of_each_optimizer_is_torchs(outer):
    """This also holds if its state is converted to arrays after each step, and restored."""
    name, _, options = outer.partition('"')
    setting = {"name": name} | tomllib.loads(f"a = {{{options[1:]}}}")["a"]
    ours = OuterOptimizer(setting)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    state = ours.init(x)
    p = x.clone()
    optimizer = getattr(torch.optim, name)([p], **{k: v for k, v in setting.items() if k != "name"})
    for t in range(6):
        p.grad = torch.sin(p + t)
        ours.step(x, torch.sin(x + t), state)
        optimizer.step()
        assert torch.equal(x, p), t


@on_each(
    ("setting", "message"),
    [
        ({"name": "Muon", "lr": 0.1}, ('"Muon"', "shards")),
        ({"name": "Adafactor"}, ('"Adafactor"', "shards")),
        ({"name": "LBFGS"}, ('"LBFGS"', "'closure'")),
        (
            {"name": "SGD", "lr": 0.1, "momentum": 0.9, "dampening": 0.5},
            ("dampening", '"step"'),
        ),
        ({"name": "Sgd"}, ('"Sgd"', "torch.optim")),
        ({"lr": 0.1}, ("algorithm.outer = {'lr': 0.1}", '"name"')),
        ({"name": "SGD", "rate": 0.1}, ("TypeError", "'rate'")),
    ],
)
def test_optimizers_that_do_not_fit_are_rejected(setting, message):
    with pytest.raises(JobError, match=naming(message)):
        OuterOptimizer(setting)


@with_world
def all_settings(world):
    return [driver.whole().numpy() for driver in on_ranks(SETTINGS, world, "put", 10)]


def test_ranks_have_the_bits_of_the_simulator(ranks):
    for settings, *result in zip(SETTINGS, *ranks(3)(all_settings), strict=True):
        expected = Driver(settings, 3, noise=0.1).run(10).whole().numpy()
        assert (np.concatenate(result) == expected).all(), settings


@with_world
def looped(world):
    """Return the models of a loop with an outer optimizer, whole and resumed within a period."""
    parameters = torch.nn.Linear(3, 2)
    whole, _ = loop(world, range(14), outer=partial(torch.optim.Adam, lr=0.1))
    _, gossip = loop(world, range(6), outer={"name": "Adam", "lr": 0.1})
    saved = copy.deepcopy(gossip.state_dict())
    again, _ = loop(world, range(6, 14), saved, outer={"name": "Adam", "lr": 0.1})
    results = [values(whole), values(again)]
    with contextlib.suppress(JobError):
        loop(world, (), outer=nesterov(parameters.parameters()))
        results.append("an optimizer of another model is accepted")
    return results


def test_a_loop_has_torchs_outer_optimizer_and_resumes_within_a_period(ranks):
    expected = reference(2, 14, partial(torch.optim.Adam, lr=0.1))
    (whole, again), _ = ranks(2)(looped)
    assert torch.equal(whole, again)
    assert torch.allclose(whole, expected, atol=1e-5)


def test_an_optimizer_is_read_into_a_setting():
    model = torch.nn.Linear(3, 2)
    assert setting_of(nesterov(model.parameters()), model.parameters()) == OUTER
    two = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(JobError, match=naming("outer", "one group")):
        setting_of(two, ())
    with pytest.raises(JobError, match=naming("outer", "1", "model.parameters()")):
        setting_of(torch.optim.SGD([model.weight]), model.parameters())
    with pytest.raises(
        JobError, match=naming("outer", "torch.optim.SGD(model.parameters(), lr=0.7)")
    ):
        setting_of(lambda parameters: None, ())
    scheduled = nesterov(model.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 2)
    with pytest.raises(JobError, match=naming("outer", "scheduler")):
        setting_of(scheduled, ())


def test_a_job_with_an_outer_optimizer_resumes_within_a_period(tmp_path):
    job = {
        "run": {"steps": 10, "evaluate_every": 0},
        "data": {"source": "digits", "batch": 4, "workers": 0},
        "algorithm": {"name": "diloco", "outer": {"name": "Adam", "lr": 0.01}},
        "cadence": {"period": 4, "fragments": 2},
        "model": {"name": "mlp"},
    }
    whole = train(assemble.load(job, [f"run.output={tmp_path / 'whole'}"]), 3)
    train(assemble.load(job, [f"run.output={tmp_path / 'cut'}", "run.steps=5"]), 3)
    with SingleProcess() as world:
        again = start_and_resume.resume(tmp_path / "cut", ["run.steps=10"], world, None)
    assert again["digest"] == whole["digest"]
    with pytest.raises(JobError, match=naming("algorithm.outer", "outer_lr")):
        assemble.assemble(assemble.load(job, ["algorithm.outer_lr=0.5"]), SingleProcess(), 3)


RESUMED = {
    "cadence.period=2": "",
    "cadence.fragments=2": "",
    "algorithm.outer_lr=0.5": "",
    "algorithm.name=slowmo cadence.name=cpsgd local.name=adamw": "dropped: anchor, inner/first",
    "algorithm.name=noloco cadence.name=every": "dropped: anchor, inner/first",
    "algorithm.name=dsgd local.name=adamw": "dropped: anchor, inner/first",
}
"""Settings with which a run of ``diloco`` is resumed, and what the message says; "": exactly."""


@on_each("settings", RESUMED)
def test_a_resume_with_another_outer_method_names_what_is_dropped(settings, tmp_path, capsys):
    job = {
        "run": {
            "steps": 6,
            "evaluate_every": 0,
            "output": str(tmp_path / str(abs(hash(settings)))),
        },
        "data": {"source": "digits", "batch": 4, "workers": 0},
        "algorithm": {"name": "diloco"},
        "cadence": {"period": 4},
        "model": {"name": "mlp"},
    }
    train(assemble.load(job), 3)
    capsys.readouterr()
    with SingleProcess() as world:
        start_and_resume.resume(
            Path(job["run"]["output"]), ["run.steps=8", *settings.split()], world, None
        )
    printed = "".join(capsys.readouterr())
    assert ("exact average" in printed) == bool(RESUMED[settings])
    assert RESUMED[settings] in printed
