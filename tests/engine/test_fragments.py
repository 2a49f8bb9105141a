"""Fragments and delays: limits, sent bytes, formulas, resuming at every step, and ranks."""

import numpy as np
import pytest
import torch

from mpigossip.algorithms.cadence import FragmentSchedule
from mpigossip.config import JobError
from mpigossip.mixing.lossy_wires import wire
from mpigossip.mixing.wire import FP32
from mpigossip.training import assemble
from mpigossip.training.fragments import cut, cut_by_modules, fragment_width
from tests import battery
from tests.battery import FRAGMENTS, Driver
from tests.cases import every, few, naming, on_each

pytestmark = pytest.mark.usefixtures("one_thread")
QSGD = wire("qsgd", 127, 0.01, 0)


def test_each_fragment_has_a_step_of_its_own_in_the_period():
    due = [FragmentSchedule(8, 4).due(k) for k in range(9)]
    assert due == [None, 0, None, 1, None, 2, None, 3, None]
    assert [FragmentSchedule(7, 3, 2).due(k) for k in range(7)] == [None, 0, None, 1, None, None, 2]
    assert [FragmentSchedule(7, 3, 2).arriving(k) for k in range(9)] == [None] * 3 + [
        0,
        None,
        1,
        None,
        None,
        2,
    ]
    for period in range(1, 14):
        for count in range(1, period + 1):
            sent = [FragmentSchedule(period, count).due(k) for k in range(2 * period)]
            assert [p for p in sent if p is not None] == [*range(count)] * 2
            assert (
                sent[period - 1] == count - 1
            )  # A single fragment is due at the last step of the period.


def test_a_fragment_has_layers_of_all_depths_and_large_ones_are_cut():
    layers = [slice(0, 40), slice(40, 80), slice(80, 400), slice(400, 440), slice(440, 480)]
    pieces = cut(layers, 3, 160)
    columns = [np.concatenate([np.arange(c.start, c.stop) for c in one]) for one in pieces]
    assert sorted(np.concatenate(columns).tolist()) == list(range(480))
    assert [len(one) for one in columns] == [160] * 3
    assert pieces[0] == (slice(0, 40), slice(240, 360))
    assert all(
        (np.diff(one) > 0).all() for one in columns
    )  # Columns with weight decay stay before the others.


def test_a_list_divides_the_model_by_modules():
    """The fifth layer lies in both slots; adjacent layers of a fragment are one range."""
    modules = ("0,6", "1.weight, 2", "3,4,5")
    columns = [cut_by_modules(battery.FLAT, slot, modules) for slot in range(2)]
    assert columns[0] == ((slice(0, 96),), (slice(96, 320),), (slice(320, 512),))
    assert columns[1] == ((slice(448, 512),), (), (slice(0, 448),))
    schedule = FragmentSchedule(6, 3, 0, modules)
    assert fragment_width(battery.FLAT, schedule, FP32) == 448
    assert fragment_width(battery.FLAT, schedule, QSGD) == 512  # a multiple of a bucket


@on_each(
    ("modules", "message"),
    [
        (("0,1", "2,9"), ('"9"', "no module", "0, 1, 2, 3, 4, 5")),
        (("0,1,2,3,4,5,6", "0.weight"), ('"0.weight"', "fragments 0 and 1")),
        (("0,1", "2,3"), ("3 parameters", "no fragment", '"4.weight"')),
        (("0,", "1,2,3,4,5,6"), ('""', "no module")),
    ],
)
def test_a_list_that_does_not_divide_the_model_is_rejected(modules, message):
    with pytest.raises(JobError, match=naming(message)):
        cut_by_modules(battery.FLAT, 0, modules)


class Forced(Driver):
    """Schedule that sends everything at once and waits, but by the code of fragments."""

    def __init__(self, settings, n, **options):
        plain = FragmentSchedule.is_whole_model
        FragmentSchedule.is_whole_model = False
        try:
            super().__init__(settings, n, **options)
        finally:
            FragmentSchedule.is_whole_model = plain


