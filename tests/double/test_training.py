"""Training on the double: devices of a rank joined by NCCL, and every route between ranks."""

import itertools
import os
from dataclasses import replace

import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.mixing.kernels import gpu_sum
from tests.cases import every, some
from tests.double import active
from tests.double.devices import NCCL, aware, check_same
from tests.mixing.device.rounds import compare
from tests.mixing.rounds import GRAPHS, count_differences, graphs_for
from tests.mixing.test_wire import differing

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
METHODS = ["dmsgd", "dsgt", "sgp", "parallel", "diloco"]
WEIGHTED_GRAPHS = ["ring weighted", "complete weighted"]
"""Graphs whose nodes have weights in averages."""


WAYS = ["host", "windows", "messages"]


@pytest.mark.parametrize("window", WAYS)
def test_two_ranks_of_two_devices_have_the_cpus_bits(ranks, window):
    more = [f"node.exchange={window}", "log.consensus_every=3"]
    check_same(ranks, 2, "cuda:0,1", 2, METHODS, *more)


@pytest.mark.every
def test_a_rank_of_eight_devices_has_the_cpus_bits(ranks):
    check_same(ranks, 1, "cuda:0-7", 8, METHODS)


WIRES = ["bf16", "top-k", "sign", "random-k", "qsgd"]
SHOWN = [*zip(WIRES, ["host", "windows", "messages", "host", "windows"], strict=True)]


@pytest.mark.parametrize(("wire", "window"), some(itertools.product(WIRES, WAYS), SHOWN))
def test_every_wire_has_the_cpus_bits(ranks, wire, window):
    more = [f"node.exchange={window}"]
    check_same(ranks, 2, "cuda:0,1", 2, ["choco"], *more, f"node.wire={wire}")


def every_wire(comm, way):
    with aware():
        return differing(comm, [("put", way)], "cuda:0")


@pytest.mark.every
@pytest.mark.parametrize("way", ["windows", "messages"])
def test_every_wire_has_the_values_of_numpy(ranks, way):
    assert ranks(3)(every_wire, way, timeout=240) == [[], [], []]


@pytest.mark.parametrize("window", WAYS)
def test_a_method_that_sums_into_its_vector_has_the_cpus_bits(ranks, window):
    more = [f"node.exchange={window}", "algorithm.style=awc"]
    check_same(ranks, 2, "cuda:0", 1, ["dsgd"], *more)


@pytest.mark.parametrize("n", [2, every(4)])
def test_nccl_between_nodes_has_the_cpus_bits(ranks, n):
    check_same(ranks, n, 2, 2, METHODS, *NCCL)


@pytest.mark.parametrize("wire", some(WIRES, ["bf16", "random-k"]))
def test_every_wire_by_nccl_has_the_cpus_bits(ranks, wire):
    check_same(ranks, 2, 2, 2, ["choco"], *NCCL, f"node.wire={wire}")


@pytest.mark.parametrize("n, wire", [(3, "bf16"), every(4, "fp32"), every(4, "top-k")])
def test_windows_by_nccl_equal_the_simulator(ranks, n, wire):
    graphs = ["one-peer-exponential", "ring", "star", "complete", *WEIGHTED_GRAPHS]
    args = (graphs, "nccl", 12, wire, 4096, 0, "cuda:{rank}")
    for differences, routes in ranks(n)(compare, *args, timeout=150):
        assert differences and not any(differences.values()), differences
        assert all(route.startswith("nccl") for route in routes.values()), routes


def differing_rounds(comm, slots):
    """Return the number of pairs (route, wire), and the pairs that differ from the simulator."""
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.graphs import graph
    from mpigossip.mixing import lossy_wires
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.synchronous import Synchronous

    count = 0
    wrong = []
    ring = graph("ring", comm.size)
    with aware(), MPIWorld(comm) as world:
        for way, name in itertools.product([*WAYS, "nccl"], lossy_wires.WIRES):
            # NCCL needs separate GPUs for each rank; torch's device guard for tests has 8 indices
            os.environ["MPIGOSSIP_DOUBLE_HOST"] = f"{comm.rank}-" if way == "nccl" else ""
            layout = MessageLayout((1024,) * slots, wire=lossy_wires.wire(name, 127, 0.1, 3))
            there = replace(layout, devices=tuple(f"cuda:{k}" for k in range(slots)))
            mixer = Synchronous(ring, there, world, exchange=way, timeout_s=90)
            off = count_differences(
                mixer,
                [
                    ExchangeKind.GOSSIP,
                    ExchangeKind.GLOBAL,
                    ExchangeKind.GOSSIP,
                    ExchangeKind.GOSSIP,
                ],
                layout,
            )
            count = count + 1
            wrong = wrong + [(way, name)] * bool(off)
    del os.environ["MPIGOSSIP_DOUBLE_HOST"]
    return count, wrong


@pytest.mark.every
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_every_way_and_wire_equals_the_simulator(ranks, n, slots):
    if (n, slots) != (3, 2) and torch.cuda.device_count() < 48:
        pytest.skip("all take six minutes: MPIGOSSIP_DOUBLE=48")
    for count, wrong in ranks(n)(differing_rounds, slots, timeout=560):
        assert count == 36 and not wrong


