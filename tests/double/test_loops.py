"""Training without CuPy on the double: custom loops, FSDP2, jobs, checkpoints, resume."""

import contextlib
import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpigossip.cluster.world import SingleProcess
from mpigossip.store.log import read
from tests.cases import every
from tests.double import active
from tests.double.devices import NCCL, aware, check_same
from tests.optim.in_node import Case, reference_parameters
from tests.optim.in_node import train_cases as in_nodes
from tests.optim.loops import change_arrays, make_steps, set_entry

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
JOB = Path(__file__).parents[2] / "jobs/digits.toml"
WAYS = ["host", "messages", "nccl"]
"""All routes but windows, whose memory comes from CuPy."""


@contextlib.contextmanager
def without_cupy():
    """Let the import of CuPy fail, as on a machine without it."""
    from mpigossip.mixing.kernels import gpu_sum

    gpu_sum.usable.cache_clear()
    before = sys.modules["cupy"]
    sys.modules["cupy"] = None
    try:
        with aware():
            yield
    finally:
        sys.modules["cupy"] = before
        gpu_sum.usable.cache_clear()


def loop(world, device, folder, steps, **options):
    """Return a loop's parameters after some steps, from the present state of its run directory."""
    import mpigossip

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = mpigossip.Gossip(
        world, model, inner, graph="ring", run=folder, steps=steps, timeout_s=30, **options
    )
    for step in range(optimizer.resume(), steps):
        draw = torch.Generator().manual_seed(10 * step + world.rank)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=draw).to(device)).square().mean().backward()
        optimizer.step()
        if step == 2:
            optimizer.save()
    optimizer.close()
    return torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])


def forgetful(comm, device, folder):
    """Return the notes of a rank that trains on this device."""
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.config import readable

    readable.noted.clear()
    with without_cupy(), MPIWorld(comm, timeout_s=60) as world:
        loop(world, device, folder, 2, exchange="host")
    return [text for text in readable.noted if "world.device()" in text]


def test_a_loop_that_forgets_the_device_of_its_world_is_told(ranks, tmp_path):
    notes, _ = ranks(2)(forgetful, "cuda:0", tmp_path, timeout=120)
    assert len(notes) == 1 and "2 ranks of " in notes[0] and "train on cuda:0" in notes[0]


def loops(comm, kept, way, options):
    """Run without a stop on the CPU; on a GPU, stop after 3 steps and resume."""
    from mpigossip.cluster.mpi_world import MPIWorld

    gpu = f"cuda:{comm.rank}"
    runs = [("cpu", 6, {}), (gpu, 3, {"exchange": way}), (gpu, 6, {"exchange": way})]
    models = []
    with without_cupy():
        for device, steps, more in runs:
            with MPIWorld(comm, timeout_s=60) as world:
                models.append(loop(world, device, f"{kept}/{device[:3]}", steps, **options, **more))
    return torch.equal(models[0], models[2]) and not torch.equal(models[0], models[1])


@pytest.mark.parametrize(
    ("way", "style"),
    [
        ("host", "atc"),
        ("messages", "awc"),
        ("nccl", "awc"),
        every("host", "awc"),
        every("messages", "atc"),
        every("nccl", "atc"),
    ],
)
def test_a_loop_saved_and_resumed_has_the_cpus_bits(ranks, tmp_path, way, style):
    options = {"algorithm": "dsgd", "style": style}
    assert ranks(3)(loops, str(tmp_path), way, options, timeout=120) == [True] * 3


def test_a_state_may_lie_in_the_gpus_memory():
    """torch.load(map_location=device) returns such a state."""

    def moved(array):
        return array.to("cuda:0")

    with SingleProcess() as world:
        optimizer = make_steps(world)
        state = copy.deepcopy(optimizer.state_dict())
        before = optimizer.vector.x[0].clone()
        for change in (set_entry("model", moved), change_arrays(moved)):
            change(state)
        optimizer.load_state_dict(state)
        optimizer.consensus_distance()  # the package checks for it by this function
        assert torch.equal(optimizer.vector.x[0], before)


