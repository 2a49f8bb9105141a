"""Compare rounds of an exchange by MPI windows with rounds by MPI messages, on CPUs.

    tools/labs/net.sh up 2 1gbit
    tools/labs/net.sh run 2 python tools/bench/windows_or_messages.py [--sizes 4 25 100]

Both ranks average a vector with the other rank, on the hypercube of two nodes. "windows" is the
mixer of a normal run, with ``node.same_host = "put"`` if both ranks are on one host; "messages" is
the mixer of a run with ``run.survive``, which sends with MPI_Isend. They are measured in turn in
the same run. The table shows the median time of a round on rank 0, the smallest and the largest
time, and the ratio of the medians. "MPI_Sendrecv" sends the same bytes in both directions without
averaging.
"""

import argparse
import statistics

import numpy as np
import torch
from mpi4py import MPI
from round_cost import mixer_round

from mpigossip.analysis.timing import take_turns
from mpigossip.cluster.mpi_world import open_world
from mpigossip.graphs import graph
from mpigossip.mixing import mixer_class
from mpigossip.mixing.base import MessageLayout

MEGABYTE = 1_000_000


def describe(seconds: list[float]) -> str:
    """Return the median, minimum and maximum of times, in milliseconds."""
    middle = statistics.median(seconds)
    return f"{1e3 * middle:.1f} ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"


def main() -> None:
    """Print a row of the table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[4, 25, 100], help="in MB")
    parser.add_argument("--seconds", type=float, default=20.0, help="time per size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with open_world() as world:
        comm = world.comm
        if comm.rank == 0:
            print("| MB | windows, ms | messages, ms | messages / windows | MPI_Sendrecv, ms |")
            print("|---|---|---|---|---|")
        for size in options.sizes:
            layout = MessageLayout((int(size * MEGABYTE) // 4,))
            pairs = graph("one-peer-hypercube", 2)
            windows = mixer_class("synchronous", "ranks")(pairs, layout, world, same_host="put")
            messages = mixer_class("synchronous", "survivors")(pairs, layout, world)
            sent = np.zeros(4 * layout.widths[0], np.uint8)
            received = np.empty_like(sent)

            def exchange(sent: np.ndarray = sent, received: np.ndarray = received) -> None:
                other = 1 - comm.rank
                comm.Sendrecv([sent, MPI.BYTE], other, 0, [received, MPI.BYTE], other, 0)

            works = [mixer_round(windows), mixer_round(messages), exchange]
            times = take_turns(works, comm, least=5, most=200, seconds=options.seconds)
            ratio = statistics.median(times[1]) / statistics.median(times[0])
            if comm.rank == 0:
                by_windows, by_messages, limit = map(describe, times)
                print(
                    f"| {size:g} | {by_windows} | {by_messages} | {ratio:.3f} | {limit} |",
                    flush=True,
                )
            windows.close()
            messages.close()


if __name__ == "__main__":
    main()
