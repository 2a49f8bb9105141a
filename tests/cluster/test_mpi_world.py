"""The world of all ranks, waits, agreements, user errors, and exits without hanging ranks."""

import os
import re
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mpigossip.cluster import deadline
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError
from mpigossip.cluster.launcher import LaunchError, check_launcher, check_library, no_mpi
from mpigossip.cluster.mpi_world import open_world
from mpigossip.cluster.waits import WaitMonitor
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests import launch
from tests.cases import every, naming

pytestmark = pytest.mark.both


def facts(comm):
    with open_world() as w:
        return (
            w.rank == comm.rank,
            w.size,
            w.hosts,
            w.gather(10 * w.rank),
            w.broadcast(f"from {w.rank}"),
            w.agree(7 - w.rank),
            w.barrier(),
        )


def agreement_in_the_background(comm):
    with open_world() as w:
        if w.rank == 1:
            comm.recv(source=0)
        first = w.start_agree(w.rank)
        early = False
        if w.rank == 0:
            early = first.ready()
            comm.send(None, dest=1)  # rank 1 starts its agreement only now
        second = w.start_agree(0)
        return early, first.read(), first.ready(), second.read(), first.read()


def agreement_with_a_late_rank(comm):
    with open_world() as w:
        if w.rank == 1:
            comm.recv(source=0)
        late = w.start_agree(w.rank)
        if w.rank == 0:
            late._timeout_s = 0.2
            assert not late.ready()
            try:
                late.read()
            except WaitTimeoutError as error:
                comm.send(None, dest=1)
                late._timeout_s = 30
                return str(error), late.read()
        return None, late.read()


def one_world_after_another(comm):
    results = []
    for _ in range(10):
        with open_world() as w:
            if w.rank == 0:
                time.sleep(0.05)  # the others close before
                deadline.announce(deadline.WORKING)  # all ranks
                w.start_agree(5)  # which the others never begin
        with open_world(timeout_s=20) as w:
            results.append(w.agree(w.rank))
    return results


def one_works_on_inside(comm):
    with open_world(timeout_s=1.0) as w:
        if w.rank == 0:
            time.sleep(3.5)
    return True


def barrier_without_all(comm):
    w = open_world(timeout_s=0.2)
    if w.rank == 1:
        comm.recv(source=0)
    try:
        w.barrier()
    except WaitTimeoutError as error:
        comm.send(None, dest=1)
        return str(error)
    return None


def mistakes(comm, wrong, text):
    with open_world() as w:
        before = sys.excepthook, threading.excepthook
        try:
            with w.raise_together(JobError, KeyError):
                if w.rank in wrong:
                    raise JobError(text) if w.rank != 2 else KeyError("k")
        except JobError as error:
            return error.messages
        assert (sys.excepthook, threading.excepthook) == before
        return ()


def other_exceptions_pass(comm):
    with open_world() as w, pytest.raises(ZeroDivisionError), w.raise_together(JobError):
        _ = 1 / 0
    return True


def hooks_come_back(comm):
    before = sys.excepthook, threading.excepthook
    w = open_world()
    during = sys.excepthook, threading.excepthook
    w.close()
    w.close()
    return before == (sys.excepthook, threading.excepthook), during != before


def settings_come_back(comm):
    """Open and close a world while a framework is imported; return the settings at three times."""
    import mpigossip

    def settings():
        return sys.getswitchinterval(), os.environ.get("WORLD_SIZE"), "accelerate" in sys.modules

    sys.modules["accelerate"] = ModuleType("accelerate")
    os.environ["WORLD_SIZE"] = "1"
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        results = [settings()]
        with mpigossip.world():
            results.append(settings())
        return [*results, settings()]
    finally:
        sys.setswitchinterval(interval)
        del sys.modules["accelerate"], os.environ["WORLD_SIZE"]


def test_a_world_restores_the_settings_of_the_process(ranks):
    for before, during, after in ranks(2)(settings_come_back):
        assert before == after == (0.005, "1", True)
        assert during == (pytest.approx(deadline.SWITCH_S), None, True)


HANGS = """
import sys, time
from mpigossip.cluster import collectives
from mpigossip.cluster.mpi_world import open_world
collectives.MINIMUM_S, count, plain = 0.2, [0], collectives.TimeoutComm.Dup
def dup(self):
    count[0] += 1
    if count[0] != int(sys.argv[1]): return plain(self)
    with collectives.bounded_call(self, "MPI's Dup", self.timeout_s): time.sleep(100)
collectives.TimeoutComm.Dup = dup
open_world(timeout_s=0.5)
"""


