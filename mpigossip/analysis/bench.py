"""Measurements of `mpigossip bench`.

Each time is also given as a multiple of a limit, which is measured in the same run: the time of a
simple operation with the same bytes, in memory, by MPI or on the disk, or of a computation alone.
"""

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count as numbers
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.analysis.timing import arithmetic, time_slowest
from mpigossip.cluster.world import World
from mpigossip.config.errors import Failure
from mpigossip.config.host import host_memory
from mpigossip.config.readable import print_note
from mpigossip.graphs import Graph, GraphError, graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout, Mixer
from mpigossip.mixing.combine import BLOCK
from mpigossip.mixing.kernels import native
from mpigossip.mixing.notifications import wait_all
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import create, replacing, writing

GRAPHS = ("one-peer-hypercube", "one-peer-exponential", "exponential", "ring", "complete")
"""Graphs that `exchange` measures unless the command names others."""


def limit_memory(count: int) -> Callable[[], object]:
    """Return a function that averages two arrays of float32 in place, at the speed of the memory.

    :param count: number of elements
    """
    a = torch.ones(count)
    b = torch.ones(count)

    def work() -> None:
        for x, y in zip(a.split(BLOCK), b.split(BLOCK), strict=True):
            torch.add(x, y, out=x).mul_(0.5)

    return work


def limit_network(comm: MPI.Comm, count: int, to: int, source: int) -> Callable[[], object]:
    """Return a function that sends a plain MPI message to one rank and receives one from another.

    :param comm: communicator of all ranks, which have to call the returned function together
    :param count: number of elements of a message, float32
    :param to: rank that this rank sends to
    :param source: rank that this rank receives from
    """
    out = np.ones(count, np.float32)
    into = np.empty(count, np.float32)

    def work() -> None:
        pending = {(source, 0): comm.Irecv(into, source), (to, 1): comm.Isend(out, to)}
        # Use a wait that sleeps: if ranks share cores, busy waiting would slow down the limit.
        wait_all(
            pending, 300.0, lambda _: "the limit of the network: the neighbour does not answer"
        )

    return work


def row(name: str, size: int, times: Sequence[float], limit: Sequence[float]) -> dict[str, Any]:
    """Return a row of the table: the median time of a measurement, and its multiple of the limit.

    :param name: name of the graph or operation
    :param size: bytes of the message
    :param times: repeated measurements, in seconds
    :param limit: repeated measurements of the limit, in seconds
    :returns: the row; "spread" is the interquartile range divided by the median
    """
    median = statistics.median(times)
    bound = statistics.median(limit)
    quarters = statistics.quantiles(times, n=4)
    return {
        "graph": name,
        "bytes": size,
        "seconds": median,
        "spread": (quarters[2] - quarters[0]) / median,
        "limit_seconds": bound,
        "times_limit": median / bound,
        "gigabytes_per_second": size / median / 1e9,
        "repeats": len(times),
    }