WHOLE = [
    "algorithm.name=dsgd cadence.name=every cadence.period=3",
    "algorithm.name=dsgd cadence.name=every cadence.period=2 local.name=adamw node.wire=qsgd",
    "algorithm.name=diloco cadence.period=3 node.wire=bf16",
    "algorithm.name=slowmo cadence.name=cpsgd cadence.period=3",
    "algorithm.name=noloco cadence.period=2",
    "algorithm.name=gasloc cadence.period=3 algorithm.outer_beta=0.3",
    "algorithm.name=sparseloco cadence.period=2 node.density=0.5",
    "algorithm.name=choco graph.name=ring cadence.name=every cadence.period=2 node.wire=sign",
    "algorithm.name=sparta cadence.name=every cadence.period=2 node.density=0.5",
]


@on_each("n", [1, 4, 5])
@on_each("settings", WHOLE)
def test_one_fragment_without_a_delay_is_the_method(settings, n):
    plain = Driver(settings, n, noise=0.1)
    forced = Forced(settings, n, noise=0.1)
    assert plain.fragments is None and forced.fragments.schedule.fragments == 1
    assert torch.equal(plain.run(9).whole(), forced.run(9).whole())
    assert plain.mixer.bytes_sent == forced.mixer.bytes_sent


ALONE = [
    *("dsgd", "dmsgd-vanilla", "noloco", "gasloc", "choco graph.name=ring"),
    "sparta node.wire=fp32",
]


@on_each("n", [1, 4, 5])
@on_each("name", ALONE)
def test_a_fragment_is_the_method_on_its_columns_alone(name, n):
    """The last fragment makes the steps of a whole model; other fragments have no effect on it."""
    settings = f"algorithm.name={name} cadence.name=every cadence.period=3"
    parts = Driver(f"{settings} cadence.fragments=2", n, noise=0.1).run(14)
    whole = Driver(settings, n, noise=0.1).run(14)
    cuts = [each[1] for each in parts.fragments.cuts]
    assert all(cuts)
    for k, c in ((k, c) for k, each in enumerate(cuts) for c in each):
        assert torch.equal(parts.x[k][:, c], whole.x[k][:, c])
    if n > 1:  # The first fragment is exchanged at other steps.
        assert not torch.equal(parts.whole(), whole.whole())


def streaming_diloco(driver, steps, period, count, delay, blend):
    """Run algorithm 2 of arXiv 2501.18512 with inner SGD on the driver's quadratics, in float64."""
    cuts = driver.fragments.cuts
    places = [
        torch.cat([torch.arange(c.start, c.stop) + 512 * k for k in range(2) for c in cuts[k][p]])
        for p in range(count)
    ]
    x = driver.whole().double()
    b = torch.cat(driver.b, dim=1).double()
    outer = x.clone()
    momentum = torch.zeros_like(x)
    coming = {}
    for step in range(1, steps + 1):
        x -= driver.lr * (x - b)
        for p, c in enumerate(places):
            offset = (p + 1) * period // count
            if step > delay and (step - delay - offset) % period == 0 and p in coming:
                x[:, c] = blend * coming.pop(p) + (1 - blend) * x[:, c]
            if (step - offset) % period == 0:
                delta = outer[:, c] - x[:, c].mean(0)
                momentum[:, c] = 0.9 * momentum[:, c] + delta
                outer[:, c] -= 0.7 * (delta + 0.9 * momentum[:, c])
                coming[p] = outer[:, c].clone()
    return x


BY_MODULES = '["0,5","1,2,3","4,6"]'


@on_each(
    ("fragments", "count", "delay", "blend"),
    [("2", 2, 1, 0.5), ("3", 3, 2, 0.7), ("1", 1, 6, 1.0), (BY_MODULES, 3, 1, 0.7)],
)
def test_delayed_fragments_of_diloco_are_streaming_diloco(fragments, count, delay, blend):
    settings = f"cadence.period=6 cadence.fragments={fragments} cadence.delay={delay}"
    settings += f" local.name=sgd algorithm.blend={blend}"
    driver = Driver(f"algorithm.name=diloco {settings}", 5)
    for x in driver.x:  # The nodes of DiLoCo begin with equal models.
        x.copy_(x[:1].expand_as(x).clone())
    driver.restart()
    expected = streaming_diloco(driver, 27, 6, count, delay, blend)
    assert torch.allclose(driver.run(27).whole().double(), expected, atol=1e-5)


