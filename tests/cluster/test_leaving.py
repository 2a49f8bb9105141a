"""A rank that exits early ends the job with its exit code; a slow rank has not exited."""

import os
import re
import signal
import sys
import time

import pytest

from mpigossip.cluster import deadline, waits
from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.mpi_world import open_world
from tests import launch
from tests.cases import every, naming, on_each

pytestmark = pytest.mark.both


HEAD = """
import sys, time
from mpigossip.cluster import waits
from mpigossip.cluster.mpi_world import open_world
waits.DEPARTURE_GRACE_S, waits.INFORM_S = 0.1, 0.2
"""
LOOP = """
import torch, mpigossip
torch.set_num_threads(1)
with mpigossip.world() as w:
    model = torch.nn.Linear(4, 3)
    optimizer = mpigossip.Gossip(w, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        if step == 3 and w.rank == 1: break
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


OTHER = LOOP.replace("break", "break  # and continues to another call") + "    {call}\n"
LEFT = r"rank 1 on \S+ has reached the end of its "


@pytest.mark.parametrize(
    "body, code, words",
    [
        ("w = open_world()\nif w.rank == 1: sys.exit(3)\nw.barrier()", 3, f"{LEFT}program"),
        every(
            "with open_world() as w:\n    if w.rank == 1: sys.exit(0)\n    w.barrier()",
            *(1, f"{LEFT}program"),
        ),
        every("with open_world() as w:\n    if w.rank == 0: w.barrier()", None, f"{LEFT}world"),
        (LOOP, None, rf"in step\(\), .*; {LEFT}loop after 3 steps"),
        (
            OTHER.format(call="with optimizer.averaged(): pass"),
            *(None, r"in step\(\), .*; rank 1 on \S+ waits in averaged\(\) after 3 steps"),
        ),
        every(
            OTHER.format(call="w.gather(w.rank)"),
            *(None, r"in step\(\), .*; rank 1 on \S+ waits in gather\(\) after 3 steps"),
        ),
    ],
    ids=["exit", "exit in a block", "end of a block", "break", "averaged", "gather"],
)
def test_a_rank_that_leaves_early_ends_the_job_by_its_code(mpirun, body, code, words):
    # a fork's exit code isn't always its stub's
    done = mpirun(2, [sys.executable, "-c", HEAD + body], timeout=60, warm=code is None)
    assert done.returncode == code if code else done.returncode, done.stderr
    assert re.search(words, done.stderr) and "world.agree(done)" in done.stderr, done.stderr


STUCK = """
import atexit, os, sys, threading, time, mpigossip
from mpigossip.cluster.process import PROGRESS
atexit.register(os._exit, 9)  # runs after the end of MPI
with mpigossip.world() as w:
    if w.rank == 1:
        threading.Thread(target=time.sleep, args=(999,), name=PROGRESS, daemon=True).start()
if sys.argv[1] == "raise": raise ValueError
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("given, code", [("75", 75), every("raise", 1)])
def test_a_thread_left_in_a_call_of_mpi_changes_no_exit_code(mpirun, given, code):
    """Finalizing MPI would hang or crash, so no rank does it, and each exits with its own code."""
    done = mpirun(3, [sys.executable, "-c", STUCK, given], timeout=60, warm=False)
    assert done.returncode == code, done.stderr


CAUGHT = """
import sys, time, mpigossip
from mpigossip.cluster import exception_reports
from mpigossip.cluster.process import exit_handler
from mpigossip.config.errors import Failure
exception_reports.EXIT_LIMIT_S = 0.5
exit_handler.before_finalize.append(lambda comm: time.sleep(999))
try:
    with mpigossip.world():
        raise Failure("a wait has reached its time limit")
except Failure as error:
    sys.exit(error.code)  # as the command line does
"""


def test_a_hanging_end_of_mpi_after_a_caught_failure_is_abandoned(mpirun):
    """The exception hook, which starts a watchdog, does not run if the program has caught it."""
    done = mpirun(2, [sys.executable, "-c", CAUGHT], timeout=45, warm=False)
    assert done.returncode == 1, done.stderr


