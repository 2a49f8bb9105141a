"""Nodes of several ranks equal one rank with equally many slots, and the simulator, bitwise."""

import time

import numpy as np
import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.runs import start_and_resume
from mpigossip.runs.model_export import export
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.cases import every, with_world

BASE = [
    "data.batch=2",
    "run.epochs=1",
    "log.consensus_every=2",
    "schedule.scale=none",
    "node.timeout_s=30",
]


def job(*settings, folder=None):
    base = [*BASE, *([f"run.output={folder}"] if folder else [])]
    flat = [part for setting in settings for part in setting.split()]
    return assemble.load({"model": {"name": "mlp"}}, [*base, *flat])


def trained(world, n, settings, steps=4):
    """Return parameters of the local nodes, (rows, P), and losses and distances by step."""
    assembly = assemble.assemble(job(*settings), world, n)
    seen = []
    for _ in range(steps):
        record = assembly.trainer.step()
        seen.append((record.loss.numpy(), record.consensus_distance))
    full = assembly.trainer.replicas.full
    assert all(torch.equal(one, full[0]) for one in full)  # all slots of a node
    result = full[-1].clone().numpy()
    assembly.close()
    return result, seen


@with_world
def in_shape(world, per, own, settings):
    world.group_into_nodes(per)
    shape = [f"node.ranks_per_node={per}", f"node.devices=cpu:{own}"]
    results = [trained(world, world.nodes.count, [*one, *shape]) for one in settings]
    return world.nodes.inter_node.rank, results


