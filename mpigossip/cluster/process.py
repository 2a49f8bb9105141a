"""Start and exit of a process that uses MPI, such that it does not hang."""

import atexit
import contextlib
import ctypes
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpigossip.cluster import deadline, exception_reports
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError, prctl, start_watchdog
from mpigossip.cluster.endings import ACTIONS, Action, Cause, Others
from mpigossip.cluster.launcher import job_id, launcher_ranks
from mpigossip.cluster.local_devices import make_current_before_mpi
from mpigossip.cluster.starting import RankStart
from mpigossip.config import JobError
from mpigossip.config.readable import print_note

if TYPE_CHECKING:
    from mpi4py import MPI

TIMEOUT_S = 300.0
"""Default of `node.timeout_s`, in seconds."""
ABORT_S = 3.0
"""Seconds that MPI_Abort may take to end this rank."""
READ_S = 0.1
"""Seconds between the last output of this rank and an abort, so that the launcher reads the output.

The launcher of Open MPI discards output that it has not read before the abort.
"""
LEAVE_S = 10.0
"""Seconds for which a rank that ends by an error waits for the other ranks to end, too."""
PROGRESS = "mpigossip-progress"
"""Name of progress threads, which call MPI."""
PR_SET_PDEATHSIG = 1
"""Number of the option of Linux's ``prctl`` that sends a signal when the parent ends."""
_start: RankStart | None = None
"""The start of MPI, which is watched; None if this process was started alone."""
_devices = "auto"
"""Value of `node.devices`, whose first GPU is made current before MPI starts."""

mpi_process: int | None = None
"""ID of the process in which a world started or found MPI; None before the first world."""
_is_fork = False
"""True in a process that Python has forked from the one that MPI belongs to."""


def is_fork() -> bool:
    """Return whether this process is a fork of the process that MPI belongs to.

    A fork inherits MPI's connections and windows, but MPI knows one process only: messages that
    the fork sends or receives are then missing in the parent process.
    """
    return _is_fork


def _note_fork() -> None:
    """Store in a new fork whether MPI belongs to its parent.

    Python calls this in each fork, so that :func:`check_process`, which each notification calls,
    needs no system call.
    """
    global _is_fork
    _is_fork = mpi_process is not None


os.register_at_fork(after_in_child=_note_fork)


def own_mpi() -> None:
    """Remember this process as the one that opens a world.

    :raises JobError: if this process is a fork of a process that has opened one
    """
    global mpi_process
    check_process()
    mpi_process = os.getpid()


def check_process() -> None:
    """Reject a call that uses MPI in a fork.

    :raises JobError: if this process is a fork of the process that MPI belongs to
    """
    if _is_fork:
        raise JobError(
            f"process {os.getpid()} is a fork of process {mpi_process}, which opened the world: a "
            'fork must not use the world, Gossip or Averager; start processes with the "spawn" or '
            '"forkserver" method of multiprocessing, and exchange in the process that opened it'
        )


