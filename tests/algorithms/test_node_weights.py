"""Weights of nodes in averages: matrices, models in numpy, ranks, resume, and errors."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.config import JobError
from mpigossip.graphs import GraphError, from_matrices, graph, spectral, theory
from mpigossip.graphs.placement import renumbered
from mpigossip.mixing import base
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange, is_average
from mpigossip.training import assemble
from mpigossip.training.parts import make_graph
from tests import battery
from tests.battery import Double, Driver
from tests.cases import naming, on_each, with_world
from tests.jobs import train

PERIODS = (4, 1, 3, 2, 6, 5, 2, 8)
STEPS = 40
EXACT = "algorithm.name=cpsgd local.name=sgd"
RING = "algorithm.name=dsgd local.name=sgd cadence.name=every graph.name=ring"
ONE_PEER = "algorithm.name=dsgd local.name=sgd cadence.name=every"

pytestmark = pytest.mark.usefixtures("one_thread")


def by_steps(n):
    """Return settings that weigh n nodes by their numbers of local steps."""
    listed = ",".join(map(str, PERIODS[:n]))
    return f" cadence.period=[{listed}] algorithm.node_weights=steps"


def normalized(weights):
    return np.array(weights) / sum(weights)


# -- mixing matrices --------------------------------------------------------------------------

GRAPHS = ("one-peer-exponential", "exponential", "ring", "base-3", "random-matching", "complete")


def weigh(matrix, w):
    """Return W'_ij = W_ij w_j / Σ_k W_ik w_k."""
    return matrix * w / (matrix @ w)[:, None]


@on_each("name", GRAPHS)
@on_each("n", [2, 3, 5, 8])
def test_rounds_weight_the_terms_of_averages(name, n):
    w = normalized(PERIODS[:n])
    weighted = graph(name, n).weighted(PERIODS[:n])
    for t in range(6):
        matrix = weighted.matrix(t)
        before = graph(name, n).matrix(t)
        assert np.abs(matrix - weigh(before, w)).max() < 1e-15
        assert np.abs(matrix.sum(1) - 1).max() < 1e-14 and matrix.min() >= 0
        if np.ptp(before) < 1e-12:  # 11ᵀ/n
            assert (matrix == weighted.average_weights).all()
        if ((before == before.T) & ((before == 0.5) | (before == 0))).all():  # all are paired
            assert np.abs(w @ matrix - w).max() < 1e-15
    assert weighted.average_weights == tuple(weighted.node_weights)
    assert np.abs(np.array(weighted.node_weights) - w).max() < 1e-16


@on_each(
    ("name", "preserves"),
    [
        ("complete", True),
        ("random-matching", True),
        ("one-peer-hypercube", True),
        ("one-peer-exponential", False),
        ("ring", False),
    ],
)
def test_repeated_rounds_lead_to_a_mean_in_which_larger_weights_count_more(name, preserves):
    w = normalized(PERIODS)
    weighted = graph(name, 8).weighted(PERIODS)
    product = np.eye(8)
    for t in range(600):
        product = weighted.round(t).apply(product)
    limit = product[0]
    assert np.abs(product - limit).max() < 1e-10
    assert (np.abs(limit - w).max() < 1e-10) == preserves
    assert np.corrcoef(limit, w)[0, 1] > 0.7


def test_weights_are_applied_before_the_slack_of_drawn_rounds():
    """The order of the calls counts, as for rounds that are not drawn."""
    for name in ("random-matching", "ring"):
        plain = graph(name, 4)
        w = normalized([1, 2, 3, 4])
        later = plain.weighted([1, 2, 3, 4]).slack(0.5)
        earlier = plain.slack(0.5).weighted([1, 2, 3, 4])
        for t in (0, 9):
            matrix = plain.matrix(t)
            assert np.abs(later.matrix(t) - (weigh(matrix, w) + np.eye(4)) / 2).max() < 1e-15
            expected = weigh((matrix + np.eye(4)) / 2, w)
            assert np.abs(earlier.matrix(t) - expected).max() < 1e-15
        assert plain.weighted([1, 2, 3, 4]) == plain.weighted([1, 2, 3, 4])


