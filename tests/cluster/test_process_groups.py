"""Process groups without a server: slots as threads, as processes, and both."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from mpigossip.cluster import process_groups
from mpigossip.cluster.process_groups import GroupRank, open_groups
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.config.errors import Failure
from tests.cases import naming

pytestmark = pytest.mark.both


def in_threads(works):
    """Call all functions at once."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summed(groups, places):
    """Return the sum of each group rank if rank r of a group contributes 2 ** r."""
    values = [torch.tensor([2.0**place.rank]) for place in places]

    def add(k):
        groups[k].allreduce([values[k]]).wait()

    in_threads([lambda k=k: add(k) for k in range(len(places))])
    return [float(value) for value in values]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_threads_are_ranks_of_a_group(slots):
    places = [GroupRank("slots", slot, slots, "cpu") for slot in range(slots)]
    groups = open_groups(SingleProcess(), places, 20)
    assert [group.rank() for group in groups] == list(range(slots))
    assert summed(groups, places) == [2.0**slots - 1] * slots


def one_fails(comm, late):
    from mpigossip.cluster.mpi_world import MPIWorld

    with MPIWorld(comm, timeout_s=20) as world:
        device = "cpu" if late or comm.rank == 0 else "cuda:9"  # this torch has no NCCL
        size = 3 if late else 2  # rank 2 never arrives
        began = time.monotonic()
        try:
            open_groups(world, [GroupRank("nodes", comm.rank, size, device)], 1)
        except Failure as error:
            return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.skipif(dist.is_nccl_available(), reason="needs a torch without NCCL")
@pytest.mark.parametrize("late", [False, True])
def test_all_ranks_learn_which_one_failed(ranks, late):
    for said, seconds in ranks(2)(one_fails, late):
        named = "not connected: process group nodes, rank 0 of 3" if late else "rank 1 of 2 on cuda"
        assert named in said
        assert seconds < 15


@pytest.mark.parametrize("name, value", process_groups.REFUSED.items())
def test_variables_that_make_nccl_hang_are_rejected(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=naming(f"unset {name}")):
        open_groups(SingleProcess(), [GroupRank("slots", 0, 1, "cuda:0")], 1)
    open_groups(SingleProcess(), [GroupRank("slots", 0, 1, "cpu")], 20)


def test_groups_of_a_failed_opening_are_aborted(monkeypatch):
    cut = []
    first = threading.Event()
    thread = []

    def connect(store, place, limit):
        if place.rank:
            assert first.wait(10)
            thread[0].join(10)  # until the other failure is known
            raise RuntimeError("no route to a host")
        thread.append(threading.current_thread())
        first.set()
        return dist.ProcessGroup(dist.HashStore(), 0, 1)

    monkeypatch.setattr(process_groups, "_connected", connect)
    monkeypatch.setattr(process_groups, "close_groups", lambda *given: cut.append(given[1:]))
    places = [GroupRank(f"nodes-{k}", k, 2, "cpu") for k in range(2)]
    with pytest.raises(Failure, match=naming("no route to a host")):
        process_groups.open_groups(SingleProcess(), places, 10)
    assert cut == [(["cpu"], True)]


def destroyed(comm):
    from mpigossip.cluster.mpi_world import MPIWorld

    with MPIWorld(comm) as world:
        world.group_into_nodes(2)
        assert world.node_mesh("gloo").device_type == "cpu"
        dist.destroy_process_group()
    return dist.is_initialized()


def test_a_loop_may_destroy_the_nodes_group_itself(ranks, monkeypatch):
    assert ranks(2)(destroyed) == [False, False]
