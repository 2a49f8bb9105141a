"""A custom loop with a run directory has a log, checkpoints, a lock and stopping, like a job."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.cli import main
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.runs.run import State
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.log import read
from tests import launch
from tests.cases import naming, with_world
from tests.optim.loops import STEPS, begin_run, digest, make_model, run_loop, train_steps
from tests.rankpool import RankError

SCRIPT = Path(__file__).parents[2] / "jobs/loops/classify.py"
HALF = 4


@pytest.mark.both
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, {}),
        (3, {"algorithm": "d2", "graph": "ring", "graph_lazy": True, "algorithm_lazy": True}),
        (3, {"algorithm": "slowmo", "inner": "SGD", "period": 3}),
        (2, {"style": "awc", "cadence": "every", "period": 2}),
        (3, {"average_state": {"exp_avg_sq": 3, "exp_avg": 3}}),
    ],
)
def test_a_stopped_loop_resumes_bitwise(ranks, tmp_path, n, options):
    whole = ranks(n)(run_loop, tmp_path / "whole", STEPS, (HALF,), options)
    ranks(n)(run_loop, tmp_path / "parts", HALF, (2,), options)
    parts = ranks(n)(run_loop, tmp_path / "parts", STEPS, (), options)
    assert [(d, r) for d, r, _ in parts] == [(d, r) for d, r, _ in whole]
    assert [start for *_, start in parts] == [HALF] * n
    assert checkpoint.digest(checkpoint.latest(tmp_path / "parts")) == checkpoint.digest(
        checkpoint.latest(tmp_path / "whole")
    )
    one, other = (read(tmp_path / name / "log.h5").steps for name in ("whole", "parts"))
    timed = {name for name in one if name.endswith("_s") or name == "samples_per_second"}
    for name in one.keys() - timed:
        assert np.array_equal(one[name], other[name], equal_nan=True), name


def figures(comm, folder):
    with MPIWorld(comm) as world:
        model, gossip, draw, schedule = begin_run(world, folder, flush_steps=2)
        for step in range(5):
            train_steps(model, gossip, draw, schedule, [step])
            time.sleep(0.02)
            if step == 3 and world.rank == 0:
                gossip.log(step, {"val": 0.5, "of.rank-0": 1})
            gossip.log(step, grade=torch.tensor(world.rank + step))
    return gossip.record.seconds["compute_s"]


def test_metrics_of_the_program_are_columns_next_to_those_of_the_engine(ranks, tmp_path):
    computed = ranks(2)(figures, tmp_path / "run")
    log = read(tmp_path / "run/log.h5")
    assert log.steps["step"].tolist() == [0, 1, 2, 3, 4]
    assert log.steps["grade"].tolist() == [[k, k + 1] for k in range(5)]
    assert np.isfinite(log.steps["val"]).nonzero() == (3, 0) and log.steps["val"][3, 0] == 0.5
    assert log.steps["of.rank-0"][3, 0] == 1
    assert (
        np.isfinite(log.steps["loss"]).all() and (np.diff(log.steps["bytes_sent"][:, 0]) > 0).all()
    )
    # The time between two steps counts as computing. The speed refers to the whole duration.
    assert min(computed) > 0.02 and (log.steps["compute_s"][1:] > 0.02).all()
    whole = sum(log.steps[name] for name in log.steps if name.endswith("_s"))
    assert np.allclose(log.steps["samples_per_second"], 8 / whole)
    assert (log.summary["steps"], log.summary["finished"]) == (5, 1)
    assert re.match(r"loss .*, grade 4\.5, val 0\.5", log.summary["figures"])
    assert log.summary["digest"] == checkpoint.digest(checkpoint.latest(tmp_path / "run"))


def test_layers_that_were_unfrozen_after_a_save_are_in_the_next(tmp_path):
    model, _ = make_model(0)
    model[0].requires_grad_(False)
    with SingleProcess() as world:
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        gossip = mpigossip.Gossip(world, model, inner, run=tmp_path)
        for _ in range(2):
            gossip.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            gossip.step()
            gossip.save()
            if not model[0].weight.requires_grad:
                model[0].requires_grad_(True)
                gossip.add_param_group({"params": model[0].parameters()})
    names = checkpoint.read_node(checkpoint.latest(tmp_path), 0).names
    assert set(names) == {name for name, _ in model.named_parameters()}


def test_a_failed_last_checkpoint_is_not_in_the_summary(tmp_path, monkeypatch, capsys):
    write = checkpoint.write_node

    def full(folder, node, state):
        if state.numbers["index"] == 4:
            raise StoreError("No space left on device")
        return write(folder, node, state)

    monkeypatch.setattr(checkpoint, "write_node", full)
    with SingleProcess() as world:
        model, gossip, draw, schedule = begin_run(world, tmp_path, on_error="continue")
        train_steps(model, gossip, draw, schedule, range(2))
        gossip.save()
        train_steps(model, gossip, draw, schedule, range(2))
    assert checkpoint.steps(tmp_path) == [2]
    summary = read(tmp_path / "log.h5").summary
    assert summary["steps"] == 4 and "checkpoint" not in summary
    assert "written: No space" in capsys.readouterr().err


def other_nodes(comm, folder):
    with MPIWorld(comm) as world:
        model, gossip, *_ = begin_run(world, folder)
        start = gossip.resume()
        with gossip.averaged():
            pass
        states = [gossip.state[p]["exp_avg"].clone() for p in model.parameters()]
        distance = gossip.consensus_distance()
    return start, [p.detach() for p in model.parameters()], states, distance


def test_another_number_of_nodes_begins_with_the_exact_average(ranks, tmp_path, capfd):
    ranks(3)(run_loop, tmp_path, HALF)
    path = checkpoint.latest(tmp_path)
    states = [checkpoint.read_node(path, node) for node in range(3)]
    mean = torch.tensor(np.mean([s.parameters.astype(np.float64) for s in states], 0)).float()
    result = ranks(2)(other_nodes, tmp_path)
    for start, parameters, moments, distance in result:
        assert start == HALF and distance == 0
        assert torch.equal(torch.cat([p.reshape(-1) for p in parameters]), mean)
        for name, moment in zip(states[0].names, moments, strict=True):
            kept = [s.arrays[f"torch/{name}/exp_avg"].astype(np.float64) for s in states]
            assert np.array_equal(moment, np.mean(kept, 0).astype(np.float32)), name


def resume_counted(comm, folder):
    """Resume; return the files of nodes that this rank has read, or the message of the error."""
    files = []
    read = checkpoint.read_state

    def counting(path, entry, *arguments):
        files.append(entry.file)
        return read(path, entry, *arguments)

    checkpoint.read_state = counting
    try:
        world = MPIWorld(comm)
        _, gossip, *_ = begin_run(world, folder)
        gossip.resume()
        world.close()
    except JobError as error:
        world.close()
        return str(error)
    finally:
        checkpoint.read_state = read
    return files


def test_a_resume_with_other_nodes_reads_each_file_on_one_rank(ranks, tmp_path):
    """If each of n ranks read all n files, the file system would transfer n² models."""
    ranks(3)(run_loop, tmp_path, HALF)
    path = checkpoint.latest(tmp_path)
    names = [entry.file for entry in checkpoint.read_manifest(path).entries]
    first, *others = ranks(4)(resume_counted, tmp_path)
    assert first == [names[0], *names] and others == [names[:1]] * 3
    with (path / names[2]).open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 1]))
    messages = ranks(2)(resume_counted, tmp_path)
    assert names[2] in messages[0] and messages == [messages[0]] * 2
    assert "rank 0 on" not in messages[0], "the file is damaged for all ranks"


def alone(folder, width=5, **options):
    model, optimizer = make_model(0, width)
    return model, mpigossip.Gossip(SingleProcess(), model, optimizer, run=folder, **options)


def test_dropped_state_is_reported(tmp_path, ranks, capsys):
    ranks(2)(run_loop, tmp_path, HALF)
    _, gossip = alone(tmp_path)
    gossip.keep(draw=torch.Generator(), new=torch.Generator())
    assert gossip.resume() == HALF
    printed = capsys.readouterr().out
    assert "average of 2 nodes x 1 slot; " in printed
    assert "exp_avg, exp_avg_sq, step" in printed
    assert "not restored: draw, new" in printed


@pytest.mark.parametrize(("steps", "says"), [(2, True), (3, False), (None, False)])
def test_a_loop_that_has_made_all_its_steps_says_so_when_it_is_started_again(
    tmp_path, capsys, steps, says
):
    make_run(tmp_path)
    capsys.readouterr()
    with SingleProcess() as world:
        _, gossip, *_ = begin_run(world, tmp_path, **({"steps": steps} if steps else {}))
        assert gossip.resume() == 2
    printed = capsys.readouterr().out
    assert (f"{tmp_path}: " in printed and "its 2 steps" in printed) == says, printed
    assert ("another run directory" in printed) == says


class Teacher(torch.nn.Module):
    """Model with a frozen copy that follows the trained layer, and one that stays as it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = torch.nn.Linear(4, 4)
        self.teacher = torch.nn.Linear(4, 4).requires_grad_(False)
        self.constant = torch.nn.Linear(4, 4).requires_grad_(False).bfloat16()

    def follow(self):
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for teacher, student in pairs:
            teacher.data = teacher.data * 0.9 + student.data * 0.1

    def loss(self, inputs):
        targets = self.constant(self.teacher(inputs).bfloat16()).float()
        return (self.student(inputs) - targets).square().mean()


