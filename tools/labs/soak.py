"""Exchange 10,000 rounds with each mixer, open 50 worlds, and report what has grown.

    mpirun -n 2 python tools/labs/soak.py [--rounds 10000] [--worlds 50]

Each rank opens and closes worlds, each with a `Gossip` and an `Averager`. Then all ranks exchange
with each mixer for CPUs. The resident memory, the open files and the threads of each rank are
measured after a tenth of the worlds or rounds, and at the end. Communicators cannot be counted, but
MPICH has only about 2,000 of them: if worlds did not free them, ``--worlds 300`` would end with an
error.

The exit code is 1 if the number of open files or threads of any rank has grown, or its memory by
more than GROWTH_MB.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mpigossip
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout, Mixer
from mpigossip.mixing.synchronous import FaultTolerant

COUNT = 25_000
"""Number of parameters that a message contains."""
GROWTH_MB = 8.0
"""Largest growth of a rank's memory, in MB, that counts as none: allocators keep some pages."""
MIXERS: dict[str, Callable[..., Mixer]] = {
    "read on the same host": partial(open_mixer, mixer="synchronous", same_host="read"),
    "windows": partial(open_mixer, mixer="synchronous", same_host="put"),
    "messages": FaultTolerant,
    "asynchronous": partial(open_mixer, mixer="asynchronous"),
}
"""Function of graph, layout and world that opens a mixer, by the name of the mixer."""


class Resources(NamedTuple):
    """Resources that a process uses."""

    memory_mb: float
    """Resident memory in MB."""
    files: int
    """Number of open file descriptors."""
    threads: int
    """Number of threads that Python knows."""


def resources() -> Resources:
    """Return the resources that this process uses at this moment."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Resources(
        pages * 4096 / 1e6, len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    )


def growth(world: Any, what: str, before: Resources, after: Resources) -> bool:
    """Print the largest growth over all ranks on rank 0.

    :param world: the world; all ranks call this function
    :param what: text about the repeated work between the two measurements
    :param before: resources of this rank at the first measurement
    :param after: resources of this rank at the second measurement
    :return: whether files or threads have grown, or memory by more than GROWTH_MB; equal on all
        ranks
    """
    gathered = world.gather([end - begin for begin, end in zip(before, after, strict=True)])
    grown = False
    if world.rank == 0:
        memory, files, threads = (max(column) for column in zip(*gathered, strict=True))
        grown = memory > GROWTH_MB or files > 0 or threads > 0
        verdict = "GROWN" if grown else "flat"
        print(
            f"{world.size} ranks, {what}: memory {memory:+.1f} MB, open files {files:+d}, "
            f"threads {threads:+d}: {verdict}",
            flush=True,
        )
    return world.broadcast(grown)


def repeat_rounds(world: Any, name: str, rounds: int) -> bool:
    """Exchange with one mixer, and compare the resources after a tenth and after all rounds.

    :param world: the world; all ranks call this function
    :param name: name of the mixer in `MIXERS`
    :param rounds: number of rounds
    :return: result of `growth`
    """
    one_peer = graph("one-peer-exponential", world.size)
    mixer = MIXERS[name](one_peer, MessageLayout((COUNT,)), world)
    before = resources()
    begin = time.monotonic()
    t = 0
    for k in range(rounds):
        if k == rounds // 10:
            before = resources()
        mixer.outbox(t)
        if k % 100 == 99:
            mixer.start(ExchangeKind.GLOBAL, t)
        else:
            mixer.start(ExchangeKind.GOSSIP, t)
            t += 1
        mixer.finish()
    after = resources()
    seconds = time.monotonic() - begin
    mixer.close()
    return growth(world, f"{rounds} rounds, {name}, {seconds:.0f} s", before, after)


def use_world() -> Any:
    """Open a world, train two steps, average an array, and close the world; return it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    with mpigossip.world() as world:
        optimizer = mpigossip.Gossip(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        averager = mpigossip.Averager(world, "ring", like=torch.ones(3))
        averager.average(torch.ones(3))
        averager.close()
        optimizer.close()
    return world


def repeat_worlds(count: int) -> Callable[[Any], bool]:
    """Open and close worlds, and measure the resources after a tenth and after all of them.

    :param count: number of worlds
    :return: function that passes the two measurements to `growth`, because this needs an open world
    """
    before = resources()
    begin = time.monotonic()
    for k in range(count):
        if k == max(1, count // 10):
            before = resources()
        use_world()
    after = resources()
    seconds = time.monotonic() - begin
    return lambda world: growth(world, f"{count} worlds, {seconds:.0f} s", before, after)


def main() -> int:
    """Measure the worlds and then the mixers; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10_000, help="rounds of each mixer")
    parser.add_argument("--worlds", type=int, default=50, help="worlds that are opened")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report_worlds = repeat_worlds(options.worlds)
    with mpigossip.world() as world:
        grown = report_worlds(world)
        for name in MIXERS:
            grown |= repeat_rounds(world, name, options.rounds)
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
