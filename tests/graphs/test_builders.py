"""Graphs by name: their in-neighbours, and the properties that papers state."""

import inspect

import networkx as nx
import numpy as np
import pytest

from mpigossip.graphs import BUILDERS, GraphError, graph
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.finite_time import _simple_base, factors
from mpigossip.graphs.spectral import residue, rounds_to_exact, spectral_gap
from tests.cases import naming, on_each

DRAWN = ["random-matching", "od-equidyn", "ou-equidyn"]


def edges(g, t=0):
    """Return the directed edges (receiver, sender) of a round."""
    return {(i, int(j)) for i in range(g.n) for j in g.neighbours(t, i)[0]}


def network(g, t=0):
    """Return a round as a directed networkx graph, from senders to receivers."""
    made = nx.DiGraph()
    made.add_nodes_from(range(g.n))
    made.add_edges_from((j, i) for i, j in edges(g, t))
    return made


def test_every_builder_documents_itself_and_shows_its_options():
    for name, build in BUILDERS.items():
        parameters = inspect.signature(build).parameters
        assert list(parameters)[:2] == ["n", "seed"]
        options = list(parameters.values())[2:]
        assert all(o.kind is o.KEYWORD_ONLY and o.default is not o.empty for o in options)
        assert parameters["slack"].default == 1.0
        assert build.__doc__, name


@on_each("name", BUILDERS)
def test_one_node_has_no_neighbours(name):
    g = graph(name, 1)
    assert (g.n, g.degree, g.period) == (1, 0, 1)
    assert g.matrix(5).tolist() == [[1.0]]
    assert rounds_to_exact(g) == 0


@on_each("n", range(2, 40))
def test_static_exponential(n):
    g = graph("exponential", n)
    powers = [2**k for k in range(10) if 2**k < n]
    assert g.degree == len(powers) == rounds_needed(n)
    for i in (0, n - 1):
        nodes, weights, own = g.neighbours(0, i)
        assert nodes.tolist() == [(i - p) % n for p in powers]
        assert (weights == own).all() and own == 1 / (len(powers) + 1)
        assert g.receivers(0, i).tolist() == [(i + p) % n for p in powers]


@on_each("n", range(2, 257))
def test_spectral_gap_of_the_static_exponential_graph(n):
    """By proposition 1 of Ying et al., it is 2/(1+τ) for even n, and strictly more for odd n."""
    gap = spectral_gap(graph("exponential", n))
    formula = 2 / (1 + rounds_needed(n))
    if n % 2 == 0:
        assert abs(gap - formula) <= 1e-12
    else:
        assert gap > formula + 1e-6