def train_teacher(world, folder, steps):
    model = Teacher()
    inner = torch.optim.SGD(model.student.parameters(), 0.1, momentum=0.9)
    gossip = mpigossip.Gossip(world, model, inner, run=folder)
    for step in range(gossip.resume(), steps):
        gossip.zero_grad()
        draw = torch.Generator().manual_seed(step)
        model.loss(torch.randn(8, 4, generator=draw)).backward()
        gossip.step()
        model.follow()
    return model


def test_frozen_parameters_that_the_program_changes_are_resumed(tmp_path):
    """A momentum encoder is such a parameter. It may change through `.data`."""
    values = {}
    for name, stops in {"whole": (6,), "parts": (1, 3, 6)}.items():
        for stop in stops:
            with SingleProcess() as world:
                model = train_teacher(world, tmp_path / name, stop)
        values[name] = [p.detach().float() for p in model.parameters()]
    for whole, parts in zip(values["whole"], values["parts"], strict=True):
        assert torch.equal(whole, parts)
    arrays = checkpoint.read_node(checkpoint.latest(tmp_path / "parts"), 0).arrays
    frozen = {name for name in arrays if name.startswith("frozen/")}
    assert frozen == {"frozen/teacher.weight", "frozen/teacher.bias"}


@with_world
def save_changed_teacher(world, folder):
    model = Teacher()
    inner = torch.optim.SGD(model.student.parameters(), 0.1)
    gossip = mpigossip.Gossip(world, model, inner, run=folder)
    model.loss(torch.ones(1, 4)).backward()
    gossip.step()
    model.teacher.weight.data.fill_(float(world.rank))
    if world.rank == 0:  # only one node changes this one
        model.teacher.bias.data.fill_(1.0)
    gossip.save()


