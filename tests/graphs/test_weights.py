"""Weights by rule: formulas, the table of Laplacian against Metropolis weights, convex optima."""

import networkx as nx
import numpy as np
import pytest

from mpigossip.graphs import WEIGHTS, GraphError, from_networkx, graph, reweighted
from mpigossip.graphs import weights as rules
from mpigossip.graphs.rounds import Circulant, SparseMatrix
from mpigossip.graphs.spectral import spectral_gap
from mpigossip.graphs.weights import laplacian_spectrum
from tests.cases import naming, on_each

STAR = nx.star_graph(3)


def matrix(rule, network=STAR):
    return from_networkx(network, rule).matrix(0)


def test_formulas_on_a_star_of_four():
    quarter = 1 / 4
    uniform = np.diag([quarter, 0.5, 0.5, 0.5])
    uniform[0, 1:] = quarter
    uniform[1:, 0] = 0.5
    assert np.allclose(matrix("uniform"), uniform)
    assert np.allclose(matrix("push"), uniform.T)
    even = np.diag([quarter, 0.75, 0.75, 0.75])
    even[0, 1:] = even[1:, 0] = quarter
    assert np.allclose(matrix("max-degree"), even)
    assert np.allclose(matrix("metropolis-hastings"), even)
    alpha = 2 / (4 + 1)  # eigenvalues of the star's Laplacian: 0, 1, 1, 4
    best = np.eye(4) - alpha * nx.laplacian_matrix(STAR).toarray()
    assert np.allclose(matrix("laplacian"), best)


TABLE = [
    ("ring 16", nx.cycle_graph(16), 0.0381, 0.9267, 0.9493, 0.037),
    ("ring lattice 16", nx.circulant_graph(16, [1, 2]), 0.1194, 0.7866, 0.8524, -0.156),
    ("4-regular 16", nx.random_regular_graph(4, 16, seed=1), 0.1944, 0.6745, 0.7222, 0.063),
    ("hypercube 16", nx.hypercube_graph(4), 0.25, 0.6, 0.6, 0.2),
    ("G(16, 32)", nx.gnm_random_graph(16, 32, seed=5), 0.1083, 0.8046, 0.8623, -0.476),
    ("star 16", nx.star_graph(15), 0.0625, 0.8824, 0.9375, -0.765),
    ("path 16", nx.path_graph(16), 0.0097, 0.9808, 0.9872, 0.0),
    ("ring lattice 32", nx.circulant_graph(32, [1, 2]), 0.0306, 0.9407, 0.9619, -0.244),
    ("4-regular 32", nx.random_regular_graph(4, 32, seed=1), 0.1079, 0.8053, 0.8441, 0.001),
]


@on_each(("name", "network", "r", "best", "local", "least"), TABLE)
def test_table_of_laplacian_and_metropolis_weights(name, network, r, best, local, least):
    g = from_networkx(network, "laplacian")
    spectrum = laplacian_spectrum(g.round(0))
    assert spectrum[1] / spectrum[-1] == pytest.approx(r, abs=6e-5)
    assert 1 - spectral_gap(g) == pytest.approx(best, abs=6e-5)
    assert 1 - spectral_gap(reweighted(g, "metropolis-hastings")) == pytest.approx(local, abs=6e-5)
    assert g.matrix(0).diagonal().min() == pytest.approx(least, abs=6e-4)
    ratio = spectrum[1] / spectrum[-1]
    assert 1 - spectral_gap(g) == pytest.approx((1 - ratio) / (1 + ratio), abs=1e-12)


def test_negative_weights_are_reported():
    g = graph("star", 16, weights="laplacian")
    assert "signed" in g.facts and g.doubly_stochastic
    assert "SIGNED: the smallest weight is -0.7647" in repr(g)
    assert "signed" not in g.lazy().slack(0.5).facts
    assert "signed" not in graph("star", 16).facts


@on_each("name", ["ring", "ring-lattice", "complete"])
@on_each("rule", ["uniform", "push", "max-degree", "metropolis-hastings", "laplacian"])
def test_circulants_stay_circulant(name, rule):
    g = graph(name, 10, weights=rule)
    assert isinstance(g.round(0), Circulant)
    dense = from_networkx(nx.Graph(graph(name, 10).matrix(0)), rule)
    assert isinstance(dense.round(0), SparseMatrix)
    assert np.allclose(g.matrix(0), dense.matrix(0), atol=1e-13)


def test_sequences_are_weighted_round_by_round():
    g = graph("base-2", 6)
    mixed = reweighted(g, "metropolis-hastings")
    assert mixed.period == g.period
    assert all(set(np.unique(mixed.matrix(t))) <= {0.0, 0.5, 1.0} for t in range(6))
    assert np.allclose(reweighted(mixed, "laplacian").matrix(0), mixed.matrix(0))
    assert "weights=laplacian" in repr(reweighted(g, "laplacian"))
    assert reweighted(graph("identity", 4), "laplacian").matrix(0).tolist() == np.eye(4).tolist()


@on_each("rule", ["max-degree", "metropolis-hastings", "laplacian", "fmmc", "fdla"])
def test_directed_edges_are_rejected_by_rules_for_undirected_ones(rule):
    with pytest.raises(GraphError, match=naming(f'weights "{rule}"', "undirected")):
        graph("exponential", 9, weights=rule)
    with pytest.raises(GraphError, match=naming("directed")):
        from_networkx(nx.DiGraph([(0, 1), (1, 2), (2, 0)]), rule)


def test_bad_names():
    with pytest.raises(GraphError, match=naming('"laplacain"', '"laplacian"')):
        graph("ring", 5, weights="laplacain")
    with pytest.raises(GraphError, match=naming("fdla, fmmc")):
        graph("ring", 5, weights="heavy")
    with pytest.raises(GraphError, match=naming('"random-matching"', "weights =")):
        graph("random-matching", 6, weights="laplacian")


def test_convex_weights_without_the_solver_name_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cvxpy", None)
    rules._solved.cache_clear()
    with pytest.raises(GraphError, match=naming("pip install 'mpigossip[study]'")):
        graph("path", 6, weights="fmmc")


@pytest.mark.parametrize("network", [nx.path_graph(6), nx.star_graph(6), TABLE[4][1], TABLE[1][1]])
def test_convex_optima_are_at_least_as_fast(network):
    pytest.importorskip("cvxpy", reason="needs the extra 'study' (cvxpy)")
    rho = {name: 1 - spectral_gap(from_networkx(network, name)) for name in sorted(WEIGHTS)[:5]}
    assert rho["fdla"] <= min(rho["fmmc"], rho["laplacian"]) + 1e-6
    assert rho["fmmc"] <= rho["metropolis-hastings"] + 1e-6
    g = from_networkx(network, "fmmc")
    assert "signed" not in g.facts and g.doubly_stochastic and "symmetric" in g.facts


def test_convex_optimum_of_a_circulant_is_circulant():
    pytest.importorskip("cvxpy", reason="needs the extra 'study' (cvxpy)")
    g = graph("ring-lattice", 12, weights="fdla")
    assert isinstance(g.round(0), Circulant)
    assert spectral_gap(g) >= spectral_gap(graph("ring-lattice", 12, weights="laplacian")) - 1e-7


def test_repeated_rounds_stay_repeated():
    slow = graph(graph("ring", 6).slowed(3), 6, weights="laplacian")
    assert slow.times == 3 and slow == graph("ring", 6, weights="laplacian").slowed(3)
