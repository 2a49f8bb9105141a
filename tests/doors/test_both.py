"""The quickstart's job through both doors: a job file, and a plain loop around SGD."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.cluster.ranks import Alone
from mpigossip.training import assemble

JOB = Path(__file__).parents[2] / "jobs/digits.toml"


def job(name, slots, steps):
    settings = [f"algorithm.name={name}", f"node.devices=cpu:{slots}", f"run.steps={steps}"]
    return assemble.load(JOB, [*settings, "data.workers=0"])


def own_loop(comm, name, slots, steps):
    """The same data, model and rates without any of the job's step."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    with World(comm) as world:
        made = assemble.assemble(job(name, slots, steps), world, world.size)
        loader, settings, data = made.loader, made.trainer.settings, made.source
        model = assemble.make_model(made.job, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-4)
        optimizer = mpigossip.Gossip(world, model, optimizer, name, devices=("cpu",) * slots)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = settings.rate(step)
            batches = loader.step(step)
            optimizer.zero_grad()
            optimizer.run(lambda slot, replica, batches=batches: backward(replica, *batches[slot]))
            optimizer.step()
        parameters = [p.detach().reshape(-1).numpy() for p in model.parameters()]
        return np.concatenate(parameters), optimizer.record.bytes_sent


def backward(model, inputs, targets):
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()


def simulated(name, slots, steps):
    made = assemble.assemble(job(name, slots, steps), Alone(), 4)
    for _ in range(steps):
        record = made.trainer.step()
    flat, rows = made.trainer.replicas.flat, made.trainer.replicas.full[0]
    packed = [flat.pack(row).numpy().copy() for row in rows]
    made.close()
    return packed, record.bytes_sent


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", ["dmsgd", "dsgd"])
def test_a_plain_loop_and_a_job_have_one_digest(ranks, name, slots):
    got = ranks(4)(own_loop, name, slots, 40)
    packed, sent = simulated(name, slots, 40)
    mine, theirs = (
        hashlib.sha256(b"".join(one.tobytes() for one in each)).hexdigest()
        for each in ([parameters for parameters, _ in got], packed)
    )
    assert mine == theirs
    assert [each[0] for _, each in got] == sent
