"""Windows for GPU memory, run on the CPU: the same protocol and pieces, streams left out.

What needs a GPU is in tests/test_gpu.py, the kernels' arithmetic in tests/mixing/kernels.
"""

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.compressors import wire
from mpigossip.mixing.device import memory
from mpigossip.mixing.device.push import BySlot, Lane
from mpigossip.mixing.simulated import Simulated
from tests.cases import on_each
from tests.mixing.test_windows import GRAPHS, SIZES, fill, graphs_for, kinds_of

WIDTHS = (2048, 2048)


def compare(*args, **kwargs):
    """`compared`, after which the kept pool's process has the package as it was."""
    from mpigossip.mixing.device import averages, nccl, routes, slots

    proven, links, sizes = routes.proven, nccl.Links, (slots.PIECE, averages.SHARE)
    try:
        return compared(*args, **kwargs)
    finally:
        routes.proven, nccl.Links = proven, links
        slots.PIECE, averages.SHARE = sizes


class Messages:
    """MPI's messages in the place of NCCL's sends and receives; they are over at once."""

    def __init__(self, comm, lanes, timeout_s):
        self.comm = comm

    def swap(self, out, into):
        from mpi4py import MPI

        from mpigossip.mixing.averages import raw

        pending = []
        for call, moves in ((self.comm.Irecv, into), (self.comm.Isend, out)):
            for (slot, rank), array in moves.items():
                pending.append(call([raw(array), MPI.BYTE], rank, slot))
        MPI.Request.Waitall(pending)

    def settle(self, what, ranks):
        pass

    def close(self):
        pass


