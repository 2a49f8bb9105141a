"""Evaluation of the averaged model, whose batch norms are recalibrated on batches of all nodes."""

import numpy as np
import pytest
import torch
from torch import nn

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume
from mpigossip.store.log import read
from mpigossip.training import assemble
from mpigossip.training.evaluate import averaged_model, measure, recalibrate
from tests.cases import on_each

N = 3
JOB = {
    "data": {
        "source": "synthetic",
        "shape": [6],
        "classes": 3,
        "samples": 72,
        "test_samples": 30,
        "batch": 8,
        "partition": "sorted",
    },
    "model": {"name": f"{__name__}:normed"},
    "algorithm": {"name": "dsgd"},
    "graph": {"name": "ring"},
    "schedule": {"lr": 1.0},
    "run": {"epochs": 2},
}


def normed(shape, classes):
    return nn.Sequential(
        nn.BatchNorm1d(shape[0]),
        nn.Linear(shape[0], 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, classes),
    )


def trained(folder, *settings):
    with SingleProcess() as alone:
        job = assemble.load(JOB, [f"run.output={folder}", *settings])
        summary = start_and_resume.train(job, alone, N)
    return summary, read(folder / "log.h5").evaluations


@on_each("devices", ["cpu:1", "cpu:2"])
def test_statistics_belong_to_the_averaged_model_on_batches_of_all_nodes(devices):
    with SingleProcess() as alone:
        trainer = assemble.assemble(
            assemble.load(JOB, [f"node.devices={devices}", "data.batch=4"]), alone, N
        ).trainer
    for _ in range(4):
        trainer.step()
    batches = [trainer.batches(step) for step in (4, 5)]
    module = averaged_model(trainer.replicas, trainer.mixer)
    before = module[0].running_mean.clone()
    recalibrate(module, trainer.replicas, trainer.mixer, batches)
    slots = len(trainer.engine.group.local_slots)
    shown = [step[node * slots][0] for node in range(N) for step in batches]
    assert module[0].running_mean == pytest.approx(
        torch.stack([x.mean(0) for x in shown]).mean(0), rel=1e-5, abs=1e-6
    )
    assert module[0].running_var == pytest.approx(
        torch.stack([x.var(0) for x in shown]).mean(0), rel=1e-5
    )
    assert not torch.allclose(module[0].running_mean, before, atol=1e-3)
    with torch.no_grad():  # the second layer gets the output of the first one in training mode
        hidden = [
            nn.functional.batch_norm(x, None, None, module[0].weight, module[0].bias, True)
            for x in shown
        ]
        second = torch.stack([module[1](h).mean(0) for h in hidden]).mean(0)
    assert module[2].running_mean == pytest.approx(second, rel=1e-4, abs=1e-6)
    assert not module.training and not module[2].training


def test_an_evaluation_at_any_step_does_not_change_the_training(tmp_path):
    plain, before = trained(tmp_path / "a")
    often, after = trained(tmp_path / "b", "run.evaluate_steps=2", "run.recalibrate=2")
    assert plain["digest"] == often["digest"]
    assert before["step"].tolist() == [3, 6] and after["step"].tolist() == [2, 3, 4, 6]
    assert before["loss"][-1] != after["loss"][-1]
    assert np.array_equal(before["local_loss"][-1], after["local_loss"][-1])


def test_without_batches_or_norms_nothing_is_recalibrated(tmp_path):
    mlp = ["model.name=mlp"]
    plain, _ = trained(tmp_path / "a", *mlp)
    same, _ = trained(tmp_path / "b", *mlp, "run.recalibrate=3")
    assert plain["loss"] == same["loss"]


def test_a_batch_that_raises_in_an_evaluation_leaves_the_model_in_training_mode():
    with SingleProcess() as alone:
        assembly = assemble.assemble(assemble.load(JOB), alone, 1)
    module = assembly.trainer.replicas.modules[0][0].train()
    loader = assembly.loader
    objective = assembly.trainer.replicas.objective

    def raises():
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        measure(objective, module, loader, 0, 1, raises)
    assert all(part.training for part in module.modules())
