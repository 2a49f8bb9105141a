"""Rates, lower bounds and limits: inverses of each other, and errors if a limit does not exist."""

import numpy as np
import pytest

from mpigossip.graphs import GraphError, graph, theory
from tests.cases import naming

GIVEN = {"delta": 2.0, "smoothness": 3.0, "noise": 0.5, "n": 8, "batch": 1}


def test_the_floor_is_the_lower_bound_solved_for_the_gradient():
    steps = np.array([10.0, 1e3, 1e6])
    floor = theory.gradient_floor(steps, **GIVEN, diameter=4)
    back = [theory.lower_bound(**GIVEN, epsilon=e**0.5, diameter=4) for e in floor]
    assert np.allclose(back, steps, rtol=1e-12)


def test_rates_are_above_the_floor_and_fall_as_they_should():
    steps = np.array([1e2, 1e18, 1e20])
    given = {key: value for key, value in GIVEN.items() if key != "batch"}
    parallel = theory.gossip_rate(steps, **given, heterogeneity=1.0, gap=np.inf)
    wide = theory.gossip_rate(steps, **given, heterogeneity=1.0, gap=0.5)
    narrow = theory.gossip_rate(steps, **given, heterogeneity=1.0, gap=0.01)
    assert (narrow > wide).all() and (wide > parallel).all()
    assert parallel[1] / parallel[2] == pytest.approx(10, rel=0.01)  # 1/sqrt(T)
    assert narrow[2] / parallel[2] == pytest.approx(1, rel=0.2)  # the transient is over
    assert (parallel >= theory.gradient_floor(steps, **GIVEN, diameter=1)).all()


def test_there_is_no_limit_without_a_period_or_beyond_the_stable_rate():
    centre = np.ones((8, 1))
    curvature = np.ones((8, 1))
    drawn = graph("one-peer-exponential", 8, order="uniform")
    with pytest.raises(GraphError, match=naming("a period", "512 nodes")):
        theory.quadratic_limit(drawn, centre, curvature, 0.1)
    with pytest.raises(GraphError, match=naming("lr = 2.5")):
        theory.quadratic_limit(graph("ring", 8), centre, curvature, 2.5)
