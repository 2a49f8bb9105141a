"""The watchdog of collectives, with stubs for the work objects of GPUs."""

import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from mpigossip.cluster import captures
from mpigossip.groups import nccl_inside_node as watchdog
from mpigossip.groups.base import GroupError
from tests import launch
from tests.cases import naming

DEVICES = ("cuda:0", "cuda:1")


def works(*done):
    return [
        (device, SimpleNamespace(is_completed=lambda value=value: value))
        for device, value in zip(DEVICES, done, strict=True)
    ]


def lost():
    raise RuntimeError("CUDA error: unspecified launch failure\nand advice of many lines")


def dog(end=None):
    return watchdog.Watchdog(10.0, "look at nvidia-smi", end)


def begun(one, *done, name="all-gather", **options):
    one.track(name, works(*done), **options)
    return one._calls[-1].began


def test_calls_that_end_are_forgotten_and_those_in_flight_may_take_their_time():
    one = dog()
    for _ in range(3):
        now = begun(one, True, True)
    assert one.look(now + 100) == "" and not one._calls
    now = begun(one, True, False)
    assert one.look(now + 9.9) == ""


def test_a_hang_names_call_and_devices():
    one = dog()
    begun(one, True, True)
    text = one.look(begun(one, True, False, name="reduce-scatter") + 11)
    assert re.search(naming("reduce-scatter", "cuda:1", "10 s (node.timeout_s)"), text)
    assert text.endswith("look at nvidia-smi")


def test_a_call_that_began_before_all_ranks_arrived_may_take_twice_the_limit():
    one = dog()
    now = begun(one, True, False, all_arrived=False)
    assert one.look(now + 19.9) == ""
    text = one.look(now + 20.1)
    assert "not done on cuda:1 after 20 s (2 x node.timeout_s)" in text


def test_the_limit_of_such_a_call_starts_again_while_its_thread_waits_for_ranks(monkeypatch):
    waits = [True]
    one = watchdog.Watchdog(10.0, "look at nvidia-smi", waits_for_ranks=lambda: waits[0])
    for _ in range(2):
        now = begun(one, True, False, all_arrived=False)
    assert one.look(now + 100) == ""
    waits[0] = False
    assert one.look(now + 119.9) == ""
    one._calls.popleft()
    assert one.look(now + 119.9) == ""
    assert "after 20 s" in one.look(now + 120.1)
    waits[0] = True
    late = begun(one, True, False)
    one._calls.popleft()
    assert "after 10 s" in one.look(late + 11)


def test_after_all_ranks_arrived_a_call_may_take_the_limit():
    one = dog()
    before = begun(one, True, False, all_arrived=False)
    begun(one, True, False, name="broadcast")
    one.note_arrival()
    assert [call.name for call in one._calls] == ["all-gather", "broadcast"]
    arrived = one._calls[0].began
    assert arrived >= before and one.look(arrived + 9.9) == ""
    assert "after 10 s (node.timeout_s)" in one.look(arrived + 10.1)


def test_a_lost_device_is_named_at_once():
    one = dog()
    one.track("all-gather", [("cuda:1", SimpleNamespace(is_completed=lost))])
    text = one.look(0)
    assert re.match(naming("cuda:1", "lost during all-gather", "CUDA error"), text)
    assert "\n" not in text and "nvidia-smi" in text


@pytest.mark.parametrize("hangs", [True, False])
def test_the_job_ends_if_the_training_thread_hangs_too(monkeypatch, hangs):
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_S", 0.2 if hangs else 20)
    ended = []
    one = dog(ended.append)
    one.track("all-gather", [("cuda:1", SimpleNamespace(is_completed=lost))])
    one.start()
    if not hangs:
        launch.until(lambda: one._failure, 10, "the failure is seen")
        with pytest.raises(GroupError, match=naming("cuda:1", "lost")):
            one.check()
    one._thread.join(10)
    assert not one._thread.is_alive() and len(ended) == hangs
    one.close()


def test_no_event_is_queried_while_this_process_captures_a_graph(monkeypatch):
    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            pass

        def capture_end(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    captures.observe_captures()
    graph = Graph()
    queries = []

    def is_completed():
        queries.append(time.monotonic())
        return False

    graph.capture_begin(capture_error_mode="thread_local")
    one = dog([].append)
    one.track("all-gather", [("cuda:1", SimpleNamespace(is_completed=is_completed))])
    one.start()
    time.sleep(0.3)
    assert not queries
    graph.capture_end()
    launch.until(lambda: queries, 10, "the query after the capture")
    one.close()


def test_closing_ends_the_thread_but_not_the_job():
    ended = []
    one = dog(ended.append)
    one.start()
    one.close()
    assert not one._thread.is_alive() and not ended
    one.check()


ENDS = """
import threading, time
from mpigossip.groups.base import end_job
threading.Thread(target=end_job, args=("cuda:3 was lost",), name="mpigossip-watchdog").start()
time.sleep(60)
"""


def test_end_job_reports_the_error_even_if_a_thread_hangs():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "GroupError: cuda:3 was lost" in done.stderr
