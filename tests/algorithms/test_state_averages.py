"""Moments averaged at periods of their own: numpy, ranks, resume, bytes, loops and errors."""

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError, NodeSection
from mpigossip.config.errors import NonFiniteError
from mpigossip.config.readable import format_bytes
from mpigossip.engine.state_averages import local_arrays
from mpigossip.runs.overview import between
from mpigossip.training import assemble
from mpigossip.training.parts import make_graph, make_parts
from mpigossip.training.rules import state_warning
from tests import battery
from tests.battery import FLAT, Double, Driver, job
from tests.cases import naming, on_each, with_world

STEPS = 40
ADAM = "algorithm.name=dsgd local.name=adamw"
BOTH = f"{ADAM} algorithm.average_state={{second=4,first=6}}"
EXACT = f"{BOTH} cadence.name=cpsgd cadence.period=2"
CASES = (
    BOTH,
    EXACT,
    f"{ADAM} cadence.name=every cadence.period=3 cadence.fragments=3 "
    "algorithm.average_state={second=5}",
    "algorithm.name=noloco local.name=accumadam cadence.period=3 node.wire=bf16 "
    "algorithm.average_state={second=4,gathered=2}",
    "algorithm.name=dmsgd-vanilla local.name=momentum graph.name=ring "
    "algorithm.average_state={momentum=3}",
)

pytestmark = pytest.mark.usefixtures("one_thread")


def by_formula(driver, exact):
    """Return models and second moments by the docstrings of adamw and StateAverages, in numpy."""
    x = driver.whole().numpy()
    b = torch.cat(driver.b, dim=1).numpy()
    n = len(x)
    m, v = np.zeros_like(x), np.zeros_like(x)
    mean = np.full((n, n), 1 / n)
    counts = dict.fromkeys("xvm", 0)

    def matrix(name):
        counts[name] += 1
        return mean if exact else driver.graph.matrix(counts[name] - 1)

    for step in range(1, STEPS + 1):
        g = x - b
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        x = x - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        x = matrix("x") @ x if not exact or step % 2 == 0 else x
        v = matrix("v") @ v if step % 4 == 0 else v
        m = matrix("m") @ m if step % 6 == 0 else m
    return x, v


@on_each("settings", [BOTH, EXACT])
@on_each("n", [2, 3, 5, 8])
def test_models_and_moments_equal_the_formula(settings, n):
    driver = Double(settings, n)
    x, v = by_formula(driver, settings == EXACT)
    driver.run(STEPS)
    second = torch.cat([local_arrays(state)["second"] for state in driver.states], dim=1).numpy()
    assert np.abs(driver.whole().numpy() - x).max() <= 1e-12 * np.abs(x).max()
    assert np.abs(second - v).max() <= 1e-12 * np.abs(v).max()


@on_each("n", [4, 16])
def test_an_array_meets_all_neighbours_although_its_period_is_a_multiple_of_the_graph_s(n):
    """After log2 n averages on the one-peer exponential graph, v is equal on all nodes."""
    driver = Driver(f"{ADAM} algorithm.average_state={{second=16}}", n)
    driver.lr = 0.0
    for state in driver.states:  # v of the gradients that follow is equal, because β₂ is 1
        local_arrays(state)["second"].copy_(torch.arange(float(n)).view(-1, 1).expand(-1, 512))
    averages = driver.averages
    for exchange in range(1, n.bit_length()):
        driver.index = 16 * exchange - 1
        averages.exchange(driver)
    for state in driver.states:
        assert (local_arrays(state)["second"] == (n - 1) / 2).all()


@on_each("settings", CASES)
def test_resume_in_the_middle_of_each_period(settings):
    battery.check_resume(lambda: Driver(settings, 4, noise=0.1), STEPS, (1, 2, 3, 5, 7, 10, 24))


def test_bytes_are_counted_and_planned():
    plain = Driver(ADAM, 4).run(24)
    averaged = Driver(BOTH, 4).run(24)
    exchanges = 24 // 4 + 24 // 6
    vector = 4 * FLAT.size
    assert averaged.mixer.bytes_sent[0] == plain.mixer.bytes_sent[0] + exchanges * vector


def test_the_first_lines_of_a_run_name_the_bytes_of_each_array():
    """A node sends two messages per round on the ring, and 2 (n − 1)/n for a global average."""
    for settings, messages in ((f"{BOTH} graph.name=ring", 2), (EXACT, 1.5)):
        driver = Driver(settings, 4)
        lines = dict(between(driver, driver.graph, NodeSection(), SingleProcess()))
        nbytes = format_bytes(messages * 4 * FLAT.size)
        text = f"{nbytes} every 4 steps for second, {nbytes} every 6 steps for first"
        assert text in lines["traffic"]


def on_ranks(comm):
    from mpigossip.cluster.mpi_world import MPIWorld

    with MPIWorld(comm) as world:
        drivers = battery.on_ranks(CASES, world, "read", STEPS)
        return [(driver.whole().numpy(), driver.mixer.bytes_sent[0]) for driver in drivers]


