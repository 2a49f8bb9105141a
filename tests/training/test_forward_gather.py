"""The package's models use parameters only after the forward pass of a module that owns them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from mpigossip import models
from mpigossip.analysis.plan.gpu_costs import uses_buckets
from mpigossip.config.sections import TaskSection
from mpigossip.training import assemble, task
from mpigossip.training.assemble import MODEL_TASKS, allows_buckets, allows_gather


class Uses(TorchFunctionMode):
    """Names of parameters that are used before the forward pass of a module that owns them."""

    def __init__(self, module):
        super().__init__()
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.ready = set()
        self.early = set()
        for owner in module.modules():
            owner.register_forward_pre_hook(self._enter)

    def _enter(self, module, inputs):
        self.ready |= {id(p) for p in module.parameters(recurse=False)}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        used = {id(value) for value in (*args, *(kwargs or {}).values())} & self.names.keys()
        if func.__name__ != "__get__":  # size, dtype or device
            self.early |= {self.names[key] for key in used - self.ready}
        return func(*args, **(kwargs or {}))


def used_early(module, objective, batch):
    """Return the names of the parameters that a forward pass uses early, and of unused ones."""
    uses = Uses(module.train())
    with uses:
        objective.loss(module, batch)
    unused = {name for key, name in uses.names.items() if key not in uses.ready}
    return uses.early, unused


IMAGES = (2, 3, 32, 32)
TOKENS = {"heads": 2, "width": 8, "layers": 2}
CASES = [
    ("mlp", {}, "classification", torch.zeros(IMAGES)),
    ("lenet", {}, "classification", torch.zeros(IMAGES)),
    ("resnet20", {}, "classification", torch.zeros(IMAGES)),
    ("resnet56", {}, "classification", torch.zeros(IMAGES)),
    ("resnet50", {}, "classification", torch.zeros(IMAGES)),
    ("gpt", TOKENS, "language-model", torch.zeros(2, 5, dtype=torch.int64)),
    (
        "gpt",
        TOKENS | {"positions": "rotary", "norm": "rms", "bias": False, "recompute": True},
        "language-model",
        torch.zeros(2, 5, dtype=torch.int64),
    ),
]


def made(name, options, inputs):
    kind = inputs.dtype
    return models.model(name, tuple(inputs.shape[1:]), 10, 0, kind, **options)


@pytest.mark.parametrize(("name", "options", "task_name", "inputs"), CASES)
def test_a_model_enters_the_owner_of_a_parameter_before_its_use(name, options, task_name, inputs):
    module = made(name, options, inputs)
    targets = inputs if task_name == "language-model" else torch.zeros(2, dtype=torch.int64)
    objective = task.make(TaskSection(name=task_name))
    early, unused = used_early(module, objective.task, (inputs, targets))
    assert early == set() and unused == set()


def test_all_models_of_the_tasks_are_tested():
    others = {"point", "factors"}  # models of the tasks that use a parameter itself
    assert {name for name, *_ in CASES} == models.BUILDERS.keys() - others
    assert {name for _, _, name, _ in CASES} == set(MODEL_TASKS)


class Early(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return linear(x, self.inner.weight)


def test_the_test_notices_a_parameter_that_is_used_early():
    class Mean:
        def loss(self, model, batch):
            return model(batch[0]).mean()

    early, unused = used_early(Early(), Mean(), (torch.zeros(2, 4), None))
    assert early == {"inner.weight"} and unused == {"inner.weight", "inner.bias"}


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ([], True),
        (['log.hooks=["tensorboard"]'], True),
        (['log.hooks=["my.hooks:Watch"]'], False),
        (["node.compile=true"], False),
        (["model.name=my.models:net"], False),
        (["task.name=my.tasks:Loss"], False),
    ],
)
def test_custom_code_and_compiled_models_gather_before_the_forward_pass(settings, allowed):
    assert allows_gather(assemble.load({}, settings)) is allowed


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ([], False),  # CUDA graphs are used if that is possible
        (["node.cuda_graphs=never"], True),
        (["node.cuda_graphs=never", "node.compile=true"], False),
        (["node.cuda_graphs=never", "node.vmap=true"], False),
        (["node.cuda_graphs=never", "node.shard=false"], False),
        (["node.cuda_graphs=never", "node.bucket_mb=0"], False),
    ],
)
def test_plan_and_training_use_buckets_for_the_same_jobs(settings, allowed):
    job = assemble.load({}, [*settings, "node.devices=gpu:1", "node.ranks_per_node=8"], False)
    assert allows_buckets(job) is allowed
    assert uses_buckets(SimpleNamespace(job=job, slots=8)) is allowed
    assert not uses_buckets(SimpleNamespace(job=job, slots=1))
