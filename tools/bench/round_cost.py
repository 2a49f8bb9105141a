"""Measure the time that Python adds to the MPI calls of a round of 1 KB between two ranks.

    mpirun -n 2 python tools/bench/round_cost.py

The tool measures a mixer, as in training, and `mpigossip.Averager` on float32 and float64 arrays of
NumPy.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

import mpigossip
from mpigossip.analysis.timing import take_turns
from mpigossip.cluster.mpi_world import open_world
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout, Mixer

COUNT = 256
"""Number of float32 elements of the vector: 1 KB; float64 vectors have half this number."""
ROUNDS = 12
REPEATS = 300
"""Number of rounds in each measurement. It is small, so that other programs don't disturb all."""


def ours(mixer: Mixer) -> Callable[[], None]:
    """Return a function that runs a whole round of a mixer, including the average."""
    clock = iter(range(1 << 60))

    def work() -> None:
        t = next(clock)
        mixer.outbox(t)
        mixer.start(ExchangeKind.GOSSIP, t)
        mixer.finish()

    return work


def plain(averager: mpigossip.Averager, x: np.ndarray) -> Callable[[], None]:
    """Return a function that averages ``x`` once by `Averager`, including its copies and checks."""

    def work() -> None:
        averager.start(x)
        averager.finish()

    return work


def bare(comm: MPI.Comm, window: MPI.Win, put: bool) -> Callable[[], None]:
    """Return a function that makes only the MPI calls of a round.

    :param comm: both ranks
    :param window: window to put into
    :param put: whether a put and a flush belong to the round, besides the notifications "ready" and
        "done" in both directions
    """
    other = 1 - comm.rank
    data = np.ones(4 * COUNT, np.uint8)
    out = np.zeros(1, np.int64)
    into = np.zeros(1, np.int64)

    def work() -> None:
        if put:
            window.Put([data, MPI.BYTE], other, [0, data.size, MPI.BYTE])
            window.Flush(other)
        for tag in (1, 2):
            window.Sync()
            requests = comm.Irecv(into, other, tag), comm.Isend(out, other, tag)
            for request in requests:
                request.Wait()

    return work


def format_times(times: dict[str, list[float]], summed: Callable) -> str:
    """Format the time of the MPI calls in µs, and the times that the other functions add to it.

    :param times: measured times by name, the MPI calls first
    :param summed: function that computes one number from the times, such as the median
    """
    calls, *others = (1e6 * summed(kept) for kept in times.values())
    added = (f"{who} +{us - calls:.1f}" for who, us in zip([*times][1:], others, strict=True))
    return f"MPI calls {calls:.1f}, {', '.join(added)}"


def main() -> None:
    """Run all measurements in turn; print medians and minima on rank 0.

    Minima are less disturbed by other programs.
    """
    torch.set_num_threads(1)
    with open_world() as ranks:
        comm = ranks.comm
        window = MPI.Win.Allocate(4 * COUNT, 1, comm=comm)
        window.Lock_all()
        for name, same_host in (
            ("one-peer-hypercube", "read"),
            ("one-peer-exponential", "read"),
            ("one-peer-exponential", "put"),
        ):
            mixer = open_mixer(graph(name, 2), MessageLayout((COUNT,)), ranks, same_host=same_host)
            works = {"MPI calls": bare(comm, window, same_host == "put"), "mixer": ours(mixer)}
            for dtype in (np.float32, np.float64):
                x = np.zeros(4 * COUNT // np.dtype(dtype).itemsize, dtype)
                averager = mpigossip.Averager(ranks, name, like=x, same_host=same_host)
                works[f"Averager {x.dtype}"] = plain(averager, x)
            measured = take_turns(
                [*works.values()], comm, calls=ROUNDS, least=REPEATS, most=REPEATS
            )
            times = dict(zip(works, measured, strict=True))
            mixer.close()
            if comm.rank == 0:
                for word, summed in (("median", statistics.median), ("least", min)):
                    print(
                        f"{name:20} {same_host:4} {word:6} {format_times(times, summed)}",
                        flush=True,
                    )
        window.Unlock_all()
        window.Free()


if __name__ == "__main__":
    main()
