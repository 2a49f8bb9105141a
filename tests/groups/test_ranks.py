"""Slots in several processes: the bits of threads, whatever lies between the calls."""

import random
import time

import pytest
import torch

from mpigossip.groups.base import GroupError, Single, held, shards
from mpigossip.groups.threads import Threads

pytestmark = pytest.mark.both


SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (8, 1)]
"""Ranks of a node, slots of each."""


def numbers(slots, rows, size, step):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(rows, size, generator=draw) for _ in range(slots)]


def beside_threads(comm, own, rows, size, steps, delay):
    """A few steps of a group of ranks beside one of threads; how many results differ."""
    from mpigossip.cluster.ranks import World
    from mpigossip.groups.ranks import Ranks

    world = World(comm, timeout_s=30)
    world.arrange(comm.size)
    delays = random.Random(comm.rank)
    group = Ranks(Single() if own == 1 else Threads(own), world.nodes.inside)
    slots, mine = group.slots, group.mine
    reference = Threads(slots)
    grads, full = group.zeros(rows, size), group.zeros(rows, size)
    x = shards(full, group.segments, held(group))
    whole = [torch.zeros(rows, size) for _ in range(slots)]
    wrong = [0] * 5
    for step in range(steps):
        given = numbers(slots, rows, size, step)
        for k, slot in enumerate(mine):
            grads[k].copy_(given[slot])
            time.sleep(delays.random() * delay)
        g, expected = group.reduce_scatter_mean(grads), reference.reduce_scatter_mean(given)
        for k, slot in enumerate(mine):
            wrong[0] += not torch.equal(g[k], expected[slot])
            x[k].add_(g[k])
        for slot in range(slots):
            shards(whole)[slot].add_(expected[slot])
        time.sleep(delays.random() * delay)
        group.all_gather(x, full)
        reference.all_gather(shards(whole), whole)
        wrong[1] += not all(torch.equal(one, whole[0]) for one in full)
        scalars = [t[:, :300].double() for t in numbers(slots, rows, 512, 100 + step)]
        found = group.sum_scalars([scalars[slot] for slot in mine])
        wrong[2] += not torch.equal(found, reference.sum_scalars(scalars))
        parts = group.to_first([x[k] for k in range(len(mine))])
        wrong[3] += (parts is None) != (comm.rank > 0)
        wrong[3] += parts is not None and not torch.equal(torch.cat(parts, dim=1), whole[0])
        # whole means, of any number of columns, and back to all
        for k, slot in enumerate(mine):
            grads[k].copy_(numbers(slots, rows, size, 200 + step)[slot])
        mean = reference.reduce_mean(numbers(slots, rows, size, 200 + step))
        wrong[4] += not torch.equal(group.reduce_mean(grads), mean)
        group.broadcast(grads)
        wrong[4] += not all(torch.equal(one, mean) for one in grads)
    reference.close()
    group.close()
    world.close()
    return wrong


@pytest.mark.parametrize(("ranks_here", "own"), SHAPES)
def test_ranks_have_the_bits_of_threads(ranks, ranks_here, own):
    slots = ranks_here * own
    for rows, width, delay in ((1, 512, 0.0), (1, 70_001, 0.002), (2, 7, 0.002)):
        found = ranks(ranks_here)(beside_threads, own, rows, slots * width, 6, delay)
        assert found == [[0] * 5] * ranks_here, (rows, width)


def mistakes(comm):
    from mpigossip.cluster.deadline import LateError
    from mpigossip.cluster.ranks import World
    from mpigossip.groups.ranks import Ranks

    world = World(comm, timeout_s=0.3)
    world.arrange(comm.size)
    group, said = Ranks(Single(), world.nodes.inside), []
    try:
        group.reduce_scatter_mean([torch.zeros(1, 8)])
    except GroupError as error:
        said.append(str(error))
    if comm.rank == 0:
        try:
            group.sum_scalars([torch.zeros(1, 1, dtype=torch.float64)])
        except LateError as error:
            said.append(str(error))
    comm.Barrier()  # without a limit
    if comm.rank:  # takes in what rank 0 has shown
        group.sum_scalars([torch.zeros(1, 1, dtype=torch.float64)])
    group.close()
    world.close()
    return said


def test_foreign_arrays_and_a_rank_that_stays_away_are_named(ranks):
    first, second = ranks(2)(mistakes)
    assert "only arrays that the group made itself" in first[0] == second[0]
    assert "sums over the node's slots: rank 1 of this node didn't come" in first[1]


def working(comm, signs):
    """Rank 0 has work of 4 limits' length before it meets rank 1."""
    from mpigossip.cluster.deadline import LateError
    from mpigossip.cluster.ranks import World
    from mpigossip.groups.ranks import Ranks

    world = World(comm, timeout_s=30)
    world.arrange(comm.size)
    node = world.nodes.inside
    group, late = Ranks(Single(), node), ""
    node.timeout_s = 0.25  # Barrier waits twice as long
    if comm.rank == 0:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            time.sleep(0.05)
            if signs:
                group.works()
    try:
        group.sum_scalars([torch.ones(1, 1, dtype=torch.float64)])
    except LateError as error:
        late = str(error)
    comm.Barrier()
    node.timeout_s = 30
    group.close()
    world.close()
    return late


def test_a_rank_that_says_it_works_is_waited_for(ranks):
    assert ranks(2)(working, True) == ["", ""]
    assert "rank 0 of this node didn't come" in ranks(2)(working, False)[1]
