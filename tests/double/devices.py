"""Trainings on devices, on simulated nodes and on ranks, for comparisons bit by bit."""

import contextlib
import os

import numpy as np
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.training import assemble
from tests.cases import with_world
from tests.double import active

STEPS = 6 if active() else 20
"""Steps of a comparison; the double is slow."""
proven: dict[tuple, tuple[bool, str]] = {}
"""Results of separate processes by devices, saved because they would not change"""
METHODS_OF_BUCKETS = ["dmsgd", "dsgt", "parallel", "diloco"]
NCCL = ["node.exchange=nccl", "log.consensus_every=3"]
"""Settings of a job whose nodes exchange by NCCL."""


def settings_of(name):
    """Return a job for each algorithm, on a graph that it allows."""
    more = {"decentlam": ["graph.name=ring"], "choco": ["graph.name=ring"]}
    more["diloco"] = ["cadence.period=3"]  # an average in few steps
    return [f"algorithm.name={name}", *more.get(name, [])]


def job(model, devices, *settings):
    """Return a job that trains a model on devices."""
    base = ["data.batch=4", "run.epochs=1", "schedule.scale=none", "schedule.lr=0.02"]
    base += [f"node.devices={devices}", "node.precision=fp32", "log.consensus_every=0"]
    return assemble.load({"model": {"name": model}}, [*base, *settings])


def trained(world, n, model, devices, settings, steps=STEPS):
    """Return the parameters of the local nodes after some steps: (rows, P) on the CPU."""
    assembly = assemble.assemble(job(model, devices, *settings), world, n)
    for _ in range(steps):
        assembly.trainer.step()
    replicas = assembly.trainer.replicas  # packed: convolutions lie otherwise on a GPU
    full = torch.stack([replicas.flat.pack(row) for row in replicas.full[-1]])
    assembly.close()
    return full


@with_world
def on_ranks(world, model, names, devices, more):
    """Train each algorithm on ranks that share the GPU."""
    return [
        trained(world, world.size, model, devices, [*settings_of(name), *more]).numpy()
        for name in names
    ]


@contextlib.contextmanager
def aware():
    """Let MPI report support of GPU memory, as for memory of the CPU."""
    from mpigossip.mixing.device import proof

    def tried(devices, timeout_s, way="windows"):
        key = (way, *devices)
        if key not in proven:
            proven[key] = original(devices, timeout_s, way)
        return proven[key]

    original = proof.try_in_subprocess
    proof.try_in_subprocess = tried
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    try:
        yield
    finally:
        proof.try_in_subprocess = original
        del os.environ["MPICH_GPU_SUPPORT_ENABLED"]


def on_aware_ranks(comm, *arguments):
    """Train on ranks whose MPI reports support of GPU memory."""
    with aware():
        return on_ranks(comm, *arguments)


def on_own(comm, model, names, slots, more):
    """Assign separate GPUs to each rank, as NCCL between ranks requires."""
    first = slots * comm.rank
    return on_ranks(comm, model, names, f"cuda:{first}-{first + slots - 1}", more)


def check_same(ranks, n, devices, slots, names, *more, train=None):
    """Check that ranks and slots on the CPU have bitwise identical parameters."""
    settings = list(more)
    window = more[0].removeprefix("node.exchange=") if more else ""
    ways = {"windows": on_aware_ranks, "messages": on_aware_ranks, "nccl": on_own}
    train = train or ways.get(window, on_ranks)
    got = ranks(n)(train, "mlp", names, devices, settings, timeout=240)
    for index, name in enumerate(names):
        full = torch.from_numpy(np.concatenate([rank[index] for rank in got]))
        cpu = [s for s in settings if not s.startswith("node.exchange")]
        reference = trained(SingleProcess(), n, "mlp", f"cpu:{slots}", [*settings_of(name), *cpu])
        assert torch.equal(full, reference), (name, settings)
