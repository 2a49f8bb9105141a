"""Tests that use MPI: its library, puts to each neighbour, sums in a node, and GPU memory.

The tests are collective, and their findings are complete on rank 0.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigossip.analysis import trials
from mpigossip.analysis.findings import UNTESTED, Finding, Findings, watched
from mpigossip.analysis.timing import stopwatch
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.config.errors import Failure, UserError
from mpigossip.config.readable import pluralize
from mpigossip.graphs import Graph, graph
from mpigossip.mixing.device.proof import (
    open_mpi_pml,
    reported_gpu_support,
    ucx_is_threaded,
    ucx_version,
)
from mpigossip.mixing.transports import probe

REPEATS = 5
"""Number of times that each put is measured."""
SMALL = 8
"""Number of bytes of the message with which the latency is measured."""
SLOW = 3.0
"""A link is reported as slow if its time is more than this multiple of the median time."""
LEVELS = "SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"
"""Thread levels of MPI."""


def all_tests(
    options, world: MPIWorld, slots: Sequence[str], devices: str, findings: Findings
) -> None:
    """Run all tests that need MPI, and add their findings.

    These tests can't run in separate processes, because a rank can't be started twice in a job.
    Instead, the whole job ends if a test reaches its time limit. The tests for which this is most
    likely come last, and rank 0 prints the findings so far before each test.

    :param options: options of the command
    :param world: all ranks
    :param slots: devices of this rank's slots
    :param devices: the same devices, in the form of `node.devices`
    :param findings: list to which findings are added
    """
    findings.append(library(world))
    test_graph = graph(options.graph, world.size)
    size = max(options.megabytes << 20, 1 << 20)
    several = world.size > 1
    on_gpus = not world.agree(int(not slots[0].startswith("cuda")))

    def test(name: str, work: Callable[[list[str]], Finding]) -> None:
        if world.rank == 0 and not options.json:
            findings.show()
        with watched(world, options, name, findings) as activities:
            activities.append(f"the test of {name}")
            before = probe.LIMIT_S
            # The transport must give up before the whole test reaches its time limit.
            probe.LIMIT_S = min(before, options.timeout / 3)
            findings.append(attempted(world, name, lambda: work(activities)))
            probe.LIMIT_S = before

    test("put", partial(puts, world, test_graph, size))
    if len(slots) * world.nodes.per_node > 1:
        test("node", lambda activities: sums(world, slots, options.timeout))
    test("gpu-aware", lambda activities: gpu_awareness(world, on_gpus))
    for transport in (probe.TRANSPORTS if on_gpus else ("read", "put")) if several else ():
        test("exchange", partial(trials.rates, options, world, test_graph, slots, transport))
    if several:
        test("routes", partial(trials.routes, world, test_graph, slots, options.sizes[0]))
    if several and world.nodes.count > 1:
        test(
            "training",
            lambda activities: trials.compared(world, devices, options.graph, options.timeout),
        )
    findings += untested(world)


def untested(world: MPIWorld) -> list[Finding]:
    """Return a finding that names the tests that were omitted, and a command that runs them.

    The list is empty if nothing was omitted.

    :param world: all ranks
    """
    if world.size == 1:
        text = "MPI between ranks (rows exchange, routes) and training, because there is one rank"
        remedy = "test them with `mpirun -n 2 mpigossip doctor`, or with srun over two hosts"
    elif world.nodes.count == 1:
        text = "training, because all ranks form one node"
        remedy = "start the doctor on two hosts, or pass --ranks-per-node 1"
    else:
        return []
    return [Finding(UNTESTED, text, "note", remedy)]


def attempted(world: MPIWorld, name: str, work: Callable[[], Finding]) -> Finding:
    """Run a test and return its finding; collective.

    If the test raises an error on any rank, return a finding of the level "wrong" that names the
    rank and its error.

    :param world: all ranks
    :param name: name of the finding
    :param work: the test, which returns its finding
    """
    finding = Finding(name, "")
    problem = ""
    try:
        finding = work()
    except (MPI.Exception, Failure, UserError, RuntimeError, OSError) as error:
        problem = str(error).splitlines()[0] or type(error).__name__
    problems = world.gather(problem) or []
    ranks = [rank for rank, text in enumerate(problems) if text]
    if not ranks:
        return finding
    first = problems[ranks[0]]
    where = f"rank {ranks[0]} on {world.hosts[ranks[0]]}"
    more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return Finding(name, "failed", "wrong", f"{where}{more}: {first}")


def sums(world: MPIWorld, slots: Sequence[str], timeout_s: float) -> Finding:
    """Test the sums over the slots of each node, with each implementation (`node.sums`).

    :param world: all ranks
    :param slots: devices of this rank's slots
    :param timeout_s: seconds that each wait for other ranks may take
    :raises GroupError: if slots can't be connected, or the sums are wrong
    """
    count = len(slots) * world.nodes.per_node
    elements = 1 << 20
    seconds = trials.averaged_in_node(slots, timeout_s, world, elements)
    rates = {order: trials.rate(count, elements, s) for order, s in seconds.items()}
    shown = ", ".join(f'{rate / 1e9:.1f} GB/s (node.sums = "{o}")' for o, rate in rates.items())
    text = f"{count} slots per node, correct sums, from each slot {shown}"
    return Finding("node", text, data={"slots": count, "bytes_per_second": rates})


def library(world: MPIWorld) -> Finding:
    """Report the MPI library, its thread level, its network layer, and the number of ranks."""
    name = " ".join(MPI.Get_library_version().split("\n")[0].split())[:80].strip("\0 ")
    level = next(
        name_of_level
        for name_of_level in LEVELS
        if getattr(MPI, f"THREAD_{name_of_level}") == MPI.Query_thread()
    )
    text = f"{name}, MPI {'.'.join(map(str, MPI.Get_version()))}, thread level {level}, "
    pml, ucx = open_mpi_pml(), ".".join(map(str, ucx_version()))
    threaded = ucx_is_threaded()
    if pml:
        text += f"messages by its component {pml}, "
    if ucx:
        support = {None: "unknown", True: "yes", False: "no"}[threaded]
        text += f"UCX {ucx} (THREAD_MULTIPLE: {support}), "
    text += pluralize(world.size, "rank")
    data = {"library": name, "thread_level": level, "size": world.size}
    data |= {"pml": pml, "ucx": ucx, "ucx_threads": threaded}
    if pml and pml != "ucx" and threaded is False:
        remedy = (
            f"UCX {ucx} was built without --enable-mt, so Open MPI uses {pml} in its place, which "
            "sends over TCP between hosts: load a UCX built with --enable-mt (ucx_info -v shows it)"
        )
        return Finding("mpi", text, "note", remedy, data)
    if level != "MULTIPLE":
        remedy = (
            "without MULTIPLE there is no progress thread: exchanges do not overlap with "
            "computation; load an MPI that was built with thread support"
        )
        return Finding("mpi", text, "note", remedy, data)
    slurm_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if world.size == 1 and slurm_nodes.isdigit() and int(slurm_nodes) > 1:
        remedy = (
            f"this is one process in a job of {slurm_nodes} nodes: start it with srun to test them"
        )
        return Finding("mpi", text, "note", remedy, data)
    return Finding("mpi", text, data=data)


# -- puts -------------------------------------------------------------------------------------


def puts(world: MPIWorld, test_graph: Graph, size: int, activities: list[str]) -> Finding:
    """Test MPI's Put and Flush from all ranks to their out-neighbours at the same time.

    :param world: all ranks
    :param test_graph: the graph, of which at most `trials.ROUNDS` rounds are tested
    :param size: bytes of the large put
    :param activities: list to which the present activity is added
    """
    inbox = np.zeros(max(test_graph.degree, 1) * size, np.uint8)
    window = MPI.Win.Allocate(inbox.nbytes, 1, comm=world.comm)
    links: list[tuple[int, int, float, float]] = []
    problems: list[str] = []
    try:
        memory = np.asarray(window.tomemory()).view(np.uint8)
        window.Lock_all()
        for t in range(min(test_graph.period or trials.ROUNDS, trials.ROUNDS)):
            activities.append(f"puts in round {t}")
            links += _round(world, test_graph, t, size, window)
            window.Sync()
            world.barrier()
            problems += _check(world, test_graph, t, size, memory)
            world.barrier()
        window.Unlock_all()
    finally:
        del memory
        window.Free()
    return _judge(world, links, problems, size)


def _targets(world: MPIWorld, test_graph: Graph, t: int) -> list[tuple[int, int]]:
    """Return the targets of this rank's puts in round ``t``, as pairs (rank, index in its inbox).

    The targets are the out-neighbours of this rank. A single rank puts to itself.
    """
    if world.size == 1:
        return [(0, 0)]
    return [
        (int(rank), [int(j) for j in test_graph.neighbours(t, int(rank))[0]].index(world.rank))
        for rank in test_graph.receivers(t, world.rank)
    ]


def _round(world: MPIWorld, test_graph: Graph, t: int, size: int, window) -> list:
    """Measure the puts of round ``t``; return (from, to, seconds, seconds) for each link.

    The first time is for a small put, the second for a large put. Each is the shortest time of
    several repeats.

    :param world: all ranks
    :param test_graph: the graph
    :param t: number of the round
    :param size: bytes of the large put
    :param window: window to put into
    """
    message = np.full(size, (world.rank + t) % 251, np.uint8)
    targets = _targets(world, test_graph, t)

    def put(part: np.ndarray, target: int, index: int) -> None:
        window.Put([part, MPI.BYTE], target, [index * size, part.size, MPI.BYTE])
        window.Flush(target)

    best = {target: [float("inf"), float("inf")] for target in targets}
    for _ in range(REPEATS):
        world.barrier()
        for target, index in targets:
            for kind, part in enumerate((message[:SMALL], message)):
                spent = stopwatch(partial(put, part, target, index))
                best[target, index][kind] = min(best[target, index][kind], spent)
    return [(world.rank, target, *seconds) for (target, _), seconds in best.items()]


def _check(world: MPIWorld, test_graph: Graph, t: int, size: int, memory: np.ndarray) -> list[str]:
    """Return a text for each source whose large put of round ``t`` arrived with wrong bytes.

    :param world: all ranks
    :param test_graph: the graph
    :param t: number of the round
    :param size: bytes of the large put
    :param memory: bytes of this rank's window, with ``size`` bytes for each source
    """
    sources = [0] if world.size == 1 else [int(j) for j in test_graph.neighbours(t, world.rank)[0]]
    return [
        f"rank {world.rank} received wrong data from rank {source}"
        for index, source in enumerate(sources)
        if not (memory[index * size : (index + 1) * size] == (source + t) % 251).all()
    ]


def _judge(world: MPIWorld, links: list, problems: list[str], size: int) -> Finding:
    """Return the finding on the puts of all ranks, complete on rank 0 only; collective.

    :param world: all ranks
    :param links: measurements of this rank, from :func:`_round`
    :param problems: texts of this rank, from :func:`_check`
    :param size: bytes of the large put
    """
    gathered = world.gather((links, problems))
    if gathered is None:
        return Finding("put", "")
    links = [link for part, _ in gathered for link in part]
    problems = [text for _, texts in gathered for text in texts]
    if problems:
        remedy = (
            f"{problems[0]} ({len(problems)} cases): this MPI's one-sided messages are not reliable"
        )
        return Finding("put", "wrong data", "wrong", f"{remedy}; try another MPI or transport")
    if not links:
        return Finding("put", "the graph has no neighbours", "note", "pass another --graph")
    # With two links, the median must be the faster one, so that the other is reported as slow.
    small = statistics.median_low(link[2] for link in links)
    large = statistics.median_low(link[3] for link in links)
    worst = max(links, key=lambda link: link[3])

    def name(link) -> str:
        return (
            f"rank {link[0]} on {world.hosts[link[0]]} to rank {link[1]} on {world.hosts[link[1]]}"
        )

    text = (
        f"{pluralize(len(links), 'link')}: {SMALL} B in {small * 1e6:.1f} us, {size >> 20} MiB at "
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
        remedy = (
            f"{name(worst)} is {worst[3] / large:.1f} x slower than the median link: check the "
            "network cards and cables of these hosts, or ask the scheduler for other hosts"
        )
        return Finding("put", text, "note", remedy, data)
    return Finding("put", text, data=data)


# -- GPU-awareness ----------------------------------------------------------------------------


def gpu_awareness(world: MPIWorld, on_gpus: bool) -> Finding:
    """Report whether the MPI library claims to support GPU memory.

    Exchanges between GPUs, which are tested separately, show whether this claim is true.

    :param world: all ranks
    :param on_gpus: whether the slots of all ranks are GPUs
    """
    support = reported_gpu_support(world.comm)
    text = "MPI reports " + ", ".join(
        f"{name} {'yes' if yes else 'no'}" for name, yes in support.items()
    )
    text += "" if on_gpus else "; not all ranks have a GPU, so this is not tested"
    if any(support.values()) or not on_gpus:
        return Finding("gpu-aware", text, data=support)
    remedy = "MPI can't send GPU memory; a GPU-aware MPI of the site may be faster"
    return Finding("gpu-aware", text, "note", remedy, support)
