"""Tests that take MPI: what it is, whether it takes GPU memory, and puts to each neighbour.

All functions are collective; findings are complete on rank 0.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.analysis import inside_node, trial_run
from mpigossip.analysis.findings import Finding, complain
from mpigossip.cluster.ranks import World
from mpigossip.config.errors import Failure
from mpigossip.config.readable import counted
from mpigossip.graphs import Graph, graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout, Mixer
from mpigossip.mixing.device.aware import asked, proven

REPEATS = 5
ROUNDS = 16
"""Rounds of the graph that are tried, at most."""
SMALL = 8
"""Bytes of the message whose time is the latency."""
SLOW = 3.0
"""A link this many times slower than the median is named."""
LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


def all_tests(options, world: World, slots: Sequence[str], devices: str) -> list[Finding]:
    """Everything that needs MPI, the one that could end the process last.

    ``slots``: of this rank; ``devices``: as `node.devices`.
    """
    found = [library(world)]
    tried = graph(options.graph, world.size)
    nodes = world.nodes.count
    size = max(options.megabytes << 20, 1 << 20)
    several = world.size > 1

    def test(name: str, work: Callable[[list[str]], Finding]) -> None:
        with watched(world, options.timeout) as now:
            now.append(f"the test of {name}")
            found.append(attempted(world, name, lambda: work(now)))

    test("put", partial(puts, world, tried, size))
    for way in ("read", "put") if several else ():
        test("windows", partial(windows, world, tried, size, way))
    if len(slots) * world.nodes.per_node > 1:
        test("node", lambda now: sums(world, slots, options.timeout))
    if several and nodes > 1:
        test("training", lambda now: trial_run.compared(
            world, devices, options.graph, options.timeout
        ))  # fmt: skip
    test("gpu-aware", partial(gpu_awareness, world, slots))
    if several:
        test("routes", partial(found_routes, world, tried, slots, size))
    return found


def attempted(world: World, name: str, work: Callable[[], Finding]) -> Finding:
    """The finding, or a "wrong" one with the ranks where the test raised; collective.

    A rank that raises where others wait is named when their wait ends.
    """
    found, failed = Finding(name, ""), ""
    try:
        found = work()
    except (MPI.Exception, Failure, RuntimeError, OSError) as error:
        failed = str(error).splitlines()[0] or type(error).__name__
    every = world.gather(failed) or []
    ranks = [rank for rank, text in enumerate(every) if text]
    if not ranks:
        return found
    first, where = every[ranks[0]], f"rank {ranks[0]} on {world.hosts[ranks[0]]}"
    more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return Finding(name, "failed", "wrong", f"{where}{more}: {first}")


def sums(world: World, slots: Sequence[str], timeout_s: float) -> Finding:
    """Sums between the slots of each node, by each order that they can have."""
    count, elements = len(slots) * world.nodes.per_node, 1 << 20
    seconds = inside_node.tested(slots, timeout_s, world, elements)
    rates = {order: inside_node.rate(count, elements, s) for order, s in seconds.items()}
    shown = ", ".join(f'{rate / 1e9:.1f} GB/s (node.sums = "{o}")' for o, rate in rates.items())
    text = f"{count} slots a node, right sums, out of each slot {shown}"
    return Finding("node", text, data={"slots": count, "bytes_per_second": rates})


@contextlib.contextmanager
def watched(world: World, seconds: float) -> Iterator[list[str]]:
    """Ends the job when the block takes longer, saying the last thing put into the list.

    A flush to a host that doesn't answer never returns: there is no other way out of MPI.
    """
    now = ["starting"]

    def end() -> None:
        complain(
            f"rank {world.rank} on {world.hosts[world.rank]}: no end of {now[-1]} within "
            f"{seconds:g} s; ending the job. Look at the network between these hosts, or give "
            "--timeout SECONDS"
        )
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            world.abort()  # which leaves the launcher the time to pass the line on
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield now
    finally:
        timer.cancel()


def library(world: World) -> Finding:
    """Which MPI, its thread level, and the size of the world."""
    name = " ".join(MPI.Get_library_version().split("\n")[0].split())[:80].strip("\0 ")
    level = LEVELS.get(MPI.Query_thread(), "?")
    text = f"{name}, MPI {'.'.join(map(str, MPI.Get_version()))}, thread level {level}, "
    text += counted(world.size, "rank")
    data = {"library": name, "thread_level": level, "size": world.size}
    if level != "MULTIPLE":
        remedy = (
            "below MULTIPLE there is no communication thread: exchanges don't travel while the "
            "model computes; load an MPI built with thread support"
        )
        return Finding("mpi", text, "note", remedy, data)
    wanted = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if world.size == 1 and wanted.isdigit() and int(wanted) > 1:
        remedy = f"this is one process in a job of {wanted} nodes: start it by srun to see them"
        return Finding("mpi", text, "note", remedy, data)
    return Finding("mpi", text, data=data)


# -- puts -------------------------------------------------------------------------------------


def puts(world: World, tried: Graph, size: int, now: list[str]) -> Finding:
    """Raw Put + Flush from every rank to its receivers in each round, all ranks at once."""
    inbox = np.zeros(max(tried.degree, 1) * size, np.uint8)
    window = MPI.Win.Allocate(inbox.nbytes, 1, comm=world.comm)
    links: list[tuple[int, int, float, float]] = []
    wrong: list[str] = []
    try:
        memory = np.asarray(window.tomemory()).view(np.uint8)
        window.Lock_all()
        for t in range(min(tried.period or ROUNDS, ROUNDS)):
            now.append(f"puts in round {t}")
            links += _round(world, tried, t, size, window)
            window.Sync()
            world.barrier()
            wrong += _check(world, tried, t, size, memory)
            world.barrier()
        window.Unlock_all()
    finally:
        del memory
        window.Free()
    return _judge(world, links, wrong, size)


def _targets(world: World, tried: Graph, t: int) -> list[tuple[int, int]]:
    """(rank, place in its inbox) of this rank's receivers; itself in a world of one."""
    if world.size == 1:
        return [(0, 0)]
    return [
        (int(rank), [int(j) for j in tried.neighbours(t, int(rank))[0]].index(world.rank))
        for rank in tried.receivers(t, world.rank)
    ]


