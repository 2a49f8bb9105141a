"""Custom graphs: values, functions, and rounds that are drawn from (seed, t)."""

import networkx as nx
import numpy as np
import pytest
import torch

from mpigossip.graphs import Circulant, GraphError, from_matrices, graph
from mpigossip.mixing.base import ExchangeKind, MessageLayout, is_average
from mpigossip.mixing.simulated import Simulated
from tests.cases import naming
from tests.graphs.examples import A, B, drawn

HERE = "tests.graphs.test_networks"


def pairs(n, seed):
    return [A, B]


def warming(n, seed, t):
    """Return a round: the exact average at first, later pairs of a ring."""
    return np.full((n, n), 1 / n) if t < 20 else Circulant(n, 0.5, (1,), (0.5,))


def growing(n, seed, t):
    network = nx.empty_graph(n)
    network.add_edges_from([(0, 1)] if t < 70 else [(0, 1), (1, 2)])
    return network


def columns(n, seed, t):
    """Return a round whose rows and columns sum to one at first, and later only its rows."""
    return np.full((2, 2), 0.5) if t < 10 else np.array([[1.0, 0.0], [0.5, 0.5]])


def moody(n, seed, t):
    moody.calls = getattr(moody, "calls", 0) + 1
    return [A, B][
        moody.calls > 8
    ]  # after the first rounds, a call for an earlier round returns another matrix


def test_values_of_all_kinds_are_graphs():
    g = from_matrices([A, B])
    assert graph([A, B], 3) == graph(np.stack([A, B]), 3) == graph(g, 3) == g
    assert graph(f"{HERE}:pairs", 3) == graph(pairs, 3) == graph(lambda: (A, B), 3) == g
    assert graph(A) == from_matrices([A]) and graph([A, B], 3, slack=0.5) == g.slack(0.5)
    networks = [nx.Graph([(0, 1), (2, 3)]), nx.Graph([(0, 2), (1, 3)])]
    assert graph(networks, 4).period == 2 and graph(networks, 4).facts >= {"symmetric"}
    assert graph(lambda t: [A, B][t % 2], 3, period=2) == g
    assert graph(f"{HERE}:drawn", 5, seed=2, period=4, scale=2).period == 4


def test_nodes_of_a_file_keep_their_numbers(tmp_path):
    """Labels that are sorted as text would put 10 before 2."""
    network = nx.path_graph(12)
    for suffix in ("graphml", "gml", "edgelist"):
        getattr(nx, f"write_{suffix}")(network, path := tmp_path / f"path.{suffix}")
        assert graph(f"file:{path}", 12) == graph(network, 12), suffix


def test_a_function_returns_each_round_when_it_is_needed():
    g = graph(f"{HERE}:drawn", 6, seed=3, degree=1)
    assert g.period is None and g.degree == 1 and g.doubly_stochastic
    for t in (0, 5, 300):
        np.testing.assert_array_equal(g.matrix(t), drawn(6, 3, t))
        np.testing.assert_array_equal(
            g.lazy().slowed(3).matrix(t), graph(drawn(6, 3, t // 3)).lazy().matrix()
        )
    assert g.fingerprint == graph(f"{HERE}:drawn", 6, seed=3, degree=1).fingerprint
    assert g.fingerprint != graph(f"{HERE}:drawn", 6, seed=4, degree=1).fingerprint


def test_exact_first_rounds_do_not_imply_exact_later_ones():
    """Global averages take a shortcut, which later rounds of a function need not allow."""
    g = graph(f"{HERE}:warming", 4, degree=3)
    assert g.degree == 3 and is_average(g, 0) and not is_average(g, 20)
    mixer = Simulated(g, MessageLayout((8,)))
    x = torch.arange(32.0).view(4, 8)
    for t in (0, 20):
        mixer.outbox(t)[0][0].copy_(x)
        mixer.start(ExchangeKind.GOSSIP, t)
        wanted = torch.from_numpy(
            warming(4, 0, 0) @ x.numpy() if t == 0 else g.matrix(t) @ x.numpy()
        )
        assert torch.allclose(mixer.finish()[1][0][0], wanted.float()), t


def test_wrong_functions_and_rounds_are_rejected():
    cases = [
        ("drawn", {}, ("function of t", "period = None, degree = None")),
        ("drawn", {"degree": 0}, ("function of t", "period = None, degree = 0")),
        ("drawn", {"degree": 1, "scales": 2}, ("TypeError", "'scales'")),
        ("nothing", {}, "no nothing"),
        ("HERE", {}, (f"{HERE}:HERE", "type str")),
        ("moody", {"degree": 1}, ("round 0", "two calls")),
        ("warming", {"degree": 1}, ("round 0", "degree = 1", "degree = 2")),
    ]
    for name, options, message in cases:
        with pytest.raises(ValueError, match=naming(message)):
            graph(f"{HERE}:{name}", 3, **options)
    for value, message in [
        (["ring", "star"], ("matrix 0", "'ring'")),
        (3, ("int", "not a graph")),
        (nx.Graph([(0, 1, {"weight": "far"})]), ('"weight"', "'far'")),
        (drawn, ('"drawn"', '"module:function"')),
        (lambda t: A, ('"<lambda>"', "mpigossip.graph(function, n, period=4)")),
        (lambda n: 1 / 0, ("{'n': 3, 'seed': 0}", "ZeroDivisionError", "test_networks.py:")),
        (np.stack([A, B]), ("3 nodes", "4")),
    ]:
        with pytest.raises(GraphError, match=naming(message)):
            graph(value, 4 if isinstance(value, np.ndarray) else 3)
    late = graph(f"{HERE}:growing", 5, degree=1)
    for g in (late, late.slowed(2)):
        assert g.round(69).degree == 1
        with pytest.raises(GraphError, match=naming("round 140", "degree = 1", "degree = 2")):
            g.neighbours(140, 0)
    with pytest.raises(GraphError, match=naming("round 10", "row sums")):
        graph(f"{HERE}:columns", 2, degree=1).matrix(10)
