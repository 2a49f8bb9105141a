"""Optimizers that Gossip accepts as the local step (optim/inner.py)."""

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.optim.inner import needs_closure
from tests.cases import on_each

RATE = 0.1


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@on_each("when", ["before Gossip", "before the first step", "after the first step"])
def test_an_inner_optimizer_may_have_a_scheduler(when):
    """A scheduler replaces `step` of the optimizer by a function whose signature has `self`."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = scheduler_of(inner) if when == "before Gossip" else None
    gossip = mpigossip.Gossip(SingleProcess(), model, inner)
    if when == "before the first step":
        scheduler = scheduler_of(inner)
    for step in range(3):
        gossip.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        gossip.step()
        gossip._node.check_known()  # averaged() does the same.
        if scheduler is None:
            scheduler = scheduler_of(inner)
        elif step:
            scheduler.step()
    assert model.weight.item() == pytest.approx(-RATE * (1 + 1 + 0.5))


def test_a_step_without_a_signature_needs_no_closure():
    class Unsigned:
        __signature__ = "none"

        def __call__(self):
            pass

    class Compiled(torch.optim.SGD):
        pass

    Compiled.step = Unsigned()  # `inspect.signature` raises this error for some functions in C.
    assert not needs_closure(Compiled([nn.Parameter(torch.ones(1))]))
