"""Learning rates of the schedules: warm-up, scaling, milestones and cosine."""

import math

import pytest

from mpigossip.config import Schedule
from mpigossip.training.schedule import full_rate, schedule
from tests.cases import on_each


def rates(steps_per_epoch=10, epochs=10, samples=256, **fields):
    total = steps_per_epoch * epochs
    rate = schedule(Schedule(**fields), steps_per_epoch, total, samples)
    return [rate(step) for step in range(total)]


def test_protocol_of_goyal_et_al():
    got = rates(
        samples=1024, epochs=90, warmup_epochs=5, milestones=(30, 60, 80), factor=0.1, lr=0.1
    )
    assert got[0] == pytest.approx(0.1 + 0.3 / 50)  # from 0.1 to 0.4 in 50 steps
    assert got[24] == pytest.approx(0.1 + 0.3 / 2) and got[49] == pytest.approx(0.4)
    assert all(b > a for a, b in zip(got[:49], got[1:50], strict=True))
    for step, rate in ((50, 0.4), (299, 0.4), (300, 0.04), (599, 0.04), (600, 4e-3), (800, 4e-4)):
        assert got[step] == pytest.approx(rate)


def test_scaling():
    assert rates(samples=64, lr=0.1)[0] == pytest.approx(0.025)
    assert rates(samples=64, lr=0.1, scale="none")[0] == pytest.approx(0.1)
    assert rates(samples=64, lr=0.1, reference_batch=32)[0] == pytest.approx(0.2)


@on_each("fields", [{"samples": 64}, {"samples": 4096, "scale": "none"}])
def test_warmup_without_a_larger_batch_grows_from_zero(fields):
    got = rates(warmup_epochs=1, lr=0.1, **fields)
    full = got[-1]
    assert got[:10] == pytest.approx([full * (step + 1) / 10 for step in range(10)])


def test_a_warmup_may_have_a_constant_rate():
    got = rates(warmup_epochs=1, lr=0.1, warmup_lr=1e-5)
    assert got[:10] == [1e-5] * 10 and got[10] == rates(lr=0.1)[10] > 1e-5


def test_cosine():
    got = rates(name="cosine", lr=0.1, warmup_epochs=2, final_lr=0.01)
    for step in (20, 33, 60, 99):
        expected = 0.01 + 0.09 * (1 + math.cos(math.pi * (step - 20) / 80)) / 2
        assert got[step] == pytest.approx(expected)
    assert got[20] == pytest.approx(0.1)


@on_each("name", ["constant", "milestones", "cosine"])
@on_each("warmup", [0.0, 0.25, 3.0, 40.0])
@on_each("samples", [1, 256, 100_000])
def test_always_above_zero_and_a_function_of_the_step(name, warmup, samples):
    section = Schedule(name=name, warmup_epochs=warmup, milestones=(1, 2.5, 3))
    rate = schedule(section, 7, 35, samples)
    forward = [rate(step) for step in range(35)]
    assert min(forward) > 0 and rate(35) == rate(10**6) == forward[-1]
    assert [rate(step) for step in reversed(range(35))] == forward[::-1]


def test_constant():
    assert set(rates(name="constant", milestones=(2,))) == {0.1}


def test_milestones_between_epochs():
    got = rates(milestones=(2.5,), factor=0.5)
    assert got[24] == pytest.approx(0.1) and got[25] == pytest.approx(0.05)


def test_the_rate_in_use_is_explained():
    assert full_rate(Schedule(lr=0.01), 32)[1] == (
        "0.00125, milestones (schedule.lr = 0.01 x 32 samples / 256)"
    )
    section = Schedule(lr=0.01, scale="none", name="cosine")
    assert full_rate(section, 32)[1] == "0.01, cosine (not scaled)"
