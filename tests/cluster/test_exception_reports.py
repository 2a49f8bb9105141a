"""The end of a user's program by a user error, an exception or Ctrl-C: one report, no more."""

import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from mpigossip.cluster import process
from mpigossip.cluster.launcher import LaunchError, check_alone
from tests import launch
from tests.cases import every, naming, on_each

HEAD = """
import sys, time
import mpigossip
from mpigossip.config import JobError

def mistake(text="give more, 3 is not enough"):
    raise JobError([text])

"""


PATIENT = (
    "from mpigossip.cluster import exception_reports\nexception_reports.GATHER_ERRORS_S = 20\n"
)
"""Seconds that a rank waits for the errors of the others, so that it reports for all."""


def program(tmp_path, body):
    path = tmp_path / "loop.py"
    path.write_text(HEAD + body)
    return [sys.executable, str(path)]


@pytest.mark.both
def test_a_user_error_of_all_ranks_is_one_paragraph(mpirun, tmp_path):
    body = PATIENT + "world = mpigossip.world()\nmistake()\n"
    done = mpirun(3, program(tmp_path, body), timeout=30)
    where = f"loop.py, line {HEAD.splitlines().index('    raise JobError([text])') + 1}"
    assert done.returncode == 2
    assert own_words(done) == f"mpigossip: give more, 3 is not enough ({where})\n"


@pytest.mark.both
def test_a_user_error_of_one_rank_names_it_and_ends_all(mpirun, tmp_path):
    body = (
        "with mpigossip.world() as world:\n    if world.rank == 1: mistake()\n    world.barrier()\n"
    )
    done = mpirun(3, program(tmp_path, body), timeout=30)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("mpigossip: ")]
    assert len(said) == 1 and "Traceback" not in done.stderr, done.stderr
    assert said[0].startswith("mpigossip: rank 1 of 3 on ") and "3 is not enough" in said[0]


@pytest.mark.both
def test_an_exception_of_all_ranks_has_one_traceback(mpirun, tmp_path):
    body = "with mpigossip.world() as world:\n    raise ValueError(f'wrong {world.rank}')\n"
    body = PATIENT + body
    done = mpirun(3, program(tmp_path, body), timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("mpigossip: all 3 ranks ")
    assert done.stderr.count("Traceback") == 1
    assert own_words(done).endswith("ValueError: wrong 0\n")


@pytest.mark.both
def test_a_user_error_sets_the_exit_code_even_if_mpi_ends_late(mpirun, tmp_path):
    body = (
        "from mpi4py import MPI\nfrom mpigossip.cluster import process, exception_reports\n"
        "exception_reports.EXIT_LIMIT_S = 1\nworld = mpigossip.world()\n"
        "slow = lambda *_: time.sleep(20)\n"
        "library = type('', (), {'CDLL': lambda *_: type('', (), {'MPI_Finalize': slow})()})()\n"
        "if world.rank == 1: MPI.Finalize, process.ctypes = slow, library\nmistake()\n"
    )
    done = mpirun(2, program(tmp_path, body), timeout=120, warm=False)  # not a stub's exit code
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("3 is not enough") == 1


def own_words(done):
    """Return the program's own output: for exit codes, Open MPI's launcher adds a box."""
    text, box, _ = done.stderr.partition("-" * 74)
    assert not box or launch.is_open_mpi()
    return text


@pytest.mark.both
@pytest.mark.parametrize("inside", [True, every(False)], ids=["all wait", "one waits"])
def test_ctrl_c_is_reported_once(mpistart, tmp_path, inside):
    waits = "while True: time.sleep(0.05)"
    other = waits if inside else "world.comm.barrier() if world.rank == 1 else time.sleep(60)"
    body = f"with mpigossip.world() as world:\n    print('ready', flush=True)\n    {other}\n"
    job = mpistart(2, program(tmp_path, PATIENT * inside + body), warm=True)
    launch.until(lambda: job.output()[0].count("ready") == 2, 30, "both are ready")
    for pid in job.ranks():
        os.kill(pid, signal.SIGINT)
    done = job.finish(timeout=60)
    said = [line for line in done.stderr.splitlines() if line.startswith("mpigossip: ")]
    assert len(said) == 1 and said[0].endswith("interrupted"), done.stderr
    assert "Traceback" not in done.stderr
    if inside:
        assert (done.returncode, own_words(done)) == (130, "mpigossip: interrupted\n")


@pytest.mark.parametrize(
    ("env", "child", "words"),
    [
        ({"WORLD_SIZE": "4", "RANK": "2"}, (), ("torchrun", "WORLD_SIZE=4", "mpiexec -n 4")),
        ({}, (3,), ("multiprocessing", "mpiexec")),
    ],
)
def test_launchers_that_mpi_does_not_know_are_named(env, child, words):
    with pytest.raises(LaunchError, match=naming(words)) as error:
        check_alone(1, env, child)
    assert error.value.rank == 2


@on_each(
    ("size", "env", "child"),
    [
        (1, {}, ()),
        (1, {"WORLD_SIZE": "1", "RANK": "0"}, ()),  # torchrun with one process
        (4, {"WORLD_SIZE": "4", "RANK": "2"}, ()),  # set by the user from MPI's
        (1, {"WORLD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, (1,)),  # mpiexec -n 1
    ],
)
def test_one_node_on_purpose_is_left_alone(size, env, child):
    check_alone(size, env, child)


@pytest.mark.every
def test_torchrun_is_rejected_in_one_paragraph(mpirun, tmp_path):
    words = program(tmp_path, "mpigossip.world()\nprint('trained alone')\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = mpirun(0, [*torchrun, *words[1:]], timeout=60, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0 and "trained alone" not in done.stdout
    assert done.stderr.count("WORLD_SIZE=2") == 1


@pytest.mark.both
def test_spawned_processes_are_rejected(mpirun, tmp_path):
    body = """
def node(number):
    mpigossip.world()
    print("trained alone")

if __name__ == "__main__":
    import multiprocessing
    one = multiprocessing.get_context("spawn").Process(target=node, args=(0,))
    one.start()
    one.join()
    sys.exit(one.exitcode)
"""
    done = mpirun(0, program(tmp_path, body), timeout=60)
    assert done.returncode != 0 and "trained alone" not in done.stdout
    assert re.search(naming("LaunchError", "multiprocessing"), done.stderr)


def test_a_hook_for_a_launch_leaves_other_exceptions_alone(mpirun, tmp_path):
    body = "try: mpigossip.world()\nexcept ValueError: pass\nraise KeyError('mine')\n"
    env = {"WORLD_SIZE": "2", "RANK": "0"}
    done = mpirun(0, program(tmp_path, body), timeout=30, env=env)
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr


def test_the_exit_code_of_the_program_is_kept_after_a_rank_failure(monkeypatch):
    """Survivors of a rank failure leave without MPI_Finalize, by the same code."""

    class Left(Exception):
        pass

    def leave(code):
        raise Left(code)

    handler = process.ExitHandler()
    handler.survivors = SimpleNamespace(Ibarrier=lambda: SimpleNamespace(Test=lambda: True))
    handler.status = 3  # of sys.exit(3), after the world has closed
    monkeypatch.setattr(process, "exit_handler", handler)
    monkeypatch.setattr(process.os, "_exit", leave)
    monkeypatch.delattr(sys, "last_value", raising=False)
    with pytest.raises(Left) as left:
        handler._leave(None, False)
    assert left.value.args == (3,)