def order_of_staging(comm):
    """Return the differences from the simulator, and the order of copies and notifications."""
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.synchronous import Synchronous
    from mpigossip.mixing.wire import CHUNK
    from tests.double.hooks import before

    events = []
    layout = MessageLayout((3 * CHUNK,))
    there = replace(layout, devices=("cuda:0",))
    with aware(), MPIWorld(comm) as world:
        mixer = Synchronous(graph("ring", comm.size), there, world, exchange="host", timeout_s=90)
        transport = mixer._transport
        transport.set_chunk_size(4 * CHUNK)
        numbers = {chunk.span.start: chunk.number for chunk in transport.chunks}
        before(
            mixer._buffers,
            "_copy_out",
            lambda sources, to, span: events.append(f"copy {numbers[span.start]}"),
        )
        before(transport, "notify", lambda r, chunk: events.append(f"notify {chunk.number}"))
        differences = count_differences(mixer, [ExchangeKind.GOSSIP], layout)
    return differences, events


def test_a_chunk_is_copied_to_the_host_while_the_chunk_before_it_is_in_flight(ranks):
    expected = ["copy 0", "copy 1", "notify 0", "copy 2", "notify 1", "notify 2"]
    assert ranks(2)(order_of_staging, timeout=150) == [(0, expected)] * 2


def windows(comm, window):
    """Run the battery of all graphs on a GPU."""
    with aware():
        graphs = [*GRAPHS, *WEIGHTED_GRAPHS]
        return compare(comm, graphs, window, 8, "fp32", 4096, 0, "cuda:0")


@pytest.mark.parametrize("window", some(WAYS, ["host", "windows"]))
def test_the_battery_of_windows_equals_the_simulator(ranks, window):
    for differences, routes in ranks(3)(windows, window, timeout=150):
        assert differences and not any(differences.values()), differences
        assert all(route.startswith(window) for route in routes.values()), routes


def test_a_kernel_runs_where_its_arrays_are():
    """The arrays are on another device than the current one of the thread."""
    arrays = [torch.full((1, 64), float(k), device="cuda:1") for k in range(2)]
    out = torch.empty(1, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert gpu_sum.combine([0.5, 0.25], arrays, out) and float(out[0, 3]) == 0.25


def test_the_first_job_takes_the_gpus():
    from mpigossip.training import assemble, shape

    devices = shape.local_devices(assemble.load({}, []), SingleProcess())
    assert devices == tuple(f"cuda:{k}" for k in range(torch.cuda.device_count()))


def rounds_on_streams(comm, exchange):
    """Read results on one stream and fill outboxes on another.

    Return whether all host memory that is copied from or to the device was locked.
    """
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.device import buffers
    from mpigossip.mixing.synchronous import Synchronous

    locked = []
    pin = buffers.pin
    buffers.pin = lambda memory, device: locked.extend(memory) or pin(memory, device)
    try:
        with aware(), MPIWorld(comm, timeout_s=60) as world:
            layout = MessageLayout((4096,), devices=("cuda:0",))
            _, graph = next(iter(graphs_for(2, ["ring"])))
            mixer = Synchronous(graph, layout, world, exchange=exchange, timeout_s=30)
            side = torch.cuda.Stream("cuda:0")
            for t in range(3):
                for array in mixer.outbox(t)[0]:
                    array.fill_(t)
                mixer.start(ExchangeKind.GOSSIP, t)
                with torch.cuda.stream(side):
                    for array in mixer.finish()[1][0]:
                        array.clone()
            host = mixer._buffers.host
            used = [host.own, host.memory] if host else []
            result = all(any(a.data_ptr() == b.data_ptr() for b in locked) for a in used)
            mixer.close()
            return result
    finally:
        buffers.pin = pin


@pytest.mark.parametrize("exchange", ["host", "messages"])
def test_a_result_is_read_before_it_is_overwritten_and_copies_use_locked_memory(ranks, exchange):
    assert ranks(2)(rounds_on_streams, exchange, timeout=120) == [True, True]


def capture_in_flight(comm, mode):
    """Begin a capture while the other rank delays its round; return whether the round is done."""
    import time

    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.synchronous import Synchronous

    with aware(), MPIWorld(comm, timeout_s=60) as world:
        layout = MessageLayout((4096,), devices=("cuda:0",))
        _, graph = next(iter(graphs_for(2, ["ring"])))
        mixer = Synchronous(graph, layout, world, exchange="host", timeout_s=30)
        comm.Barrier()
        time.sleep(comm.rank)
        for array in mixer.outbox(0)[0]:
            array.fill_(comm.rank)
        mixer.start(ExchangeKind.GOSSIP, 0)
        cuda_graph = torch.cuda.CUDAGraph()
        cuda_graph.capture_begin(capture_error_mode=mode)
        done = mixer._exchange.round.future.done()
        cuda_graph.capture_end()
        means = [float(array.mean().cpu()) for array in mixer.finish()[1][0]]
        mixer.close()
        return done, means


def test_a_capture_of_the_program_begins_after_the_exchange_in_flight(ranks):
    assert ranks(2)(capture_in_flight, "global", timeout=120) == [(True, [0.5])] * 2
    assert ranks(2)(capture_in_flight, "thread_local", timeout=120)[0] == (False, [0.5])
