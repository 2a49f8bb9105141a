"""Map between the shards of FSDP2 and the consecutive ranges of the ranks' files."""

import threading
from concurrent.futures import ThreadPoolExecutor
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


class ThreadComm:
    """Communicator of ranks that are threads."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def Ialltoallv(self, send, receive):  # noqa: N802 - as in mpi4py
        data, counts = send
        target, expected = receive
        self.slots[self.rank] = np.split(data, np.cumsum(counts)[:-1])
        self.barrier.wait(20)
        parts = [parts[self.rank] for parts in self.slots]
        assert [len(part) for part in parts] == expected
        target[:] = np.concatenate(parts)
        self.barrier.wait(20)
        return self

    def Test(self):  # noqa: N802
        return True


@pytest.mark.parametrize("broken", [None, 0, 1, 2])
def test_no_rank_writes_elements_of_a_window_that_a_rank_could_not_read(broken):
    size = 3
    total = sum(map(prod, SHAPES))
    slots, barrier = [None] * size, threading.Barrier(size)

    def work(rank):
        streams = ShardStreams(Ranks(size), SHAPES, DIMS, rank)
        streams._comm = ThreadComm(rank, slots, barrier)
        streams._world.timeout_s = 20.0
        targets = [torch.full_like(shard.float(), -1.0) for shard in shards_of(rank, size)]

        def read(begin, end):
            if rank == broken and begin >= streams.own[0] + 11:
                return None
            return np.arange(begin, end, dtype="f4")

        def write(run, values):
            targets[run.parameter][run.local : run.local + run.length] = values

        return streams.scatter(read, write, np.dtype("f4"), 11), targets

    with ThreadPoolExecutor(size) as pool:
        results = [*pool.map(work, range(size))]
    assert [complete for complete, _ in results] == [broken is None] * size
    written = 0
    for rank, (_, targets) in enumerate(results):
        for target, shard in zip(targets, shards_of(rank, size), strict=True):
            new = target != -1
            assert torch.equal(target[new], shard[new].float())
            written += int(new.sum())
    # The first window has 11 elements of each rank's range.
    assert written == (total if broken is None else size * 11)
