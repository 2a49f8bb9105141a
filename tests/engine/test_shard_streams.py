"""Map between the shards of FSDP2 and the consecutive ranges of the ranks' files."""

from math import prod

import numpy as np
import pytest
import torch

from mpigossip.engine.shard_streams import ShardStreams

SHAPES = [(7, 3), (5,), (4, 6, 2), (1, 3), (2, 9)]
DIMS = [0, 0, 1, 0, 1]


class Ranks:
    """World of several ranks, of which this process is one; nothing is sent."""

    def __init__(self, size):
        self.size = size

    def duplicate(self):
        return None


def shards_of(rank, size):
    """Return the shards of all parameters, whose elements are their indices in the flat array."""
    shards = []
    begin = 0
    for shape, dim in zip(SHAPES, DIMS, strict=True):
        full = torch.arange(begin, begin + prod(shape)).view(shape)
        pieces = torch.chunk(full, size, dim)
        empty = full.narrow(dim, 0, 0)
        shards.append((pieces[rank] if rank < len(pieces) else empty).contiguous().view(-1))
        begin += prod(shape)
    return shards


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_runs_of_all_ranks_are_the_elements_of_each_window(size):
    streams = [ShardStreams(Ranks(size), SHAPES, DIMS, rank) for rank in range(size)]
    total = sum(map(prod, SHAPES))
    assert streams[0].range_of(0)[0] == 0 and streams[0].range_of(size - 1)[1] == total
    seen = []
    for window in streams[0].windows(5):
        for begin, end in window:
            assert end - begin <= 5
            elements = []
            for rank in range(size):
                shards = shards_of(rank, size)
                for run in streams[0].runs(rank, begin, end):
                    values = shards[run.parameter][run.local : run.local + run.length]
                    assert values.tolist() == [*range(run.first, run.first + run.length)]
                    elements += values.tolist()
            assert sorted(elements) == [*range(begin, end)]
            seen += elements
    assert sorted(seen) == [*range(total)]


def test_gather_and_scatter_of_one_rank():
    streams = ShardStreams(Ranks(1), SHAPES, DIMS, 0)
    shards = [shard.float() for shard in shards_of(0, 1)]
    total = sum(map(prod, SHAPES))
    flat = np.concatenate(
        [*streams.gather(lambda k: None if k == 1 else shards[k], np.dtype("f4"))]
    )
    expected = np.arange(total, dtype="f4")
    expected[21:26] = 0  # the parameter without a shard
    assert np.array_equal(flat, expected)
    targets = [torch.zeros_like(shard) for shard in shards]

    def write(run, values):
        targets[run.parameter][run.local : run.local + run.length] = values

    read = np.arange(total, dtype="f4")
    streams.scatter(lambda begin, end: read[begin:end], write, np.dtype("f4"), 11)
    assert all(torch.equal(*pair) for pair in zip(targets, shards, strict=True))
