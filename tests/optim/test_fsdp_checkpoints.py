"""Checkpoints of models sharded inside nodes: full in files, resumed by other numbers of ranks."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mpigossip.runs.model_export import export
from mpigossip.store import checkpoint
from tests.cases import with_world
from tests.optim.in_node import GPT, Case, batch, optimizer_of, whole, wrapped

NODES = 2
HALF = 2
STEPS = 4


@with_world(timeout_s=30)
def trained(world, folder, per, steps, ddp=False, save=False):
    """Train on nodes of ``per`` ranks; return the step resumed from and the final parameters."""
    import mpigossip

    world.group_into_nodes(per)
    model = GPT(world.nodes.inter_node.rank)
    made = model if ddp and per == 1 else wrapped(world, model, Case(ddp=ddp))
    optimizer = mpigossip.Gossip(
        world,
        made,
        optimizer_of(model, "d2"),
        "d2",
        "ring",
        algorithm_lazy=True,
        graph_lazy=True,
        run=folder,
    )
    draw = torch.Generator().manual_seed(world.rank)
    optimizer.keep(draw=draw)
    start = optimizer.resume()
    drawn = float(torch.rand((), generator=draw))
    for step in range(start, steps):
        optimizer.zero_grad()
        made(*batch(world.nodes.inter_node.rank, world.nodes.local_rank, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if save:
        optimizer.save()
    return start, drawn, whole(model).numpy()


def states(folder):
    """Return the arrays in each node's file by name."""
    path = checkpoint.latest(folder)
    found = [checkpoint.read_node(path, node) for node in range(checkpoint.read_manifest(path).n)]
    return [{"parameters": one.parameters} | one.arrays for one in found]


def off(one, other):
    """Return the largest difference relative to the largest element of an array."""
    names = {name for name in one | other if not name.startswith(("rng", "own"))}
    pairs = [(one[name].astype(float), other[name].astype(float)) for name in names]
    return max(float(abs(a - b).max() / (abs(b).max() or 1)) for a, b in pairs if b.size)


def test_a_checkpoint_is_full_and_resumes_bitwise(ranks, tmp_path):
    unbroken = ranks(4)(trained, tmp_path / "whole", 2, STEPS)
    ranks(4)(trained, tmp_path / "parts", 2, HALF)
    parts = ranks(4)(trained, tmp_path / "parts", 2, STEPS)
    for (_, _, mine), (start, _, again) in zip(unbroken, parts, strict=True):
        assert start == HALF
        assert (mine == again).all()
    assert len({drawn for _, drawn, _ in parts}) == 4, "each rank has its own generator back"
    out = tmp_path / "model.safetensors"
    export(checkpoint.latest(tmp_path / "whole"), out)
    model = GPT(9)
    missing = model.load_state_dict(load_file(out), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["head.weight"], [])
    models = [torch.from_numpy(found).double() for _, _, found in (unbroken[0], unbroken[2])]
    assert torch.equal(whole(model), (sum(models) / 2).float())


@pytest.mark.every
def test_other_numbers_of_ranks_resume_files_of_full_models(ranks, tmp_path):
    """Each node keeps its own model and optimizer; a second save at once writes the same."""
    ranks(4)(trained, tmp_path / "ddp", 2, HALF, True)
    ranks(4)(trained, tmp_path / "cut", 2, HALF)
    wanted = states(tmp_path / "cut")
    # clipping's norm of shards is rounded otherwise than that of whole gradients
    assert max(map(off, states(tmp_path / "ddp"), wanted)) < 1e-5
    for per, ddp in ((3, False), (1, True)):
        for start, *_ in ranks(NODES * per)(trained, tmp_path / "cut", per, HALF, ddp, True):
            assert start == HALF
        assert max(map(off, states(tmp_path / "cut"), wanted)) == 0, (per, ddp)
    found = ranks(2)(trained, tmp_path / "cut", 1, HALF + 1)
    assert [start for start, *_ in found] == [HALF] * 2
