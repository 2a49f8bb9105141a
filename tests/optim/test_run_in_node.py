"""A loop with a run directory on nodes of several ranks with DDP: one writer per node."""

import copy
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpigossip
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from tests.cases import with_world

NODES = 2
PER = 2
HALF = 4
STEPS = 7
BATCH = 8


def network(seed, norm=True):
    torch.manual_seed(seed)
    third = nn.BatchNorm1d(60) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), third, nn.Linear(60, 5))


def loss_of(model, draw, node, slot, step):
    """Return the loss on a batch of the step, with noise from the slot's kept generator."""
    batch = torch.Generator().manual_seed(1000 * node + 10 * slot + step)
    inputs = torch.randn(BATCH, 20, generator=batch) + 0.1 * torch.randn(BATCH, 20, generator=draw)
    return nn.functional.mse_loss(model(inputs), torch.randn(BATCH, 5, generator=batch))


def begun(world, folder, model, whole, limit=30.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gossip = mpigossip.Gossip(world, whole, optimizer, run=folder, flush_steps=3, timeout_s=limit)
    schedule = torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5)
    return gossip, schedule


@with_world(timeout_s=30)
def several(world, folder, steps, save_at=(), after=None, per=PER, norm=True, limit=30.0):
    """Train on nodes of PER ranks; return the result of ``after`` and the resumed step."""
    world.group_into_nodes(per)
    node = world.nodes.inter_node.rank
    slot = world.nodes.local_rank
    whole = model = network(node, norm)
    if per > 1:
        whole = DistributedDataParallel(model, process_group=world.node_group())
    gossip, schedule = begun(world, folder, model, whole, limit)
    draw = torch.Generator().manual_seed(world.rank)
    gossip.keep(draw=draw, schedule=schedule)
    start = gossip.resume()
    for step in range(start, steps):
        gossip.zero_grad()
        loss = loss_of(whole, draw, node, slot, step)
        loss.backward()
        gossip.step()
        schedule.step()
        gossip.log(loss=loss, samples=BATCH, slot=slot)
        if step + 1 in save_at:
            gossip.save()
    found = after(world, gossip, whole) if after else None
    return (
        start,
        [p.detach().numpy().copy() for p in (*model.parameters(), *model.buffers())],
        found,
    )


@with_world(timeout_s=30)
def one_rank(world, folder):
    """Make the same steps with one rank per node, which averages gradients of two replicas."""
    model = network(world.rank)
    gossip, schedule = begun(world, folder, model, model)
    replicas = [model, copy.deepcopy(model)]
    draws = [torch.Generator().manual_seed(PER * world.rank + slot) for slot in range(PER)]
    for step in range(STEPS):
        for slot, replica in enumerate(replicas):
            replica.zero_grad()
            loss_of(replica, draws[slot], world.rank, slot, step).backward()
        pairs = list(zip(*(replica.parameters() for replica in replicas), strict=True))
        for p, other in pairs:
            p.grad.add_(other.grad).div_(PER)
        gossip.step()
        schedule.step()
        with torch.no_grad():
            for p, other in pairs:
                other.copy_(p)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_on_nodes_of_two_ranks_is_that_of_one_rank_with_two_replicas(ranks, tmp_path):
    n = NODES * PER
    whole = ranks(n)(several, tmp_path / "whole", STEPS, (HALF,))
    ranks(NODES)(one_rank, tmp_path / "replicas")
    ranks(n)(several, tmp_path / "parts", HALF, (2,))
    parts = ranks(n)(several, tmp_path / "parts", STEPS)
    for (_, mine, _), (start, again, _) in zip(whole, parts, strict=True):
        assert start == HALF and same(mine, again)
    paths = [checkpoint.latest(tmp_path / name) for name in ("whole", "parts", "replicas")]
    assert len({checkpoint.digest(path) for path in paths}) == 1
    manifest = checkpoint.read_manifest(paths[0])
    assert (manifest.n, manifest.meta["slots"], manifest.each) == (NODES, PER, 1)
    state = checkpoint.read_node(paths[0], 1)
    assert {f"buffers/{slot}/2.running_mean" for slot in range(PER)} <= state.arrays.keys()
    assert "own/#1/draw" in state.arrays and '"schedule"' not in state.numbers["own/#1"]

    one, other = (read(tmp_path / name / "log.h5") for name in ("whole", "parts"))
    assert one.steps["loss"].shape == (STEPS, NODES)
    assert (one.steps["slot"] == 0.5).all(), "what is said is the mean of a node's ranks"
    for name in ("loss", "lr", "bytes_sent", "slot"):
        assert np.array_equal(one.steps[name], other.steps[name]), name
    sent = read(tmp_path / "replicas/log.h5").steps["bytes_sent"]
    assert one.steps["bytes_sent"] == pytest.approx(sent, rel=0.05)
    assert (one.summary["nodes"], one.summary["slots"]) == (NODES, PER)
    assert one.summary["digest"] == checkpoint.digest(paths[0])


def test_a_checkpoint_of_one_shape_is_resumed_by_the_other(ranks, tmp_path):
    """Generators are kept by rank, so that the noise differs afterwards, but not the models."""
    for name, first, then in (("a", 1, PER), ("b", PER, 1)):
        for per in (first, then):
            starts = ranks(NODES * per)(several, tmp_path / name, HALF, (), None, per, False)
            found = checkpoint.digest(checkpoint.latest(tmp_path / name))
            if per == first:
                before = found
        assert [s for s, *_ in starts] == [HALF] * NODES * then and found == before


def looks(world, gossip, whole):
    """Check buffers inside averaged(), a long pause of rank 0, a step, and the end."""
    with gossip.averaged():
        inside = [b.clone().numpy() for b in whole.buffers()]
    with gossip.paused():
        time.sleep(3.0 if world.rank == 0 else 0.0)
    gossip.zero_grad()
    loss_of(whole, torch.Generator(), world.rank, 0, 0).backward()
    gossip.step()
    with pytest.raises(SystemExit) as left:
        gossip.exit()
    return inside, gossip.stopping, left.value.code


def test_averages_pauses_and_stopping_are_of_all_ranks(ranks, tmp_path):
    (tmp_path / "STOP").touch()
    found = ranks(NODES * PER)(several, tmp_path, 12, (), looks, limit=1.0)
    inside, stopping, codes = zip(*(each for *_, each in found), strict=True)
    assert all(same(inside[0], other) for other in inside[1:])
    own = [values[-3:] for _, values, _ in found]
    assert not same(own[0], own[1]), "the ranks of a node have seen other data"
    assert stopping == (True,) * 4 and not (tmp_path / "STOP").exists()
    assert codes == (75,) * 4 and not read(tmp_path / "log.h5").summary["finished"]
    assert checkpoint.latest(tmp_path).name == "step-00000013"
