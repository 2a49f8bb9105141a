"""`diloco` equals the loop of torchft and exogym, which is written from formulas here.

Every node has a copy of the model and a torch.optim.AdamW. After each H-th step, torch.optim.SGD
with Nesterov's momentum makes an outer step. Its gradient is the model after the last outer step
minus the mean of the nodes' models. Every node continues from its result; AdamW keeps its state.
"""

import copy

import numpy as np
import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.models import loss_and_correct
from mpigossip.store.packing import pack
from mpigossip.training import assemble

STEPS = 48
RATE = 3e-3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    (folder / "in").mkdir()
    lines = (f"{k} + {k + 1} is {2 * k + 1}; what is {k} less {k % 7}?" for k in range(900))
    (folder / "in" / "sums").write_text("\n".join(lines))
    return pack(folder / "in", folder / "text.h5", text=True)


def job(text, period, lr, beta):
    model = {"name": "gpt", "layers": 2, "heads": 2, "width": 32}
    settings = [
        "algorithm.name=diloco",
        f"cadence.period={period}",
        f"algorithm.outer_lr={lr}",
        f"algorithm.outer_beta={beta}",
        "local.decoupled_decay=0.1",
        f"schedule.lr={RATE}",
        "schedule.scale=none",
        "schedule.name=constant",
        f"data.source={text}",
        "data.context=32",
        "data.batch=4",
    ]
    return assemble.load({"model": model, "task": {"name": "language-model"}}, settings)


class Reference:
    """DiLoCo in one process by two optimizers of torch, without code of this package."""

    def __init__(self, model, n, period, lr, beta):
        self.outer = copy.deepcopy(model)
        self.models = [copy.deepcopy(model) for _ in range(n)]
        self.inner = [
            torch.optim.AdamW(m.parameters(), RATE, weight_decay=0.1) for m in self.models
        ]
        nesterov = {"momentum": beta, "nesterov": True} if beta else {}
        self.sgd = torch.optim.SGD(self.outer.parameters(), lr, **nesterov)
        self.period = period
        self.index = 0

    def step(self, batches):
        losses = []
        for model, inner, (tokens, targets) in zip(self.models, self.inner, batches, strict=True):
            inner.zero_grad()
            loss, _ = loss_and_correct(model(tokens), targets)
            loss.backward()
            inner.step()
            losses.append(float(loss.detach()))
        self.index += 1
        if self.index % self.period == 0:
            self.meet()
        return losses

    @torch.no_grad()
    def meet(self):
        each = zip(*(m.parameters() for m in self.models), strict=True)
        for p, copies in zip(self.outer.parameters(), each, strict=True):
            p.grad = p - torch.stack(copies).mean(0)
        self.sgd.step()
        for model in self.models:
            model.load_state_dict(self.outer.state_dict())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "n, period, lr, beta", [(4, 8, 0.7, 0.9), (4, 4, 1.0, 0.0), (1, 8, 0.7, 0.9)]
)
def test_the_loss_curve_is_the_known_methods(text, n, period, lr, beta):
    """With one node, the known method is SNOO."""
    with SingleProcess() as world:
        made = assemble.assemble(job(text, period, lr, beta), world, n)
        model = assemble.make_model(made.parts.job, made.source)
        reference = Reference(model, n, period, lr, beta)
        batches = [
            [tuple(map(torch.clone, each)) for each in made.loader.step(step)]
            for step in range(STEPS)
        ]
        ours = np.array([made.trainer.step().loss.tolist() for _ in range(STEPS)])
        made.close()
    theirs = np.array([reference.step(each) for each in batches])
    assert ours.shape == theirs.shape == (STEPS, n)
    assert np.abs(ours - theirs).max() < 1e-4
    assert theirs[-8:].mean() < theirs[:4].mean() - 1, "it learns"
