"""Failures of NCCL between nodes: an error before the deadline, or another route."""

import pytest

from tests.double import active
from tests.double.failures import failing

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")


def by_nccl(comm, what, limit_s, device, window):
    """Return routes, or the error that ends a round by NCCL, if these calls fail; and seconds."""
    import time

    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.config.errors import Failure
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.device.memory import TransportUnavailable
    from mpigossip.mixing.synchronous import Synchronous

    world = MPIWorld(comm)
    began = time.perf_counter()
    layout = MessageLayout((512,), devices=(device.format(rank=comm.rank),))
    ways = {"same_host": "put", "exchange": window, "timeout_s": limit_s}
    opening, then = (what, "") if "initRank" in what or window == "auto" else ("", what)
    try:
        with failing(opening):
            mixer = Synchronous(graph("ring", comm.size), layout, world, **ways)
    except TransportUnavailable as error:
        world.close()
        return str(error), time.perf_counter() - began
    with failing(then):
        try:
            mixer.outbox(0)[0][0].fill_(1.0)
            mixer.start(ExchangeKind.GOSSIP, 0)
            mixer.finish()
        except Failure as error:
            mixer._transport._broken = True
            return str(error), time.perf_counter() - began
    said = str(mixer.routes)
    mixer.close()
    world.close()
    return said, time.perf_counter() - began


@pytest.mark.parametrize(
    "what, named",
    [
        (
            "hang",
            [
                "round 0",
                "rank 1",
                "waited 3 s",
                "NCCL_DEBUG",
            ],
        ),
        ("async", ["NCCL send", "network error", "NCCL_DEBUG"]),
    ],
)
def test_a_failure_of_nccl_between_nodes_is_named_in_time(what, named):
    from tests.rankpool import Ranks

    pools = Ranks()  # a separate pool, with which the waiting rank is ended
    try:
        (said, seconds), _ = pools(2)(by_nccl, what, 3, "cuda:{rank}", "nccl", timeout=60)
    finally:
        pools.close()
    assert all(text in said for text in named), said
    assert seconds < 30


@pytest.mark.parametrize(
    "what, device, named",
    [
        ("initRank", "cuda:{rank}", "unhandled system error"),
        ("", "cuda:0", "ranks 0 and 1 share a GPU"),
        ("hang", "cuda:{rank}", "round 0: NCCL has not"),
    ],
)
def test_nccl_that_cannot_be_had_is_refused_or_left(ranks, what, device, named):
    for window in ("auto", "nccl")[: 1 if what == "hang" else 2]:  # by name, it fails in training
        limit_s = 3 if what == "hang" else 20
        for said, _ in ranks(2)(by_nccl, what, limit_s, device, window, timeout=120):
            assert named in said, said
            if window == "auto":
                assert "no support for GPU memory" in said
            else:
                assert 'node.exchange = "nccl"' in said


@pytest.mark.parametrize(("slots", "rows"), [(2, 1), (4, 2)])
def test_a_sum_in_buckets_has_the_cpus_bits(slots, rows, monkeypatch):
    """The shard has three whole buckets and a shorter one."""
    import torch

    from mpigossip.cluster.world import SingleProcess
    from mpigossip.groups import nccl_inside_node
    from mpigossip.groups.threads import ThreadGroup

    monkeypatch.setattr(nccl_inside_node, "SUM_BUCKET", slots * 512)
    width = 3 * 512 + 100
    draw = torch.Generator().manual_seed(2)
    given = [torch.randn(rows, slots * width, generator=draw) for _ in range(slots)]
    threads = ThreadGroup(slots)
    on_cpu = threads.zeros(rows, slots * width)
    for array, values in zip(on_cpu, given, strict=True):
        array.copy_(values)
    expected = [shard.clone() for shard in threads.reduce_scatter_mean(on_cpu)]
    threads.close()
    devices = tuple(f"cuda:{k}" for k in range(slots))
    group = nccl_inside_node.TorchGroup(
        ThreadGroup(slots, devices=devices), SingleProcess(), timeout_s=30
    )
    on_gpu = [values.to(device) for values, device in zip(given, devices, strict=True)]
    shards = group.reduce_scatter_mean(on_gpu)
    for shard, values in zip(shards, expected, strict=True):
        assert torch.equal(shard.cpu(), values)
    assert {memory.numel() for memory in group._scratch} == {2 * slots * 512}
    group.close()
