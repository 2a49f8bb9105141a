"""Slots of the ranks of a node: differences are reported before ranks wait for each other."""

import re
from types import SimpleNamespace

import pytest
import torch

from mpigossip.config import JobError
from mpigossip.training import rules, shape
from mpigossip.training.assemble import load
from tests.cases import naming


@pytest.mark.parametrize(
    "devices, other, message",
    [
        ("auto", ("cuda:0",), ("rank 1 on b", "GPU", "rank 0 on a")),
        ("cpu:2", ("cpu",), ("rank 0", "2 slots", "rank 1")),
    ],
)
def test_ranks_need_the_same_number_and_kind_of_slots(monkeypatch, devices, other, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    job = load({"node": {"devices": devices, "ranks_per_node": 2}})
    world = SimpleNamespace(
        nodes=SimpleNamespace(per_node=2), hosts=("a", "b"), broadcast=lambda value: value
    )
    world.gather = lambda local_slots: [local_slots, local_slots]
    shape.check_alike(job, world)
    world.gather = lambda local_slots: [local_slots, other]
    with pytest.raises(JobError, match=naming(message)):
        shape.check_alike(job, world)


def test_a_setting_that_ranks_do_not_support_is_reported_once():
    words = {"same_host": "put"}
    world = SimpleNamespace(comm=object(), nodes=SimpleNamespace(per_node=1))
    problems = rules.launch_problems(load({"node": words, "faults": {"slow_nodes": 2}}), world)
    assert len(problems) == 1, problems
    with pytest.raises(JobError, match=naming('node.mixer = "product"', "synchronous")):
        load({"node": {"mixer": "product"}})


def test_ranks_with_the_same_gpu_are_reported_before_nccl_starts(monkeypatch):
    """Each rank sees one GPU, as cuda:0; the third rank has the same GPU as the first."""
    job = load({"node": {"devices": "cuda:0", "ranks_per_node": 3}})
    gpus = ["GPU-1", "GPU-2", "GPU-1"]
    world = SimpleNamespace(
        nodes=SimpleNamespace(per_node=3), hosts=("a",) * 3, broadcast=lambda value: value, rank=0
    )
    world.gather = lambda local_slots: (
        [local_slots] * 3 if local_slots == ("cuda:0",) else [[gpu] for gpu in gpus]
    )
    monkeypatch.setattr(shape, "gpu_of", lambda device: "GPU-1")
    with pytest.raises(JobError) as caught:
        shape.check_alike(job, world)
    (text,) = caught.value.messages
    assert re.search(naming("ranks 0 and 2", "same GPU", "GPU-1"), text) and "\n" not in text
    gpus[2] = "GPU-3"
    shape.check_alike(job, world)
    world.hosts = ("a", "a", "b")
    gpus[2] = "GPU-1"
    shape.check_alike(job, world)
    gpus[:] = ["", "", ""]  # a version of torch that does not identify GPUs
    shape.check_alike(job, world)
