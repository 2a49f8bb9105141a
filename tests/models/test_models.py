"""Models by name: sizes, shapes, seeds, and messages about models that do not fit the data."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.models import BUILDERS, decayed, loss_and_correct, model
from tests.cases import naming, on_each


def wrong_width(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes + 1))


def not_a_module(shape, classes):
    return shape


def wide(shape, classes, *, width=3):
    network = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes * width))
    return nn.Sequential(
        network, nn.Unflatten(1, (classes, width)), nn.AdaptiveMaxPool1d(1), nn.Flatten()
    )


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@on_each(
    ("name", "shape", "classes", "options", "count"),
    [
        ("mlp", (1, 8, 8), 10, {}, 64 * 128 + 128 + 1290),
        ("mlp", (5,), 2, {"hidden": ()}, 12),
        ("mlp", (5,), 2, {"hidden": (3, 4)}, 18 + 16 + 10),
        ("lenet", (3, 32, 32), 10, {}, 62_006),  # the number in the literature
        ("lenet", (1, 28, 28), 10, {}, 107_786),
        ("lenet", (1, 8, 8), 10, {}, 21_386),
        ("lenet", (3, 40, 36), 7, {}, None),
        ("resnet20", (3, 32, 32), 10, {}, 269_722),  # 0.27 M in the paper
        ("resnet56", (3, 32, 32), 10, {}, 853_018),  # 0.85 M in the paper
        ("resnet20", (1, 8, 8), 10, {"width": 4}, None),
        ("resnet50", (3, 64, 64), 1000, {}, 25_557_032),
        ("resnet50", (3, 32, 32), 10, {"width": 8}, None),
    ],
)
def test_sizes(name, shape, classes, options, count):
    network = model(name, shape, classes, 0, **options)
    assert count is None or parameters(network) == count
    assert network(torch.randn(2, *shape)).shape == (2, classes)
    assert network.training


@on_each("name", ["lenet", "resnet20"])
def test_networks_learn(name):
    network = model(name, (1, 8, 8), 2, 0)
    x = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0, 2:5, 2:5].mean((1, 2)) > 0).long()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for _ in range(60):
        loss, correct = loss_and_correct(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert int(correct) >= 30


def test_residual_blocks_begin_as_the_identity():
    network = model("resnet50", (3, 32, 32), 10, 0, width=8)
    scales = [block.bn3.weight for block in network if hasattr(block, "bn3")]
    assert len(scales) == 16 and all((scale == 0).all() for scale in scales)
    norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]
    assert sum(bool((norm.weight == 1).all()) for norm in norms) == len(norms) - 16


@on_each("name", sorted(BUILDERS.keys() - {"point", "factors"}))
def test_parameters_depend_on_the_seed_alone(name):
    shape, dtype = ((32,), torch.int64) if name == "gpt" else ((3, 32, 32), torch.float32)
    random_state = random.getstate()
    numpy_state = np.random.get_state()[1].copy()
    before = torch.get_rng_state()
    networks = [model(name, shape, 16, seed, dtype) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == random_state and (np.random.get_state()[1] == numpy_state).all()
    flat = [nn.utils.parameters_to_vector(network.parameters()) for network in networks]
    assert torch.equal(flat[0], flat[1]) and not torch.equal(flat[0], flat[2])


def test_decayed_excludes_biases_and_norms():
    network = model("resnet20", (3, 32, 32), 10, 0)
    names = decayed(network)
    left = {name for name, _ in network.named_parameters()} - names
    assert len(names) == 20 and all(
        ".bn" in name or "bias" in name or name[0] == "1" for name in left
    )
    tokens = model("gpt", (8,), 256, 0, torch.int64, layers=1)
    assert {"tokens.weight", "blocks.0.up.weight"} <= decayed(tokens)
    assert not any("norm" in name or "bias" in name for name in decayed(tokens))


def test_loss_and_correct():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    loss, correct = loss_and_correct(outputs, torch.tensor([0, 0]))
    expected = (np.log(1 + np.exp(-2.0)) + np.log(1 + np.exp(1.0))) / 2
    assert abs(float(loss.detach()) - expected) < 1e-6 and int(correct) == 1
    loss.backward()
    half, _ = loss_and_correct(outputs.detach().bfloat16(), torch.tensor([0, 0]))
    assert half.dtype == torch.float32 and abs(float(half) - expected) < 1e-6


HERE = __name__


def test_custom_models():
    assert parameters(model(f"{HERE}:wide", (4,), 2, 0, width=5)) == 50


@on_each(
    ("name", "shape", "options", "message"),
    [
        ("lenett", (1, 8, 8), {}, ('"lenett"', '"lenet"')),
        ("something", (1, 8, 8), {}, ('"something"', "package.module:factory")),
        ("nowhere.at.all:net", (1, 8, 8), {}, ("model.name =", "nowhere.at.all", "imported")),
        (f"{HERE}:missing", (1, 8, 8), {}, "no missing"),
        (f"{HERE}:HERE", (1, 8, 8), {}, ("HERE", "type str")),
        (f"{HERE}:not_a_module", (1, 8, 8), {}, "returned tuple"),
        (f"{HERE}:wrong_width", (1, 8, 8), {}, ("(1, 11)", "(1, 10)")),
        (f"{HERE}:wide", (4,), {"widht": 2}, ("wide", "{'widht': 2}")),
        ("lenet", (1, 2, 8), {}, ("4x4 pixels", "(1, 2, 8)")),
        ("lenet", (64,), {}, ('"lenet"', "images")),
        ("resnet50", (3, 8, 8), {}, "32x32 pixels"),
        ("gpt", (3, 8, 8), {}, ('"gpt"', "tokens")),
        ("gpt", (8,), {"width": 30}, ("model.width = 30", "model.heads = 4", "32")),
    ],
)
def test_mistakes(name, shape, options, message):
    with pytest.raises(JobError, match=naming(message)):
        model(name, shape, 10, 0, **options)


def test_a_network_for_the_wrong_kind_of_samples():
    with pytest.raises(JobError, match=naming('"mlp"', "(8,)", "tokens")):
        model("mlp", (8,), 256, 0, torch.int64)
    with pytest.raises(JobError, match=naming('"gpt"', "(8,)", "samples")):
        model("gpt", (8,), 256, 0)