def test_a_restart_forgets_received_fragments():
    """A restarted engine makes the same steps, and saves the same arrays, as a new engine."""
    settings = "algorithm.name=diloco cadence.period=6 cadence.fragments=2 cadence.delay=2"
    first = Driver(settings, 5)
    first.run(4)  # Fragment 0 was sent at step 3, and is in flight.
    assert first.in_flight
    first.restart()
    assert not first.in_flight
    (name,) = (name for name in first.parts() if name.endswith("received"))
    assert not any(array.any() for array in first.parts()[name])
    fresh = Driver(settings, 5)
    for x, new in zip(first.x, fresh.x, strict=True):
        new.copy_(x)
    fresh.restart()
    first.round = 0
    for _ in range(12):
        first.advance()
        fresh.advance()
        for array, expected in zip(first.parts()[name], fresh.parts()[name], strict=True):
            assert torch.equal(array, expected)
    assert torch.equal(first.whole(), fresh.whole())


def eager_diloco(driver, steps, period, n):
    """Evaluate the formula of the docstring in float64, for whole models."""
    x = driver.whole().double()
    b = torch.cat(driver.b, dim=1).double()
    outer = x.clone()
    momentum = torch.zeros_like(x)
    others = torch.zeros_like(x)
    for step in range(1, steps + 1):
        x -= driver.lr * (x - b)
        if step % period == 0:
            own = outer - x
            taken = own / n + others
            momentum = 0.9 * momentum + taken
            x = outer - 0.7 * (taken + 0.9 * momentum)
            outer = x.clone()
            others = own.mean(0) - own / n
    return x


def test_eager_updates_need_an_average_one_period_later():
    settings = "algorithm.name=diloco algorithm.eager=true local.name=sgd cadence.period=4"
    at_once = Driver(settings, 5)
    late = Driver(f"{settings} cadence.delay=4", 5)
    expected = eager_diloco(at_once, 22, 4, 5)
    result = at_once.run(22).whole()
    assert torch.allclose(result.double(), expected, atol=1e-5)
    assert torch.equal(late.run(22).whole(), result)
    alone = Driver(settings, 1)
    plain = Driver(settings.replace("=true", "=false"), 1)
    for row, expected_row in zip(plain.x, alone.x, strict=True):
        row.copy_(expected_row)
    plain.restart()
    assert torch.allclose(alone.run(22).whole(), plain.run(22).whole(), atol=1e-5)


@on_each("period", [4, 8])
@on_each("name", ["dsgd cadence.name=every", "cpsgd", "diloco", "noloco"])
def test_a_step_sends_at_most_its_share(name, period):
    settings = f"algorithm.name={name} cadence.period={period}"
    parts = Driver(f"{settings} cadence.fragments=4", 6)
    whole = Driver(settings, 6).run(period).mixer.bytes_sent[0]
    sent = [0]
    for _ in range(3 * period):
        sent.append(parts.run(1).mixer.bytes_sent[0])
    assert max(np.diff(sent)) <= 1.05 / 4 * whole and sent[-1] >= 3 * whole - 12


FEW = few(FRAGMENTS)
REST = [case for case in FRAGMENTS if case not in FEW]


@pytest.mark.parametrize(
    ("n", "cases"),
    [(3, FEW), every(3, REST), *(every(n, FEW) for n in (1, 2, 4, 5, 8))],
    ids=lambda one: "" if isinstance(one, list) else None,
)
def test_resume_at_every_step_of_a_period(cases, n):
    """As in a checkpoint, the state contains received values, but no exchange in flight.

    Each case occurs with three nodes, and each of its settings with each number of nodes.
    """
    for case in cases:
        resumes_at_every_step(case, n)


