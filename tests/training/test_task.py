"""Tasks: custom losses and metrics with their columns, built-in tasks, and invalid results."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.runs import start_and_resume
from mpigossip.store.log import read
from mpigossip.training import assemble, task
from mpigossip.training.task import Objective, TaskError
from tests.cases import naming, with_world

POINTS = torch.linspace(-1, 1, 96).unsqueeze(1)


def points():
    return {
        "train": TensorDataset(POINTS, POINTS.square()),
        "test": TensorDataset(POINTS[1::4], POINTS[1::4].square()),
    }


def curve(width=8):
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))


class Fit:
    """Squared error, and two metrics, one of which counts nothing if x <= 0."""

    units = {"loss": "m2", "distance": "m"}

    def __init__(self, *, weight: float = 1.0):
        self.weight = weight

    def loss(self, model, batch):
        x, y = batch
        difference = model(x) - y
        right = x > 0
        return self.weight * difference.square().mean(), {
            "distance": (difference.detach().abs().sum(), y.numel()),
            "right": ((difference.detach().abs() * right).sum(), right.sum()),
        }


def answers(answer):
    """Return a task whose loss is the function ``answer``."""
    return SimpleNamespace(loss=lambda model, batch: answer(model, batch))


@pytest.fixture
def user_module(monkeypatch):
    import sys
    from types import ModuleType

    def put(**names):
        module = ModuleType("mine")
        vars(module).update({"points": points, "curve": curve, "Fit": Fit} | names)
        monkeypatch.setitem(sys.modules, "mine", module)

    put()
    return put


def job(folder, *settings):
    table = {
        "run": {"output": str(folder), "epochs": 3},
        "task": {"name": "mine:Fit", "weight": 0.5},
        "data": {"source": "mine:points", "batch": 8},
        "model": {"name": "mine:curve", "width": 6},
        "algorithm": {"name": "dsgd"},
        "schedule": {"lr": 0.1, "scale": "none"},
    }
    return assemble.load(table, settings)


def train(made, nodes=3):
    with SingleProcess() as alone:
        return start_and_resume.train(made, alone, nodes)


def test_a_custom_task_is_logged_by_its_names(user_module, tmp_path, capsys):
    summary = train(job(tmp_path / "run"))
    log = read(tmp_path / "run" / "log.h5")
    assert log.steps["distance"].shape == (12, 3) and log.evaluations["right"].shape == (3,)
    assert log.units["loss"] == "m2" and log.units["distance"] == "m" and log.units["right"] == "1"
    assert {"local_right", "share_right", "local_loss"} <= log.evaluations.keys()
    assert "accuracy" not in log.evaluations | log.steps and "weight = 0.5" in log.job
    assert summary["metrics"] == "distance right"
    assert summary["distance"] == log.evaluations["distance"][-1]
    printed = capsys.readouterr().out
    heading = " +".join(["train loss", "test loss", "distance", "local", "right", "consensus"])
    assert re.search(heading, printed)
    assert f"distance   {summary['distance']:.4f} (averaged" in printed


def test_the_averaged_model_is_tested_on_all_samples(user_module, tmp_path):
    """Sums over slots and nodes, divided once, agree with one pass over all test samples."""
    made = assemble.assemble(
        job(tmp_path, "node.devices=cpu:2", "data.batch=4"), SingleProcess(), 3
    )
    try:
        for _ in range(4):
            record = made.trainer.step()
        trainer = made.trainer
        from mpigossip.training.evaluate import averaged_model, evaluate

        evaluation = evaluate(trainer.replicas, trainer.mixer, made.loader)
        module = averaged_model(trainer.replicas, trainer.mixer).eval()
        with torch.no_grad():
            loss, metrics = Fit(weight=0.5).loss(module, points()["test"][:])
        rounding = 1e-5  # float32 sums of at most 80 terms, in another order
        assert evaluation.loss == pytest.approx(float(loss), rel=rounding)
        for name, (total, count) in metrics.items():
            assert evaluation.averaged[name] == pytest.approx(float(total / count), rel=rounding)
        assert record.metrics["distance"].shape == (3,)
    finally:
        made.close()


def test_a_metric_that_counts_nothing_is_nan_and_reported_once(user_module, tmp_path, capsys):
    left = TensorDataset(-POINTS[50:], POINTS[50:])
    user_module(points=lambda: points() | {"test": left})
    summary = train(job(tmp_path / "run"))
    assert (
        math.isnan(summary["right"])
        and np.isnan(read(tmp_path / "run" / "log.h5").evaluations["right"]).all()
    )
    err = capsys.readouterr().err
    assert err.count('"right" is nan at step 4') == err.count('"right" is nan') == 1
    assert "test set is 0" in summary["warnings"]


@pytest.mark.parametrize("settings", [(), ("algorithm.accumulate=2", "data.batch=4")])
def test_a_resumed_run_is_bitwise_identical(user_module, tmp_path, settings):
    """This includes dropout, because the random numbers of a model follow from the step."""
    whole = train(job(tmp_path / "whole", *settings))
    train(job(tmp_path / "half", "run.steps=5", *settings))
    torch.rand(3)
    with SingleProcess() as alone:
        again = start_and_resume.resume(tmp_path / "half", ["run.steps=none"], alone, None)
    assert again["digest"] == whole["digest"]


@with_world
def on_ranks(world, folder):
    import sys
    from types import ModuleType

    sys.modules["mine"] = ModuleType("mine")
    vars(sys.modules["mine"]).update(points=points, curve=curve, Fit=Fit)
    return start_and_resume.train(job(folder), world, world.size).get("digest")


def test_ranks_have_the_simulators_digest(ranks, user_module, tmp_path):
    assert ranks(3)(on_ranks, tmp_path / "ranks")[0] == train(job(tmp_path / "alone"))["digest"]


def test_vmap_gives_the_metrics_of_the_loop(user_module, tmp_path):
    user_module(
        curve=lambda width: nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    )
    records = []
    for vmap in ("false", "true"):
        made = assemble.assemble(job(tmp_path, f"node.vmap={vmap}"), SingleProcess(), 3)
        records.append(made.trainer.step())
        made.close()
    for name in ("distance", "right"):
        # float32 sums of at most 80 terms, in another order
        assert torch.allclose(records[0].metrics[name], records[1].metrics[name], rtol=1e-5)
    assert torch.allclose(records[0].loss, records[1].loss, rtol=1e-5)


X = (torch.ones(4, 1), torch.ones(4, 1))


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda m, b: (m(b[0]) - b[1], {}), "loss is float32 (1, 1)"),
        (lambda m, b: (3.0, {}), "loss is float"),
        (lambda m, b: m(b[0]).mean(), ("TypeError", "0-d tensor")),
        (lambda m, b: (m(b[0]).mean(), 3), ("metrics", "int")),
        (lambda m, b: (m(b[0]).mean(), {"a": 3}), ('metric "a"', "int", "(sum, count)")),
        (lambda m, b: (m(b[0]).mean(), {"a": (b[0], 1)}), 'metric "a" is (float32 (1, 1), int'),
        (lambda m, b: (m(b[0]).mean(), {3: (1, 1)}), ("metric 3", "string")),
        (lambda m, b: (m(b[0]).mean(), {"lr": (1, 1)}), ('"lr"', "log")),
        (lambda m, b: (m(b[0]).mean(), {"a/b": (1, 1)}), ('"a/b"', "invalid name")),
        (lambda m, b: (m(b[0]).mean(), {"local_a": (1, 1)}), ('"local_a"', "invalid name")),
        (lambda m, b: m(b["x"]), ("TypeError", "test_task.py:", "(float32")),
    ],
)
def test_an_invalid_result_is_reported_before_the_first_step(
    user_module, tmp_path, answer, message
):
    user_module(Fit=lambda weight: answers(answer))
    with pytest.raises(JobError, match=naming('task.name = "mine:Fit"', message)) as caught:
        train(job(tmp_path / "run"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ("task.name=mine:three", ('task.name = "mine:three"', "type int")),
        ("task.name=mine:points", ("returned dict", "loss")),
        ("task.wait=2", "'wait'"),
        ("task.name=classifikation", ('"classifikation"', '"classification"')),
        ("task.name=classification", ("task.name", "batch of")),
    ],
)
def test_a_wrong_task_is_reported(user_module, tmp_path, settings, message):
    user_module(three=3)
    with pytest.raises(JobError, match=naming(message)):
        train(job(tmp_path / "run", settings))


class Changing(Dataset):
    """Dataset whose tenth sample has another structure."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x" if index != 9 else "y": torch.ones(1)}


