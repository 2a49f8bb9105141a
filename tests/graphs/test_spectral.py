"""Rates and residues against plain dense linear algebra, theory's numbers, and speed."""

import functools
import math
import subprocess
import sys
from contextlib import suppress
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest

from mpigossip.graphs import BUILDERS, GraphError, from_networkx, graph
from mpigossip.graphs import spectral as sp
from mpigossip.graphs import theory as th
from mpigossip.graphs.base import static
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.rounds import Circulant, as_sparse
from tests.cases import naming, on_each

MIXED = ["exponential", "one-peer-exponential", "base-3", "star", "grid", "random-regular"]


def product(g, rounds, start=0):
    total = np.eye(g.n)
    for t in range(start, start + rounds):
        total = g.matrix(t) @ total
    return total


@on_each("name", [*MIXED, "random-matching", "od-equidyn"])
@on_each("n", (5, 12))
def test_residues_and_rates_against_dense_algebra(name, n):
    g = graph(name, n, seed=2)
    for rounds in (1, 3):
        wanted = np.linalg.norm(product(g, rounds, 1) - 1 / n, 2)
        assert sp.residue(g, rounds, 1) == pytest.approx(wanted, abs=1e-12)
    wanted = [np.linalg.norm(product(g, rounds) - 1 / n, 2) for rounds in range(5)]
    assert np.allclose(sp.residues(g, 4), wanted, atol=1e-12)
    if g.period:
        radius = np.abs(np.linalg.eigvals(product(g, g.period) - 1 / n)).max()
        wanted = 0.0 if radius < 1e-7 else radius ** (1 / g.period)
        assert sp.consensus_rate(g) == pytest.approx(wanted, abs=1e-9)


@on_each("name", ["ring", "exponential", "star", "d-equistatic"])
def test_eigenvalues(name):
    g = graph(name, 11, seed=1)
    values = sp.eigenvalues(g)
    assert values[0] == pytest.approx(1) and (np.diff(np.abs(values)) <= 1e-12).all()
    wanted = np.linalg.eigvals(g.matrix(0))
    assert np.abs(values[:, None] - wanted[None, :]).min(axis=1).max() < 1e-7
    assert (values.imag == 0).all() or "symmetric" not in g.facts


def test_gaps_of_known_graphs():
    assert sp.spectral_gap(graph("ring", 10)) == pytest.approx(2 / 3 * (1 - math.cos(math.pi / 5)))
    assert sp.spectral_gap(graph("hypercube", 32)) == pytest.approx(2 / 6)
    assert sp.spectral_gap(graph("star", 9)) == pytest.approx(1 / 9)
    assert sp.spectral_gap(graph("complete", 9)) == pytest.approx(1)
    assert sp.spectral_gap(graph("identity", 9)) == pytest.approx(0, abs=1e-12)
    with pytest.raises(GraphError, match=naming("spectral gap")):
        sp.spectral_gap(graph("base-2", 9))


def test_rounds_to_exact():
    assert sp.rounds_to_exact(graph("complete", 7)) == 1
    assert sp.rounds_to_exact(graph("ring", 7)) is None
    assert sp.rounds_to_exact(graph("ring", 3)) == 1
    assert sp.rounds_to_exact(graph("base-2", 12)) == 5
    assert sp.rounds_to_exact(graph("base-2", 12), limit=4) is None
    assert sp.rounds_to_exact(graph("one-peer-exponential", 8, order="permuted"), start=1) in (
        3,
        4,
        5,
    )


@on_each("degree, length", [(2, 3), (2, 6), (3, 4)])
def test_powers_of_a_static_graph_may_become_exact(degree, length):
    """In a de Bruijn graph, node i sends to degree · i, … mod n: W^length is the average."""
    n = degree**length
    matrix = np.zeros((n, n))
    for node in range(n):
        for k in range(degree):
            matrix[(degree * node + k) % n, node] += 1 / degree
    assert sp.rounds_to_exact(graph([matrix], n)) == length


