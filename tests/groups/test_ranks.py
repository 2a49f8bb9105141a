"""Slots in several processes: bitwise identical to threads, whatever runs between the calls."""

import random
import re
import time

import pytest
import torch

from mpigossip.groups.base import GroupError, Single
from tests.cases import naming, some, with_world
from tests.groups.comparison import RIGHT, count_differences, host_group

pytestmark = pytest.mark.both


SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (8, 1)]
"""Number of ranks of a node, and number of slots of each rank."""


@with_world(per="host", timeout_s=30)
def on_ranks(world, own, rows, size, delay):
    """Count the differences of a group of ranks that are sometimes late."""
    from mpigossip.groups.ranks import RankGroup

    delays = random.Random(world.rank)
    group = RankGroup(host_group(own), world.nodes.intra_node)
    differences = count_differences(
        group, size, rows, 3, lambda: time.sleep(delays.random() * delay)
    )
    group.close()
    return differences


@pytest.mark.parametrize(("ranks_here", "own"), some(SHAPES, [(2, 1), (3, 2)]))
def test_ranks_have_the_bits_of_threads(ranks, ranks_here, own):
    slots = ranks_here * own
    for rows, width, delay in ((1, 512, 0.0), (1, 70_001, 0.002), (2, 7, 0.002)):
        results = ranks(ranks_here)(on_ranks, own, rows, slots * width, delay)
        assert results == [RIGHT] * ranks_here, (rows, width)


@with_world(per="host", timeout_s=30)
def mistakes(world):
    from mpigossip.cluster.deadline import WaitTimeoutError
    from mpigossip.groups.ranks import RankGroup

    node = world.nodes.intra_node
    said = []
    group = RankGroup(Single(), node)
    try:
        group.reduce_scatter_mean([torch.zeros(1, 8)])
    except GroupError as error:
        said.append(str(error))
    if world.rank == 0:
        node.timeout_s = 0.3
        try:
            group.sum_scalars([torch.zeros(1, 1, dtype=torch.float64)])
        except WaitTimeoutError as error:
            said.append(str(error))
        node.timeout_s = 30
    world.comm.Barrier()  # without a limit
    if world.rank:  # reads the sign of rank 0
        group.sum_scalars([torch.zeros(1, 1, dtype=torch.float64)])
    group.close()
    return said


def test_foreign_arrays_and_a_missing_rank_are_named(ranks):
    first, second = ranks(2)(mistakes)
    assert "zeros() of this group" in first[0] == second[0]
    assert re.search(naming("sums", "rank 1"), first[1])


@with_world(per="host", timeout_s=30)
def working(world, signs):
    """Let rank 0 work for more than two time limits before it waits for rank 1."""
    from mpigossip.cluster.deadline import WaitTimeoutError
    from mpigossip.groups.ranks import RankGroup

    node = world.nodes.intra_node
    group = RankGroup(Single(), node)
    late = ""
    node.timeout_s, work_s = (1.0, 5.0) if signs else (0.4, 2.4)  # Barrier waits twice as long
    if world.rank == 0:
        until = time.monotonic() + work_s
        while time.monotonic() < until:
            time.sleep(0.05)
            if signs:
                group.works()
    try:
        group.sum_scalars([torch.ones(1, 1, dtype=torch.float64)])
    except WaitTimeoutError as error:
        late = str(error)
    world.comm.Barrier()
    node.timeout_s = 30
    group.close()
    return late


def test_a_rank_that_reports_work_is_awaited(ranks):
    assert ranks(2)(working, True) == ["", ""]
    assert "rank 0 of this node" in ranks(2)(working, False)[1]
