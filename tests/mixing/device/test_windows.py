"""Windows for GPU memory, run on the CPU: the same protocol and chunks, but no streams.

Tests that need a GPU are in tests/test_gpu.py, and tests of the kernels in tests/mixing/kernels.
"""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device import memory
from mpigossip.mixing.device.streams import Streams
from mpigossip.mixing.lossy_wires import wire
from tests.cases import covering, naming, on_each, some, with_world
from tests.mixing.device.rounds import WIDTHS, compare
from tests.mixing.rounds import GRAPHS, graphs_for

MEMORIES = ["host", "windows", "messages", "nccl"]


SHOWN = [(2, "host"), (3, "messages")]
"""Cases that run by default; tests/double runs "host", "windows" and "nccl" with three ranks."""
PAIRS = [
    *((1, "host"), (2, "host"), (4, "messages"), (4, "nccl")),
    *itertools.product((3, 6, 8), MEMORIES),
]


def chosen_graphs(n, memory):
    """Return the graphs of a case; cases of `--all` contain all pairs of values of two fields."""
    if (n, memory) in SHOWN:
        return GRAPHS
    possible = [(*pair, name) for pair in PAIRS for name, _ in graphs_for(pair[0])]
    chosen = covering(possible, covered=[case for case in possible if case[:2] in SHOWN])
    return [name for *case, name in chosen if case == [n, memory]]


@pytest.mark.parametrize(("n", "memory"), some(PAIRS, SHOWN))
def test_device_windows_equal_the_simulator_under_random_delays(ranks, n, memory):
    names = chosen_graphs(n, memory)
    for differences, routes in ranks(n)(compare, names, memory, 12, timeout=150):
        assert differences and not any(differences.values()), differences
        assert all(route.startswith(memory) for route in routes.values())
        assert len(routes) == n - 1 or names is not GRAPHS


@pytest.mark.parametrize("chunk", [512, 1 << 24])
def test_chunks_of_any_size_and_rounds_that_begin_anywhere(ranks, chunk):
    args = (["exponential", "base-3"], "auto", 8, "fp32", chunk, 7)
    for differences, _ in ranks(3)(compare, *args):
        assert differences and not any(differences.values()), differences


WIRES = [("bf16", "windows"), ("qsgd", "messages"), ("top-k", "nccl"), ("qsgd", "auto")]


LOSSY = [
    *itertools.product(["bf16", "qsgd", "top-k"], ["auto", "windows", "messages", "nccl"]),
]
LOSSY_GRAPHS = ["one-peer-exponential", "ring", "complete"]


@pytest.mark.parametrize(("name", "memory"), some(LOSSY, WIRES))
def test_lossy_wires_are_decoded_to_the_same_bits(ranks, name, memory):
    """By default each case has all graphs, and otherwise one, in turn."""
    at = LOSSY.index((name, memory))
    graphs = LOSSY_GRAPHS if (name, memory) in WIRES else [LOSSY_GRAPHS[at % 3]]
    for differences, routes in ranks(3)(compare, graphs, memory, 10, name):
        assert differences and not any(differences.values()), differences
        assert all(route.startswith(memory.replace("auto", "host")) for route in routes.values())


@pytest.mark.parametrize("memory", ["windows", "messages", "nccl"])
def test_large_encoded_messages_are_averaged_decoded(ranks, memory):
    """With 4 nodes, averaging decoded values sends less than gathering encoded messages."""
    for differences, _ in ranks(4)(compare, ["complete"], memory, 8, "bf16"):
        assert differences and not any(differences.values()), differences


WEIGHTED_GRAPHS = ["one-peer-exponential weighted", "complete weighted", "ring weighted"]
WEIGHTED_CASES = [("fp32", "windows"), ("bf16", "messages"), ("qsgd", "nccl"), ("fp32", "host")]


@pytest.mark.parametrize(
    ("name", "memory"),
    some([*itertools.product(["fp32", "bf16", "qsgd"], MEMORIES)], WEIGHTED_CASES),
)
def test_weights_of_nodes_are_used_on_devices(ranks, name, memory):
    for differences, _ in ranks(3)(compare, WEIGHTED_GRAPHS, memory, 12, name):
        assert len(differences) == 3 and not any(differences.values()), differences


@with_world
def refused(world):
    from mpigossip.graphs import graph
    from mpigossip.mixing.device.memory import TransportUnavailable
    from mpigossip.mixing.synchronous import Synchronous

    options = {"exchange": "windows", "on_devices": True}
    with pytest.raises(TransportUnavailable) as caught:
        Synchronous(graph("ring", world.size), MessageLayout(WIDTHS), world, **options)
    return str(caught.value)


def test_device_windows_are_rejected_if_the_test_of_mpi_fails(ranks):
    for message in ranks(2)(refused):
        assert 'node.exchange = "windows"' in message and "GPU-aware" in message


