"""A loop with a folder on nodes of several ranks, DDP inside: one writer a node."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpigossip
from mpigossip.store import checkpoint
from mpigossip.store.log import read

NODES, PER, HALF, STEPS, BATCH = 2, 2, 4, 7, 8


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.BatchNorm1d(60), nn.Linear(60, 5))


def loss_of(model, draw, node, slot, step):
    """On a batch of the step, and some noise from the kept generator of the slot."""
    batch = torch.Generator().manual_seed(1000 * node + 10 * slot + step)
    inputs = torch.randn(BATCH, 20, generator=batch) + 0.1 * torch.randn(BATCH, 20, generator=draw)
    return nn.functional.mse_loss(model(inputs), torch.randn(BATCH, 5, generator=batch))


def begun(world, folder, node, model, whole, **more):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gossip = mpigossip.Gossip(
        world, whole, optimizer, run=folder, flush_steps=3, timeout_s=1.0, **more
    )
    schedule = torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5)
    return gossip, schedule


def several(comm, folder, steps, save_at=(), after=None):
    """On ranks of which PER are a node; what ``after`` finds, and the steps resumed from."""
    from mpigossip.doors.world import World

    torch.set_num_threads(1)
    with World(comm, timeout_s=30) as world:
        world.arrange(PER)
        node, slot = world.nodes.column.rank, world.nodes.place
        model = network(node)
        whole = DistributedDataParallel(model, process_group=world.node_group())
        gossip, schedule = begun(world, folder, node, model, whole)
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


def one_rank(comm, folder, steps, save_at=()):
    """The same on one rank a node, with a replica a slot."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    with World(comm, timeout_s=30) as world:
        model = network(world.rank)
        gossip, schedule = begun(world, folder, world.rank, model, model, devices=f"cpu:{PER}")
        draws = [torch.Generator().manual_seed(PER * world.rank + slot) for slot in range(PER)]
        gossip.keep(schedule=schedule, **{f"draw{k}": draw for k, draw in enumerate(draws)})
        start = gossip.resume()
        for step in range(start, steps):
            gossip.zero_grad()

            def work(slot, replica, step=step):
                loss_of(replica, draws[slot], world.rank, slot, step).backward()

            gossip.run(work)
            gossip.step()
            schedule.step()
            if step + 1 in save_at:
                gossip.save()
    return start, [p.detach().numpy().copy() for p in model.parameters()]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_on_nodes_of_two_ranks_is_that_of_one_rank_with_two_slots(ranks, tmp_path):
    n = NODES * PER
    whole = ranks(n)(several, tmp_path / "whole", STEPS, (HALF,))
    ranks(NODES)(one_rank, tmp_path / "slots", STEPS)
    ranks(n)(several, tmp_path / "parts", HALF, (2,))
    parts = ranks(n)(several, tmp_path / "parts", STEPS)
    for (_, mine, _), (start, again, _) in zip(whole, parts, strict=True):
        assert start == HALF and same(mine, again)
    paths = [checkpoint.latest(tmp_path / name) for name in ("whole", "parts", "slots")]
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
    sent = read(tmp_path / "slots/log.h5").steps["bytes_sent"]
    assert one.steps["bytes_sent"] == pytest.approx(sent, rel=0.05)
    assert (one.summary["nodes"], one.summary["slots"]) == (NODES, PER)
    assert one.summary["digest"] == checkpoint.digest(paths[0])


def test_a_checkpoint_of_one_shape_goes_on_in_the_other(ranks, tmp_path, capfd):
    """With generators kept by rank, the noise differs after it; the models at it don't."""
    ranks(NODES)(one_rank, tmp_path / "a", HALF)
    before = checkpoint.digest(checkpoint.latest(tmp_path / "a"))
    assert [s for s, *_ in ranks(NODES * PER)(several, tmp_path / "a", HALF)] == [HALF] * 4
    assert checkpoint.digest(checkpoint.latest(tmp_path / "a")) == before
    ranks(NODES * PER)(several, tmp_path / "b", HALF)
    before = checkpoint.digest(checkpoint.latest(tmp_path / "b"))
    assert [s for s, *_ in ranks(NODES)(one_rank, tmp_path / "b", HALF)] == [HALF] * 2
    assert checkpoint.digest(checkpoint.latest(tmp_path / "b")) == before


def looks(world, gossip, whole):
    """Buffers inside averaged(); rank 0 works for longer than others wait, a step, and the end."""
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
    found = ranks(NODES * PER)(several, tmp_path, 12, (), looks)
    inside, stopping, codes = zip(*(each for *_, each in found), strict=True)
    assert all(same(inside[0], other) for other in inside[1:])
    own = [values[-3:] for _, values, _ in found]
    assert not same(own[0], own[1]), "the ranks of a node have seen other data"
    assert stopping == (True,) * 4 and not (tmp_path / "STOP").exists()
    assert codes == (75,) * 4 and not read(tmp_path / "log.h5").summary["finished"]
    assert checkpoint.latest(tmp_path).name == "step-00000013"


def test_another_number_of_nodes_goes_on_from_the_average(ranks, tmp_path):
    ranks(NODES * PER)(several, tmp_path, HALF)
    states = [checkpoint.read_node(checkpoint.latest(tmp_path), k).parameters for k in range(NODES)]
    mean = np.mean(np.stack(states).astype(np.float64), 0).astype(np.float32)
    for start, values, _ in ranks(PER)(several, tmp_path, HALF):
        assert start == HALF
        assert np.array_equal(np.concatenate([v.ravel() for v in values[: len(values) - 3]]), mean)
