"""Weights in channels-last format: model and files do not depend on the order in memory."""

import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.vector import flatten
from mpigossip.training import assemble
from mpigossip.training.precision import arranged
from tests.cases import on_each

LAST = torch.channels_last


def trained(setting, *more, model="lenet", steps=4):
    settings = ["data.batch=4", "schedule.scale=none", f"node.channels_last={setting}", *more]
    job = assemble.load({"model": {"name": model}}, settings)
    made = assemble.assemble(job, SingleProcess(), 2)
    for _ in range(steps):
        made.trainer.step()
    flat = made.trainer.replicas.flat
    rows = made.trainer.replicas.full[0]
    packed = torch.stack([flat.pack(row) for row in rows])
    module = made.trainer.replicas.modules[0][0]
    made.close()
    return packed, module


def convolution(module):
    return [part for part in module.modules() if isinstance(part, torch.nn.Conv2d)][-1]


@on_each("more", [(), ("node.vmap=true",), ("node.devices=cpu:2",)])
def test_training_is_the_same_within_rounding_and_packs_in_the_same_order(more):
    plain, module = trained("never", *more)
    assert convolution(module).weight.is_contiguous()
    last, module = trained("always", *more)
    weight = convolution(module).weight
    assert weight.is_contiguous(memory_format=LAST) and not weight.is_contiguous()
    assert weight.grad is None or weight.grad.stride() == weight.stride()
    assert float((last - plain).norm() / plain.norm()) < 1e-5


def test_auto_changes_nothing_on_cpus():
    assert torch.equal(trained("auto")[0], trained("never")[0])


def test_a_vector_is_packed_by_index_and_unpacked_into_any_order():
    plain = torch.nn.Conv2d(3, 8, 5)
    last = torch.nn.Conv2d(3, 8, 5).to(memory_format=LAST)
    packed = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    flat = flatten(last)
    row = torch.empty(flat.size)
    flat.unpack(packed, row)
    views = dict(zip(flat.names, flat.views(row), strict=True))
    assert views["weight"].stride() == last.weight.stride()
    assert torch.equal(views["weight"], plain.weight)
    assert torch.equal(flat.pack(row), packed)
    assert not torch.equal(row[: packed.numel()], packed)


@pytest.mark.parametrize(
    "setting, device, hip, last",
    [
        ("auto", "cuda:0", None, True),
        ("auto", "cuda:0", "6.4", False),
        ("auto", "cpu", None, False),
        ("never", "cuda:0", None, False),
        ("always", "cpu", None, True),
    ],
)
def test_models_get_channels_last_on_nvidia_gpus(monkeypatch, setting, device, hip, last):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    made = arranged(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), setting, device)
    assert made[0].weight.is_contiguous(memory_format=LAST) == last
    assert torch.backends.cudnn.benchmark == (last and device != "cpu")


def test_models_without_convolutions_are_unchanged(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    arranged(torch.nn.Linear(3, 3), "always", "cuda:0")
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("setting", "eager", "hip", "expected"),
    [
        ("auto", False, None, "auto"),
        ("auto", False, "7.1", "never"),
        ("always", False, "7.1", "always"),
        ("always", True, None, "never"),
        ("never", False, None, "never"),
    ],
)
def test_amd_gpus_capture_no_graphs_unless_the_job_asks(monkeypatch, setting, eager, hip, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert assemble.resolve_cuda_graphs(setting, eager) == expected
