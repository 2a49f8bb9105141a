"""Measure what it costs to open and to close a world: seconds, calls of MPI, and status messages.

    world_cost.py [--ranks 2 4 8 16 32] [--repeats 5]      prints a row of a table for each size

The program starts itself by the launcher of the tests (MPIGOSSIP_MPIEXEC) once for each number of
ranks. The first world of a process is not measured, because it loads modules.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

LIMIT_S = 600.0
"""Seconds that one launch may take."""
COLLECTIVE = (
    "Allgather allgather allreduce Barrier Bcast bcast Dup Free gather Iallgather Iallreduce "
    "Ibarrier Ireduce_scatter_block Reduce_scatter_block Split Split_type"
)
"""Methods of a communicator that all of its ranks have to call."""
POINT_TO_POINT = "Isend isend Send send Issend Rsend Sendrecv sendrecv"
"""Methods of a communicator that send a message to one rank."""


def measure(repeats: int) -> None:
    """Open and close worlds on this rank; rank 0 prints one row.

    The times are medians over the repeats of the slowest rank's seconds. The calls and the messages
    are counted in the last repeat: calls on rank 0, messages on all ranks together.

    :param repeats: number of worlds that are measured
    """
    from mpi4py import MPI

    from mpigossip.cluster.collectives import TimeoutComm
    from mpigossip.cluster.mpi_world import MPIWorld, open_world

    calls = Counter[str]()

    class Counted(MPI.Intracomm):
        """Communicator that counts calls of its methods; so do its duplicates."""

        def Dup(self, info: MPI.Info | None = None) -> "Counted":  # noqa: N802 - MPI's name
            calls["Dup"] += 1
            return Counted(super().Dup())

    def counting(name: str):
        method = getattr(MPI.Intracomm, name)

        def call(self, *args, **kwargs):
            calls[name] += 1
            return method(self, *args, **kwargs)

        return call

    for name in f"{COLLECTIVE} {POINT_TO_POINT}".split():
        if name != "Dup" and hasattr(MPI.Intracomm, name):
            setattr(Counted, name, counting(name))
            if name not in vars(TimeoutComm):  # A TimeoutComm passes only blocking calls on.
                setattr(TimeoutComm, name, counting(name))

    open_world(LIMIT_S).close()
    all_ranks = MPI.COMM_WORLD.Dup()
    opened, closed, sent = [], [], 0
    for _ in range(repeats):
        calls.clear()
        all_ranks.Barrier()
        begin = time.perf_counter()
        world = MPIWorld(Counted(MPI.COMM_WORLD), LIMIT_S)
        middle = time.perf_counter()
        own_calls = dict(calls)
        all_ranks.Barrier()
        calls.clear()
        again = time.perf_counter()
        monitor = world._monitor
        world.close()
        closed.append(all_ranks.allreduce(time.perf_counter() - again, MPI.MAX))
        opened.append(all_ranks.allreduce(middle - begin, MPI.MAX))
        sent = all_ranks.allreduce(0 if monitor is None else int(monitor._sent_numbers.sum()))
    if all_ranks.rank == 0:
        both = [own_calls, dict(calls)]
        together = [sum(c for name, c in some.items() if name in COLLECTIVE) for some in both]
        direct = sum(c for some in both for name, c in some.items() if name not in COLLECTIVE)
        print(
            f"| {all_ranks.size} | {1e3 * statistics.median(opened):.1f} | "
            f"{1e3 * statistics.median(closed):.1f} | {together[0]} | {together[1]} | {direct} | "
            f"{sent} |",
            flush=True,
        )


def main() -> None:
    """Start the launches, or measure in one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options.repeats)
        return
    from tests.launch import mpirun

    print("| ranks | open, ms | close, ms | calls to open | to close | sends | status messages |")
    print("|---|---|---|---|---|---|---|")
    for n in options.ranks:
        words = [sys.executable, __file__, "--inside", "--repeats", str(options.repeats)]
        done = mpirun(n, words, LIMIT_S, warm=False)
        print(done.stdout.strip() or done.stderr, flush=True)


if __name__ == "__main__":
    main()
