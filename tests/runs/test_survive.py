"""Survival of rank failures: plain messages, shrinking, log and checkpoints of the survivors."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpigossip.cluster import mpi_world
from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.runs import recorder, survive
from mpigossip.runs.progress import Progress
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests import launch
from tests.cases import every, naming, with_world
from tests.mixing.rounds import GRAPHS, LAYOUT, count_differences, graphs_for, kinds_of

pytestmark = pytest.mark.both


TOOLS = Path(__file__).parents[2] / "tools"


@with_world
def differing(world, staged, wire):
    """Return the difference between plain messages and the simulator, by graph."""
    from mpigossip.mixing.lossy_wires import wire as made_wire
    from mpigossip.mixing.synchronous import FaultTolerant

    layout = MessageLayout(LAYOUT.widths, LAYOUT.vectors, LAYOUT.scalars, wire=made_wire(wire))
    options = {"timeout_s": 30, "on_devices": staged}
    return {
        name: count_differences(FaultTolerant(made, layout, world, **options), kinds_of(12, seed=1))
        for name, made in graphs_for(world.size, GRAPHS)
    }


@pytest.mark.parametrize(
    "n, staged, wire", [every(1, None, "fp32"), (3, True, "qsgd"), (4, None, "fp32")]
)
def test_plain_messages_equal_the_simulator(ranks, n, staged, wire):
    for found in ranks(n)(differing, staged, wire):
        assert len(found) >= 8 and not any(found.values()), found


@with_world
def late_neighbour(world):
    from mpigossip.graphs import graph
    from mpigossip.mixing.synchronous import FaultTolerant

    mixer = FaultTolerant(graph("ring", world.size), MessageLayout((512,)), world, timeout_s=0.3)
    text = None
    for t in range(3):
        if (world.rank, t) == (1, 2):
            world.comm.recv(source=0)
        mixer.outbox(t)
        mixer.start(ExchangeKind.GOSSIP, t)
        mixer._transport.timeout_s = 0.3 if world.rank == 0 and t == 2 else 30
        try:
            mixer.finish()
        except WaitTimeoutError as late:
            text = str(late)
            world.comm.send(None, dest=1)
            mixer._transport.timeout_s = 30
            mixer.finish()
    mixer.close()
    return text


def test_a_late_neighbour_is_named_with_its_last_round(ranks):
    text = ranks(2)(late_neighbour)[0]
    assert text.startswith("rank 1 on ") and "model of round 2" in text
    assert "last message in round 1" in text


def test_which_worlds_are_fault_tolerant():
    on = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert mpi_world.fault_tolerant("Open MPI v5.0.11", on)
    assert not mpi_world.fault_tolerant("Open MPI v5.0.11", {})
    assert not mpi_world.fault_tolerant("Open MPI v5.0.11", on | {"SLURM_STEP_ID": "0"})
    assert mpi_world.fault_tolerant(
        "Open MPI v5.0.11", on | {"SLURM_STEP_ID": "0", "PRTE_LAUNCHED": "1"}
    )
    assert not mpi_world.fault_tolerant("MPICH Version: 5.0.2", on)


UNSPECIFIC = """
import os, signal
import mpigossip
from mpi4py import MPI