def test_powers_of_two_are_counted_in_integers():
    assert [rounds_needed(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    for k in (29, 49, 52, 53, 63, 100):  # floating-point logarithms are wrong for these
        assert [rounds_needed(2**k + d) for d in (-1, 0, 1)] == [k, k, k + 1]
    assert rounds_needed(243, 3) == 5 and rounds_needed(244, 3) == 6


@on_each("n", (2, 3, 5, 6, 8, 12))
def test_one_peer_exponential_is_cyclic_by_default(n):
    g = graph("one-peer-exponential", n)
    assert g.degree == 1 and g.period == rounds_needed(n)
    for t in range(2 * g.period):
        step = 2 ** (t % g.period)
        for i in range(n):
            nodes, weights, own = g.neighbours(t, i)
            assert (nodes.tolist(), weights.tolist(), own) == ([(i - step) % n], [0.5], 0.5)
            assert g.receivers(t, i).tolist() == [(i + step) % n]


@on_each(
    ("name", "n"),
    [
        *(("one-peer-exponential", n) for n in (2, 4, 8, 16, 64, 256)),
        *(("one-peer-hypercube", n) for n in (2, 4, 8, 64)),
    ],
)
def test_one_peer_is_exact_for_powers_of_two(name, n):
    tau = rounds_needed(n)
    cyclic = graph(name, n)
    for start in range(tau):
        assert residue(cyclic, tau, start) <= 1e-12
        assert rounds_to_exact(cyclic, start) == tau
    for seed in range(3):
        permuted = graph(name, n, seed=seed, order="permuted")
        assert all(residue(permuted, tau, block * tau) <= 1e-12 for block in range(5))


@on_each(
    ("n", "expected"),
    [(3, 0.25), (5, 0.2023), (6, 0.2165), (7, 0.125), (12, 0.2091), (24, 0.2073), (25, 0.1921)],
)
def test_one_peer_leaves_a_residue_elsewhere(n, expected):
    assert residue(graph("one-peer-exponential", n)) == pytest.approx(expected, abs=5e-5)
    assert rounds_to_exact(graph("one-peer-exponential", n)) is None


def test_permuted_uses_every_peer_once_a_period():
    g = graph("one-peer-exponential", 32, seed=7, order="permuted")
    orders = [
        tuple(int(g.neighbours(5 * block + k, 0)[0][0]) for k in range(5)) for block in range(20)
    ]
    assert all(sorted(order) == sorted(32 - 2**k for k in range(5)) for order in orders)
    assert len(set(orders)) > 10


def test_uniform_draws_all_peers_about_equally_often():
    g = graph("one-peer-exponential", 16, seed=1, order="uniform")
    drawn = [int(g.neighbours(t, 0)[0][0]) for t in range(4000)]
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == 4 and counts.min() > 880 and counts.max() < 1120
    assert g.period is None and rounds_to_exact(graph("one-peer-exponential", 2)) == 1


@on_each("name", DRAWN + ["one-peer-exponential", "one-peer-hypercube"])
def test_drawn_rounds_are_the_same_on_every_node_in_any_order(name):
    order = {} if name in DRAWN else {"order": "uniform"}
    g, other = (graph(name, 16, seed=5, **order) for _ in range(2))
    later = [other.matrix(t) for t in range(99, -1, -1)][::-1]
    assert all((g.matrix(t) == later[t]).all() for t in range(100))
    another = graph(name, 16, seed=6, **order)
    assert any((g.matrix(t) != another.matrix(t)).any() for t in range(20))


def test_drawn_words_never_change():
    """NumPy guarantees the words of Philox, so that a run can be resumed years later."""
    g = graph("one-peer-exponential", 16, seed=0, order="permuted")
    assert [16 - int(g.neighbours(t, 0)[0][0]) for t in range(8)] == [
        *(1, 8, 2, 4),
        *(8, 4, 2, 1),
    ]
    m = graph("random-matching", 6, seed=0)
    assert [m.neighbours(0, i)[0].tolist() for i in range(6)] == [[1], [0], [3], [2], [5], [4]]


@on_each("k", (1, 2, 3, 4), (1, 2))
def test_base_graphs_are_exact_for_every_n(k):
    for n in range(2, 130):
        g = graph(f"base-{k + 1}", n)
        assert residue(g) <= 1e-9, n
        assert g.degree <= k and {"symmetric", "row-stochastic"} <= g.facts
        assert g.period <= 2 * np.log(n) / np.log(k + 1) + 2


@on_each(
    ("k", "lengths"),
    [
        (1, {2: 1, 3: 3, 4: 2, 5: 5, 6: 4, 7: 5, 8: 3, 9: 7, 10: 6, 12: 5, 15: 7, 16: 4, 17: 9}),
        (1, {20: 7, 24: 6, 25: 9, 31: 9, 32: 5, 33: 11, 40: 8, 48: 7, 63: 11, 64: 6}),
        (2, {3: 1, 5: 3, 6: 2, 7: 4, 8: 3, 9: 2, 10: 4, 4: 2, 16: 4, 25: 6, 32: 5}),
        (4, {5: 1, 10: 2, 20: 2, 25: 2, 17: 4, 32: 3}),
    ],
)
def test_lengths_of_base_graphs(k, lengths):
    assert {n: graph(f"base-{k + 1}", n).period for n in lengths} == lengths


@on_each(
    ("base", "n", "simple", "joined"),
    [
        (5, 26, 247, 139),
        (5, 62, 566, 589),
        (5, 93, 887, 930),
        (5, 124, 1232, 1302),
        (3, 74, 515, 519),
        (3, 14, 57, 47),
        (4, 10, 40, 37),
    ],
)
def test_base_graphs_of_equal_length_take_the_fewest_edges(base, n, simple, joined):
    assert len(_simple_base(range(n), base - 1)) == graph(f"base-{base}", n).period
    assert sum(map(len, _simple_base(range(n), base - 1))) == simple
    made = graph(f"base-{base}", n)
    assert sum(r.edge_count for r in made.schedule.rounds) // 2 == min(simple, joined)


@on_each("p", (1, 2, 4, 6))
def test_hyper_hypercube_is_exact_where_it_exists(p):
    for n in range(2, 130):
        if factors(n, p + 1) is None:
            with pytest.raises(GraphError, match=naming("prime factors")):
                graph("hyper-hypercube", n, p=p)
            continue
        g = graph("hyper-hypercube", n, p=p)
        assert g.degree <= p and residue(g) <= 1e-9
        assert g.period == len(factors(n, p + 1))


def test_fewest_factors():
    assert factors(24, 6) == (4, 6) and factors(16, 5) == (4, 4) and factors(7, 6) is None
    assert factors(1, 2) == ()


@on_each(("n", "p"), [(9, 2), (27, 2), (6, 2), (18, 2), (16, 3), (12, 3), (25, 4)])
def test_p_peer_exponential_is_exact_for_its_sizes(n, p):
    g = graph("p-peer-exponential", n, p=p)
    assert g.degree == p and residue(g) <= 1e-12


def test_p_peer_exponential_with_one_peer_is_the_one_peer_graph():
    for n in (2, 5, 8, 12):
        assert graph("p-peer-exponential", n, p=1) == graph("one-peer-exponential", n)


@on_each("n", (2, 4, 8, 16, 64))
def test_alternating_exponential_ring(n):
    g = graph("alternating-exponential-ring", n)
    tau = rounds_needed(n)
    assert g.period == 2 * tau and g.degree == 1 and residue(g) <= 1e-12
    for k in range(tau):
        halves = edges(g, 2 * k), edges(g, 2 * k + 1)
        assert not halves[0] & halves[1]
        assert halves[0] | halves[1] == {(i, i ^ 2**k) for i in range(n)}


TEXTBOOK = {
    "ring": nx.cycle_graph(12),
    "path": nx.path_graph(12),
    "star": nx.star_graph(11),
    "complete": nx.complete_graph(12),
    "ring-lattice": nx.circulant_graph(12, [1, 2]),
    "grid": nx.convert_node_labels_to_integers(nx.grid_2d_graph(3, 4)),
    "torus": nx.convert_node_labels_to_integers(nx.grid_2d_graph(3, 4, periodic=True)),
}


@on_each("name", TEXTBOOK)
def test_textbook_graphs_against_networkx(name):
    network = TEXTBOOK[name]
    assert edges(graph(name, 12)) == {*network.edges, *((j, i) for i, j in network.edges)}


def test_more_textbook_graphs():
    cube = nx.convert_node_labels_to_integers(nx.hypercube_graph(4), ordering="sorted")
    assert edges(graph("hypercube", 16)) == {*cube.edges, *((j, i) for i, j in cube.edges)}
    square = {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert edges(graph("torus", 4)) == square | {(j, i) for i, j in square}
    assert edges(graph("torus", 7)) == edges(graph("ring", 7))
    assert edges(graph("grid", 7)) == edges(graph("path", 7))
    assert edges(graph("grid", 12, rows=2)) != edges(graph("grid", 12))
    assert graph("ring", 2).matrix(0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert np.allclose(graph("ring", 3).matrix(0), 1 / 3)


@on_each("name", ["half-random", "erdos-renyi", "random-regular"])
def test_random_graphs_are_connected_and_repeatable(name):
    for seed in range(5):
        g = graph(name, 14, seed=seed)
        assert g == graph(name, 14, seed=seed) and "static" in g.facts
        assert nx.is_connected(nx.Graph(list(edges(g))))
    assert len({graph(name, 14, seed=seed) for seed in range(5)}) == 5


def test_sizes_of_random_graphs():
    half = [len(edges(graph("half-random", 20, seed=s))) / 380 for s in range(20)]
    assert 0.45 < np.mean(half) < 0.55
    g = graph("random-regular", 15, degree=6)
    assert all(len(g.neighbours(0, i)[0]) == 6 for i in range(15))
    sparse = [len(edges(graph("erdos-renyi", 20, seed=s, probability=0.2))) for s in range(20)]
    assert 0.17 < np.mean(sparse) / 380 < 0.27  # a little more: only connected ones are kept


@on_each("n", (2, 7, 12))
def test_random_matchings_pair_all_nodes(n):
    g = graph("random-matching", n, seed=2)
    seen = set()
    for t in range(60):
        pairs = edges(g, t)
        assert len(pairs) == n // 2 * 2
        assert {(j, i) for i, j in pairs} == pairs
        seen |= pairs
    assert len(seen) == n * (n - 1)


def test_equitopo_static():
    g = graph("d-equistatic", 17, seed=4, peers=6)
    assert g.degree <= 6 and "symmetric" not in g.facts
    assert g.neighbours(0, 3)[2] == pytest.approx(1 / 17)
    u = graph("u-equistatic", 17, seed=4, peers=6)
    assert np.allclose(u.matrix(0), (g.matrix(0) + g.matrix(0).T) / 2)
    # ‖W − J‖ < ε with high probability for peers ≥ 8 ln(2n/p)/(3ε²)
    peers = int(8 * np.log(2 * 64 / 0.1) / (3 * 0.5**2)) + 1
    assert all(spectral_gap(graph("d-equistatic", 64, seed=s, peers=peers)) > 0.5 for s in range(8))


@on_each("name", ["d-equistatic", "u-equistatic"])
def test_equitopo_static_graphs_are_connected_for_every_seed(name):
    for n in (4, 6, 8, 9, 30):
        for seed in range(200):
            assert np.gcd.reduce((n, *graph(name, n, seed=seed).round(0).offsets)) == 1
    assert graph(name, 4) == graph(name, 4)
    # a connected draw is not changed, so its weights equal the weights of earlier versions
    assert graph("d-equistatic", 16, seed=4).round(0).offsets == (9, 12, 13, 14)
    # one distance has to be a unit modulo n, of which there are 8 among 29
    for seed in range(20):
        assert nx.is_strongly_connected(network(graph(name, 30, seed=seed, peers=1)))


def test_equitopo_dynamic_matrices():
    n = 9
    for t in range(20):
        od = graph("od-equidyn", n, seed=3, eta=0.4).matrix(t)
        a = int(np.flatnonzero(od[0, 1:])[0]) + 1
        basis = np.eye(n) / n + np.roll(np.eye(n), a, axis=1) * (n - 1) / n
        assert np.allclose(od, 0.6 * np.eye(n) + 0.4 * basis)
        ou = graph("ou-equidyn", n, seed=3, eta=0.4).matrix(t)
        assert np.allclose(ou, ou.T) and ((ou > 0).sum(axis=1) <= 2).all()
        busy = ou.diagonal() < 1
        assert np.allclose(ou.diagonal()[busy], 0.6 + 0.4 / n)
