"""Nodes that make different numbers of local steps between exchanges: formula, bits, messages."""

import numpy as np
import pytest
import torch

from mpigossip.algorithms import cadence
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.runs import start_and_resume
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges, subject
from tests.battery import Driver, on_ranks
from tests.cases import naming, on_each, with_world
from tests.jobs import train

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = (4, 1, 3)
SETTINGS = [
    "algorithm.name=gasloc cadence.period=[4,1,3] algorithm.outer_beta=0.3",
    "algorithm.name=noloco cadence.period=[4,1,3] local.name=accumadam",
    "algorithm.name=diloco cadence.period=[4,1,3] cadence.fragments=2 cadence.delay=1",
    "algorithm.name=choco graph.name=ring cadence.name=every cadence.period=[2,1,2] node.wire=sign",
    "algorithm.name=slowmo cadence.name=cpsgd cadence.period=[1,1,2] node.wire=bf16",
]


def test_steps_are_spread_evenly_and_the_last_of_a_period_is_made_by_all():
    made = cadence.every(period=(8, 2, 3))
    resting = [made.idle_nodes(index, range(3)) for index in range(16)]
    steps = [[k for k in range(8) if node not in resting[k]] for node in range(3)]
    assert steps == [list(range(8)), [3, 7], [2, 5, 7]]
    assert resting[:8] == resting[8:] and made.idle_nodes(0, [2, 0]) == (0,)
    assert made.local_fraction == 13 / 24 and cadence.every(period=8).local_fraction == 1
    assert cadence.every(period=8).idle_nodes(0, range(3)) == ()


@on_each("name", ["dsgd cadence.name=every", "cpsgd"])
def test_a_period_equals_the_local_steps_and_the_exchange_of_the_formula(name):
    driver = Driver(f"algorithm.name={name} local.name=sgd cadence.period=[4,1,3]", 3, lr=0.2)
    x = driver.whole().double()
    b = torch.cat(driver.b, dim=1).double()
    left = 0.8 ** torch.tensor([OWN], dtype=torch.float64).T
    for t in range(5):
        w = driver.graph.matrix(t) if "every" in name else np.full((3, 3), 1 / 3)
        x = torch.from_numpy(w) @ (b + left * (x - b))
        assert torch.allclose(driver.run(4).whole().double(), x, atol=1e-5)
    if name == "cpsgd":  # who makes more steps counts for more
        weighted = ((1 - left) * b).sum(0) / (1 - left).sum()
        assert torch.allclose(driver.run(200).whole().double()[0], weighted, atol=1e-5)


@with_world
def all_settings(world):
    return [driver.whole().numpy() for driver in on_ranks(SETTINGS, world, "put", 9)]


def test_ranks_have_the_bits_of_the_simulator(ranks):
    for settings, *result in zip(SETTINGS, *ranks(3)(all_settings), strict=True):
        expected = Driver(settings, 3, noise=0.1).run(9).whole().numpy()
        assert (np.concatenate(result) == expected).all(), settings


JOB = {
    "run": {"steps": 12, "evaluate_every": 0},
    "data": {"source": "digits", "batch": 4, "workers": 0},
    "algorithm": {"name": "gasloc"},
    "cadence": {"period": [4, 1, 3]},
    "model": {"name": "lenet"},
}


def summary_of(folder, *settings):
    return train(assemble.load(JOB, [f"run.output={folder}", *settings]), 3)


def test_a_run_logs_idle_nodes_and_resumes_bitwise(tmp_path):
    whole = summary_of(tmp_path / "whole")
    _ = summary_of(tmp_path / "cut", "run.steps=6")
    saved = checkpoint.latest(tmp_path / "cut")
    steps = [checkpoint.read_node(saved, node).numbers["local_steps"] for node in range(3)]
    mean = checkpoint.average(saved, checkpoint.read_manifest(saved))
    assert steps == [6, 1, 4] and mean["local_steps"] == 11 / 3
    with SingleProcess() as world:
        again = start_and_resume.resume(tmp_path / "cut", ["run.steps=12"], world, None)
    assert again["digest"] == whole["digest"]
    loss = read(tmp_path / "whole" / "log.h5").steps["loss"]
    assert np.isfinite(loss).sum(0).tolist() == [12, 3, 9] and np.isfinite(loss[3::4]).all()
    rate = read(tmp_path / "whole" / "log.h5").steps["samples_per_second"]
    assert ((rate > 0) == np.isfinite(loss)).all()