def proofs(comm):
    """Return the tests that two mixers in one world and one mixer in another world run."""
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.graphs import graph
    from mpigossip.mixing.synchronous import Synchronous
    from mpigossip.mixing.transports import probe

    original = probe.gpu_mpi_works
    done = []
    probe.gpu_mpi_works = lambda comm, devices, way, limit_s: (True, done.append((way, limit_s)))
    try:
        for mixers in (2, 1):
            with MPIWorld(comm) as world:
                for _ in range(mixers):
                    options = {"exchange": "messages", "on_devices": True}
                    Synchronous(
                        graph("ring", comm.size), MessageLayout(WIDTHS), world, **options
                    ).close()
    finally:
        probe.gpu_mpi_works = original
    return done


def test_a_transport_is_tested_once_per_world(ranks):
    assert ranks(2)(proofs) == [[("messages", 30.0)] * 2] * 2


def put_into_neighbour(comm):
    from mpigossip.mixing.device import proof

    slots = [torch.device("cpu")] * 2
    problems = [proof.try_between_ranks(comm, slots, 30, way) for way in ("windows", "messages")]
    return problems, proof.gpu_mpi_works(comm, slots)


def test_ranks_exchange_messages_and_a_library_without_gpu_support_is_believed(ranks):
    for problems, (able, why) in ranks(3)(put_into_neighbour):
        assert problems == ["", ""] and not able
        assert "no support for GPU memory" in why


@pytest.mark.parametrize("own_stream", [False, True])
def test_an_exchange_waits_for_the_callers_stream_and_the_slots(monkeypatch, own_stream):
    """A user's own loop may fill the outbox on another stream than the default one."""
    log = []
    default = SimpleNamespace(name="default")
    wait = lambda other: log.append(f"wait for {other.name}")  # noqa: E731
    stream = SimpleNamespace(name="own", wait_stream=wait) if own_stream else default
    record = lambda s: log.append(f"event on {s.name}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(record=record))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    streams = Streams(torch.device("cpu"))
    assert streams.ready() is None
    streams.out = stream
    streams.ready()
    assert log == (["wait for default", "event on own"] if own_stream else ["event on default"])


@pytest.mark.parametrize(
    "stretches, runs",
    [
        ([(4096, 10)], [(4096, 4096)]),
        ([(4000, 100), (8191, 2)], [(0, 12288)]),
        ([(20480, 4096), (4096, 4096), (8192, 1)], [(4096, 8192), (20480, 4096)]),
        ([(4096, 8192), (4096, 100)], [(4096, 8192)]),
    ],
)
def test_ranges_that_touch_are_locked_together(monkeypatch, stretches, runs):
    monkeypatch.setattr(memory.mmap, "PAGESIZE", 4096)
    assert memory.pages(stretches) == runs


@pytest.mark.parametrize("pinned", [True, False])
def test_memory_that_ucx_has_locked_is_pinned(monkeypatch, pinned):
    unlocked = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: memory.ALREADY, cudaHostUnregister=unlocked.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(memory, "device_context", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    arguments = [torch.zeros(8, dtype=torch.uint8)], torch.device("cuda")
    if pinned:
        memory.pin(*arguments)()
    else:  # other memory on its pages is locked, but not all of it
        with pytest.raises(memory.TransportUnavailable, match=naming("code 712")):
            memory.pin(*arguments)
    assert not unlocked


# -- layout ------------------------------------------------------------------------------------


@on_each("name", ["fp32", "qsgd"])
def test_a_slots_bytes_are_contiguous(name):
    layout = MessageLayout((512, 512), vectors=2, scalars=2, wire=wire(name))
    assert layout.slot_bytes == 2 * 4 * 512 + 16 and layout.nbytes == 2 * layout.slot_bytes
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, segment in enumerate(layout.views(memory), 1):
        for array in segment:
            array.fill_(number)
    seen = [memory[part].view(dtype) for dtype, part in layout.parts]
    assert [array.unique().tolist() for array in seen] == [[1.0], [1.0], [2.0], [2.0]]
    assert sum(part.stop - part.start for _, part in layout.parts) == layout.nbytes
    assert layout.offset(4) == layout.slot_sent_bytes == layout.sent_bytes // 2


def test_slots_of_unequal_widths_are_rejected():
    with pytest.raises(ValueError, match=naming("equal widths", "(512, 1024)")):
        MessageLayout((512, 1024))


# -- the choice --------------------------------------------------------------------------------


@on_each(
    ("times", "way"),
    [
        ({}, "host"),
        ({"windows": 1.05, "messages": 1.0, "host": 3.0}, "windows"),
        ({"windows": 1.2, "messages": 1.0, "host": 3.0}, "messages"),
        ({"nccl": 2.0, "host": 1.0}, "host"),
    ],
)
def test_the_fastest_way_is_taken_and_windows_where_nearly_as_fast(times, way):
    from mpigossip.mixing.transports.probe import fastest

    assert fastest(times) == way


def timed(comm):
    """Run "auto" with an MPI that accesses the devices' memory."""
    return compare(comm, ["ring", "complete"], "auto", 6, proofs={"windows", "messages"})


def test_working_transports_are_timed_by_all_ranks(ranks):
    (differences, routes), *others = ranks(3)(timed)
    assert differences and not any(differences.values())
    (route,) = set(routes.values())
    assert all(f"{name} " in route for name in ("windows", "messages", "host")) and " ms" in route
    assert all(set(other_routes.values()) == {route} for _, other_routes in others)
