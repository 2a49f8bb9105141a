"""Topology search: within its budgets, repeatable, better than chance; graphs in files."""

import json
import os
from itertools import combinations

import networkx as nx
import numpy as np
import pytest

from mpigossip.graphs import GraphError, graph
from mpigossip.graphs import search as searching
from mpigossip.graphs.annealing import CandidateGraph, SearchTask, fill, random_move
from mpigossip.graphs.search import save, search, search_circulants
from mpigossip.graphs.spectral import spectral_gap
from mpigossip.graphs.user_graphs import from_file
from tests.cases import naming, on_each


def checked(result):
    """Check that a graph is within its limits, is connected, and has the score of its result."""
    network = nx.Graph(list(result.edges))
    assert len(network) == result.n and nx.is_connected(network)
    assert len(network.edges) == len(result.edges) <= result.budget
    assert max(dict(network.degree).values()) <= result.degree
    rho = 1 - spectral_gap(result.graph())
    if result.weights == "laplacian":
        assert rho == pytest.approx((1 - result.score) / (1 + result.score), abs=1e-9)
    else:
        assert rho == pytest.approx(1 - result.score, abs=1e-9)
    scores = [score for _, _, score in result.history]
    assert scores == sorted(scores) and scores[-1] == pytest.approx(result.score)
    assert result.spectrum == pytest.approx(
        np.linalg.eigvalsh(nx.laplacian_matrix(network, range(result.n)).toarray().astype(float)),
        abs=1e-9,
    )
    return result


BUDGETS = [
    dict(n=2, degree=1),
    dict(n=3, degree=2),
    dict(n=5, degree=2),
    dict(n=6, degree=5),
    dict(n=7, degree=3),
    dict(n=10, edges=12),
    dict(n=9, edges=8),
    dict(n=13, degree=4),
    dict(n=12, degree=3, weights="metropolis-hastings"),
    dict(n=16, edges=30, weights="metropolis-hastings"),
    dict(n=12, degree=4, edges=20, weights="max-degree"),
]


@on_each("given", BUDGETS)
def test_search_keeps_its_budgets_and_repeats_itself(given):
    result = checked(search(**given, evaluations=200, seed=4))
    again = search(**given, evaluations=200, seed=4)
    assert result.edges == again.edges and result.score == again.score
    assert result.evaluations <= 200 + 100  # circulants are judged in one go


def test_search_beats_random_graphs_in_seconds():
    chance = max(ratio(nx.random_regular_graph(4, 16, seed=seed)) for seed in range(200))
    for n, bar in ((16, 0.37), (32, 0.23)):
        result = [checked(search(n, degree=4, evaluations=3000, seed=seed)) for seed in range(2)]
        assert max(f.score for f in result) > bar
    assert chance + 0.07 < 0.37


def ratio(network):
    values = np.linalg.eigvalsh(nx.laplacian_matrix(network).toarray().astype(float))
    return values[1] / values[-1]


def test_interrupt_keeps_the_best_so_far():
    def stop(part, score, judged):
        if part > 0.3:
            raise KeyboardInterrupt

    result = checked(search(20, degree=4, seconds=4.0, progress=stop))
    assert result.interrupted and result.seconds < 15


def nx_graph(edges, n, weights):
    network = nx.Graph(list(edges))
    network.add_nodes_from(range(n))
    return graph(network, n, weights=weights)


@on_each(
    ("given", "message"),
    [
        (dict(n=1, degree=2), ("n = 1", "2")),
        (dict(n=8), ("degree", "edges", "both")),
        (dict(n=8, edges=5), ("5 edges", "8 nodes", "7")),
        (dict(n=8, degree=1), ("8 nodes", "degree 1", "2")),
        (
            dict(n=8, degree=4, weights="fdla"),
            ('weights = "fdla"', "laplacian, metropolis-hastings"),
        ),
        (dict(n=8, degree=4, seconds=0), "seconds = 0, evaluations = None"),
        (dict(n=8, degree=4, evaluations=0), "seconds = None, evaluations = 0"),
        *(
            (dict(n=8, degree=4, evaluations=5, seed=s), (f"got {s}", "seed"))
            for s in (-1, 0.5, True)
        ),
    ],
)
def test_impossible_searches_are_rejected(given, message):
    with pytest.raises(GraphError, match=naming(message)):
        search(**given)


