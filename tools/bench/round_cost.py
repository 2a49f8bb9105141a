"""What Python adds to a round of 1 KB between two ranks, over the bare MPI calls of that round.

mpirun -n 2 python tools/bench/round_cost.py
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.ranks import world
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout, Mixer

COUNT = 256
"""Elements of the vector: 1 KB."""
ROUNDS, REPEATS = 200, 15


def ours(mixer: Mixer) -> Callable[[], None]:
    """A whole round, the average included."""
    clock = iter(range(1 << 60))

    def work() -> None:
        t = next(clock)
        mixer.outbox(t)
        mixer.start(Kind.GOSSIP, t)
        mixer.finish()

    return work


def bare(comm: MPI.Comm, window: MPI.Win, put: bool) -> Callable[[], None]:
    """The MPI calls of it: [a put and its flush,] a token "ready" and one "done" both ways."""
    other, data = 1 - comm.rank, np.ones(4 * COUNT, np.uint8)
    out, into = np.zeros(1, np.int64), np.zeros(1, np.int64)

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


def microseconds(comm: MPI.Comm, work: Callable[[], None]) -> float:
    """Mean of a round."""
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        work()
    return (time.perf_counter() - began) / ROUNDS * 1e6


def main() -> None:
    """Alternate the two; medians, on rank 0."""
    torch.set_num_threads(1)
    with world() as ranks:
        comm = ranks.comm
        window = MPI.Win.Allocate(4 * COUNT, 1, comm=comm)
        window.Lock_all()
        for name, same_host in (
            ("one-peer-hypercube", "read"),
            ("one-peer-exponential", "read"),
            ("one-peer-exponential", "put"),
        ):
            mixer = open_mixer(graph(name, 2), Layout((COUNT,)), ranks, same_host=same_host)
            works = ours(mixer), bare(comm, window, same_host == "put")
            times: list[list[float]] = [[], []]
            for _ in range(REPEATS + 1):
                for kept, work in zip(times, works, strict=True):
                    kept.append(microseconds(comm, work))
            mixer.close()
            whole, calls = (statistics.median(kept[1:]) for kept in times)
            if comm.rank == 0:
                print(
                    f"{name:22} {same_host:5} round {whole:6.1f} us, MPI calls {calls:6.1f} us, "
                    f"Python's own {whole - calls:6.1f} us",
                    flush=True,
                )
        window.Unlock_all()
        window.Free()


if __name__ == "__main__":
    main()