def end_with(parent: int) -> None:
    """Let this process receive SIGTERM when the thread that started it ends; Linux only.

    :param parent: process ID of the parent; if it has ended already, the signal is sent now
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)


def before_mpi(
    folder: Path | None = None, timeout_s: float = TIMEOUT_S, devices: str | None = None
) -> float:
    """Watch the start of MPI from now on, before MPI is imported, and return ``timeout_s``.

    If this process was started alone, or without a launcher, nothing is watched. A watch that has
    begun is not changed.

    :param folder: run directory, in which each rank creates a file to show that it has started;
        None: the system's temporary directory
    :param timeout_s: seconds that MPI may take to start, from now on
    :param devices: value of `node.devices`; None: the value of an earlier call, or "auto"
    """
    global _start, _devices
    _devices = devices or _devices
    launched = launcher_ranks(os.environ)
    if _start is None and launched and launched[0][1] > 1:
        rank, size, _ = launched[0]
        _start = RankStart(_shared(folder), rank, size, timeout_s)
    return timeout_s


def _shared(folder: Path | None) -> Path:
    """Create the folder for the ranks' files, if it does not exist, and return its path.

    A folder in the temporary directory must belong to this user, so that other users cannot
    interfere. If it does not, or if it can't be created, each rank creates a folder of its own, in
    which it sees no other rank.

    :param folder: folder in which this one is created; if it is None or cannot be written to, the
        temporary directory is used
    """
    name = f"ranks-{job_id(os.environ)}"
    if folder is not None:
        with contextlib.suppress(OSError):
            shared_folder = folder.absolute() / f".{name}"
            shared_folder.mkdir(parents=True, exist_ok=True)
            return shared_folder
    temporary = Path(tempfile.gettempdir()) / f"mpigossip.{os.getuid()}.{name}"
    with contextlib.suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        status = temporary.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            return temporary
    return Path(tempfile.mkdtemp(prefix="mpigossip.ranks-"))


def start_mpi() -> None:
    """Start MPI with this rank's GPU, if it has one, as current device.

    A watch begun by :func:`before_mpi` continues.
    """
    from mpi4py import MPI

    make_current_before_mpi(_devices)
    if _start is not None:
        _start.init()
    else:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def started() -> None:
    """Stop watching the start of MPI, because MPI runs on all ranks."""
    if _start is not None:
        _start.over()


def abort(comm: "MPI.Comm", code: int) -> None:
    """End all ranks at once; end this rank even if MPI_Abort does not return.

    Open MPI's MPI_Abort does not return if several ranks call it after a rank failure. It is called
    through ctypes, because mpi4py would hold the interpreter's lock.

    :param comm: communicator of all ranks
    :param code: exit code of the job
    """
    from mpi4py import MPI

    sys.stdout.flush()
    time.sleep(READ_S)
    start_watchdog(ABORT_S, os._exit, code)
    # With fault tolerance, Open MPI's launcher counts a rank that a signal ends as a success: let
    # libc's `_exit` handle SIGTERM, which ends the rank with the signal's number as exit code.
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = None
    library.signal(signal.SIGTERM, ctypes.cast(library._exit, ctypes.c_void_p))
    kind = ctypes.c_int if MPI._sizeof(MPI.Comm) == 4 else ctypes.c_void_p
    ctypes.CDLL(MPI.__file__).MPI_Abort(kind.from_address(MPI._addressof(comm)), code)


class ExitHandler:
    """Object that takes this process out of MPI, once, at the exit of the interpreter."""

    def __init__(self) -> None:
        self.code = 0
        """Exit code of the error that left the world or was not caught; 0 if there is none."""
        self.cause = ""
        """Type and message of the exception that left the world; "" if there is none."""
        self.survivors: MPI.Intracomm | None = None
        """Communicator of the survivors after a rank failure; None if no rank has failed."""
        self.status: Any = None
        """Exit status of the program; None if it is not known."""
        self.before_finalize: list[Callable[[MPI.Comm], None]] = []
        """Collective functions, called with a communicator of all ranks before `MPI_Finalize`, that
        release resources which an exception has left open."""
        self._prepared = False

    def prepare(self, finalize: bool, comm: Any) -> None:
        """Register the exit handler; collective over ``comm``. Only the first call has an effect.

        :param finalize: True if this package has initialized MPI
        :param comm: `TimeoutComm` of all ranks
        """
        if not self._prepared:
            self._prepared = True
            # Ranks that wait for this one receive its exit status, which atexit functions do not
            # get.
            vars(sys)["exit"] = partial(self._exit, sys.exit)
            atexit.register(self._leave, comm.Dup().plain, finalize)

    def _exit(self, original_exit: Callable[[Any], NoReturn], status: Any = None) -> NoReturn:
        self.status = status
        original_exit(status)

    def _leave(self, comm: "MPI.Comm", finalize: bool) -> None:
        from mpi4py import MPI

        if is_fork():
            self._leave_fork(finalize)
            return
        if MPI.Is_finalized():
            return
        code = self.code or exception_reports.code(
            getattr(sys, "last_value", None) or SystemExit(self.status)
        )
        exit_after_failure(code)
        cause = Cause.ERROR if self.code else Cause.EXIT
        action = ACTIONS[cause, self._wait_for_others(comm, code)]
        if action is Action.ABORT:
            name = f"rank {comm.rank} on {MPI.Get_processor_name()}"
            late = f"other ranks still run (waited {LEAVE_S:g} s)"
            exception_reports.write_stderr(
                f"mpigossip: {name} ended by {self.cause}; {late}: stopping the job"
            )
            abort(comm, self.code)
        if action is Action.SKIP_FINALIZE:
            exit_without_finalize(code)
        if self.code:
            # If the program has caught a Failure, as the command line does, exchanges may be open,
            # and the exception hook has not started a watchdog.
            start_watchdog(exception_reports.EXIT_LIMIT_S, os._exit, code)
        for release in self.before_finalize:
            with contextlib.suppress(MPI.Exception):  # MPI_Finalize then reports what is open
                release(comm)
        if finalize or self.code:
            # Call it through ctypes: mpi4py would hold the interpreter's lock, which the thread of
            # the watchdog needs.
            ctypes.CDLL(MPI.__file__).MPI_Finalize()

    def _wait_for_others(self, comm: "MPI.Comm", code: int) -> Others:
        """Wait until all ranks exit, and answer ranks that wait for this one; collective.

        Without this wait, a rank would wait inside MPI_Finalize, which occupies a core and cannot
        be abandoned. After an error, the wait ends after `LEAVE_S` seconds; otherwise, it has no
        limit.

        :param comm: communicator of all ranks, used by this object only
        :param code: exit code of this process, which the answers to other ranks contain
        """
        from mpi4py import MPI

        stuck = bytearray([any(thread.name == PROGRESS for thread in threading.enumerate())])
        request = comm.Iallreduce(MPI.IN_PLACE, [stuck, MPI.BYTE], MPI.BOR)
        self._keep_alive = request, stuck  # MPI may write to them after the time limit

        def all_ranks_exit() -> bool:
            with deadline.user_call(f"{deadline.END_PREFIX}program", ordered=False):
                deadline.answer(deadline.EXITED - (code & 255))
            return request.Test()

        try:
            limit = LEAVE_S if self.code else float("inf")
            Deadline(limit).wait(all_ranks_exit, lambda: "other ranks still run")
        except WaitTimeoutError:
            return Others.RUNNING
        return Others.STUCK if stuck[0] else Others.EXITING

    def _leave_fork(self, finalize: bool) -> None:
        """End a fork without using MPI; the rank continues in its own process.

        If mpi4py has initialized MPI, it also finalizes MPI when the interpreter ends. In a fork,
        this would disconnect the rank from the launcher. The fork therefore ends before mpi4py does
        that.

        :param finalize: True if this package has initialized MPI
        """
        if not finalize:
            exit_without_finalize(
                exception_reports.code(getattr(sys, "last_value", None) or SystemExit(self.status))
            )


exit_handler = ExitHandler()


def exit_after_failure(code: int) -> None:
    """Exit with ``code`` if this rank has survived a rank failure; otherwise do nothing.

    MPI_Finalize is not called, because it may never return after a rank failure.
    """
    if exit_handler.survivors is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit together if possible: to the other survivors, the first rank to exit would look like
    # another failed rank.
    with contextlib.suppress(Exception):
        request = exit_handler.survivors.Ibarrier()
        Deadline(LEAVE_S).wait(request.Test, lambda: "other ranks still run")
    exit_without_finalize(code)


def exit_without_finalize(code: int) -> NoReturn:
    """End this process without MPI_Finalize and without the exit functions of the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_unused(nodes: int) -> None:
    """Print, at the exit of a program, that its nodes have exchanged nothing.

    This function is registered as an exit function. The first object that exchanges unregisters it.
    It prints nothing after an error in the world, and nothing in a fork.

    :param nodes: number of nodes of the world
    """
    if not exit_handler.code and not is_fork():
        text = f"{nodes} nodes exchanged nothing, so each has a model of its own; write "
        print_note(f"{text}optimizer = mpigossip.Gossip(world, model, optimizer)")


def prints_shared_messages() -> bool:
    """Return whether this process prints the messages that are equal on all ranks.

    The first rank that has not failed prints them.
    """
    if exit_handler.survivors is not None:
        return exit_handler.survivors.rank == 0
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return all(rank == 0 for rank, _, _ in launcher_ranks(os.environ)[:1])
    return mpi.COMM_WORLD.rank == 0


def libraries() -> list[str]:
    """Return the sorted paths of the shared libraries that this process has loaded.

    On systems other than Linux, the list is empty.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})
