"""A rank that is killed before, in or just after MPI's start: all end, and an error names it."""

import os
import re
import shlex
import sys
import time

import pytest

from mpigossip.cluster import starting
from tests import launch
from tests.cases import every, naming

pytestmark = pytest.mark.both


LIMIT_S = 5
RANK = """
import os, signal, sys, time
from pathlib import Path
from mpigossip.cluster import launcher, process
from mpigossip.cluster.starting import RankStart
rank = launcher.launcher_ranks(os.environ)[0][0]
def kill(process):
    Path(sys.argv[1], "victim").write_text(str(process))  # its output may be lost with it
    os.kill(process, signal.SIGKILL)
def die(when):
    if rank == 1 and sys.argv[2] == when:
        kill(os.getpid())
die("before")
process.before_mpi(Path(sys.argv[1]), float(sys.argv[3]))
while sys.argv[2] != "before" and len([*Path(sys.argv[1]).glob(".*/*/[0-9]*")]) < 3:
    time.sleep(0.05)
time.sleep(1.5)  # the ranks have detected each other
die("hello")
if rank == 1 and sys.argv[2] == "stopped":
    time.sleep(600)
if rank == 1 and sys.argv[2] == "exit":
    sys.exit("no such library")
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from mpigossip.cluster.mpi_world import open_world
init = RankStart.init
def dies(self):
    if rank == 1 and sys.argv[2] == "init" and os.fork() == 0:
        time.sleep(0.02)
        kill(os.getppid())
        os._exit(0)
    return init(self)
RankStart.init = dies
with open_world(float(sys.argv[3])) as ranks:
    time.sleep(0.5)
    die("after")
    if rank == 1 and sys.argv[2] == "raise":
        raise ValueError("said by itself")
    ranks.barrier()
print("done")
"""


@pytest.fixture(params=["plain", "ulfm"])
def tolerant(request, monkeypatch):
    """Return whether ranks survive the failure of another; with Open MPI, both cases are tested."""
    if request.param == "ulfm":
        if not launch.is_open_mpi():
            pytest.skip("only Open MPI's launcher has --with-ft ulfm")
        words = shlex.join([*launch.launcher(), "--with-ft", "ulfm"])
        monkeypatch.setenv("MPIGOSSIP_MPIEXEC", words)
    return request.param == "ulfm"


def ended(mpirun, folder, when, limit=LIMIT_S):
    """Return the output of ranks, and the seconds, if rank 1 runs this program."""
    began = time.monotonic()
    done = mpirun(3, [sys.executable, "-c", RANK, folder, when, limit], limit + 40, warm=False)
    assert done.returncode != 0, done.stderr
    assert time.monotonic() - began < 30
    return done.stdout + done.stderr  # MPICH reports on standard output


@pytest.mark.parametrize("when", ["before", every("hello"), "init", every("after")])
def test_a_rank_that_is_killed_ends_the_job_and_is_named(mpirun, tolerant, tmp_path, when):
    """The launcher names the rank or the process; if it continues, the package does."""
    message = ended(mpirun, tmp_path, when)
    process = (tmp_path / "victim").read_text()
    names = rf"rank 1\b|started: 1\b|process {process}\b"
    if launch.is_open_mpi():
        assert re.search(names, message) or when == "after" and tolerant, message
    else:  # reports that a process was killed; its launcher may fail with the process
        ends = ("BAD TERMINATION", "Killed", "process manager error")
        assert any(words in message for words in ends), message
    if tolerant and when == "before":
        assert f"MPI has not started within {LIMIT_S} s (node.timeout_s)" in message
        assert "1 of 3 ranks have not " in message
    if tolerant and when in ("hello", "init"):
        lines = re.findall(r"mpigossip: (rank .*)", message)
        assert len(lines) == 1 and lines[0].startswith("rank 1 of 3 on "), message
        assert re.search(naming(f"process {process}", "before MPI"), lines[0])


def test_a_rank_that_does_not_start_ends_the_job(mpirun, tolerant, tmp_path):
    message = ended(mpirun, tmp_path, "stopped")
    assert message.count(f"MPI has not started within {LIMIT_S} s (node.timeout_s)") == 1
    assert "called MPI_Init: rank 1 on " in message


@pytest.mark.parametrize(
    "how, says", [("raise", "said by itself"), every("exit", "no such library")]
)
def test_a_rank_that_exits_reports_its_own_reason(mpirun, tolerant, tmp_path, how, says):
    assert says in ended(mpirun, tmp_path, how, 60)


def test_a_second_launch_in_one_allocation_is_not_ended_by_the_first(mpirun, tmp_path):
    """Only PBS's job number distinguishes these launches; files of the first remain."""
    left = tmp_path / ".ranks-7.pbs"
    (left / os.uname().nodename).mkdir(parents=True)
    for rank in range(3):
        (left / os.uname().nodename / f"{rank}.4194305").touch()
    program = RANK.replace("sys.argv[2]", "'none'").replace(
        "from mpigossip.cluster.starting",
        "process.job_id = lambda _: '7.pbs'\nfrom mpigossip.cluster.starting",
    )
    done = mpirun(3, [sys.executable, "-c", program, tmp_path, "none", 20], warm=False)
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stderr


def test_a_start_lists_the_files_of_its_own_host_only(tmp_path, monkeypatch):
    """If n ranks listed all files every half second, they would read n² names each time."""
    listed = []
    ranks_in = starting._ranks_in
    monkeypatch.setattr(
        starting, "_ranks_in", lambda folder: listed.append(folder) or ranks_in(folder)
    )
    monkeypatch.setattr(starting, "CHECK_S", 0.01)
    for rank in (1, 2):
        (tmp_path / f"host{rank}").mkdir()
        (tmp_path / f"host{rank}" / f"{rank}.77").touch()
    start = starting.RankStart(tmp_path, 0, 3, 60)
    launch.until(lambda: len(listed) > 3, 20, "the files are listed repeatedly")
    assert start._describe_missing() == "" and len(start._started_ranks()) == 3
    start.over()
    own_host = tmp_path / os.uname().nodename
    assert {*listed[:4]} == {own_host} and not own_host.exists()
    assert (tmp_path / "host1" / "1.77").exists()
