"""Models that other parts of torch stand around, or look into: checkpoints, compile, DDP, EMA."""

import torch
from torch import nn

import mpigossip
from mpigossip.cluster.ranks import Alone


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def gossip(model, world=None):
    return mpigossip.Gossip(world or Alone(), model, torch.optim.AdamW(model.parameters(), 0.1))


def train(forward, optimizer, steps=3, rank=0):
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        forward(torch.randn(8, 4, generator=draw)).square().mean().backward()
        optimizer.step()


def test_each_parameter_is_a_storage_of_its_own(tmp_path):
    """Else Accelerate takes them for tied, and its checkpoint holds one of them."""
    model = net()
    train(model, gossip(model))
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({each.data_ptr() for each in storages}) == len(storages)
    torch.save(model.state_dict()["2.bias"], tmp_path / "saved")
    torch.save(torch.zeros(2), tmp_path / "alone")
    assert (tmp_path / "saved").stat().st_size == (tmp_path / "alone").stat().st_size
