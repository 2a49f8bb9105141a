"""Graphs: neighbours, facts, checks, comparison, and graphs from networkx or matrices."""

import pickle
from contextlib import suppress

import networkx as nx
import numpy as np
import pytest

from mpigossip.graphs import (
    BUILDERS,
    Graph,
    GraphError,
    from_matrices,
    from_networkx,
    from_sequence,
    graph,
)
from mpigossip.graphs.base import Cycle, Drawn
from mpigossip.graphs.rounds import Circulant, SparseMatrix, paired
from tests.cases import naming, on_each

SIZES = (1, 2, 3, 5, 6, 7, 8, 12, 16)


def possible():
    """Yield every graph that has a name, with each of the sizes that it can have."""
    for name in BUILDERS:
        for n in SIZES:
            with suppress(GraphError):
                graph(name, n, seed=3)
                yield name, n


every = on_each("name, n", list(possible()))


@every
def test_neighbours_receivers_and_matrix_agree(name, n):
    g = graph(name, n, seed=3)
    for t in range(min(g.period or 6, 12)):
        matrix = g.matrix(t)
        others = (matrix != 0) & ~np.eye(n, dtype=bool)
        kept = 0 if name == "spanning-tree" else 1
        assert np.allclose(matrix.sum(axis=kept), 1.0, rtol=0, atol=1e-14)
        assert others.sum(axis=1).max() <= g.degree
        for i in range(n):
            nodes, weights, own = g.neighbours(t, i)
            assert nodes.dtype == np.int64 and weights.dtype == np.float64
            assert i not in nodes and len(set(nodes.tolist())) == len(nodes)
            assert (matrix[i, nodes] == weights).all() and matrix[i, i] == own
            assert sorted(nodes) == np.flatnonzero(others[i]).tolist()
            assert sorted(g.receivers(t, i)) == np.flatnonzero(others[:, i]).tolist()


@every
def test_facts_agree_with_the_matrices(name, n):
    g = graph(name, n, seed=3)
    matrices = [g.matrix(t) for t in range(g.period or 12)]
    assert ("symmetric" in g.facts) == all(np.allclose(m, m.T, atol=1e-13) for m in matrices)
    assert ("row-stochastic" in g.facts) == all(np.allclose(m.sum(1), 1) for m in matrices)
    assert ("column-stochastic" in g.facts) == all(np.allclose(m.sum(0), 1) for m in matrices)
    assert ("signed" in g.facts) == any(m.min() < -1e-13 for m in matrices)
    assert ("static" in g.facts) == (g.period == 1)
    assert "static" not in g.facts or all((m == matrices[0]).all() for m in matrices)
    # Every graph that has a name preserves the mean, except the factors of the exact average, which
    # preserve the sum.
    assert g.doubly_stochastic or name == "spanning-tree" and "column-stochastic" in g.facts
    known = not isinstance(g.schedule, Drawn)
    assert g.complete == (known and all(np.allclose(m, 1 / n) for m in matrices))


@on_each("name", BUILDERS)
def test_graphs_are_values(name):
    g = graph(name, 8, seed=3)
    again = graph(name, 8, seed=3)
    assert g == again and hash(g) == hash(again)
    assert g != graph("path", 9)
    assert pickle.loads(pickle.dumps(g)) == g
    assert name in repr(g) and "n = 8" in repr(g) and f"degree {g.degree}" in repr(g)
    with pytest.raises(AttributeError):
        g.name = "other"
    with pytest.raises(ValueError, match=naming("read-only")):
        g.neighbours(0, 0)[1][...] = 2.0


def test_graphs_are_equal_by_content_not_by_name():
    assert graph("base-2", 16) == graph("hyper-hypercube", 16)
    assert graph("half-random", 9, seed=0) != graph("half-random", 9, seed=1)
    assert graph("ring", 5) != graph("ring", 5, slack=0.5)


def test_a_cycle_has_its_smallest_period():
    a = paired(np.array([1, 0, 3, 2]))
    b = paired(np.array([3, 2, 1, 0]))
    assert Graph(Cycle((a, b, a, b))).period == 2
    assert Graph(Cycle((a, a, a))).facts >= {"static"}
    assert Graph(Cycle((a, b, b))).period == 3


