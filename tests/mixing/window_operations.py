"""Random calls of `mpigossip.Window`, and the properties that must hold after them.

The tests make some hundred calls, and tools/labs/window_operations.py makes any number of them.
"""

import random
import time
from typing import Any, NamedTuple

import numpy as np

import mpigossip


class Result(NamedTuple):
    """Report of one rank after its last call."""

    begin: np.ndarray
    """Array of this rank at the start."""
    end: np.ndarray
    """Array of this rank at the end."""
    push_weight: float
    """Push-sum weight of this rank at the end; 1.0 for integers."""
    sent: dict[int, int]
    """Number of values that this rank has sent to each rank."""
    versions: dict[int, int]
    """Number of values that have arrived from each in-neighbour."""
    torn: int
    """Number of arrays that were read while they were written."""


def random_operations(world: Any, graph: str, dtype: str, count: int, width: int) -> Result:
    """Make random calls of a window.

    :param world: the world; all ranks call this function
    :param graph: name of the graph
    :param dtype: "int64", "float64" or another dtype of numpy that a window accepts
    :param count: number of calls of each rank
    :param width: number of elements of the array
    """
    draw = random.Random(world.rank)
    floating = dtype.startswith("float")
    x = np.full(width, 1024 * (world.rank + 1), dtype)
    begin = x.copy()
    sent = dict.fromkeys(range(world.size), 0)
    torn = 0
    with mpigossip.Window(world, graph, like=x, push_sum=floating) as window:
        in_ones = dict.fromkeys(window.in_neighbours, 1)

        def collect(x: np.ndarray, own_weight: float) -> np.ndarray:
            return window.update(x, {world.rank: own_weight, **in_ones}, reset=True)

        for _ in range(count):
            if window.out_neighbours and draw.random() < 0.6:
                targets = draw.sample(window.out_neighbours, draw.randint(1, len(in_ones) or 1))
                if floating:  # Each target gets the same share, and one share stays here.
                    share = 1 / (1 + len(targets))
                    window.accumulate(x, dict.fromkeys(targets, share))
                    x = collect(x, share)
                else:
                    part = np.full(width, draw.randint(-3, 3), dtype)
                    window.accumulate(part, dict.fromkeys(targets, 1))
                    x = x - part * len(targets)
                for j in targets:
                    sent[j] += 1
            elif draw.random() < 0.8:
                x = collect(x, 1)
            else:
                window.flush()
                time.sleep(draw.random() * 1e-4)
            torn += int((x != x[0]).any())
            torn += any((value != value[0]).any() for value in window.received().values())
        window.flush()
        world.barrier()
        x = collect(x, 1)
        push_weight = window.push_weight if floating else 1.0
        return Result(begin, x, push_weight, sent, window.versions, torn)


def find_errors(results: list[Result]) -> list[str]:
    """Return a sentence for each property that does not hold; an empty list if all hold.

    :param results: results of all ranks, in their order
    """
    sentences = []
    before = np.sum([result.begin for result in results], axis=0)
    after = np.sum([result.end for result in results], axis=0)
    if np.issubdtype(results[0].begin.dtype, np.integer):
        if (before != after).any():
            sentences.append(f"the sum of the arrays was {before[0]} and is {after[0]}")
    else:
        weights = sum(result.push_weight for result in results)
        if abs(weights - len(results)) > 1e-9:
            sentences.append(f"the push-sum weights of {len(results)} ranks add up to {weights}")
        if not np.allclose(before, after, rtol=1e-9, atol=0):
            sentences.append(f"the sum of the arrays was {before[0]} and is {after[0]}")
    for i, result in enumerate(results):
        if result.torn:
            sentences.append(f"rank {i} read {result.torn} half-written arrays")
        for j, version in result.versions.items():
            if version != results[j].sent[i]:
                sentences.append(
                    f"rank {j} sent {results[j].sent[i]} values to rank {i}, and {version} arrived"
                )
    return sentences
