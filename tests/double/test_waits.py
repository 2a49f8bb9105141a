"""Waits of the host for GPUs within a step: one for the loss, one for the message, no others."""

import contextlib
from collections import Counter

import pytest
import torch

from mpigossip.cluster.ranks import SingleProcess
from mpigossip.training import assemble
from tests.double import active
from tests.double.devices import job

if active():
    from tests.double.waits import counted

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")


@contextlib.contextmanager
def trainer(devices, *settings):
    """Yield the trainer of two simulated nodes, after the steps that capture and allocate."""
    assembly = assemble.assemble(job("mlp", devices, *settings), SingleProcess(), 2)
    try:
        assembly.trainer.step()
        yield assembly.trainer
    finally:
        assembly.close()


@pytest.mark.parametrize(("devices", "slots"), [("cuda:0", 1), ("cuda:0,1", 2)])
@pytest.mark.parametrize("name", ["dsgd", "dsgt"])  # they send one and two vectors
def test_a_step_waits_for_the_loss_and_before_a_message(devices, slots, name):
    settings = [f"algorithm.name={name}", "node.cuda_graphs=never"]
    with trainer(devices, *settings) as made, counted() as waits:
        made.step()
    assert waits == Counter(work=slots, check_message=slots)  # `work` computes a gradient


@pytest.mark.parametrize("clip", [1e-4, 1e4])
def test_clipping_waits_once_for_each_device(clip, monkeypatch):
    settings = ["node.cuda_graphs=never", f"algorithm.clip_norm={clip}"]
    with trainer("cuda:0,1", *settings) as made, counted() as waits:
        made.step()
    assert waits == Counter(work=2, check_message=2, square_norms=2)


def test_the_norm_of_many_blocks_waits_once():
    from mpigossip.engine.measurements import square_norms

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, (1 << 24) + 5, generator=draw)
    on_gpu = x.to("cuda:0")
    with counted() as waits:
        norms = square_norms(on_gpu, on_gpu[0])
    assert waits == Counter(square_norms=1) and norms[0] == 0
    blocks = (x[1] - x[0].double()).split(1 << 24)
    assert norms[1] == sum(float((block * block).sum()) for block in blocks)
