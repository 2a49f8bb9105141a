"""AdamW by torch's fused kernel is AdamW by its formula within rounding; CPUs use the formula."""

import pytest
import torch

from mpigossip.algorithms import adamw_step
from mpigossip.algorithms.adamw_step import AdamW, by_formula, by_kernel
from mpigossip.algorithms.base import Step
from mpigossip.algorithms.local import Moments, adamw
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


def test_cpus_use_the_formula():
    assert not adamw_step.usable(torch.device("cpu"))
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
    assert adamw_step.is_right(torch.device("cpu")) is right


def test_a_kernel_that_fails_leaves_the_formula_with_a_warning(monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(adamw_step, "by_kernel", fail)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, copy: tensor)
    adamw_step.usable.cache_clear()
    with pytest.warns(
        UserWarning, match=naming("RuntimeError: no kernel image", "local.fused = false")
    ):
        assert not adamw_step.usable(torch.device("cuda:0"))
    adamw_step.usable.cache_clear()
