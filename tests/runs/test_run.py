"""Complete runs: simulated equals ranks, a resumed run equals one that never stopped, and more."""

import contextlib
import io
import re
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.analysis.report import table
from mpigossip.cli import main
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.data import partition
from mpigossip.mixing.base import ExchangeKind
from mpigossip.runs import run, start_and_resume
from mpigossip.runs.hooks import Hook
from mpigossip.runs.job import JobNode, train
from mpigossip.runs.run import Run, State
from mpigossip.runs.summary import describe
from mpigossip.store import checkpoint
from mpigossip.store import manifest as manifests
from mpigossip.store.log import read
from mpigossip.store.log_reading import with_nan
from mpigossip.training import assemble
from mpigossip.training.loop import NonFiniteError, Trainer
from tests.cases import every, naming, on_each, with_world
from tests.store.examples import flip_bit

ALGORITHMS = [
    "algorithm.name=dmsgd",
    "algorithm.name=dmsgd algorithm.momentum=delayed",
    "algorithm.name=dmsgd-vanilla local.name=nesterov algorithm.weight_decay=1e-3 "
    "algorithm.decay_all=false algorithm.clip_norm=1.0",
    "algorithm.name=dsgd algorithm.style=awc local.name=adamw schedule.lr=0.01 "
    "local.decoupled_decay=0.01",
    "algorithm.name=dsgd algorithm.accumulate=2",
]
GRAPHS = [
    "exponential",
    "one-peer-exponential",
    "ring",
    "complete",
    "identity",
    "one-peer-hypercube",
]
ORDERS = ["graph.order=permuted", "graph.order=uniform"]


def job(*settings, folder=None):
    base = ["data.batch=2", "run.epochs=1", "log.consensus_every=3", "schedule.scale=none"]
    base += [f"run.output={folder}"] if folder else []
    flat = [part for setting in settings for part in setting.split()]
    return assemble.load({"model": {"name": "lenet"}}, [*base, *flat])


def trained(world, n, settings, steps):
    """Return parameters of the local nodes after some steps, (rows, P), and the losses."""
    assembly = assemble.assemble(job(*settings), world, n)
    losses = [assembly.trainer.step().loss.numpy() for _ in range(steps)]
    full = assembly.trainer.replicas.full[-1].clone().numpy()
    assembly.close()
    return full, np.array(losses)


def cases(n):
    """Return algorithms for n = 1, 2 and 3, graphs for n = 1, 4, 6 and 8.

    With the slots and ways of the test, all pairs of an algorithm, or a graph, and a number of
    slots or a way occur. The battery in tests/algorithms has algorithms on six nodes.
    """
    if n <= 3:
        yield from [[algorithm] for algorithm in [*ALGORITHMS, "algorithm.name=parallel"]]
        yield from [["algorithm.name=dsgd", order] for order in ORDERS]
    for graph in GRAPHS if n not in (2, 3) else ():
        if graph != "one-peer-hypercube" or not n & (n - 1):
            yield ["algorithm.name=dmsgd", f"graph.name={graph}"]


def all_cases_on_ranks(comm, slots, same_host):
    from mpigossip.cluster.mpi_world import MPIWorld

    world = MPIWorld(comm)
    node = f"node.devices=cpu:{slots}", f"node.same_host={same_host}", "node.timeout_s=30"
    found = [trained(world, comm.size, [*settings, *node], 4) for settings in cases(comm.size)]
    world.close()
    return found


_SIMULATED: dict = {}


def simulated(n, slots):
    if (n, slots) not in _SIMULATED:
        torch.set_num_threads(1)
        node = f"node.devices=cpu:{slots}"
        _SIMULATED[n, slots] = [
            trained(SingleProcess(), n, [*settings, node], 4) for settings in cases(n)
        ]
    return _SIMULATED[n, slots]


@pytest.mark.both
@pytest.mark.parametrize(
    "n, slots, same_host",
    [
        *((3, 1, "read"), (4, 2, "put"), every(1, 2, "read"), every(2, 1, "put")),
        *(every(6, 2, "read"), every(8, 1, "read")),
    ],
)
def test_ranks_equal_the_simulator_to_the_last_bit(ranks, n, slots, same_host):
    got = ranks(n)(all_cases_on_ranks, slots, same_host, timeout=150)
    for index, settings in enumerate(cases(n)):
        full, losses = simulated(n, slots)[index]
        assert (np.concatenate([rank[index][0] for rank in got]) == full).all(), settings
        assert (np.concatenate([rank[index][1] for rank in got], axis=1) == losses).all(), settings


