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


LATE = {"cadence": "every", "period": 6, "fragments": 3, "delay": 2, "blend": 0.7}


def job(name, slots, steps, late):
    settings = [f"algorithm.name={name}", f"node.devices=cpu:{slots}", f"run.steps={steps}"]
    if late:
        settings += ["cadence.name=every", "cadence.period=6", "cadence.fragments=3"]
        settings += ["cadence.delay=2", "algorithm.blend=0.7"]
    return assemble.load(JOB, [*settings, "data.workers=0"])


def own_loop(comm, name, slots, steps, late):
    """The same data, model and rates without any of the job's step."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    with World(comm) as world:
        made = assemble.assemble(job(name, slots, steps, late), world, world.size)
        loader, settings, data = made.loader, made.trainer.settings, made.source
        model = assemble.make_model(made.job, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e-4)
        devices = ("cpu",) * slots
        more = LATE if late else {}
        optimizer = mpigossip.Gossip(world, model, optimizer, name, devices=devices, **more)
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


def simulated(name, slots, steps, late):
    made = assemble.assemble(job(name, slots, steps, late), Alone(), 4)
    for _ in range(steps):
        record = made.trainer.step()
    flat, rows = made.trainer.replicas.flat, made.trainer.replicas.full[0]
    packed = [flat.pack(row).numpy().copy() for row in rows]
    made.close()
    return packed, record.bytes_sent


@pytest.mark.parametrize(
    ("name", "slots", "late"),
    [
        ("dmsgd", 1, False),
        ("dmsgd", 2, False),
        ("dsgd", 1, False),
        ("dsgd", 2, False),
        ("dsgd", 1, True),
    ],
)
def test_a_plain_loop_and_a_job_have_one_digest(ranks, name, slots, late):
    got = ranks(4)(own_loop, name, slots, 40, late)
    packed, sent = simulated(name, slots, 40, late)
    mine, theirs = (
        hashlib.sha256(b"".join(one.tobytes() for one in each)).hexdigest()
        for each in ([parameters for parameters, _ in got], packed)
    )
    assert mine == theirs
    assert [each[0] for _, each in got] == sent
