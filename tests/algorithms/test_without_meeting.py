"""Outer steps of asynchronous nodes: published vectors, preserved sums, limits, slow nodes."""

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.engine.vector import named_arrays
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind
from mpigossip.mixing.delayed import Delayed, Faults, table
from mpigossip.mixing.simulated import Simulated
from tests.battery import Driver
from tests.cases import on_each

pytestmark = pytest.mark.usefixtures("one_thread")

GASLOC = "algorithm.name=gasloc local.name=sgd cadence.period=3"
NOLOCO = "algorithm.name=noloco local.name=sgd cadence.period=3"
METHODS = (
    GASLOC,
    f"{GASLOC} algorithm.outer_beta=0.3 algorithm.consensus_step=0.8",
    NOLOCO,
)


class Looked(Simulated):
    """Mixer that records the outbox of each step, which an asynchronous neighbour may read then."""

    synchronous = False
    shown = None

    def start(self, kind, t, exchange=None):
        self.shown = kind, [[part.clone() for part in segment] for segment in self._out]
        super().start(kind, t, exchange)


@on_each("settings", METHODS)
def test_local_steps_show_what_an_exchange_would_send(settings):
    """A neighbour that reads between exchanges gets the vectors that an exchange would send.

    These are θ + η (x − θ) for gasloc, and x − φ and φ for noloco. Otherwise, the neighbour would
    average its model with an array that is not a model.
    """
    looked = Driver(settings, 4, Looked, noise=0.1)
    unseen = Driver(settings, 4, noise=0.1)
    kinds = []
    for _ in range(7):
        anchors = [state.anchor.clone() for state in looked.states]
        looked.advance()
        unseen.advance()
        kind, shown = looked.mixer.shown
        kinds.append(kind)
        for x, anchor, parts in zip(looked.x, anchors, shown, strict=True):
            way = {1: [x], 2: [x - anchor, anchor]}[len(parts)]
            wanted = [anchor + 0.7 * (x - anchor)] if "gasloc" in settings else way
            if kind is ExchangeKind.LOCAL:
                assert all(map(torch.allclose, parts, wanted))
    assert kinds.count(ExchangeKind.LOCAL) == 5
    assert torch.equal(looked.whole(), unseen.whole())


def held(driver):
    """Return the vectors whose sum over nodes no exchange changes, messages in flight included.

    gasloc: θ − γ y' + α f; noloco: φ + (μ m + a f)/(1 − μ), f what is under way.
    """
    options = driver.job.algorithm.options
    total = []
    pending = [sum(part.double() for part in parts)[0] for parts in driver.mixer.pending()]
    for state, way in zip(driver.states, pending, strict=True):
        anchor = state.anchor.double().sum(0)
        slow = state.slow.double().sum(0)
        beta = options["outer_beta"]
        lr = options["outer_lr"]
        if "consensus_step" in options:
            total.append(anchor - beta * slow + options["consensus_step"] * way)
        else:
            total.append(anchor + (beta * slow + lr * way) / (1 - beta))
    return torch.cat(total)


@on_each("settings", METHODS)
@on_each("n", [3, 6])
def test_the_mean_is_preserved_and_reached_with_any_delays(settings, n):
    ages = table(np.random.default_rng(n).integers(-1, 4, size=(7, n, n)))
    driver = Driver(settings, n, lambda g, layout: Delayed(g, layout, ages), scale=0.0)
    begin = held(driver)
    mean = driver.whole().mean(0)
    spread = driver.whole().std()
    for _ in range(40):
        driver.run(3)
        assert torch.allclose(held(driver), begin, atol=1e-4)
    driver.run(600)
    assert float((driver.whole() - mean).abs().max()) < 1e-2 * spread


@on_each("settings", METHODS)
def test_without_delays_the_synchronous_method_results(settings):
    """On a graph of pairs, each node applies its partner's correction in the same round."""
    settings += " graph.name=random-matching"
    free = Driver(settings, 6, lambda g, layout: Delayed(g, layout, Faults(6).ages), noise=0.1)
    waiting = Driver(settings, 6, noise=0.1)
    assert torch.allclose(free.run(24).whole(), waiting.run(24).whole(), atol=1e-5)


@on_each("settings", METHODS)
@on_each("n", [3, 8])
def test_a_straggler_leaves_nodes_near_the_optimum(settings, n):
    """The nodes have different data; copies of the slow node's model are up to 16 rounds old."""
    ill = Faults(n, times=4.0, steps=10**6, lost=0.05)
    driver = Driver(settings, n, lambda g, layout: Delayed(g, layout, ill.ages), lr=0.05)
    begin = driver.whole()
    best = driver.optimum()
    after = driver.run(600).whole()
    assert (after.mean(0) - best).norm() < 0.25 * (begin.mean(0) - best).norm()
    assert (after - best).norm() < 0.5 * (begin - best).norm()


@on_each("name", ["noloco", "gasloc", "detag"])
def test_a_node_that_waits_takes_no_step_but_averages(name):
    """An exchange between steps (`Engine.average`) makes no outer step and ends no phase."""
    method = algorithms.build(name, "sgd", {}, 0, graph("complete", 2))
    x = torch.arange(6.0).reshape(2, 3)
    state = method.init(x)
    for t in range(4):
        now = Step(t, t, ExchangeKind.GOSSIP, 0.5, skipped=(0, 1), waits=True)
        out = tuple(torch.zeros_like(x) for _ in range(method.vectors))
        state = method.send(x, torch.zeros_like(x), state, out, now)
        mixed = tuple(one.mean(0).expand_as(one).clone() for one in out)
        state = method.receive(x, torch.zeros_like(x), state, out, mixed, now)
    assert torch.allclose(x.mean(0), torch.tensor([1.5, 2.5, 3.5]), atol=1e-5)
    moved = bool((x[0] - x[1]).abs().max() < 3)
    assert moved is (name != "detag"), "its x moves at the end of a phase"


@on_each("name", ["dmsgd", "qg-dmsgd", "dsgt", "momentum-tracking", "noloco", "gasloc"])
def test_exchanges_of_nodes_that_wait_keep_the_momentum(name):
    """If the received models equal the node's own, an exchange without a step changes nothing."""
    method = algorithms.build(name, None, {}, 0)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, generator=draw)
    state = method.init(x)

    def exchange(g, step):
        sent = tuple(torch.empty_like(x) for _ in range(method.vectors))
        after = method.send(x, None if method.ahead else g, state, sent, step)
        return method.receive(x, g, after, sent, tuple(part.clone() for part in sent), step)

    for index in range(2):
        step = Step(index, index, ExchangeKind.GOSSIP, 0.1)
        state = exchange(torch.randn(1, 8, generator=draw), step)
    before = [x.clone(), *(part.clone() for _, part in named_arrays(state))]
    for t in range(2, 12):
        step = Step(2, t, ExchangeKind.GOSSIP, 0.1, skipped=(0,), waits=True)
        state = exchange(torch.zeros(1, 8), step)
    after = [x, *(part for _, part in named_arrays(state))]
    assert all(map(torch.equal, before, after)) and before[1].any()