@on_each("local", ["momentum", "adamw"])
@on_each("slots", [1, 2])
def test_parallel_sgd_is_a_plain_loop_on_the_joined_batch(local, slots):
    n = 4
    made = job(
        "algorithm.name=parallel",
        f"local.name={local}",
        "schedule.lr=0.01",
        "algorithm.weight_decay=1e-3",
        f"node.devices=cpu:{slots}",
        "model.name=mlp",
        "model.hidden=[]",  # no kinks: at a kink, rounding decides the derivative
    )
    assembly = assemble.assemble(made, SingleProcess(), n)
    module = assemble.make_model(made, assembly.source)
    rate = assembly.trainer.rate
    if local == "momentum":
        plain = torch.optim.SGD(module.parameters(), 1.0, momentum=0.9, weight_decay=1e-3)
    else:  # weight_decay is part of the gradient, as in torch's Adam
        plain = torch.optim.Adam(module.parameters(), 1.0, weight_decay=1e-3)
    for step in range(20):
        batches = assembly.loader.step(step)
        inputs = torch.cat([b.inputs for b in batches])
        targets = torch.cat([b.targets for b in batches])
        plain.param_groups[0]["lr"] = rate(step)
        plain.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), targets).backward()
        plain.step()
        assembly.trainer.step()
    flat = assembly.trainer.replicas.flat
    ours = flat.views(assembly.trainer.replicas.full[0][n - 1])
    theirs = dict(module.named_parameters())
    for name, value in zip(flat.names, ours, strict=True):
        assert torch.allclose(value, theirs[name], atol=2e-5, rtol=1e-4), name
    full = assembly.trainer.replicas.full[0]
    assert (full == full[0]).all(), "nodes are not bitwise identical"
    assembly.close()


DETERMINISTIC = [
    "loss",
    "lr",
    "kind",
    "gradient_norm",
    "mixed_distance",
    "consensus_distance",
    "bytes_sent",
]


NORMS = "algorithm.name=dmsgd model.name=resnet20 model.width=4 data.batch=1 run.steps=12"
AHEAD = "algorithm.name=dsgd local.name=adamw algorithm.style=awc schedule.lr=0.01 model.name=mlp"
DRAWN = "algorithm.name=dmsgd graph.order=permuted model.name=mlp"
SIGNS = "algorithm.name=choco graph.name=complete node.wire=sign model.name=mlp run.steps=12"


@pytest.mark.parametrize(
    "settings, stops",
    [(NORMS, (1, 7)), (AHEAD, (44,)), (DRAWN, (30,)), (SIGNS, (7,))],
)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, settings, stops):
    settings = ["data.batch=16", "run.epochs=2", "checkpoint.keep=9", *settings.split()]

    def ended(folder):
        states = [checkpoint.read_node(checkpoint.latest(folder), node) for node in range(2)]
        steps = read(folder / "log.h5").steps
        return [one.arrays for one in states] + [{name: steps[name] for name in DETERMINISTIC}]

    summary = start_and_resume.train(job(*settings, folder=tmp_path / "whole"), SingleProcess(), 2)
    for stop in stops:
        cut = tmp_path / f"cut-{stop}"
        start_and_resume.train(job(*settings, f"run.steps={stop}", folder=cut), SingleProcess(), 2)
        again = start_and_resume.resume(
            cut, [f"run.steps={summary['steps']}"], SingleProcess(), None
        )
        assert again["digest"] == summary["digest"], stop
        for one, other in zip(ended(tmp_path / "whole"), ended(cut), strict=True):
            assert one.keys() == other.keys(), stop
            for name in one:
                assert np.array_equal(one[name], other[name], equal_nan=True), (stop, name)