def same_means(mixer, reference, step, comm, device):
    """Whether vectors of odd lengths have the simulator's average; some lie on the CPU."""
    size, place = ((1, "cpu"), (2501, device), (7, device))[step // 2 % 3]
    rows = torch.randn(comm.size, size, generator=torch.Generator().manual_seed(step))
    got = mixer.mean(rows[comm.rank].unsqueeze(0).to(place))
    return got.device == torch.device(place) and torch.equal(got.cpu(), reference.mean(rows))


def compared(
    comm,
    names,
    memory,
    steps,
    wire_name="fp32",
    piece=4096,
    first=0,
    device="cpu",
    mutate=None,
    widths=WIDTHS,
):
    """Rank-rounds, by graph, that differ from the simulator; the ways to the neighbours."""
    from mpigossip.cluster.ranks import World
    from mpigossip.mixing.device import averages, nccl, routes, slots
    from mpigossip.mixing.windows import Windows

    slots.PIECE, averages.SHARE = piece, 6000
    able = memory == "device"
    if device == "cpu":  # it stands in for a device: MPI reads and writes its memory
        routes.proven = lambda comm, device: (able, "the CPU stands in")
    if memory == "nccl" and device == "cpu":
        nccl.Links = Messages
    options = {"vectors": 2, "scalars": 1, "wire": wire(wire_name, 127, 0.1, 3)}
    layout = Layout(widths, **options)
    device = device.format(rank=comm.rank)
    there = replace(layout, devices=(device,) * len(widths))
    world, delays, found, routes = World(comm), random.Random(comm.rank), {}, {}
    for name, made in graphs_for(comm.size, names):
        ways = {"timeout_s": 30, "gpu_window": memory}
        mixer = Windows(made, there, world, on_devices=True, **ways)
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
            if step % 6 == 1:  # with a round on its way or without one
                wrong += not same_means(mixer, reference, step, comm, device)
            pairs = [*zip(mixer.finish(), reference.finish(), strict=True)]
            for got, wanted in pairs:
                for segment, rows in zip(got, wanted, strict=True):
                    for array, row in zip(segment, rows, strict=True):
                        wrong += not torch.equal(array[0].cpu(), row[comm.rank])
            t += kind is Kind.GOSSIP
            if step % 6 == 4:
                wrong += not same_means(mixer, reference, step, comm, device)
        wrong += mixer.bytes_sent[0] != reference.bytes_sent[comm.rank]
        mixer.close()
        mixer.close()
        found[name] = wrong
    world.close()
    return found, routes


@pytest.mark.parametrize("memory", ["host", "device", "nccl"])
@pytest.mark.parametrize("n", SIZES)
def test_device_windows_equal_the_simulator_under_random_delays(ranks, n, memory):
    for found, routes in ranks(n)(compare, GRAPHS, memory, 12, timeout=150):
        assert found and not any(found.values()), found
        way = memory
        assert all(route.startswith(way) for route in routes.values()) and len(routes) == n - 1


@pytest.mark.parametrize("piece", [512, 1 << 24])
def test_pieces_of_any_size_and_rounds_that_begin_anywhere(ranks, piece):
    args = (["exponential", "base-3"], "auto", 8, "fp32", piece, 7)
    for found, _ in ranks(3)(compare, *args):
        assert found and not any(found.values()), found


@pytest.mark.parametrize("memory", ["auto", "device", "nccl"])
@pytest.mark.parametrize("name", ["bf16", "qsgd", "top-k"])
def test_lossy_wires_are_decoded_to_the_same_bits(ranks, name, memory):
    graphs = ["one-peer-exponential", "ring", "complete"]
    for found, routes in ranks(3)(compare, graphs, memory, 10, name):
        assert found and not any(found.values()), found
        assert all(route.startswith(memory.replace("auto", "host")) for route in routes.values())


@pytest.mark.parametrize("memory", ["device", "nccl"])
def test_large_encoded_messages_are_averaged_decoded(ranks, memory):
    """With 4 nodes a sum of decoded bf16 values is less traffic than everyone's codes."""
    for found, _ in ranks(4)(compare, ["complete"], memory, 8, "bf16"):
        assert found and not any(found.values()), found


@pytest.mark.parametrize("memory", ["host", "device", "nccl"])
@pytest.mark.parametrize("wire_name", ["fp32", "bf16"])
def test_slots_may_be_of_different_width(ranks, wire_name, memory):
    """Pieces are counted by the widest slot, wherever it stands."""
    for widths in ((512, 4608, 1536), (3072, 512)):
        args = (["ring", "complete"], memory, 8, wire_name)
        for found, _ in ranks(3)(compare, *args, widths=widths):
            assert found and not any(found.values()), (widths, found)


def refused(comm):
    from mpigossip.cluster.ranks import World
    from mpigossip.graphs import graph
    from mpigossip.mixing.device.memory import MemoryRefused
    from mpigossip.mixing.windows import Windows

    world, ways = World(comm), {"gpu_window": "device", "on_devices": True}
    try:
        Windows(graph("ring", comm.size), Layout(WIDTHS), world, **ways)
    except MemoryRefused as error:
        return str(error)
    finally:
        world.close()


def test_device_windows_are_refused_where_mpi_is_not_proven(ranks):
    for message in ranks(2)(refused):
        assert 'node.gpu_window = "device"' in message and "GPU-aware" in message


def put_into_neighbour(comm):
    from mpigossip.mixing.device import aware

    slots = [torch.device("cpu")] * 2
    return aware.arrives(comm, slots, 30), aware.proven(comm, slots)


def test_the_proof_is_a_put_and_a_library_that_says_no_is_believed(ranks):
    for wrong, (able, why) in ranks(3)(put_into_neighbour):
        assert wrong == "" and not able
        assert "MPIX_Query_cuda_support" in why and "mpi_memory_alloc_kinds" in why


def without_waiting_for_pieces(mixer):
    """The first piece's token is taken for all of them."""
    signals, many = mixer._reach.push.signals, len(mixer._slots.pieces)
    arrived = signals.arrived
    signals.arrived = lambda rank, number: number % many > 0 or arrived(rank, number)


def without_waiting_for_readers(mixer):
    mixer._reach.push.signals.room = lambda rank, count: True


def caught(comm, mutate):
    from mpigossip.cluster.deadline import LateError
    from mpigossip.mixing.notifications import ProtocolError

    graphs = ["one-peer-exponential", "exponential"]
    try:
        found, _ = compare(comm, graphs, "host", 40, mutate=mutate)
    except (LateError, ProtocolError) as error:
        raise AssertionError(f"seen: {error}") from None
    assert not any(found.values()), f"seen: {found}"


@pytest.mark.parametrize("mutate", [without_waiting_for_pieces, without_waiting_for_readers])
def test_a_mutant_of_the_piecewise_protocol_is_seen(ranks, mutate):
    with pytest.raises(Exception, match="seen"):
        ranks(6)(caught, mutate, timeout=90)


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
    lane = Lane(torch.device("cpu"))
    assert lane.ready() is None
    lane.out = stream
    lane.ready()
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
def test_what_touches_is_locked_as_one(monkeypatch, stretches, runs):
    monkeypatch.setattr(memory.mmap, "PAGESIZE", 4096)
    assert memory.pages(stretches) == runs


# -- layout and sum ----------------------------------------------------------------------------


@on_each("name", ["fp32", "qsgd"])
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
