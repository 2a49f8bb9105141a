"""Theory tasks in runs: noise of the given size, evaluations without noise, and known limits."""

import numpy as np
import pytest
import torch

from mpigossip import graphs
from mpigossip.cluster.world import SingleProcess
from mpigossip.data.problems import quadratics
from mpigossip.graphs.theory import quadratic_limit
from mpigossip.runs import start_and_resume
from mpigossip.store.log import read
from mpigossip.training import assemble
from mpigossip.training.problems import Factorization, Quadratics

N = 4
JOB = {
    "task": {"name": "quadratics", "noise": 0.0},
    "data": {"condition": 4.0, "dimension": 6, "steps": 20},
    "algorithm": {"name": "dsgd"},
    "graph": {"name": "ring"},
    "schedule": {"name": "constant", "lr": 0.25},
    "run": {"epochs": 5, "evaluate_every": 5},
}


def trained(tmp_path, *settings):
    job = assemble.load(JOB, [*settings, f"run.output={tmp_path}"])
    with SingleProcess() as alone:
        start_and_resume.train(job, alone, N)
    return read(tmp_path / "log.h5")


def test_noise_is_of_the_gradient_alone_and_of_its_size():
    torch.manual_seed(0)
    task = Quadratics(noise=0.5)
    x = torch.ones(10, requires_grad=True)
    batch = torch.zeros(1, 10), torch.full((1, 10), 2.0)
    noise = []
    for _ in range(4000):
        value, _ = task.loss(lambda: x, batch)
        assert value.item() == pytest.approx(10.0)
        noise.append(torch.autograd.grad(value, x)[0] - 2)
    squares = torch.stack(noise).square().sum(1)
    # tolerance: five relative standard deviations of the mean, sqrt(2/10 / 4000) each
    assert squares.mean().item() == pytest.approx(0.25, rel=0.036)
    with torch.no_grad():
        assert task.loss(lambda: x, batch)[0] == 10.0


def test_the_logged_gradient_is_the_gradient_of_autograd():
    task = Factorization(noise=0)
    whole = torch.randn(1, 4, 3)
    point = torch.randn(7, 2, requires_grad=True)
    value, gradient, distance = task.function(point, [whole])
    assert torch.autograd.grad(value, point)[0].flatten() == pytest.approx(gradient.detach())
    assert distance.item() == pytest.approx(2 * value.item())


def test_parallel_descends_the_quadratic_as_computed_by_hand(tmp_path):
    log = trained(tmp_path, "algorithm.name=parallel", "local.name=sgd", "graph.name=complete")
    optimum, curvature = quadratics(N, condition=4.0, dimension=6).test
    difference = optimum * (1 - 0.25 * curvature) ** 100
    evaluations = log.evaluations
    # Each step rounds x by eps; 1 / (lr a) rounding errors add up, relative to the distance.
    forgets = 1 / (0.25 * curvature.min())
    rel = 2 * forgets * 2**-23 * np.linalg.norm(optimum) / np.linalg.norm(difference)
    assert rel < 0.01
    assert evaluations["distance_square"][-1] == pytest.approx((difference**2).sum(), rel=rel)
    assert evaluations["gradient_square"][-1] == pytest.approx(
        ((curvature * difference) ** 2).sum(), rel=rel
    )
    assert evaluations["loss"][-1] == pytest.approx((curvature * difference**2).sum() / 2, rel=rel)
    assert evaluations["local_loss"][-1] == pytest.approx(evaluations["loss"][-1], rel=1e-6)


@pytest.mark.parametrize("style", ["atc", "awc"])
def test_a_run_converges_to_the_limit_of_the_formula(tmp_path, style):
    log = trained(tmp_path, f"algorithm.style={style}", "data.bend=0.3", "run.epochs=15")
    made = quadratics(N, condition=4.0, dimension=6, bend=0.3)
    limit = quadratic_limit(graphs.graph("ring", N), *made.train, 0.25, style)
    distances = ((limit - made.test[0]) ** 2).sum(1)
    assert np.allclose(log.evaluations["local_distance_square"][-1], distances, rtol=1e-4)
    mean = ((limit.mean(0) - made.test[0]) ** 2).sum()
    assert log.evaluations["distance_square"][-1] == pytest.approx(mean, rel=1e-3)
    assert mean > 1e-6  # the curvatures differ, so the mean has another limit than the optimum


def test_vectorized_nodes_draw_separate_noise(tmp_path):
    settings = ["node.vmap=true", "task.noise=0.5", "data.heterogeneity=0", "algorithm.name=dsgd"]
    log = trained(tmp_path / "a", *settings, "graph.name=identity")
    again = trained(tmp_path / "b", *settings, "graph.name=identity")
    local = log.evaluations["local_distance_square"][-1]
    assert len(set(local.tolist())) == N
    assert (again.evaluations["local_distance_square"][-1] == local).all()
