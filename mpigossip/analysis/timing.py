"""Timing of functions that ranks call together, such as rounds of an exchange.

The measurements of :func:`take_turns`, which the other functions use, follow these rules:

* A measurement times consecutive calls of a function. Each rank uses its own clock, and divides
  the time by the number of calls.
* The first measurement of each function is dropped, because its calls open connections.
* Before each measurement, the ranks of the communicator wait in a barrier, which is not timed.
* Functions are measured in turn, so that other programs on the host disturb all of them alike.
* Callers use the median of the measurements, or the minimum for a time without disturbances.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:  # `mpigossip plan` works on hosts on which MPI can't be loaded.
    from mpi4py import MPI

Work = Callable[[], object]
"""Function without parameters, which is timed."""


def stopwatch(work: Work, calls: int = 1) -> float:
    """Return the seconds per call of ``calls`` consecutive calls on this rank."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def take_turns(
    works: Sequence[Work],
    comm: MPI.Comm | None = None,
    *,
    calls: int = 1,
    least: int = 5,
    most: int = 2000,
    seconds: float = 0.0,
) -> list[list[float]]:
    """Measure functions in turn for about ``seconds`` seconds; collective over ``comm``.

    :param works: functions; all ranks have the same number of them
    :param comm: ranks that call the functions together; None: this process only
    :param calls: consecutive calls per measurement
    :param least: smallest number of measurements of each function
    :param most: largest number of measurements of each function
    :param seconds: seconds after which rank 0 ends the measurements
    :return: for each function, the seconds per call of each measurement on this rank
    """
    times: list[list[float]] = [[] for _ in works]
    start = time.perf_counter()
    enough = False
    while not enough:
        for measured, work in zip(times, works, strict=True):
            if comm is not None:
                comm.Barrier()
            measured.append(stopwatch(work, calls))
        repeats = len(times[0]) - 1  # The first measurement is dropped.
        is_late = time.perf_counter() - start >= seconds or repeats >= most
        enough = repeats >= least and (is_late if comm is None else comm.bcast(is_late))
    return [measured[1:] for measured in times]


def time_slowest(works: Sequence[Work], comm: MPI.Comm, seconds: float) -> list[list[float]]:
    """Measure like :func:`take_turns`, and return the time of the slowest rank; collective.

    :param works: functions; all ranks have the same number of them
    :param comm: ranks that call the functions together
    :param seconds: seconds that all measurements may take, approximately
    :return: for each function, the seconds per call on the slowest rank, for each measurement
    """
    from mpi4py import MPI

    own = np.array(take_turns(works, comm, seconds=seconds))
    slowest = np.empty_like(own)
    comm.Allreduce(own, slowest, MPI.MAX)
    return slowest.tolist()


def arithmetic(comm: MPI.Comm, seconds: float) -> Work:
    """Return a function that multiplies matrices for a given time; collective.

    :param comm: ranks that compute at the same time
    :param seconds: seconds that a call of the function should take on the slowest rank
    """
    matrix = torch.ones(192, 192)

    def work(products: int) -> None:
        for _ in range(products):
            matrix @ matrix

    (times,) = time_slowest([partial(work, 50)], comm, 0.1)
    return partial(work, max(1, round(50 * seconds / statistics.median(times))))
