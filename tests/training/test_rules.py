"""Rules about combinations of settings, unless another file tests them."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.training import assemble, rules
from mpigossip.training.rules import Launch, Rule, problems
from tests.cases import naming, with_world

TABLES = ("COMPATIBILITY", "SETTINGS", "LAUNCH", "SURVIVAL", "FAULTS", "VECTORIZATION")


@pytest.mark.parametrize("table", TABLES)
def test_each_rule_begins_with_a_setting_and_has_a_remedy(table):
    for rule in (rule for group in getattr(rules, table) for rule in group):
        assert re.match(r"(\{setting\}|faults|[a-z]+\.[a-z_]+ = |local\.name)", rule.message)
        assert rule.remedy


def test_a_group_reports_its_first_broken_rule_with_details_and_job():
    job = assemble.load({}, ["algorithm.name=dsgd"])
    table = (
        (
            Rule(lambda launch: False, "unbroken"),
            Rule(lambda launch: {"slots": launch.slots}, "{slots} slots", "use {slots}"),
            Rule(lambda launch: True, "explained by the one before"),
        ),
        (Rule(lambda launch: {}, "unbroken"), Rule(lambda launch: None, "unbroken")),
        (Rule(lambda launch: True, 'algorithm "{job.algorithm.name}"'),),
    )
    assert problems(table, Launch(job, 3)) == ["3 slots; use 3", 'algorithm "dsgd"']


@pytest.mark.parametrize(
    ("settings", "beginnings"),
    [
        (
            ["node.mixer=asynchronous", "faults.away=0.1", "faults.ticks=3", "node.wire=bf16"],
            ["faults.away = 0.1: an asynch", "faults.ticks = 3: an asynch", 'node.wire = "bf16"'],
        ),
        (
            ["node.exchange=nccl", "node.mixer=asynchronous", "run.survive=true"],
            ['node.exchange = "nccl" and node.mixer', 'node.exchange = "nccl" and run.survive'],
        ),
        (
            ["cadence.name=every", "cadence.period=4", "cadence.fragments=9", "cadence.delay=9"],
            ["cadence.fragments = 9: each fragment"],
        ),
        (
            ["data.shuffled_percent=30", "data.dirichlet_alpha=0.3"],
            ["data.shuffled_percent = 30: only", "data.dirichlet_alpha = 0.3: only"],
        ),
    ],
)
def test_broken_rules_are_reported_in_the_order_of_the_tables(settings, beginnings):
    messages = assemble.mistakes(assemble.load({}, ["algorithm.name=dsgd", *settings]), 4)
    assert [
        text[: len(begin)] for text, begin in zip(messages, beginnings, strict=True)
    ] == beginnings


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
            with pytest.raises(JobError, match=naming("node.vmap = true", "buffers")):
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
    with pytest.raises(JobError, match=naming("graph.name")) as caught:
        mpigossip.Gossip(world, model, optimizer, "dsgd", graph=PAIRS)
    mpigossip.Gossip(world, model, optimizer, "dsgd", graph=PAIRS, cadence="gossip-pga").close()
    return str(caught.value)


def test_a_graph_that_does_not_connect_its_nodes_is_rejected_in_loops(ranks):
    messages = ranks(4)(loop_over_pairs)
    assert all("node 0 never reaches node 2" in text for text in messages)
