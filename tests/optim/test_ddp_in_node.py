"""DDP inside nodes of several ranks, and Gossip between nodes, compared with nodes of one rank."""

import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpigossip.config import JobError
from mpigossip.config.readable import format_bytes
from tests.cases import every, naming, with_world

STEPS = 6
BATCH = 8
PER = 2
SETTINGS = [
    dict(algorithm="dsgd"),
    dict(algorithm="d2", graph="ring"),
    dict(algorithm="dsgt", graph="ring", same_host="put"),
    dict(algorithm="dsgd", wire="qsgd", levels=7),
    dict(algorithm="dsgd", style="awc"),
    dict(algorithm="gossip-pga", period=2),
    dict(algorithm="sgp", graph="exponential", weights="push"),
    dict(algorithm="dmsgd"),
    dict(algorithm="dsgd", graph="ring", average_state={"exp_avg_sq": 2, "exp_avg": 3}),
    dict(algorithm="diloco", period=2, average_state={"exp_avg_sq": 3}),
]


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 5))


def batch(node, slot, step):
    draw = torch.Generator().manual_seed(1000 * node + 10 * slot + step)
    return torch.randn(BATCH, 20, generator=draw), torch.randn(BATCH, 5, generator=draw)


def optimizer_of(model, settings):
    if settings["algorithm"] == "dmsgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_node(world, settings, node, slots, wrap):
    """Train this node with the mean gradient of its slots; return parameters and sent bytes."""
    from mpigossip.optim.gossip import Gossip

    model = network(node)
    whole = wrap(model)
    optimizer = Gossip(world, whole, optimizer_of(model, settings), **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        for slot in slots:
            inputs, targets = batch(node, slot, step)
            # Like DDP, multiply the gradient of each of k slots by 1/k, and add the products.
            (nn.functional.mse_loss(whole(inputs), targets) / len(slots)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    result = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    record = optimizer.record.bytes_sent[0]
    optimizer.close()
    return result.numpy(), record


@with_world(per=PER, timeout_s=30)
def several(world, settings):
    group = world.node_group()
    nodes = world.nodes
    results = [
        train_node(
            world,
            one,
            nodes.inter_node.rank,
            [nodes.local_rank],
            lambda model: DistributedDataParallel(model, process_group=group),
        )
        for one in settings
    ]
    mesh = world.node_mesh()
    return nodes.inter_node.rank, results, (mesh.size(), mesh.mesh_dim_names)


def one_rank(comm, settings):
    from mpigossip.cluster.mpi_world import MPIWorld

    world = MPIWorld(comm, timeout_s=30)
    results = [train_node(world, one, world.rank, range(PER), lambda m: m) for one in settings]
    world.close()
    return results


@pytest.mark.parametrize(("n", "count"), [(2, len(SETTINGS)), every(4, 2)])
def test_ddp_inside_the_node_is_bitwise_identical_to_one_rank_per_node(ranks, n, count):
    some = SETTINGS[:count]
    expected = ranks(n)(one_rank, some, timeout=120)
    for node, results, mesh in ranks(PER * n)(several, some, timeout=120):
        assert mesh == (PER, ("node",))
        for settings, (parameters, sent), (wanted, all_sent) in zip(
            some, results, expected[node], strict=True
        ):
            assert (parameters == wanted).all(), settings
            # Each of the two ranks sends its shard: two of the four buckets of the model.
            assert sent * PER == pytest.approx(all_sent, rel=0.02), settings


@with_world(per=PER, timeout_s=30)
def traffic(world):
    """Return the line of the overview about the bytes that a node sends."""
    from mpigossip.optim.gossip import Gossip
    from mpigossip.runs import overview

    model = network(0)
    parallel = DistributedDataParallel(model, process_group=world.node_group())
    optimizer = Gossip(
        world, parallel, torch.optim.AdamW(model.parameters()), average_state={"exp_avg_sq": 2}
    )
    nn.functional.mse_loss(parallel(torch.ones(2, 20)), torch.ones(2, 5)).backward()
    optimizer.step()
    node = optimizer._node
    lines = dict(overview.between(node.engine, node.graph, node.job.node, world))
    optimizer.close()
    return lines["traffic"]


def test_the_overview_counts_the_shard_of_each_rank_once(ranks):
    """The model has 1,565 parameters, which are sent in two shards of 1,024 elements."""
    sent = format_bytes(2 * 1024 * 4)
    for text in ranks(4)(traffic):
        assert text.startswith(f"{sent} per node") and "(1 vector)" in text, text
        assert f", and {sent} every 2 steps for exp_avg_sq" in text
        assert text.endswith(f"all-reduce would send {sent}")


@with_world(per=PER, timeout_s=30)
def refused(world):
    from mpigossip.optim.gossip import Gossip

    model = network(0)
    said = []
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    group = world.node_group()
    alone = torch.distributed.new_subgroups(1)[0]
    for whole, more in (
        (model, {}),
        (DistributedDataParallel(model, process_group=alone), {}),
        (DistributedDataParallel(model, process_group=group), dict(mixer="asynchronous")),
    ):
        try:
            Gossip(world, whole, made, **more)
        except JobError as error:
            said.append(" ".join(error.messages))
    return said


def test_missing_or_wrong_ddp_inside_a_node_is_rejected(ranks):
    for plain, whole, late in ranks(4)(refused):
        assert "DistributedDataParallel(model, process_group=world.node_group())" in plain
        assert re.search(naming("gradients of 1 processes", "2 ranks"), whole)
        assert 'mixer = "asynchronous"' in late
