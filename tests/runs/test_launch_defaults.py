"""Defaults that depend on the device."""

import os

import pytest

from mpigossip.data.loader import processes
from mpigossip.engine.measurements import measured_every


def test_gpus_measure_consensus_more_rarely():
    assert [measured_every("auto", on) for on in ("cpu", "cuda:1")] == [10, 100]
    assert [measured_every(3, on) for on in ("cpu", "cuda:1")] == [3, 3]


@pytest.mark.parametrize(
    "setting, slots, on, per_node, cores, many",
    [
        ("auto", 4, "cpu", 1, 64, 2),
        ("auto", 4, "cpu", 2, 64, 1),
        ("auto", 8, "cuda:0", 1, 64, 16),
        ("auto", 8, "cuda:0", 1, 20, 11),
        ("auto", 8, "cuda:0", 1, 8, 2),
        (16, 1, "cuda:0", 8, 64, 2),
        ("auto", 1, "cuda:0", 8, 64, 2),
        (0, 8, "cuda:0", 1, 64, 0),
    ],
)
def test_workers_grow_with_gpus(monkeypatch, setting, slots, on, per_node, cores, many):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert processes(setting, [on] * slots, per_node) == many
