"""Components of the language model: rotary positions, RMS norm, recomputed activations."""

import numpy as np
import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.models import loss_and_correct, model
from mpigossip.models.gpt import turned, turns
from mpigossip.training import assemble
from tests.cases import naming, on_each

LATER = {"positions": "rotary", "norm": "rms", "bias": False}
SMALL = {"layers": 2, "heads": 2, "width": 32}


def made(**options):
    return model("gpt", (16,), 64, 0, torch.int64, **SMALL, **options)


def test_the_initial_parameters_of_the_default_model_never_change():
    """All recorded runs start from them: another order of draws would change all digests."""
    matrices = [p.detach().flatten() for p in made().parameters() if p.dim() > 1]
    drawn = torch.stack([one[-1] for one in matrices])
    known = [
        0.00759,
        -0.00061,
        0.04179,
        0.00112,
        0.02051,
        0.00093,
        -0.00948,
        0.00976,
        -0.01549,
        0.00425,
    ]
    assert torch.allclose(drawn, torch.tensor(known), rtol=0, atol=1e-5)
    size = sum(p.numel() for p in made().parameters())
    assert size == 64 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64


def test_products_of_rotated_vectors_depend_on_their_distance_only():
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 8, generator=draw)
    turn = turns(40, 8, torch.device("cpu"))
    queries, keys = (turned(one.expand(40, 8), turn) for one in (query, key))
    products = queries @ keys.T
    assert torch.allclose(products[7, 3], products[34, 30], atol=1e-5)
    assert not torch.allclose(products[7, 3], products[7, 4], atol=1e-2)
    assert torch.allclose(queries.norm(dim=1), query.norm().expand(40), atol=1e-5)
    assert torch.equal(queries[0], query[0]), "position 0 is not rotated"
    # complex numbers: the pair (k, k + D/2) times exp(i t θ_k)
    angles = np.outer(np.arange(40), 10_000.0 ** (-np.arange(4) / 4))
    expected = (query[0, :4] + 1j * query[0, 4:]).numpy() * np.exp(1j * angles)
    assert np.allclose(queries.numpy(), np.hstack([expected.real, expected.imag]), atol=1e-5)


def learns_to_count(network):
    """Return whether the model learns a text that counts in 80 steps."""
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    text = torch.arange(17).repeat(4, 1)
    for _ in range(80):
        loss, correct = loss_and_correct(network(text[:, :-1]), text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach()) < 1 and int(correct) > 50


def test_later_parts_have_fewer_parameters():
    named = dict(made(**LATER).named_parameters())
    assert not any("bias" in name or "places" in name for name in named)
    assert sum(p.numel() for p in named.values()) == 64 * 32 + 2 * (12 * 32**2 + 64) + 32


@on_each("options", [{}, LATER])
def test_it_learns_and_is_causal(options):
    network = made(**options)
    tokens = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9:] = 0
    before = network(tokens)
    after = network(changed)
    assert before.shape == (1, 16, 64)
    loss, _ = loss_and_correct(before, 63 - tokens)
    assert abs(float(loss.detach()) - np.log(64)) < 0.1  # initially, it guesses
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)
    # these two differ only in the order, which only the positions encode
    mirrored = network(torch.tensor([[1, 2, 3, 4, 9]]))[0, -1]
    assert not torch.allclose(network(torch.tensor([[4, 3, 2, 1, 9]]))[0, -1], mirrored, atol=1e-4)
    assert learns_to_count(network)


@on_each("options", [{}, LATER])
def test_recomputation_is_bitwise_identical_and_saves_memory(options):
    saved_sizes = []
    gradients = []
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(1))
    for again in (False, True):
        network = made(**options, recompute=again)
        sizes = []

        def note(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss, _ = loss_and_correct(network(tokens[:, :-1]), tokens[:, 1:])
        saved_sizes.append(sum(sizes))
        loss.backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    assert all(map(torch.equal, *gradients))
    assert saved_sizes[1] < saved_sizes[0] / 2, saved_sizes


@pytest.mark.usefixtures("one_thread")
def test_a_run_with_recomputation_is_bitwise_identical():
    runs = []
    for settings in ("", "model.recompute=true"):
        job = assemble.load(
            {"model": {"name": "tests.models.test_gpt:on_pixels"}},
            ["data.batch=4", "algorithm.name=dsgd", *settings.split()],
        )
        with SingleProcess() as world:
            made = assemble.assemble(job, world, 2)
            for _ in range(3):
                made.trainer.step()
            runs.append(made.trainer.replicas.full[0].clone())
            made.close()
    assert torch.equal(*runs)


class OnPixels(torch.nn.Module):
    """Model that takes the pixels of digits as tokens and returns the scores after the last one."""

    def __init__(self, recompute):
        super().__init__()
        self.gpt = model("gpt", (64,), 17, 0, torch.int64, **SMALL, **LATER, recompute=recompute)

    def forward(self, x):
        shades = (x.flatten(1).clamp(-2, 2) * 4 + 8).long()
        return self.gpt(shades)[:, -1, :10]


def on_pixels(shape, classes, *, recompute=False):
    return OnPixels(recompute)


def test_impossible_combinations_are_rejected():
    with pytest.raises(JobError, match=naming("model.width / model.heads = 5", "model.width = 12")):
        model("gpt", (16,), 64, 0, torch.int64, heads=2, width=10, positions="rotary")
    pixels = {"name": "tests.models.test_gpt:on_pixels", "recompute": True}
    vmap = assemble.load({"model": pixels}, ["node.vmap=true"])
    with (
        SingleProcess() as world,
        pytest.raises(JobError, match=naming("node.vmap = true", "model.recompute")),
    ):
        assemble.assemble(vmap, world, 2)
    with pytest.raises(JobError, match=naming('model.norm = "batch"', "layer")):
        assemble.load({"model": {"name": "gpt", "norm": "batch"}})


@pytest.mark.every
def test_torch_compile_supports_recomputation():
    """Test `node.compile` with another backend: inductor would need a compiler and minutes."""
    gradients = []
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(2))
    for backend in (None, "aot_eager"):
        network = made(**LATER, recompute=True)
        if backend:
            network.compile(backend=backend)
        loss, _ = loss_and_correct(network(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))
