"""Slots as ranks of a torch process group, over gloo: the bits of threads and of shared memory."""

import statistics
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mpigossip.cluster.deadline import LateError, sharp_timers
from mpigossip.cluster.ranks import Alone
from mpigossip.groups import threads
from mpigossip.groups.base import GroupError, Single
from mpigossip.groups.threads import Threads
from mpigossip.groups.torch_group import TorchGroup
from tests.cases import with_world
from tests.groups.test_ranks import RIGHT, beside, host_of, numbers

pytestmark = pytest.mark.both


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_threads_have_the_bits_of_threads(slots, one_thread):
    group = TorchGroup(host_of(slots), Alone(), timeout_s=20)
    for size, rows in ((slots * 513, 1), (slots * 64, 3)):
        assert beside(group, size, rows) == RIGHT
    group.close()


@with_world(per="host", timeout_s=20)
def across(world, own):
    from mpigossip.groups.ranks import Ranks

    node = world.nodes.inside
    group = TorchGroup(Ranks(host_of(own), node), node, timeout_s=20)
    found = beside(group, group.slots * 513, 1)
    group.close()
    return found


@pytest.mark.parametrize("n, own", [(2, 1), (2, 2), (4, 1)])
def test_processes_have_the_bits_of_threads(ranks, n, own):
    assert ranks(n)(across, own) == [RIGHT] * n


def test_sums_in_the_librarys_order_are_close_to_those_of_slots(one_thread):
    group, given = TorchGroup(Threads(4), Alone(), "nccl", 20), numbers(4, 2, 4096, 0)
    mean = sum(given) / 4
    array = [one.clone() for one in given]
    parts = group.reduce_scatter_mean(array)
    assert torch.allclose(torch.cat(parts, dim=1), mean, rtol=1e-6, atol=1e-6)
    group.all_gather(parts, array)
    assert all(torch.equal(one, array[0]) for one in array)
    group.close()


def test_equal_shards_are_needed():
    group = TorchGroup(Threads(3), Alone(), timeout_s=20)
    with pytest.raises(GroupError, match="8 elements can't be split into 3"):
        group.reduce_scatter_mean([torch.ones(1, 8)] * 3)
    group.close()


def test_a_slot_that_stays_away_is_named_in_time(monkeypatch):
    monkeypatch.setattr(threads, "GRACE_S", 0.2)
    # so long torch waits when it forgets the call that the other two have begun
    group, stop = TorchGroup(Threads(3), Alone(), timeout_s=2), threading.Event()
    groups, group._timeout_s = group._groups, 0.5
    late = SimpleNamespace(alltoall_base=lambda *_: stop.wait())
    group._groups = [groups[0], late, groups[2]]
    began = time.monotonic()
    with pytest.raises(LateError, match="reduce-scatter over the node's slots: slot 1 of this"):
        group.reduce_scatter_mean([torch.ones(1, 6)] * 3)
    assert time.monotonic() - began < 10
    stop.set()
    group._groups = []
    group._host.close()


@with_world(per="host", timeout_s=20)
def one_is_late(world):
    from mpigossip.groups.ranks import Ranks

    node, said = world.nodes.inside, ""
    group = TorchGroup(Ranks(Single(), node), node, timeout_s=20)
    full = group.zeros(1, 8)
    node.timeout_s = 0.3
    if world.rank == 0:
        try:
            group.reduce_scatter_mean(full)
        except LateError as error:
            said = str(error)
    world.comm.Barrier()
    node.timeout_s = 20
    if world.rank:
        group._barrier("reduce-scatter")
    group.close()
    return said


def test_a_process_that_stays_away_is_named(ranks):
    said, _ = ranks(2)(one_is_late)
    assert "reduce-scatter over the node's slots: rank 1 of this node didn't come" in said


def test_errors_of_the_library_name_devices_call_and_remedy():
    group = TorchGroup(Threads(2), Alone(), timeout_s=20)

    def fail(*_):
        raise RuntimeError("NCCL error: unhandled system error\nand advice of many lines")

    group._groups = [SimpleNamespace(broadcast=fail)] * 2
    with pytest.raises(GroupError, match="broadcast .* failed on cpu, cpu: NCCL error: .*NCCL_DEB"):
        group.broadcast([torch.ones(1, 8)] * 2)
    group.close()


PYTHONS_S = 5e-3
"""Python's own switch interval."""


def beside_a_hog(group, full, ours):
    """Seconds of a round: alone; beside a thread that computes in Python, by switch interval."""
    go, over, seconds = threading.Event(), threading.Event(), [[], [], []]

    def hog():
        while not over.is_set():
            go.wait()
            while go.is_set():
                pass

    thread = threading.Thread(target=hog, daemon=True)
    thread.start()
    for turn in range(30):  # in turns, as the machine may have other work
        pairs = [(PYTHONS_S, seconds[1]), (ours, seconds[2])]
        # the round in which the thread awakes doesn't count
        for interval, kept in [(0, seconds[0]), (ours, []), *pairs[:: -1 if turn % 2 else 1]]:
            sys.setswitchinterval(interval or ours)
            _ = go.set() if interval else go.clear()
            began = time.perf_counter()
            group.all_gather(group.reduce_scatter_mean(full), full)
            kept.append(time.perf_counter() - began)
    over.set()
    go.clear()
    thread.join(10)
    return [statistics.quantiles(kept, n=4)[0] for kept in seconds]


def test_a_thread_that_keeps_the_interpreter_costs_a_round_less(one_thread):
    """With Python's own interval a round takes 2 to 5 times as long as alone, else 1.3 times."""
    before, group = sys.getswitchinterval(), TorchGroup(Threads(2), Alone(), timeout_s=20)
    full = group.zeros(1, 1 << 20)
    try:
        sys.setswitchinterval(PYTHONS_S)
        sharp_timers()
        assert sys.getswitchinterval() <= 1e-4
        quiet, pythons, ours = beside_a_hog(group, full, sys.getswitchinterval())
    finally:
        sys.setswitchinterval(before)
    assert ours < 0.9 * pythons, (pythons, ours)  # a quiet machine: 0.6
    assert ours < 3 * quiet, (quiet, ours)  # 1.3 to 1.7 at a load of 4; what is promised is 2
    group.close()
