"""All ranks of a job compute AdamW in the same way: by the fused kernel, or by the formula."""

import contextlib
import warnings

import pytest
import torch

from mpigossip.algorithms import adamw_step, local
from mpigossip.cluster.world import SingleProcess
from tests.cases import with_world
from tests.double import active
from tests.double.devices import trained

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
SETTINGS = ["algorithm.name=dsgd", "local.name=adamw"]
FUSED = [*SETTINGS, "local.fused=true"]


def failing(*_):
    raise RuntimeError("no kernel image")


def wrong(*arguments):
    adamw_step.by_formula(*arguments)
    arguments[-1].add_(1e-5)


def rounding(*arguments):
    """Compute the formula, but round the result in another way."""
    adamw_step.by_formula(*arguments)
    arguments[-1].mul_(1 + 2**-23)


BROKEN = {"failing": failing, "wrong": wrong, "different": adamw_step.by_formula}

REASONS = {
    "failing": "it fails (RuntimeError: no kernel image)",
    "wrong": "it differs from the formula",
    "different": "computes other bits than cuda:0 of rank 0",
}


@contextlib.contextmanager
def kernel(make_step):
    """Let ``make_step`` be the kernel; yield a list with an item for each call of it.

    The kernel of torch for the CPU, which the double would call, depends on positions.
    """
    calls = []
    original = adamw_step.by_kernel

    def counted(*arguments):
        calls.append(arguments[0])
        make_step(*arguments)

    adamw_step.by_kernel = local.by_kernel = counted
    adamw_step.trial.cache_clear()
    try:
        yield calls
    finally:
        adamw_step.by_kernel = local.by_kernel = original
        adamw_step.trial.cache_clear()


def on_ranks(world, broken):
    """Train on ranks of which rank 1 has another kernel; return parameters, calls and warnings.

    Calls of the trial are not counted.
    """
    make_step = BROKEN.get(broken, rounding) if world.rank == 1 else rounding
    nodes = world.size // world.nodes.per_node
    with warnings.catch_warnings(record=True) as seen, kernel(make_step) as calls:
        warnings.simplefilter("always")
        adamw_step.trial(torch.device("cuda", world.rank))
        tried = len(calls)
        full = trained(world, nodes, "mlp", f"cuda:{world.rank}", FUSED)
    texts = [str(one.message) for one in seen if "local.fused" in str(one.message)]
    return full.numpy(), len(calls) - tried, texts


@with_world
def of_nodes(world, broken):
    return on_ranks(world, broken)


@with_world(per=2)
def of_a_node(world, broken):
    return on_ranks(world, broken)


@pytest.mark.parametrize("train", [of_nodes, of_a_node])
def test_ranks_whose_kernels_are_right_and_alike_use_them(ranks, train):
    nodes = 2 if train is of_nodes else 1
    devices = "cuda:0" if train is of_nodes else "cuda:0,1"
    with kernel(rounding) as calls:
        reference = trained(SingleProcess(), nodes, "mlp", devices, FUSED)
    assert calls
    for rank, (full, calls, texts) in enumerate(ranks(2)(train, "", timeout=200)):
        assert calls and not texts
        assert torch.equal(torch.from_numpy(full)[0], reference[rank % nodes])


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("train", [of_nodes, of_a_node])
def test_one_rank_without_a_right_kernel_leaves_the_formula_on_all(ranks, train, broken):
    nodes, devices = (2, "cpu:1") if train is of_nodes else (1, "cpu:2")
    reference = trained(SingleProcess(), nodes, "mlp", devices, SETTINGS)
    results = ranks(2)(train, broken, timeout=200)
    for rank, (full, calls, _) in enumerate(results):
        assert not calls
        assert torch.equal(torch.from_numpy(full)[0], reference[rank % nodes])
    (text,), others = results[0][2], results[1][2]
    assert "cuda:1 of rank 1" in text and REASONS[broken] in text and not others
