"""Sharpness-aware minimization: rejected inside Gossip, and Gossip as its base optimizer."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests.cases import naming, on_each, with_world

PAGE = Path(mpigossip.__file__).parent / "optim" / "README.md"


class SAM(torch.optim.Optimizer):
    """Optimizer with the interface of the usual implementation (Foret et al., ICLR 2021)."""

    def __init__(self, params, base_optimizer, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for p in self.parameters():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in self.parameters():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class Twice(torch.optim.SGD):
    """Optimizer whose step() has no default for its closure."""

    def step(self, closure):
        return super().step(closure)


class Extra(torch.optim.SGD):
    def own_method(self):
        return 1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def inputs(node, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * node + step))


def train(model, optimizer, node, steps):
    for step in range(steps):
        model(inputs(node, step)).square().mean().backward()
        optimizer.first_step(zero_grad=True)
        model(inputs(node, step)).square().mean().backward()
        optimizer.second_step(zero_grad=True)


@on_each("kind", ["SAM", "Twice"])
def test_an_optimizer_that_needs_a_closure_is_rejected_by_name(kind):
    model = net()
    if kind == "SAM":
        inner = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    else:
        inner = Twice(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match=naming(f"{kind} evaluates", f"base optimizer of {kind}")):
        mpigossip.Gossip(SingleProcess(), model, inner)
    other = torch.optim.SGD(model[2].parameters(), 0.1)
    parts = [
        type(inner)(model[0].parameters(), *([torch.optim.SGD] * (kind == "SAM")), lr=0.1),
        other,
    ]
    with pytest.raises(JobError, match=naming(f"{kind} evaluates")):
        mpigossip.Gossip(SingleProcess(), model, parts)


def test_a_missing_attribute_of_the_inner_optimizer_names_it():
    model = net()
    optimizer = mpigossip.Gossip(SingleProcess(), model, Extra(model.parameters(), lr=0.1))
    with pytest.raises(AttributeError, match=naming("'own_method'", "Extra", "base optimizer")):
        optimizer.own_method()
    assert not hasattr(optimizer, "own_method")
    with pytest.raises(AttributeError, match=naming("'nothing'")):
        optimizer.nothing()


def recipe(world, model, **options):
    """Return the lines of the page that create the optimizer."""
    code = re.search(r"(def base\(.*?momentum=0\.9\)\n)", PAGE.read_text(), re.DOTALL).group(1)
    names = {"mpigossip": mpigossip, "torch": torch, "SAM": SAM, "world": world, "model": model}
    exec(code, names)  # noqa: S102 - the page's code is what is tested
    return names["optimizer"]


def values(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_the_recipe_on_one_node_is_bitwise_identical_to_sam():
    model = net()
    plain = net()
    optimizer = recipe(SingleProcess(), model)
    train(model, optimizer, 0, 4)
    train(plain, SAM(plain.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), 0, 4)
    assert torch.equal(values(model), values(plain))


@with_world
def on_ranks(world):
    model = net()
    optimizer = recipe(world, model)
    train(model, optimizer, world.rank, 1)
    return values(model)


def test_the_recipe_mixes_the_steps_of_sam(ranks):
    """On two nodes, a round of the default graph computes the mean of both."""
    results = ranks(2)(on_ranks)
    models = [net() for _ in range(2)]
    for node, model in enumerate(models):
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        train(model, optimizer, node, 1)
    mean = torch.stack([values(model) for model in models]).mean(0)
    for row in results:
        # means of two float32 numbers, summed in another order
        assert torch.allclose(row, mean, rtol=1e-6, atol=1e-7)
    assert torch.equal(*results)
