"""Gradients that the first backward pass writes are identical to gradients added to zeros."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.vector import flatten
from mpigossip.training import assemble
from mpigossip.training import gradients as gradients_module
from mpigossip.training.gradients import LARGE, FlatGradients

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Model with large and small parameters, some of which are used twice, sometimes or never."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(600, 512, sparse=True)
        self.first = nn.Linear(512, 512)
        self.second = nn.Conv2d(512, 512, 1).to(memory_format=torch.channels_last)
        self.sometimes = nn.Linear(512, 512)
        self.never = nn.Linear(512, 512)

    def forward(self, tokens, some=False):
        x = checkpoint(self.first, self.first(self.table(tokens)).relu(), use_reentrant=True)
        x = self.second(x[..., None, None])[..., 0, 0].relu()
        return self.sometimes(x) if some else x


def made():
    """Return a replica, the layout of its parameters, and its row of gradients."""
    torch.manual_seed(4)
    model = Model()
    layout = flatten(model)
    x, gradients = torch.zeros(layout.size), torch.full((layout.size,), 7.0)
    with torch.no_grad():
        named = dict(model.named_parameters())
        for name, view in zip(layout.names, layout.views(x), strict=True):
            view.copy_(named[name])
    layout.attach(model, x, gradients)
    return model, layout, gradients


def backward(model, passes):
    draw = torch.Generator().manual_seed(1)
    for some in passes:
        model(torch.randint(0, 600, (5,), generator=draw), some).square().mean().backward()
        yield


@pytest.mark.parametrize("passes", [(False,), (True,), (False, True), (True, False, True)])
def test_written_gradients_are_bitwise_identical_to_gradients_added_to_zeros(passes):
    added, layout, expected = made()
    written, _, row = made()
    gradients = FlatGradients(written, layout, row)
    for _ in range(2):  # the second step overwrites the first
        expected.zero_()
        list(backward(added, passes))
        gradients.begin()
        for index, _ in enumerate(backward(written, passes)):
            if not index:
                gradients.complete()
        assert torch.equal(row.view(torch.int32), expected.view(torch.int32))
        named = dict(written.named_parameters())
        for name, view in zip(layout.names, layout.views(row), strict=True):
            assert named[name].grad.data_ptr() == view.data_ptr()
    assert sum(view.numel() >= LARGE for view in layout.views(row)) == 5


def test_a_negative_zero_is_written_as_a_sum_with_zero():
    model = nn.Linear(LARGE, 1, bias=False)
    layout = flatten(model)
    x, row = torch.zeros(layout.size), torch.ones(layout.size)
    layout.attach(model, x, row)
    gradients = FlatGradients(model, layout, row)
    gradients.begin()
    model(torch.full((1, LARGE), -0.0)).sum().backward()
    gradients.complete()
    assert not row.view(torch.int32).any()


def test_a_copy_of_a_replica_has_no_hooks():
    model, layout, row = made()
    gradients = FlatGradients(model, layout, row)
    gradients.begin()
    list(backward(model, [True]))
    gradients.complete()
    before = row.clone()
    list(backward(copy.deepcopy(model), [True]))
    assert torch.equal(row, before)


@pytest.mark.parametrize("settings", ["model.name=mlp", "model.name=lenet algorithm.accumulate=2"])
def test_a_job_without_written_gradients_is_bitwise_identical(settings, monkeypatch):
    models = []
    for large in (1, 1 << 40):
        monkeypatch.setattr(gradients_module, "LARGE", large)
        job = assemble.load({}, [*settings.split(), "data.batch=8", "node.devices=cpu:2"])
        with SingleProcess() as world:
            assembly = assemble.assemble(job, world, 2)
            for _ in range(3):
                assembly.trainer.step()
            models.append(assembly.trainer.replicas.full[0].clone())
            assembly.close()
    assert torch.equal(models[0].view(torch.int32), models[1].view(torch.int32))