@pytest.mark.both
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_equal_the_simulator_to_the_last_bit(ranks, n):
    got = ranks(n)(on_ranks)
    for index, settings in enumerate(CASES):
        driver = Driver(settings, n, noise=0.1).run(STEPS)
        expected = driver.whole().numpy()
        assert (np.concatenate([rank[index][0] for rank in got]) == expected).all(), settings
        assert [rank[index][1] for rank in got] == driver.mixer.bytes_sent, settings


PERIODS = {"exp_avg_sq": 2, "exp_avg": 4, "momentum_buffer": 3}


def make_model():
    """Return a model, Muon for its matrices, and AdamW for its biases."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    matrices, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=0.01)]


def backward(model, step, node):
    draw = torch.Generator().manual_seed(100 * step + node)
    model.zero_grad()
    (model(torch.randn(5, 6, generator=draw)) - node).square().mean().backward()


@with_world
def loop(world):
    model, inner = make_model()
    gossip = mpigossip.Gossip(world, model, inner, "dsgd", average_state=PERIODS)
    for step in range(12):
        backward(model, step, world.rank)
        gossip.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def average(tensors):
    mean = torch.stack([*tensors]).mean(0)
    for tensor in tensors:
        tensor.copy_(mean)


def by_hand():
    """Return the model of both nodes; every round on two nodes is an average."""
    nodes = [make_model() for _ in range(2)]
    for step in range(12):
        for node, (model, inner) in enumerate(nodes):
            backward(model, step, node)
            for optimizer in inner:
                optimizer.step()
        with torch.no_grad():
            for pair in zip(*(model.parameters() for model, _ in nodes), strict=True):
                average([p.data for p in pair])
                states = [
                    {k: v for o in inner if p in o.state for k, v in o.state[p].items()}
                    for p, (_, inner) in zip(pair, nodes, strict=True)
                ]
                for name, period in PERIODS.items():
                    if (step + 1) % period == 0 and name in states[0]:
                        average([state[name] for state in states])
    return torch.cat([p.detach().reshape(-1) for p in nodes[0][0].parameters()]).numpy()


def test_a_loop_averages_the_arrays_of_all_its_optimizers(ranks):
    expected = by_hand()
    for result in ranks(2)(loop):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)


def test_an_array_with_infinite_values_is_not_sent():
    settings = ["model.name=mlp", "data.workers=0", "node.devices=cpu:1", "data.batch=8"]
    made = assemble.load({}, [*ADAM.split(), *settings, "algorithm.average_state={second=2}"])
    trainer = assemble.assemble(made, SingleProcess(), 3).trainer
    for _ in range(3):
        trainer.step()
    local_arrays(trainer.engine.states[0])["second"][1, 5] = float("inf")
    with pytest.raises(NonFiniteError, match=naming("step 3", "second", "node 1")):
        trainer.step()


def test_an_optimizer_without_arrays_is_rejected_at_the_first_average():
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"average_state": {"momentum_buffer": 1}}
    gossip = mpigossip.Gossip(SingleProcess(), model, inner, "dsgd", **options)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(JobError, match=naming("SGD", "no arrays")):
        gossip.step()


@with_world
def wrong_loop(world):
    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    gossip = mpigossip.Gossip(world, model, inner, "dsgd", average_state={"second": 1})
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(JobError, match=naming("exp_avg, exp_avg_sq")):
        gossip.step()


def test_a_loop_rejects_unknown_names(ranks):
    ranks(2)(wrong_loop)


REFUSED = {
    "algorithm.name=dmsgd algorithm.average_state={momentum=4}": "replaces the local step",
    f"{ADAM} algorithm.average_state={{exp_avg_sq=4}}": "use first or second",
    f"{BOTH} cadence.name=never": 'cadence.name = "never"',
    f"{BOTH} node.mixer=asynchronous": "do not make equal rounds",
    f"{BOTH} run.survive=true": "do not survive a rank failure",
    f"{BOTH} graph.name=ceca": "only permutes",
    f"{BOTH} graph.name=star graph.weights=laplacian": "negative weights",
    "algorithm.name=sgp local.name=adamw graph.name=star graph.weights=push "
    "algorithm.average_state={second=4}": "rows of the mixing matrix do not sum to one",
}


@on_each("settings", REFUSED)
def test_errors_name_the_setting_and_a_remedy(settings):
    problems = assemble.mistakes(assemble.load({}, settings.split()), 5)
    assert any(REFUSED[settings] in text and "; " in text for text in problems), problems


def test_a_period_of_zero_is_rejected():
    with pytest.raises(JobError, match=naming("algorithm.average_state.second = 0", "1")):
        assemble.load({}, [*ADAM.split(), "algorithm.average_state={first=2,second=0}"])


@on_each(("settings", "warns"), [
    (f"{ADAM} algorithm.average_state={{first=4}}", True),
    (f"{ADAM} algorithm.average_state={{first=4,second=8}}", True),
    (BOTH, False),
    (f"{ADAM} algorithm.average_state={{first=3,second=6}} cadence.name=cpsgd", False),
])  # fmt: skip
def test_a_warning_if_neighbours_get_m_more_often_than_v(settings, warns):
    made = job(settings)
    assert bool(state_warning(make_parts(made, make_graph(made, 4)))) == warns