@on_each("name", sorted(BUILDERS))
@on_each("n", [8, 9, 64])
def test_static_graphs_of_the_package_are_exact_after_one_round_or_never(name, n):
    """Products that converge fast are not mistaken for exact ones."""
    try:
        g = graph(name, n)
    except GraphError:
        return
    if g.period == 1:
        is_exact = np.abs(g.matrix(0) - 1 / n).max() < 1e-12
        assert sp.rounds_to_exact(g) == (1 if is_exact else None)


PRIME = 2**31 - 1


@functools.cache
def residue_class(weight):
    """Return a weight, which is a fraction of small integers, as an integer modulo PRIME."""
    fraction = Fraction(weight).limit_denominator(20_000)
    assert abs(fraction - Fraction(weight)) < 1e-14, weight
    return fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME


def exact_in_rationals(g, limit):
    """Return the number of rounds until a vector equals its mean, in integers modulo a prime."""
    if g.period == 1:
        w = g.matrix(0)
        return 1 if np.abs(w - 1 / g.n).max() < 1e-14 else None
    edges = [as_sparse(g.round(t)) for t in range(min(limit, g.period or limit))]
    weights = [np.array([residue_class(w) for w in r.weights.tolist()], np.int64) for r in edges]
    owns = [np.array([residue_class(w) for w in r.own.tolist()], np.int64) for r in edges]
    x = np.arange(1, g.n + 1) ** 3 * 1_234_567 % PRIME
    mean = int(x.sum()) * pow(g.n, -1, PRIME) % PRIME
    for t in range(limit):
        r = edges[t % len(edges)]
        k = t % len(edges)
        y = owns[k] * x % PRIME
        np.add.at(y, r.edge_receivers, weights[k] * x[r.indices] % PRIME)
        x = y % PRIME
        if (x == mean).all():
            return t + 1
    return None


def test_only_exact_products_are_called_exact():
    """Compare every builder with integers, because a decaying residue falls below any threshold."""
    cases = [(name, {}) for name in BUILDERS if name not in ("half-random", "erdos-renyi")]
    cases += [("p-peer-exponential", {"p": p}) for p in (1, 3, 4, 5)]
    cases += [("hyper-hypercube", {"p": p}) for p in (2, 4)]
    cases += [("one-peer-exponential", {"order": "permuted"})]
    for name, options in cases:
        for n in (*range(2, 34), 48, 63, 64, 65, 96) if "exponential" in name else range(2, 100, 7):
            with suppress(GraphError):
                g = graph(name, n, seed=1, **options)
                limit = 1 if g.period == 1 else max(2 * sp.horizon(g), 4 * rounds_needed(n) + 4)
                said = sp.rounds_to_exact(g)
                assert said == exact_in_rationals(g, limit), (name, options, n, said)


@on_each("n", (8, 64, 256), (8, 64))
def test_equidyn_contracts_by_about_a_half_at_eta_one_half(n):
    """The factor of E‖x − x̄‖² is .4375 at n = 8 and .498 at n = 256; at η = 1, it is 1 − O(1/n)."""
    rng = np.arange(1, n)
    waves = np.exp(2j * np.pi / n * np.outer(np.arange(1, n), rng))

    def exact(eta):
        values = (1 - eta) + eta * (1 / n + (n - 1) / n * waves)
        return (np.abs(values) ** 2).mean(axis=1).max()

    assert exact(0.5) == pytest.approx({8: 0.4375, 64: 0.4922, 256: 0.498}[n], abs=5e-4)
    drawn = sp.mean_square_contraction(graph("od-equidyn", n, seed=1), 3000)
    assert drawn == pytest.approx(exact(0.5), abs=0.06)
    slow = sp.mean_square_contraction(graph("od-equidyn", n, seed=1, eta=1.0), 3000)
    assert slow == pytest.approx(exact(1.0), abs=0.02) and slow > 1 - 2.1 / n