@pytest.mark.parametrize("call", [2, every(1)])
def test_a_call_of_mpi_that_hangs_at_the_start_ends_the_job(mpirun, call):
    """The first Dup is for the end of the program, the second one for the world."""
    done = mpirun(2, [sys.executable, "-c", HANGS, str(call)], timeout=60, warm=False)
    assert done.returncode != 0
    words = r"mpigossip: rank [01] of 2 on \S+: MPI's Dup doesn't return"
    assert re.search(words, done.stderr), done.stderr


@pytest.mark.parametrize("n", [1, 3])
def test_world_knows_and_joins_its_ranks(ranks, n):
    for rank, got in enumerate(ranks(n)(facts)):
        same, size, hosts, gathered, said, agreed, _ = got
        assert same
        assert size == n
        assert len(hosts) == n and all(hosts)
        assert gathered == ([10 * r for r in range(n)] if rank == 0 else None)
        assert said == "from 0"
        assert agreed == 7


def test_an_agreement_is_in_flight_while_ranks_continue(ranks):
    assert ranks(2)(agreement_in_the_background) == [(False, 1, True, 0, 1)] * 2


def test_agreement_has_a_time_limit(ranks):
    late, good = ranks(2)(agreement_with_a_late_rank)
    assert late[1] == 1
    assert re.search(naming("agreement", "rank 1 on", "waited 0.2 s"), late[0])
    assert good == (None, 1)


def test_a_new_world_opens_after_messages_in_flight(ranks):
    assert ranks(3)(one_world_after_another, timeout=90) == [[2] * 10] * 3


def test_a_closing_world_waits_for_busy_ranks(ranks):
    assert ranks(2)(one_works_on_inside) == [True, True]


def test_barrier_has_a_time_limit(ranks):
    text, _ = ranks(2)(barrier_without_all)
    assert re.search(naming("in barrier()", "rank 1 on"), text)


def waits_in_a_chain(comm, meeting):
    """Let rank 0 wait for rank 1, which waits for rank 2, which does something else."""
    limit = 3 if comm.rank == 0 else 1  # rank 1 reports its wait after half of its own limit
    w = open_world(timeout_s=limit)
    message = None
    if w.rank == 2:
        comm.recv(source=0)
        comm.recv(source=1)
    else:
        try:
            if w.rank == 0 and meeting:
                w.agree(0)
            else:
                after = w.rank + 1
                Deadline(limit).wait(
                    lambda: False, lambda: f"no {after}", awaited_ranks=lambda: [after]
                )
        except WaitTimeoutError as error:
            message = str(error)
        comm.send(None, dest=2)
        if w.rank == 1 and meeting:
            w.start_agree(0)
    if w.rank == 2 and meeting:
        w.start_agree(0)
    comm.barrier()
    return message


@pytest.mark.parametrize("meeting", [False, True])
def test_a_wait_at_its_limit_names_the_awaited_ranks(ranks, meeting):
    first, second, _ = ranks(3)(waits_in_a_chain, meeting)
    message = "no message has arrived from rank 2 on "
    assert message in second
    if meeting:
        assert message in first
    else:
        assert re.search(naming("rank 1", "are waiting", "waited 3 s"), first)


def test_a_user_error_of_one_rank_is_raised_on_all(ranks):
    for messages in ranks(3)(mistakes, {1}, ["no file a", "no file b"]):
        assert len(messages) == 2
        assert messages[0].startswith("rank 1 on ")
        assert messages[0].endswith(": no file a")
    for messages in ranks(3)(mistakes, {1, 2}, ["same"]):
        assert [m.split(": ")[1] for m in messages] == ["same", "'k'"]
    assert ranks(3)(mistakes, (), ["same"]) == [()] * 3


def test_a_user_error_of_all_ranks_is_reported_once(ranks):
    assert ranks(2)(mistakes, {0, 1}, ["no file"]) == [("no file",)] * 2


def test_other_exceptions_pass_through(ranks):
    assert ranks(1)(other_exceptions_pass) == [True]


def test_closing_restores_the_hooks(ranks):
    assert ranks(2)(hooks_come_back) == [(True, True)] * 2
    assert ranks(1)(hooks_come_back) == [(True, False)]


