"""All optimizers and options that torch's tests use: each trains inside Gossip, or is rejected."""

import copy

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests.cases import every, with_world

common_optimizers = pytest.importorskip("torch.testing._internal.common_optimizers")
# After this import, flags of cuDNN can't be set in the process, but other tests have to set them.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
REJECTED = {"LBFGS", "SparseAdam"}
"""Optimizers that can't train this model: one needs a closure, one sparse gradients."""


def cases(ends_only=False):
    """Yield name, class and keyword arguments of each case on a CPU.

    :param ends_only: whether only the first and the last options of each optimizer are used
    """
    for info in common_optimizers.optim_db:
        options = [case.kwargs for case in info.optim_inputs_func(device="cpu")]
        for kwargs in (options[0], options[-1]) if ends_only else options:
            yield info.optim_cls.__name__, info.optim_cls, kwargs


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))


def train(made, optimizer, node):
    for step in range(3):
        draw = torch.Generator().manual_seed(100 * node + step)
        optimizer.zero_grad()
        made(torch.randn(4, 6, generator=draw)).square().mean().backward()
        optimizer.step()


def values(made):
    return torch.cat([p.detach().reshape(-1) for p in made.parameters()])


def trained(world, ends_only=False):
    """Return the name of each case and its final parameters, or the error."""
    results = []
    for name, kind, options in cases(ends_only):
        if name in REJECTED - {"LBFGS"}:
            continue
        made = model()
        try:
            inner = kind(made.parameters(), **copy.deepcopy(options))
        except (ValueError, TypeError):  # Torch rejects these options for this model.
            continue
        try:
            optimizer = mpigossip.Gossip(world, made, inner)
        except JobError as error:
            results.append((name, options, str(error)))
            continue
        train(made, optimizer, world.rank)
        optimizer.close()
        results.append((name, options, values(made)))
    return results


def test_each_optimizer_makes_its_own_steps_bitwise_or_is_rejected():
    with SingleProcess() as world:
        outcome = trained(world)
    names = {name for name, _, _ in outcome}
    assert {"SGD", "AdamW", "LBFGS"} < names and len(outcome) > 80
    for name, options, result in outcome:
        rejected = name in REJECTED or options.get("differentiable")
        assert isinstance(result, str) == bool(rejected), (name, options, result)
        if rejected:
            continue
        made = model()
        kind = getattr(torch.optim, name)
        train(made, kind(made.parameters(), **copy.deepcopy(options)), 0)
        assert torch.equal(values(made), result), (name, options)


@with_world
def on_ranks(world):
    return [
        (name, result if isinstance(result, str) else result.isfinite().all().item())
        for name, _, result in trained(world, ends_only=True)
    ]


@pytest.mark.parametrize("n", [every(4)])
def test_each_optimizer_trains_on_ranks(ranks, n):
    """The test above has all options."""
    results = ranks(n)(on_ranks, timeout=300)[0]
    assert {info.optim_cls.__name__ for info in common_optimizers.optim_db} - {
        name for name, _ in results
    } <= REJECTED
    assert len(results) > 20
    assert all(finite is True or name == "LBFGS" for name, finite in results), results
