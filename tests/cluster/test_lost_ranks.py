"""A rank that is killed is named, and nobody waits for it while MPI starts."""

import re
import shlex
import sys
import time

import pytest

from tests import launch

LIMIT_S = 5
RANK = """
import os, signal, sys, time
from pathlib import Path
from mpigossip.cluster import launcher, process
rank = launcher.places(os.environ)[0][0]
def die(when):
    if rank == 1 and sys.argv[2] == when:
        os.kill(os.getpid(), signal.SIGKILL)
die("before")
process.begin(Path(sys.argv[1]), float(sys.argv[3]))
while sys.argv[2] != "before" and len([*Path(sys.argv[1]).glob(".*/[0-9]*")]) < 3:
    time.sleep(0.05)
time.sleep(2)  # the witnesses have started, and know each other
if rank == 1 and sys.argv[2] == "alone":
    process._witness._process.kill()
die("hello")
die("alone")
if rank == 1 and sys.argv[2] == "stopped":
    time.sleep(600)
if rank == 1 and sys.argv[2] == "exit":
    sys.exit("no such library")
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from mpigossip.cluster.ranks import world
start = MPI.Init_thread
def init(level):
    if rank == 1 and sys.argv[2] == "init" and os.fork() == 0:
        time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    return start(level)
MPI.Init_thread = init
with world(float(sys.argv[3])) as ranks:
    time.sleep(0.5)
    die("after")
    if rank == 1 and sys.argv[2] == "raise":
        raise ValueError("said by itself")
    ranks.barrier()
print("done")
"""


@pytest.fixture(params=["plain", "ulfm"])
def tolerant(request, monkeypatch):
    """Whether a lost rank ends the others; with Open MPI both ways."""
    if request.param == "ulfm":
        if not launch.is_open_mpi():
            pytest.skip("only Open MPI's launcher has --with-ft ulfm")
        words = shlex.join([*launch.launcher(), "--with-ft", "ulfm"])
        monkeypatch.setenv("MPIGOSSIP_MPIEXEC", words)
    return request.param == "ulfm"


def ended(mpirun, folder, when, limit=LIMIT_S):
    """What was said, in so many seconds, by ranks of which rank 1 did that."""
    began = time.monotonic()
    done = mpirun(3, [sys.executable, "-c", RANK, folder, when, limit], timeout=limit + 40)
    assert done.returncode != 0, done.stderr
    assert time.monotonic() - began < limit + 10
    if when == "before":  # others may have been ended between making the folder and their witness
        return done.stderr
    # the folder goes with the last witness, which may outlive the launcher by a moment
    until = time.monotonic() + 30
    while when != "alone" and list(folder.glob(".*")) and time.monotonic() < until:
        time.sleep(0.05)
    assert when == "alone" or not list(folder.glob(".*/*"))
    return done.stderr


@pytest.mark.parametrize("when", ["hello", "init", "after"])
def test_a_rank_that_is_killed_is_named(mpirun, tolerant, tmp_path, when):
    for _ in range(3 if when == "after" else 1):  # a launcher may be gone before a line can pass it
        told = ended(mpirun, tmp_path, when, 60)
        lines = re.findall(r"mpigossip: (rank \d .*without a word.*)", told)
        assert len(lines) == 1, told
        assert re.match(r"rank 1 of 3 on \S+ \(process \d+\) ended", lines[0]), told
        assert (" before MPI had started" in lines[0]) == (when != "after")


def test_a_rank_whose_witness_is_gone_is_named_by_another(mpirun, tmp_path):
    told = ended(mpirun, tmp_path, "alone", 60)
    lines = re.findall(r"mpigossip: (rank \d .*without a word.*)", told)
    assert len(lines) == 1, told
    assert lines[0].startswith("rank 1 of 3 on "), told


def test_a_rank_that_never_began_is_named(mpirun, tolerant, tmp_path):
    told = ended(mpirun, tmp_path, "before")
    if tolerant:  # the launcher says nothing and waits on
        assert f"MPI has not started within {LIMIT_S} s (node.timeout_s)" in told
    # else the launcher ended the others, perhaps before they could begin
    if "nothing is seen of" in told:
        assert re.search(r"ranks: (0, )?1\b", told)


def test_a_rank_that_does_not_come_to_the_start_ends_the_job(mpirun, tolerant, tmp_path):
    told = ended(mpirun, tmp_path, "stopped")
    assert f"MPI has not started within {LIMIT_S} s (node.timeout_s)" in told
    assert "1 of 3 ranks have begun but not come so far: 1 on " in told


def test_a_rank_that_ends_by_itself_speaks_for_itself(mpirun, tolerant, tmp_path):
    assert "without a word" not in ended(mpirun, tmp_path, "raise", 60)
    told = ended(mpirun, tmp_path, "exit", 60)
    assert "no such library" in told and "without a word" not in told
