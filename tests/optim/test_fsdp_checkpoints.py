"""Checkpoints of models that FSDP2 shards inside nodes.

The files contain full models, so that another number of ranks can resume from them.
"""

import pytest
import torch
from safetensors.torch import load_file

from mpigossip.runs.model_export import export
from mpigossip.store import checkpoint
from tests.optim.in_node import GPT, whole
from tests.optim.loops import train_sharded

NODES = 2
HALF = 2
STEPS = 4


def arrays_by_node(folder):
    """Return, for each node, the arrays in the newest checkpoint by name."""
    path = checkpoint.latest(folder)
    node_states = [
        checkpoint.read_node(path, node) for node in range(checkpoint.read_manifest(path).n)
    ]
    return [{"parameters": one.parameters} | one.arrays for one in node_states]


def relative_difference(one, other):
    """Return the largest difference between two states, relative to the largest element."""
    names = {name for name in one | other if not name.startswith(("rng", "own"))}
    pairs = [(one[name].astype(float), other[name].astype(float)) for name in names]
    return max(float(abs(a - b).max() / (abs(b).max() or 1)) for a, b in pairs if b.size)


def test_a_checkpoint_is_full_and_resumes_bitwise(ranks, tmp_path):
    unbroken = ranks(4)(train_sharded, tmp_path / "whole", 2, STEPS)
    ranks(4)(train_sharded, tmp_path / "parts", 2, HALF)
    parts = ranks(4)(train_sharded, tmp_path / "parts", 2, STEPS)
    for (_, _, parameters), (start, _, again) in zip(unbroken, parts, strict=True):
        assert start == HALF
        assert (parameters == again).all()
    assert len({drawn for _, drawn, _ in parts}) == 4, "each rank has its own generator back"
    out = tmp_path / "model.safetensors"
    export(checkpoint.latest(tmp_path / "whole"), out)
    model = GPT(9)
    missing = model.load_state_dict(load_file(out), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["head.weight"], [])
    models = [torch.from_numpy(result).double() for _, _, result in (unbroken[0], unbroken[2])]
    assert torch.equal(whole(model), (sum(models) / 2).float())


@pytest.mark.every
def test_other_numbers_of_ranks_resume_files_of_full_models(ranks, tmp_path):
    """Each node keeps its own model and optimizer; a second save at once writes the same."""
    ranks(4)(train_sharded, tmp_path / "ddp", 2, HALF, True)
    ranks(4)(train_sharded, tmp_path / "cut", 2, HALF)
    wanted = arrays_by_node(tmp_path / "cut")
    # Clipping computes the norm from shards, which is rounded differently.
    assert max(map(relative_difference, arrays_by_node(tmp_path / "ddp"), wanted)) < 1e-5
    for per, ddp in ((3, False), (1, True)):
        for start, *_ in ranks(NODES * per)(train_sharded, tmp_path / "cut", per, HALF, ddp, True):
            assert start == HALF
        assert max(map(relative_difference, arrays_by_node(tmp_path / "cut"), wanted)) == 0, (
            per,
            ddp,
        )
    results = ranks(2)(train_sharded, tmp_path / "cut", 1, HALF + 1)
    assert [start for start, *_ in results] == [HALF] * 2
