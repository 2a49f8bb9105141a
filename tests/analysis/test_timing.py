"""The contract of measurements: warm-up, turns, and the number of measurements."""

import pytest

from mpigossip.analysis import timing
from mpigossip.analysis.timing import stopwatch, take_turns, time_slowest


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that shows the same time until a test advances it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_seconds_are_per_call(clock):
    def work():
        clock[0] += 3

    assert stopwatch(work) == 3
    assert stopwatch(work, 4) == 3


def test_works_take_turns_after_an_unrecorded_call_of_each(clock):
    calls = []

    def work(name, first, others):
        clock[0] += others if name in calls else first
        calls.append(name)

    works = [lambda: work("a", 100, 1), lambda: work("b", 100, 2)]
    assert take_turns(works, least=3) == [[1] * 3, [2] * 3]
    assert calls == ["a", "b"] * 4


@pytest.mark.parametrize(
    ("limits", "measurements"),
    [
        ({}, 5),
        ({"seconds": 20}, 19),
        ({"seconds": 20, "most": 7}, 7),
        ({"least": 2, "most": 2, "seconds": 20}, 2),
    ],
)
def test_measurements_end_at_a_limit_but_not_before_the_least(clock, limits, measurements):
    def work():
        clock[0] += 1

    assert take_turns([work], **limits) == [[1] * measurements]


def unequal(comm):
    """Return own and slowest times; rank 1 takes twice as long."""

    def work():
        now[0] += 1 + comm.rank

    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "perf_counter", lambda: now[0])
        return take_turns([work], comm, seconds=7), time_slowest([work], comm, 7)


def test_rank_0_ends_the_measurements_and_the_slowest_rank_counts(ranks):
    first, second = ranks(2)(unequal)
    assert first == ([[1] * 6], [[2] * 6])
    assert second == ([[2] * 6], [[2] * 6])
