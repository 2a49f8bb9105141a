"""Cost of a step on this machine: compute, node-local time, network; measured or given."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from mpigossip.cluster.world import World
from mpigossip.config import GraphSection, Job, JobError
from mpigossip.config.readable import pluralize
from mpigossip.groups.devices import slots_of
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.wire import Wire
from mpigossip.training.costs import Subject, data_or_stand_in
from mpigossip.training.machines import CODING_RATE, SUM_RATE, Machine
from mpigossip.training.time_model import hops

LATENCY_S = 10e-6
BANDWIDTH = 12.5e9
"""Assumed where nothing is given and there is no neighbour to measure: 10 µs, 100 Gbit/s."""
SMALL = 512
"""Elements of the message that shows the latency."""
BURST = 8
BURSTS = 6
"""Rounds that are timed together, fewer where the time is short; how often at least."""
LONGEST_S = 0.05
"""Seconds of work at most before each of them."""
WARM_UP = 3
LEAST = 8
MOST = 60
"""Steps that are run before measuring, and at least and at most measured."""


WORDS = {
    "compute_s": "compute",
    "node_s": "node-local",
    "latency_s": "latency",
    "bandwidth": "bandwidth",
    "combine_rate": "sum",
    "coding_rate": "coding",
    "jitter": "jitter",
}
"""What a user may say of the machine, and the names of these figures in `Machine.sources`."""


def examine(
    what: Subject, world: World, given: Mapping[str, float | None], budget_s: float
) -> Machine:
    """Measure what isn't given, on all ranks of the launcher at once; collective under MPI.

    ``given``: by the names of `WORDS`; None as if it were left out.

    Compute is a real step of the job on one node. Latency and bandwidth are those of whole rounds
    with the job's message between the ranks at hand, so that they hold what MPI and Python add.
    Raises JobError where the job's devices are not here and compute_s isn't given.
    """
    on_cpu = slots_of(what.job.node.devices)[0] == "cpu"
    compute_s = given.get("compute_s")
    if compute_s is None:
        compute_s, node_s, update_s, jitter = _steps(what, world, budget_s)
        sources = dict.fromkeys(("compute", "node-local", "jitter"), "measured")
    else:
        node_s = 0.0
        update_s = 0.0
        jitter = 0.0
        sources = dict.fromkeys(("node-local", "jitter"), "not given")
    # this processor says nothing of a GPU's rates
    combine_rate = world.nodes.per_node * (_combine_rate(what) if on_cpu else SUM_RATE)
    coding_rate = 0.0 if on_cpu else world.nodes.per_node * CODING_RATE
    sources |= dict.fromkeys(("sum", "coding"), "measured" if on_cpu else "assumed")
    summed = given.get("combine_rate") or combine_rate
    work_s = compute_s if on_cpu else 0.0
    wire, where = _network(what, world, summed, budget_s, work_s)
    latency_s, bandwidth, global_latency_s, global_bandwidth = wire
    network = "measured" if world.nodes.count > 1 else "assumed"
    sources |= dict.fromkeys(("latency", "bandwidth"), network)
    sources |= {WORDS[name]: "given" for name, value in given.items() if value is not None}
    machine = Machine(
        compute_s,
        node_s,
        update_s,
        latency_s,
        bandwidth,
        global_latency_s,
        global_bandwidth,
        combine_rate,
        sources,
        where,
        jitter,
        coding_rate,
        coding_rate,
    )
    return machine.given(given)


def _steps(what: Subject, world: World, budget_s: float) -> tuple[float, ...]:
    """Median seconds of a step of one node: compute, node-local, update; the jitter of compute.

    Means over the ranks. The jitter is half of what lies between the quantiles at 16 and 84 %, as
    a share of the median: a normal distribution's deviation, which a rare pause doesn't move.
    """
    from mpigossip.cluster.nodes import isolate_node
    from mpigossip.cluster.ranks import SingleProcess
    from mpigossip.groups import devices
    from mpigossip.training import assemble

    job = replace(what.job, graph=GraphSection(name="identity"))
    with world.raise_together(JobError):
        missing = devices.device_problems(job.node.devices)
        if missing:
            raise JobError([*missing, "or say how long forward and backward take: --compute 80ms"])
    # no other node: the ranks of one step together
    alone = isolate_node(world) if world.nodes.per_node > 1 else SingleProcess()
    with world.raise_together(JobError):
        assembly = assemble.assemble(_with_data(job, what), alone, 1)
    try:
        found: dict[str, list[float]] = {"compute_s": [], "node_s": [], "exchange_s": []}
        world.barrier()
        began = time.perf_counter()
        for index in range(WARM_UP + MOST):
            record = assembly.trainer.step()
            if index < WARM_UP:
                began = time.perf_counter()
                continue
            for name, values in found.items():
                values.append(record.seconds[name])
            late = time.perf_counter() - began > budget_s and len(found["node_s"]) >= LEAST
            if world.agree(int(late)):
                break
    finally:
        assembly.close()
    mine = [statistics.median(values) for values in found.values()]
    tenths = statistics.quantiles(found["compute_s"], n=25)  # 4 % each
    mine.append((tenths[20] - tenths[3]) / 2 / mine[0] if mine[0] else 0.0)
    every = world.broadcast(world.gather(mine))
    means = [statistics.fmean(each) for each in zip(*every, strict=True)]
    return tuple(means)


def _with_data(job: Job, what: Subject) -> Job:
    """The job; where its data aren't here, on such that are made up, as many as its steps need."""
    found, missing = data_or_stand_in(job)
    found.close()
    if missing and found.dtype == torch.int64:
        raise JobError(
            f"{missing}; tokens can't be made up: give a packed text, or say how long forward and "
            "backward take: --compute 80ms"
        )
    count = max(job.data.samples, what.per_step * (WARM_UP + MOST))
    made_up = replace(job.data, source="synthetic", samples=count, augment="none")
    return replace(job, data=made_up) if missing else job


