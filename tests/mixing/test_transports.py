"""The contract of `transports.Transport`, tested for each transport between ranks.

The CPU replaces a GPU, and gloo replaces NCCL.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpigossip import graphs
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.plan import RoundPlan, chunks, inbox_buffers
from tests.cases import on_each, with_world

LAYOUT = MessageLayout((1024, 1024), vectors=2, scalars=1)
ROUNDS = 5


def opened(world, way):
    from mpigossip.mixing.device.streams import Streams
    from mpigossip.mixing.transports.messages import Messages
    from mpigossip.mixing.transports.nccl_between_nodes import Nccl
    from mpigossip.mixing.transports.windows import Windows

    cpu = torch.device("cpu")
    comm = world.comm
    if way == "nccl":
        streams = [Streams(cpu) for _ in LAYOUT.widths]
        return Nccl(comm, LAYOUT, 1, 20, world=world, streams=streams)
    kind = Windows if "windows" in way else Messages
    devices = [cpu] * LAYOUT.slots if "device" in way else []
    transport = kind(comm, LAYOUT, 1, 20, devices=devices)
    transport.set_chunk_size(4096)
    return transport


def filled(areas, rank, t):
    for k, area in enumerate(areas):
        area.fill_((31 * rank + 7 * t + k) % 251 + 1)


@with_world
def kept(world, way):
    """Send to the right and receive from the left; return the violations of the contract."""
    from mpigossip.mixing.plan import RoundState

    comm = world.comm
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    plan = RoundPlan(
        ExchangeKind.GOSSIP, False, 0, (left,), (0.5, 0.5), (right,), (left,), ((right, 0),)
    )
    transport = opened(world, way)
    size = LAYOUT.slot_sent_bytes
    areas, expected = (
        [torch.zeros(size, dtype=torch.uint8) for _ in LAYOUT.widths] for _ in range(2)
    )
    problems = []
    for t in range(ROUNDS):
        r = RoundState(plan, t, t, t)
        filled(areas, comm.rank, t)
        filled(expected, left, t)
        transport.begin(r, areas)
        comm.Barrier()
        if transport.arrived(r, left, transport.chunks[0]) and way != "nccl":
            problems.append(f"arrived before it was sent, round {t}")
        comm.Barrier()
        for chunk in transport.chunks:
            flying = transport.send(r, chunk, areas)
            while any(request for request in flying if not request.Test()):
                pass
            transport.notify(r, chunk)
            awaited(partial(transport.arrived, r, left, chunk))
            for area, expected_area in zip(transport.received(r, 0), expected, strict=True):
                if not torch.equal(area[chunk.span], expected_area[chunk.span]):
                    problems.append(f"bytes of round {t}, chunk {chunk.number}")
        problems += freed(comm, transport, plan, right, t)
        transport.release(r, plan)
    transport.close([(ROUNDS + 1, plan)])  # the notification for round ROUNDS has been received
    return problems


def awaited(is_done):
    from mpigossip.cluster.deadline import Deadline

    Deadline(20).wait(is_done, lambda: "nothing arrived")


def freed(comm, transport, plan, reader, t):
    """Check that a window's buffer is free only after its reader has freed it."""
    from mpigossip.mixing.plan import RoundState

    awaited(partial(transport.is_free, RoundState(plan, t, t, t + 1), reader))
    comm.Barrier()
    late = transport.halves == 2 and transport.is_free(RoundState(plan, t, t, t + 2), reader)
    comm.Barrier()
    return [f"a buffer for round {t + 2} is free before its reader has freed it"] if late else []


WAYS = ["windows", "windows device", "messages", "messages device", "nccl"]


@pytest.mark.parametrize("way", WAYS)
def test_a_transport_delivers_chunks_in_order(ranks, way):
    assert ranks(3)(kept, way) == [[], [], []]