@on_each("name", ["exponential", "one-peer-exponential", "star", "od-equidyn"])
def test_slack_and_lazy(name):
    g = graph(name, 9, seed=1)
    identity = np.eye(9)
    for t in range(5):
        assert np.allclose(g.lazy().matrix(t), (g.matrix(t) + identity) / 2, atol=1e-15)
        wanted = 0.1 * g.matrix(t) + 0.9 * identity
        assert np.allclose(graph(name, 9, seed=1, slack=0.1).matrix(t), wanted, atol=1e-15)
    assert graph(name, 9, seed=1, lazy=True) == g.lazy() == graph(name, 9, seed=1, slack=0.5)
    assert g.slack(1.0) is g
    assert "slack=0.5" in repr(g.lazy())
    with pytest.raises(GraphError, match=naming("slack = 0", "[1e-9, 1]")):
        g.slack(0)


def test_facts_tell_columns_from_rows():
    network = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0), (3, 0), (1, 3)])
    pushed = from_networkx(network, "push")
    assert "column-stochastic" in pushed.facts and "row-stochastic" not in pushed.facts
    assert pushed.matrix(0)[[0, 1, 2], 0] == pytest.approx([1 / 3] * 3)
    plain = from_networkx(network)
    assert plain.facts == {"static", "row-stochastic"}
    assert plain.neighbours(0, 2)[0].tolist() == [0, 1]
    assert plain.receivers(0, 1).tolist() == [2, 3]


def test_networkx_graphs():
    ring = from_networkx(nx.cycle_graph(5))
    assert np.allclose(ring.matrix(0), graph("ring", 5).matrix(0))
    letters = from_networkx(nx.Graph([("b", "a"), ("a", "c")]))
    assert letters.neighbours(0, 1)[0].tolist() == [0, 2]  # order of the network: b, a, c
    weighed = nx.Graph()
    weighed.add_edge(0, 1, weight=0.25)
    weighed.add_edge(1, 2, weight=0.5)
    weighed.add_edge(1, 1, weight=7.0)
    assert np.allclose(
        from_networkx(weighed).matrix(0), [[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]]
    )
    assert np.allclose(
        from_networkx(weighed, "max-degree").matrix(0).diagonal(), [2 / 3, 1 / 3, 2 / 3]
    )
    assert graph(nx.cycle_graph(6), 6, lazy=True) == from_networkx(nx.cycle_graph(6)).lazy()
    assert from_networkx(nx.empty_graph(1)).degree == 0
    with pytest.raises(GraphError, match=naming('graph "networkx"', "6 nodes", "4")):
        graph(nx.cycle_graph(6), 4)
    with pytest.raises(GraphError, match=naming("without nodes")):
        from_networkx(nx.Graph())


def test_sequences():
    matchings = [nx.Graph([(0, 1), (2, 3)]), nx.Graph([(0, 2), (1, 3)])]
    g = from_sequence(matchings)
    assert g.period == 2 and g.degree == 1
    assert np.allclose(g.matrix(1) @ g.matrix(0), 0.25)
    assert from_sequence([m for m in (g.matrix(0), g.matrix(1))]) == g
    with pytest.raises(GraphError, match=naming("graph 1", "different nodes")):
        from_sequence([nx.path_graph(3), nx.path_graph(4)])
    with pytest.raises(GraphError, match=naming("item 1", "ndarray")):
        from_sequence([nx.path_graph(3), np.eye(3)])


@on_each(
    ("matrices", "message"),
    [
        ([], "no rounds"),
        ([np.ones((2, 3))], ("(2, 3)", "square")),
        ([np.full((2, 2), np.nan)], ("matrix 0", "not finite")),
        ([np.eye(2), np.eye(3)], ("round 1", "3 nodes", "round 0", "2")),
        ([np.array([[0.5, 0.4], [0.5, 0.5]])], ("round 0", "row sums", "0.1")),
    ],
)
def test_bad_matrices_are_rejected(matrices, message):
    with pytest.raises(GraphError, match=naming(message)):
        from_matrices(matrices)


