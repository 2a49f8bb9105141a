"""What goes together in a job, where no other test has it."""

import pytest
import torch
from torch import nn

from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.training import assemble


class Buffered(nn.Module):
    """A linear layer with a buffer that stays, or that training changes in place or anew."""

    def __init__(self, change):
        super().__init__()
        self.change, self.linear = change, nn.Linear(64, 10)
        self.register_buffer("mean", torch.ones(64))

    def forward(self, x):
        x = x.flatten(1)
        if self.change == "in place" and self.training:
            self.mean.mul_(0.9).add_(x.mean(0))
        if self.change == "anew" and self.training:
            self.mean = 0.9 * self.mean + x.mean(0)
        return self.linear(x - self.mean)


def constant():
    return Buffered("never")


def in_place():
    return Buffered("in place")


def anew():
    return Buffered("anew")


def norm():
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))


def test_vmap_bears_buffers_that_training_leaves_alone():
    settings = ["node.vmap=true", "run.steps=1", "schedule.warmup_epochs=0"]
    for name in ("constant", "in_place", "anew", "norm"):
        job = assemble.load({}, [*settings, f"model.name={__name__}:{name}"])
        if name == "constant":
            made = assemble.assemble(job, Alone(), 2)
            assert made.trainer.step().loss.shape == (2,)
            made.close()
        else:
            with pytest.raises(JobError, match="changes its buffers in training"):
                assemble.assemble(job, Alone(), 2)
