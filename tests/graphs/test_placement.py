"""Assignment of nodes to ranks that reduces messages between racks."""

import contextlib
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from mpigossip.cluster import deadline, nodes
from mpigossip.config import JobError
from mpigossip.graphs import GraphError, graph
from mpigossip.graphs import placement as placing
from mpigossip.graphs.placement import (
    _best_swap,
    _crossing,
    cross_rack_fraction,
    graph_nodes_for,
    renumber_for_racks,
    renumbered,
    usage,
)
from mpigossip.training import assemble
from tests.cases import naming, on_each


@on_each("name", ["one-peer-exponential", "ring", "exponential", "base-2", "grid"])
def test_renumbering_reduces_messages_between_racks(name):
    racks = [f"rack{k}" for k in "01101001"]
    made = graph(name, 8)
    placed = renumber_for_racks(made, racks)
    assert cross_rack_fraction(placed, racks) < cross_rack_fraction(made, racks)
    assert placed.facts == made.facts and placed.degree == made.degree
    # The graph is the same, but its nodes have other numbers.
    assert sorted(usage(placed).sum(1)) == sorted(usage(made).sum(1))
    t = (made.period or 1) - 1
    values = np.sort_complex(np.linalg.eigvals(placed.matrix(t)))
    assert np.allclose(values, np.sort_complex(np.linalg.eigvals(made.matrix(t))), atol=1e-7)


def test_swaps_improve_an_assignment_by_rack():
    # In this ring, neighbours have numbers that differ by much.
    jumping = renumbered(graph("ring", 12), [5 * i % 12 for i in range(12)])
    racks = ["a"] * 6 + ["b"] * 6
    assert cross_rack_fraction(jumping, racks) > 0.5
    assert cross_rack_fraction(renumber_for_racks(jumping, racks), racks) == pytest.approx(4 / 24)


@pytest.mark.parametrize("pairs_at_once", [1 << 20, 40])
def test_the_best_swap_is_found_in_blocks(monkeypatch, pairs_at_once):
    monkeypatch.setattr(placing, "BLOCK", pairs_at_once)
    counts = usage(graph("exponential", 18))
    both = (counts + counts.T).tocsr()
    rack_of = np.random.default_rng(3).permutation(np.arange(18) // 4)
    saved = np.zeros((18, 18))
    for p, q in np.ndindex(18, 18):
        swapped = rack_of.copy()
        swapped[[p, q]] = rack_of[[q, p]]
        # Each message is in two entries of the symmetric array.
        saved[p, q] = (_crossing(both, rack_of) - _crossing(both, swapped)) / 2
    p, q = np.unravel_index(saved.argmax(), saved.shape)
    assert saved.max() > 0
    assert _best_swap(both, rack_of) == (saved.max(), p, q)


def test_places_need_less_memory_than_one_number_for_each_pair(monkeypatch):
    monkeypatch.setattr(placing, "WORK", 1)  # one swap from each start
    n = 4096
    made = graph("ring", n)
    racks = np.random.default_rng(1).permutation(np.arange(n) // 64).tolist()
    tracemalloc.start()
    try:
        graph_nodes_for(made, racks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * n**2 / 2, peak


def test_a_graph_that_renumbering_cannot_improve_is_unchanged():
    drawn = graph("random-matching", 8)
    assert renumber_for_racks(drawn, [i % 2 for i in range(8)]) is drawn
    one = graph("ring", 6)
    assert renumber_for_racks(one, ["same"] * 6) == one
    with pytest.raises(GraphError, match=naming("2 racks", "6 nodes")):
        renumber_for_racks(one, ["a", "b"])


def test_racks_from_host_names_scheduler_and_file(tmp_path):
    hosts = ["r12n03.site.org", "r2n1", "login"]
    assert nodes.racks("hostnames", hosts) == ["r12n", "r2n", "login"]
    assert sorted(["n10", "n2", "n1"], key=nodes.natural) == ["n1", "n2", "n10"]
    switches = ["s0.s1.n1", "s0.s2.n7", "n9"]
    assert nodes.racks("scheduler", hosts, switches) == ["s0.s1", "s0.s2", "n9"]
    path = tmp_path / "racks"
    path.write_text("r12n03 a\nr2n1 b\n\nlogin a\n")
    assert nodes.racks(f"file:{path}", hosts) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, ("graph.placement", "No such file")),
        ("n1 a b\n", ('"n1 a b"', "HOST RACK")),
        ("n1 a\n", ("host n2", "1 missing", "n2 RACK")),
    ],
)
def test_bad_rack_files_are_named(tmp_path, text, message):
    path = tmp_path / "racks"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError, match=naming(message)):
        nodes.racks(f"file:{path}", ["n1", "n2"])


def test_a_scheduler_without_a_topology_is_named():
    with pytest.raises(JobError, match=naming("SLURM_TOPOLOGY_ADDR", "rank 1")):
        nodes.racks("scheduler", ["n1", "n2"], ["s0.n1", ""])


def test_a_job_places_its_ranks(tmp_path, monkeypatch):
    hosts = tuple(f"r{rack}n{i}" for i, rack in enumerate("01101001"))
    switches = [f"s{rack}.n{i}" for i, rack in enumerate("01101001")]
    path = tmp_path / "racks"
    path.write_text("".join(f"{host} {host[:2]}\n" for host in hosts))
    world = SimpleNamespace(
        comm=object(),
        hosts=hosts,
        size=8,
        rank=0,
        raise_together=lambda *_: contextlib.nullcontext(),
        gather=lambda value: switches,
        broadcast=lambda value: value,
    )
    world.nodes = SimpleNamespace(inter_node=world)
    racks = [host[:2] for host in hosts]
    made = graph("one-peer-exponential", 8)
    depths = []

    def counted(*given):
        depths.append(deadline.this_rank.pause_depth)
        return graph_nodes_for(*given)

    monkeypatch.setattr(assemble, "graph_nodes_for", counted)
    for placement in ("hostnames", "scheduler", f"file:{path}"):
        job = assemble.load({"graph": {"placement": placement}})
        assert cross_rack_fraction(
            assemble.place_on_racks(job, made, world), racks
        ) < cross_rack_fraction(made, racks)
    assert assemble.place_on_racks(assemble.load({}), made, world) is made
    # Other ranks receive the assignment from rank 0, and do not allocate its memory.
    expected = assemble.place_on_racks(job, made, world)
    assert set(depths) == {1}  # the others wait without a limit meanwhile
    world.rank = 3
    world.broadcast = lambda value: graph_nodes_for(made, racks)
    monkeypatch.setattr(assemble, "graph_nodes_for", None)
    assert assemble.place_on_racks(job, made, world) == expected
    with pytest.raises(JobError, match=naming('graph.placement = "near"', '"file:PATH"')):
        assemble.load({"graph": {"placement": "near"}})
