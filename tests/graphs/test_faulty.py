"""Lost links and nodes: rounds stay stochastic, losses are as frequent as set, means are kept."""

import numpy as np
import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.graphs import GraphError, graph
from mpigossip.graphs.faulty import Links, OnOff, faulty
from mpigossip.mixing.base import is_average
from mpigossip.training import assemble
from tests.cases import naming, on_each


@on_each(
    ("name", "options"),
    [
        ("ring", {}),
        ("exponential", {}),
        ("one-peer-exponential", {}),
        ("base-3", {}),
        ("erdos-renyi", {}),
        ("one-peer-exponential", {"order": "uniform"}),
        ("d-equistatic", {}),
    ],
)
def test_every_round_stays_doubly_stochastic_and_uses_no_dead_link(name, options):
    whole = graph(name, 12, **options)
    links = Links(12, 3, lost=0.15, away=0.1)
    made = faulty(whole, links)
    fewer = 0
    assert made.doubly_stochastic and made.period is None
    assert ("symmetric" in made.facts) == ("symmetric" in whole.facts)
    for t in range(30):
        w = made.matrix(t)
        before = whole.matrix(t)
        alive = links.alive(t)
        off = w - np.diag(w.diagonal())
        assert np.allclose(w.sum(0), 1) and np.allclose(w.sum(1), 1) and w.min() >= 0
        assert not off[~alive].any() and (off <= before + 1e-12).all()
        fewer += int((off < before - np.diag(before.diagonal()) - 1e-9).any())
    assert fewer > 20  # of 30 rounds


def test_a_lost_link_changes_no_other_weight():
    made = faulty(graph("ring", 10), links := Links(10, 0, lost=0.3))
    for t in range(20):
        w = made.matrix(t)
        alive = links.alive(t)
        expected = graph("ring", 10).matrix(0) * alive
        np.fill_diagonal(expected, 0)
        assert np.allclose(w - np.diag(w.diagonal()), expected)


@on_each("seed", range(4))
def test_rare_losses_are_no_exact_average_even_if_the_first_rounds_are(seed):
    made = faulty(graph("complete", 4), Links(4, seed, lost=0.01))
    assert not made.complete
    assert {is_average(made, t) for t in range(200)} == {True, False}


def test_lost_links_of_a_lazy_graph_are_reweighted_before_it_is_lazy():
    made = faulty(graph("random-matching", 8), Links(8, 0, lost=0.3))
    lazy = made.lazy()
    for t in range(12):
        assert np.allclose(lazy.matrix(t), (np.eye(8) + made.matrix(t)) / 2)


@on_each("weights", ["push", None])
def test_rows_or_columns_that_sum_to_one_still_do(weights):
    whole = graph("star", 6, weights=weights) if weights else graph("ring", 6)
    made = faulty(whole, Links(6, 1, lost=0.4))
    assert {"row-stochastic", "column-stochastic"} & made.facts == (
        {"row-stochastic", "column-stochastic"} & whole.facts
    )


@on_each(("share", "rounds"), [(0.2, 0.0), (0.2, 10.0), (0.5, 4.0)])
def test_chains_are_off_in_the_stated_fraction_and_for_the_stated_rounds(share, rounds):
    chain = OnOff(share, rounds, (7,), 400)
    count = 500
    states = np.array([chain.off(t) for t in range(count)])
    ends = (states[:-1] & ~states[1:]).sum()
    stay = states[:-1].sum() / ends
    assert states.mean() == pytest.approx(share, abs=0.02)
    assert stay == pytest.approx(rounds or 1 / (1 - share), rel=0.1)
    # any round in any order: a resumed run sees the same
    fresh = OnOff(share, rounds, (7,), 400)
    assert (fresh.off(377) == states[377]).all() and (fresh.off(12) == states[12]).all()


@on_each(("share", "rounds"), [(0.5, 0.5), (0.5, 1.2), (0.5, 1.99), (0.2, 1.2), (0.0, 0.5)])
def test_fewer_rounds_than_independent_draws_give_are_rejected(share, rounds):
    limit = f"{1 / (1 - share):g}"
    with pytest.raises(GraphError, match=naming(f"rounds = {rounds:g}", limit)):
        OnOff(share, rounds, (7,), 4)
    for name in ("lost", "away"):
        with pytest.raises(GraphError, match=naming(f"{name}_rounds = {rounds:g}", limit)):
            Links(8, **{name: share, f"{name}_rounds": rounds})
    OnOff(share, 1 / (1 - share), (7,), 4)


def test_poisson_clocks_take_part_as_often_as_they_tick():
    links = Links(200, 0, ticks=0.7)
    here = [links.alive(t).any(1).mean() for t in range(40)]
    assert np.mean(here) == pytest.approx(1 - np.exp(-0.7), abs=0.02)


JOB = {
    "task": {"name": "quadratics", "noise": 0.0},
    "data": {"condition": 1.0, "dimension": 4, "steps": 10},
    "algorithm": {"name": "dsgd"},
    "graph": {"name": "one-peer-hypercube"},
    "schedule": {"lr": 0.1},
}


def trainer(*settings, n=8):
    with SingleProcess() as alone:
        return assemble.assemble(assemble.load(JOB, settings), alone, n).trainer


@on_each("ill", ["lost=0.3", "away=0.2", "ticks=0.5"])
def test_lost_links_and_nodes_do_not_change_the_mean(ill):
    whole = trainer()
    hurt = trainer(f"faults.{ill}")
    for _ in range(12):
        whole.step()
        record = hurt.step()
        means = [one.replicas.x[0].double().mean(0) for one in (whole, hurt)]
        assert (means[0] - means[1]).abs().max() < 1e-6
    assert (whole.replicas.x[0] - hurt.replicas.x[0]).abs().max() > 1e-3
    assert sum(record.bytes_sent) < sum(whole.mixer.bytes_sent)


@on_each(
    ("settings", "message"),
    [
        (
            ["faults.lost=0.5", "faults.lost_rounds=1.5"],
            ("faults.lost_rounds = 1.5", "2", "faults.lost = 0.5"),
        ),
        (
            ["faults.away=0.1", "algorithm.name=parallel", "graph.name=complete"],
            ("faults", '"parallel"'),
        ),
        (
            ["faults.lost=0.1", "algorithm.name=decentlam", "graph.name=ring"],
            ("faults", '"decentlam"', "links"),
        ),
        (["faults.ticks=1", "node.mixer=asynchronous"], ("faults.ticks = 1", "asynchronous")),
        (["faults.slow_times=3"], ("faults.slow_times = 3", 'node.mixer = "asynchronous"')),
    ],
)
def test_settings_that_faults_do_not_support_are_rejected(settings, message):
    with pytest.raises(JobError, match=naming(message)):
        trainer(*settings)