def test_an_exact_round_stays_exact_and_sends_as_much():
    weighted = graph("complete", 5).weighted(PERIODS[:5])
    assert weighted.complete and is_average(weighted, 0)
    plain = graph("complete", 5)
    for kind in (ExchangeKind.GOSSIP, ExchangeKind.GLOBAL):
        assert bytes_per_exchange(weighted, kind, 0, 1, 1000) == 1600
        assert bytes_per_exchange(plain, kind, 0, 1, 1000) == 1600
    assert not is_average(graph("exponential", 5).weighted(PERIODS[:5]), 0)


def test_equal_weights_change_nothing_and_others_make_another_graph():
    plain = graph("ring", 4)
    assert plain.weighted([3, 3, 3, 3]) is plain
    weighted = plain.weighted([1, 2, 3, 4])
    assert weighted == plain.weighted([2, 4, 6, 8]) != plain
    assert weighted.fingerprint != plain.fingerprint
    assert weighted.slowed(2).node_weights == weighted.slack(0.5).node_weights
    half = weighted.slack(0.5).matrix() - (0.5 * weighted.matrix() + 0.5 * np.eye(4))
    assert np.abs(half).max() < 1e-16
    assert "nodes weighted by 0.1 to 0.4" in weighted.summary()


@on_each(
    ("make", "words"),
    [
        (lambda: graph("ring", 4).weighted([1, 2, 3]), ("3 weights", "4 nodes")),
        (lambda: graph("ring", 3).weighted([1, 0, 3]), ("greater than 0", "[1.0, 0.0, 3.0]")),
        (lambda: graph("ring", 2).weighted([1e-300, 1e300]), ("1e-15", "1e+15", "1e+300")),
        (lambda: graph("ring", 2).weighted([1, 1e-16]), ("1e-15", "factor")),
        (lambda: graph("ring", 2).weighted("13"), ("'13'", "list of 2 numbers")),
        (lambda: graph("ring", 2).weighted(["1", "3"]), ("list of 2 numbers",)),
        (lambda: graph("ring", 2).weighted(3), ("list of 2 numbers",)),
        (lambda: graph("ring", 2).weighted({1: 2, 3: 4}), ("list of 2 numbers",)),
        (lambda: graph("ring", 2).weighted(torch.ones(2, 2)), ("list of 2 numbers",)),
        (lambda: graph("ring", 2).weighted(np.array([[1, 3]])), ("list of 2 numbers",)),
        (lambda: graph("ring", 3).weighted([1, np.nan, 3]), ("finite", "nan")),
        (lambda: graph("ring", 3).weighted([1, 2, 3]).weighted([1, 2, 3]), ("already",)),
        (lambda: from_matrices([[[0.5, 0.5], [0.5, 0.4]]]).weighted([1, 2]), ("sum to one",)),
        (lambda: from_matrices([[[1.5, -0.5], [0, 1]]]).weighted([1, 2]), ("negative",)),
        (lambda: renumbered(graph("path", 3).weighted([1, 2, 3]), [1, 0, 2]), ("first",)),
        (
            lambda: graph(graph("ring", 4).weighted([1, 2, 3, 4]), weights="uniform-neighbours"),
            ("weights",),
        ),
    ],
)
def test_wrong_weights_are_rejected(make, words):
    with pytest.raises(GraphError, match=naming(words)):
        make()


def test_weights_may_be_arrays_and_very_different():
    expected = graph("ring", 2).weighted([1, 3])
    assert graph("ring", 2).weighted(np.array([1.0, 3.0])) == expected
    assert graph("ring", 2).weighted(torch.tensor([1, 3])) == expected
    matrix = graph("ring", 4).weighted([1, 1e12, 1, 3]).matrix()
    assert np.abs(matrix.sum(1) - 1).max() < 1e-15 and matrix.min() >= 0
    assert matrix[1, 0] == pytest.approx(1e-12) and matrix[3, 0] == pytest.approx(1 / 5)