CASES = [
    # ranks, ranks per node, slots of each, trainings
    (6, 3, 1, [["algorithm.name=dmsgd"], ["algorithm.name=dsgd node.wire=qsgd node.levels=7"]]),
    (4, 2, 2, [["algorithm.name=dmsgd graph.name=ring node.same_host=put"],
               ["algorithm.name=d2 algorithm.clip_norm=0.5 algorithm.decay_all=false "
                "algorithm.weight_decay=1e-2"]]),
    (6, 2, 1, [["algorithm.name=choco graph.name=ring node.wire=top-k node.density=0.1"],
               ["algorithm.name=dsgd local.name=adamw "
                "cadence.name=gossip-pga cadence.period=2"]]),
    (6, 3, 1, [["algorithm.name=parallel graph.name=complete node.wire=bf16"],
               ["algorithm.name=sgp graph.weights=push graph.name=exponential"],
               ["algorithm.name=slowmo algorithm.accumulate=2 node.same_host=put"]]),
    (8, 2, 1, [["algorithm.name=dmsgd-vanilla local.name=nesterov node.wire=bf16"],
               ["algorithm.name=dsgt graph.name=ring data.partition=sorted node.same_host=put"]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "per", "own", "settings"), [*CASES[:2], *(every(*c) for c in CASES[2:])]
)
def test_nodes_of_several_ranks_equal_one_rank_with_slots(ranks, size, per, own, settings):
    results = ranks(size)(in_shape, per, own, settings, timeout=120)
    for at, one in enumerate(settings):
        with SingleProcess() as alone:
            expected, seen = trained(alone, size // per, [*one, f"node.devices=cpu:{per * own}"])
        for node, runs in results:
            parameters, distances = runs[at]
            assert np.array_equal(parameters[0], expected[node]), (one, node)
            assert [loss[0] for loss, _ in distances] == [loss[node] for loss, _ in seen]
            assert [distance for _, distance in distances] == pytest.approx(
                [distance for _, distance in seen], nan_ok=True, rel=1e-12
            )


def test_a_simulated_job_counts_the_ranks_of_a_node():
    with SingleProcess() as alone:
        expected, _ = trained(alone, 3, ["node.devices=cpu:4"], 2)
        result, _ = trained(alone, 3, ["node.devices=cpu:2 node.ranks_per_node=2"], 2)
    assert np.array_equal(result, expected)


@with_world
def whole_runs(world, folder, per, own, second, files):
    """Train a run of 6 steps, and one that resumes at step 3 of a run of the other shape."""
    settings = [
        "run.steps=6",
        "checkpoint.every_steps=3",
        "log.flush_steps=3",
        "run.evaluate_every=0",
        "checkpoint.keep=5",
        "model.name=resnet20",
        "model.width=4",
        *files,
    ]
    shape = [f"node.ranks_per_node={per}", f"node.devices=cpu:{own}"]
    name = f"{per}x{own}"
    whole = job(*settings, *shape, folder=f"{folder}/{name}")
    summary = [start_and_resume.train(whole, world)]
    if second:
        summary.append(
            start_and_resume.resume(folder / "other", ["run.steps=6", *shape], world, None)
        )
    else:
        half = job("run.steps=3", *settings[1:], *shape, folder=f"{folder}/other")
        start_and_resume.train(half, world)
    return summary


@pytest.mark.parametrize(
    ("first", "second", "files", "each"),
    [
        every(((2, 1), 2), ((4, 2), 1), [], 1),
        every(((8, 2), 1), ((4, 1), 2), [], 1),
        every(((4, 1), 2), ((8, 2), 1), ["checkpoint.one_file_gb=0"], 2),
        (((4, 2), 2), ((2, 1), 4), ["checkpoint.one_file_gb=0"], 4),
        # slots cannot put permuted parameters in order
        every(
            ((4, 2), 1), ((2, 1), 2), ["checkpoint.one_file_gb=0", "node.channels_last=always"], 1
        ),
    ],
)
def test_runs_resume_in_the_other_shape_bitwise_identically(
    ranks, tmp_path, first, second, files, each
):
    """The model has norm buffers, one set per slot; files, log and summary are as with one rank.

    This also holds with one file per slot.
    """
    results = []
    for at, ((size, per), own) in enumerate((first, second)):
        given = tmp_path, per, own, at == 1, files
        results += ranks(size)(whole_runs, *given, timeout=300)[0]
    digests = {one["digest"] for one in results}
    assert len(digests) == 1
    assert len({(one["accuracy"], one["bytes_sent"]) for one in results}) == 1
    names = [f"{per}x{own}" for (_, per), own in (first, second)]
    nodes = first[0][0] // first[0][1]
    logs = [read(tmp_path / name / "log.h5") for name in names]
    for name in ("loss", "bytes_sent", "kind"):
        one, other = (log.steps[name] for log in logs)
        assert one.shape == (6, nodes)
        assert np.array_equal(one, other), name
    saved = [checkpoint.folder(tmp_path / name, 6) for name in (*names, "other")]
    for node in range(nodes):
        states = [checkpoint.read_node(path, node) for path in saved]
        for state in states[1:]:
            assert np.array_equal(state.parameters, states[0].parameters)
            assert state.arrays.keys() == states[0].arrays.keys()
            for key, array in states[0].arrays.items():
                assert np.array_equal(state.arrays[key], array), key
    assert [checkpoint.verify(path) for path in saved] == [[]] * 3
    (cut,) = [path for path, name in zip(saved, names, strict=False) if not name.startswith("1x")]
    assert len(list(cut.glob("node-*.h5"))) == nodes * each
    assert (cut / f"node-0000-{each - 1:04d}.h5").exists() == (each > 1)
    for path in saved:
        export(path, tmp_path / f"{path.parents[1].name}.safetensors")
    assert len({(tmp_path / f"{name}.safetensors").read_bytes()[-1000:] for name in names}) == 1


@with_world(per=2)
def evaluated(world):
    """Run an evaluation that takes more than twice the time limit of ranks of a node."""
    from mpigossip.data.sources import Source
    from mpigossip.training.evaluate import evaluate

    shape = ["node.ranks_per_node=2", "node.devices=cpu:1", "data.batch=64"]
    assembly = assemble.assemble(job(*shape), world, 2)
    replicas = assembly.trainer.replicas
    node = world.nodes.intra_node
    objective = replicas.objective
    batches = []

    class Slow:
        metrics = objective.metrics

        def tested(self, module, batch):
            batches.append(1)
            time.sleep(0.2)
            return objective.tested(module, batch)

    replicas.objective = Slow()
    node.timeout_s = 1.0
    whole = Source.test_batch
    Source.test_batch = 16
    began = time.monotonic()
    result = evaluate(replicas, assembly.trainer.mixer, assembly.loader)
    spent = time.monotonic() - began
    node.timeout_s = 30
    Source.test_batch = whole
    assembly.close()
    return result.accuracy, spent, len(batches)


def test_the_ranks_of_a_node_wait_for_a_long_evaluation(ranks):
    """Slot 0 evaluates; the time limit counts from its last batch."""
    evaluations = ranks(4)(evaluated)
    assert len({accuracy for accuracy, _, _ in evaluations}) == 1
    assert all(spent > 2 * 2 * 1.0 for _, spent, _ in evaluations), evaluations
    assert [bool(count) for _, _, count in evaluations] == [True, False] * 2


@with_world
def refusals(world, folder, settings):
    said = []
    for each in settings:
        with pytest.raises(JobError) as caught:
            start_and_resume.train(job(*each, folder=folder), world)
        said.append(caught.value.messages)
    return said


REFUSED = [
    (["node.ranks_per_node=4"], "which can't form nodes of 4 ranks; start 4 or 8 there"),
    (["node.ranks_per_node=2 node.shard=false"], "node.shard = false: with node.ranks_per_node"),
    (["node.ranks_per_node=2 run.survive=true"], "use node.ranks_per_node = 1"),
    (["node.ranks_per_node=2 graph.name=one-peer-hypercube"], "(6 ranks, 2 per node"),
]


def test_impossible_shapes_are_rejected_with_a_message(ranks, tmp_path):
    said = ranks(6)(refusals, tmp_path, [settings for settings, _ in REFUSED])
    for rank in said:
        assert len(rank) == len(REFUSED)
        for messages, (_, words) in zip(rank, REFUSED, strict=True):
            assert any(words in text for text in messages), messages
