"""Training of the quickstart as a job and as a custom loop around SGD: both have one digest."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.training import assemble
from tests.cases import with_world

JOB = Path(__file__).parents[2] / "jobs/digits.toml"


MORE = {
    "": {},
    "late": {"cadence": "every", "period": 6, "fragments": 3, "delay": 2, "blend": 0.7},
    "blended": {"blend": 0.2},
    "averaged": {"average_state": {"momentum_buffer": 3}},
}
"""Options of `Gossip` by name."""


def job(name, steps, more):
    settings = [f"algorithm.name={name}", "node.devices=cpu:1", f"run.steps={steps}"]
    settings += ["algorithm.style=atc"] * (name == "dsgd")
    if more == "averaged":
        return assemble.load(
            JOB, [*settings, "local.name=momentum", "algorithm.average_state={momentum=3}"]
        )
    settings += ["local.name=none"]
    for option, value in MORE[more].items():
        section = "algorithm" if option.startswith("blend") else "cadence"
        settings.append(f"{section}.{'name' if option == 'cadence' else option}={value}")
    return assemble.load(JOB, [*settings, "data.workers=0"])


@with_world
def run_custom_loop(world, name, steps, more):
    """Train in a custom loop with the data, model and learning rates of the job.

    :return: parameters (P,) of this rank, and the bytes that it has sent
    """
    made = assemble.assemble(job(name, steps, more), world, world.size)
    loader = made.loader
    trainer = made.trainer
    data = made.source
    model = assemble.make_model(made.parts.job, data)
    beta = 0.9 if more == "averaged" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=beta, weight_decay=1e-4)
    optimizer = mpigossip.Gossip(world, model, optimizer, name, **MORE[more])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = trainer.rate(step)
        (batch,) = loader.step(step)
        optimizer.zero_grad()
        backward(model, *batch)
        optimizer.step()
    parameters = [p.detach().reshape(-1).numpy() for p in model.parameters()]
    result = np.concatenate(parameters), optimizer.record.bytes_sent
    optimizer.close()
    return result


def backward(model, inputs, targets):
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()


def simulated(name, steps, more):
    made = assemble.assemble(job(name, steps, more), SingleProcess(), 4)
    for _ in range(steps):
        record = made.trainer.step()
    flat = made.trainer.replicas.flat
    rows = made.trainer.replicas.full[0]
    packed = [flat.pack(row).numpy().copy() for row in rows]
    made.close()
    return packed, record.bytes_sent


@pytest.mark.parametrize(
    ("name", "more"),
    [("dmsgd", ""), ("dsgd", ""), ("dsgd", "late"), ("dsgd", "blended"), ("dsgd", "averaged")],
)
def test_a_plain_loop_and_a_job_have_one_digest(ranks, name, more):
    got = ranks(4)(run_custom_loop, name, 40, more)
    packed, sent = simulated(name, 40, more)
    loop_digest, job_digest = (
        hashlib.sha256(b"".join(one.tobytes() for one in each)).hexdigest()
        for each in ([parameters for parameters, _ in got], packed)
    )
    assert loop_digest == job_digest
    assert [each[0] for _, each in got] == sent
