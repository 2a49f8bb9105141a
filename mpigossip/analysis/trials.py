"""Tests that exchange and train: sums in a node, each transport, and a training of 20 steps.

The tests are collective, and their findings are complete on rank 0. The result of the training is
compared with the result of the simulator.
"""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.analysis.bench import room_for_messages
from mpigossip.analysis.findings import Finding
from mpigossip.analysis.timing import stopwatch, take_turns
from mpigossip.cluster.local_devices import slots_of
from mpigossip.cluster.process_groups import is_gpu
from mpigossip.cluster.world import SingleProcess, World
from mpigossip.config import Job
from mpigossip.config.readable import pluralize
from mpigossip.graphs import Graph
from mpigossip.groups.base import Group, GroupError
from mpigossip.groups.devices import make_group
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout, Mixer
from mpigossip.mixing.device.memory import TransportUnavailable
from mpigossip.mixing.synchronous import STAGING_BYTES, Synchronous
from mpigossip.mixing.transports import Transport
from mpigossip.mixing.transports.probe import Probe
from mpigossip.mixing.transports.windows import Windows
from mpigossip.training import assemble

ORDERS = "slots", "nccl"
"""Values of `node.sums` that are tested on GPUs; CPUs have the first one only."""
REPEATS = 2
"""Number of averages in a node that are timed. An earlier one, which opens connections, is not."""
ROUNDS = 16
ROUNDS_TIMED = 4
"""Largest number of rounds of the graph that are tested, and that are timed."""
ROUNDING = 1e-5
"""Largest relative error that is accepted in averages, and in a training on GPUs in comparison with
the simulator."""


def averaged_in_node(
    devices: Sequence[str], timeout_s: float, world: World | None = None, elements: int = 1 << 22
) -> dict[str, float]:
    """Measure the average over the slots of a node with each implementation; collective.

    :param devices: devices of this rank's slots
    :param timeout_s: seconds that each wait for other ranks may take
    :param world: all ranks; None: this process only
    :param elements: number of elements of each slot's shard
    :returns: seconds of an average by name of the implementation (as in `node.sums`); empty if a
        node has one slot
    :raises GroupError, Failure: if slots can't be connected, or the sums are wrong
    """
    several = len(devices) > 1 or (world is not None and world.nodes.per_node > 1)
    seconds = {}
    for order in (ORDERS if is_gpu(devices[0]) else ORDERS[:1]) if several else ():
        group = make_group(tuple(devices), 1, True, timeout_s, world, order)
        try:
            seconds[order] = _averaged(group, elements)
        finally:
            group.close()
    return seconds


def rate(slots: int, elements: int, seconds: float) -> float:
    """Return the bytes per second that each slot sends in an average over ``slots`` slots.

    If a node has L slots, each slot has an array of L shards. It sends (L − 1)/L of this array in
    the reduce-scatter, and equally many bytes in the all-gather.

    :param slots: number of slots
    :param elements: number of float32 elements of a shard
    :param seconds: seconds of an average
    """
    return 2 * (slots - 1) * 4 * elements / seconds


def _averaged(group: Group, elements: int) -> float:
    """Return the shortest time of an average over the slots of a node, in seconds; collective.

    :param group: slots of the node
    :param elements: number of elements of a shard
    :raises GroupError: if the average is wrong
    """
    full = group.zeros(1, elements * group.slots)
    for slot, array in zip(group.local_slots, full, strict=True):
        array.fill_(float(slot))
    _wait(group)

    def average() -> None:
        """Average over the slots of the node; repeating this must not change the result."""
        group.all_gather(group.reduce_scatter_mean(full), full)
        _wait(group)

    (seconds,) = take_turns([average], least=REPEATS)
    for device, array in zip(group.devices, full, strict=True):
        if not bool((array == (group.slots - 1) / 2).all()):
            raise GroupError(
                f"sums over the slots of the node are wrong on {device}: try another node.sums"
            )
    return min(seconds)