def resumes_at_every_step(case, n):
    steps = 6
    whole = Driver(case, n, noise=0.1).run(2 * steps + 1).whole()
    for at in range(1, steps + 1):
        first, second = (Driver(case, n, noise=0.1) for _ in range(2))
        first.run(steps - 1 + at)
        saved = {name: [a.clone() for a in parts] for name, parts in first.parts().items()}
        numbers = first.numbers()
        x = [a.clone() for a in first.x]
        if at == 2:  # Saving has not changed the first run.
            assert torch.equal(first.run(steps + 2 - at).whole(), whole)
        for row, expected_row in zip(second.x, x, strict=True):
            row.copy_(expected_row)
        for name, parts in second.parts().items():
            for row, expected_row in zip(parts, saved.pop(name), strict=True):
                row.copy_(expected_row)
        assert not saved
        second.restore_counters(numbers)
        second.restore_cadence(numbers)
        assert torch.equal(second.run(steps + 2 - at).whole(), whole), (case, at)


def on_ranks(comm, same_host):
    from mpigossip.cluster.mpi_world import MPIWorld

    world = MPIWorld(comm)
    drivers = battery.on_ranks(FEW, world, same_host, 9)
    results = [(driver.whole().numpy(), driver.mixer.bytes_sent[0]) for driver in drivers]
    world.close()
    return results


@pytest.mark.parametrize(("n", "same_host"), [every(5, "put"), every(8, "read")])
def test_ranks_are_bitwise_identical_to_the_simulator(ranks, n, same_host):
    """The battery of algorithms, which has all cases, omits these numbers of nodes."""
    got = ranks(n)(on_ranks, same_host, timeout=200)
    for at, case in enumerate(FEW):
        driver = Driver(case, n, noise=0.1).run(9)
        assert (np.concatenate([rank[at][0] for rank in got]) == driver.whole().numpy()).all(), case
        assert [rank[at][1] for rank in got] == driver.mixer.bytes_sent, case


REFUSED = {
    "algorithm.name=dsgd cadence.name=every cadence.fragments=5": "cadence.period = 4 steps",
    "algorithm.name=diloco cadence.fragments=3 cadence.delay=3": "2 steps later",
    'algorithm.name=diloco cadence.period=2 cadence.fragments=["a","b","c"]':
        "cadence.fragments = ['a', 'b', 'c']: each fragment is sent at a separate step",
    **{
        f"algorithm.name={name} cadence.name=every cadence.{what}": "no separate local step"
        for name in ("dmsgd", "qg-dmsgd", "dsgt", "detag", "sgp", "dsgd algorithm.style=awc")
        for what in ("fragments=2", "delay=1")
    },
    "algorithm.name=dsgd algorithm.style=awc cadence.name=every cadence.fragments=3":
        'leave that out, or choose one of dmsgd-vanilla',
    "algorithm.name=sparta cadence.name=every cadence.delay=1": 'algorithm "sparta" exchanges',
    **{
        f"algorithm.name={name} algorithm.blend=0.5": "no separate local step"
        for name in ("dmsgd", "parallel", "dsgd algorithm.style=awc")
    },
    "algorithm.name=dsgd algorithm.blend=1 node.mixer=asynchronous": "must not be blended",
    "algorithm.name=diloco algorithm.eager=true cadence.delay=2 algorithm.blend=0.5":
        "algorithm.blend = 0.5: with algorithm.eager",
    "algorithm.name=dsgd cadence.name=every cadence.fragments=2 node.mixer=asynchronous":
        "would average different fragments",
}  # fmt: skip


@on_each("settings", REFUSED)
def test_errors_name_value_limit_and_remedy(settings):
    (problems,) = assemble.mistakes(assemble.load({}, settings.split()), 4)
    assert REFUSED[settings] in problems and "; " in problems


@on_each(
    ("name", "reason"),
    [
        ("parallel", "leave the cadence out"),
        ("d2", "separate local step"),
        ("decentlam", "separate local step"),
        ("defacto", "separate local step"),
        ("momentum-tracking", "separate local step"),
        ("ceca", "one of dsgd, dmsgd-vanilla"),
    ],
)
def test_methods_without_fragments_are_rejected_with_the_reason(name, reason):
    settings = f"algorithm.name={name} cadence.name=every cadence.fragments=2"
    problems = assemble.mistakes(assemble.load({}, settings.split()), 4)
    assert any(reason in text for text in problems), problems
