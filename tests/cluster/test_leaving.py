"""A rank that leaves early ends the job by its exit code; a slow rank has not left."""

import os
import re
import signal
import sys
import time

import pytest

from mpigossip.cluster import deadline, waits
from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.ranks import world
from tests import launch
from tests.cases import every

pytestmark = pytest.mark.both


HEAD = """
import sys, time
from mpigossip.cluster import waits
from mpigossip.cluster.ranks import world
waits.LEFT_S = 0.1
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


LEFT = r"rank 1 on \S+ has come to the end of its "


@pytest.mark.parametrize(
    "body, code, words",
    [
        ("w = world()\nif w.rank == 1: sys.exit(3)\nw.barrier()", 3, f"{LEFT}program"),
        every(
            "with world() as w:\n    if w.rank == 1: sys.exit(0)\n    w.barrier()",
            *(1, f"{LEFT}program"),
        ),
        every("with world() as w:\n    if w.rank == 0: w.barrier()", None, f"{LEFT}world"),
        (LOOP, None, rf"in step\(\), which all ranks have to call; {LEFT}loop after 3 steps"),
    ],
    ids=["exit", "exit in a block", "end of a block", "break"],
)
def test_a_rank_that_leaves_early_ends_the_job_by_its_code(mpirun, body, code, words):
    # a fork's exit code isn't always its stub's
    done = mpirun(2, [sys.executable, "-c", HEAD + body], timeout=60, warm=code is None)
    assert done.returncode == code if code else done.returncode, done.stderr
    assert re.search(words, done.stderr) and "world.agree(done)" in done.stderr, done.stderr


STUCK = """
import atexit, os, sys, threading, time, mpigossip
from mpigossip.cluster.process import PROGRESS
atexit.register(os._exit, 9)  # comes after the end of MPI
with mpigossip.world() as w:
    if w.rank == 1:
        threading.Thread(target=time.sleep, args=(999,), name=PROGRESS, daemon=True).start()
if sys.argv[1] == "raise": raise ValueError
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("given, code", [("75", 75), every("raise", 1)])
def test_a_thread_left_in_a_call_of_mpi_changes_no_exit_code(mpirun, given, code):
    """Finalizing MPI would hang or crash: no rank does, and each says its code by itself."""
    done = mpirun(3, [sys.executable, "-c", STUCK, given], timeout=60, warm=False)
    assert done.returncode == code, done.stderr


def slow_ranks(comm):
    """Rank 1 is late by 1 s for what it comes to: after a loop, in its last step, as all close."""
    waits.LEFT_S, found = 0.1, []
    try:
        with world(timeout_s=30) as w:
            with deadline.ends(5):
                w.barrier()
            comm.barrier()
            time.sleep(w.rank)
            w.barrier()
            found.append("after a loop")
            if w.rank == 1:
                with deadline.ends(5):
                    time.sleep(1)
                    comm.send(None, dest=0)
                    comm.barrier()
            else:
                deadline.steps = 4
                with deadline.calling("step()"):
                    Deadline(20).wait(lambda: comm.iprobe(source=1), lambda: "", whom=lambda: [1])
                comm.recv(source=1)
                comm.barrier()
            found.append("in its last step")
            if w.rank == 0:
                with deadline.ends(5):
                    w.barrier()
            else:
                with deadline.ends(5):
                    time.sleep(1)
                    w.barrier()
            found.append("as all close")
    finally:
        waits.LEFT_S = 10.0
    return found


def test_a_slow_rank_has_not_left(ranks):
    assert ranks(2)(slow_ranks) == [["after a loop", "in its last step", "as all close"]] * 2


TERM = """
from pathlib import Path
from mpigossip.cluster import deadline
from mpigossip.runs.stopper import Stopper
deadline.TERM_S = 0.5
with world() as w, Stopper(w, Path("nowhere")):
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
    assert re.search(r"nothing is heard of rank 1 on \S+; SIGTERM came", done.stderr), done.stderr