def room_for_messages(world: World) -> int:
    """Return the largest size of a message, in bytes, for which the memory of all hosts suffices.

    A measurement is assumed to need eight arrays of this size per rank, for windows, the limit and
    copies that the MPI library makes. These arrays may fill half of a host's memory. The call is
    collective.
    """
    ranks = max(map(world.hosts.count, world.hosts))
    return world.comm.allreduce(host_memory() // 2 // 8 // ranks, MPI.MIN)


def sizes_that_fit(world: World, options) -> list[int]:
    """Return the requested sizes of messages that fit in memory, in bytes; collective.

    Rank 0 prints a note on the other sizes.

    :param world: all ranks
    :param options: options of `mpigossip bench`
    """
    room = room_for_messages(world)
    omitted = [f"{size:,}" for size in options.sizes if size > room]
    if world.rank == 0 and omitted:
        ranks = max(map(world.hosts.count, world.hosts))
        print_note(
            f"these sizes are left out: {', '.join(omitted)} bytes; with {ranks} ranks per host, "
            f"there is memory for messages of {room:,} bytes"
        )
    return [size for size in options.sizes if size <= room]


def _opened(mixing_graph: Graph, size: int, world: World, options) -> tuple[Mixer, int]:
    """Open a mixer for a vector of at least ``size`` bytes; collective.

    :param mixing_graph: graph of the mixer
    :param size: bytes of the vector
    :param world: all ranks
    :param options: options of `mpigossip bench`
    :return: the mixer, and the number of elements of the vector
    """
    count = max(512, -(-size // 4 // 512) * 512)
    mixer = open_mixer(mixing_graph, MessageLayout((count,)), world, same_host=options.same_host)
    mixer.outbox(0)[0][0].fill_(1.0)
    return mixer, count


def one_round(
    mixer: Mixer,
    clock: Iterator[int],
    work: Callable[[], object] = lambda: None,
    kind: ExchangeKind = ExchangeKind.GOSSIP,
) -> None:
    """Run the next round, and call ``work`` while its messages are in flight.

    :param mixer: mixer that is measured
    :param clock: iterator over the numbers of rounds
    :param work: function that is called between the start and the end of the exchange
    :param kind: kind of the exchange
    """
    t = next(clock)
    mixer.outbox(t)
    mixer.start(kind, t)
    work()
    mixer.finish()


def exchange(world: World, options) -> Iterator[dict[str, Any]]:
    """Measure the time of rounds in which nodes exchange one vector, on each graph; collective.

    If all ranks share a host, the limit is the time to average two arrays in memory, otherwise the
    time of a plain MPI message. Graphs that do not exist for this number of ranks are left out.

    :param world: all ranks, each of which is a node
    :param options: options of `mpigossip bench`
    :return: rows, as :func:`row` makes them, for each graph and size
    :raises GraphError: if a graph that ``options`` names does not exist for this number of ranks
    """
    on_one_host = len(set(world.hosts)) == 1
    for name in options.graphs or GRAPHS:
        try:
            mixing_graph = graph(name, world.size)
        except GraphError:
            if options.graphs:
                raise
            continue
        for size in sizes_that_fit(world, options):
            mixer, count = _opened(mixing_graph, size, world, options)
            if on_one_host:
                bound = limit_memory(count)
            else:
                next_rank = (world.rank + 1) % world.size
                previous_rank = (world.rank - 1) % world.size
                bound = limit_network(world.comm, count, next_rank, previous_rank)
            ours = partial(one_round, mixer, numbers())
            times, limit = time_slowest([ours, bound], world.comm, options.seconds)
            mixer.close()
            yield row(name, 4 * count, times, limit)


def allreduce(world: World, options) -> Iterator[dict[str, Any]]:
    """Measure the time of an exact average over all nodes, and of MPI's `Allreduce`; collective.

    The limit of both is the time to average two arrays in memory.

    :param world: all ranks, each of which is a node
    :param options: options of `mpigossip bench`
    :return: for each size, two rows as :func:`row` makes them
    """
    mixing_graph = graph("complete", world.size)
    for size in sizes_that_fit(world, options):
        mixer, count = _opened(mixing_graph, size, world, options)
        values = np.ones(count, np.float32)
        total = np.empty(count, np.float32)

        def library(values=values, total=total) -> None:
            world.comm.Allreduce(values, total)
            np.multiply(total, 1 / world.size, out=total)

        ours = partial(one_round, mixer, repeat(0), kind=ExchangeKind.GLOBAL)
        works: list[Callable[[], object]] = [ours, library, limit_memory(count)]
        times, library_times, limit = time_slowest(works, world.comm, options.seconds)
        mixer.close()
        yield row("global average", 4 * count, times, limit)
        yield row("MPI_Allreduce", 4 * count, library_times, limit)


def overlap(world: World, options) -> Iterator[dict[str, Any]]:
    """Measure the fraction of an exchange that overlaps with a computation of equal duration.

    The limit is the time of the computation alone. The call is collective.

    :param world: all ranks, each of which is a node
    :param options: options of `mpigossip bench`
    :return: rows as :func:`row` makes them, with two more entries: "exchange_seconds" is the time
        of the exchange alone, and "hidden" is the fraction that overlaps, from 0 to 1
    """
    mixing_graph = graph("one-peer-exponential", world.size)
    for size in sizes_that_fit(world, options):
        mixer, count = _opened(mixing_graph, size, world, options)
        exchange_alone = partial(one_round, mixer, clock := numbers())
        (first,) = time_slowest([exchange_alone], world.comm, options.seconds / 4)
        compute = arithmetic(world.comm, statistics.median(first))
        works: list[Callable[[], object]] = [exchange_alone, compute]
        works.append(partial(one_round, mixer, clock, compute))
        alone, pure, together = time_slowest(works, world.comm, options.seconds)
        line = row("one-peer-exponential", 4 * count, together, pure)
        separate = statistics.median(alone), statistics.median(pure)
        hidden = (sum(separate) - line["seconds"]) / min(separate)
        yield line | {"exchange_seconds": separate[0], "hidden": max(0.0, min(1.0, hidden))}
        mixer.close()


def checkpoint(world: World, options) -> Iterator[dict[str, Any]]:
    """Measure the time to write the checkpoint of a node, on all ranks at once; collective.

    The limit is the time to write a plain file of equal size to the disk, with fsync.

    :param world: all ranks, each of which is a node
    :param options: options of `mpigossip bench`
    :return: rows as :func:`row` makes them, one for each size
    :raises StoreError: on all ranks, if a rank can't create a folder in ``options.folder``
    :raises Failure: if a file can't be written
    """
    from mpigossip.store import checkpoint as store

    for size in options.sizes:
        values = np.ones(size // 4, np.float32)
        state = store.NodeState(values, ("x",), ((values.size,),), {}, {})
        with world.raise_together(StoreError), writing(options.folder / "checkpoint"):
            temporary = tempfile.TemporaryDirectory(dir=options.folder)
        with temporary as folder:
            ours = partial(store.write_node, Path(folder), world.rank, state)
            plain_write = partial(_write_plain, Path(folder) / "plain", values)
            try:
                times, limit = time_slowest([ours, plain_write], world.comm, options.seconds)
            except (OSError, StoreError) as error:  # This may happen on one rank only.
                where = f'--folder "{options.folder}" on {world.hosts[world.rank]}'
                raise Failure(
                    f"{where}: {error}; free space on this disk, or pass another --folder"
                ) from error
        yield row("checkpoint", size, times, limit)


def _write_plain(path: Path, values: np.ndarray) -> None:
    """Write an array to a new file with fsync, and rename the file to ``path``."""
    with path.with_suffix(".new").open("wb") as file:
        file.write(values.data)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").replace(path)


MEASURES = {
    "exchange": exchange,
    "allreduce": allreduce,
    "overlap": overlap,
    "checkpoint": checkpoint,
}
"""Measurements by their names on the command line."""


def save(rows: Sequence[dict[str, Any]], path: Path, world: World, what: str) -> None:
    """Save the rows as JSON if the file's name ends in .json, otherwise as HDF5.

    An HDF5 file has one dataset for each column, with NaN for a missing value.

    :param rows: rows of the table
    :param path: file to write
    :param world: all ranks
    :param what: name of the measurement, such as "exchange"
    :raises StoreError: if writing fails
    """
    about = {
        "measured": what,
        "ranks": world.size,
        "hosts": sorted(set(world.hosts)),
        "library": MPI.Get_library_version().strip().splitlines()[0].strip("\0"),
        "processor": platform.processor() or platform.machine(),
        "native": native.status(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with replacing(path) as file:
        if path.suffix == ".json":
            file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", "utf-8")
            return
        with create(file) as out:
            out.attrs.update(about)
            for key in dict.fromkeys(key for line in rows for key in line):
                out[key] = [line.get(key, float("nan")) for line in rows]
                if key.endswith("seconds"):
                    out[key].attrs["units"] = "s"
