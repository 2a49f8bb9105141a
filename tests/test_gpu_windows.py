"""Windows for GPU memory, run on the CPU: the same protocol and pieces, streams left out.

What needs a GPU is in test_gpu.py; the kernel's arithmetic and what is said of MPI are tested here.
"""

import random
import time

import numpy as np
import pytest
import torch
from test_mixing import GRAPHS, SIZES, fill, graphs_for, kinds_of

from mpigossip.mixing.base import Kind, Layout, combine
from mpigossip.mixing.fused import operation
from mpigossip.mixing.pieces import BySlot
from mpigossip.mixing.simulated import Simulated
from mpigossip.mixing.wire import wire

WIDTHS = (2048, 2048)


def compare(*args, **kwargs):
    """`compared`, after which the kept pool's process has the package as it was."""
    from mpigossip.mixing import gpu

    kept = gpu.PIECE, gpu.proven
    try:
        return compared(*args, **kwargs)
    finally:
        gpu.PIECE, gpu.proven = kept


def compared(
    comm,
    names,
    same_host,
    memory,
    steps,
    wire_name="fp32",
    piece=4096,
    first=0,
    device="cpu",
    mutate=None,
):
    """Rank-rounds, by graph, that differ from the simulator; the ways to the neighbours."""
    from mpigossip.cluster.ranks import World
    from mpigossip.mixing import gpu

    torch.set_num_threads(1)
    gpu.PIECE = piece
    if device == "cpu":  # it stands in for a device: MPI reads and writes its memory
        gpu.proven = lambda comm, device: (memory == "device", "the CPU stands in")
    options = {"vectors": 2, "scalars": 1, "wire": wire(wire_name, 127, 0.1, 3)}
    layout, there = Layout(WIDTHS, **options), Layout(WIDTHS, **options, devices=(device,) * 2)
    world, delays, found, routes = World(comm), random.Random(comm.rank), {}, {}
    for name, made in graphs_for(comm.size, names):
        ways = {"same_host": same_host, "timeout_s": 30, "memory": memory}
        mixer = gpu.DeviceWindows(made, there, world, **ways)
        if mutate is not None:
            mutate(mixer)
        routes |= mixer.routes
        reference, t, wrong = Simulated(made, layout), first, 0
        for step, kind in enumerate(kinds_of(steps, seed=2)):
            mine, every = mixer.outbox(t), reference.outbox(t)
            fill(mine, step, [comm.rank])
            fill(every, step, range(comm.size))
            for one in (mixer, reference):
                one.start(kind, t, step)
                time.sleep(delays.random() * 0.004 * (delays.random() < 0.2))
            pairs = [*zip(mixer.finish(), reference.finish(), strict=True)]
            for got, wanted in pairs:
                for segment, rows in zip(got, wanted, strict=True):
                    for array, row in zip(segment, rows, strict=True):
                        wrong += not torch.equal(array[0].cpu(), row[comm.rank])
            t += kind is Kind.GOSSIP
        wrong += mixer.bytes_sent[0] != reference.bytes_sent[comm.rank]
        mixer.close()
        mixer.close()
        found[name] = wrong
    world.close()
    return found, routes


@pytest.mark.parametrize(
    "same_host, memory", [("read", "host"), ("put", "host"), ("put", "device")]
)
@pytest.mark.parametrize("n", SIZES)
def test_device_windows_equal_the_simulator_under_random_delays(ranks, n, same_host, memory):
    for found, routes in ranks(n)(compare, GRAPHS, same_host, memory, 12, timeout=150):
        assert found and not any(found.values()), found
        way = "device" if memory == "device" else "host"
        assert all(route.startswith(way) for route in routes.values()) and len(routes) == n - 1


@pytest.mark.parametrize("piece", [512, 1 << 24])
def test_pieces_of_any_size_and_rounds_that_begin_anywhere(ranks, piece):
    for same_host in ("read", "put"):
        args = (["exponential", "base-3"], same_host, "auto", 8, "fp32", piece, 7)
        for found, _ in ranks(3)(compare, *args):
            assert found and not any(found.values()), found


@pytest.mark.parametrize("same_host", ["read", "put"])
@pytest.mark.parametrize("name", ["bf16", "qsgd", "top-k"])
def test_lossy_wires_are_decoded_to_the_same_bits(ranks, name, same_host):
    graphs = ["one-peer-exponential", "ring", "complete"]
    for found, _ in ranks(3)(compare, graphs, same_host, "auto", 10, name):
        assert found and not any(found.values()), found


