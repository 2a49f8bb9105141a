"""Measurement of this machine for `mpigossip plan`: computation, averages in a node, network."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from mpigossip.algorithms.cadence import period_of, periods_of
from mpigossip.analysis.timing import Work, arithmetic, take_turns
from mpigossip.cluster.local_devices import slots_of
from mpigossip.cluster.world import World
from mpigossip.config import GraphSection, Job, JobError
from mpigossip.config.readable import pluralize
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.wire import Wire
from mpigossip.training import shape
from mpigossip.training.costs import Subject, data_or_stand_in
from mpigossip.training.machines import CODING_RATE, SUM_RATE, Machine
from mpigossip.training.time_model import hops

LATENCY_S = 10e-6
BANDWIDTH = 12.5e9
"""Latency (s) and bandwidth (B/s) that are assumed if they are not given, and can't be measured
because there is only one node: 10 µs and 100 Gbit/s."""
SMALL = 512
"""Number of elements of the message with which the latency is measured."""
BURST = 8
"""Largest number of rounds that are timed together."""
BURSTS = 6
"""Smallest number of such bursts, including the first, which is not counted."""
LONGEST_S = 0.05
"""Longest time, in seconds, for which the cores compute before each measured round."""
LONGEST_SUM = 1 << 26
"""Largest number of elements of the sum that is timed."""
WARM_UP = 3
MIN_STEPS = 8
MAX_STEPS = 60
"""Number of steps that are run before measuring, and the smallest and largest number of measured
steps."""


WORDS = {
    "compute_s": "compute",
    "node_s": "node-local",
    "update_s": "update",
    "latency_s": "latency",
    "bandwidth": "bandwidth",
    "global_latency_s": "all-reduce latency",
    "global_bandwidth": "all-reduce bandwidth",
    "combine_rate": "sum",
    "coding_rate": "coding",
    "jitter": "jitter",
}
"""Properties of the machine that a user may give as options, each with its name in
`Machine.sources`."""


def examine(
    what: Subject, world: World, given: Mapping[str, float | None], budget_s: float
) -> Machine:
    """Return the properties of this machine, and measure those that are not given; collective.

    The time of computation is measured in real steps of the job, for each node on its own. If it is
    given, the times of averages in the node and of the update are not measured, but 0 unless they
    are given, too. Latency and bandwidth are measured in whole rounds between the ranks with a
    float32 vector of the size of the model, and therefore include the time that MPI and Python
    need. For a single node, they are assumed.

    :param what: the job and its sizes
    :param world: all ranks
    :param given: known values by the names of `WORDS`; None: not known. A given "combine_rate" or
        "coding_rate" is the rate of one slot: each slot handles its own shard.
    :param budget_s: seconds that measuring may take, approximately
    :raises JobError: if compute_s is not given, and the job can't be trained here, for example
        because its devices are missing
    """
    on_cpu = slots_of(what.job.node.devices)[0] == "cpu"
    compute_s = given.get("compute_s")
    if compute_s is None:
        compute_s, node_s, update_s, jitter = _steps(what, world, budget_s)
        sources = dict.fromkeys(("compute", "node-local", "update", "jitter"), "measured")
    else:
        node_s = 0.0
        update_s = 0.0
        jitter = 0.0
        sources = dict.fromkeys(("node-local", "update", "jitter"), "not given")
    slots = shape.slots(what.job, world)
    names = "combine_rate", "coding_rate"
    given = {n: slots * v if v and n in names else v for n, v in given.items()}
    # A rate that is measured on this processor does not apply to a GPU.
    combine_rate = world.nodes.per_node * _combine_rate(what) if on_cpu else slots * SUM_RATE
    coding_rate = 0.0 if on_cpu else slots * CODING_RATE
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
    return machine.with_values(given)


def _steps(what: Subject, world: World, budget_s: float) -> tuple[float, ...]:
    """Measure steps of one node; return the seconds of the parts of a step, and the jitter.

    The parts are computation, averaging in the node, and update; their seconds are medians over
    steps. The jitter is half the distance between the 16 % and 84 % quantiles of the computation
    time, divided by its median. For a normal distribution, this is the relative standard deviation;
    unlike the latter, it is not changed by rare pauses. All values are means over ranks.
    Collective.

    :param what: the job and its sizes
    :param world: all ranks
    :param budget_s: seconds that measuring may take, approximately
    :raises JobError: if the job can't be trained here
    """
    from mpigossip.cluster.nodes import isolate_node
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.groups import devices
    from mpigossip.training import assemble

    job = replace(what.job, graph=GraphSection(name="identity"))
    with world.raise_together(JobError):
        missing = devices.device_problems(job.node.devices)
        if missing:
            raise JobError(
                [*missing, "or pass the time of forward and backward, such as --compute 80ms"]
            )
    # The ranks of each node run the steps together, without exchanges with other nodes.
    alone = isolate_node(world) if world.nodes.per_node > 1 else SingleProcess()
    with world.raise_together(JobError):
        assembly = assemble.assemble(_with_data(fit_nodes(job, 1), what), alone, 1)
    try:
        seconds: dict[str, list[float]] = {"compute_s": [], "node_s": [], "exchange_s": []}
        world.barrier()
        start = time.perf_counter()
        for index in range(WARM_UP + MAX_STEPS):
            record = assembly.trainer.step()
            if index < WARM_UP:
                start = time.perf_counter()
                continue
            for name, values in seconds.items():
                values.append(record.seconds[name])
            late = time.perf_counter() - start > budget_s and len(seconds["node_s"]) >= MIN_STEPS
            if world.agree(int(late)):
                break
    finally:
        assembly.close()
    medians = [statistics.median(values) for values in seconds.values()]
    tenths = statistics.quantiles(seconds["compute_s"], n=25)  # These are 4 %, 8 %, …, 96 %.
    medians.append((tenths[20] - tenths[3]) / 2 / medians[0] if medians[0] else 0.0)
    rank_medians = world.broadcast(world.gather(medians))
    means = [statistics.fmean(values) for values in zip(*rank_medians, strict=True)]
    return tuple(means)


def fit_nodes(job: Job, n: int) -> Job:
    """Return the job without lists that it gives to another number of nodes than ``n``.

    All nodes then have the longest period of such a list as `cadence.period`, or equal weights.
    """
    cadence = job.cadence
    weights = job.algorithm.node_weights
    periods = periods_of(cadence.options)
    if periods and len(periods) != n:
        cadence = replace(cadence, options=cadence.options | {"period": period_of(cadence.options)})
        weights = "equal" if weights == "steps" else weights
    if not isinstance(weights, str) and len(weights) != n:
        weights = "equal"
    return replace(job, cadence=cadence, algorithm=replace(job.algorithm, node_weights=weights))


def _with_data(job: Job, what: Subject) -> Job:
    """Return the job; if this host lacks its data, replace them by synthetic samples.

    :param job: the job
    :param what: sizes of the job, which tell how many samples the measurement needs
    :raises JobError: if the missing data are tokens, for which there are no synthetic samples
    """
    dataset, missing = data_or_stand_in(job)
    dataset.close()
    if missing and dataset.dtype == torch.int64:
        raise JobError(
            f'data.source = "{job.data.source}" is not on this host, and there are no synthetic '
            "tokens: set data.source to a packed text, or pass the time of forward and backward, "
            "such as --compute 80ms"
        )
    count = max(job.data.samples, what.per_step * (WARM_UP + MAX_STEPS))
    synthetic = replace(job.data, source="synthetic", samples=count, augment="none")
    return replace(job, data=synthetic) if missing else job


def _combine_rate(what: Subject) -> float:
    """Measure the bytes/s at which this rank adds a received vector to a weighted sum."""
    elements = min(what.flat.size, LONGEST_SUM)
    a, b, out = (torch.ones(1, elements) for _ in range(3))
    (times,) = take_turns([lambda: weighted_sum((0.5, 0.5), (a, b), out)])
    return 4 * elements / statistics.median(times)


def coding_seconds(wire: Wire, width: int) -> tuple[float, float]:
    """Measure the seconds to encode and to decode a vector of ``width`` elements.

    For long vectors, at most 2²⁰ elements are timed, and the times are extrapolated. The result is
    (0, 0) for a wire in full precision.
    """
    if wire.exact:
        return 0.0, 0.0
    short = min(width, 1 << 20)
    values = torch.randn(short)
    out = torch.empty(short)
    codes = torch.cat([code.flatten().view(torch.uint8) for code in wire.pack(values, (0,) * 3, 0)])
    works: list[Work] = [
        lambda: wire.pack(values, (0, 0, 0), 0),
        lambda: wire.unpack(codes, short, slice(0, short), out),
    ]
    encode, decode = map(statistics.median, take_turns(works, least=3))
    return encode * width / short, decode * width / short


def _network(what: Subject, world, combine_rate: float, budget_s: float, work_s: float):
    """Return latency (s) and bandwidth (bytes/s) of each kind of exchange, and a text on the ranks.

    The four numbers are for GOSSIP, then for GLOBAL. With a single node, they are assumed;
    otherwise, they are measured, which is collective.

    :param what: the job and its sizes
    :param world: all ranks
    :param combine_rate: rate, in bytes per second, at which a node adds vectors
    :param budget_s: seconds that measuring may take, approximately
    :param work_s: seconds for which the cores compute before each round
    """
    column = world.nodes.inter_node
    per = world.nodes.per_node
    n = column.size
    hosts = pluralize(len(set(world.hosts)), "host")
    where = f"{n} ranks on {hosts}" if per == 1 else f"{n} nodes of {per} ranks on {hosts}"
    if n == 1:
        description = "this process only" if per == 1 else f"one node of {per} ranks"
        return (LATENCY_S, BANDWIDTH) * 2, description
    nbytes = 4 * what.flat.size
    # All ranks of a node exchange at the same time, each its own shard.
    small, large = (
        _rounds(column, what, count, budget_s, work_s) for count in (SMALL, what.flat.size // per)
    )
    fitted = []
    # For each kind: messages that a node sends over its link, and latencies one after the other.
    shapes = {ExchangeKind.GOSSIP: (1.0, 1), ExchangeKind.GLOBAL: (2 * (n - 1) / n, hops(n))}
    for kind, (messages, latencies) in shapes.items():
        # The time for adding vectors is subtracted, but at most half of the measured time: the
        # addition may have been slower when it was measured alone.
        time = max(large[kind] - nbytes / combine_rate, large[kind] / 2)
        first = min(small[kind], time / 2)
        fitted += [first / latencies, messages * nbytes / (time - first)]
    return tuple(fitted), where


def _rounds(
    world: World, what: Subject, elements: int, budget_s: float, work_s: float
) -> dict[ExchangeKind, float]:
    """Return the seconds by which each kind of exchange lengthens a step; collective.

    They are means over ranks of medians over measurements, and at least 1e-6. The kinds are a
    one-peer round and a global average of one vector. Consecutive rounds are timed together,
    because the first round after a barrier takes longer. Before each round, the cores compute as in
    a step, because computation can delay an exchange if there are few cores, and because an
    exchange waits for the slowest rank.

    :param world: inter-node ranks of this rank, which exchange with each other
    :param what: the job and its sizes
    :param elements: number of elements of the vector
    :param budget_s: seconds that measuring may take, approximately
    :param work_s: seconds for which the cores compute before each round
    """
    from mpigossip.graphs import graph

    node = what.job.node
    mixer = open_mixer(
        graph("one-peer-exponential", world.size),
        MessageLayout((elements,)),
        world,
        same_host=node.same_host,
        timeout_s=node.timeout_s,
    )
    clock = count()
    work = arithmetic(world.comm, min(work_s, LONGEST_S)) if work_s else lambda: None

    def one_step(kind: ExchangeKind) -> None:
        """Compute, then exchange unless the step is local."""
        work()
        if kind is ExchangeKind.LOCAL:
            return
        t = next(clock) if kind is ExchangeKind.GOSSIP else 0
        mixer.outbox(t)[0][0].fill_(1.0)
        mixer.start(kind, t)
        mixer.finish()

    kinds = ExchangeKind.LOCAL, ExchangeKind.GOSSIP, ExchangeKind.GLOBAL
    steps = [partial(one_step, kind) for kind in kinds]
    (first,) = take_turns(steps[-1:], world.comm, least=1)
    longest = max(world.comm.allgather(first[0]))
    budget_s = budget_s / 4
    calls = max(1, min(BURST, int(budget_s / BURSTS / len(kinds) / longest)))
    times = take_turns(steps, world.comm, calls=calls, least=BURSTS - 1, seconds=budget_s)
    mixer.close()
    values = zip(*world.comm.allgather([statistics.median(each) for each in times]), strict=True)
    alone, gossip, all_nodes = map(statistics.fmean, values)
    return {
        ExchangeKind.GOSSIP: max(gossip - alone, 1e-6),
        ExchangeKind.GLOBAL: max(all_nodes - alone, 1e-6),
    }
