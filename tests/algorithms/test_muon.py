"""Muon as a local step: torch's bits on matrices, our AdamW's on the rest; simulated = ranks."""

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms.base import Step
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.engine.vector import flatten
from mpigossip.mixing.base import ExchangeKind
from mpigossip.models import decayed, model
from mpigossip.runs import start_and_resume
from mpigossip.training import assemble
from tests.cases import naming, some, with_world

JOB = {"model": {"name": "mlp", "hidden": [24, 16]}, "local": {"name": "muon"}}
SETTINGS = [
    "algorithm.name=dsgd",
    "data.batch=4",
    "schedule.lr=0.01",
    "schedule.scale=none",
    "local.decoupled_decay=0.1",
    "algorithm.decay_all=false",
]
METHODS = [
    "dsgd",
    "dsgd algorithm.style=awc",
    "dsgd node.precision=bf16 node.wire=bf16",
    "diloco cadence.period=3",
    "gasloc cadence.period=2 graph.name=ring",
    "parallel",
]


def job(*more):
    return assemble.load(JOB, [*SETTINGS, *(part for one in more for part in one.split())])


def method_job(method, *more):
    return job(f"algorithm.name={method}", *more)


def gpt(**options):
    return model("gpt", (8,), 32, 0, torch.int64, layers=1, heads=2, width=16, **options)


def local(layout, **options):
    return algorithms.LOCALS["muon"](layout.decayed, layout, **options)


def test_matrices_take_torchs_step_and_the_rest_adamw():
    network = gpt()
    flat = flatten(network, 1, decayed(network))
    muon = local(flat, decoupled_decay=0.1, beta=0.9)
    draw = torch.Generator().manual_seed(0)
    x = torch.zeros(2, flat.size)
    for row in x:
        for view in flat.views(row):
            view.copy_(torch.randn(view.shape, generator=draw))
    matrices = [k for k, s in enumerate(flat.shapes) if len(s) == 2]
    hidden = [k for k in matrices if flat.names[k] not in ("tokens.weight", "places.weight")]
    assert len(hidden) == 4, "attention, join, up, down"
    wanted = [[view.clone() for view in flat.views(row)] for row in x]
    torchs = [
        torch.optim.Muon([row[k] for k in hidden], 0.03, 0.1, 0.9, adjust_lr_fn="match_rms_adamw")
        for row in wanted
    ]
    adamw = algorithms.LOCALS["adamw"](flat.decayed, decoupled_decay=0.1, beta2=0.95)
    other = x.clone()
    state = muon.init(x)
    others = adamw.init(x)
    for index in range(4):
        g = torch.zeros_like(x)
        for row in g:
            for view in flat.views(row):
                view.copy_(torch.randn(view.shape, generator=draw))
        for row, values in zip(wanted, g, strict=True):
            for one, gradient in zip(row, flat.views(values), strict=True):
                one.grad = gradient.clone()
        for optimizer in torchs:
            optimizer.step()
        now = Step(index, 0, ExchangeKind.LOCAL, 0.03)
        others = adamw.adapt(other, g.clone(), others, now, other)
        before = x.clone()
        out = torch.full_like(x, float("nan"))
        state = muon.adapt(x, g, state, now, out)
        assert torch.equal(x, before), "x½ goes out; x stays"
        x = out
    for row in range(2):
        views = flat.views(x[row])
        rest = flat.views(other[row])
        for k, name in enumerate(flat.names):
            assert torch.equal(views[k], wanted[row][k] if k in hidden else rest[k]), name
    padded = x.clone()
    for row in padded:
        for view in flat.views(row):
            view.zero_()
    assert not padded.any(), "what lies between parameters stays zero"


def test_adamw_takes_matrices_by_name():
    network = gpt()
    flat = flatten(network)
    x = torch.ones(1, flat.size)
    g = torch.ones(1, flat.size)
    now = Step(0, 0, ExchangeKind.LOCAL, 0.1)
    adamw = algorithms.LOCALS["adamw"](0)
    wanted = adamw.adapt(x.clone(), g.clone(), adamw.init(x), now, out := x.clone()) and out
    some = local(flat, adamw_for=("blocks.*.up.weight", "*join*"))
    some.adapt(x, g, some.init(x), now, out := x.clone())
    same = {
        name
        for name, a, b in zip(flat.names, flat.views(out[0]), flat.views(wanted[0]), strict=True)
        if torch.equal(a, b)
    }
    assert set(flat.names) - same == {"blocks.0.attention.weight", "blocks.0.down.weight"}
    with pytest.raises(
        JobError, match=naming("local.adamw_for", "'head.*'", "blocks.0.attention.weight")
    ):
        local(flat, adamw_for=("head.*",))
    with pytest.raises(
        JobError, match=naming('local.name = "muon"', "local.adamw_for = ['*']", 'use "adamw"')
    ):
        local(flat, adamw_for=("*",))


def rows(world, n, method):
    made = assemble.assemble(method_job(method), world, n)
    for _ in range(7):
        made.trainer.step()
    full = made.trainer.replicas.full[0].clone().numpy()
    made.close()
    return full


@with_world
def on_ranks(world):
    return [rows(world, world.size, method) for method in METHODS]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("n", some([2, 3, 5], [3]))
def test_ranks_have_the_simulators_bits(ranks, n):
    results = ranks(n)(on_ranks)
    for k, method in enumerate(METHODS):
        with SingleProcess() as world:
            wanted = rows(world, n, method)
        assert np.array_equal(np.concatenate([each[k] for each in results]), wanted), method


def test_a_run_resumes_bitwise(tmp_path):
    def made(folder, steps):
        return method_job("diloco cadence.period=3", f"run.output={folder}", f"run.steps={steps}")

    whole = start_and_resume.train(made(tmp_path / "whole", 9), SingleProcess(), 3)
    for stop in (4, 5, 6):
        folder = tmp_path / f"{stop}"
        start_and_resume.train(made(folder, stop), SingleProcess(), 3)
        again = start_and_resume.resume(folder, ["run.steps=9"], SingleProcess(), None)
        assert again["digest"] == whole["digest"] and again["loss"] == whole["loss"], stop


def test_shards_are_refused_and_one_slot_steps_for_all():
    problems = assemble.mistakes(job("node.devices=cpu:2"), 2)
    assert (
        len(problems) == 1
        and "complete matrices" in problems[0]
        and "node.shard = false" in problems[0]
    )
    ranks = job("node.ranks_per_node=2", "node.devices=cpu:1")
    assert "each of the 2 slots" in " ".join(assemble.mistakes(ranks, 2))
    digests = []
    for devices in ("cpu:2 node.shard=false data.batch=2", "cpu:1 node.shard=false data.batch=4"):
        with SingleProcess() as world:
            made = assemble.assemble(job(f"node.devices={devices}"), world, 2)
            losses = [float(made.trainer.step().loss.mean()) for _ in range(8)]
            digests.append(losses)
            made.close()
    assert np.allclose(*digests, rtol=1e-3), "two slots with half of the batch each"


def test_a_job_without_matrices_says_so():
    images = job("model.name=resnet20", "model.width=4", "local.adamw_for=['*.weight']")
    with (
        SingleProcess() as world,
        pytest.raises(JobError, match=naming('local.name = "muon"', "no matrix")),
    ):
        assemble.assemble(images, world, 2)