def slow_ranks(comm):
    """Let rank 1 be late by 1 s: after a loop, in its last step, or when all close."""
    waits.DEPARTURE_GRACE_S = 0.1
    waits.INFORM_S = 0.05
    results = []
    try:
        with open_world(timeout_s=30) as w:
            with deadline.announce_end(5):
                w.barrier()
            comm.barrier()
            time.sleep(w.rank)
            w.barrier()
            results.append("after a loop")
            if w.rank == 1:
                until = time.monotonic() + 1
                with deadline.announce_end(5):  # it answers rank 0 that it closes
                    Deadline(20).wait(
                        lambda: time.monotonic() > until, lambda: "", awaited_ranks=lambda: [0]
                    )
                    comm.send(None, dest=0)
                    comm.barrier()
            else:
                deadline.this_rank.steps = 4
                with deadline.user_call("step()"):
                    Deadline(20).wait(
                        lambda: comm.iprobe(source=1), lambda: "", awaited_ranks=lambda: [1]
                    )
                comm.recv(source=1)
                comm.barrier()
            results.append("in its last step")
            if w.rank == 0:
                with deadline.announce_end(5):
                    w.barrier()
            else:
                with deadline.announce_end(5):
                    time.sleep(1)
                    w.barrier()
            results.append("as all close")
    finally:
        waits.DEPARTURE_GRACE_S = 10.0
        waits.INFORM_S = 1.0
    return results


def test_a_slow_rank_has_not_departed(ranks):
    assert ranks(2)(slow_ranks) == [["after a loop", "in its last step", "as all close"]] * 2


def one_is_slow(comm):
    """Let rank 2 be late to a step, then to averaged(): the others wait in different calls."""
    import torch

    import mpigossip

    waits.DEPARTURE_GRACE_S = 0.1
    waits.INFORM_S = 0.05
    try:
        with mpigossip.world(timeout_s=30) as w:
            model = torch.nn.Linear(4, 3)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = mpigossip.Gossip(w, model, inner, graph="one-peer-exponential")
            for step in range(4):
                time.sleep(1.2 * (step == 2 and w.rank == 2))
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with optimizer.averaged():
                    pass
            for _ in range(2):
                w.agree(w.rank)
                time.sleep(1.2 * (w.rank == 2))
                with optimizer.averaged():
                    pass
                optimizer.consensus_distance()
            return w._monitor._sent_numbers.sum() > 0
    finally:
        waits.DEPARTURE_GRACE_S = 10.0
        waits.INFORM_S = 1.0


def test_ranks_that_wait_in_different_calls_for_a_slow_rank_continue(ranks):
    assert any(ranks(4)(one_is_slow)), "the others asked"


def messages_of_a_run(comm):
    """Train, close Gossip and the world; return the messages that this rank has sent."""
    import torch

    import mpigossip

    waits.INFORM_S = float("inf")  # on a busy machine a wait may be long
    try:
        with mpigossip.world() as w:
            model = torch.nn.Linear(4, 3)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = mpigossip.Gossip(w, model, inner)
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            roll = w._monitor
        return int(roll._sent_numbers.sum())
    finally:
        waits.INFORM_S = 1.0


@on_each("n", [2, 3, 4, 6, 8])
def test_the_end_of_a_run_is_not_announced_unless_a_rank_asks(ranks, n):
    assert ranks(n)(messages_of_a_run) == [0] * n


EXIT = """
send = waits.WaitMonitor._send
def counted(self, rank, word):
    print(f"{self._comm.rank} to {rank}: {word}", flush=True)
    send(self, rank, word)
waits.WaitMonitor._send = counted
waits.DEPARTURE_GRACE_S = 60
w = open_world()
if w.rank == 1: sys.exit(3)
if w.rank == 2: time.sleep(60)
time.sleep(1)
print("begin", flush=True)
w.barrier()
"""


def test_a_rank_that_exits_informs_only_ranks_that_wait_for_it(mpistart):
    job = mpistart(3, [sys.executable, "-c", HEAD + EXIT])
    launch.until(lambda: "1 to " in job.output()[0], 60, "rank 1 answers rank 0")
    time.sleep(0.3)
    lines = job.output()[0].split("\n")[:-1]
    assert lines[0] == "begin"
    assert {line for line in lines if line.startswith("1 to ")} == {"1 to 0: -8"}


TERM = """
from pathlib import Path
from mpigossip.cluster import deadline
from mpigossip.runs.stopper import Stopper
deadline.TERM_S = 0.5
with open_world() as w, Stopper(w, Path("nowhere")):
    print("ready", flush=True)
    if w.rank == 1: time.sleep(600)
    w.barrier()
"""


def test_sigterm_ends_a_job_that_waits(mpistart):
    job = mpistart(2, [sys.executable, "-c", HEAD + TERM])
    launch.until(lambda: job.output()[0].count("ready") == 2, 90, "both are ready")
    for pid in job.ranks():
        os.kill(pid, signal.SIGTERM)
    done = job.finish(timeout=90)
    assert done.returncode != 0
    assert re.search(naming("rank 1 on", "SIGTERM"), done.stderr), done.stderr
