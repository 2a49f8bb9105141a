"""Random calls of `mpigossip.Averager`, each compared with its formula in NumPy.

The tests make some hundred calls, and tools/labs/window_operations.py makes any number of them.
"""

import random
import time
from typing import Any

import numpy as np

import mpigossip

CALLS = ("average", "halves", "weights", "exchange", "mean", "integers", "sum")
LIMIT = 1e-12
"""Largest relative error of an average of float64 numbers."""


def random_averages(world: Any, graph: str, count: int, width: int) -> list[str]:
    """Make random calls of two Averagers, of float64 and of int64 numbers.

    All ranks draw the same calls, because rounds are collective, but pause at different moments.
    Each rank computes the arrays of all nodes in NumPy.

    :param world: the world; all ranks call this function
    :param graph: name of the graph
    :param count: number of calls of each rank
    :param width: number of elements of the arrays
    :return: a sentence for each wrong result; an empty list if all are right
    """
    n, rank = world.size, world.rank
    shared = np.random.default_rng([13, n])
    pause = random.Random(rank)
    x = shared.standard_normal((n, width))
    counts = shared.integers(-9, 9, (n, width))
    sentences = []

    def compare(title: str, result: np.ndarray, expected: np.ndarray, limit: float) -> None:
        error = np.abs(result - expected).max()
        if not error <= limit:
            sentences.append(f"{title}, rank {rank}: the error is {error:.3g}")

    with (
        mpigossip.Averager(world, graph, like=x[0]) as averager,
        mpigossip.Averager(world, graph, like=counts[0]) as integers,
    ):
        for index in range(count):
            call = CALLS[shared.integers(len(CALLS))]
            title = f"call {index}, {call}"
            matrix = averager.graph.matrix(averager.round)
            factors = shared.integers(1, 4, (n, n))
            if pause.random() < 0.05:
                time.sleep(pause.random() * 1e-3)
            limit = LIMIT * np.abs(x).max()
            if call == "integers":
                pattern = averager.graph.matrix(integers.round) != 0
                rows = factors * (pattern | np.eye(n, dtype=bool))
                weights = {j: int(rows[rank, j]) for j in np.flatnonzero(rows[rank])}
                result = integers.average(counts[rank], weights=weights)
                counts = rows @ counts  # both wrap around
                compare(title, result, counts[rank], 0)
            elif call == "sum":
                compare(title, integers.sum(counts[rank]), counts.sum(0), 0)
            elif call == "mean":
                compare(title, averager.mean(x[rank]), x.mean(0), limit)
            elif call == "exchange":
                for j, received in averager.exchange(x[rank]).items():
                    compare(title, received, x[j], 0)
            elif call == "weights":
                rows = factors * ((matrix != 0) | np.eye(n, dtype=bool))
                rows = rows / rows.sum(1, keepdims=True)
                weights = {j: rows[rank, j] for j in np.flatnonzero(rows[rank])}
                result = averager.average(x[rank], weights=weights)
                compare(title, result, rows[rank] @ x, limit)
            else:
                if call == "average":
                    result = averager.average(x[rank])
                else:
                    averager.start(x[rank])
                    result = averager.finish()
                compare(title, result, matrix[rank] @ x, limit)
                # New arrays, equal on all ranks: rounding errors of a call end with it.
                x = shared.standard_normal((n, width))
    return sentences