def test_frozen_parameters_are_averaged_for_another_number_of_nodes(ranks, tmp_path, capsys):
    ranks(2)(save_changed_teacher, tmp_path)
    with SingleProcess() as world:
        model = train_teacher(world, tmp_path, 1)
    assert model.teacher.weight.unique().tolist() == [0.5]
    assert torch.equal(model.teacher.bias, Teacher().teacher.bias)
    said = "".join(capsys.readouterr())
    assert "averaged: frozen parameter teacher.weight" in said
    assert "dropped: frozen parameter teacher.bias" in said


def make_run(folder):
    with SingleProcess() as world:
        model, gossip, draw, schedule = begin_run(world, folder)
        model.register_buffer("mask", torch.ones(3), persistent=False)
        train_steps(model, gossip, draw, schedule, range(2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda run: alone(run)[1].save(), ("run", "step-00000002", ".resume()")),
        (lambda run: alone(run, width=7)[1].resume(), ("another model", "0.weight")),
        (lambda run: alone(run)[1].log(nod="x"), "could not convert"),
        (lambda run: alone(run)[1].log(bytes_sent=1), ("bytes_sent", "measured already")),
        (lambda run: alone(run)[1].log(steps=1), ("steps", "measured already")),
        (lambda run: alone(run)[1].log({"a/b": 1}), ('log: "a/b"', "valid name")),
        (lambda run: alone(run)[1].keep(epoch=3), ("keep", "epoch", "int")),
        (lambda run: alone(run)[1].keep(**{"a\33[2J": torch.Generator()}), r"'a\x1b[2J'"),
        (lambda run: alone(run)[1].keep(**{"a/b": torch.Generator()}), ("keep", "'a/b'")),
        (lambda run: alone(run)[1].keep(**{"#1": torch.Generator()}), ("keep", "'#1'")),
        (lambda run: alone(run)[1].keep(**{"..": torch.Generator()}), ("keep", "'..'")),
        (
            lambda run: alone(run)[1].keep(draw=torch.Generator()) or alone(run),
            ("in use", "process"),
        ),
    ],
)
def test_misuse_of_a_run_directory_is_rejected(tmp_path, wrong, said):
    make_run(tmp_path / "run")
    with pytest.raises((JobError, StoreError, ValueError), match=naming(said)):
        wrong(tmp_path / "run")