def test_a_run_stops_at_the_file_stop_and_resumes(tmp_path):
    made = job("run.epochs=2", "model.name=mlp", "data.batch=16", folder=tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    summary = start_and_resume.train(made, SingleProcess(), 2)
    assert not summary["finished"] and summary["steps"] < 20
    assert not (tmp_path / "run" / "STOP").exists()
    fewer = [f"run.steps={summary['steps'] - 1}"]  # ends the run here
    ended = start_and_resume.resume(tmp_path / "run", fewer, SingleProcess(), None)
    assert ended["finished"] and ended["steps"] == summary["steps"] and "accuracy" in ended
    assert start_and_resume.train(made, SingleProcess(), 2)["finished"]


def test_a_late_stop_does_not_apply_to_the_next_run(tmp_path):
    (tmp_path / "STOP").touch()
    made = job(
        "run.steps=3", "model.name=mlp", folder=tmp_path
    )  # fewer steps than an agreement takes
    assert start_and_resume.train(made, SingleProcess(), 2)["finished"]
    assert not (tmp_path / "STOP").exists()


@pytest.mark.parametrize("local, lr", [every("momentum", 0.1), ("adamw", 0.01)])
def test_a_run_resumes_with_other_nodes_and_slots(tmp_path, local, lr):
    """8 -> 3 -> 5 nodes, then 2 slots: each starts from the exact average in the same epoch."""
    settings = [
        "algorithm.name=dsgd",
        f"local.name={local}",
        "run.epochs=5",
        f"schedule.lr={lr}",
        "data.batch=8",
        "model.name=mlp",
    ]
    folder = tmp_path / "run"
    summary = {}
    start_and_resume.train(job(*settings, "run.steps=45", folder=folder), SingleProcess(), 8)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        start_and_resume.resume(folder, ["run.steps=46"], SingleProcess(), 3)
    assert "exact average of 8 nodes" in told.getvalue() and "averaged: " in told.getvalue()
    sent = with_nan(read(folder / "log.h5").steps["bytes_sent"])
    assert np.isnan(sent[-1, 3:]).all() and np.nanmean(sent[-1]) > np.nanmean(sent[-2])
    with pytest.raises(JobError, match=naming("run.output", "continues")):
        start_and_resume.resume(folder, [f"run.output={tmp_path / 'other'}"], SingleProcess(), 3)
    for n, extra, until in ((5, [], 110), (5, ["node.devices=cpu:2"], "none")):
        summary = start_and_resume.resume(
            folder, [f"run.steps={until}", *extra], SingleProcess(), n
        )
    assert summary["finished"] and abs(summary["epochs"] - 5) < 1e-9
    assert summary["accuracy"] > 0.9
    assert len(read(folder / "log.h5").steps["loss"]) == summary["steps"]


def test_a_resume_with_another_partition_is_rejected(tmp_path, monkeypatch):
    """Another version of NumPy, or changed data, give nodes other samples at equal settings."""
    settings = ["model.name=mlp", "data.partition=dirichlet"]
    start_and_resume.train(job(*settings, "run.steps=2", folder=tmp_path), SingleProcess(), 3)
    meta = checkpoint.read_manifest(checkpoint.latest(tmp_path)).meta
    assert len(meta["partition"]) == 64 and meta["numpy"] == np.__version__
    # another batch leaves the partition as it is
    start_and_resume.resume(tmp_path, ["run.steps=3", "data.batch=4"], SingleProcess(), None)

    drawn = partition._dirichlet
    monkeypatch.setattr(
        partition, "_dirichlet", lambda labels, n, seed, alpha: drawn(labels, n, seed + 1, alpha)
    )
    with pytest.raises(ValueError, match=naming('data.partition = "dirichlet"', "restore")):
        start_and_resume.resume(tmp_path, ["run.steps=4"], SingleProcess(), None)
    with monkeypatch.context() as patch:
        patch.setattr(np, "__version__", "9.8.7")
        with pytest.raises(ValueError, match=naming("pip install numpy", "9.8.7")):
            start_and_resume.resume(tmp_path, ["run.steps=4"], SingleProcess(), None)
    # a partition that the user asks for, and other nodes, are accepted
    kept = [tmp_path.with_name(name) for name in ("sorted", "nodes", "old")]
    for folder in kept:
        shutil.copytree(tmp_path, folder)
    start_and_resume.resume(
        kept[0], ["run.steps=4", "data.partition=sorted"], SingleProcess(), None
    )
    start_and_resume.resume(kept[1], ["run.steps=4"], SingleProcess(), 2)
    # and a checkpoint of an earlier version, which has no digest
    path = checkpoint.latest(kept[2])
    manifest = checkpoint.read_manifest(path)
    old = {key: value for key, value in manifest.meta.items() if key not in ("partition", "numpy")}
    manifests.write(path / "checkpoint.h5", replace(manifest, meta=old))
    assert start_and_resume.resume(kept[2], ["run.steps=4"], SingleProcess(), None)["steps"] == 4


def test_another_batch_resumes_at_the_same_fraction_of_the_epoch(tmp_path):
    settings = ["model.name=mlp", "data.batch=8", "run.epochs=3"]
    start_and_resume.train(job(*settings, "run.steps=45", folder=tmp_path), SingleProcess(), 2)
    change = ["data.batch=16", "run.steps=none"]
    summary = start_and_resume.resume(tmp_path, change, SingleProcess(), None)
    # 1437 samples: 89 steps per epoch before, 44 now; 45 steps are half an epoch
    assert summary["epochs"] == 3 and summary["steps"] == 45 + 3 * 44 - round(44 * 45 / 89)


def test_the_summary_covers_both_attempts_and_is_shown_as_printed(tmp_path):
    settings = ["model.name=mlp", "data.batch=8"]
    first = start_and_resume.train(
        job(*settings, "run.steps=30", folder=tmp_path), SingleProcess(), 2
    )
    with contextlib.redirect_stdout(io.StringIO()) as told:
        second = start_and_resume.resume(tmp_path, ["run.steps=32"], SingleProcess(), None)
    log = read(tmp_path / "log.h5")
    for name in ("compute_s", "exchange_s", "node_s", "idle_s"):
        assert second[name] == pytest.approx(log.steps[name].mean(1).sum(), rel=1e-9), name
        assert second[name] > first[name] or name == "idle_s"
    busy = sum(second[name] for name in second if name.endswith("_s"))
    assert second["samples_per_second"] == pytest.approx(32 * 2 * 8 / busy)
    shown = table(log)
    assert shown.endswith(describe(second)) and told.getvalue().endswith(describe(second) + "\n")


def test_a_run_killed_before_its_summary_gets_one(tmp_path, monkeypatch):
    from mpigossip.store.log import LogWriter

    made = job("model.name=mlp", "run.steps=4", folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "summary", lambda self, values: None)
        first = start_and_resume.train(made, SingleProcess(), 2)
    again = start_and_resume.train(made, SingleProcess(), 2)
    assert again["digest"] == first["digest"] and again["accuracy"] == first["accuracy"]
    assert read(tmp_path / "log.h5").summary["digest"] == first["digest"]


def test_a_method_with_another_state_is_reset_and_this_is_reported(tmp_path):
    start_and_resume.train(job("run.steps=3", folder=tmp_path), SingleProcess(), 2)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        change = ["algorithm.name=dsgd", "local.name=adamw", "run.steps=5"]
        start_and_resume.resume(tmp_path, change, SingleProcess(), None)
    assert "momentum, reset: first, second" in told.getvalue()
    with pytest.raises(ValueError, match=naming("another model")):
        start_and_resume.resume(tmp_path, ["model.name=mlp", "run.steps=6"], SingleProcess(), None)


def test_another_job_is_kept_out_of_a_run_directory(tmp_path):
    start_and_resume.train(job("run.steps=2", folder=tmp_path), SingleProcess(), 1)
    with pytest.raises(ValueError, match=naming("another job", "data.batch = 3", "run.output")):
        start_and_resume.train(
            job("run.steps=2", "data.batch=3", folder=tmp_path), SingleProcess(), 1
        )
    with (
        start_and_resume.locked(tmp_path, SingleProcess()),
        pytest.raises(ValueError, match=naming("in use", "process")),
    ):
        start_and_resume.train(job("run.steps=2", folder=tmp_path), SingleProcess(), 1)


def test_train_continues_a_run_that_was_resumed(tmp_path):
    words = ["model.name=mlp", "run.name=named"]
    for call, steps in (
        (start_and_resume.train, 2),
        (start_and_resume.resume, 3),
        (start_and_resume.train, 3),
    ):
        made = job(*words, f"run.steps={steps}", folder=tmp_path / "{name}")
        given = (
            [tmp_path / "named", [f"run.steps={steps}"]]
            if call is start_and_resume.resume
            else [made]
        )
        assert call(*given, SingleProcess(), 1)["steps"] == steps


def test_the_number_of_nodes_is_part_of_the_job(tmp_path):
    made = job("run.steps=2", "model.name=mlp", folder=tmp_path)
    start_and_resume.train(made, SingleProcess(), 2)
    with pytest.raises(ValueError, match=naming("2 nodes", "3", "resume", "--nodes 3")):
        start_and_resume.train(made, SingleProcess(), 3)
    assert start_and_resume.resume(tmp_path, ["run.steps=4"], SingleProcess(), 3)["nodes"] == 3
    with pytest.raises(ValueError, match=naming("3 nodes", "2")):
        start_and_resume.train(
            job("run.steps=4", "model.name=mlp", folder=tmp_path), SingleProcess(), 2
        )


def test_damaged_checkpoints_are_named_and_kept(tmp_path, capsys):
    folder = tmp_path / "run"
    place = tmp_path / "run/checkpoints"
    words = ["model.name=mlp", "model.hidden=[4]", "checkpoint.every_steps=2", "run.steps=6"]
    made = job(*words, "checkpoint.keep=3", folder=folder)
    digest = start_and_resume.train(made, SingleProcess(), 2)["digest"]
    paths = [place / f"step-0000000{step}" for step in (2, 4, 6)]
    flip_bit(paths[2] / "checkpoint.h5")
    (paths[1] / "node-0001.h5").unlink()
    assert main(["checkpoint", "verify", str(folder)]) == 2
    told = capsys.readouterr().err
    assert (
        f"{paths[2]}/checkpoint.h5 is damaged" in told
        and f"complete checkpoint is {paths[0]}" in told
    )
    before = (paths[2] / "checkpoint.h5").read_bytes()
    assert start_and_resume.train(made, SingleProcess(), 2)["digest"] == digest
    told = capsys.readouterr().out
    for name, path in (("checkpoint.h5", paths[2]), ("node-0001.h5", paths[1])):
        assert f"{path / name} " in told and f"renamed to {path.name}.damaged" in told
    assert f"The run continues from {paths[0]}" in told
    assert (paths[2].with_suffix(".damaged") / "checkpoint.h5").read_bytes() == before
    for path in paths:
        flip_bit(path / "checkpoint.h5")
    there = sorted(place.rglob("*"))
    starts = [
        lambda: start_and_resume.train(made, SingleProcess(), 2),
        lambda: start_and_resume.resume(folder, [], SingleProcess(), None),
        lambda: custom_loop(folder),
    ]
    command = f"mv {place} {place}.damaged"
    for start in starts:
        with pytest.raises(JobError) as refused:
            start()
        for path in paths:
            assert f"{path}/checkpoint.h5 is damaged" in str(refused.value)
        assert f"`{command}`" in str(refused.value)
        assert sorted(place.rglob("*")) == there
    for path in paths:  # renamed checkpoints also prevent a start from step 0
        path.rename(path.with_suffix(".damaged.damaged"))
    with pytest.raises(JobError, match=naming("complete")):
        start_and_resume.train(made, SingleProcess(), 2)
    subprocess.run(command.split(), check=True)
    (place / "step-00000002.writing").mkdir(parents=True)  # a first checkpoint that was interrupted
    assert start_and_resume.train(made, SingleProcess(), 2)["digest"] == digest


def custom_loop(folder):
    model = torch.nn.Linear(2, 1)
    with SingleProcess() as world:
        mpigossip.Gossip(world, model, torch.optim.SGD(model.parameters(), 0.1), run=folder)


class Lost(Hook):
    """Hook that makes 3 nodes look like the survivors of 4."""

    def start(self, progress, assembly):
        progress.asked = 4
        progress.lost_at = 2
        progress.lost = ["rank 1 on a failed after step 2 (0.10 s lost)"]


def test_after_a_rank_failure_the_next_attempt_has_all_nodes_and_reports_the_cost(
    tmp_path, monkeypatch
):
    made = job("model.name=mlp", "data.batch=8", folder=tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    with monkeypatch.context() as patch:
        patch.setattr(run, "named_hooks", lambda *_: [Lost()])
        assert not start_and_resume.train(made, SingleProcess(), 3)["finished"]
    with pytest.raises(ValueError, match=naming("4 nodes", "3")):
        start_and_resume.train(made, SingleProcess(), 3)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        summary = start_and_resume.train(made, SingleProcess(), 4)
    facts = ("2 (0.10 s lost)", "6 steps", "3 of 4", "3 nodes")
    assert re.search(naming(facts), told.getvalue())
    assert summary["finished"] and "rank 1 on a" in summary["lost"]
    assert read(tmp_path / "run" / "log.h5").steps["loss"].shape[1] == 4


def test_a_loss_that_is_not_finite_names_step_and_node(tmp_path):
    made = job("schedule.lr=1e15", "algorithm.name=dsgd", folder=tmp_path)
    with pytest.raises(NonFiniteError, match=naming("loss of node", "step")):
        start_and_resume.train(made, SingleProcess(), 2)


BAD = {
    "algorithm.name=dmsgd node.devices=cpu:2": ("step 3", "node 1", "send"),
    "algorithm.name=parallel": ("step 3", "node 1", "send"),
    # no message follows the last gradient, so the checkpoint reveals it
    "algorithm.name=dsgd algorithm.style=awc": ("checkpoint of step 4", "node 1", "1 NaN"),
    "algorithm.name=cpsgd cadence.period=8 local.name=adamw": ("checkpoint of step 4", "node 1"),
}


def poisoned(patch):
    """Make the gradient of node 1 not finite at step 3, but not its loss."""
    check = Trainer._check  # called for the losses, after the gradients are computed

    def bad(self, figures, *step):
        if self.engine.index == 3 and 1 in self.mixer.local_nodes:
            flat = self.replicas.flat
            row = self.mixer.local_nodes.index(1)
            self.replicas.grads[0][row, flat.offsets[flat.names.index("3.bias")]] = np.nan
        check(self, figures, *step)

    patch.setattr(Trainer, "_check", bad)


def test_a_bad_gradient_names_its_node_and_leaves_the_last_good_checkpoint(tmp_path):
    small = ["model.name=mlp", "model.hidden=[4]", "data.batch=8", "checkpoint.keep=1"]
    for at, (settings, words) in enumerate(BAD.items()):
        whole = job(settings, *small, "run.steps=6", folder=tmp_path / f"whole-{at}")
        more = [*small, "run.steps=4", "checkpoint.every_steps=1"]
        cut = job(settings, *more, folder=tmp_path / f"cut-{at}")
        expected = start_and_resume.train(whole, SingleProcess(), 4)["digest"]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NonFiniteError) as found:
            poisoned(patch)
            start_and_resume.train(cut, SingleProcess(), 4)
        assert re.search(naming(words, "3.bias"), str(found.value)), settings
        path = checkpoint.latest(cut.run.folder)
        assert path.name in ("step-00000002", "step-00000003"), settings
        assert checkpoint.verify(path) == [], settings
        again = start_and_resume.resume(cut.run.folder, ["run.steps=6"], SingleProcess(), 4)
        assert again["digest"] == expected, settings


@with_world
def bad_on_a_rank(world, folder):
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        settings = ["algorithm.name=cpsgd", "model.name=mlp", "model.hidden=[4]"]
        more = ["data.batch=8", "checkpoint.every_steps=1", "run.steps=4"]
        assembly = assemble.assemble(job(*settings, *more, folder=folder), world, world.size)
        with pytest.raises(NonFiniteError) as found:
            train(JobNode(assembly, world))
        assembly.close()
    return str(found.value)


def test_all_ranks_stop_if_one_cannot_save_finite_values(ranks, tmp_path):
    first, *others = ranks(3)(bad_on_a_rank, str(tmp_path))
    assert others == [first, first] and checkpoint.steps(tmp_path) == [2, 3]
    assert re.search(naming("checkpoint of step 4", "node 1"), first)


def test_evaluation_uses_the_average_and_does_not_change_training():
    from mpigossip.training.evaluate import evaluate

    def steps(evaluating):
        assembly = assemble.assemble(job("graph.name=ring"), SingleProcess(), 3)
        for _ in range(4):
            assembly.trainer.step()
            if evaluating:
                found = evaluate(assembly.trainer.replicas, assembly.trainer.mixer, assembly.loader)
                assert 0 <= found.accuracy <= 1 and len(found.local["accuracy"]) == 3
        return assembly.trainer.replicas.full[0]

    assert (steps(False) == steps(True)).all()


def test_local_steps_send_nothing_and_global_steps_agree():
    for name, kind in (("never", ExchangeKind.LOCAL), ("global", ExchangeKind.GLOBAL)):
        assembly = assemble.assemble(job(f"cadence.name={name}"), SingleProcess(), 3)
        record = assembly.trainer.step()
        full = assembly.trainer.replicas.full[0]
        assert record.kind is kind and assembly.trainer.engine.round == 0
        assert (sum(record.bytes_sent) > 0) == (kind is ExchangeKind.GLOBAL)
        assert (full == full[0]).all().item() == (kind is ExchangeKind.GLOBAL)


@pytest.mark.parametrize(
    "settings, n, message",
    [
        ("graph.name=one-peer-hypercube", 6, ("power of two", "6", "base-2")),
        ("local.name=momentum", 2, ('local.name = "momentum"', '"dmsgd"')),
        ("algorithm.name=dsgd local.name=moment", 2, ('local.name = "moment"', '"momentum"')),
        ("data.batch=64", 40, ("training samples", "64", "data.batch")),
        ("data.source=nowhere.h5", 2, "nowhere.h5"),
        ("node.devices=cuda:0", 2, ("cuda:0", "no GPU")),
        ("algorithm.name=parallel cadence.name=never", 2, ('"parallel"', "every step")),
    ],
)
def test_incompatible_settings_are_rejected(settings, n, message):
    if "cuda" in settings and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=naming(message)):
        assemble.assemble(job(settings), SingleProcess(), n)


