"""Exact averages, with threads in place of ranks and a dictionary in place of MPI."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.exact_average import average


class Swaps:
    """Exchange between threads that counts the bytes sent by each rank."""

    def __init__(self, n: int):
        self.barrier = threading.Barrier(n, timeout=30)
        self.outgoing: dict = {}
        self.sent_bytes = [0] * n

    def of(self, rank: int):
        def swap(out, into):
            for (other, slot), array in out.items():
                assert other != rank
                self.outgoing[rank, other, slot] = array.clone()
                self.sent_bytes[rank] += array.nbytes
            self.barrier.wait()
            for (other, slot), array in into.items():
                array.copy_(self.outgoing.pop((other, rank, slot)))
            self.barrier.wait()
            return 0.25

        return swap


def averaged(own, share):
    """Average own[rank][slot] in one thread per rank; return results, waits and bytes sent."""
    n = len(own)
    swaps = Swaps(n)
    results = [[torch.full_like(array, float("nan")) for array in arrays] for arrays in own]

    def run(rank):
        weights = [1 / n] * n
        return average(rank, weights, own[rank], results[rank], swaps.of(rank), share=share)

    with ThreadPoolExecutor(n) as pool:
        waits = list(pool.map(run, range(n)))
    assert not swaps.outgoing  # every message was received
    return results, waits, swaps.sent_bytes


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_average_is_the_sum_in_rank_order_on_every_rank(n, count, dtype):
    generator = torch.Generator().manual_seed(count)
    own = [[torch.randn(count, dtype=dtype, generator=generator) for _ in "ab"] for _ in range(n)]
    results, waits, _ = averaged(own, share=6)
    for slot in range(2):
        rows = [arrays[slot].unsqueeze(0) for arrays in own]
        expected = weighted_sum([1 / n] * n, rows, torch.empty_like(rows[0]))[0]
        for arrays in results:
            assert torch.equal(arrays[slot], expected)
    pieces = -(-count // (6 * n)) if count > n else min(count, 1)
    assert waits == [0.5 * pieces] * n


def test_a_rank_sends_twice_its_share_of_the_vector():
    n = 4
    results, _, sent_bytes = averaged([[torch.ones(96)] for _ in range(n)], share=6)
    assert sent_bytes == [2 * (n - 1) * 96 * 4 // n] * n
    assert all(torch.equal(arrays[0], torch.ones(96)) for arrays in results)