def test_a_checkpoint_contains_replaced_parameters(tmp_path):
    with SingleProcess() as world:
        model, gossip, draw, schedule = begin_run(world, tmp_path)
        train_steps(model, gossip, draw, schedule, range(1))
        model[0].weight.data = model[0].weight.data * 0  # as pruning does
        gossip.save()
        wanted = [torch.cat([p.detach().reshape(-1) for p in model.parameters()])]
        train_steps(model, gossip, draw, schedule, range(1))
        wanted += [torch.cat([p.detach().reshape(-1) for p in model.parameters()])]
        model.double()  # a program may do this for an export; the last step must be saved anyway
    for step, values in enumerate(wanted, 1):
        saved = checkpoint.read_node(tmp_path / f"checkpoints/step-{step:08}", 0)
        assert np.array_equal(saved.parameters, values), step


def test_a_written_step_accepts_no_more_metrics(tmp_path):
    with SingleProcess() as world:
        model, gossip, draw, schedule = begin_run(world, tmp_path)
        train_steps(model, gossip, draw, schedule, range(3))
        gossip.log(2, late=1)
        with pytest.raises(JobError, match=naming("step 1", "3 steps", "2 or 3")):
            gossip.log(1, late=1)
        gossip.save()
        with pytest.raises(JobError, match=naming("step 2", "not open")):
            gossip.log(2, late=1)
        with pytest.raises(JobError, match=naming("before the first step")):
            gossip.resume()


def test_calls_that_need_a_run_directory_say_so():
    model, optimizer = make_model(0)
    gossip = mpigossip.Gossip(SingleProcess(), model, optimizer)
    for call in (gossip.save, gossip.resume, gossip.exit, gossip.log, lambda: gossip.stopping):
        with pytest.raises(JobError, match=naming("run directory", 'run="runs/mine"')):
            call()
    with pytest.raises(JobError, match=naming("keep", "run=")):
        mpigossip.Gossip(SingleProcess(), *make_model(0), keep=3)


def test_jobs_and_loops_do_not_take_each_others_folders(tmp_path, capsys):
    make_run(tmp_path / "loop")
    assert main(["resume", str(tmp_path / "loop"), "--simulate"]) == 2
    assert "custom training loop" in capsys.readouterr().err
    job = ["model.name=mlp", f"run.output={tmp_path}/job", "run.steps=1", "data.workers=0"]
    digits = str(Path(__file__).parents[2] / "jobs/digits.toml")
    assert main(["simulate", digits, "--nodes", "1", *job]) == 0
    with pytest.raises(JobError, match=naming("run", "job", "mpigossip resume")):
        alone(tmp_path / "job")


