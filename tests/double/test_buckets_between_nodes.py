"""Every transport and wire between nodes that average in buckets has the simulator's bits.

A node has a rank per GPU; with one slot, nothing is averaged, and buckets are not used
(`test_training.test_every_way_and_wire_equals_the_simulator` tests one slot, and slots of a rank).
"""

import itertools
import os

import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.mixing.lossy_wires import WIRES
from tests.cases import every, with_world
from tests.double import active
from tests.double.devices import aware, trained
from tests.double.test_backward_average import Noted

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
WAYS = ["host", "windows", "messages", "nccl"]
BUCKETS = ["node.cuda_graphs=never", "node.bucket_mb=0.004"]
STEPS = 3
ALL = [*itertools.product(WAYS, WIRES)]
NODES = [2, 3, 4, 6]


def sample(n):
    """Return pairs in which each transport and wire occurs; all pairs occur for some n."""
    first = NODES.index(n)
    return [(WAYS[(first + index) % len(WAYS)], wire) for index, wire in enumerate(WIRES)]


def settings_of(wire):
    """Return a job for a wire; `choco` accepts lossy ones."""
    name = "dmsgd" if wire == "fp32" else "choco"
    return [f"algorithm.name={name}", "graph.name=ring", f"node.wire={wire}", "node.density=0.1"]


def train(world, pairs):
    """Train for each pair of a transport and a wire; return parameters, and starts of averages."""
    nodes = world.size // world.nodes.per_node
    results = []
    # NCCL needs separate GPUs for each rank, but torch's device guard for tests has 8 indices.
    os.environ["MPIGOSSIP_DOUBLE_HOST"] = f"{world.rank}-"
    try:
        for way, wire in pairs:
            settings = [*settings_of(wire), *BUCKETS, f"node.exchange={way}"]
            with aware(), Noted() as noted:
                full = trained(world, nodes, "mlp", f"cuda:{world.rank % 8}", settings, STEPS)
            results.append((full.numpy(), len(noted.during)))
    finally:
        del os.environ["MPIGOSSIP_DOUBLE_HOST"]
    return results


@with_world(per=2)
def two_slots(world, pairs):
    return train(world, pairs)


@with_world(per=8)
def eight_slots(world, pairs):
    return train(world, pairs)


def check(ranks, n, slots, pairs):
    """Compare the parameters of each rank with the simulator's."""
    function = two_slots if slots == 2 else eight_slots
    got = ranks(n * slots)(function, pairs, timeout=60 + 30 * len(pairs) * n)
    references = {}
    wrong = []
    for index, (way, wire) in enumerate(pairs):
        if wire not in references:
            settings = settings_of(wire)
            references[wire] = trained(SingleProcess(), n, "mlp", f"cpu:{slots}", settings, STEPS)
        for rank, results in enumerate(got):
            full, during = results[index]
            assert during > STEPS, "no buckets"
            if not torch.equal(torch.from_numpy(full)[0], references[wire][rank // slots]):
                wrong.append((way, wire, rank))
    assert len(references) == len({wire for _, wire in pairs}) and not wrong


def test_all_pairs_are_sampled():
    assert sorted(itertools.chain(*map(sample, NODES))) == sorted(ALL)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("n", "slots"),
    [(2, 2), every(3, 2), every(4, 2), every(6, 2), *(every(n, 8) for n in NODES)],
)
def test_transports_and_wires_between_nodes_with_buckets_have_the_simulators_bits(ranks, n, slots):
    if n * slots > max(16, torch.cuda.device_count()):
        pytest.skip(f"{n * slots} ranks take long: MPIGOSSIP_DOUBLE=48")
    check(ranks, n, slots, sample(n))


@pytest.mark.every
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("slots", [2, 8])
@pytest.mark.parametrize("n", NODES)
def test_all_pairs_between_nodes_with_buckets_have_the_simulators_bits(ranks, n, slots):
    if torch.cuda.device_count() < 48:
        pytest.skip("288 trainings take long: MPIGOSSIP_DOUBLE=48")
    check(ranks, n, slots, ALL)
