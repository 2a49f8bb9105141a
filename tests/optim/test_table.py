"""Pairs of algorithm, optimizer, mixer and wire in Gossip: bitwise identical to simulations."""

import itertools
from contextlib import suppress

import pytest
import torch

import mpigossip
from mpigossip import algorithms
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.optim.inner import check_plain_sgd
from mpigossip.optim.settings import settings
from tests.cases import covering, every, with_world
from tests.optim import in_node
from tests.optim.in_node import whole

STEPS = 6
WIRES = ("fp32", "bf16", "qsgd", "sign", "top-k", "random-k")
MIXERS = ("synchronous", "asynchronous")
ALGORITHM_AND_WIRE = (0, 3)
"""Their pairs are three quarters of all cases; tests/algorithms simulates them."""
AXES = tuple(algorithms.BUILDERS), ("SGD", "AdamW"), MIXERS, WIRES
OPTIONS = {
    **{name: {"graph": "ring"} for name in ("decentlam", "choco")},
    **{name: {"period": 2} for name in ("cpsgd", "gossip-pga", "slowmo", "diloco", "noloco")},
    "adpsgd": {"period": 2, "total": STEPS},
}


def model(node):
    torch.manual_seed(node)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def optimizer(name, made):
    first, *others = made.parameters()
    groups = [{"params": [first], "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return getattr(torch.optim, name)(groups, lr=0.05)


def backward(made, node, step):
    draw = torch.Generator().manual_seed(1000 * node + step)
    made.zero_grad()
    made(torch.randn(8, 6, generator=draw)).square().mean().backward()


@with_world
def trained(world, cases):
    """Return this rank's parameters after each case."""
    torch.set_num_threads(1)
    results = []
    for name, inner, mixer, wire in cases:
        made = model(world.rank)
        more = OPTIONS.get(name, {})
        inside = optimizer(inner, made)
        gossip = mpigossip.Gossip(world, made, inside, name, wire=wire, mixer=mixer, seed=3, **more)
        for step in range(STEPS):
            backward(made, world.rank, step)
            gossip.step()
        world.barrier()
        gossip.close()
        results.append(whole(made))
    return results


def read(n, name, mixer, wire):
    """Return the parts of the job that is equivalent to arguments of Gossip on n nodes."""
    alone = SingleProcess()
    options = dict(OPTIONS.get(name, {})) | {"seed": 3}
    alone.size = n
    graph = options.pop("graph", None)
    return settings(alone, "cpu", name, graph, None, wire, mixer, None, options)


def simulated(n, name, inner, wire):
    """Return the parameters of all nodes after the same training in the simulator."""
    parts = read(n, name, "synchronous", wire)
    models = [model(node) for node in range(n)]
    inners = [optimizer(inner, made) for made in models]
    in_node.simulated(parts.job, parts.graph, models, inners, STEPS, backward)
    return list(map(whole, models))


def accepted_combinations(n):
    """Yield all combinations of algorithm, optimizer, mixer and wire that Gossip accepts."""
    for name, inner, mixer, wire in itertools.product(*AXES):
        with suppress(JobError):
            read(n, name, mixer, wire)
            if not algorithms.takes_local(name):
                check_plain_sgd(name, optimizer(inner, model(0)))
            yield name, inner, mixer, wire


def chosen_cases(n, chosen):
    """Return few accepted combinations of settings.

    :param n: number of nodes
    :param chosen: "values": each accepted value occurs; "pairs": each accepted pair of values
        occurs, except pairs of algorithm and wire; "others": each of those pairs occurs
    """
    accepted = list(accepted_combinations(n))
    if chosen == "values":
        return covering(accepted, strength=1)
    pairs = covering(accepted, excluded=ALGORITHM_AND_WIRE)
    return pairs if chosen == "pairs" else covering(accepted, covered=pairs)


@pytest.mark.parametrize("chosen", ["values", every("pairs"), every("others")])
def test_accepted_settings_are_bitwise_identical_to_a_simulation(ranks, chosen):
    n = 3
    cases = chosen_cases(n, chosen)
    waiting = [case for case in cases if case[2] == "synchronous"]
    assert len(cases) >= 25 and len(waiting) >= 15
    assert chosen != "pairs" or len(waiting) < len(cases) - 5
    results = list(zip(*ranks(n)(trained, cases), strict=True))
    for (name, inner, mixer, wire), rows in zip(cases, results, strict=True):
        assert all(row.isfinite().all() for row in rows), (name, inner, mixer, wire)
        if mixer == "synchronous":
            there = simulated(n, name, inner, wire)
            assert all(map(torch.equal, rows, there)), (name, inner, wire)
