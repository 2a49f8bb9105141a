"""Bytes and operations of a step on the double, and the prediction of `plan` that uses them."""

import runpy
from pathlib import Path

import pytest

from tests.double import active
from tests.double.devices import aware

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
TOOL = Path(__file__).parents[2] / "tools/bench/gpu_counts.py"


def counted(comm, slots, settings):
    """Count the steps of jobs on this rank, without the model: bytes per element, operations."""
    from mpigossip.cluster.mpi_world import MPIWorld

    tool = runpy.run_path(str(TOOL))
    results = []
    for each in settings:
        with aware(), MPIWorld(comm, timeout_s=60) as world:
            counts = tool["job"](slots, *each, world=world)
        nbytes = 4 * (counts["bytes"] - counts["model_bytes"])
        operations = counts["operations"] - counts["model_operations"]
        results.append((nbytes, operations, counts["elements"]))
    return results


def settings_of(key):
    """Return the settings of a job whose update was counted."""
    algorithm, style, local = key
    settings = [f"algorithm.name={algorithm}"]
    settings += [f"local.name={local}"] * bool(local and algorithm == "dsgd")
    return settings + [f"algorithm.style={style}"] * bool(style)


def test_the_updates_of_plan_are_those_that_are_counted(ranks):
    from mpigossip.analysis.plan.gpu_costs import SUM_BYTES, UPDATES

    keys = [*UPDATES]
    assert len(keys) > 3
    for results in ranks(2)(counted, 1, [settings_of(key) for key in keys], timeout=400):
        for key, (nbytes, operations, _) in zip(keys, results, strict=True):
            update = UPDATES[key]
            assert nbytes == pytest.approx(update.bytes_per_element + SUM_BYTES, rel=0.02), key
            assert operations == pytest.approx(update.operations + 1, abs=2), key


def test_plan_predicts_the_step_of_the_bytes_that_are_counted(ranks):
    """The example: 4 hosts with 8 H100, a billion parameters, and 250 ms of computing."""
    from mpigossip.analysis.plan import Choice, gpu_costs, predict
    from mpigossip.training import assemble
    from mpigossip.training.costs import sized_subject
    from mpigossip.training.machines import Machine

    key = "dsgd", "atc", "adamw"
    slots = 8
    settings = [*settings_of(key), f"node.devices=cuda:0-{slots - 1}"]
    what = sized_subject(assemble.load({}, settings), 10**9)
    machine = Machine(0.25, 0.0, 0.0, 10e-6, 4e11, 10e-6, 4e11, 1e12, gpu="h100")
    predicted = predict(what, machine, Choice("one-peer-exponential"), 4, 1).step_s
    gpu = gpu_costs.GPUS["h100"]
    (((nbytes, operations, _),), *_) = ranks(2)(counted, 1, [settings_of(key)], timeout=200)
    elements = what.flat.size
    memory_s = nbytes * elements / slots / (0.85 * gpu.memory_rate)
    message_s = 10e-6 + 4 * elements / 4e11
    transfer_s = 4 * elements * (slots - 1) / slots / (0.85 * gpu.link_rate)
    expected = 0.25 + memory_s + operations * gpu_costs.LAUNCH_S + message_s + 2 * transfer_s
    assert predicted == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("slots", [2, 8])
def test_the_averages_in_a_node_are_those_that_are_counted(ranks, slots):
    """The counts are of all slots of a rank, which is a node."""
    from mpigossip.analysis.plan.gpu_costs import SUM_BYTES, UPDATES, node_bytes

    key = next(iter(UPDATES))
    of_shards = UPDATES[key].bytes_per_element + SUM_BYTES
    gathered = 4 / slots + 4  # reads a shard, and writes the whole model
    expected = of_shards + slots * (node_bytes(slots) + gathered)
    for ((nbytes, *_),) in ranks(2)(counted, slots, [settings_of(key)], timeout=200):
        assert nbytes == pytest.approx(expected, rel=0.02)
