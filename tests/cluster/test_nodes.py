"""Ranks as nodes: numbers, inter-node ranks, and one error if they don't fit."""

import pytest

from mpigossip.cluster.nodes import assign_nodes
from mpigossip.config import JobError
from tests.cases import on_each, with_world

pytestmark = pytest.mark.both


TWO = [0, 0, 0, 0, 4, 4, 4, 4]
NAMES = ["a"] * 4 + ["b"] * 4


@on_each(
    ("host", "per", "expected"),
    [
        (TWO, "host", [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]),
        (TWO, 2, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]),
        (TWO, 4, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]),
        # ranks assigned to the hosts in turn, as `srun --distribution=cyclic` does
        ([0, 1, 0, 1], "host", [(0, 0), (1, 0), (0, 1), (1, 1)]),
        (
            [0, 1, 0, 1, 0, 1, 0, 1],
            2,
            [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)],
        ),
        ([0, 1, 2], "host", [(0, 0), (1, 0), (2, 0)]),
    ],
)
def test_every_k_ranks_of_a_host_are_a_node_numbered_by_its_first_rank(host, per, expected):
    assert assign_nodes(host, ["x"] * len(host), per) == expected


@on_each(
    ("host", "per", "words"),
    [
        (TWO[:-1], "host", ["a has 4 ranks and b has 3", "--ntasks-per-node=3"]),
        (TWO[:-1], 2, ["= 2: b has 3 ranks", "2 or 4"]),
        (TWO, 3, ["= 3: a has 4 ranks", "3 or 6"]),
        ([0], 2, ["= 2: a has 1 rank", "divisor of 1"]),
        (TWO + [8], 4, ["= 4: c has 1 rank"]),
    ],
)
def test_ranks_that_form_no_nodes_are_rejected_in_one_paragraph(host, per, words):
    with pytest.raises(JobError) as refused:
        assign_nodes(host, (NAMES + ["c"])[: len(host)], per)
    (text,) = refused.value.messages
    assert "\n" not in text
    for word in ["node.ranks_per_node", *words]:
        assert word in text


@with_world
def columns(world, per):
    world.group_into_nodes(per)
    nodes = world.nodes
    results = {
        "of": nodes.node_of_rank,
        "place": nodes.local_rank,
        "node": nodes.inter_node.rank,
        "column": nodes.inter_node.gather(world.rank),
        "count": nodes.count,
        "inside": nodes.intra_node.gather(world.rank) if nodes.intra_node else None,
        "hosts": len(nodes.inter_node.hosts),
        "whole": nodes.inter_node is world,
        "beside": nodes.inter_node.node_position,
        "says": [],
    }
    for alone in (lambda: nodes.inter_node.group_into_nodes(2), nodes.inter_node.shrink):
        if nodes.inter_node is not world:
            with pytest.raises(RuntimeError) as refused:
                alone()
            results["says"].append(str(refused.value))
    return results


@on_each("per", [1, 2, 3, "host"])
def test_inter_node_worlds_have_the_ranks_of_equal_local_rank(ranks, per):
    results = ranks(6)(columns, per)
    each = 6 if per == "host" else per
    for rank, one in enumerate(results):
        node, place = divmod(rank, each)
        assert (one["node"], one["place"], one["count"]) == (node, place, 6 // each)
        assert one["of"] == tuple(r // each for r in range(6))
        assert one["hosts"] == one["count"]
        assert one["whole"] is (each == 1)
        assert one["beside"] == (place, each)
        assert all("node.ranks_per_node" in text for text in one["says"])
        assert len(one["says"]) == 2 * (each > 1)
        if node == 0:
            assert one["column"] == list(range(place, 6, each))
        if each > 1 and place == 0:
            assert one["inside"] == list(range(rank, rank + each))


@with_world
def refused(world):
    with pytest.raises(JobError) as caught:
        world.group_into_nodes(2)
    return caught.value.messages


def test_all_ranks_report_one_rank_too_many(ranks):
    (first, *others) = ranks(3)(refused)
    assert "nodes of 2" in first[0]
    assert all(one == first for one in others)