def _round(world: World, tried: Graph, t: int, size: int, window) -> list:
    """(from, to, seconds of a small put, of a large one): the best of some repeats."""
    message = np.full(size, (world.rank + t) % 251, np.uint8)
    links = []
    targets = _targets(world, tried, t)
    best = {target: [float("inf"), float("inf")] for target in targets}
    for _ in range(REPEATS):
        world.barrier()
        for target, place in targets:
            for at, part in enumerate((message[:SMALL], message)):
                begin = time.perf_counter()
                window.Put([part, MPI.BYTE], target, [place * size, part.size, MPI.BYTE])
                window.Flush(target)
                spent = time.perf_counter() - begin
                best[target, place][at] = min(best[target, place][at], spent)
    for (target, _), (small, large) in best.items():
        links.append((world.rank, target, small, large))
    return links


def _check(world: World, tried: Graph, t: int, size: int, memory: np.ndarray) -> list[str]:
    sources = [0] if world.size == 1 else [int(j) for j in tried.neighbours(t, world.rank)[0]]
    return [
        f"rank {world.rank} got wrong data from rank {source}"
        for place, source in enumerate(sources)
        if not (memory[place * size : (place + 1) * size] == (source + t) % 251).all()
    ]


def _judge(world: World, links: list, wrong: list[str], size: int) -> Finding:
    gathered = world.gather((links, wrong))
    if gathered is None:
        return Finding("put", "")
    links = [link for part, _ in gathered for link in part]
    wrong = [text for _, texts in gathered for text in texts]
    if wrong:
        remedy = f"{wrong[0]} ({len(wrong)} cases): this MPI's one-sided messages can't be trusted"
        return Finding("put", "wrong data", "wrong", f"{remedy}; try another MPI or transport")
    if not links:
        return Finding("put", "the graph has no neighbours to put to", "note", "name another graph")
    small = statistics.median(link[2] for link in links)
    large = statistics.median(link[3] for link in links)
    worst = max(links, key=lambda link: link[3])

    def name(link) -> str:
        return (
            f"rank {link[0]} on {world.hosts[link[0]]} to rank {link[1]} on {world.hosts[link[1]]}"
        )

    text = (
        f"{counted(len(links), 'link')}: {SMALL} B in {small * 1e6:.1f} us, {size >> 20} MiB at "
        f"{size / large / 1e6:,.0f} MB/s (medians); slowest {size / worst[3] / 1e6:,.0f} MB/s, "
        f"{name(worst)}"
    )
    data: dict[str, Any] = {
        "bytes": size,
        "links": [
            {"from": a, "to": b, "latency_s": s, "bytes_per_second": size / ls}
            for a, b, s, ls in links
        ],
    }
    if worst[3] > SLOW * large:
        remedy = f"{name(worst)} is {worst[3] / large:.1f} x slower than the median link"
        return Finding("put", text, "note", remedy, data)
    return Finding("put", text, data=data)


