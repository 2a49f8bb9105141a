"""Gossip in a custom loop around a torch optimizer."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.cluster.world import SingleProcess
from tests.cases import naming, with_world
from tests.optim.in_node import whole

STEPS = 7


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def batch(node, step, slot=0):
    draw = np.random.default_rng([node, step, slot])
    return torch.from_numpy(draw.standard_normal((8, 6), np.float32))


@with_world
def train_with_collective_calls(world, often):
    """Train an algorithm that sends ahead, so that an exchange is in flight between two steps.

    :param often: whether to make collective calls between steps, which wait for the exchange
    :return: the parameters, (P,), and the last consensus distance
    """
    model, optimizer = make(world.rank)
    gossip = mpigossip.Gossip(world, model, optimizer, style="awc", measure_every=2)
    for step in range(STEPS):
        gossip.zero_grad()
        model(batch(world.rank, step)).square().mean().backward()
        gossip.step()
        if often:
            with gossip.averaged() as averaged:
                mean = whole(averaged)
            assert gossip.consensus_distance() >= 0 and not torch.equal(mean, whole(model))
    return whole(model).numpy(), gossip.record.consensus_distance


def test_collective_calls_change_nothing_of_an_exchange_in_flight(ranks):
    for (never, distance), (often, other) in zip(
        ranks(3)(train_with_collective_calls, False),
        ranks(3)(train_with_collective_calls, True),
        strict=True,
    ):
        assert (never == often).all() and distance == other > 0


def test_average_is_rejected_while_an_exchange_is_in_flight():
    for overlap in ("auto", "never"):
        model, optimizer = make(0)
        gossip = mpigossip.Gossip(SingleProcess(), model, optimizer, style="awc", overlap=overlap)
        model(batch(0, 0)).square().mean().backward()
        gossip.step()
        if overlap == "auto":
            with pytest.raises(
                ValueError, match=naming("average()", "in flight", 'overlap="never"')
            ):
                gossip.average()
        else:
            gossip.average()


def test_gossip_uses_the_time_limit_of_the_world_by_default():
    world = SingleProcess()
    assert mpigossip.Gossip(world, *make(0))._job.node.timeout_s == 300
    world.timeout_s = 60.0
    assert mpigossip.Gossip(world, *make(0))._job.node.timeout_s == 60
    assert mpigossip.Gossip(world, *make(0), timeout_s=5)._job.node.timeout_s == 5


def test_a_model_that_is_not_float32_is_rejected():
    model, _ = make(0)
    model.double()
    says = "torch.float64", "float32", "mpigossip.Averager"
    with pytest.raises(ValueError, match=naming(*says)):
        mpigossip.Gossip(SingleProcess(), model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_complex_parameter_is_rejected_with_a_remedy_that_keeps_its_imaginary_part():
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=naming("torch.complex64", "torch.view_as_real")) as error:
        mpigossip.Gossip(SingleProcess(), model, torch.optim.SGD(model.parameters(), 0.1))
    assert "model.float()" not in str(error.value)


def test_the_loop_in_the_readme_runs_as_pasted(mpirun, pooled, tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (code,) = [code for code in codes if "Gossip(" in code]
    (tmp_path / "own_loop.py").write_text(code)
    for n in (0, 4):
        if n:
            done = pooled(n, "own_loop.py")
        else:
            done = mpirun(n, [sys.executable, "own_loop.py"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        error, distance = re.search(r"error (\S+), consensus distance (\S+)", done.stdout).groups()
        assert float(error) < 1 and (float(distance) > 0) == (n == 4)


def test_unknown_arguments_and_attributes_are_rejected():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=naming('overlap = "always"', "auto, never")):
        mpigossip.Gossip(SingleProcess(), model, optimizer, overlap="always")
    with pytest.raises(ValueError, match=naming("devices")):
        mpigossip.Gossip(SingleProcess(), model, optimizer, devices="cpu:2")
    with pytest.raises(ValueError, match=naming("kept", "unknown")):
        mpigossip.Gossip(SingleProcess(), model, optimizer, wire="top-k", kept=0.1)
    with pytest.raises(ValueError, match=naming("list", "torch.nn.ModuleList([…])")):
        mpigossip.Gossip(SingleProcess(), [model, model], optimizer)
    gossip = mpigossip.Gossip(SingleProcess(), model, optimizer)
    with pytest.raises(AttributeError, match=naming("'Gossip'", "'no_sync'")):
        gossip.no_sync()
