"""Nodes of several ranks in which a rank fails: all ranks end, and files are complete."""

import os
import signal

import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.config.errors import STOPPED
from mpigossip.runs import start_and_resume
from mpigossip.runs.hooks import Hook
from mpigossip.store import checkpoint
from mpigossip.training import assemble
from tests.cases import some

BASE = [
    "model.name=mlp",
    "data.batch=2",
    "schedule.scale=none",
    "node.timeout_s=20",
    "checkpoint.every_steps=4",
    "log.flush_steps=4",
    "run.evaluate_every=0",
]
SEVERAL = ["node.ranks_per_node=2", "node.devices=cpu:1"]


class Raiser(Hook):
    """Hook that fails or stops on the world's last rank, the second of its node."""

    def __init__(self, world):
        self.world = world

    def step(self, progress, record):
        if record.index == 14 and self.world.rank == self.world.size - 1:
            if progress.job.node.timeout_s < 5:
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ArithmeticError("a hook that fails")


def train(folder, *settings):
    return ["mpigossip", "train", "digits", *BASE, f"run.output={folder}", *settings]


def expected(folder, steps, *more):
    """Return the digest of two simulated nodes with two slots."""
    job = assemble.load(
        "jobs/digits.toml",
        [*BASE, f"run.output={folder}", f"run.steps={steps}", "node.devices=cpu:2", *more],
    )
    with SingleProcess() as alone:
        return start_and_resume.train(job, alone, 2)["digest"]


def digest_of(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.parametrize("how", some(["killed", "raises", "stands still"], ["killed"]))
def test_a_rank_failure_in_a_node_ends_the_job_which_can_be_resumed(
    mpirun, mpistart, pooled, tmp_path, how
):
    run = tmp_path / "run"
    where = "tests.victim:Victim" if how == "killed" else f"{__name__}:Raiser"
    env = {"VICTIMS": "3@14"}
    limit = ["node.timeout_s=4"] if how == "stands still" else []
    words = train(run, "run.steps=20", *SEVERAL, f'log.hooks=["{where}"]', *limit)
    if (
        how == "stands still"
    ):  # a stopped fork does not receive the signals that its launcher sends to the stub
        done = mpistart(4, words).finish(150)
    else:
        done = mpirun(4, words, env=env, timeout=150)
    assert done.returncode not in (0, STOPPED)  # and the fixture checks that no process remains
    if how == "raises":
        assert "rank 3 of 4" in done.stderr
        assert "a hook that fails" in done.stderr
    if how == "stands still":
        assert "from rank 3" in done.stderr
    newest = checkpoint.latest(run)
    assert newest is not None  # the checkpoint is a step that all ranks had done some steps earlier
    assert checkpoint.verify(newest) == []
    # with one rank per node, and a slot for each of the ranks
    shape = ["node.ranks_per_node=1", "node.devices=cpu:2", "log.hooks=[]", "node.timeout_s=20"]
    done = pooled(2, "resume", run, *shape)
    assert digest_of(done) == expected(tmp_path / "simulated", 20)


@pytest.mark.every
def test_asynchronous_nodes_wait_for_each_other_as_nodes(pooled, tmp_path):
    """Evaluations and checkpoints wait for all nodes, whose ranks continue to exchange together."""
    settings = ["node.mixer=asynchronous", "algorithm.name=dsgd", "run.steps=24"]
    _, *words = train(tmp_path / "run", *SEVERAL, *settings)
    done = pooled(4, *words)
    assert done.returncode == 0, done.stderr
    newest = checkpoint.latest(tmp_path / "run")
    assert checkpoint.read_manifest(newest).step == 24
    assert checkpoint.verify(newest) == []
