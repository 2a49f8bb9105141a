"""Slots of a node's ranks: what differs between ranks is named before they wait for each other."""

from types import SimpleNamespace

import pytest
import torch

from mpigossip.config import JobError
from mpigossip.training import shape
from mpigossip.training.assemble import load


@pytest.mark.parametrize(
    "devices, other, says",
    [
        ("auto", ("cuda:0",), "rank 1 on b has a GPU, rank 0 on a sees none"),
        ("cpu:2", ("cpu",), "rank 0 on a has 2 slots, rank 1 on b has 1"),
    ],
)
def test_ranks_have_as_many_slots_of_one_kind(monkeypatch, devices, other, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    job = load({"node": {"devices": devices, "ranks_per_node": 2}})
    world = SimpleNamespace(
        nodes=SimpleNamespace(per_node=2), hosts=("a", "b"), broadcast=lambda found: found
    )
    world.gather = lambda mine: [mine, mine]
    shape.check_alike(job, world)
    world.gather = lambda mine: [mine, other]
    with pytest.raises(JobError, match=says):
        shape.check_alike(job, world)
