"""Measure the time that Python adds to the MPI calls of a round between two ranks.

    mpirun -n 2 python tools/bench/round_cost.py

In a round, each rank averages a vector of 1 KB with the other rank. The tool measures a mixer, as
in training, and `mpigossip.Averager` on float32 and float64 arrays of NumPy.
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
"""Number of elements of a float32 vector, which has 1 KB; a float64 vector has half of them."""
ROUNDS = 12
"""Number of rounds in each measurement. It is small, so that other programs do not disturb all
measurements."""
REPEATS = 300
"""Number of measurements of each function."""


def mixer_round(mixer: Mixer) -> Callable[[], None]:
    """Return a function that makes the next round of a mixer, including the average."""
    clock = iter(range(1 << 60))

    def work() -> None:
        t = next(clock)
        mixer.outbox(t)
        mixer.start(ExchangeKind.GOSSIP, t)
        mixer.finish()

    return work


def averager_round(averager: mpigossip.Averager, x: np.ndarray) -> Callable[[], None]:
    """Return a function that makes a round of an `Averager`, including its copies and checks.

    :param averager: the averager
    :param x: array that is averaged with the other rank's array, and replaced by the average
    """

    def work() -> None:
        averager.start(x)
        averager.finish()

    return work


def mpi_round(comm: MPI.Comm, window: MPI.Win, put: bool) -> Callable[[], None]:
    """Return a function that makes only the MPI calls of a round.

    A round sends two notifications in each direction.

    :param comm: both ranks
    :param window: window of 4 COUNT bytes on each rank
    :param put: whether the round begins with a put into the other rank's window, and a flush
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

    :param times: measured seconds per round by name of the function; the MPI calls are first
    :param summed: function that computes one number from a list of times, such as the median
    """
    calls, *others = (1e6 * summed(seconds) for seconds in times.values())
    added = (f"{name} +{us - calls:.1f}" for name, us in zip([*times][1:], others, strict=True))
    return f"MPI calls {calls:.1f} µs, {', '.join(added)}"


def main() -> None:
    """Run all measurements in turn; print medians and minima on rank 0.

    Other programs disturb the minima less than the medians.
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
            works = {
                "MPI calls": mpi_round(comm, window, same_host == "put"),
                "mixer": mixer_round(mixer),
            }
            for dtype in (np.float32, np.float64):
                x = np.zeros(4 * COUNT // np.dtype(dtype).itemsize, dtype)
                averager = mpigossip.Averager(ranks, name, like=x, same_host=same_host)
                works[f"Averager {x.dtype}"] = averager_round(averager, x)
            measured = take_turns(
                [*works.values()], comm, calls=ROUNDS, least=REPEATS, most=REPEATS
            )
            times = dict(zip(works, measured, strict=True))
            mixer.close()
            if comm.rank == 0:
                for word, summed in (("median", statistics.median), ("minimum", min)):
                    print(
                        f"{name:20} {same_host:4} {word:7} {format_times(times, summed)}",
                        flush=True,
                    )
        window.Unlock_all()
        window.Free()


if __name__ == "__main__":
    main()