def script(*lines):
    head = [
        "import sys, threading, time, mpigossip",
        "from mpigossip.cluster import mpi_world, process, world",
    ]
    return [sys.executable, "-c", "\n".join([*head, *lines])]


def test_exception_on_one_rank_ends_the_job_with_its_traceback(mpirun):
    done = mpirun(
        3,
        script(
            "with mpigossip.world() as world:",
            "    if world.rank == 1: raise ValueError('this went wrong')",
            "    world.barrier()",
        ),
        timeout=30,
    )
    assert done.returncode != 0
    assert "mpigossip: rank 1 of 3 on " in done.stderr
    assert "exception:\nTraceback" in done.stderr
    assert "ValueError: this went wrong" in done.stderr


def test_exception_in_a_thread_ends_the_job(mpirun):
    done = mpirun(
        2,
        script(
            "with mpigossip.world() as world:",
            "    if world.rank == 0:",
            "        threading.Thread(target=lambda: 1 / 0, name='worker-7').start()",
            "    time.sleep(600)",
        ),
        timeout=30,
        warm=False,  # a sleeping fork does not notice the end of its launcher
    )
    assert done.returncode != 0
    assert "rank 0 of 2" in done.stderr
    assert "by an exception in worker-7" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_ranks_that_all_exit_with_a_code_pass_it_on(mpirun):
    never = "process.LEAVE_S = 1e6"  # no rank waits this long, or mpirun times out
    done = mpirun(3, script(never, "with mpigossip.world() as world: sys.exit(2)"), timeout=60)
    assert done.returncode == 2
    assert "mpigossip" not in done.stderr


def test_a_rank_may_take_longer_than_the_others(mpirun):
    done = mpirun(
        2,
        script(
            "process.LEAVE_S = 0.5",
            "with mpigossip.world() as world: pass",
            "if world.rank == 0: time.sleep(2); print('all done')",
        ),
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "all done\n")


def test_world_joins_an_mpi_that_runs_already(mpirun):
    done = mpirun(
        2,
        script(
            "from mpi4py import MPI",
            "with mpigossip.world() as world: total = world.comm.allreduce(1)",
            "assert (total, MPI.Query_thread()) == (2, MPI.THREAD_MULTIPLE)",
        ),
        timeout=30,
    )
    assert done.returncode == 0 and done.stderr.startswith("mpigossip: 2 nodes exchanged nothing")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_world_that_not_all_ranks_open_ends_the_job(mpirun):
    done = mpirun(
        2,
        script(
            "from mpi4py import MPI",
            "from mpigossip.cluster import collectives",
            "collectives.MINIMUM_S = 0.5",
            "if MPI.COMM_WORLD.rank == 0: mpigossip.world(timeout_s=0.5)",
        ),
        timeout=30,
    )
    assert done.returncode != 0
    assert "mpigossip.world(): not all ranks" in done.stderr


def test_world_without_a_launcher_is_one_rank(mpirun):
    code = "with mpigossip.world() as world: print(world.size, world.agree(4)); 1 / 0"
    done = mpirun(0, script(code), timeout=30)
    assert done.stdout == "1 4\n"
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


@pytest.mark.parametrize("number", [every("1"), "2"])
def test_the_launcher_of_another_mpi_is_reported_before_mpi_aborts(mpirun, number, tmp_path):
    theirs = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x@1", "OMPI_COMM_WORLD_RANK": "0"}
    theirs |= {"OMPI_COMM_WORLD_SIZE": number}
    by = "Open MPI"
    if launch.is_open_mpi():
        theirs = {"PMI_RANK": "0", "PMI_SIZE": number, "HYDI_CONTROL_FD": "7"}
        by = "MPICH"
    words = ["mpigossip", "train", "digits", "run.steps=0"]
    done = mpirun(0, words, cwd=tmp_path, env=theirs, timeout=60)
    if number == "1" and by == "MPICH":  # one process on purpose, which works
        assert "launcher" not in done.stderr
        return
    assert done.returncode == 2, done.stderr
    assert f"{number} ranks were started by {by}" in done.stderr
    assert done.stderr.count("mpigossip: ") == 1 and "Abort" not in done.stderr


