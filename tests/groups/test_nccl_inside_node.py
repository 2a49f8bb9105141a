"""Slots as ranks of a torch process group over gloo: identical to threads and shared memory."""

import re
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from mpigossip.cluster.deadline import WaitTimeoutError, sharp_timers
from mpigossip.cluster.world import SingleProcess
from mpigossip.groups import nccl_inside_node, threads
from mpigossip.groups.base import GroupError, Single
from mpigossip.groups.nccl_inside_node import TorchGroup
from mpigossip.groups.threads import ThreadGroup
from tests.cases import naming, with_world
from tests.groups.comparison import RIGHT, count_differences, draw_arrays, host_group

pytestmark = pytest.mark.both


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_threads_have_the_bits_of_threads(slots, one_thread):
    group = TorchGroup(host_group(slots), SingleProcess(), timeout_s=20)
    for size, rows in ((slots * 513, 1), (slots * 64, 3)):
        assert count_differences(group, size, rows) == RIGHT
    group.close()


@pytest.mark.parametrize(("slots", "rows"), [(2, 1), (4, 3)])
def test_a_sum_takes_two_buckets_of_memory(slots, rows, one_thread, monkeypatch):
    """The shard has two whole buckets and a shorter one."""
    monkeypatch.setattr(nccl_inside_node, "SUM_BUCKET", slots * 512)
    group = TorchGroup(host_group(slots), SingleProcess(), timeout_s=20)
    width = 2 * 512 + 100
    assert count_differences(group, slots * width, rows) == RIGHT
    assert [memory.numel() for memory in group._scratch] == [2 * slots * 512] * slots
    group.close()


@with_world(per="host", timeout_s=20)
def across(world, own):
    from mpigossip.groups.ranks import RankGroup

    node = world.nodes.intra_node
    group = TorchGroup(RankGroup(host_group(own), node), node, timeout_s=20)
    differences = count_differences(group, group.slots * 513, 1)
    group.close()
    return differences


@pytest.mark.parametrize("n, own", [(2, 1), (2, 2), (4, 1)])
def test_processes_have_the_bits_of_threads(ranks, n, own):
    assert ranks(n)(across, own) == [RIGHT] * n


@with_world(per="host", timeout_s=20)
def in_ranges(world, ranges):
    """Average and gather ranges; return the numbers of results that differ from threads."""
    from mpigossip.groups.ranks import RankGroup

    node = world.nodes.intra_node
    group = TorchGroup(RankGroup(Single(), node), node, timeout_s=20)
    slots, slot = group.slots, group.local_slots[0]
    size = ranges[-1].stop
    reference = ThreadGroup(slots)
    given = draw_arrays(slots, 2, size, 0)
    grads = [given[slot].clone()]
    expected = reference.reduce_scatter_mean(given)
    group.reserve(2, size)
    for columns in reversed(ranges):
        group.start_mean(grads, columns)
    shards = group.finish_means(grads)
    wrong = [not torch.equal(shards[0], expected[slot])]
    full = [torch.zeros(2, size)]
    full[0].chunk(slots, dim=1)[slot].copy_(shards[0])
    for works in group.start_gather(full, ranges):
        group.finish_gather(works)
    wrong.append(not torch.equal(full[0], torch.cat(expected, dim=1)))
    reference.close()
    group.close()
    return wrong


@pytest.mark.parametrize("n, ends", [(2, [4, 10, 30]), (3, [12, 18]), (4, [8, 16, 40, 80])])
def test_ranges_that_cross_shards_have_the_bits_of_threads(ranks, n, ends):
    ranges = [slice(*pair) for pair in pairwise([0, *ends])]
    assert ranks(n)(in_ranges, ranges) == [[False, False]] * n


def test_sums_in_the_librarys_order_are_close_to_those_of_slots(one_thread):
    group = TorchGroup(ThreadGroup(4), SingleProcess(), "nccl", 20)
    given = draw_arrays(4, 2, 4096, 0)
    mean = sum(given) / 4
    array = [one.clone() for one in given]
    parts = group.reduce_scatter_mean(array)
    assert torch.allclose(torch.cat(parts, dim=1), mean, rtol=1e-6, atol=1e-6)
    group.all_gather(parts, array)
    assert all(torch.equal(one, array[0]) for one in array)
    group.close()


def test_equal_shards_are_needed():
    group = TorchGroup(ThreadGroup(3), SingleProcess(), timeout_s=20)
    with pytest.raises(GroupError, match=naming("8", "3")):
        group.reduce_scatter_mean([torch.ones(1, 8)] * 3)
    group.close()


def test_a_missing_slot_is_named_in_time(monkeypatch):
    monkeypatch.setattr(threads, "GRACE_S", 0.2)
    # torch waits this long if it loses the call that the other two have begun
    group = TorchGroup(ThreadGroup(3), SingleProcess(), timeout_s=2)
    stop = threading.Event()
    groups = group._groups
    group._timeout_s = 0.5
    late = SimpleNamespace(recv=lambda *_: stop.wait())
    group._groups = [groups[0], late, groups[2]]
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=naming("reduce-scatter", "slot 1")):
        group.reduce_scatter_mean([torch.ones(1, 6)] * 3)
    assert time.monotonic() - began < 10
    stop.set()
    group._groups = []
    group._host.close()


@with_world(per="host", timeout_s=20)
def one_is_late(world):
    from mpigossip.groups.ranks import RankGroup

    node = world.nodes.intra_node
    said = ""
    group = TorchGroup(RankGroup(Single(), node), node, timeout_s=20)
    full = group.zeros(1, 8)
    node.timeout_s = 0.3
    if world.rank == 0:
        try:
            group.reduce_scatter_mean(full)
        except WaitTimeoutError as error:
            said = str(error)
    world.comm.Barrier()
    node.timeout_s = 20
    if world.rank:
        group._barrier("reduce-scatter")
    group.close()
    return said


def test_a_missing_process_is_named(ranks):
    said, _ = ranks(2)(one_is_late)
    assert re.search(naming("reduce-scatter", "rank 1"), said)


def test_errors_of_the_library_name_devices_call_and_remedy():
    group = TorchGroup(ThreadGroup(2), SingleProcess(), timeout_s=20)

    def fail(*_):
        raise RuntimeError("NCCL error: unhandled system error\nand advice of many lines")

    group._groups = [SimpleNamespace(broadcast=fail)] * 2
    with pytest.raises(
        GroupError, match=naming("broadcast", "cpu, cpu", "NCCL error", "NCCL_DEBUG=INFO")
    ):
        group.broadcast([torch.ones(1, 8)] * 2)
    group.close()


def test_a_rank_only_shortens_the_switch_interval():
    """With Python's 5 ms, a round takes 2 to 5 times as long if another thread computes."""
    before = sys.getswitchinterval()
    try:
        for given, most in ((5e-3, 1e-4), (1e-5, 1.1e-5)):
            sys.setswitchinterval(given)
            sharp_timers()
            assert sys.getswitchinterval() <= most
    finally:
        sys.setswitchinterval(before)