@on_each("name", GRAPHS)
def test_the_speed_of_averaging_is_the_decay_of_disagreement(name):
    """The mean may change: the distance of its weights from 1/n, which remains, does not count."""
    weights = [100, 1, 2, 1, 3, 1, 1, 1]
    w = normalized(weights)
    weighted = graph(name, 8).weighted(weights)
    product = np.eye(8)
    distances = [1.0]
    for t in range(30):
        product = weighted.round(t).apply(product)
        remaining = product - w @ product
        distances.append(np.linalg.norm(np.sqrt(w)[:, None] * remaining / np.sqrt(w), 2))
    assert distances[-1] < 0.5 * distances[0]
    assert np.abs(spectral.residues(weighted, 30) - distances).max() < 1e-12
    assert spectral.residue(weighted, 30) == pytest.approx(distances[-1], abs=1e-12)
    rate = spectral.consensus_rate(weighted)
    assert rate < 1
    assert spectral.rounds_to_exact(weighted) == (1 if name == "complete" else None)
    assert (rate == 0) == (name == "complete")
    assert (theory.averaging_gap(weighted) == 1) == (name == "complete")
    if weighted.period:
        values = np.linalg.eigvals(_product(weighted))
        assert rate**weighted.period == pytest.approx(np.sort(np.abs(values))[-2], abs=1e-8)


def _product(weighted):
    product = np.eye(weighted.n)
    for t in range(weighted.period):
        product = weighted.round(t).apply(product)
    return product


@on_each("name", ["ring", "one-peer-exponential"])
def test_iterative_methods_measure_disagreement(name, monkeypatch):
    weighted = graph(name, 9).weighted([30, 1, 2, 1, 3, 1, 1, 1, 4])
    expected = [spectral.residue(weighted, 5), spectral.consensus_rate(weighted)]
    monkeypatch.setattr(spectral, "DENSE", 2)
    iterative = [spectral.residue(weighted, 5), spectral.consensus_rate(weighted)]
    assert iterative == pytest.approx(expected, rel=1e-6)


def test_pairs_that_average_exactly_have_no_disagreement_left():
    pair = graph("random-matching", 2).weighted([1, 50])
    assert spectral.consensus_rate(pair) == 0
    assert spectral.mean_square_contraction(pair) < 1e-20


def test_only_rounds_with_all_links_are_compared_with_the_exact_average(monkeypatch):
    """The comparison takes n² operations, which a star with n links must not repeat per node."""
    star = graph("star", 5).weighted(PERIODS[:5])
    assert star.degree == 4 and not star.complete
    monkeypatch.setattr(base, "exact_average", lambda weights: pytest.fail("compared"))
    assert not is_average(star, 0)


# -- models -----------------------------------------------------------------------------------


