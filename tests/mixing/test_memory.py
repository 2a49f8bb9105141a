"""The memory that a mixer states is what it has allocated, and what is planned without it."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from mpigossip import mixing
from mpigossip.cluster.world import SingleProcess
from mpigossip.config.readable import format_bytes
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.delayed import OLDEST, Faults
from mpigossip.mixing.lossy_wires import wire
from mpigossip.training import assemble, costs
from tests.cases import on_each, with_world

ROUNDS = 100
DEVICES = ("cpu",)
GRAPHS = ("one-peer-exponential", "exponential", "ring", "complete", "star")


def layout_of(name, slots=1):
    return MessageLayout((1024,) * slots, vectors=2, scalars=1, wire=wire(name))


def held(*arrays):
    """Return the bytes of the memory of these arrays; shared memory counts once."""
    return sum(
        {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in arrays}.values()
    )


def allocated(mixer):
    """Return the bytes of messages in a mixer's private arrays."""
    name = type(mixer).__name__
    if name == "Asynchronous":
        copies = [copy.memory for copy in mixer._copies]
        return held(mixer._memory, mixer._result, *copies)
    if name in ("Simulated", "Delayed"):
        arrays = [a for segments in (mixer._out, mixer._mixed) for parts in segments for a in parts]
        return sum(a.nbytes for a in arrays)
    transport = mixer._transport
    buffers = mixer._buffers
    shared = mixer._shared
    arrays = list(transport.memory) if transport else []
    host = getattr(buffers, "host", None) or buffers
    if shared:
        area, _ = shared._window.Shared_query(shared.rank)
        arrays.append(torch.frombuffer(area, dtype=torch.uint8))
    else:
        arrays += [host.own, vars(host).get("memory", host.own)]
    arrays += host.encoded or []
    if host is not buffers:
        arrays += [*buffers._own, *buffers._mixed, *(buffers.encoded or [])]
        arrays += [one for each in buffers._inbox for one in each]
    return held(*[one for one in arrays if one.numel()])


@with_world
def opened(world, asked, survives, name, wire_name, averages, **options):
    """Open a mixer; return whether it and its class give equal bytes, these, and bytes in use."""
    network = graph(name, world.size)
    layout = layout_of(wire_name)
    world.survives = survives
    if "exchange" in options:
        from mpigossip.mixing.synchronous import Synchronous

        layout = replace(layout, devices=DEVICES)
        mixer = Synchronous(network, layout, world, timeout_s=30, on_devices=True, **options)
        mixer.layout = replace(layout, devices=("cuda",))  # the CPU replaces a GPU
    else:
        mixer = mixing.open_mixer(network, layout, world, asked, timeout_s=30, **options)
    for t in range(2 * network.period):
        for kind in [ExchangeKind.GOSSIP] + [ExchangeKind.GLOBAL] * averages:
            for segment in mixer.outbox(t):
                for part in segment:
                    part.fill_(1.0)
            mixer.start(kind, t)
            mixer.finish()
    stated = mixer.memory(averages)
    real = allocated(mixer)
    planned = mixer.estimate_memory(network, mixer.layout, world.rank, mixer._near, averages)
    mixer.close()
    world.survives = False
    return stated == planned, sum(stated.values()), real


CASES = [
    ("synchronous", False, "fp32", {"same_host": "read"}),
    ("synchronous", False, "fp32", {"same_host": "put"}),
    ("synchronous", False, "bf16", {"same_host": "put"}),
    ("synchronous", False, "bf16", {"same_host": "read"}),
    ("synchronous", True, "fp32", {}),
    ("synchronous", True, "bf16", {}),
    ("asynchronous", False, "fp32", {}),
    ("synchronous", False, "fp32", {"exchange": "auto"}),
]


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_stated_memory_is_what_is_allocated(ranks, name, averages):
    for asked, survives, wire_name, options in CASES:
        for same, stated, real in ranks(3)(
            opened, asked, survives, name, wire_name, averages, **options
        ):
            # the second result of an average exists only during the average
            passing = layout_of("fp32").nbytes * (averages and asked == "asynchronous")
            assert same and stated - passing == real, (asked, survives, wire_name, options)


