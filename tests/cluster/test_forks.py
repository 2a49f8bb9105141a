"""A fork of a rank can't use MPI: its calls are rejected and its exit leaves the rank alone."""

import os
import sys

import pytest
import torch

from mpigossip.config import JobError
from tests.cases import every, with_world

pytestmark = pytest.mark.both


def in_fork(call):
    """Return the JobError of a call in a fork of this process, or ""."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os.write(writer, b"returned")
        except JobError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(pid, 0)
    return message


@with_world(timeout_s=20)
def messages_in_forks(world):
    """Rank 0 forks between its exchanges: the messages in the forks, and whether all went on."""
    import mpigossip
    from mpigossip.cluster import deadline
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.mixing.notifications import READY, Notifications

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = mpigossip.Gossip(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((3,), float(world.rank))
    averager = mpigossip.Averager(world, "complete", x)
    notifications = Notifications(world.comm, 20)

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    def tell():
        deadline.announce(deadline.CLOSING)  # sends nothing from a fork, and raises nothing

    calls = {
        "step": step,
        "averaged": lambda: optimizer.averaged().__enter__(),
        "close": optimizer.close,
        "agree": lambda: world.agree(1),
        "gather": lambda: world.gather(1),
        "together": lambda: world.raise_together().__enter__(),
        "barrier": world.barrier,
        "duplicate": world.duplicate,
        "close of the world": world.close,
        "new world": lambda: MPIWorld(world.comm),
        "abort": world.abort,
        "average": lambda: averager.average(x),
        "mean": lambda: averager.mean(x),
        "close of an Averager": averager.close,
        "send": lambda: notifications.send([1], READY, 7),
        "wait": lambda: notifications.wait([1], READY, 7),
        "tell": tell,
    }
    messages = {}
    for _ in range(2):  # before the first exchange and after it
        if world.rank == 0:
            messages |= {name: in_fork(call) for name, call in calls.items()}
        step()
        mean = float(averager.mean(x)[0])
        averager.start(x)
        if world.rank == 0:
            messages["finish"] = in_fork(averager.finish)
        averaged = float(averager.finish()[0])
    notifications.close()
    return messages, os.getpid(), mean, averaged


def test_a_fork_is_rejected_and_its_rank_continues(ranks):
    (messages, process, *means), (*_, mean, averaged) = ranks(2)(messages_in_forks)
    assert messages.pop("tell") == "returned"
    for name, message in messages.items():
        assert '"spawn"' in message and '"forkserver"' in message, (name, message)
        assert f"fork of process {process}," in message, (name, message)
    assert means == [mean, averaged] == [0.5, 0.5]


PROGRAM = """
import atexit, os, sys
from {module} import {name}
import mpigossip, torch
world = mpigossip.world(timeout_s=20)
x = torch.full((3,), float(world.rank))
averager = mpigossip.Averager(world, "complete", x)
averager.average(x)
if world.rank == 1:
    pid = os.fork()
    if pid == 0:
        atexit.register(print, "a handler of the fork")
        if sys.argv[1] == "raise":
            raise ValueError("of the fork")
        sys.exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(f"the fork ended by {{code}}", flush=True)
for _ in range(3):
    averager.average(x)
world.barrier()
world.close()
print(f"the end of rank {{world.rank}}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    ("way", "code", "imported"),
    [
        every("exit", 7, ("mpigossip", "world")),
        every("raise", 1, ("mpi4py", "MPI")),
        every("raise", 1, ("mpigossip", "world")),
        ("exit", 7, ("mpi4py", "MPI")),
    ],
)
def test_the_exit_of_a_fork_leaves_the_job_alone(mpirun, way, code, imported):
    """mpi4py, if it was imported first, initialized MPI and would finalize it in the fork."""
    program = PROGRAM.format(module=imported[0], name=imported[1])
    done = mpirun(2, [sys.executable, "-c", program, way], timeout=60, warm=False)
    assert done.returncode == 0, done.stderr
    assert f"the fork ended by {code}" in done.stdout
    assert "a handler of the fork" in done.stdout
    assert "exchanged nothing" not in done.stderr
    assert all(f"the end of rank {rank}" in done.stdout for rank in range(2))
    assert ("ValueError: of the fork" in done.stderr) is (way == "raise")