def refused(comm):
    from mpigossip.cluster.ranks import World
    from mpigossip.graphs import graph
    from mpigossip.mixing import gpu

    world = World(comm)
    try:
        gpu.DeviceWindows(
            graph("ring", comm.size), Layout(WIDTHS), world, same_host="put", memory="device"
        )
    except gpu.MemoryRefused as error:
        return str(error)
    finally:
        world.close()


def test_device_windows_are_refused_where_mpi_is_not_proven(ranks):
    for message in ranks(2)(refused):
        assert 'node.gpu_window = "device"' in message and "GPU-aware" in message


def put_into_neighbour(comm):
    from mpigossip.mixing import aware

    return aware._put_arrives(comm, torch.device("cpu")), aware.proven(comm, torch.device("cpu"))


def test_the_proof_is_a_put_and_a_library_that_says_no_is_believed(ranks):
    for arrived, (able, why) in ranks(3)(put_into_neighbour):
        assert arrived and not able
        assert "MPIX_Query_cuda_support" in why and "mpi_memory_alloc_kinds" in why


def without_waiting_for_pieces(mixer):
    """The first piece's token is taken for all of them."""
    wait, many = mixer._host.await_ready, len(mixer._pieces)
    mixer._host.await_ready = lambda sources, t: None if t % many else wait(sources, t)


def without_waiting_for_readers(mixer):
    mixer._host.await_done = lambda readers, t: None


def caught(comm, mutate):
    from mpigossip.cluster.ranks import LateError
    from mpigossip.mixing.messages import ProtocolError

    graphs = ["one-peer-exponential", "exponential"]
    try:
        found, _ = compare(comm, graphs, "read", "host", 40, mutate=mutate)
    except (LateError, ProtocolError) as error:
        raise AssertionError(f"seen: {error}") from None
    assert not any(found.values()), f"seen: {found}"


@pytest.mark.parametrize("mutate", [without_waiting_for_pieces, without_waiting_for_readers])
def test_a_mutant_of_the_piecewise_protocol_is_seen(ranks, mutate):
    with pytest.raises(Exception, match="seen"):
        ranks(6)(caught, mutate, timeout=90)


# -- layout and sum ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "qsgd"])
def test_a_slots_bytes_stand_together(name):
    options = {"vectors": 2, "scalars": 2, "wire": wire(name)}
    by_slot, plain = (
        BySlot((512, 1024), **options, devices=("cpu",) * 2),
        Layout((512, 1024), **options),
    )
    assert (by_slot.nbytes, by_slot.sent_bytes) == (plain.nbytes, plain.sent_bytes)
    assert by_slot.span(0) == slice(0, 2 * 4 * 512 + 16)
    assert by_slot.span(1) == slice(by_slot.span(0).stop, plain.nbytes)
    memory = torch.zeros(by_slot.nbytes, dtype=torch.uint8)
    for number, segment in enumerate(by_slot.views(memory), 1):
        for array in segment:
            array.fill_(number)
    seen = [memory[part].view(dtype) for dtype, part in by_slot.parts]
    assert [array.unique().tolist() for array in seen] == [[1.0], [1.0], [2.0], [2.0]]
    assert sum(part.stop - part.start for _, part in by_slot.parts) == by_slot.nbytes
    places = [by_slot.place(slot, part) for slot in range(2) for part in range(4)]
    if name != "fp32":
        assert places == sorted(places) and places[4] == by_slot.span(1, sent=True).start


def run_text(text, values):
    """The statements of a kernel in float32, each operation rounded by itself."""
    names = {"__fmul_rn": np.multiply, "__fadd_rn": np.add, **values}
    for statement in text.split(";"):
        exec(statement.strip().removeprefix("float "), names)
    return names["y"]


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4], [1 / 8] * 8]
)
def test_the_kernels_arithmetic_has_the_bits_of_the_sum(weights):
    arrays = [torch.randn(1, 10_000) for _ in weights]
    uniform = len(set(weights)) == 1
    values = {f"x{k}": array.numpy() for k, array in enumerate(arrays)}
    values |= {f"w{k}": np.float32(weight) for k, weight in enumerate(weights)}
    expected = combine(weights, arrays, torch.empty(1, 10_000)).numpy()
    assert (run_text(operation(len(arrays), uniform), values) == expected).all()