@on_each("asked", ["synchronous", "asynchronous"])
def test_the_simulator_states_the_memory_per_node(asked):
    n = 4
    layout = layout_of("fp32", slots=2)
    network = graph("exponential", 4)
    mixer = mixing.open_mixer(
        network, layout, SingleProcess(), asked, ages=Faults(n, times=4.0).ages
    )
    for t in range(OLDEST + 5):
        for segment in mixer.outbox(t):
            for part in segment:
                part.fill_(1.0)
        mixer.start(ExchangeKind.GOSSIP, t)
        mixer.finish()
    stated = mixer.memory()
    real = allocated(mixer)
    if asked == "asynchronous":
        real += sum(array.nbytes for _, arrays in mixer._past for array in arrays)
        under_way = [sum(p.nbytes for p in d.parts) for d in mixer._in_flight]
        assert sum(under_way) <= n * stated.pop("inbox")
    assert n * sum(stated.values()) == real


def test_an_asynchronous_run_of_eight_nodes_is_planned_as_it_is_opened():
    """With one peer in each of three rounds: model, result, one copy and three inboxes."""
    job = assemble.load(
        {"model": {"name": "mlp"}, "algorithm": {"name": "dsgd"}, "node": {"mixer": "asynchronous"}}
    )
    what, _ = costs.subject(job)
    planned = costs.memory(what, costs.exchanges(what, 8))
    messages = sum(count for name, count in planned.items() if name.startswith("messages'"))
    assert np.isclose(messages / (4 * what.flat.size), 6, rtol=0.01)


@pytest.mark.parametrize(("devices", "slots"), [("cuda:0-3", 4), ("cpu:2", 2)])
def test_the_text_on_memory_names_the_bytes_per_gpu_and_on_the_host(devices, slots):
    """A GPU has a replica, gradients, and its part of all arrays that are not host memory."""
    settings = ["algorithm.name=dsgd", f"node.devices={devices}", "run.survive=true"]
    what, _ = costs.subject(assemble.load({"model": {"name": "mlp"}}, settings))
    assert what.slots == slots
    planned = costs.memory(what, costs.exchanges(what, 4))
    text = costs.describe_memory(planned, what.slots * (devices,))
    total = format_bytes(sum(planned.values()))
    assert text.startswith(f"{total} per node")
    if devices.startswith("cpu"):
        assert text == f"{total} per node"
        return
    host = {name for name in planned if "host" in name or "snapshot" in name or "copies" in name}
    on_gpus = [count for name, count in planned.items() if name not in host]
    model = 4 * what.flat.size
    shared = sum(on_gpus) - 2 * slots * model
    assert shared > 0 and len(host) >= 2
    per_gpu = format_bytes(2 * model + shared / slots)
    on_host = format_bytes(sum(planned[name] for name in host))
    assert text == f"{total} per node ({per_gpu} per GPU, {on_host} on the host)"


def test_copies_for_rank_failures_are_counted():
    settings = {"model": {"name": "mlp"}, "algorithm": {"name": "dsgd"}}
    counted = [
        costs.memory(what, costs.exchanges(what, 4))
        for survive in (False, True)
        for what, _ in [costs.subject(assemble.load(settings | {"run": {"survive": survive}}))]
    ]
    model = counted[0]["replicas"]
    assert counted[1]["copies for rank failures"] == 2 * model
    assert "copies for rank failures" not in counted[0]


@with_world
def left_to_the_collector(world, width, same_host):
    """Return the number of objects in reference cycles after some rounds: the minimum of three.

    The minimum excludes events that happen once, such as loading a kernel or a long wait.
    """
    counts = []
    network = graph("exponential", world.size)
    mixer = mixing.open_mixer(
        network, MessageLayout((width,)), world, same_host=same_host, timeout_s=30
    )
    gc.disable()
    try:
        for t in range(3 * ROUNDS):
            if t % ROUNDS == 0:
                gc.collect()
            mixer.outbox(t)
            mixer.start(ExchangeKind.GOSSIP, t)
            mixer.finish()
            if t % ROUNDS == ROUNDS - 1:
                counts.append(gc.collect())
    finally:
        gc.enable()
    mixer.close()
    return min(counts)


@pytest.mark.parametrize(("width", "same_host"), [(256, "put"), (1 << 15, "read")])
def test_a_round_leaves_no_reference_cycles(ranks, width, same_host):
    assert max(ranks(2)(left_to_the_collector, width, same_host)) < ROUNDS