def test_failures_during_training_name_line_and_batch(user_module, tmp_path):
    def loss(model, batch):
        return model(batch["x"]).mean(), {}

    user_module(
        points=lambda: {"train": Changing(), "test": Changing()},
        Fit=lambda weight: SimpleNamespace(loss=loss),
    )
    with pytest.raises(TaskError, match=naming("KeyError", "'x'", '{"y": float32')) as e:
        train(job(tmp_path / "run", "data.batch=1", "data.workers=0"))
    assert "\n" not in str(e.value)
    seen = []

    def forgets(model, batch):
        seen.append(batch)
        return model(batch[0]).mean(), {"a": (1, 1)} if len(seen) < 3 else {}

    user_module(Fit=lambda weight: SimpleNamespace(loss=forgets))
    with pytest.raises(TaskError, match=naming("metrics", "none", "a")):
        train(job(tmp_path / "other"))


# the tasks of the package


class Output(SimpleNamespace):
    """Output as models of transformers return it."""


def test_a_language_model_accepts_batches_of_tokenizers_and_models_of_transformers():
    table = nn.Embedding(11, 11)

    def model(input_ids, attention_mask=None):
        assert attention_mask is not None
        return Output(logits=table(input_ids))

    tokens = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    loss, metrics = task.LanguageModel().loss(model, batch)
    plain, same = task.LanguageModel().loss(table, (tokens[:, :-1], tokens[:, 1:]))
    assert torch.equal(loss, plain) and metrics["accuracy"] == same["accuracy"]
    labels = tokens.clone()
    labels[:, 4:] = -100
    loss, metrics = task.LanguageModel().loss(model, batch | {"labels": labels})
    expected = F.cross_entropy(table(tokens[:, :3]).flatten(0, 1), tokens[:, 1:4].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # sums of 11 terms
    assert int(metrics["accuracy"][1]) == int(metrics["loss"][1]) == 9
    loss, metrics = task.LanguageModel().loss(model, batch | {"labels": labels.fill_(-100)})
    loss.backward()
    assert loss == 0 == table.weight.grad.abs().max() and metrics["loss"] == (0, 0)


def test_the_mean_loss_weights_batches_by_samples_or_by_the_counts_of_the_task():
    objective = Objective(Fit(), "mine:Fit", ("distance", "right"))
    pairs = objective.tested(lambda x: x, (torch.ones(6, 1), torch.zeros(6, 1)))
    assert pairs.tolist() == [[6.0, 6.0]] * 3
    own = answers(lambda m, b: (torch.tensor(2.0), {"loss": (10, 4)}))
    assert Objective(own, "mine:x").tested(None, X).tolist() == [[10.0, 4.0]]


def test_classification_and_text_have_the_same_loss():
    scores = torch.randn(4, 5, 7)
    targets = torch.randint(0, 7, (4, 5))
    for one in (task.Classification(), task.LanguageModel()):
        loss, metrics = one.loss(lambda x: x, (scores, targets))
        assert torch.equal(loss, F.cross_entropy(scores.flatten(0, 1), targets.flatten()))
        assert metrics["accuracy"][1] == 20