def test_commands_read_a_loops_run(tmp_path, capsys):
    run = tmp_path / "run"
    make_run(run)
    for command in ("checkpoint show", "checkpoint verify", "log show", "log plot", "report"):
        assert main([*command.split(), str(run)]) == 0, command
    assert (run / "log.png").is_file() and (run / "report.html").is_file()
    printed = capsys.readouterr().out
    assert 'model = "Sequential"' in printed and "[data]" not in printed and ": complete" in printed
    assert "finished at step 2" in printed and "samples/s" in printed
    assert main(["log", "export", str(run), "--csv", str(tmp_path / "run.csv")]) == 0
    assert main(["checkpoint", "export", str(run), "--out", str(tmp_path / "model.pt")]) == 0
    assert "left out" not in capsys.readouterr().out
    model, _ = make_model(9)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


@with_world
def uneven(world, folder, options):
    model, gossip, draw, schedule = begin_run(world, folder, flush_steps=3, **options)
    with pytest.raises(JobError) as result:
        train_steps(model, gossip, draw, schedule, range(2 + world.rank))
        gossip.save()
    gossip._run.state = State.ENDED
    return str(result.value)


def test_unequal_steps_and_calls_are_named(ranks, tmp_path):
    for said in ranks(3)(uneven, tmp_path / "waits", {"cadence": "every", "period": 100}):
        assert "rank 0 2 (save()), rank 1 3 (save())" in said
    for said in ranks(2)(uneven, tmp_path / "runs", {"mixer": "asynchronous"}):
        assert "rank 0 in save(), rank 1 " in said


def unhurried(comm, folder):
    with MPIWorld(comm) as world:
        model, gossip, draw, schedule = begin_run(
            world, folder, mixer="asynchronous", flush_steps=3
        )
        for step in range(5 + 3 * world.rank):
            train_steps(model, gossip, draw, schedule, range(1))
            if step == 2:
                gossip.save()  # rank 0 ends while others may still look at whether it is written
            if schedule.last_epoch == STEPS:
                schedule = torch.optim.lr_scheduler.ConstantLR(gossip)
    return digest(model)


def test_asynchronous_nodes_may_make_different_numbers_of_steps(ranks, tmp_path):
    ranks(3)(unhurried, tmp_path)
    log = read(tmp_path / "log.h5")
    assert log.steps["step"].tolist() == list(range(11))
    known = np.isfinite(log.steps["loss"]).sum(0)
    assert known.tolist() == [5, 8, 11] and (log.steps["kind"][5:, 0] == -1).all()
    assert checkpoint.latest(tmp_path).name == "step-00000011"
    assert (tmp_path / "checkpoints/step-00000003").is_dir()


def last_line(result):
    assert result.returncode == 0, result.stderr
    return re.search(r"digest +([0-9a-f]{64})", result.stdout)[1]


SLOWLY = """
import runpy, sys, time
from torch.nn import functional
fast = functional.cross_entropy
functional.cross_entropy = lambda *given: (time.sleep(0.1), fast(*given))[1]
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program with slow steps, so that it is still training when it is killed."""


@pytest.mark.both
def test_a_loop_that_is_killed_and_stopped_resumes_to_the_same_digest(mpistart, pooled, tmp_path):
    few = [str(SCRIPT), "--steps", "60", "--save-every", "20", "--out"]
    whole = last_line(pooled(2, *few, "whole"))
    killed = mpistart(2, [sys.executable, "-c", SLOWLY, *few, "part"], cwd=tmp_path, warm=True)
    launch.until((tmp_path / "part/checkpoints/step-00000020").exists, 60, "a first checkpoint")
    for pid in killed.ranks():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed.finish()
    (tmp_path / "part/STOP").touch()
    stopped = pooled(2, *few, "part")
    assert stopped.returncode == 75, stopped.stderr
    at = re.search(r"resumed at step (\d+)", stopped.stdout)
    assert at and 20 <= int(at[1]) < 60, stopped.stdout
    assert last_line(pooled(2, *few, "part")) == whole


