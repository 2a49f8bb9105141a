"""The quickstart's job as a job file and as a custom loop around SGD."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.cluster.ranks import SingleProcess
from mpigossip.training import assemble
from tests.cases import with_world

JOB = Path(__file__).parents[2] / "jobs/digits.toml"


LATE = {"cadence": "every", "period": 6, "fragments": 3, "delay": 2, "blend": 0.7}


def job(name, steps, late):
    settings = [f"algorithm.name={name}", "node.devices=cpu:1", f"run.steps={steps}"]
    settings += ["local.name=none"] + ["algorithm.style=atc"] * (name == "dsgd")
    if late:
        settings += ["cadence.name=every", "cadence.period=6", "cadence.fragments=3"]
        settings += ["cadence.delay=2", "algorithm.blend=0.7"]
    return assemble.load(JOB, [*settings, "data.workers=0"])


@with_world
def own_loop(world, name, steps, late):
    """Train with the same data, model and rates, but without the code of a job's step."""
    made = assemble.assemble(job(name, steps, late), world, world.size)
    loader = made.loader
    trainer = made.trainer
    data = made.source
    model = assemble.make_model(made.parts.job, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-4)
    more = LATE if late else {}
    optimizer = mpigossip.Gossip(world, model, optimizer, name, **more)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = trainer.rate(step)
        (batch,) = loader.step(step)
        optimizer.zero_grad()
        backward(model, *batch)
        optimizer.step()
    parameters = [p.detach().reshape(-1).numpy() for p in model.parameters()]
    return np.concatenate(parameters), optimizer.record.bytes_sent


def backward(model, inputs, targets):
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()


def simulated(name, steps, late):
    made = assemble.assemble(job(name, steps, late), SingleProcess(), 4)
    for _ in range(steps):
        record = made.trainer.step()
    flat = made.trainer.replicas.flat
    rows = made.trainer.replicas.full[0]
    packed = [flat.pack(row).numpy().copy() for row in rows]
    made.close()
    return packed, record.bytes_sent


@pytest.mark.parametrize(("name", "late"), [("dmsgd", False), ("dsgd", False), ("dsgd", True)])
def test_a_plain_loop_and_a_job_have_one_digest(ranks, name, late):
    got = ranks(4)(own_loop, name, 40, late)
    packed, sent = simulated(name, 40, late)
    loop_digest, job_digest = (
        hashlib.sha256(b"".join(one.tobytes() for one in each)).hexdigest()
        for each in ([parameters for parameters, _ in got], packed)
    )
    assert loop_digest == job_digest
    assert [each[0] for _, each in got] == sent
