"""Tests of the device that a rank uses, and of its context before MPI starts, on simulated GPUs."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from mpigossip.cluster import local_devices, process
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.optim.arguments import report_shared_device
from tests.cases import naming


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that torch sees four GPUs; return the list of calls that change the device."""
    calls = []
    initialized = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: bool(initialized))
    monkeypatch.setattr(cuda, "device_count", lambda: 4)
    monkeypatch.setattr(cuda, "set_device", lambda device: calls.append(("device", str(device))))
    monkeypatch.setattr(cuda, "synchronize", lambda device: calls.append(("context", device)))
    monkeypatch.setattr(local_devices, "_on_host", lambda: 4)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    for names in local_devices.LOCAL:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name in local_devices.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(calls=calls, initialized=initialized)


def as_local_rank(monkeypatch, rank, ranks):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))


@pytest.mark.parametrize(
    ("rank", "ranks", "devices", "expected"),
    [
        (2, 4, "auto", "cuda:2"),
        (1, 2, "auto", "cuda:2"),
        (5, 8, "auto", "cuda:1"),
        (1, 4, "gpu:1", "cuda:1"),
        (0, 1, "cuda:3", "cuda:3"),
    ],
)
def test_the_context_exists_before_mpi_starts(gpus, monkeypatch, rank, ranks, devices, expected):
    as_local_rank(monkeypatch, rank, ranks)
    monkeypatch.setattr(process, "_devices", devices)
    monkeypatch.setattr(process, "_start", None)
    start = MPI.Init_thread
    monkeypatch.setattr(MPI, "Init_thread", lambda level: gpus.calls.append("MPI"))
    process.start_mpi()
    assert gpus.calls == [("device", expected), ("context", expected), "MPI"]
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert start is not MPI.Init_thread


def test_a_world_keeps_the_devices_of_its_job(monkeypatch):
    """`mpigossip train` prepares the start of MPI with its job, then the world does it again."""
    monkeypatch.setattr(process, "_devices", "auto")
    process.before_mpi(None, 30.0, "cuda:2")
    process.before_mpi(timeout_s=30.0)
    assert process._devices == "cuda:2"


@pytest.mark.parametrize("devices", ["cpu:2", "cuda:7"])
def test_cpus_and_invalid_devices_create_no_context(gpus, devices):
    assert local_devices.make_current_before_mpi(devices) == ""
    assert gpus.calls == []


def test_the_device_that_a_program_has_chosen_stays(gpus):
    gpus.initialized.append(True)
    assert local_devices.make_current_before_mpi() == ""
    assert gpus.calls == []


@pytest.mark.parametrize(
    ("hosts", "rank", "expected"),
    [
        ("aaaa", 3, "cuda:3"),
        ("abab", 2, "cuda:2"),  # cyclic placement: the second of two ranks on host a
        ("aabb", 3, "cuda:2"),
        ("a", 0, "cuda:0"),
        ("aaaaaaaa", 6, "cuda:2"),
    ],
)
def test_the_ranks_of_a_host_divide_its_gpus(gpus, hosts, rank, expected):
    world = World()
    world.hosts = tuple(hosts)
    world.rank = rank
    assert str(world.device()) == expected
    assert gpus.calls == [("device", expected)]


def test_a_launcher_that_assigns_gpus_is_followed(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    world = World()
    world.hosts = tuple("aaaa")
    world.rank = 3
    assert str(world.device()) == "cuda:0"


@pytest.fixture
def one_gpu_each(monkeypatch):
    """Let torch see one GPU, on a host whose device files show one, without any variable."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(local_devices, "_on_host", lambda: 1)
    monkeypatch.setattr(local_devices, "_ranks_have_own_gpus", False)
    for name in local_devices.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    return {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("hosts", "gpus", "ranks_per_node"),
    [
        ("aaaa", "0123", 4),  # a container shows each rank one device file
        ("aabb", "0101", 4),  # identifiers are compared within a host
        ("aaaa", "0000", 1),  # four ranks share one GPU
        ("aabb", "0100", 1),  # a host whose ranks share a GPU: all ranks decide alike
        ("aaaa", ["0", "1", "", "3"], 1),  # a rank without GPUs
        ("abcd", "0000", 1),
    ],
)
def test_ranks_that_see_different_gpus_of_a_host_are_one_node(
    one_gpu_each, hosts, gpus, ranks_per_node
):
    local_devices.compare_gpus(hosts, [[*gpu] for gpu in gpus])
    resolved = local_devices.resolve_auto("auto", "auto", one_gpu_each)
    assert resolved == ("gpu:1", ranks_per_node)
    assert local_devices.first_device(2, 4, one_gpu_each) == "cuda:0"


def test_without_gpus_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(World().device()) == "cpu"


def test_intel_gpus_are_rejected_by_name_unless_cpus_are_requested(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    xpu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 6)
    monkeypatch.setattr(torch, "xpu", xpu)
    with pytest.raises(JobError, match=naming("node.devices", "6", "XPU", "cpu:1")):
        local_devices.resolve_auto("auto", "auto", {})
    with pytest.raises(JobError, match=naming("XPU")):
        World().device()
    assert local_devices.resolve_auto("cpu:1", "auto", {}) == ("cpu:1", 1)


def test_a_mac_trains_on_the_cpu_with_a_note(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert local_devices.resolve_auto("auto", "auto", {}) == ("cpu:1", 1)
    assert "MPS" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["xpu:0", "mps"])
def test_parameters_on_other_devices_are_rejected(name):
    with pytest.raises(JobError, match=naming(name)):
        local_devices.check_device_type(torch.device(name))
    local_devices.check_device_type(torch.device("cpu"))


@pytest.mark.parametrize(
    ("hosts", "devices", "reported"),
    [
        ("aabb", ["cuda:0"] * 4, "2 ranks of a train on cuda:0.*2 GPUs.*world.device()"),
        ("abab", ["cuda:0", "cuda:0", "cuda:1", "cuda:0"], "2 ranks of b train on cuda:0"),
        ("aabb", ["cuda:0", "cuda:1"] * 2, ""),
        ("aaaaaaaa", [f"cuda:{k // 2}" for k in range(8)], ""),
        ("aaaa", ["cpu"] * 4, ""),
        ("abcd", ["cuda:0"] * 4, ""),
    ],
)
def test_ranks_that_forget_the_device_of_their_world_are_reported(
    gpus, monkeypatch, hosts, devices, reported
):
    notes = []
    monkeypatch.setattr("mpigossip.optim.arguments.print_note_once", notes.append)
    worlds = []
    for rank in range(len(hosts)):
        world = World()
        world.hosts = tuple(hosts)
        world.rank = rank
        worlds.append(world)
    pairs = []
    for world, device in zip(worlds, devices, strict=True):
        monkeypatch.setattr(world, "gather", pairs.append)
        report_shared_device(world, device)
    monkeypatch.setattr(worlds[0], "gather", lambda pair: pairs)
    report_shared_device(worlds[0], devices[0])
    assert len(notes) == bool(reported)
    if reported:
        assert re.match(reported.replace("()", r"\(\)"), notes[0])
