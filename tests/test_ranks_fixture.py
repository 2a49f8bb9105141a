"""The fixtures after failures: a rank that raises, hangs or dies, and remaining processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import launch, warmserver
from tests.cases import naming, on_each
from tests.rankpool import RankError, Ranks

WARM = str(launch.REPO / "tests" / "warmserver.py")


def sum_of_ranks(comm, start, scale=1):
    total = np.empty(1)
    comm.Allreduce(np.array([start + comm.rank], float), total)
    return float(total[0]) * scale, os.getpid()


def raises_on_one(comm):
    if comm.rank == 1:
        raise ValueError(f"no good on {comm.rank}")
    comm.Barrier()


def hangs(comm):
    if comm.rank == 1:
        print("rank 1 is going to wait for ever", flush=True)
        comm.recv(source=0, tag=99)


def dies(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.Barrier()


def leaves_a_message(comm):
    comm.isend("stray", dest=(comm.rank + 1) % comm.size).free()


def is_anything_there(comm):
    return comm.iprobe()


@pytest.fixture
def own():
    """Return separate pools, so that killing them causes no start for other tests."""
    pools = Ranks()
    yield pools
    pools.close()


def test_messages_of_one_call_do_not_reach_the_next(ranks):
    ranks(2)(leaves_a_message)
    assert ranks(2)(is_anything_there) == [False, False]


@pytest.mark.every
def test_a_failing_call_is_shown_and_leaves_nothing_behind_and_the_next_works(own, mpirun):
    """Ranks raise, hang or die; the pool starts again after each failure."""
    for failure, says in (
        (raises_on_one, ["ValueError: no good on 1", "raises_on_one", "[0]"]),
        (hangs, ["no answer", "[1]", "in hangs"]),
        (dies, ["rank 1: died"]),
    ):
        assert len(own(2)(sum_of_ranks, 0)) == 2
        started = own.pools[2].launch
        marked = launch.marked(started.token)
        assert len(marked) >= 2
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in marked]
        mapped = [path for path in launch.segments() if any(str(path) in text for text in maps)]
        with pytest.raises(RankError) as error:
            own(2)(failure, timeout=3 if failure is hangs else 20)
        assert all(text in str(error.value) for text in says), error.value
        assert not launch.marked(started.token) and not started.folder.exists()
        assert [path for path in mapped if path.exists()] == []


PYTEST = """
import sys, time, tests.test_ranks_fixture as t
pools = t.Ranks()
pools(2)(t.sum_of_ranks, 0)
print(pools.pools[2].launch.token, pools.pools[2].launch.folder, flush=True)
pools(2)(t.hangs)
"""


@pytest.mark.every
def test_ranks_end_with_a_pytest_that_is_killed(mpirun):
    before = launch.segments()
    with subprocess.Popen(
        [sys.executable, "-c", PYTEST], cwd=launch.REPO, stdout=subprocess.PIPE, text=True
    ) as killed:
        token, folder = killed.stdout.readline().split()
        time.sleep(0.5)
        killed.kill()
    launch.until(lambda: not launch.marked(token), 20, "the ranks' end")
    launch.until(lambda: not Path(folder).exists(), 20, "the end of their folder")
    left = launch._unmapped(launch.segments() - before)
    assert not {path for path in left if path.stat().st_ctime > time.time() - 60}


def test_the_server_that_forks_has_one_thread_and_its_forks_have_torch(mpirun):
    code = "import sys; print('torch' in sys.modules); import torch; torch.ones(1 << 20).sum()"
    script = Path(launch._server()).with_name("warm.py")
    script.write_text(code)
    for _ in range(2):
        assert mpirun(0, [sys.executable, script]).stdout == "True\n"
    child_ids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    servers = [pid for pid in child_ids if WARM in Path(f"/proc/{pid}/cmdline").read_text()]
    assert [warmserver.threads(pid) for pid in servers] == [1]


def test_mpirun_kills_at_the_deadline(mpirun, mpistart):
    code = "import time; print('begun', flush=True); time.sleep(600)"
    running = mpistart(2, [sys.executable, "-c", code])
    launch.until(lambda: running.output()[0].count("begun") == 2, 60, "both have begun")
    with pytest.raises(pytest.fail.Exception, match=naming("no end", "begun")):
        running.finish(timeout=2)
    assert not launch.marked(running.token)


@pytest.mark.every
def test_mpirun_reports_what_outlives_it(mpirun):
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with pytest.raises(pytest.fail.Exception, match=naming("left running", "'sleep 600")):
        mpirun(0, [sys.executable, "-c", code])


REPORT = """mpigossip: give more
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-host-12143@1,0]
   Exit code:    2
--------------------------------------------------------------------------
"""


@on_each(
    ("code", "err", "expected"),
    [
        (-11, REPORT, 2),
        (-11, "mpigossip: give more\n", -11),  # nothing is known about the ranks
        (2, REPORT, 2),
        (139, REPORT, 139),
    ],
)
def test_a_crash_of_the_launcher_after_its_report_is_not_the_exit_code_of_the_job(
    code, err, expected
):
    assert launch._job_code(code, err) == expected
