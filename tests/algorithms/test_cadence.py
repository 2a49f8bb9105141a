"""Cadences: the kinds of exchange that they choose, and the periods of adaptive ones."""

import pytest

from mpigossip.algorithms import Step, cadence
from mpigossip.mixing.base import ExchangeKind
from tests.cases import on_each

LETTER = {ExchangeKind.LOCAL: "l", ExchangeKind.GOSSIP: "g", ExchangeKind.GLOBAL: "A"}


def run(made, steps, lr=lambda k: 0.1, measured=lambda k, kind: {}):
    """Return the kinds of exchange of some steps as letters, and the last state of the cadence."""
    state = made.init()
    letters = ""
    for k in range(steps):
        kind = made.kind(state, k)
        letters += LETTER[kind]
        state = made.observe(state, Step(k, 0, kind, lr(k)), measured(k, kind))
    return letters, state


@on_each(
    ("name", "options", "expected"),
    [
        ("always", {}, "gggggg"),
        ("global", {}, "AAAAAA"),
        ("never", {}, "llllll"),
        ("every", {"period": 3}, "llgllg"),
        ("cpsgd", {"period": 2}, "lAlAlA"),
        ("cpsgd", {"period": 1}, "AAAAAA"),
        ("gossip-pga", {"period": 3}, "ggAggA"),
        ("halves", {"length": 2}, "llggll"),
    ],
)
def test_fixed_cadences(name, options, expected):
    made = cadence.BUILDERS[name](**options)
    letters, _ = run(made, 6)
    assert letters == expected
    assert {LETTER[kind] for kind in made.kinds} == set(expected)


def test_states_are_plain_numbers():
    for build in cadence.BUILDERS.values():
        assert all(isinstance(value, int | float) for value in build().init())


def spread(rate, per_step=1.0):
    """Return a function of the variance of a random walk since the last average, Σ lr² per_step."""
    sums = [0.0]

    def measured(k, kind):
        sums[0] += rate(k) ** 2 * per_step
        if kind is not ExchangeKind.GLOBAL:
            return {}
        value = sums[0]
        sums[0] = 0.0
        return {"variance": value}

    return measured


def test_adpsgd_lengthens_the_period_as_the_variance_falls():
    def measured(k, kind):
        return {"variance": 1.0 if k < 20 else 0.1} if kind is ExchangeKind.GLOBAL else {}

    letters, state = run(cadence.adpsgd(period=2, sampling=0.2, total=100), 100, measured=measured)
    assert letters[:20] == "lA" * 10 and state.samples == 5
    assert state.period > 8 and letters.endswith("lllllA" + letters.rpartition("A")[2])


def test_adpsgd_shortens_the_period_as_the_variance_rises_but_not_below_one():
    def measured(k, kind):
        return {"variance": 1.0 if k < 20 else 9.0} if kind is ExchangeKind.GLOBAL else {}

    letters, state = run(cadence.adpsgd(period=4, sampling=0.2, total=100), 100, measured=measured)
    assert state.period == 1 and letters.endswith("AAAA")


def test_adpsgd_does_not_shorten_the_period_when_the_rate_drops():
    """The rate drops in the middle of a period, when most of the variance arose at the old rate."""

    def rate(k):
        return 0.1 if k < 42 else 0.01

    made = cadence.adpsgd(period=4, sampling=0.5, total=80)
    measured = spread(rate)
    periods = []
    state = made.init()
    for k in range(80):
        kind = made.kind(state, k)
        state = made.observe(state, Step(k, 0, kind, rate(k)), measured(k, kind))
        periods.append(state.period)
    assert min(periods) == 4 and periods[-1] > 4


@pytest.mark.parametrize(("skip", "last"), [(0.0, 1), (0.5, 4)])
def test_adpsgd_does_not_take_a_plateau_for_what_nodes_part_by(skip, last):
    """At first, the network learns nothing; later, its nodes diverge at a constant rate."""

    def measured(k, kind):
        return {"variance": 0.01 if k < 30 else 1.0} if kind is ExchangeKind.GLOBAL else {}

    made = cadence.adpsgd(period=4, sampling=0.25, skip=skip, total=240)
    _, state = run(made, 240, measured=measured)
    assert state.period == last
    assert ("below the initial 4" in made.warning(state)) is (last < 4)


def test_adpsgd_samples_at_least_once():
    measured = {"variance": 1.0}
    _, state = run(cadence.adpsgd(sampling=0.0, total=8), 8, measured=lambda k, kind: measured)
    assert state.samples == 1


def test_gossip_aga_grows_the_period_with_the_fall_of_the_loss():
    def measured(k, kind):
        return {"loss": 2.0 if k < 30 else 0.5}

    made = cadence.gossip_aga(period=2, warmup=3, longest=6)
    letters, state = run(made, 60, measured=measured)
    assert letters[:6] == "gAgAgA" and state.first_loss == 2.0
    assert state.period == 6  # ⌈2 · 2/0.5⌉ = 8, held at the longest
    assert run(made, 60, measured=lambda k, kind: {"loss": 0.0 if k > 9 else 1.0})[1].period == 6