@with_world
def memory_growth(world, same_host, graph):
    """Return the growth of a rank's PSS over the steps after start-up, in bytes, and the limit."""
    from mpigossip.algorithms import build

    count = 25_000_000
    made = job(
        "model.name=mlp",
        f"model.hidden=[{count // 80}]",
        "data.batch=1",
        "algorithm.name=dmsgd",
        f"graph.name={graph}",
        f"node.same_host={same_host}",
        "log.consensus_every=0",
    )
    before = pss()
    world.barrier()
    assembly = assemble.assemble(made, world, world.size)
    for _ in range(3):
        assembly.trainer.step()
    world.barrier()
    grown = pss() - before
    flat = assembly.trainer.replicas.flat
    method = build("dmsgd", None, {}, 0)
    degree = assembly.parts.graph.degree
    allowed = 4 * flat.size * (1 + 1 + 1 + method.vectors * (1 + 2 * degree))
    world.barrier()
    assembly.close()
    return grown, allowed, flat.count


def pss():
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(
        next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]
    )


@pytest.mark.parametrize(
    ("graph", "same_host"), [("one-peer-exponential", "put"), every("exponential", "read")]
)
def test_memory_grows_by_the_stated_amount(ranks, same_host, graph):
    n = 2 if graph.startswith("one") else 4
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs Linux's /proc/self/smaps_rollup")
    for grown, allowed, count in ranks(n)(memory_growth, same_host, graph, timeout=120):
        assert count > 20_000_000
        assert grown <= 1.15 * allowed, f"{grown / allowed:.3f} of what is stated"


def test_the_states_of_a_run(tmp_path):
    settings = ["model.name=mlp", "data.batch=8", "run.steps=2", "run.evaluate_every=0"]
    made = assemble.load({}, [*settings, f"run.output={tmp_path}"])
    with SingleProcess() as world, ExitStack() as resources:
        run = Run(world, made, None, resources)
        run.finish()  # nothing has begun, so nothing is written
        run.abandon()
        assert run.state is State.READY and not run.begun and not list(tmp_path.iterdir())
        run.node = JobNode(assemble.assemble(made, world, 1), world)
        run.begin()
        assert run.state is State.RUNNING and run.is_open
        record = run.node.trainer.step()
        run.record_step(record, 8)
        run.rejoin(["rank 1 on a failed"], parted=True)
        assert run.state is State.PARTLY_ENDED and run.is_open
        run.save()  # left to the end
        assert run.saved_at is None
        run.finish()
        assert run.state is State.ENDED and run.begun and run.saved_at == 1
        assert run.summary["lost"] == "rank 1 on a failed"
        run.rejoin(["rank 2 on b failed"], parted=False)  # all have ended: it stays as it is
        assert run.state is State.ENDED