def notified(comm):
    """Return the calls of `Windows.notify` for two windows and two readers, in order."""
    from mpigossip.mixing.transports.windows import Windows

    calls = []
    transport = Windows.__new__(Windows)
    transport._devices = [torch.device("cpu")] * 2
    transport._opened = [
        SimpleNamespace(Flush=lambda rank, k=k: calls.append((rank, k))) for k in range(2)
    ]
    transport.notifications = SimpleNamespace(send=lambda ranks, *_: calls.append((*ranks, "told")))
    transport.number = lambda r, chunk: 0
    transport.notify(SimpleNamespace(plan=SimpleNamespace(targets=[(3, 0), (5, 1)])), None)
    return calls


def test_readers_are_notified_once_every_window_is_flushed(ranks):
    """On one host a put arrives at once, so only the order of calls shows a missing flush."""
    (calls,) = ranks(1)(notified)
    assert calls == [(3, 0), (3, 1), (3, "told"), (5, 0), (5, 1), (5, "told")]


# -- plans, without MPI ------------------------------------------------------------------------

LARGE = 4096
NAMES = ["one-peer-exponential", "exponential", "ring", "one-peer-hypercube", "base-3", "star"]


@on_each("name", NAMES)
@on_each("hosts", [1, 8])
def test_plans_of_many_ranks_are_consistent(name, hosts):
    """The ranks that send to a rank are those that it expects, each with a separate buffer."""
    made = graphs.graph(name, LARGE)
    layout = SimpleNamespace(sent_bytes=4, raw_bytes=None)
    near = [frozenset(range(i // hosts * hosts, (i // hosts + 1) * hosts)) for i in range(LARGE)]
    near = near if hosts > 1 else []
    for t in (0, 1, 5):
        plans = {}
        ranks = np.random.default_rng(t).integers(0, LARGE, 40).tolist()

        def of(rank, t=t, plans=plans):
            if rank not in plans:
                plans[rank] = RoundPlan.of(
                    made, layout, rank, ExchangeKind.GOSSIP, t, near, halves=True
                )
            return plans[rank]

        for i in ranks:
            own_plan = of(i)
            for k, j in enumerate(own_plan.remote_sources[:8]):
                assert (i, k) in of(j).targets and k < inbox_buffers(made, i, near)
            for j, k in own_plan.targets[:8]:
                assert of(j).remote_sources[k] == i
            assert own_plan.partner is None or of(own_plan.partner).partner == i
            assert set(own_plan.remote_sources) == set(own_plan.sources) - (
                near[i] if near else set()
            )


def test_a_small_message_is_one_chunk():
    (chunk,) = chunks(LAYOUT, float("inf"))
    assert chunk.span == slice(0, LAYOUT.slot_sent_bytes)
    assert [field for field, _ in chunk.fields] == [0, 1, 2]


def in_pieces(comm):
    from mpigossip.mixing import exact_average
    from mpigossip.mixing.transports.messages import Messages

    (original, exact_average.CUT), raw, sizes = (exact_average.CUT, 1000), exact_average.raw, []
    exact_average.raw = lambda memory: sizes.append(memory.numel()) or raw(memory)
    keys = [(j, slot) for j in range(comm.size) if j != comm.rank for slot in range(2)]
    into = {key: torch.zeros(1500) for key in keys}
    out = {(j, slot): torch.full((1500,), 10.0 * comm.rank + slot) for j, slot in keys}
    exact_average.swap_by_messages(comm, 20, out, into)
    exact_average.CUT = original
    exact_average.raw = raw
    transport = Messages.__new__(Messages)
    transport._receives = {(0, 0): [False, True]}  # a complete and an open request
    problems = [key for key, got in into.items() if not bool((got == 10 * key[0] + key[1]).all())]
    return problems, max(sizes), transport.pending(None)


def test_long_messages_are_split_and_complete_requests_are_not_awaited(ranks):
    assert ranks(3)(in_pieces) == [([], 1000, [True])] * 3
