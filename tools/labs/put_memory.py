"""Does a round of the put path keep memory? Growth of a rank's resident memory, part by part.

    mpiexec -n 2 python tools/labs/put_memory.py [ROUNDS [BYTES]]

Between two ranks, messages of 1 KB unless said: our whole round, then bare MPI calls of the same
kinds, by themselves and together: tokens (Isend, Irecv, Test), asked for before or after they
come; puts (Put, Flush), with requests or without. What a bare call keeps is kept by the library.
"""

from __future__ import annotations

import gc
import resource
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpigossip.cluster.ranks import World, world
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(comm: MPI.Comm, work: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Bytes a round by which the larger rank grows, in all and in Python's own allocations."""
    for _ in range(rounds // 4):  # caches and connections fill first
        work()
    comm.Barrier()
    gc.collect()
    before = resident()
    for _ in range(rounds):
        work()
    gc.collect()
    grown = (resident() - before) / rounds
    comm.Barrier()
    tracemalloc.start()
    traced = tracemalloc.get_traced_memory()[0]
    for _ in range(rounds // 4):
        work()
    gc.collect()
    python = (tracemalloc.get_traced_memory()[0] - traced) / (rounds // 4)
    tracemalloc.stop()
    return comm.allreduce(grown, MPI.MAX), comm.allreduce(python, MPI.MAX)


def ours(ranks: World, size: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A whole round, and what ends it."""
    made = graph("one-peer-exponential", ranks.size)
    mixer = open_mixer(made, Layout((size // 4,)), ranks, same_host="put")
    clock = iter(range(1 << 60))

    def work() -> None:
        t = next(clock)
        mixer.outbox(t)
        mixer.start(Kind.GOSSIP, t)
        mixer.finish()

    return work, mixer.close


def tokens(comm: MPI.Comm, late: bool = False) -> Callable[[], None]:
    """The two tokens of a round, in and out; ``late``: received when they have come."""
    other = 1 - comm.rank

    def work() -> None:
        for tag in (1, 2):
            into, out = np.empty(1, np.int64), np.zeros(1, np.int64)
            requests = [comm.Isend(out, other, tag)]
            while late and not comm.Iprobe(other, tag):
                pass
            requests.append(comm.Irecv(into, other, tag))
            while not MPI.Request.Testall(requests):
                pass

    return work


def puts(comm: MPI.Comm, window: MPI.Win, size: int, requests: bool) -> Callable[[], None]:
    """A message put and flushed; with ``requests`` its memory is known to be read first."""
    other, message = 1 - comm.rank, np.zeros(size, np.uint8)

    def work() -> None:
        there = [0, size, MPI.BYTE]
        if requests:
            request = window.Rput([message, MPI.BYTE], other, there)
            while not request.Test():
                pass
        else:
            window.Put([message, MPI.BYTE], other, there)
        window.Flush(other)

    return work


def main() -> None:
    """One line a part."""
    given = [int(word) for word in sys.argv[1:]]
    rounds, size = given + [20_000, 1024][len(given) :]
    with world() as ranks:
        comm = ranks.comm
        if ranks.size != 2:
            raise SystemExit(f"{ranks.size} ranks; this measures 2: mpiexec -n 2")
        window = MPI.Win.Allocate(size, 1, comm=comm)
        window.Lock_all()
        whole, close = ours(ranks, size)
        parts: dict[str, Callable] = {
            "our round": whole,
            "tokens": tokens(comm),
            "tokens that wait": tokens(comm, late=True),
            "Put, Flush": puts(comm, window, size, False),
            "Rput, Test, Flush": puts(comm, window, size, True),
        }
        put, told = parts["Rput, Test, Flush"], parts["tokens"]
        parts["both"] = lambda: (put(), told())
        if ranks.rank == 0:
            print(MPI.Get_library_version().split("\n")[0][:40], f"- {rounds} rounds of {size} B")
        for name, work in parts.items():
            grown, python = growth(comm, work, rounds)
            if ranks.rank == 0:
                print(
                    f"{name:18} {grown:8.1f} B a round, {python:6.2f} of them Python's", flush=True
                )
        close()
        window.Unlock_all()
        window.Free()


if __name__ == "__main__":
    main()
