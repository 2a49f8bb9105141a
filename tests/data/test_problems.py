"""Theory problems: tests of their optima and of the heterogeneity of nodes at the optima."""

import numpy as np
import pytest
import torch

from mpigossip.config import JobError
from mpigossip.data.problems import factorization, logistic, quadratics
from mpigossip.training import assemble
from mpigossip.training.problems import Logistic, Quadratics
from tests.cases import naming, on_each

MADE = {
    "quadratics": (quadratics, Quadratics, {"bend": 0.5, "heterogeneity": 0.7}),
    "smooth": (quadratics, Quadratics, {"arrangement": "smooth", "heterogeneity": 0.7}),
    "logistic": (logistic, Logistic, {"heterogeneity": 0.7}),
}


def at(task, samples, x):
    """Return the value and the gradient of each sample."""
    rows = zip(*(torch.as_tensor(np.array(array)) for array in samples), strict=True)
    pairs = [task.function(x, [part[None] for part in row])[:2] for row in rows]
    return [torch.stack(column).double() for column in zip(*pairs, strict=True)]


@on_each("name", MADE)
def test_the_optimum_and_the_heterogeneity_are_known(name):
    make, task, options = MADE[name]
    made = make(6, **options)
    task = task(noise=0)
    optimum = torch.from_numpy(made.test[1 if name == "logistic" else 0])
    _, gradients = at(task, made.train, optimum)
    assert gradients.mean(0).abs().max() < 1e-12
    assert gradients.square().sum(1).mean().sqrt() == pytest.approx(made.heterogeneity, rel=1e-9)
    whole = [array[None] for array in made.test]
    best, slope = at(task, whole, optimum)
    assert abs(best) < 1e-12 and slope.abs().max() < 1e-12
    elsewhere = [at(task, whole, optimum + 0.1 * torch.randn(len(optimum)))[0] for _ in range(5)]
    assert min(elsewhere) > 0
    begin = at(task, whole, torch.zeros(len(optimum), dtype=torch.float64))[0]
    assert float(begin) == pytest.approx(made.gap, rel=1e-9)


@on_each("name", MADE)
def test_the_smoothness_is_the_largest_curvature_anywhere(name):
    make, task, options = MADE[name]
    made = make(6, **options)
    task = task(noise=0)
    whole = [torch.as_tensor(np.array(array))[None] for array in made.test]

    def largest(x):
        hessian = torch.autograd.functional.hessian(lambda x: task.function(x, whole)[0], x)
        return float(torch.linalg.eigvalsh(hessian)[-1])

    optimum = torch.from_numpy(made.test[1 if name == "logistic" else 0])
    points = [*(optimum + torch.randn_like(optimum) for _ in range(5)), 0 * optimum]
    curvatures = [largest(x) for x in points]
    assert max(curvatures) == pytest.approx(made.smoothness, rel=1e-9)  # attained at 0


def test_draws_differ_and_a_factorization_has_its_mean():
    one, same, other = (quadratics(4, draw=draw).test[0] for draw in (0, 0, 1))
    assert (one == same).all() and not np.isclose(one, other).any()
    made = factorization(5, heterogeneity=2.0)
    (each,), (whole,) = made.train, made.test
    assert np.allclose(each.mean(0), whole) and np.linalg.matrix_rank(whole) == 3
    assert ((each - whole) ** 2).sum((1, 2)).mean() == pytest.approx(4.0)


def test_invalid_options_are_rejected():
    for source, override, need in (
        ("quadratics", "data.dimension=0", ("data.dimension = 0", "1")),
        ("logistic", "data.heterogeneity=-1", ("data.heterogeneity = -1.0", "0")),
        ("logistic", "data.ridge=0", ("data.ridge = 0.0", "0")),
        ("quadratics", "data.arrangement=rough", ('data.arrangement = "rough"', '"smooth"')),
    ):
        with pytest.raises(JobError, match=naming(need)):
            assemble.load({"data": {"source": source}}, [override])
