"""The engine by itself: no model, no data, a vector of numbers and the simulator."""

import pytest
import torch

from mpigossip.cluster.ranks import Alone
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import Flat
from mpigossip.groups.base import Single
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout
from mpigossip.training import assemble

N, P = 3, 512


class Numbers:
    """A vector whose gradient is drawn from the step."""

    first = (0,)

    def __init__(self):
        self.flat = Flat(("x",), ((P,),), ((1,),), (0,), P, P, 1)
        draw = torch.Generator().manual_seed(0)
        self.x = self.full = [torch.randn(N, P, generator=draw)]
        self.g = [torch.zeros(N, P)]

    def draw(self, step):
        self.g[0].copy_(torch.randn(N, P, generator=torch.Generator().manual_seed(step + 1)))


def engine(settings, change=lambda method: method):
    job = assemble.load({}, settings.split())
    graph, vector = assemble.make_graph(job, N), Numbers()
    method = change(assemble.make_method(job, P, graph))
    wire = assemble.make_wire(job)
    mixer = open_mixer(graph, Layout((P,), method.vectors, method.scalars, (), wire), Alone())
    cadence = assemble.make_cadence(job, method, graph)
    return Engine(mixer, Single(), vector, [method], cadence, measure_every=2)


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


@pytest.mark.parametrize("settings", LOCAL)
def test_a_local_step_without_an_outbox_has_the_same_bits(settings):
    with_it, without = engine(settings), engine(settings, lambda m: m._replace(alone=None))
    for one, other in zip(steps(with_it, 0, 7, (1,)), steps(without, 0, 7, (1,)), strict=True):
        same = torch.allclose(one.mixed_distance, other.mixed_distance, rtol=0, equal_nan=True)
        assert one.kind is other.kind and one.bytes_sent == other.bytes_sent and same
    assert torch.equal(with_it.vector.x[0], without.vector.x[0])


@pytest.mark.parametrize(
    "settings", [*LOCAL, "algorithm.name=dsgt algorithm.style=awc", "algorithm.name=sgp"]
)
def test_state_by_name_goes_on_to_the_bit(settings):
    whole, fresh = engine(settings), engine(settings)
    list(steps(whole, 0, 4))
    kept = [(whole.vector.x[0].clone(), [whole.arrays(row) for row in range(N)], whole.numbers())]
    list(steps(whole, 4, 8))
    ((x, arrays, numbers),) = kept
    fresh.vector.x[0].copy_(x)
    for row in range(N):
        fresh.restore(arrays[row], numbers, row)
    list(steps(fresh, 4, 8))
    assert torch.equal(whole.vector.x[0], fresh.vector.x[0])
    assert whole.numbers() == fresh.numbers() and fresh.index == 8


def test_an_exchange_may_be_taken_in_before_the_step():
    early, late = (engine("algorithm.name=dsgd algorithm.style=awc") for _ in range(2))
    for step in range(5):
        early.ahead()
        early.settle()
        for each in (early, late):
            each.vector.draw(step)
            assert each.step(0.1).kind is Kind.GOSSIP
    assert torch.equal(early.vector.x[0], late.vector.x[0])


def test_an_average_without_a_gradient_leaves_the_mean_and_draws_nodes_together():
    made = engine("algorithm.name=dsgd")
    x = made.vector.x[0]
    mean, apart = x.mean(0), (x - x.mean(0)).norm()
    for _ in range(3):
        made.average(0.1)
    assert torch.allclose(x.mean(0), mean, atol=1e-5) and (x - mean).norm() < 0.2 * apart
    assert made.index == 0 and made.round == 3
