"""Compatibility of the parts of a job, unless another file tests it."""

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.ranks import SingleProcess
from mpigossip.config import JobError
from mpigossip.training import assemble
from tests.cases import with_world


class Buffered(nn.Module):
    """Linear layer with a buffer that training does not change, changes in place, or replaces."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.linear = nn.Linear(64, 10)
        self.register_buffer("mean", torch.ones(64))

    def forward(self, x):
        x = x.flatten(1)
        if self.change == "in place" and self.training:
            self.mean.mul_(0.9).add_(x.mean(0))
        if self.change == "replaced" and self.training:
            self.mean = 0.9 * self.mean + x.mean(0)
        return self.linear(x - self.mean)


def constant():
    return Buffered("never")


def in_place():
    return Buffered("in place")


def replaced():
    return Buffered("replaced")


def norm():
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))


def test_vmap_accepts_buffers_that_training_does_not_change():
    settings = ["node.vmap=true", "run.steps=1", "schedule.warmup_epochs=0"]
    for name in ("constant", "in_place", "replaced", "norm"):
        job = assemble.load({}, [*settings, f"model.name={__name__}:{name}"])
        if name == "constant":
            made = assemble.assemble(job, SingleProcess(), 2)
            assert made.trainer.step().loss.shape == (2,)
            made.close()
        else:
            with pytest.raises(JobError, match="node.vmap = true: model .* buffers"):
                assemble.assemble(job, SingleProcess(), 2)


PAIRS = np.kron(np.eye(2), np.full((2, 2), 0.5))
"""Two pairs of nodes that exchange nothing with each other."""


def pairs(n, seed):
    return PAIRS


def test_a_graph_that_does_not_connect_its_nodes_is_rejected_in_jobs():
    def problems(*settings):
        return assemble.mistakes(assemble.load({}, ["algorithm.name=dsgd", *settings]), 4)

    name = f"graph.name={__name__}:pairs"
    for more in ([], ["graph.lazy=true"], ["faults.lost=0.1"]):
        (problem,) = problems(name, *more)
        assert (
            f'graph.name = "{__name__}:pairs"' in problem
            and "node 0 never reaches node 2" in problem
        )
    # averages over all nodes connect them, and "identity" is intended
    assert not problems(name, "cadence.name=gossip-pga")
    assert not problems(name, "cadence.name=global")
    assert not problems("graph.name=identity")


@with_world
def loop_over_pairs(world):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match=r"graph\.name") as caught:
        mpigossip.Gossip(world, model, optimizer, "dsgd", graph=PAIRS)
    mpigossip.Gossip(world, model, optimizer, "dsgd", graph=PAIRS, cadence="gossip-pga").close()
    return str(caught.value)


def test_a_graph_that_does_not_connect_its_nodes_is_rejected_in_loops(ranks):
    messages = ranks(4)(loop_over_pairs)
    assert all("node 0 never reaches node 2" in text for text in messages)
