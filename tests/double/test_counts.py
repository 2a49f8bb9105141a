"""Bytes and operations of a step on the double, and the prediction of `plan` that uses them."""

import runpy
from pathlib import Path

import pytest

from tests.cases import every
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


def counted_in_nodes(comm, ranks_per_node, settings):
    """Count the steps of a job whose ranks have a GPU each, as :func:`counted` does."""
    from mpigossip.cluster.mpi_world import MPIWorld

    tool = runpy.run_path(str(TOOL))
    with aware(), MPIWorld(comm, timeout_s=60) as world:
        counts = tool["job"](1, *settings, world=world, ranks_per_node=ranks_per_node)
    return 4 * (counts["bytes"] - counts["model_bytes"])


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
        nbytes = {key: result[0] for key, result in zip(keys, results, strict=True)}
        operations = {key: result[1] for key, result in zip(keys, results, strict=True)}
        expected = {key: update.bytes_per_element + SUM_BYTES for key, update in UPDATES.items()}
        assert nbytes == pytest.approx(expected, rel=0.02)
        launched = {key: update.operations + 1 for key, update in UPDATES.items()}
        assert operations == pytest.approx(launched, abs=2)


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


@pytest.mark.parametrize("slots", [2, every(8)])
def test_the_averages_during_backward_are_those_that_are_counted(ranks, slots):
    """The counts are of one rank, which is a slot; means are sent to the owners of the shards."""
    from mpigossip.analysis.plan.gpu_costs import ELEMENT, SUM_BYTES, UPDATES, moved_bytes
    from mpigossip.analysis.plan.gpu_costs import node_bytes as averaged_bytes

    key = next(iter(UPDATES))
    of_shard = (UPDATES[key].bytes_per_element + SUM_BYTES) / slots
    gathered = ELEMENT  # a slot reads its shard, or writes the shards of the others
    averaged = averaged_bytes(slots) + moved_bytes(slots)
    expected = of_shard + averaged + gathered
    nodes = 2 if slots == 2 else 1
    settings = [*settings_of(key), "node.bucket_mb=0.004"]
    counts = ranks(nodes * slots)(counted_in_nodes, slots, settings, timeout=300)
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("model", ["", "gpt"])
def test_plan_predicts_what_the_averages_during_backward_leave_visible(model):
    """The example of this page, with ranks that have a GPU each: the counts follow above."""
    from dataclasses import replace

    from mpigossip.analysis.plan import Choice, gpu_costs, predict
    from mpigossip.training import assemble
    from mpigossip.training.costs import ModuleSizes, sized_subject
    from mpigossip.training.machines import Machine

    slots = 8
    eager = ["node.devices=gpu:1", f"node.ranks_per_node={slots}", "node.cuda_graphs=never"]
    settings = [*settings_of(("dsgd", "awc", "adamw")), *eager]
    settings += ["task.name=language-model", "model.name=gpt"] if model else []
    what = sized_subject(assemble.load({}, settings), 10**9)
    if model:  # its first parameter is larger than a bucket
        what = replace(what, module=ModuleSizes((4 * 10**8, 36 * 10**8)))
    machine = Machine(0.25, 0.0, 0.0, 10e-6, 4e11, 10e-6, 4e11, 1e12, gpu="h100")
    gpu = gpu_costs.GPUS["h100"]
    elements = what.flat.size
    link_s, memory_s = (4 * elements / (0.85 * r) for r in (gpu.link_rate, gpu.memory_rate))
    means = gpu_costs.node_bytes(slots) / 4 + gpu_costs.moved_bytes(slots) / 4
    average_s = 2 * (slots - 1) / slots * link_s + means * memory_s
    gather_s = link_s if model else (slots - 1) / slots * link_s
    last = 4e8 / (4 * elements) if model else 64e6 / (4 * elements)
    visible_s = last * average_s + (last * gather_s if model else gather_s)
    for compute_s in (0.25, 0.012):  # in the second case, the passes are shorter than the transfers
        named = replace(machine, compute_s=compute_s)
        step_s = predict(what, named, Choice("one-peer-exponential"), 4, 1).step_s
        together = replace(named, gpu="", node_s=0.0)
        update_s = gpu_costs.update_seconds(gpu, gpu_costs.update_of(what.job), slots, elements)
        rate = slots * 0.85 * gpu.memory_rate * 4 / 12
        together = replace(together, update_s=update_s, combine_rate=rate)
        without_s = predict(what, together, Choice("one-peer-exponential"), 4, 1).step_s
        hidden_s = (1 - last) * average_s, (1 - last) * gather_s * bool(model)
        covered_s = sum(map(min, hidden_s, (compute_s * 2 / 3, compute_s / 3)))
        expected_s = average_s + gather_s - covered_s
        assert step_s - without_s == pytest.approx(expected_s, rel=1e-6)
        if compute_s == 0.25:
            assert expected_s == pytest.approx(visible_s, rel=1e-6)
