"""The weight of mixing γ: models in numpy, ranks, resume, and errors."""

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.config import JobError
from tests import battery
from tests.battery import Double, Driver
from tests.cases import naming, on_each, with_world

STEPS = 40
GAMMA = 0.3
BLENDED = f"algorithm.name=dsgd local.name=sgd algorithm.blend={GAMMA}"
CASES = (
    BLENDED,
    f"{BLENDED} cadence.name=gossip-pga cadence.period=3",
    f"{BLENDED} cadence.name=every cadence.period=4 cadence.fragments=2 cadence.delay=1",
    "algorithm.name=diloco cadence.period=3 algorithm.blend=0.3 node.wire=bf16",
    "algorithm.name=dsgd local.name=adamw algorithm.blend=0 node.wire=qsgd",
)

pytestmark = pytest.mark.usefixtures("one_thread")


@on_each("n", [2, 3, 5, 8])
def test_models_equal_the_formula(n):
    driver = Double(BLENDED, n)
    x = driver.whole().numpy()
    b = torch.cat(driver.b, dim=1).numpy()
    for step in range(STEPS):
        x = x - 0.1 * (x - b)
        x = (1 - GAMMA) * x + GAMMA * driver.graph.matrix(step) @ x
    result = driver.run(STEPS).whole().numpy()
    assert np.abs(result - x).max() <= 1e-12 * np.abs(x).max()


def test_a_weight_of_one_is_the_method():
    plain = Driver("algorithm.name=dsgd", 5, noise=0.1).run(9)
    blended = Driver("algorithm.name=dsgd algorithm.blend=1", 5, noise=0.1).run(9)
    assert torch.equal(plain.whole(), blended.whole())
    assert plain.mixer.bytes_sent == blended.mixer.bytes_sent


@on_each("settings", CASES)
def test_resume_in_the_middle(settings):
    battery.check_resume(lambda: Driver(settings, 3, noise=0.1), STEPS, (1, 2, 7, 20, 33))


def on_ranks(comm):
    from mpigossip.cluster.mpi_world import MPIWorld

    with MPIWorld(comm) as world:
        return [driver.whole().numpy() for driver in battery.on_ranks(CASES, world, "read", STEPS)]


@pytest.mark.both
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_equal_the_simulator_to_the_last_bit(ranks, n):
    got = ranks(n)(on_ranks)
    for index, settings in enumerate(CASES):
        expected = Driver(settings, n, noise=0.1).run(STEPS).whole().numpy()
        assert (np.concatenate([rank[index] for rank in got]) == expected).all(), settings


@with_world
def loop(world):
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = mpigossip.Gossip(world, model, inner, "dsgd", blend=0.5)
    model(torch.ones(1, 2)).sum().backward()
    gossip.step()
    with pytest.raises(JobError, match=naming("average()", "blend")):
        gossip.average()


def test_a_blended_loop_rejects_average(ranks):
    ranks(2)(loop)