def test_mean_square_contraction_of_matchings_is_about_a_half():
    assert sp.mean_square_contraction(graph("random-matching", 16), 2000) == pytest.approx(
        0.5, abs=0.06
    )
    g = graph("star", 7)
    assert sp.mean_square_contraction(g) == pytest.approx((1 - sp.spectral_gap(g)) ** 2)


def by_definition(g, gamma, starts):
    totals = []
    for start in range(starts):
        p = np.eye(g.n)
        total = 0.0
        for k in range(600):
            p = g.matrix(start + k) @ p
            total += gamma**k * (p**2).sum() / g.n
        totals.append(total)
    return 1 / (1 - gamma) / np.mean(totals)


@on_each("name", ["ring", "star", "exponential", "one-peer-exponential", "base-2"])
def test_effective_neighbours_by_their_definition(name):
    g = graph(name, 6)
    wanted = by_definition(g, 0.951, g.period)
    assert sp.effective_neighbours(g) == pytest.approx(wanted, rel=1e-6)


def test_effective_neighbours_between_one_and_n():
    assert sp.effective_neighbours(graph("identity", 9)) == pytest.approx(1)
    assert sp.effective_neighbours(graph("complete", 9)) == pytest.approx(9)
    star, ring = (sp.effective_neighbours(graph(name, 32)) for name in ("star", "ring"))
    assert star < ring  # the star's gap is larger, and yet it trains worse (Vogels et al.)
    assert sp.spectral_gap(graph("star", 32)) > sp.spectral_gap(graph("ring", 32))
    with pytest.raises(GraphError, match=naming("gamma")):
        sp.effective_neighbours(graph("ring", 4), 1.0)


def test_transient_iterations_compare_graphs():
    tau = 5
    static = th.transient_iterations(graph("exponential", 32))
    assert static == pytest.approx((32**3 * (tau + 1) ** 2 / 4, 32**3 * (tau + 1) ** 4 / 16))
    assert th.transient_iterations(graph("one-peer-exponential", 32)) == pytest.approx(static)
    assert th.transient_iterations(graph("ring", 32))[0] > 100 * static[0]
    assert th.transient_iterations(graph("complete", 32)) == pytest.approx((32**3, 32**3))
    assert th.transient_iterations(graph("identity", 32)) == (math.inf, math.inf)


def test_lower_bounds():
    given = dict(delta=2.0, smoothness=3.0, noise=0.5, epsilon=0.1, n=8, batch=4)
    sample = 2 * 3 * 0.25 / (32 * 1e-4)
    assert th.lower_bound(**given, diameter=4) == pytest.approx(sample + 2 * 3 * 4 / 0.01)
    assert th.gossip_lower_bound(**given, lam=0.75) == pytest.approx(sample + 2 * 3 / (0.01 * 0.5))
    ring = 1 - sp.spectral_gap(graph("ring", 8))
    assert th.gossip_lower_bound(**given, lam=ring) > th.gossip_lower_bound(**given, lam=0.1)
    with pytest.raises(GraphError, match=naming("λ = 1.0")):
        th.gossip_lower_bound(**given, lam=1.0)
    with pytest.raises(GraphError, match=naming("epsilon", "0")):
        th.lower_bound(**(given | {"epsilon": 0}), diameter=4)
    for separation in (None, -1):
        with pytest.raises(GraphError, match=naming("diameter", "connected")):
            th.lower_bound(**given, diameter=separation)


def test_diameter():
    for network in (nx.cycle_graph(9), nx.star_graph(5), nx.path_graph(4), nx.complete_graph(3)):
        assert th.diameter(from_networkx(network)) == nx.diameter(network)
    assert th.diameter(graph("identity", 3)) is None
    assert th.diameter(graph("one-peer-exponential", 16)) == 4
    assert th.diameter(graph("identity", 1)) == 0