@contextlib.contextmanager
def loop_after_two_steps(comm, folder, mixer):
    """Return a context manager with a loop of a short time limit that has made two steps.

    It yields the world, the model, the optimizer, and a function that makes two more steps.
    """
    with MPIWorld(comm) as world:
        model, gossip, draw, schedule = begin_run(
            world, folder, mixer=mixer, timeout_s=1.0, flush_steps=1000
        )
        train_steps(model, gossip, draw, schedule, range(2))
        yield world, model, gossip, lambda: train_steps(model, gossip, draw, schedule, range(2))


def work_on_rank_0(comm, folder, mixer, inside):
    """Let rank 0 work for three time limits, then make two steps.

    :param inside: whether rank 0 works inside paused()
    :return: number of steps, and the seconds of the last step by activity
    """
    with loop_after_two_steps(comm, folder, mixer) as (world, model, gossip, go_on):
        if world.rank == 0:
            before = digest(model)
            pause = gossip.paused if inside else contextlib.nullcontext
            with pause():
                with pause():  # a pause inside a pause ends with the outer one
                    pass
                rounds = gossip.engine.round
                time.sleep(3.0)
                if mixer == "asynchronous":  # a thread exchanges the model with other nodes
                    for call in (gossip.state_dict, gossip.step):
                        with pytest.raises(JobError, match=naming("inside paused()")):
                            call()
                assert digest(model) == before
            assert (gossip.engine.round > rounds + 10) == (mixer == "asynchronous")
        go_on()
        result = gossip.steps, gossip.record.seconds
        if mixer == "asynchronous":
            refused = pytest.raises(JobError, match=naming("a copy"))
            with gossip.averaged(), refused, gossip.paused():
                pass
        return result


@pytest.mark.parametrize("mixer", ["synchronous", "asynchronous"])
def test_a_rank_may_work_beyond_the_limit(ranks, tmp_path, mixer):
    for steps, seconds in ranks(2)(work_on_rank_0, tmp_path, mixer, True):
        assert steps == 4 and seconds["compute_s"] < 1.0


def save_at_unequal_steps(comm, folder):
    """Save after 2 steps on rank 0 and after 4 steps on rank 1; return the parameters of step 5."""
    with MPIWorld(comm) as world:
        model, gossip, draw, schedule = begin_run(
            world, folder, mixer="asynchronous", flush_steps=50
        )
        train_steps(model, gossip, draw, schedule, range(2 + 2 * world.rank))
        gossip.save()
        train_steps(model, gossip, draw, schedule, range(3 - 2 * world.rank))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def test_steps_after_a_save_at_unequal_steps_are_in_the_last_checkpoint(ranks, tmp_path):
    models = ranks(2)(save_at_unequal_steps, tmp_path)
    path = checkpoint.latest(tmp_path)
    assert path.name == "step-00000005"
    known = np.isfinite(read(tmp_path / "log.h5").steps["loss"])
    assert known.tolist() == [[True, True]] * 2 + [[False, True]] * 2 + [[True, True]]
    for node, model in enumerate(models):
        assert np.array_equal(checkpoint.read_node(path, node).parameters, model)


def test_without_a_pause_the_limit_holds(ranks, tmp_path):
    with pytest.raises(RankError, match=naming("mpigossip.cluster.deadline.WaitTimeoutError")):
        ranks(2)(work_on_rank_0, tmp_path, "synchronous", False)


@with_world
def train_unequal_steps(world):
    model, optimizer = make_model(world.rank)
    gossip = mpigossip.Gossip(world, model, optimizer, timeout_s=2.0)
    for _ in range(5 + world.rank):
        gossip.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        gossip.step()