@pytest.mark.parametrize(
    ("library", "env"),
    [
        ("MPICH Version: 4.2\nMPICH configure: --with-pmix=/usr", {"PMIX_RANK": "0"}),
        ("MPI VERSION : CRAY MPICH version 8.1", {"PMIX_RANK": "0"}),
        ("MPICH Version: 5.0.2", {"PMIX_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}),
        ("Open MPI v5.0.11", {"PMIX_RANK": "0", "HYDI_CONTROL_FD": "7"}),
    ],
)
def test_an_mpi_that_may_belong_to_its_launcher_is_left_alone(library, env):
    check_library(library, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"} | env)


def test_a_linker_script_in_the_place_of_mpi_is_named():
    for words in ("file too short", "invalid ELF header"):
        error = RuntimeError(f"cannot load MPI library\n/lib/libmpi.so: {words}\n/other")
        assert "linker script" in str(no_mpi(error))
    assert "linker" not in str(no_mpi(RuntimeError("cannot load MPI library\nnot there")))


def test_a_named_library_that_fails_is_shown_with_remedies():
    error = ImportError("libmpi.so.12: cannot open shared object file")
    text = str(no_mpi(error, {"MPI4PY_LIBMPI": "/usr/lib/libmpich.so.12"}))
    assert "MPI4PY_LIBMPI=/usr/lib/libmpich.so.12" in text
    assert "ln -s /usr/lib/libmpich.so.12" in text
    assert "pip install --no-binary mpi4py mpi4py" in text
    assert "MPI4PY_LIBMPI=/path/to" in str(no_mpi(error, {}))


@pytest.mark.parametrize("env", [{}, {"MPI4PY_LIBMPI": "/nowhere/libmpi.so.40"}])
def test_a_missing_mpi_is_a_missing_module_on_a_cluster(env):
    """Staff of a cluster must never install an MPI of a wheel, so the module comes first."""
    text = str(no_mpi(RuntimeError("cannot load MPI library"), env))
    module = text.index("load the module")
    assert module < text.index("; elsewhere, ") < text.index("pip install mpich")


def test_missing_mpi_is_a_launch_error(mpirun):
    done = mpirun(
        0,
        script("try: mpigossip.world()", "except mpi_world.LaunchError as error: print(error)"),
        env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        timeout=30,
    )
    assert done.stdout.startswith("MPI can't be loaded (")
    assert "pip install mpich" in done.stdout


STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("size", "env"),
    [
        (1, {}),
        (8, STEP),
        (4, STEP),  # mpirun inside a step: the step's tasks are its daemons
        (1, STEP | {"PMI_RANK": "0", "PMI_SIZE": "1"}),  # mpiexec -n 1 inside a step
        (1, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}),  # a plain command in a batch script
        (1, {"SLURM_STEP_NUM_TASKS": "8"}),  # the step's size without being one of its tasks
        (1, {"PMI_SIZE": "many", "PMI_RANK": "0"}),
    ],
)
def test_launcher_and_world_agree(size, env):
    check_launcher(size, "MPICH", env)


@pytest.mark.parametrize(
    ("env", "variable", "rank"),
    [
        ({"PMI_RANK": "2", "PMI_SIZE": "8"}, "PMI_SIZE=8", 2),
        (STEP, "SLURM_STEP_NUM_TASKS=8", 0),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8", 1),
        ({"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8"}, "FLUX_JOB_SIZE=8", 5),
    ],
)
def test_a_world_of_one_with_several_launched_ranks_is_rejected(env, variable, rank):
    with pytest.raises(LaunchError, match=naming("8 ranks", variable)) as error:
        check_launcher(1, "MPICH Version:\t5.0.2\nbuilt …", env)
    assert error.value.rank == rank
    assert "(MPICH Version: 5.0.2" in str(error.value)
    assert "mpiexec -n 1" in str(error.value) and "--mpi=cray_shasta" in str(error.value)
    assert error.value.short.startswith(f"rank {rank} of 8 on ")
    assert "\n" not in error.value.short and "--mpi=cray_shasta" in error.value.short


def test_each_task_of_a_world_of_one_prints_a_line_in_case_rank_0_prints_nothing(mpirun, tmp_path):
    task = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}
    program = script("mpigossip.world()")
    command = ["mpigossip", "train", "digits", "run.steps=0"]
    for words in (program, command):
        done = mpirun(0, words, cwd=tmp_path, env=task, timeout=60)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and "rank 3 of 8 on " in done.stderr


def test_a_deadline_waits_and_names_the_late_event():
    answers = iter([False] * 80 + [True])
    assert Deadline(10).wait(lambda: next(answers), lambda: "never asked") > 0
    assert Deadline(0).wait(lambda: True, lambda: "never asked") < 1
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=naming("token of rank 3", "0.05 s")):
        Deadline(0.05).wait(lambda: False, lambda: "token of rank 3")
    assert 0.05 <= time.monotonic() - begin < 5
    assert issubclass(WaitTimeoutError, TimeoutError)


