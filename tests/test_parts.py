"""A new part is one function and one line of a table: one of each, in one job."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from mpigossip import algorithms, cli, commands, graphs, mixing, models
from mpigossip.algorithms import Algorithm, cadence
from mpigossip.algorithms.local import Local
from mpigossip.cluster.world import SingleProcess
from mpigossip.commands.arguments import command
from mpigossip.config import BuilderSpec, JobError
from mpigossip.data import sources
from mpigossip.mixing import lossy_wires, wire
from mpigossip.mixing.base import ExchangeKind
from mpigossip.mixing.simulated import Simulated
from mpigossip.training import assemble
from tests.cases import naming
from tests.jobs import train


def halfway(local, *, share: float = 0.5):
    """x ← x½ + share · (Σ_j W_ij x½_j − x½)."""

    def send(x, g, state, out, step):
        state = local.adapt(x, g, state, step, x)
        out[0].copy_(x)
        return state

    def receive(x, g, state, sent, mixed, step):
        x.lerp_(mixed[0], share)
        return state

    return Algorithm(local.init, send, receive, needs=frozenset({"doubly"}))


def signs(decayed, *, size: float = 1.0):
    def adapt(x, g, state, step, out):
        torch.add(x, g.sign_(), alpha=-step.lr * size, out=out)
        return state

    return Local(lambda x: (), adapt)


def pairs(n, seed=0, *, apart: int = 1):
    """Connect each node with the node at distance `apart`."""
    shift = np.roll(np.eye(n), apart, axis=1)
    return graphs.from_matrices([(np.eye(n) + shift) / 2], "pairs")


def bursts(*, length: int = 2):
    kinds = [ExchangeKind.GOSSIP] * length + [ExchangeKind.LOCAL]
    return cadence.fixed_schedule(lambda index: kinds[index % len(kinds)], *kinds)


def rounded(levels):
    """Round to whole multiples of 1/levels."""

    def encode(buckets, words):
        codes = buckets.mul_(levels).round_().to(torch.int32)
        buckets.copy_(codes).div_(levels)
        return [codes.view(torch.uint8)]

    def decode(codes, out):
        out.copy_(codes[0].view(torch.int32)).div_(levels)

    return wire.Wire("rounded", (4 * wire.WIRE_BUCKET,), encode, decode)


class Counting(Simulated):
    """Simulator that counts its exchanges."""

    started = 0

    def start(self, kind, t, exchange=None):
        Counting.started += 1
        super().start(kind, t, exchange)


def line(shape, classes, *, bias: bool = True):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes, bias))


def two_sides(data, seed):
    return sources.SyntheticSource((6,), 2, data.samples, data.test_samples, seed)


LINES = [
    (
        algorithms.BUILDERS,
        "halfway",
        BuilderSpec(halfway, {"local.name": "signs", "cadence.name": "bursts"}),
    ),
    (algorithms.LOCALS, "signs", signs),
    (graphs.BUILDERS, "pairs", pairs),
    (cadence.BUILDERS, "bursts", bursts),
    (lossy_wires.WIRES, "rounded", rounded),
    (mixing.MIXERS, ("counting", "process"), "counting.Counting"),
    (models.BUILDERS, "line", line),
    (sources.SOURCES, "two-sides", two_sides),
]
"""Line that a new part of each kind adds."""


@pytest.fixture
def added(monkeypatch):
    for table, name, value in LINES:
        monkeypatch.setitem(table, name, value)
    module = ModuleType("mpigossip.mixing.counting")
    module.Counting = Counting
    monkeypatch.setitem(sys.modules, module.__name__, module)


JOB = {
    "data": {"source": "two-sides", "samples": 96, "test_samples": 32, "batch": 8},
    "model": {"name": "line", "bias": False},
    "algorithm": {"name": "halfway", "share": 0.25},
    "local": {"size": 0.01},
    "graph": {"name": "pairs", "apart": 3},
    "node": {"wire": "rounded", "mixer": "counting"},
    "schedule": {"lr": 0.5, "scale": "none"},
    "run": {"epochs": 2},
}


def test_one_of_each_trains(added, tmp_path):
    job = assemble.load(JOB, [f"run.output={tmp_path / 'run'}"])
    assert (job.cadence.name, job.cadence.options) == ("bursts", {"length": 2})
    assert (job.local.name, job.local.options) == (None, {"size": 0.01})
    Counting.started = 0
    summary = train(job, 4)
    assert summary["steps"] == 6 and Counting.started >= 6
    again = train(assemble.load(JOB, [f"run.output={tmp_path / '2'}"]), 4)
    assert again["digest"] == summary["digest"]


def test_their_options_and_needs_are_checked_like_all_others(added):
    wrong = [
        "algorithm.shre=1",
        "local.size=big",
        "graph.apart=x",
        "node.wire=roundd",
        "node.mixer=cuonting",
        "model.bas=1",
        "cadence.length=y",
    ]
    with pytest.raises(JobError) as caught:
        assemble.load(JOB, wrong)
    assert len(caught.value.messages) == len(wrong), caught.value
    with pytest.raises(JobError, match=naming("doubly stochastic")), SingleProcess() as alone:
        assemble.assemble(
            assemble.load(JOB, ["graph.name=star", "graph.weights=uniform"]), alone, 4
        )


def test_a_command_is_one_module_and_one_line(monkeypatch, capsys):
    module = ModuleType("mpigossip.commands.hello")

    def add(commands):
        made = command(
            commands, "hello", lambda options: print(options.whom), "say it", "mpigossip"
        )
        made.add_argument("whom")

    module.add = add
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(commands, "hello", module, raising=False)
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, "hello"))
    assert cli.main(["hello", "nodes"]) == 0 and capsys.readouterr().out == "nodes\n"
