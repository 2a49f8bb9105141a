"""The core of the progress thread, on machines that are simulated by files."""

import os

import pytest

from mpigossip.cluster.cores import fingerprint, for_messages, near_network
from mpigossip.config.host import allowed_cores, core_count


def machine(folder, nodes, cards):
    """``nodes``: lists of cores; ``cards``: (class, name, memory node, state)."""
    for k, cores in enumerate(nodes):
        place = folder / f"devices/system/node/node{k}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cores + "\n")
    for kind, name, node, state in cards:
        place = folder / "class" / kind / name
        (place / "device").mkdir(parents=True)
        (place / "device/numa_node").write_text(f"{node}\n")
        (place / "operstate").write_text(f"{state}\n")
    (folder / "class/net/lo").mkdir(parents=True)  # it has no device
    return folder


TWO = ["0-3,8-11", "4-7,12-15"]


@pytest.mark.parametrize(
    ("cards", "near"),
    [
        ([("net", "eth0", 1, "up")], {4, 5, 6, 7}),
        ([("net", "eth0", 1, "down"), ("net", "eth1", 0, "up")], {0, 1, 2, 3}),
        ([("net", "eth0", 0, "up"), ("infiniband", "mlx5_0", 1, "")], {4, 5, 6, 7}),
        ([("infiniband", "mlx5_0", 0, ""), ("infiniband", "mlx5_1", 1, "")], set(range(8))),
        ([("net", "eth0", -1, "up")], set(range(8))),  # the system does not report it
        ([], set(range(8))),
    ],
)
def test_cores_near_the_network_card(tmp_path, cards, near):
    assert near_network(set(range(8)), machine(tmp_path, TWO, cards)) == near


def test_all_cores_count_if_none_is_near(tmp_path):
    far = machine(tmp_path, TWO, [("net", "eth0", 1, "up")])
    assert near_network({0, 1}, far) == {0, 1}
    assert near_network({0, 1}, tmp_path / "nothing here") == {0, 1}


def test_a_spare_core_is_used(tmp_path):
    far = machine(tmp_path, TWO, [("net", "eth0", 1, "up")])
    eight = set(range(8))
    assert for_messages(eight, 1, 1, 0, far) == {7}
    assert for_messages(eight, 7, 1, 0, far) == {7}
    assert for_messages(eight, 8, 1, 0, far) == set()  # all cores compute
    # two processes on the same cores get one each, if there is one for each
    assert [for_messages(eight, 3, 2, k, far) for k in range(2)] == [{7}, {6}]
    assert for_messages(eight, 4, 2, 0, far) == set()
    assert for_messages({0}, 1, 1, 0, far) == for_messages(set(), 1, 1, 0, far) == set()


def test_processes_that_share_cores_have_equal_fingerprints(tmp_path):
    boot = tmp_path / "boot_id"
    boot.write_text("one")
    first = fingerprint({0, 1}, boot)
    assert fingerprint({1, 0}, boot) == first != fingerprint({0}, boot)
    boot.write_text("another")
    assert fingerprint({0, 1}, boot) != first
    assert fingerprint({0, 1}, tmp_path / "none") == fingerprint({0, 1}, tmp_path / "none")
    assert allowed_cores() == os.sched_getaffinity(0)


def thread_on(comm, cores):
    """Return the cores of the progress thread and of the thread that started it."""
    import threading

    from mpigossip.mixing.progress_thread import ProgressThread

    results = []
    thread = ProgressThread(comm, timeout_s=10, cores=cores)
    future = thread.submit(lambda: results.append(os.sched_getaffinity(threading.get_native_id())))
    thread.wait(future, "a look")
    thread.close()
    return results[0], os.sched_getaffinity(0)


def shared_by_all(comm):
    from mpigossip.cluster.cores import pick_communication_core

    return pick_communication_core(comm, 1), pick_communication_core(comm, 10_000)


def test_ranks_on_the_same_cores_get_different_ones_or_none(ranks):
    results = ranks(2)(shared_by_all)
    assert [many for _, many in results] == [frozenset()] * 2
    few = [few for few, _ in results]
    assert few == [frozenset()] * 2 if len(allowed_cores()) < 4 else few[0] != few[1]


def test_the_communication_thread_alone_is_bound(ranks):
    everywhere = os.sched_getaffinity(0)
    one = {max(everywhere)}
    assert ranks(1)(thread_on, frozenset(one)) == [(one, everywhere)]
    assert ranks(1)(thread_on, frozenset()) == [(everywhere, everywhere)]


def test_cores_are_counted_where_the_system_does_not_report_them(monkeypatch):
    """macOS has no sched_getaffinity."""
    assert core_count() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert allowed_cores() == frozenset() and core_count() == os.cpu_count()