@on_each("n", [2, 3, 5, 8])
@on_each("settings", [EXACT, RING, ONE_PEER])
def test_models_equal_the_formula(settings, n):
    """After H_i local steps of node i: x_i ← Σ_j w_j x_j, or Σ_j W_ij w_j x_j / Σ_j W_ij w_j."""
    driver = Double(settings + by_steps(n), n)
    w = normalized(PERIODS[:n])
    longest = max(PERIODS[:n])
    x = driver.whole().numpy()
    b = torch.cat(driver.b, dim=1).numpy()
    left = 0.9 ** np.array(PERIODS[:n])[:, None]
    plain = mpigossip.graph("ring" if "ring" in settings else "one-peer-exponential", n)
    for t in range(STEPS // longest):
        x = b + left * (x - b)
        mixing = np.tile(w, (n, 1)) if settings is EXACT else weigh(plain.matrix(t), w)
        x = mixing @ x
    result = driver.run(STEPS // longest * longest).whole().numpy()
    assert np.abs(result - x).max() <= 1e-12 * np.abs(x).max()


def test_the_objective_weights_nodes_by_the_square_of_their_steps():
    """The fixed point of exact averages, for small rates, minimizes Σ H_i² f_i."""
    driver = Double(EXACT + by_steps(5), 5, lr=1e-3)
    for x in driver.x:
        x.zero_()
    squares = np.array(PERIODS[:5], float) ** 2
    expected = squares @ torch.cat(driver.b, dim=1).numpy() / squares.sum()
    result = driver.run(6 * 2000).whole().numpy()[0]
    assert np.abs(result - expected).max() < 0.01


def test_gradients_are_weighted():
    settings = "algorithm.name=parallel local.name=sgd algorithm.node_weights=[1,2,3]"
    driver = Double(settings, 3)
    w = normalized([1, 2, 3])
    x = driver.whole().numpy()[0]
    target = w @ torch.cat(driver.b, dim=1).numpy()
    result = driver.run(300).whole().numpy()
    assert np.abs(result - target).max() < 1e-9 < np.abs(x - target).max()


CASES = (
    "algorithm.name=cpsgd cadence.period=[4,1,3] algorithm.node_weights=steps",
    "algorithm.name=slowmo cadence.name=cpsgd cadence.period=[1,1,2] "
    "algorithm.node_weights=steps node.wire=bf16",
    "algorithm.name=diloco cadence.period=[4,1,3] cadence.fragments=2 cadence.delay=1 "
    "algorithm.node_weights=steps",
    "algorithm.name=gasloc cadence.period=[4,1,3] algorithm.node_weights=steps",
    "algorithm.name=dmsgd algorithm.node_weights=[1,2.5,0.5] cadence.name=gossip-pga "
    "cadence.period=3",
    "algorithm.name=dsgd algorithm.node_weights=[1,2.5,0.5] graph.name=complete node.wire=qsgd",
    "algorithm.name=dsgd algorithm.node_weights=[3,1,2] graph.name=random-matching "
    "local.name=adamw algorithm.average_state={second=3}",
    "algorithm.name=sparseloco cadence.period=3 node.density=0.5 algorithm.node_weights=[3,1,2]",
    "algorithm.name=parallel algorithm.node_weights=[3,1,2] node.wire=fp4",
)


@on_each("settings", CASES)
def test_resume_in_the_middle(settings):
    battery.check_resume(lambda: Driver(settings, 3, noise=0.1), STEPS, (1, 2, 7, 20, 33))


@with_world
def all_cases(world, same_host):
    return [driver.whole().numpy() for driver in battery.on_ranks(CASES, world, same_host, STEPS)]


@pytest.mark.both
@on_each("same_host", ["put", "read"])
def test_ranks_equal_the_simulator_to_the_last_bit(ranks, same_host):
    got = ranks(3)(all_cases, same_host)
    for index, settings in enumerate(CASES):
        expected = Driver(settings, 3, noise=0.1).run(STEPS).whole().numpy()
        assert (np.concatenate([rank[index] for rank in got]) == expected).all(), settings


@on_each("settings", ["cadence.period=4", "cadence.period=[4,4,4]"])
def test_weights_are_off_unless_they_differ(settings):
    plain = Driver(f"algorithm.name=gasloc {settings}", 3, noise=0.1).run(12)
    equal = " algorithm.node_weights=[2,2,2]"
    weighted = Driver(f"algorithm.name=gasloc {settings}{equal}", 3, noise=0.1).run(12)
    assert torch.equal(plain.whole(), weighted.whole())


JOB = {
    "run": {"steps": 8, "evaluate_every": 0},
    "data": {"source": "digits", "batch": 4, "workers": 0},
    "algorithm": {"name": "gasloc", "node_weights": "steps"},
    "cadence": {"period": [4, 1, 3]},
    "model": {"name": "lenet"},
}


def test_a_run_says_and_uses_the_weights(tmp_path, capsys):
    weighted = train(assemble.load(JOB, [f"run.output={tmp_path}/weighted"]), 3)
    assert "nodes weighted 0.5 : 0.125 : 0.375" in capsys.readouterr().out
    plain = ["algorithm.node_weights=equal", f"run.output={tmp_path}/plain"]
    assert weighted["digest"] != train(assemble.load(JOB, plain), 3)["digest"]


def test_weights_belong_to_nodes_wherever_they_are_placed(monkeypatch):
    """Ranks of one rack get neighbouring graph nodes, and keep their weights."""
    job = assemble.load(JOB, ["graph.name=path", "graph.placement=hostnames"])
    monkeypatch.setattr(assemble, "graph_nodes_for", lambda graph, racks, order: [1, 0, 2])
    world = SimpleNamespace(
        comm=True,
        rank=0,
        nodes=SimpleNamespace(inter_node=SimpleNamespace(hosts=["a1", "a2", "b1"])),
        raise_together=lambda error: nullcontext(),
        broadcast=lambda value: value,
    )
    placed = assemble.place_on_racks(job, make_graph(job, 3), world)
    assert placed.node_weights == make_graph(job, 3).node_weights == (0.5, 0.125, 0.375)
    assert set(map(int, placed.receivers(0, 0))) == {1, 2}


# -- custom loops and errors ------------------------------------------------------------------


@with_world
def loops(world, passed_as_graph):
    """Return the parameters of a rank after each of two steps."""
    torch.manual_seed(world.rank)
    model = nn.Linear(3, 2)
    options = {"node_weights": [1, 3]}
    if passed_as_graph:
        options = {"graph": mpigossip.graph("one-peer-exponential", 2).weighted([1, 3])}
    gossip = mpigossip.Gossip(
        world,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        "dsgd",
        cadence="gossip-pga",
        period=2,
        **options,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(world.rank)
    values = []
    for _ in range(2):
        gossip.zero_grad()
        (0 * model(torch.ones(1, 3)).sum()).backward()
        gossip.step()
        values.append(float(model.weight[0, 0]))
    gossip.close()
    return values


@on_each("passed_as_graph", [False, True])
def test_a_custom_loop_weighs_nodes(ranks, passed_as_graph):
    assert ranks(2)(loops, passed_as_graph) == [[0.75, 0.75]] * 2


def _loop(world, **options):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpigossip.Gossip(world, model, optimizer, "dsgd", **options)


@with_world
def rejected(world):
    """Return the messages about weights that a custom loop can't use."""
    pair = mpigossip.graph("ring", 2).weighted([1, 3])
    messages = []
    for options in (
        {"graph": pair, "node_weights": [3, 1]},
        {"graph": pair, "mixer": "asynchronous"},
        {"graph": pair, "cadence": "never"},
        {"node_weights": [1, 2, 3]},
        {"node_weights": np.array([1.0, 3.0])},
        {"node_weights": "steps"},
        {"node_weights": [1, 2 + world.rank]},
        {"graph": mpigossip.graph("ring", 2).weighted([1, 2 + world.rank])},
    ):
        with pytest.raises(JobError) as caught:
            _loop(world, **options)
        messages.append(str(caught.value))
    return messages


def test_a_custom_loop_rejects_weights_that_it_cannot_use(ranks):
    expected = [
        ("node_weights = [3.0, 1.0]", "weights already", "remove node_weights"),
        ("a graph with weights of nodes", "asynchronous"),
        ("a graph with weights of nodes", "exchange nothing"),
        ("3 numbers for 2 nodes",),
        ("algorithm.node_weights", "ndarray", "lists"),
        ("cadence.period", "equally many"),
        ("node_weights",),
        ("graph",),
    ]
    for messages in ranks(2)(rejected):
        for words, message in zip(expected, messages, strict=True):
            assert all(word in message for word in words), message


@on_each(
    ("settings", "words"),
    [
        ("algorithm.node_weights=[1,2]", ("[1.0, 2.0]", "2 numbers for 3 nodes")),
        ("cadence.period=4", ("cadence.period", "equally many")),
        ("cadence.period=auto", ("cadence.period", "equally many")),
        ("run.survive=true algorithm.node_weights=[1,2,3]", ("one node fewer", "3 numbers")),
        (
            "algorithm.name=dsgt cadence.name=every cadence.period=3 "
            "algorithm.node_weights=[1,2,3]",
            ("dsgt", "dsgd"),
        ),
        ("algorithm.name=diloco algorithm.eager=true cadence.delay=1", ("diloco", "plain mean")),
        ("node.mixer=asynchronous", ("asynchronous", "synchronous")),
        ("faults.lost=0.1", ("[faults]",)),
        ("graph.name=star graph.weights=push", ("sum to one",)),
        ("run.survive=true", ("one node fewer",)),
    ],
)
def test_settings_without_weights_are_rejected(settings, words):
    problems = assemble.mistakes(assemble.load(JOB, settings.split()), 3)
    assert any(all(word in text for word in words) for text in problems), problems


def test_weights_without_an_exchange_are_rejected():
    alone = {**JOB, "algorithm": {"name": "dsgd", "node_weights": [1, 2, 3]}}
    job = assemble.load({**alone, "cadence": {"name": "never"}})
    problems = assemble.mistakes(job, 3)
    assert len(problems) == 1 and "exchange nothing" in problems[0]


@on_each(
    ("setting", "words"),
    [
        ("algorithm.node_weights=[]", ("algorithm.node_weights", "each node")),
        ("algorithm.node_weights=[1,0]", ("[1, 0]", "a list", "1e-15")),
        ("algorithm.node_weights=[1,1e16]", ("up to 1e15",)),
        ("algorithm.node_weights=[1,nan]", ("algorithm.node_weights", "nan", "finite")),
        ("algorithm.node_weights=tokens", ("algorithm.node_weights", "steps")),
    ],
)
def test_wrong_settings_are_rejected(setting, words):
    with pytest.raises(JobError, match=naming(words)):
        assemble.load({}, [setting])