def test_windows_are_refused_without_cupy_and_auto_takes_another_way(ranks, tmp_path):
    results = ranks(2)(refused, timeout=120)
    for said, routes in results:
        assert "CuPy" in said and "pip install 'mpigossip[gpu]'" in said
        assert not routes.startswith("windows") and "CuPy" in routes
        assert re.search(r"messages [\d.e-]+ ms", routes) and "nccl" in routes


def refused(comm):
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import MessageLayout
    from mpigossip.mixing.device.memory import TransportUnavailable
    from mpigossip.mixing.synchronous import Synchronous

    layout = MessageLayout((512,), devices=(f"cuda:{comm.rank}",))
    ring = graph("ring", comm.size)
    with without_cupy(), MPIWorld(comm) as world:
        with pytest.raises(TransportUnavailable) as said:
            Synchronous(ring, layout, world, exchange="windows", timeout_s=20)
        mixer = Synchronous(ring, layout, world, timeout_s=20)
        routes = mixer.routes[1 - comm.rank]
        mixer.close()
    return str(said.value), routes


def job_without_cupy(comm, *arguments):
    from tests.double.devices import on_own

    with without_cupy():
        return on_own(comm, *arguments)


@pytest.mark.parametrize("way", WAYS)
def test_a_job_has_the_cpus_bits(ranks, way):
    settings = [f"node.exchange={way}", *NCCL[1:]]
    check_same(ranks, 2, 2, 2, ["dmsgd", "sgp"], *settings, train=job_without_cupy)


def test_the_log_says_which_way_was_taken(pooled, tmp_path):
    words = ["node.exchange=host", "node.devices=cuda:0", "run.steps=2", "run.output=run"]
    done = pooled(2, "train", JOB, *words)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "run/log.h5").environment["exchange"].startswith("host")


def fsdp(comm, cases, per):
    with without_cupy():
        return in_nodes(comm, cases, per)


ON_GPUS = {"device": "cuda", "copies": True}  # the double's class isn't torch.Tensor
SHARDED = [
    Case("dsgd", (("exchange", "host"),), steps=2, **ON_GPUS),
    Case("dsgd", (("style", "awc"), ("exchange", "nccl")), steps=3, **ON_GPUS),
    Case("gossip-pga", (("period", 2), ("exchange", "messages")), steps=4, **ON_GPUS),
]


@pytest.mark.parametrize(
    "case", [*SHARDED[:2], every(SHARDED[2])], ids=["host", "nccl", "messages"]
)
def test_fsdp2_inside_nodes_has_the_bits_of_full_models(ranks, one_thread, case):
    with sdpa_kernel(SDPBackend.MATH):  # as torch chooses on the double
        wanted = reference_parameters(2, 2, case)
    for node, (results,) in ranks(4)(fsdp, [case], 2, timeout=120):
        assert torch.equal(torch.from_numpy(results), wanted[node])


@pytest.mark.every
def test_a_job_stopped_and_resumed_has_the_simulators_digest(mpirun, tmp_path):
    words = ["model.name=mlp", "data.batch=4", "run.epochs=1", "log.consensus_every=0"]
    words += ["node.precision=fp32"]  # "auto" is bf16 there
    words += ["schedule.name=constant"]  # others depend on the number of steps
    gpus = ["node.devices=cuda:0,1", "node.timeout_s=20", f"run.output={tmp_path / 'gpu'}"]
    env = {"MPIGOSSIP_DOUBLE_NO_CUPY": "1", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    main = [sys.executable, "-m", "mpigossip"]
    job = str(Path("jobs/digits.toml").resolve())

    def digest(n, *command):
        done = mpirun(n, [*main, *command], timeout=150, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("digest")[2].split()[0], done.stdout

    wanted, _ = digest(
        1,
        "simulate",
        job,
        *words,
        "--nodes",
        "2",
        "node.devices=cpu:2",
        "run.steps=6",
        f"run.output={tmp_path / 'cpu'}",
    )
    digest(2, "train", job, *words, *gpus, "run.steps=3")
    result, said = digest(2, "resume", str(tmp_path / "gpu"), "run.steps=6")
    assert result == wanted and "CuPy" in said