@on_each("vmap", ["true", "false"])
def test_an_idle_node_keeps_its_parameters(vmap):
    """The node also keeps its momenta, which would change the model even without a gradient."""
    made = assemble.load(JOB, [f"node.vmap={vmap}", "model.name=mlp", "algorithm.weight_decay=0.1"])
    with SingleProcess() as world:
        trainer = (assembly := assemble.assemble(made, world, 3)).trainer
        rested = []
        for _ in range(8):
            x = trainer.replicas.x[0].clone()
            first = trainer.engine.states[0].inner.first.clone()
            rested.append(trainer.step().idle_rows)
            for before, after in (
                (x, trainer.replicas.x[0]),
                (first, trainer.engine.states[0].inner.first),
            ):
                still = (before == after).all(1)
                assert tuple(still.nonzero().flatten().tolist()) == rested[-1]
        assembly.close()
    assert rested == [(1, 2), (1,), (1,), ()] * 2


@pytest.mark.parametrize("more", [[], ["node.vmap=true", "model.name=mlp"]])
def test_equal_numbers_are_one_number(tmp_path, more):
    short = ["run.steps=8", *more]
    single = summary_of(tmp_path / "one", "cadence.period=4", *short)
    listed = summary_of(tmp_path / "many", "cadence.period=[4,4,4]", *short)
    assert single["digest"] == listed["digest"] != summary_of(tmp_path / "other", *short)["digest"]


def test_a_step_costs_as_much_as_with_the_longest_period_for_all():
    one, many = (assemble.load(JOB, [f"cadence.period={own}"]) for own in ("4", "[4, 1, 3]"))
    counted = [exchanges(subject(made)[0], 3) for made in (one, many)]
    assert counted[0].bytes_per_step == counted[1].bytes_per_step > 0
    assert counted[0].steps == counted[1].steps


@on_each(
    ("settings", "message"),
    [
        ("", "cadence.period = [4, 1, 3]: 3 numbers for 4 nodes"),
        ("algorithm.name=dsgt cadence.name=every", "gradient of every node"),
        ("run.survive=true cadence.period=[4,1,3,2]", "cadence.period = [4, 1, 3, 2]"),
    ],
)
def test_settings_without_steps_by_node_are_rejected(settings, message):
    problems = assemble.mistakes(assemble.load(JOB, settings.split()), 4)
    assert any(message in text for text in problems), problems
    assert "adpsgd" not in " ".join(problems)  # has a cadence of its own, of one number


@on_each(
    ("settings", "message"),
    [
        ("cadence.period=[]", ("cadence.period = []", "each node")),
        ("cadence.period=[2,0,1]", ("cadence.period = [2, 0, 1]", "1")),
        ("cadence.name=gossip-pga", ("cadence.period = [4, 1, 3]", "whole number")),
    ],
)
def test_wrong_lists_are_refused(settings, message):
    with pytest.raises(JobError, match=naming(message)):
        assemble.load(JOB, settings.split())


@with_world
def loops(world):
    """Return errors and rounds of loops with a list of periods, or one period for each rank."""
    import mpigossip

    results = []
    own = 2 + world.rank
    for mixer, period in (("synchronous", [2, 3]), ("synchronous", own), ("asynchronous", own)):
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            gossip = mpigossip.Gossip(
                world, model, optimizer, algorithm="gasloc", period=period, mixer=mixer
            )
        except JobError as error:
            results.append(str(error))
            continue
        for _ in range(6):
            gossip.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            gossip.step()
        results.append(gossip.engine.round)
        gossip.close()
    return results


def test_asynchronous_ranks_of_a_loop_may_have_different_periods(ranks):
    listed, unlike, rounds = zip(*ranks(2)(loops), strict=True)
    assert all("period = [2, 3]" in text for text in listed)
    assert any("cadence.period" in text for text in unlike)
    assert rounds == (3, 2)