def windows(world: World, tried: Graph, size: int, way: str, now: list[str]) -> Finding:
    """Whole exchanges by the mixer that training uses, compared with the mixing matrix."""
    mixer = open_mixer(tried, Layout((size // 4,)), world, same_host=way)
    gathered = world.gather(_try_out(world, tried, mixer, now, f"same_host={way}"))
    if gathered is None:
        return Finding("windows", "")
    spent, worst = max(s for s, _ in gathered), max(w for _, w in gathered)
    data = {"same_host": way, "bytes": size, "seconds": spent, "error": worst}
    text = f"exchanges of {size >> 20} MiB, same_host={way}: {spent * 1e3:.1f} ms each"
    if worst > 1e-5:
        return Finding("windows", text, "wrong", OFF.format(worst), data)
    return Finding("windows", text + ", right results", data=data)


OFF = "averages are off by {:.1e}: this MPI's windows can't be trusted here"


def _try_out(
    world: World, tried: Graph, mixer: Mixer, now: list[str], what: str
) -> tuple[float, float]:
    """Median seconds of some rounds and their largest relative error; closes the mixer."""
    seconds, worst = [], 0.0
    try:
        for t in range(min(2 * (tried.period or 4), ROUNDS)):
            now.append(f"exchange {t} with {what}")
            begin = time.perf_counter()
            for (values,) in mixer.outbox(t):
                values.fill_(float(world.rank + 1 + t))
            mixer.start(Kind.GOSSIP, t)
            mixed = mixer.finish()[1]
            seconds.append(time.perf_counter() - begin)
            sources, weights, own = tried.neighbours(t, world.rank)
            expected = own * (world.rank + 1 + t)
            expected += sum(w * (j + 1 + t) for j, w in zip(sources, weights, strict=True))
            off = max(float((values - expected).abs().max()) for (values,) in mixed)
            worst = max(worst, off / max(abs(expected), 1.0))
    finally:
        now.append("closing the mixer")
        mixer.close()
    return statistics.median(seconds), worst


# -- the way to each neighbour ----------------------------------------------------------------


def found_routes(
    world: World, tried: Graph, slots: Sequence[str], size: int, now: list[str]
) -> Finding:
    """How each neighbour is reached and why; for GPUs, by exchanges of their memory."""
    on_gpus = slots[0].startswith("cuda")
    if world.agree(int(not on_gpus)):
        return _judge_routes(world, _routes_on_cpus(world), tried)
    return routes_of_devices(world, tried, slots, size, now)


def _routes_on_cpus(world: World) -> dict[int, str]:
    here = world.hosts[world.rank]
    return {
        rank: "read (the same host: shared memory)" if host == here else "put (another host)"
        for rank, host in enumerate(world.hosts)
        if rank != world.rank
    }


def routes_of_devices(
    world: World, tried: Graph, slots: Sequence[str], size: int, now: list[str]
) -> Finding:
    """The mixer that training uses on these slots: its routes, its time, its results."""
    from mpigossip.mixing.synchronous import Synchronous

    now.append("opening windows on GPU memory")
    width = max(size // 4 // len(slots), 1)
    layout = Layout((width,) * len(slots), devices=tuple(slots))
    mixer = Synchronous(tried, layout, world, on_devices=True)
    routes = mixer.routes
    return _judge_routes(
        world, routes, tried, _try_out(world, tried, mixer, now, "GPU memory"), size
    )


def _judge_routes(
    world: World,
    routes: dict[int, str],
    tried: Graph,
    measured: tuple[float, float] | None = None,
    size: int = 0,
) -> Finding:
    rounds = range(min(tried.period or ROUNDS, ROUNDS))
    neighbours = {int(r) for t in rounds for r in tried.receivers(t, world.rank)}
    mine = [(world.rank, rank, routes[rank]) for rank in sorted(neighbours)]
    gathered = world.gather((mine, measured))
    if gathered is None:
        return Finding("routes", "")
    links = [link for part, _ in gathered for link in part]
    counts = Counter(route for _, _, route in links)
    text = "; ".join(f"{counted(count, 'link')} by {way}" for way, count in counts.items())
    data: dict[str, Any] = {"links": [{"from": a, "to": b, "way": way} for a, b, way in links]}
    if measured is not None:
        spent, worst = (max(one[k] for _, one in gathered) for k in range(2))
        text += f"; exchanges of {size >> 20} MiB: {spent * 1e3:.1f} ms each"
        data |= {"bytes": size, "seconds": spent, "error": worst}
        if worst > 1e-5:
            return Finding("routes", text, "wrong", OFF.format(worst), data)
    slow = [way for way in counts if way.startswith("host")]
    if slow:
        remedy = "messages of GPU memory pass through host memory: " + "; ".join(slow)
        return Finding("routes", text, "note", remedy, data)
    return Finding("routes", text, data=data)


# -- GPU-awareness ----------------------------------------------------------------------------


def gpu_awareness(world: World, slots: Sequence[str], now: list[str]) -> Finding:
    """What MPI says about GPU memory; where every rank has a GPU, whether a put proves it."""
    said = asked(world.comm)
    text = "MPI says " + ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in said.items())
    on_gpu = slots[0].startswith("cuda")
    if world.agree(int(not on_gpu)):
        return Finding("gpu-aware", f"{text}; no GPU on every rank, nothing to prove", data=said)
    now.append("a put into GPU memory (an MPI that isn't GPU-aware may end here)")
    if world.rank == 0 and any(said.values()):
        complain("trying a put into GPU memory; should the job end here, MPI is not GPU-aware")
    works, why = proven(world.comm, [torch.device(slot) for slot in slots])
    data = said | {"proven": works}
    if works:
        return Finding("gpu-aware", why, data=data)
    if any(said.values()):
        remedy = f'{why}: set node.exchange = "host" in every job'
        return Finding("gpu-aware", text, "wrong", remedy, data)
    remedy = "messages pass through host memory; a GPU-aware MPI of the site would be faster"
    return Finding("gpu-aware", text, "note", remedy, data)