def _best(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _combine_rate(what: Subject) -> float:
    a, b, out = (torch.ones(1, what.flat.size) for _ in range(3))
    return 4 * what.flat.size / _best(lambda: weighted_sum((0.5, 0.5), (a, b), out))


def coding_seconds(wire: Wire, width: int) -> tuple[float, float]:
    """Seconds to encode a vector of this width, and to decode one; (0, 0) for exact wires."""
    if wire.exact:
        return 0.0, 0.0
    short = min(width, 1 << 20)
    values = torch.randn(short)
    out = torch.empty(short)
    codes = torch.cat([code.flatten().view(torch.uint8) for code in wire.pack(values, (0,) * 3, 0)])
    encode = _best(lambda: wire.pack(values, (0, 0, 0), 0), 3)
    decode = _best(lambda: wire.unpack(codes, short, slice(0, short), out), 3)
    return encode * width / short, decode * width / short


def _network(what: Subject, world, combine_rate: float, budget_s: float, work_s: float):
    """((latency, bandwidth, the same of a global average), words on where)."""
    column = world.nodes.inter_node
    per = world.nodes.per_node
    n = column.size
    hosts = pluralize(len(set(world.hosts)), "host")
    where = f"{n} ranks on {hosts}" if per == 1 else f"{n} nodes of {per} ranks on {hosts}"
    if n == 1:
        alone = "this process alone" if per == 1 else f"one node of {per} ranks"
        return (LATENCY_S, BANDWIDTH) * 2, alone
    nbytes = 4 * what.flat.size
    # of a node's ranks each exchanges its part, all at once
    small, large = (
        _rounds(column, what, count, budget_s, work_s) for count in (SMALL, what.flat.size // per)
    )
    fitted = []
    # messages that pass a node's link, and latencies one after the other
    shapes = {ExchangeKind.GOSSIP: (1.0, 1), ExchangeKind.GLOBAL: (2 * (n - 1) / n, hops(n))}
    for kind, (messages, latencies) in shapes.items():
        # what can't be resolved, or a sum dearer than measured alone, counts half as latency
        whole = max(large[kind] - nbytes / combine_rate, large[kind] / 2)
        first = min(small[kind], whole / 2)
        fitted += [first / latencies, messages * nbytes / (whole - first)]
    return tuple(fitted), where


def _rounds(
    world: World, what: Subject, count: int, budget_s: float, work_s: float
) -> dict[ExchangeKind, float]:
    """Median seconds that a one-peer round and a global average of one vector add to work.

    Timed in bursts, as steps follow each other: after a barrier the first round would be late.
    With work of ``work_s`` before each, as in a step: where cores are few the exchange waits for
    them, and for the slowest of those who compute.
    """
    from mpigossip.analysis.bench import arithmetic
    from mpigossip.graphs import graph

    node = what.job.node
    mixer = open_mixer(
        graph("one-peer-exponential", world.size),
        MessageLayout((count,)),
        world,
        same_host=node.same_host,
        timeout_s=node.timeout_s,
    )
    clock = iter(range(1 << 60))
    work = arithmetic(world.comm, min(work_s, LONGEST_S)) if work_s else lambda: None

    def burst(kind: ExchangeKind, rounds: int) -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            work()
            if kind is ExchangeKind.LOCAL:
                continue
            t = next(clock) if kind is ExchangeKind.GOSSIP else 0
            mixer.outbox(t)[0][0].fill_(1.0)
            mixer.start(kind, t)
            mixer.finish()
        return (time.perf_counter() - began) / rounds

    # the second: the first makes connections
    longest = max(world.comm.allgather([burst(ExchangeKind.GLOBAL, 1) for _ in range(2)][1]))
    times: dict[ExchangeKind, list[float]] = {
        ExchangeKind.LOCAL: [],
        ExchangeKind.GOSSIP: [],
        ExchangeKind.GLOBAL: [],
    }
    rounds = max(1, min(BURST, int(budget_s / 4 / BURSTS / len(times) / longest)))
    began = time.perf_counter()
    late = 0
    while not late or len(times[ExchangeKind.GOSSIP]) < BURSTS:
        for kind, kept in times.items():
            world.barrier()
            kept.append(burst(kind, rounds))
        late = world.agree(int(time.perf_counter() - began > budget_s / 4))
    mixer.close()
    # the first is a warm-up
    mine = [statistics.median(kept[1:]) for kept in times.values()]
    every = zip(*world.comm.allgather(mine), strict=True)
    alone, gossip, everywhere = map(statistics.fmean, every)
    return {
        ExchangeKind.GOSSIP: max(gossip - alone, 1e-6),
        ExchangeKind.GLOBAL: max(everywhere - alone, 1e-6),
    }
