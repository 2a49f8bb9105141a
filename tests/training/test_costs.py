"""Costs of a node as the number n of nodes grows: none of them is proportional to n²."""

import tracemalloc

from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange, is_average
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges, memory, subject
from tests.cases import on_each

NODES = [2**k for k in range(2, 13)]
ONE_PEER = ["one-peer-exponential", "one-peer-hypercube"]
SMALL = {"model": {"name": "mlp", "hidden": [8]}, "algorithm": {"name": "dsgd"}}
FEW = 8_000
"""Size, in bytes, of the few objects of a graph that is given by formulas."""
BYTES_PER_NODE = 8 * 6
"""Memory that start-up may use temporarily: some integers per node."""


def counted(name, n, wire="fp32"):
    job = assemble.load({**SMALL, "graph": {"name": name}, "node": {"wire": wire}})
    what, _ = subject(job)
    made = exchanges(what, n)
    return made.bytes_per_step, sum(memory(what, made).values()), what


@on_each("name", ONE_PEER)
def test_a_one_peer_graph_costs_a_node_the_same_at_any_size(name):
    costs = [counted(name, n)[:2] for n in NODES]
    assert len(set(costs)) == 1
    vector = 4 * counted(name, 4)[2].flat.size
    assert costs[0][0] == vector  # one message with one vector per round
    for n in NODES:
        g = graph(name, n)
        rounds = [g.round(t) for t in range(g.period)]
        assert {r.degree for r in rounds} == {1} and g.period == n.bit_length() - 1
        assert all(len(g.receivers(t, n - 1)) == 1 for t in range(g.period))


def test_the_static_exponential_graph_costs_log2_n():
    first_sent, held, what = counted("exponential", 4)
    vector = 4 * what.flat.size
    for n in NODES:
        sent, held_here, _ = counted("exponential", n)
        steps = n.bit_length() - 1
        assert sent == steps * vector
        assert (
            held_here - held == 2 * (steps - 2) * vector
        )  # twice the inbox, minus the inbox of n = 4
        assert len(graph("exponential", n).neighbours(0, 0)[0]) == steps
    assert first_sent == 2 * vector


def test_an_epoch_of_a_theory_problem_has_the_same_steps_for_any_number_of_nodes():
    what, _ = subject(assemble.load({"task": {"name": "quadratics"}, "data": {"steps": 30}}))
    assert [what.steps_per_epoch(n) for n in (1, 8, 64)] == [30] * 3


@on_each("wire", ["bf16", "qsgd"])
def test_a_wire_changes_the_factor_and_not_the_growth(wire):
    assert len({counted("one-peer-exponential", n, wire)[0] for n in NODES}) == 1


def test_asynchronous_nodes_send_to_each_neighbour_of_a_complete_graph():
    nodes = {"node": {"mixer": "asynchronous"}}
    what, _ = subject(assemble.load({**SMALL, "graph": {"name": "complete"}, **nodes}))
    made = exchanges(what, 4)
    assert {kind for kind, _ in made.counted} == {ExchangeKind.GOSSIP}
    assert (
        made.bytes_per_step == 2 * 3 * 4 * what.flat.size
    )  # a copy and a correction for each neighbour


def started(name, n):
    """Make all queries of a rank to its graph before and in the steps of one period."""
    g = graph(name, n)
    assert g.degree and g.facts
    for t in range(g.period):
        step(g, t, n - 1)
    return g


def step(g, t, i):
    g.neighbours(t, i)
    g.receivers(t, i)
    bytes_per_exchange(g, ExchangeKind.GOSSIP, t, i, 1000)
    return is_average(g, t)


@on_each("name", [*sorted({*ONE_PEER} - {"one-peer-hypercube"}), "exponential", "ring"])
def test_neither_start_up_nor_a_step_holds_more_than_integers_of_each_node(name):
    started(name, 4)  # imports and caches
    for n in (256, 4096):
        tracemalloc.start()
        g = started(name, n)
        kept, peak = tracemalloc.get_traced_memory()
        assert kept < FEW and peak < FEW + BYTES_PER_NODE * n, f"{name}, n = {n}: {kept}, {peak}"
        tracemalloc.reset_peak()
        for t in range(3 * g.period):
            step(g, t, 5)
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - kept < 2_000 and peak - kept < 4_000  # for any n


def test_graphs_of_edges_hold_each_edge_once():
    """Without a formula, a graph holds the rows of each round and their transpose: O(edges)."""
    for name in ("base-2", "torus", "one-peer-hypercube"):
        for n in (256, 4096):
            tracemalloc.start()
            g = started(name, n)
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            numbers = sum(r.edge_count + n for r in g.schedule.rounds)
            assert kept < 8 * 8 * numbers + FEW