def test_vectors_per_round():
    sent = {"one-peer-exponential": 1, "exponential": 3, "complete": 2 * 7 / 8, "identity": 0}
    assert {name: th.vectors_per_round(graph(name, 8)) for name in sent} == sent
    assert th.vectors_per_round(graph("star", 5)) == pytest.approx(8 / 5)


@on_each("name", BUILDERS)
@on_each("n", (1, 16))
def test_every_graph_can_be_described(name, n):
    facts = th.describe(graph(name, n, seed=1))
    assert facts["n"] == n and facts["name"] == name
    assert 1 - 1e-9 <= facts["effective_neighbours"] <= n + 1e-9
    assert 0 <= facts["consensus_rate"] <= 1 + 1e-12


@pytest.mark.parametrize(
    ("name", "n", "gap"),
    [
        ("hypercube", 512, 2 / 10),
        ("star", 300, 1 / 300),
        ("path", 300, 2 / 3 * (1 - math.cos(math.pi / 300))),
        ("torus", 400, 2 / 5 * (1 - math.cos(math.pi / 10))),
    ],
)
def test_large_graphs_agree_with_their_formulas(name, n, gap, monkeypatch):
    monkeypatch.setattr(sp, "DENSE", 100)
    facts = th.describe(graph(name, n))
    assert facts["spectral_gap"] == pytest.approx(gap, rel=1e-6)
    dense = 1 / (1 - 0.951) / np.mean([v**2 / (1 - 0.951 * v**2) for v in spectrum(name, n)])
    assert facts["effective_neighbours"] == pytest.approx(dense, rel=0.2)


def spectrum(name, n):
    return np.linalg.eigvalsh(graph(name, n).matrix(0))


def test_iterated_norm_of_a_large_sequence(monkeypatch):
    g = graph("base-2", 90)
    wanted = [sp.residue(g, rounds) for rounds in (1, 3, 6, g.period)]
    assert wanted[0] == pytest.approx(1)
    monkeypatch.setattr(sp, "DENSE", 10)
    assert [sp.residue(g, rounds) for rounds in (1, 3, 6, g.period)] == pytest.approx(
        wanted, rel=1e-6, abs=1e-9
    )
    assert sp.rounds_to_exact(g) == g.period


LARGE = """
import sys, time
from mpigossip.graphs import graph
from mpigossip.graphs.theory import describe
for name in "exponential", "one-peer-exponential", "one-peer-hypercube", "ring":
    describe(graph(name, 4096))
print(time.process_time(), sorted({"scipy", "torch", "networkx"} & set(sys.modules)))
"""


def test_4096_nodes_are_described_without_dense_matrices_by_numpy_alone():
    """This takes about 3 s; the eigenvalues of a single dense matrix would take a minute."""
    command = [sys.executable, "-c", LARGE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    seconds, _, modules = done.stdout.partition(" ")
    assert float(seconds) < 30 and modules.strip() == "[]"


def test_unreached_names_a_sender_and_a_node_that_it_never_reaches():
    ring = graph("ring", 6)
    pairs = np.kron(np.eye(2), np.full((2, 2), 0.5))
    assert sp.unreached(ring) is None and sp.unreached(graph("star", 5)) is None
    assert sp.unreached(graph("identity", 3)) == (0, 1)
    assert sp.unreached(static(Circulant(6, 0.5, (2, 4), (0.25, 0.25)))) == (0, 1)
    assert sp.unreached(graph(pairs)) == (0, 2)
    follower = np.array([[1.0, 0.0], [0.5, 0.5]])  # node 1 receives from node 0 alone
    assert sp.unreached(graph(follower)) == (1, 0)
    assert sp.unreached(graph(follower[::-1, ::-1])) == (0, 1)
    # A message may travel along the edges of all rounds of a period.
    turned = pairs[np.ix_([1, 2, 3, 0], [1, 2, 3, 0])]
    assert sp.unreached(graph([pairs, turned])) is None
