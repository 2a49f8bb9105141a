"""Custom loop on nodes of several ranks that is stopped, and resumes from complete checkpoints."""

import os
import signal
import sys
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import mpigossip
from mpigossip.config.errors import STOPPED
from mpigossip.store import checkpoint
from tests import launch
from tests.optim.loops import NODES, PER, loss_of, network, train_on_nodes

EVERY = 4
WAIT_S = 150


def program(folder):
    """Run the loop of `train_on_nodes`, with a save every few steps, until it is stopped."""
    torch.set_num_threads(1)
    with mpigossip.world(30.0, ranks_per_node=PER) as world:
        node = world.nodes.inter_node.rank
        slot = world.nodes.local_rank
        model = network(node)
        whole = DistributedDataParallel(model, process_group=world.node_group())
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        more = {"run": folder, "flush_steps": 3, "timeout_s": world.timeout_s}
        gossip = mpigossip.Gossip(world, whole, inner, **more)
        schedule = torch.optim.lr_scheduler.StepLR(gossip, 3, 0.5)
        draw = torch.Generator().manual_seed(world.rank)
        gossip.keep(draw=draw, schedule=schedule)
        for step in range(gossip.resume(), 100_000):
            gossip.zero_grad()
            loss_of(whole, draw, node, slot, step).backward()
            gossip.step()
            schedule.step()
            if (step + 1) % EVERY == 0:
                gossip.save()
            if gossip.stopping:
                gossip.exit()
            time.sleep(0.005)


def assert_resumes_bitwise(ranks, folder):
    """Check that a resumed run has the digest of an uninterrupted run three steps later."""
    newest = checkpoint.latest(folder)
    assert newest is not None and checkpoint.verify(newest) == []
    steps = checkpoint.read_manifest(newest).step + 3
    again = ranks(NODES * PER)(train_on_nodes, folder, steps, timeout=WAIT_S)
    assert [start for start, *_ in again] == [steps - 3] * (NODES * PER)
    ranks(NODES * PER)(train_on_nodes, folder.parent / "whole", steps, timeout=WAIT_S)
    paths = [checkpoint.latest(folder.parent / name) for name in (folder.name, "whole")]
    assert checkpoint.digest(paths[0]) == checkpoint.digest(paths[1])


@pytest.mark.every
@pytest.mark.parametrize("how", ["STOP", "SIGTERM"])
def test_a_loop_of_nodes_of_ranks_stops_together(mpistart, ranks, tmp_path, how):
    run = tmp_path / "run"
    call = f"from {__name__} import program; program({str(run)!r})"
    launched = mpistart(NODES * PER, [sys.executable, "-c", call], warm=True)
    launch.until(lambda: checkpoint.latest(run), WAIT_S, "a first checkpoint")
    if how == "STOP":
        (run / "STOP").touch()
    else:
        os.kill(launched.ranks()[3], signal.SIGTERM)
    assert launched.finish(WAIT_S).returncode == STOPPED
    assert_resumes_bitwise(ranks, run)