def _wait(group: Group) -> None:
    """Wait until all GPUs of this rank's slots have finished their work."""
    for device in group.devices:
        if is_gpu(device):
            torch.cuda.synchronize(device)


# -- exchanges by each transport ---------------------------------------------------------------


def rates(
    options,
    world: World,
    test_graph: Graph,
    slots: Sequence[str],
    transport: str,
    activities: list[str],
) -> Finding:
    """Measure the rate of exchanges by one transport at each size, with all slots and one slot.

    CPUs exchange by the mixer that training uses, and the results are compared with the mixing
    matrix. GPUs exchange as in the test by which training chooses a transport. A transport between
    GPUs that fails this test is reported as a note.

    :param options: options of `mpigossip doctor`
    :param world: all ranks
    :param test_graph: the graph
    :param slots: devices of this rank's slots
    :param transport: name of the transport
    :param activities: list to which the present activity is added
    """
    room = room_for_messages(world)
    seconds_per_byte = 0.0
    worst = 0.0
    measured: dict[str, float] = {}
    data: dict[str, Any] = {"way": transport, "bytes_per_second": measured}
    shown: list[str] = []
    for size, some in product(options.sizes, dict.fromkeys((tuple(slots), tuple(slots[:1])))):
        name = f"{size / 1e6:,.0f} MB x {len(some)}"
        total = size * len(some)
        activities.append(f"exchanges of {name} by {transport}")
        slow = ROUNDS_TIMED * seconds_per_byte * total > options.timeout / 4
        if slow or world.agree(int(total > room or not _on_gpus_fit(size, some))):
            limit = "a quarter of --timeout" if slow else "half of the memory for eight messages"
            shown.append(f"{name} skipped: it would take more than {limit}")
            continue
        try:
            spent, off = _timed(world, test_graph, some, size, transport, activities)
        except TransportUnavailable as error:
            return Finding("exchange", f"{transport}: not proven: {error}", "note", data=data)
        worst = max(worst, off)
        seconds_per_byte = spent / total
        measured[name] = total / spent
        shown.append(f"{name} {total / spent / 1e9:.2f} GB/s")
    text = f"{transport}: {', '.join(shown)}"
    data["error"] = worst
    if worst > ROUNDING:
        return Finding("exchange", text, "wrong", OFF.format(worst), data)
    return Finding("exchange", text, data=data)


def _on_gpus_fit(size: int, slots: Sequence[str]) -> bool:
    """Return whether eight messages per slot fit into half of the free memory of each slot's GPU.

    :param size: bytes of a message
    :param slots: devices of the slots, of which several may be on one GPU; CPUs do not count
    """
    slots_of_gpu = {slot: slots.count(slot) for slot in slots if slot != "cpu"}
    return all(
        16 * size * many <= torch.cuda.mem_get_info(slot)[0] for slot, many in slots_of_gpu.items()
    )