world = mpigossip.world(timeout_s=20)
world.survives = True
errors = [MPI.Exception(MPI.ERR_OTHER), MPI.Exception(MPI.ERR_ARG), ValueError("other")]
before = [world.is_rank_failure(error) for error in errors]
world.barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
after = [world.is_rank_failure(error) for error in errors]
print(f"rank {world.rank}: {before} {after}\\n", end="", flush=True)
os._exit(0)
"""


def test_an_unspecific_error_counts_as_a_rank_failure_if_a_rank_has_failed(mpirun, monkeypatch):
    if not launch.is_open_mpi():
        pytest.skip("only Open MPI's launcher has --with-ft ulfm")
    monkeypatch.setenv("MPIGOSSIP_MPIEXEC", shlex.join([*launch.launcher(), "--with-ft", "ulfm"]))
    done = mpirun(3, [sys.executable, "-c", UNSPECIFIC], 60)
    line = "rank {}: [False, False, False] [True, False, False]"
    lines = done.stdout.splitlines()
    assert all(line.format(rank) in lines for rank in (0, 2)), done


@with_world
def asks_in_vain(world):
    survive.prepare(assemble.load({}, ["run.survive=true"]), world)
    return world.survives


def test_a_job_that_cannot_survive_gets_a_note(ranks):
    assert ranks(2)(asks_in_vain) == [False, False]


def test_a_graph_that_is_impossible_with_one_node_fewer_is_rejected():
    settings = ["run.survive=true", "graph.name=one-peer-hypercube"]
    with pytest.raises(ValueError, match=naming("run.survive", "power of two")):
        assemble.assemble(assemble.load({}, settings), SingleProcess(), 4)


def test_checkpoints_of_round_steps_are_kept_for_good(tmp_path):
    from mpigossip.runs import start_and_resume as training

    settings = ["model.name=mlp", "data.batch=8", "run.steps=12", f"run.output={tmp_path}"]
    every = ["checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.keep_every=4"]
    training.train(assemble.load({}, [*settings, *every]), SingleProcess(), 1)
    assert checkpoint.steps(tmp_path) == [4, 8, 11, 12]


@with_world
def calls_of_an_isolated_rank(world):
    """Return the results of calls of rank 0 alone, then of calls of all ranks."""
    alone = None
    if world.rank == 0:
        world.isolated = True
        world.barrier()
        alone = [world.gather(5), world.broadcast(6), world.agree(7), world.start_agree(8).read()]
        try:
            with world.raise_together(JobError):
                raise JobError("alone")
        except JobError as error:
            alone.append(type(error).__name__)
        world.isolated = False
    world.barrier()
    return alone, world.gather(world.rank), world.agree(world.rank)


def test_an_isolated_rank_calls_alone(ranks):
    first, second = ranks(2)(calls_of_an_isolated_rank)
    assert first == ([[5], 6, 7, 8, "JobError"], [0, 1], 1) and second == (None, None, 1)


class Lost(Exception):
    pass


class Shrinking(SingleProcess):
    """World of a rank whose neighbours fail on request, and may be leaving their loops."""

    survives = True
    others_leave = False

    def is_rank_failure(self, error):
        return isinstance(error, Lost)

    def shrink(self):
        self.isolated = False

    def agree(self, flag):
        return max(int(flag), int(self.others_leave))


def survival_of(world, monkeypatch, run=None):
    """Return a `Survival` whose node only keeps the world that it was rebuilt in."""
    node = SimpleNamespace(world=world, mixer=None, engine=SimpleNamespace(index=3))
    survival = survive.Survival(node, run, lambda world: None)
    survival._recent.states.append((None, None))

    def rebuild(world, parted, lost):
        node.world = world
        return lost

    monkeypatch.setattr(survival, "_continue_with", rebuild)
    return survival


def fails():
    raise Lost


def test_a_failure_outside_a_step_is_handled_by_the_next_one(monkeypatch):
    world = Shrinking()
    survival = survival_of(world, monkeypatch)
    with survival.catch_failure():
        fails()
    assert survival.stage is survive.Stage.FAILED
    survival.step(lambda: pytest.fail("the step is not made"))
    assert survival.stage is survive.Stage.TRAINING and not world.isolated
    survival.step(fails)
    assert survival.stage is survive.Stage.TRAINING


def test_a_node_ends_its_loop_alone_if_others_have_left_theirs(monkeypatch):
    world = Shrinking()
    survival = survival_of(world, monkeypatch)
    world.others_leave = True
    survival.step(fails)
    assert survival.stage is survive.Stage.ALONE and world.isolated
    assert survival._node.world is not world
    survival.step(fails)  # after another failure, the survivors agree on a step again
    assert survival.stage is survive.Stage.ALONE and world.isolated
    survival.leave()
    assert survival.stage is survive.Stage.LEAVING and not world.isolated


def test_a_node_that_leaves_outlives_failures_with_its_own_model(monkeypatch, capfd):
    class Ending:
        folder = None
        stopped = False
        is_open = True
        stages = []
        rejoined = []

        def finish(self):
            self.stages.append(survival.stage)
            if len(self.stages) == 1:
                raise Lost
            self.is_open = False

        def rejoin(self, lost, parted):
            self.rejoined.append(parted)

    world = Shrinking()
    run = Ending()
    survival = survival_of(world, monkeypatch, run)
    survival.leave()
    assert run.stages == [survive.Stage.LEAVING] * 2 and run.rejoined == [True]
    assert survival._node.world is world and "end the run" in capfd.readouterr().err


def test_nodes_that_exit_together_continue_together_after_a_failure(monkeypatch):
    seen = []

    def finish():
        seen.append(survival.stage)
        if len(seen) == 1:
            raise Lost

    rejoin = lambda lost, parted: seen.append(parted)  # noqa: E731
    run = SimpleNamespace(stopped=True, is_open=True, finish=finish, rejoin=rejoin)
    survival = survival_of(Shrinking(), monkeypatch, run)
    survival.leave()
    assert seen == [survive.Stage.TRAINING, False, survive.Stage.TRAINING]
    assert survival.stage is survive.Stage.LEAVING


def stub(n):
    """Return the parts of an assembly that the recorder reads, with n nodes in this process."""
    return SimpleNamespace(engine=SimpleNamespace(mixer=SimpleNamespace(local_nodes=range(n))))


def test_the_log_is_completed_with_rows_of_survivors(tmp_path):
    """Rank 1 of 3 fails at step 5, when the file has 3 steps; rank 0 survives as rank 0."""

    def row(step, value):
        return {name: np.array([value]) for name in recorder.COLUMNS} | {"step": step}

    def progress(nodes, first):
        job = assemble.load({}, [f"run.output={tmp_path}"])
        return Progress(
            job,
            tmp_path,
            nodes,
            steps_per_epoch=1,
            total_steps=9,
            samples_per_step=1,
            first_step=first,
        )

    world = SingleProcess()
    log = recorder.Recorder(world)
    parts = stub(3)
    log.start(progress(3, 0), parts)
    log._writer.append({name: np.zeros((3, 3)) for name in recorder.COLUMNS})
    world.original_ranks = (0, 2)  # now the log is of two survivors, whose rows are:
    others = [((0, 1, 2), [row(step, 1.0 + k) for step in range(5)]) for k in range(2)]
    world.gather = lambda mine: others
    log.start(progress(2, 5), parts)
    found = read(tmp_path / "log.h5").steps
    assert found["step"].tolist() == [0, 1, 2, 3, 4]
    assert found["loss"][3].tolist()[::2] == [1, 2] and np.isnan(found["loss"][3, 1])
    assert found["bytes_sent"][4].tolist() == [1, -1, 2]


@pytest.fixture
def tolerant(mpirun, tmp_path, monkeypatch):
    """Run `mpigossip train` on n ranks, of which ``victims`` are killed, until it has finished."""
    if not launch.is_open_mpi():
        pytest.skip("only Open MPI's launcher has --with-ft ulfm")
    monkeypatch.setenv("MPIGOSSIP_MPIEXEC", shlex.join([*launch.launcher(), "--with-ft", "ulfm"]))
    words = ["model.name=mlp", "data.batch=8", "data.workers=0", "run.evaluate_every=0"]
    words += ["run.survive=true", 'log.hooks=["victim:Victim"]', f"run.output={tmp_path}"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

    def train(n, victims, *more):
        command = ["mpigossip", "train", "jobs/digits.toml", *words, *more]
        return mpirun(n, command, 60, launch.REPO, {"VICTIMS": victims, "PYTHONPATH": path})

    return train


@pytest.mark.every
def test_the_log_is_complete_after_rank_failures(tolerant, tmp_path):
    """Rank 0 and another rank die before the first flush of the log, then the writer in a flush."""
    done = tolerant(4, "0@2 2@4 1@13!", "log.flush_steps=10", "run.steps=20")
    assert done.returncode == 0, done.stderr[-3000:]
    log = read(tmp_path / "log.h5")
    assert log.summary["nodes"] == 1
    assert all(f"rank {one} on" in log.summary["lost"] for one in (0, 1, 2))
    assert log.steps["step"].tolist() == list(range(20))
    assert not np.isnan(log.steps["loss"]).all(axis=1).any(), "a step is missing in the log"
    assert not list(tmp_path.glob("log.h5.*"))


@pytest.mark.every
def test_the_attempt_after_a_rank_failure_has_all_ranks(tolerant, tmp_path):
    """As in a batch script, `train` starts again on the original number of ranks."""
    (tmp_path / "STOP").touch()
    first = tolerant(3, "1@2", "run.steps=20")
    assert "rank 1 on" in first.stderr and "resumed at step 8" in first.stdout
    again = tolerant(3, "", "run.steps=20")
    assert again.returncode == 0, again.stderr[-3000:]
    said = (
        r"rank 1 on \S+ failed after step \d .* since then on 2 of 3 nodes, now 3; from the exact"
    )
    assert re.search(said, again.stdout) and re.search("failed +rank 1 on", again.stdout)
    assert read(tmp_path / "log.h5").summary["nodes"] == 3


@pytest.mark.every
def test_survivors_remember_an_agreed_stop(tolerant, tmp_path):
    """Rank 1 dies in the step after the agreement, when the file STOP was removed already."""
    (tmp_path / "STOP").touch()
    done = tolerant(3, "1@7", "run.steps=20")
    assert re.search(r"resumed at step [78] ", done.stdout), done.stdout
    assert not (tmp_path / "STOP").exists() and "rank 1 on" in done.stderr


# neighbours may be one turn of a fragment, 3 steps, behind the rank that fails after step 7
@pytest.mark.parametrize(("name", "least"), [every("diloco", 6), every("gasloc", 4)])
def test_a_kill_loses_at_most_the_open_exchange_of_a_fragment(tolerant, tmp_path, name, least):
    settings = [f"algorithm.name={name}", "cadence.period=6", "cadence.fragments=2"]
    settings += ["graph.name=complete"]  # neighbours of neighbours may be two turns behind
    # sent in step 5, received in step 8: rank 1 dies in between
    done = tolerant(3, "1@6", *settings, "cadence.delay=3", "run.steps=14")
    assert done.returncode == 0, done.stderr[-3000:]
    (step,) = re.findall(r"rank 1 on \S+ failed .*step (\d+)", done.stderr)
    assert int(step) >= least, "more than the open exchange was lost"
    log = read(tmp_path / "log.h5")
    assert log.summary["nodes"] == 2 and log.steps["step"].tolist() == list(range(14))


@pytest.mark.every  # by default, a run and a loop are killed at random steps
def test_a_kill_while_a_checkpoint_is_written_costs_nothing(mpirun):
    if launch.is_open_mpi():
        pytest.skip("the result does not depend on the MPI, and MPICH has been tested")
    command = [sys.executable, TOOLS / "labs" / "kill.py", "checkpoints", "--count", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "1 kills, 0 problems" in done.stdout, done.stdout + done.stderr
