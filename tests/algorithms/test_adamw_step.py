"""AdamW by torch's fused kernel is AdamW by its formula within rounding; CPUs use the formula."""

import pytest
import torch

from mpigossip.algorithms import adamw_step
from mpigossip.algorithms.adamw_step import AdamW, Trial, by_formula, by_kernel
from mpigossip.algorithms.base import Step
from mpigossip.algorithms.local import Moments, adamw
from mpigossip.cluster.world import SingleProcess
from mpigossip.mixing.base import ExchangeKind
from tests.cases import naming


def arrays(rows, columns):
    draw = torch.Generator().manual_seed(columns)
    made = [torch.randn(rows, columns, generator=draw) for _ in range(4)]
    made[3].square_()
    return made


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("decayed", [0, 700, 1500])
@pytest.mark.parametrize("index", [0, 9, 5000])
def test_the_kernel_is_the_formula_within_rounding(index, decayed, in_place):
    parameters = AdamW(0.9, 0.999, 1e-8, 0.1, decayed)
    results = []
    for make_step in (by_formula, by_kernel):
        x, g, first, second = arrays(3, 1500)
        out = x if in_place else torch.zeros_like(x)
        make_step(parameters, x, g, first, second, index, 0.01, out)
        assert in_place or torch.equal(x, arrays(3, 1500)[0])
        results.append((out, first, second))
    for got, wanted in zip(*results, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(results[0][0], arrays(3, 1500)[0])


def test_cpus_use_the_formula(recwarn):
    assert not adamw_step.all_use_kernel(SingleProcess(), ["cpu", "cpu"])
    assert not recwarn.list
    results = []
    for fused in (None, True):
        x, g, first, second = arrays(1, 999)
        step = Step(3, 0, ExchangeKind.LOCAL, 0.01)
        adamw(999, fused=fused).adapt(x, g, Moments(first, second), step, x)
        results.append(x)
    assert torch.equal(*results)


def shifted(offset):
    """Return a kernel whose results differ from the formula by an offset."""

    def kernel(*arguments):
        by_formula(*arguments)
        arguments[-1].add_(offset)

    return kernel


def dependent(*arguments):
    """Compute the formula, and change the last bit of the first element of each array."""
    by_formula(*arguments)
    out = arguments[-1]
    out[:, 0] = torch.nextafter(out[:, 0], torch.tensor(9.0))


@pytest.mark.parametrize(
    ("kernel", "right"), [(shifted(0.0), True), (shifted(1e-5), False), (dependent, False)]
)
def test_a_kernel_that_is_wrong_or_depends_on_positions_is_noticed(monkeypatch, kernel, right):
    monkeypatch.setattr(adamw_step, "by_kernel", kernel)
    assert bool(adamw_step.digest_if_right(torch.device("cpu"))) is right


def test_kernels_that_round_in_different_ways_have_different_digests(monkeypatch):
    digests = []
    for kernel in (by_formula, scaled):
        monkeypatch.setattr(adamw_step, "by_kernel", kernel)
        digests += [adamw_step.digest_if_right(torch.device("cpu")) for _ in range(2)]
    assert all(digests) and digests[0] == digests[1] != digests[2] == digests[3]


def scaled(*arguments):
    """Compute the formula, and change the last bit of each element."""
    by_formula(*arguments)
    arguments[-1].mul_(1 + 2**-23)


GOOD = Trial("cuda:0", "", "5f")


@pytest.mark.parametrize(
    ("trials_by_rank", "reason"),
    [
        ([[GOOD, GOOD], [GOOD, GOOD]], ""),
        ([[GOOD], [Trial("cuda:1", "it fails", "")]], "on cuda:1 of rank 1, it fails"),
        (
            [[GOOD, Trial("cuda:3", "", "60")], [GOOD, GOOD]],
            "cuda:3 of rank 0 computes other bits than cuda:0 of rank 0",
        ),
        ([[Trial("cpu", "the formula", "")], [GOOD]], "on cpu of rank 0, the formula"),
    ],
)
def test_the_first_device_that_differs_is_the_reason(trials_by_rank, reason):
    assert adamw_step.reason_against(trials_by_rank) == reason


def test_a_kernel_that_fails_leaves_the_formula_with_a_warning(monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(adamw_step, "by_kernel", fail)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, copy: tensor)
    adamw_step.trial.cache_clear()
    with pytest.warns(
        UserWarning, match=naming("cuda:0", "RuntimeError: no kernel image", "local.fused = false")
    ):
        assert not adamw_step.all_use_kernel(SingleProcess(), ["cuda:0"])
    adamw_step.trial.cache_clear()
