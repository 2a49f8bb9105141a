"""Engine without a model or data, tested with flat parameters of random numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.config.errors import NonFiniteError
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import ParameterLayout, bits
from mpigossip.groups.base import Single
from mpigossip.mixing.base import ExchangeKind
from mpigossip.training import assemble
from mpigossip.training.parts import make_graph, make_parts
from tests.battery import Driver
from tests.cases import naming, on_each

N = 3
P = 512


class Numbers:
    """Flat parameters with random gradients, which depend on the step."""

    first = (0,)

    def __init__(self):
        self.flat = ParameterLayout(("x",), ((P,),), ((1,),), (0,), P, P, 1)
        draw = torch.Generator().manual_seed(0)
        self.x = self.full = [torch.randn(N, P, generator=draw)]
        self.g = [torch.zeros(N, P)]

    def draw(self, step):
        self.g[0].copy_(torch.randn(N, P, generator=torch.Generator().manual_seed(step + 1)))


def engine(settings, change=lambda method: method):
    job = assemble.load({}, settings.split())
    vector = Numbers()
    parts = make_parts(job, make_graph(job, N), vector.flat)
    parts = replace(parts, methods=[change(parts.method)])
    return parts.make_engine(parts.open_mixer(SingleProcess()), Single(), vector, 2)


def steps(made, first, last, skipped=()):
    for step in range(first, last):
        made.vector.draw(step)
        yield made.step(0.1, skipped if step % 3 == 1 else ())


LOCAL = [
    "algorithm.name=cpsgd cadence.period=3 local.name=adamw local.decoupled_decay=0.1",
    "algorithm.name=slowmo cadence.name=cpsgd cadence.period=3",
    "algorithm.name=diloco cadence.period=3 node.wire=qsgd",
    "algorithm.name=dsgd cadence.name=every cadence.period=2 node.wire=bf16",
]


@on_each("settings", LOCAL)
def test_a_local_step_without_an_outbox_is_bitwise_identical(settings):
    with_it = engine(settings)
    without = engine(settings, lambda m: m._replace(local_update=None))
    for one, other in zip(steps(with_it, 0, 7, (1,)), steps(without, 0, 7, (1,)), strict=True):
        same = torch.allclose(one.mixed_distance, other.mixed_distance, rtol=0, equal_nan=True)
        assert one.kind is other.kind and one.bytes_sent == other.bytes_sent and same
    assert torch.equal(with_it.vector.x[0], without.vector.x[0])


@on_each("settings", [*LOCAL, "algorithm.name=dsgt algorithm.style=awc", "algorithm.name=sgp"])
def test_state_by_name_continues_bitwise(settings):
    whole = engine(settings)
    fresh = engine(settings)
    list(steps(whole, 0, 4))
    kept = [
        (whole.vector.x[0].clone(), [whole.pack_state(row) for row in range(N)], whole.numbers())
    ]
    list(steps(whole, 4, 8))
    ((x, arrays, numbers),) = kept
    fresh.vector.x[0].copy_(x)
    for row in range(N):
        fresh.restore(arrays[row], numbers, row)
    list(steps(fresh, 4, 8))
    assert torch.equal(whole.vector.x[0], fresh.vector.x[0])
    assert whole.numbers() == fresh.numbers() and fresh.index == 8


def test_an_exchange_may_be_received_before_the_step():
    early, late = (engine("algorithm.name=dsgd algorithm.style=awc") for _ in range(2))
    for step in range(5):
        early.ahead()
        early.wait_exchange()
        for each in (early, late):
            each.vector.draw(step)
            assert each.step(0.1).kind is ExchangeKind.GOSSIP
    assert torch.equal(early.vector.x[0], late.vector.x[0])


def test_an_average_without_a_gradient_leaves_the_mean_and_draws_nodes_together():
    made = engine("algorithm.name=dsgd")
    x = made.vector.x[0]
    mean = x.mean(0)
    distance = (x - x.mean(0)).norm()
    for _ in range(3):
        made.average(0.1)
    assert torch.allclose(x.mean(0), mean, atol=1e-5) and (x - mean).norm() < 0.2 * distance
    assert made.index == 0 and made.round == 3


def test_an_average_of_a_waiting_node_measures_nothing(monkeypatch):
    """An asynchronous node exchanges often while it waits, and these exchanges have no record."""
    made = engine("algorithm.name=dsgd")
    measured = []
    monkeypatch.setattr(made, "measure", lambda *message: measured.append(message))
    made.average(0.1)
    assert not measured


def test_the_graphs_clock_counts_gossip_rounds_alone():
    """Neither a global average nor a local step uses a round of the graph."""
    for cadence in ("gossip-pga", "every"):
        made = engine(f"algorithm.name=dsgd cadence.name={cadence} cadence.period=3")
        kinds = [one.kind for one in steps(made, 0, 7)]
        assert (
            made.round == kinds.count(ExchangeKind.GOSSIP) == {"gossip-pga": 5, "every": 2}[cadence]
        )


BAD = {
    "algorithm.name=dsgd node.wire=qsgd": 3,
    "algorithm.name=dsgd algorithm.style=awc": 4,  # sends the result of step 3
    "algorithm.name=dmsgd": 3,
    "algorithm.name=parallel": 3,
    "algorithm.name=diloco cadence.period=6": 5,  # local steps send nothing
    "algorithm.name=dsgd cadence.name=every cadence.period=6 local.name=adamw": 5,
}


def test_a_bad_gradient_is_named_and_never_sent():
    for settings, message in BAD.items():
        made = engine(settings)
        with pytest.raises(NonFiniteError) as caught:  # noqa: PT012
            for step in range(7):
                made.vector.draw(step)
                made.vector.g[0][1, 5:7] += math.nan if step == 3 else 0
                made.step(0.1)
        assert f"step {message}: " in str(caught.value), settings
        assert "node 1 " in str(caught.value), settings
        assert "the first in x;" in str(caught.value), settings
        assert made.vector.x[0][[0, 2]].isfinite().all(), settings


def test_the_parameter_is_named_in_any_slot_and_fragment():
    for more in ("", " cadence.name=every cadence.period=3 cadence.fragments=3"):
        driver = Driver(f"algorithm.name=dsgd{more}", 3)
        driver.vector.x[1][2, 700 - 512] = math.inf
        with pytest.raises(NonFiniteError, match=naming("1 values", "node 2", "4.weight")):
            driver.run(3)


def test_large_values_are_no_fault():
    made = engine("algorithm.name=dsgd")
    made.vector.x[0].fill_(3e38)  # their sum is infinite
    made.step(0.1)


def adamw(x, g, m, v, t, lr=0.1, beta1=0.9, beta2=0.999):
    """Return a step of AdamW in float64, from its paper."""
    m[:] = beta1 * m + (1 - beta1) * g
    v[:] = beta2 * v + (1 - beta2) * g * g
    x -= lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)


def test_adam_corrects_its_bias_by_the_local_steps_of_each_row():
    made = engine("algorithm.name=dsgd cadence.name=never local.name=adamw")
    own = [0, 0, 0]
    x = made.vector.x[0].double().numpy()
    (m, v) = np.zeros((2, N, P))
    for step in range(40):
        skipped = ((1,) if step % 4 else ()) + ((2,) if step in (0, 7) else ())
        made.vector.draw(step)
        g = made.vector.g[0].double().numpy()
        for row in {0, 1, 2}.difference(skipped):
            own[row] += 1
            adamw(x[row], g[row], m[row], v[row], own[row])
        made.step(0.1, skipped)
        if step == 20:  # Continue from the content of a checkpoint.
            kept = [
                (made.pack_state(k), made.numbers() | {"local_steps": own[k]}) for k in range(N)
            ]
            made.restart()
            for row, (arrays, numbers) in enumerate(kept):
                made.restore(arrays, numbers, row)
    # The tolerance allows a few rounding errors in each of 40 steps, at values below 8.
    assert np.abs(made.vector.x[0].double().numpy() - x).max() < 40 * 8 * 2**-23
    assert made.counts == own == [40, 10, 38]
    made.restore(
        made.pack_state(1), made.numbers(), 1
    )  # A state of an earlier version has one index for all rows.
    assert made.counts == [40, 40, 38]


def test_accumulated_adam_counts_its_period_by_row():
    settings = "algorithm.name=dsgd cadence.name=never local.name=accumadam local.period=4"
    rested = engine(settings)
    alone = engine(settings)
    for step in range(24):
        rested.vector.draw(step)
        g = rested.vector.g[0][1].clone()
        skipped = (1,) if step % 3 == 0 else ()
        rested.step(0.1, skipped)
        if not skipped:  # The other steps of this row have no effect.
            alone.vector.g[0][1] = g
            alone.step(0.1)
    assert torch.equal(rested.vector.x[0][1], alone.vector.x[0][1])


def test_torchs_profiler_shows_the_phases_of_a_step():
    from torch.profiler import ProfilerActivity, profile

    from mpigossip.groups.threads import ThreadGroup

    made = engine("algorithm.name=dsgd")
    group = ThreadGroup(2)
    full = [torch.ones(1, 8) for _ in range(2)]
    [*steps(made, 0, 1)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        [*steps(made, 1, 2)]
        group.all_gather(group.reduce_scatter_mean(full), full)
    group.close()
    names = {event.key for event in seen.key_averages()}
    assert {
        f"mpigossip: {name}"
        for name in (
            "send",
            "wait for neighbours",
            "receive",
            "sum inside the node",
            "gather inside the node",
        )
    } <= names


@on_each(("sent", "same"), [(0.0, False), (-0.0, True), (math.nan, True)])
def test_sent_parameters_are_compared_by_their_bits(sent, same):
    """As numbers, -0.0 equals 0.0, and NaN does not equal NaN, so edits are detected by bits."""
    x = torch.tensor([[sent if same else -0.0]])
    out = torch.tensor([[[sent]]])
    sender = SimpleNamespace(
        exchange=SimpleNamespace(outbox=[out]),
        vector=SimpleNamespace(x=[x]),
        mixer=SimpleNamespace(layout=SimpleNamespace(wire=SimpleNamespace(exact=True))),
    )
    (kept,) = Engine.sent_x(sender)
    assert torch.equal(bits(kept), bits(x))
    assert (kept.data_ptr() == out.data_ptr()) == same


class Written:
    """Exchange that records the names of its methods as the engine calls them."""

    outbox = None

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given: self.calls.append(name) or {}


def test_a_step_is_local_or_sends_and_receives():
    """The engine calls adapt in a LOCAL step, otherwise send and receive."""
    made = engine("algorithm.name=dsgd cadence.name=every cadence.period=2")
    made.exchange = written = Written()
    list(steps(made, 0, 2))
    assert written.calls == ["adapt", "send", "receive"]
    made.wait_exchange()
    made.replace_mixer(made.mixer)
    assert written.calls[3:] == ["wait", "discard"]


@on_each("delay", [0, 1])
def test_an_exchange_that_is_discarded_leaves_no_message(delay):
    settings = "algorithm.name=diloco cadence.period=2 cadence.fragments=2"
    made = engine(f"{settings} cadence.delay={delay}")
    list(steps(made, 0, 3))
    assert made.in_flight == bool(delay)
    made.replace_mixer(made.mixer)
    assert not made.in_flight