@on_each(("n", "degree"), [(9, 4), (12, 5), (16, 4), (15, 6), (10, 3)])
def test_circulant_search_finds_the_best_of_all(n, degree):
    result = checked(search_circulants(n, degree))
    best = 0.0
    half = [n // 2] if degree % 2 else []
    for jumps in combinations(range(1, (n - 1) // 2 + 1), degree // 2):
        best = max(best, ratio(nx.circulant_graph(n, [*jumps, *half])))
    assert result.score == pytest.approx(best, abs=1e-12)


@on_each(
    ("options", "message"),
    [
        ({"n": 9, "degree": 3}, ("9 nodes", "degree 3")),
        ({"n": 64, "degree": 8, "limit": 100}, "limit = 100"),
        ({"n": 12, "degree": 4, "edges": 20}, "20 edges"),
    ],
)
def test_circulant_searches_that_are_rejected(options, message):
    with pytest.raises(GraphError, match=naming(message)):
        search_circulants(**options)


@on_each("m", (1, 2, 3, 6, 12))
@on_each("weights", ["laplacian", "metropolis-hastings", "max-degree"])
def test_blocks_of_a_symmetric_plan_have_the_spectrum_of_the_whole(m, weights):
    rng = np.random.default_rng(m)
    plan = CandidateGraph(SearchTask(24, 5, 44, weights), m)
    fill(plan, rng)
    for _ in range(200):
        move = random_move(plan, rng)
        if move is not None:
            plan.apply(move)
    assert plan.fits() and plan.size == len(plan.edges())
    network = nx.Graph(plan.edges())
    network.add_nodes_from(range(24))
    matrix = nx.laplacian_matrix(network, range(24)).toarray().astype(float)
    if weights != "laplacian":
        made = nx_graph(plan.edges(), 24, weights)
        matrix = np.eye(24) - made.matrix(0)
    values = np.linalg.eigvalsh(matrix)
    assert plan.extremes() == pytest.approx((values[1], values[-1]), abs=1e-9)


def test_a_move_that_breaks_a_budget_changes_nothing():
    plan = CandidateGraph(SearchTask(8, 3, 12, "laplacian"), 1)
    fill(plan, np.random.default_rng(0))
    before = sorted(plan.orbits)
    blocks = plan.blocks.copy()
    a, c, _ = plan.orbits[0]
    assert not plan.apply(([], [(0, 7, 0), (0, 6, 0), (0, 5, 0), (0, 4, 0)]))
    assert not plan.apply(([], [(a, c, 0)])) and not plan.apply(([], [(2, 2, 0)]))
    assert sorted(plan.orbits) == before and (plan.blocks == blocks).all()


@pytest.fixture(scope="module")
def searched():
    return search(10, degree=3, evaluations=300, seed=1)


def test_results_in_files(searched, tmp_path):
    path = save(searched, tmp_path / "ten.json")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    g = graph(f"file:{path}", 10)
    assert g == searched.graph() and g.name == f"file:{path}"
    local = graph(f"file:{path}", weights="metropolis-hastings", lazy=True)
    assert local.n == 10 and "signed" not in local.facts
    with pytest.raises(GraphError, match=naming("10 nodes", "4")):
        graph(f"file:{path}", 4)
    save(searched, path)  # the file exists already


def test_sequences_and_directed_graphs_in_files(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"n": 4, "rounds": [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]}))
    assert np.allclose(from_file(path).matrix(1) @ from_file(path).matrix(0), 0.25)
    path.write_text(json.dumps({"n": 3, "edges": [[0, 1], [1, 2], [2, 0]], "directed": True}))
    assert from_file(path).neighbours(0, 1)[0].tolist() == [0]
    assert from_file(path).facts >= {"row-stochastic"}


@pytest.mark.parametrize("suffix", ["graphml", "gml", "edgelist", "adjlist"])
def test_files_of_networkx(suffix, tmp_path):
    path = tmp_path / f"ring.{suffix}"
    getattr(nx, f"write_{suffix}")(nx.cycle_graph(6), path)
    assert graph(f"file:{path}", 6).degree == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.json", None, ("none.json", "doesn't exist")),
        ("none.gml", None, ("none.gml", "doesn't exist")),
        ("a.json", "{", ("JSON", "line 1 column 2")),
        ("a.json", "[1]", "no JSON object"),
        ("a.json", '{"n": 3}', "'edges'"),
        ("a.json", '{"n": "3", "edges": []}', ('"n"', "'str'")),
        ("a.json", '{"n": 3, "edges": [[0, 3]]}', ("[0, 3]", "0 … 2")),
        ("a.json", '{"n": 3, "edges": [[0, 1], [1, 0]]}', "occurs twice"),
        ("a.json", '{"n": 3, "edges": [[1, 1]]}', "to itself"),
        ("a.json", '{"n": 3, "edges": [["a", 1]]}', ("pairs of integers", "[0, 1]")),
        ("a.json", '{"n": 3, "edges": [[0.5, 1.7], [1, 2]]}', ("pairs of integers", "[0, 1]")),
        ("a.json", '{"n": 3, "edges": [[0, 1, 2, 0]]}', ("pairs of integers", "[0, 1]")),
        ("a.json", '{"n": 3, "edges": [[0, 1], [2]]}', ("pairs of integers", "[0, 1]")),
        ("a.json", '{"n": 3, "edges": [[0, 1e30]]}', ("pairs of integers", "[0, 1]")),
        ("a.json", '{"n": true, "edges": []}', ('"n"', "true or false")),
        ("a.json", '{"n": 3, "edges": [[0, 1]], "weights": ["a"]}', ('"weights"', "['a']")),
        ("a.json", '{"n": 3, "edges": [[0, 1]], "weights": "x"}', ('weights "x"', "unknown")),
        ("a.json", '{"n": 3, "rounds": 5}', '"rounds" is 5'),
        ("a.json", '{"n": 3, "rounds": []}', '"rounds" is []'),
        (
            "a.json",
            f'{{"n": {2**40}, "edges": []}}',
            ("n = 1099511627776", "65536"),
        ),
        ("a.json", "[" * 100_000, ("JSON", "recursion")),
        ("a.h5", "no", ("unknown suffix", ".json, .graphml", "`graph search --out FILE.json`")),
        ("a.gml", "no", ("can't be read", "gml")),
        ("a.txt", "no", ("a.txt", "unknown suffix")),
    ],
)
def test_bad_files_are_named(name, text, message, tmp_path):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(GraphError, match=naming(message)):
        graph(f"file:{path}", 3)


