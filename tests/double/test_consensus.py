"""Measurement of the consensus distance on the double: on the device, or by locked memory."""

import os

import pytest
import torch

from tests.double import active
from tests.double.devices import aware

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
WAYS = ["host", "windows", "messages", "nccl"]
WIDTH = 3 * 4096 + 512
BLOCK = 4096
"""Elements that are summed at once here, so that the vector has several blocks."""


def values(n, slots):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(slots, n, WIDTH, generator=draw)


def measured(comm, way, slots):
    """Measure on devices while an exchange is in flight.

    Return the distance, whether the exchange has the expected result, and the copies between host
    and devices.
    """
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.engine import measurements
    from mpigossip.graphs import graph
    from mpigossip.groups.threads import ThreadGroup
    from mpigossip.mixing import exact_average
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.device import buffers
    from mpigossip.mixing.synchronous import Synchronous
    from tests.double.waits import host_copies

    saved = buffers.SHARE, exact_average.STAGING, measurements._block
    buffers.SHARE, exact_average.STAGING = 8192, 1000
    measurements._block = lambda device: BLOCK
    # NCCL needs separate GPUs for each rank
    os.environ["MPIGOSSIP_DOUBLE_HOST"] = f"{comm.rank}-" if way == "nccl" else ""
    names = tuple(f"cuda:{k}" for k in range(slots))
    try:
        with aware(), MPIWorld(comm, timeout_s=60) as world:
            layout = MessageLayout((WIDTH,) * slots, devices=names)
            mixer = Synchronous(graph("ring", comm.size), layout, world, exchange=way, timeout_s=60)
            group = ThreadGroup(slots, devices=names)
            own = values(comm.size, slots)[:, comm.rank : comm.rank + 1]
            x = [array.to(name) for array, name in zip(own, names, strict=True)]
            for arrays in mixer.outbox(0):
                arrays[0].fill_(float(comm.rank))
            mixer.start(ExchangeKind.GOSSIP, 0)
            with host_copies() as copies:
                distance = measurements.consensus_distance(x, mixer, group)
            mixed = [float(arrays[0].mean().cpu()) for arrays in mixer.finish()[1]]
            group.close()
            mixer.close()
    finally:
        buffers.SHARE, exact_average.STAGING, measurements._block = saved
        del os.environ["MPIGOSSIP_DOUBLE_HOST"]
    large = [copy for copy in copies if copy[0] > 1024]
    return distance, mixed, large


def expected_distance(n, slots, monkeypatch):
    from mpigossip.engine import measurements
    from mpigossip.graphs import graph
    from mpigossip.groups.threads import ThreadGroup
    from mpigossip.mixing.base import MessageLayout
    from mpigossip.mixing.simulated import Simulated

    monkeypatch.setattr(measurements, "_block", lambda device: BLOCK)
    mixer = Simulated(graph("ring", n), MessageLayout((WIDTH,) * slots))
    group = ThreadGroup(slots)
    distance = measurements.consensus_distance(list(values(n, slots)), mixer, group)
    group.close()
    return distance


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_distance_is_measured_without_pageable_memory(ranks, way, slots, monkeypatch):
    n = 3
    expected = expected_distance(n, slots, monkeypatch)
    for distance, mixed, copies in ranks(n)(measured, way, slots, timeout=150):
        assert distance == expected > 0
        assert mixed == [1.0] * slots  # (0 + 1 + 2) / 3
        assert all(locked for _, locked in copies)
        assert bool(copies) == (way == "host")
