"""The watchdog of NCCL, on events and communicators that stand in for those of GPUs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpigossip.groups import nccl_watchdog
from mpigossip.groups.base import GroupError
from tests.cases import on_each

DEVICES = ("cuda:0", "cuda:1")


def events(*done):
    return [SimpleNamespace(query=lambda value=value: value) for value in done]


def lost():
    raise RuntimeError("CUDA error: unspecified launch failure\nand advice of many lines")


def dog(check=lambda: None, end=None, timeout_s=10.0):
    comms = [SimpleNamespace(check_async_error=lambda: None)]
    comms.append(SimpleNamespace(check_async_error=check))
    return nccl_watchdog.Watchdog(comms, DEVICES, timeout_s, "look at nvidia-smi", end)


def begun(one, before, behind, name="allGather"):
    one.track(name, before, behind)
    return one._first.began


def test_calls_that_end_are_forgotten_and_those_under_way_may_take_their_time():
    one = dog()
    for _ in range(3):
        now = begun(one, events(True, True), events(True, True))
    assert one.look(now + 100) == "" and one._first is None and one._last is None
    now = begun(one, events(True, True), events(True, False))
    assert one.look(now + 9.9) == ""


def test_the_last_call_is_looked_at_after_the_first():
    one = dog()
    begun(one, events(True, True), events(True, True))
    one.track("reduceScatter", events(True, True), events(True, True))
    one.track("allGather", events(True, True), events(False, True))
    assert "NCCL allGather" in one.look(one._last.began + 11)


@on_each(
    "before, behind, said",
    [
        ((True, True), (True, False), "cuda:1 has begun and doesn't finish it"),
        ((False, True), (False, False), "cuda:0 still computes what comes before it"),
    ],
)
def test_a_hang_names_the_device_that_others_wait_for(before, behind, said):
    one = dog()
    text = one.look(begun(one, events(*before), events(*behind)) + 11)
    assert said in text and "NCCL allGather over cuda:0, cuda:1" in text
    assert "not done after 10 s (node.timeout_s)" in text and text.endswith("look at nvidia-smi")


def test_a_lost_device_and_an_error_between_calls_are_named_at_once():
    one = dog()
    gone = [SimpleNamespace(query=lambda: True), SimpleNamespace(query=lost)]
    text = one.look(begun(one, events(True, True), gone))
    assert text.startswith("cuda:1 was lost during NCCL allGather: CUDA error: unspecified")
    assert "\n" not in text and "nvidia-smi" in text

    def check():
        raise KeyError(6)

    assert dog(check).look(0).startswith("NCCL on cuda:1 failed between two calls: 6; look")


@pytest.mark.parametrize("hangs", [True, False])
def test_the_job_is_ended_where_the_training_thread_hangs_too(monkeypatch, hangs):
    monkeypatch.setattr(nccl_watchdog, "EVERY_S", 0.01)
    monkeypatch.setattr(nccl_watchdog, "GRACE_S", 0.2 if hangs else 20)
    ended = []
    one = dog(lost, ended.append)
    one.start()
    one._thread.join(0.1)
    if not hangs:
        with pytest.raises(GroupError, match="cuda:1 failed between two calls"):
            one.check()
    one._thread.join(10)
    assert not one._thread.is_alive() and len(ended) == hangs
    one.close()


def test_closing_ends_the_thread_and_nobody_is_ended():
    ended = []
    one = dog(end=ended.append)
    one.start()
    one.close()
    assert not one._thread.is_alive() and not ended
    one.check()


ENDS = """
import threading, time
from mpigossip.groups.nccl_watchdog import end_job
threading.Thread(target=end_job, args=("cuda:3 was lost",), name="mpigossip-nccl").start()
time.sleep(60)
"""


def test_ending_says_what_happened_and_leaves_a_thread_that_hangs():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "GroupError: cuda:3 was lost" in done.stderr


GIVEN_UP = """
import time
from mpigossip.groups.nccl import given_up_after
with given_up_after(60):
    pass
with given_up_after(0.5):
    time.sleep(60)
"""


def test_making_communicators_is_given_up_without_the_interpreters_lock():
    command = [sys.executable, "-c", GIVEN_UP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and "Timeout" in done.stderr