@pytest.mark.parametrize("suffix", ["json", "gml"])
def test_a_pipe_or_an_endless_file_is_not_from_file(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    with pytest.raises(GraphError, match=naming("regular file")):
        from_file(tmp_path / f"pipe.{suffix}")
    with (tmp_path / f"long.{suffix}").open("w") as file:
        file.truncate(1 << 40)
    with pytest.raises(GraphError, match=naming("1099511627776", "67108864")):
        from_file(tmp_path / f"long.{suffix}")


@on_each(("name", "message"), [("ten.txt", ("ten.txt", ".json")), ("no/ten.json", "no/ten.json")])
def test_paths_that_no_graph_is_saved_to(searched, tmp_path, name, message):
    with pytest.raises(GraphError, match=naming(message)):
        save(searched, tmp_path / name)


def test_a_file_has_no_options_but_slack(tmp_path):
    (tmp_path / "a.json").write_text('{"n": 3, "edges": [[0, 1], [1, 2]]}')
    assert graph(f"file:{tmp_path}/a.json", slack=0.5).matrix()[0, 1] > 0
    with pytest.raises(GraphError, match=naming('"degree"', "slack")):
        graph(f"file:{tmp_path}/a.json", degree=3)


def test_circulant_search_respects_its_number_of_edges():
    assert len(search_circulants(12, 4, edges=24).edges) == 24
    assert search_circulants(2, 1).edges == ((0, 1),)


def test_a_search_without_a_connected_graph_is_an_error(monkeypatch):
    monkeypatch.setattr(searching, "_run", lambda *arguments: None)
    with pytest.raises(GraphError, match=naming("connected")):
        search(8, degree=3, evaluations=5)
