"""A loop with a run directory on nodes of several ranks with DDP: one writer per node."""

import copy
import time

import numpy as np
import pytest
import torch

from mpigossip.store import checkpoint
from mpigossip.store.log import read
from tests.cases import with_world
from tests.optim.loops import NODES, PER, begin_on_nodes, loss_of, network, train_on_nodes

HALF = 4
STEPS = 7


@with_world(timeout_s=30)
def run_one_rank_per_node(world, folder):
    """Make the same steps with one rank per node, which averages the gradients of two batches."""
    model = network(world.rank)
    gossip, schedule = begin_on_nodes(world, folder, model, model)
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
    whole = ranks(n)(train_on_nodes, tmp_path / "whole", STEPS, (HALF,))
    ranks(NODES)(run_one_rank_per_node, tmp_path / "replicas")
    ranks(n)(train_on_nodes, tmp_path / "parts", HALF, (2,))
    parts = ranks(n)(train_on_nodes, tmp_path / "parts", STEPS)
    for (_, parameters, _), (start, again, _) in zip(whole, parts, strict=True):
        assert start == HALF and same(parameters, again)
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
    """Each rank has its own generator, so that later noise differs, but the models do not."""
    for name, first, then in (("a", 1, PER), ("b", PER, 1)):
        for per in (first, then):
            starts = ranks(NODES * per)(train_on_nodes, tmp_path / name, HALF, (), None, per, False)
            result = checkpoint.digest(checkpoint.latest(tmp_path / name))
            if per == first:
                before = result
        assert [s for s, *_ in starts] == [HALF] * NODES * then and result == before


def check_collective_calls(world, gossip, whole):
    """Call averaged(), paused(), step() and exit() on all ranks.

    :return: the buffers inside averaged(), the value of ``stopping``, and the exit code
    """
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
    results = ranks(NODES * PER)(
        train_on_nodes, tmp_path, 12, (), check_collective_calls, limit=1.0
    )
    inside, stopping, codes = zip(*(each for *_, each in results), strict=True)
    assert all(same(inside[0], other) for other in inside[1:])
    own = [values[-3:] for _, values, _ in results]
    assert not same(own[0], own[1]), "the ranks of a node have seen other data"
    assert stopping == (True,) * 4 and not (tmp_path / "STOP").exists()
    assert codes == (75,) * 4 and not read(tmp_path / "log.h5").summary["finished"]
    assert checkpoint.latest(tmp_path).name == "step-00000013"