def test_a_rank_with_fewer_batches_is_named_with_its_steps(ranks):
    with pytest.raises(RankError, match=naming("rank 0", "its loop", "5 steps")):
        ranks(2)(train_unequal_steps)


def test_a_state_that_a_framework_loads_is_as_new_as_the_folders(tmp_path):
    def made():
        model, gossip = alone(tmp_path)
        return model, gossip, torch.Generator(), torch.optim.lr_scheduler.ConstantLR(gossip)

    states = []
    model, gossip, *rest = made()
    for _ in range(3):
        train_steps(model, gossip, *rest, range(1))
        states.append(gossip.state_dict())
    gossip._world.close()
    with pytest.raises(JobError, match=naming("step-00000003", "step 2")):
        model, gossip, *rest = made()
        gossip.load_state_dict(states[1])
        train_steps(model, gossip, *rest, range(1))
    gossip._world.resources.pop_all()
    gossip._run.stopper.__exit__()


def test_exit_saves_while_the_program_handles_an_exception(tmp_path):
    def stopped_in_its_handler():
        with SingleProcess() as world:
            model, gossip, draw, schedule = begin_run(world, tmp_path / "run")
            train_steps(model, gossip, draw, schedule, range(3))
            try:
                raise TimeoutError("of the program's own")
            except TimeoutError:
                gossip.exit()

    with pytest.raises(SystemExit) as left:
        stopped_in_its_handler()
    assert left.value.code == 75
    assert checkpoint.latest(tmp_path / "run").name == "step-00000003"


class Thing:
    """Object of the program whose state may have any form."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


KEYS = [
    1,
    "1",
    "1'",
    1.5,
    "1.5",
    "a/b",
    "a|b",
    "a|b'",
    ".",
    "_.",
    "",
    "_",
    True,
    None,
    "None",
    (1, 2),
]


def test_similar_keys_stay_distinct(tmp_path):
    """Each key has its own tensor in the checkpoint, also in nested dicts."""
    keys = list({key: None for key in KEYS})  # True is 1
    state = {key: torch.full((2,), float(k)) for k, key in enumerate(keys)}
    nested = {"x": {1: torch.zeros(1), "1": torch.ones(1)}, "x/1": torch.full((1,), 2.0)}
    for saves, thing in ((True, Thing({"flat": state, "nested": nested})), (False, Thing())):
        with SingleProcess() as world:
            model = torch.nn.Linear(2, 2)
            inner = torch.optim.SGD(model.parameters(), 0.1)
            gossip = mpigossip.Gossip(world, model, inner, run=tmp_path)
            gossip.keep(thing=thing)
            gossip.resume()
            if saves:
                model(torch.ones(1, 2)).sum().backward()
                gossip.step()
                gossip.save()
    again = thing.state
    assert again["flat"].keys() == state.keys()
    assert all(torch.equal(again["flat"][key], value) for key, value in state.items())
    assert torch.equal(again["nested"]["x"][1], torch.zeros(1))
    assert torch.equal(again["nested"]["x"]["1"], torch.ones(1))
    assert torch.equal(again["nested"]["x/1"], torch.full((1,), 2.0))


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of torch, for step(epoch)
def test_milestones_of_a_scheduler_keep_their_type(tmp_path):
    """torch keeps the milestones of MultiStepLR in a Counter, whose methods it calls."""
    rates = []
    for _ in range(2):
        with SingleProcess() as world:
            model = torch.nn.Linear(2, 2)
            inner = torch.optim.SGD(model.parameters(), 1.0)
            gossip = mpigossip.Gossip(world, model, inner, run=tmp_path)
            schedule = torch.optim.lr_scheduler.MultiStepLR(gossip, [1, 3, 3], gamma=0.5)
            gossip.keep(schedule=schedule)
            for epoch in range(gossip.resume() + 1, gossip.steps + 3):
                model(torch.ones(1, 2)).sum().backward()
                gossip.step()
                gossip.zero_grad()
                schedule.step(epoch)
                rates.append(gossip.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.125, 0.125]