def _timed(
    world: World,
    test_graph: Graph,
    slots: Sequence[str],
    size: int,
    transport: str,
    activities: list[str],
) -> tuple[float, float]:
    """Return the seconds per message on the slowest rank, and the largest relative error.

    On CPUs, the time of a round is divided by the number of neighbours. The error is not measured
    on GPUs, and 0. The call is collective.

    :param world: all ranks
    :param test_graph: the graph
    :param slots: devices of this rank's slots
    :param size: bytes of a message
    :param transport: name of the transport
    :param activities: list to which the present activity is added
    :raises TransportUnavailable: on all ranks, if a transport between GPUs fails
    """
    widths = (max(size // 4, 1),) * len(slots)
    if slots[0] == "cpu":
        layout = MessageLayout(widths)
        mixer = open_mixer(test_graph, layout, world, same_host=transport)
        measured = _try_out(
            world, test_graph, mixer, activities, f"same_host={transport}", ROUNDS_TIMED
        )
        spent, error = (world.comm.allreduce(value, MPI.MAX) for value in measured)
        return spent / max(test_graph.degree, 1), error
    layout = MessageLayout(widths, devices=tuple(slots))

    def on_host(buffers: int) -> Transport:
        windows = Windows(world.comm, layout, buffers, world.timeout_s)
        windows.set_chunk_size(STAGING_BYTES)
        return windows

    return Probe(world.comm, layout, 1, world, on_host).seconds(transport), 0.0


OFF = (
    "averages have a relative error of {:.1e}: windows of this MPI are not reliable here; try "
    "another MPI library"
)
"""Template of the remedy if averages are wrong; the number is the relative error."""


def _try_out(
    world: World,
    test_graph: Graph,
    mixer: Mixer,
    activities: list[str],
    what: str,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """Run some rounds, and close the mixer; return the time of a round and the error of averages.

    The time is the median over rounds, in seconds; the error is the largest relative error. Both
    are values of this rank.

    :param world: all ranks
    :param test_graph: the graph
    :param mixer: mixer to run and close
    :param activities: list to which the present activity is added
    :param what: description of the messages, for the activity
    :param rounds: largest number of rounds
    """
    seconds = []
    worst = 0.0
    mixed: list = []
    try:
        for t in range(min(2 * (test_graph.period or 4), rounds)):
            activities.append(f"exchange {t} with {what}")
            for (values,) in mixer.outbox(t):
                values.fill_(float(world.rank + 1 + t))
            mixer_round = partial(_finish_round, mixer, t, mixed)
            seconds.append(stopwatch(mixer_round))
            sources, weights, self_weight = test_graph.neighbours(t, world.rank)
            expected = self_weight * (world.rank + 1 + t)
            expected += sum(w * (j + 1 + t) for j, w in zip(sources, weights, strict=True))
            difference = max(float((values - expected).abs().max()) for (values,) in mixed)
            worst = max(worst, difference / max(abs(expected), 1.0))
    finally:
        activities.append("closing the mixer")
        mixer.close()
    return statistics.median(seconds), worst


def _finish_round(mixer: Mixer, t: int, mixed: list) -> None:
    """Exchange the messages of round ``t``, and store the averages in the list ``mixed``."""
    mixer.start(ExchangeKind.GOSSIP, t)
    mixed[:] = mixer.finish()[1]


def routes(
    world: World,
    test_graph: Graph,
    slots: Sequence[str],
    size: int,
    activities: list[str],
    gpus: bool = False,
) -> Finding:
    """Report the transport to each out-neighbour; transports between GPUs are tested first.

    Collective.

    :param world: all ranks
    :param test_graph: the graph
    :param slots: devices of this rank's slots
    :param size: bytes of a message
    :param activities: list to which the present activity is added
    :param gpus: whether to use the code for GPUs even if the slots are CPUs
    """
    transports = {
        r: "read (same host)" if host == world.hosts[world.rank] else "put (another host)"
        for r, host in enumerate(world.hosts)
    }
    spent = 0.0
    worst = 0.0
    if gpus or not world.agree(int(slots[0] == "cpu")):
        activities.append("opening the fastest transport between GPUs")
        width = max(size // 4 // len(slots), 1)
        layout = MessageLayout((width,) * len(slots), devices=tuple(slots))
        mixer = Synchronous(test_graph, layout, world, on_devices=True)
        transports = mixer.routes
        spent, worst = _try_out(world, test_graph, mixer, activities, "GPU memory")
    rounds = range(min(test_graph.period or ROUNDS, ROUNDS))
    neighbours = {int(r) for t in rounds for r in test_graph.receivers(t, world.rank)}
    links = [(world.rank, rank, transports[rank]) for rank in sorted(neighbours)]
    gathered = world.gather((links, spent, worst))
    if gathered is None:
        return Finding("routes", "")
    links = [link for part, *_ in gathered for link in part]
    spent, worst = (max(result[k] for result in gathered) for k in (1, 2))
    counts = Counter(transport for *_, transport in links)
    text = "; ".join(
        f"{pluralize(count, 'link')} by {transport}" for transport, count in counts.items()
    )
    data = {
        "links": [{"from": a, "to": b, "way": transport} for a, b, transport in links],
        "error": worst,
    }
    if spent:
        text += f"; exchanges of {size >> 20} MiB: {spent * 1e3:.1f} ms each"
    if worst > ROUNDING:
        return Finding("routes", text, "wrong", OFF.format(worst), data)
    if any(transport.startswith("host") for transport in counts):
        remedy = "messages of GPU memory pass through host memory"
        return Finding("routes", text, "note", remedy, data)
    return Finding("routes", text, data=data)


# -- a training and its simulation -------------------------------------------------------------

STEPS = 20
"""Number of steps of the training."""
MAX_NODES = 64
"""Largest number of nodes that rank 0 simulates."""
DIGITS = 1437
"""Number of training samples of "digits"."""


def compared(world: World, devices: str, graph: str, timeout_s: float) -> Finding:
    """Train a small model on the nodes, and compare it with the simulator; collective.

    More than `MAX_NODES` nodes train, but are not compared. A single node does nothing.

    :param world: all ranks
    :param devices: value of `node.devices`
    :param graph: name of the graph
    :param timeout_s: seconds that each wait for other ranks may take
    """
    n = world.nodes.count
    if n == 1:
        return Finding("training", "one node: there is no exchange to test")
    settings = [f"node.devices={devices}", f"node.ranks_per_node={world.nodes.per_node}"]
    settings += [f"graph.name={graph}", f"node.timeout_s={timeout_s}", "node.precision=fp32"]
    settings += ["data.batch=4", "run.epochs=1", "schedule.scale=none", "log.consensus_every=0"]
    a_step = 4 * n * world.nodes.per_node * len(slots_of(devices))
    if a_step > DIGITS:
        settings += ["data.source=synthetic", "data.shape=[1,8,8]", f"data.samples={a_step}"]
    job = assemble.load({"model": {"name": "mlp"}}, settings)
    begin = time.perf_counter()
    local_parameters = _trained(job, world, n)
    seconds = time.perf_counter() - begin
    gathered = world.gather(local_parameters if world.nodes.is_leader else None)
    if gathered is None or n > MAX_NODES:
        text = f"{STEPS} steps; not compared, because at most {MAX_NODES} nodes are simulated here"
        return Finding("training", text)
    nodes = torch.cat([rows for rows in gathered if rows is not None])
    reference = _trained(job, SingleProcess(), n)
    difference = float((nodes - reference).double().norm() / reference.double().norm())
    exact = torch.equal(nodes, reference)
    text = f"{STEPS} steps of {n} nodes in {seconds:.1f} s, "
    data = {"seconds": seconds, "difference": difference, "exact": exact}
    if exact or (difference <= ROUNDING and not devices.startswith("cpu")):
        text += "bitwise identical to" if exact else f"within {difference:.1e} of"
        return Finding("training", f"{text} the simulator", data=data)
    remedy = (
        f"the parameters differ from the simulator's by {difference:.1e}: exchanges or sums are "
        "wrong here; try another MPI, or node.same_host=put"
    )
    return Finding("training", f"{text}different from the simulator", "wrong", remedy, data)


def _trained(job: Job, world: World, n: int) -> torch.Tensor:
    """Train `STEPS` steps on n nodes; return the parameters of the local nodes.

    The result is an array (local nodes, parameters) on the CPU.
    """
    assembly = assemble.assemble(job, world, n)
    try:
        for _ in range(STEPS):
            assembly.trainer.step()
        replicas = assembly.trainer.replicas
        return torch.stack([replicas.flat.pack(row).cpu() for row in replicas.full[-1]])
    finally:
        assembly.close()
