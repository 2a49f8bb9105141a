"""Programs as members of several ranks, whose model is in DDP or sharded by FSDP2."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from mpigossip.cluster.world import Nodes, SingleProcess
from mpigossip.config import JobError
from mpigossip.members.place import TrainingPlan
from mpigossip.optim.join import join
from mpigossip.optim.sharded_member import ShardedLoopMember
from tests.cases import naming, some
from tests.launch import Launch, mpirun, until
from tests.members.storm import chunks_of
from tests.optim import in_member
from tests.optim.test_join import parts


def program(folder, kind, *replay):
    return [sys.executable, "-m", "tests.optim.in_member", folder, kind, *replay]


def sums(done):
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all("finished True" in line for line in lines), lines
    return [line.rpartition(" ")[2] for line in lines]


@pytest.mark.parametrize("kind", some(["fsdp", "ddp"], ["fsdp"]))
def test_two_members_of_two_ranks_and_their_replay(tmp_path, kind):
    folder = tmp_path / "run"
    launches = [Launch(2, program(folder, kind)) for _ in range(2)]
    results = [value for one in launches for value in sums(one.finish(120))]
    assert len(results) == 4 and len(set(results)) == 1
    once = chunks_of(folder, TrainingPlan(in_member.CHUNKS, 1, 20.0))
    assert once == dict.fromkeys(range(in_member.CHUNKS), 1)
    again = mpirun(2, program(folder, kind, "replay"), 90, warm=False)
    assert sums(again) == results[:2] and "every digest is equal" in again.stderr
    # DDP computes the same mean over two ranks, and divides its model like the recorded ranks.
    other = {"fsdp": "ddp", "ddp": "fsdp"}[kind]
    again = mpirun(2, program(folder, other, "replay"), 90, warm=False)
    assert sums(again) == results[:2] and "every digest is equal" in again.stderr
    alone = mpirun(0, program(folder, "plain", "replay"), 60, warm=False)
    assert "ranks 2, here 1" in alone.stderr


@pytest.mark.every
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_killed_rank_ends_its_member_and_members_of_4_and_1_ranks_go_on(tmp_path, kind):
    folder = tmp_path / "run"
    first = Launch(2, program(folder, kind))
    until((folder / "chain/000000/000002").exists, 90, "the first member")
    os.kill(first.ranks()[1], signal.SIGKILL)
    assert first.finish(60).returncode != 0
    others = Launch(4, program(folder, "fsdp")), Launch(0, program(folder, "plain"))
    results = [value for one in others for value in sums(one.finish(150))]
    assert len(results) == 5 and len(set(results)) == 1
    once = chunks_of(folder, TrainingPlan(in_member.CHUNKS, 1, 20.0))
    assert once == dict.fromkeys(range(in_member.CHUNKS), 1)
    # After the end, the models are read from the checkpoint.
    late = mpirun(3, program(folder, "fsdp"), 90, warm=False)
    assert sums(late) == results[:1] * 3


@pytest.mark.every
def test_a_member_joins_again_if_a_model_vanishes_while_it_is_averaged(tmp_path):
    """One rank can't read a file that another member has removed; no rank keeps zeros."""
    folder = tmp_path / "run"
    launches = [Launch(2, program(folder, "fsdp", *more)) for more in (("vanish",), ())]
    done = [one.finish(150) for one in launches]
    results = [value for one in done for value in sums(one)]
    assert len(results) == 4 and len(set(results)) == 1
    assert "joining again" in done[0].stderr
    once = chunks_of(folder, TrainingPlan(in_member.CHUNKS, 1, 20.0))
    assert once == dict.fromkeys(range(in_member.CHUNKS), 1)


@pytest.mark.every
def test_ranks_of_a_sharded_member_never_hold_the_whole_model(tmp_path):
    launches = [Launch(2, program(tmp_path / "run", "large")) for _ in range(2)]
    grown = [int(value) for one in launches for value in sums(one.finish(200))]
    # The model has 40 MB, and a shard has 20 MB.
    assert len(grown) == 4 and max(grown) < 20e6, grown


@pytest.mark.every
def test_the_state_of_a_frozen_parameter_is_kept(tmp_path):
    """The optimizer has it, but its parameter is in no published model."""
    done = mpirun(2, program(tmp_path / "run", "frozen"), 90, warm=False)
    assert sums(done) == ["True", "True"]


def test_the_first_model_is_removed_after_a_round_was_published():
    """A stay that begins later finds a model in the folder."""
    member = object.__new__(ShardedLoopMember)
    member._live = SimpleNamespace(send=lambda source: 0, receive=lambda: None)
    member._source = lambda: None
    member._seed = first = SimpleNamespace()
    # The model of a round is published while the next round is trained.
    for done, seed in ((1, first), (2, None), (1, None)):
        member._done = done
        member._exchange()
        assert member._seed is seed


def test_ranks_that_are_several_nodes_are_rejected(tmp_path):
    with SingleProcess() as world:
        world.size = 2
        world.nodes = Nodes((0, 1), world)
        with (
            pytest.raises(JobError, match=naming("2 nodes", "member")),
            join(tmp_path, *parts(), chunks=1, world=world),
        ):
            pass