def test_a_pause_restarts_the_time_limit(monkeypatch):
    """The pause ends at 2.7 s and the limit is 1 s: the wait ends near 4 s, not 3 s."""
    now = [0.0]

    def tick(seconds=1e-3):
        now[0] += max(seconds, 1e-3)
        return now[0]

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=tick, sleep=tick))
    monkeypatch.setattr(deadline, "any_rank_paused", lambda: now[0] < 2.7)
    with pytest.raises(WaitTimeoutError):
        Deadline(1).wait(lambda: False, lambda: "x")
    assert 3.7 <= now[0] < 4.7


def test_a_pause_that_ends_before_the_limit_restarts_it(monkeypatch):
    """The pause ends at 0.9 s and the limit is 1 s: the wait ends at 1.9 s."""
    now = [0.0]

    def tick(seconds=1e-3):
        now[0] += max(seconds, 1e-3)
        return now[0]

    wait = SimpleNamespace(
        poll=lambda: None,
        is_paused=lambda: now[0] < 0.9,
        describe_fault=lambda left: "",
        finish=lambda: None,
    )
    roll = SimpleNamespace(
        start_wait=lambda *_: wait,
        poll_paused=lambda: now[0] < 0.9,
    )
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=tick, sleep=tick))
    monkeypatch.setattr(deadline.this_rank, "monitor", roll)
    with pytest.raises(WaitTimeoutError):
        Deadline(1).wait(lambda: False, lambda: "x", awaited_ranks=list)
    assert 1.9 <= now[0] < 2.9


def monitor_of_two(sent):
    """Return a monitor of rank 0 of 2 that appends each status to ``sent`` in place of sending."""

    def keep(value, *_):
        sent.append(int(value[:8].view(np.int64)[0]))
        return SimpleNamespace(Test=lambda: True)

    monitor = WaitMonitor(SimpleNamespace(size=2, rank=0, Isend=keep), ["a", "b"], threaded=False)
    monitor.receive_status = set
    return monitor


def test_a_waiting_thread_doesnt_end_the_pause_of_its_rank(monkeypatch):
    sent = []
    roll = monitor_of_two(sent)
    monkeypatch.setattr(deadline.this_rank, "monitor", roll)
    with deadline.paused():
        roll.send_status([1], deadline.WAITING)
        roll.send_status([1], deadline.CLOSING)
    roll.send_status([1], deadline.WORKING)
    paused, closing, working = deadline.PAUSED, deadline.CLOSING, deadline.WORKING
    assert sent == [paused, paused, closing, working, working]


def test_a_thread_that_sends_while_the_pause_ends_doesnt_restart_it(monkeypatch):
    sent = []
    was_sent = threading.Event()

    class Lock:
        """Lock that delays another thread's status until the end of the pause is announced."""

        def __enter__(self):
            if threading.current_thread() is other:
                was_sent.wait(10)

        def __exit__(self, *_):
            pass

    roll = monitor_of_two(sent)
    roll._send_lock = Lock()
    other = threading.Thread(target=roll.send_status, args=([1], deadline.WORKING))
    monkeypatch.setattr(deadline.this_rank, "monitor", roll)
    with deadline.paused():
        other.start()
        time.sleep(0.05)
    was_sent.set()
    other.join()
    assert sent == [deadline.PAUSED, deadline.WORKING, deadline.WORKING]


def test_a_deadline_counts_from_its_creation():
    deadline = Deadline(0.05)
    time.sleep(0.06)
    with pytest.raises(WaitTimeoutError):
        deadline.wait(lambda: False, lambda: "x")


def test_alone_has_the_interface_of_the_world():
    with SingleProcess() as alone:
        assert (alone.rank, alone.size, alone.comm, len(alone.hosts)) == (0, 1, None, 1)
        assert alone.gather("a") == ["a"]
        assert alone.broadcast("b") == "b"
        assert alone.agree(3) == 3
        agreement = alone.start_agree(4)
        assert agreement.ready()
        assert agreement.read() == 4
        with pytest.raises(JobError), alone.raise_together(JobError):
            raise JobError(["x"])
        alone.barrier()


def test_alone_abort_ends_the_process(mpirun):
    assert mpirun(0, script("world.SingleProcess().abort(6)"), timeout=30).returncode == 6