@on_each(
    ("call", "message"),
    [
        (lambda: graph("rong", 4), 'did you mean "ring"'),
        (lambda: graph("xyzzy", 4), "known here: alternating-exponential-ring, base-2"),
        (lambda: graph("ring", 0), "one node, got 0"),
        (lambda: graph("ring", 2.5), "one node, got 2.5"),
        (lambda: graph("ring"), "one node, got None"),
        (lambda: graph("ring", 4, seed=-1), "integer ≥ 0, got -1"),
        (lambda: graph("ring", 4, ordr="cyclic"), '"ordr"; its options are slack'),
        (lambda: graph("spanning-tree", 4, children=0), "children = 0"),
        (lambda: graph("torus", 4, rows="a"), 'rows = "a": needs a whole number'),
        (lambda: graph("ring", 4, slack="a"), 'slack = "a": needs a number'),
        (
            lambda: graph("one-peer-exponential", 4, order="cycle"),
            'order = "cycle": must be "cyclic", "permuted" or "uniform"',
        ),
        (
            lambda: graph("hypercube", 6),
            'got 6; use "base-2"',
        ),
        (lambda: graph("one-peer-hypercube", 12), 'use "base-2"'),
        (lambda: graph("alternating-exponential-ring", 3), "two nodes, got 3"),
        (lambda: graph("ring-lattice", 4), "from 2 to 3 at n = 4, got 4"),
        (lambda: graph("random-regular", 5, degree=3), "n · degree even"),
        (lambda: graph("grid", 12, rows=5), "divisor of 12"),
        (lambda: graph("erdos-renyi", 9, probability=0.0), "probability in (0, 1], got 0"),
        (lambda: graph("erdos-renyi", 40, probability=0.001), "none of 1000 draws"),
        (lambda: graph("hyper-hypercube", 10, p=2), "n = 10 has 5; set p = 4"),
        (lambda: graph("hyper-hypercube", 10, p=0), "p ≥ 1"),
        (lambda: graph("p-peer-exponential", 10, p=0), "p ≥ 1"),
        (lambda: graph("od-equidyn", 8, eta=1.5), "eta in (0, 1], got 1.5"),
        (lambda: graph("d-equistatic", 8, peers=0), "one peer, got 0"),
        (lambda: graph("ring", 4).neighbours(0, 4), "nodes are 0 … 3"),
        (lambda: graph("ring", 4).matrix(-1), "rounds count from 0"),
    ],
)
def test_messages_name_value_limit_and_remedy(call, message):
    with pytest.raises(GraphError) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_circulant_and_sparse_rounds_are_the_same_mathematics():
    rng = np.random.default_rng(0)
    circulant = Circulant(7, 0.5, (6, 2), (0.3, 0.2))
    sparse = SparseMatrix.from_matrix(circulant.matrix())
    x = rng.standard_normal((7, 3))
    for one in (x, x[:, 0]):
        assert np.allclose(circulant.apply(one), circulant.matrix() @ one)
        assert np.allclose(sparse.apply(one), circulant.matrix() @ one)
    assert np.allclose(circulant.transposed.matrix(), circulant.matrix().T)
    assert np.allclose(sparse.transposed.matrix(), circulant.matrix().T)
    assert not circulant.symmetric() and not sparse.symmetric()
    assert circulant.edge_count == sparse.edge_count == 14
    own = np.sort_complex(np.linalg.eigvals(circulant.matrix()))
    assert np.allclose(np.sort_complex(circulant.eigenvalues()), own)


def test_sparse_rounds_may_have_empty_rows():
    r = SparseMatrix.from_edges(4, [3], [0], 0.25)
    assert r.apply(np.arange(4.0)).tolist() == [0.0, 1.0, 2.0, 2.25]
    assert r.neighbours(0)[0].tolist() == [] and r.receivers(0).tolist() == [3]


def test_the_own_weight_of_xor_pairs_is_what_the_partner_leaves():
    for kappa in np.linspace(0.01, 0.99, 99):
        matrix = graph("one-peer-hypercube", 8, slack=kappa).matrix(1)
        assert (matrix.diagonal() == 1 - kappa * 0.5).all()  # κ/2 + (1 − κ) is another number


@on_each(
    ("name", "options"),
    [
        ("one-peer-exponential", {}),
        ("one-peer-exponential", {"order": "permuted"}),
        ("random-matching", {}),
        ("ring", {}),
    ],
)
def test_a_slowed_graph_has_each_round_several_times(name, options):
    made = graph(name, 6, **options)
    slow = made.slowed(3)
    assert slow.facts == made.facts and slow.degree == made.degree and made.slowed(1) is made
    for t in range(24):
        assert (slow.matrix(t) == made.matrix(t // 3)).all()
    if made.period and made.period > 1:
        assert slow.period == 3 * made.period
