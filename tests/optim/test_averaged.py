"""Tests of the steps of `averaged()`: snapshot, average, statistics of BatchNorm, restore."""

from types import SimpleNamespace

import torch
from torch import nn

from mpigossip.optim.averaged import average_, recalibrate_, snapshot


def _values(module):
    return [tensor.clone() for tensor in module.state_dict().values()]


def test_a_snapshot_restores_parameters_and_buffers_any_number_of_times():
    published = []
    node = SimpleNamespace(publish=lambda: published.append(True))
    twin = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = _values(twin)
    saved = snapshot(node, twin)
    for _ in range(2):
        with torch.no_grad():
            for tensor in twin.state_dict().values():
                tensor.add_(1)
        saved.restore()
        assert all(map(torch.equal, _values(twin), before))
    assert len(published) == 2  # A twin may share parameters with the model.


def test_a_snapshot_of_the_model_holds_its_flat_parameters():
    model = nn.BatchNorm1d(2)
    x = torch.arange(4.0)
    node = SimpleNamespace(model=model, vector=SimpleNamespace(x=x[None]), publish=lambda: None)
    saved = snapshot(node, None)
    assert [part.data_ptr() for part in saved.parameters] == [x.data_ptr()]
    x.zero_()
    model.running_mean.add_(1)
    saved.restore()
    assert torch.equal(x, torch.arange(4.0))
    assert torch.equal(model.running_mean, torch.zeros(2))


def test_average_writes_tensors_of_any_strides_in_place():
    mixer = SimpleNamespace(mean=lambda x: x.sum(0) / 2)
    tensors = [torch.ones(6), torch.ones(2, 3).T]
    average_(mixer, tensors)
    assert all((tensor == 0.5).all() for tensor in tensors)


def test_recalibration_counts_batches_and_draws_no_random_numbers_of_the_program():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    before = torch.get_rng_state()
    with torch.no_grad():
        assert recalibrate_(model, [torch.full((4, 2), 3.0)] * 3) == 3
        assert recalibrate_(model, iter(())) == 0
    assert torch.equal(torch.get_rng_state(), before)
