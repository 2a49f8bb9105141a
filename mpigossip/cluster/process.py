"""This process from before MPI starts to how it leaves, without hanging."""

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

from mpigossip.cluster import deadline, uncaught
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError, prctl
from mpigossip.cluster.launcher import job_id, launcher_ranks
from mpigossip.cluster.starting import Start
from mpigossip.config import JobError
from mpigossip.config.readable import print_note

if TYPE_CHECKING:
    from mpi4py import MPI

TIMEOUT_S = 300.0  # seconds; the default of `node.timeout_s`
ABORT_S = 3.0  # seconds that MPI has to end this rank
READ_S = 0.1  # seconds that a launcher has to read what was said: Open MPI's drops the rest
LEAVE_S = 10.0  # seconds that a rank with a bad exit code waits for the others to end too
PROGRESS = "mpigossip-progress"  # the name of threads that call MPI

PR_SET_PDEATHSIG = 1

_start: Start | None = None

mpi_process: int | None = None
"""ID of the process in which a world started or found MPI; None before the first world."""


def is_fork() -> bool:
    """Return whether this process is a fork of the process that MPI belongs to.

    A fork inherits MPI's connections and windows, but MPI knows one process only: messages that
    the fork sends or receives are then missing in the parent process.
    """
    return mpi_process is not None and os.getpid() != mpi_process


def own_mpi() -> None:
    """Keep the ID of this process, which opens a world; a fork of another one is rejected."""
    global mpi_process
    check_process()
    mpi_process = os.getpid()


def check_process() -> None:
    """Reject a call that uses MPI in a fork.

    :raises JobError: if this process is a fork of the process that MPI belongs to
    """
    if is_fork():
        raise JobError(
            f"process {os.getpid()} is a fork of process {mpi_process}, which opened the world: a "
            'fork must not use the world, Gossip or Averager; start processes with the "spawn" or '
            '"forkserver" method of multiprocessing, and exchange in the process that opened it'
        )


def end_with(parent: int) -> None:
    """SIGTERM for this process when the thread that started it ends, or has ended. On Linux."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)


def before_mpi(folder: Path | None = None, timeout_s: float = TIMEOUT_S) -> float:
    """Before MPI is imported: from now on it has ``timeout_s`` to start; the limit, returned.

    ``folder``: the run's, in which ranks see each other before MPI joins them; a temporary one
    where there is none. A process that no launcher started with others needs nothing of this.
    """
    global _start
    told = launcher_ranks(os.environ)
    if _start is None and told and told[0][1] > 1:
        rank, size, _ = told[0]
        _start = Start(_shared(folder), rank, size, timeout_s)
    return timeout_s


def _shared(folder: Path | None) -> Path:
    """A folder for the ranks' files: in the run's, else one of this user's that others can't be."""
    name = f"ranks-{job_id(os.environ)}"
    if folder is not None:
        with contextlib.suppress(OSError):
            inside = folder.absolute() / f".{name}"
            inside.mkdir(parents=True, exist_ok=True)
            return inside
    here = Path(tempfile.gettempdir()) / f"mpigossip.{os.getuid()}.{name}"
    with contextlib.suppress(OSError):
        here.mkdir(mode=0o700, exist_ok=True)
        found = here.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return here
    return Path(tempfile.mkdtemp(prefix="mpigossip.ranks-"))


def start_mpi() -> None:
    """Start MPI, beside what `begin` began."""
    from mpi4py import MPI

    if _start is not None:
        _start.init()
    else:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def started() -> None:
    """MPI runs, and all ranks have met."""
    if _start is not None:
        _start.over()


def abort(comm: "MPI.Comm", code: int) -> None:
    """End all ranks at once; this one also where MPI_Abort doesn't return.

    So it is in Open MPI when several ranks call it after a loss. mpi4py's call would keep the
    interpreter's lock.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    time.sleep(READ_S)
    watch = threading.Timer(ABORT_S, os._exit, (code,))
    watch.daemon = True
    watch.start()
    # a rank that a signal ends counts as a success for Open MPI's launcher with fault tolerance:
    # libc's `_exit` ends it with SIGTERM's number
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = None
    library.signal(signal.SIGTERM, ctypes.cast(library._exit, ctypes.c_void_p))
    kind = ctypes.c_int if MPI._sizeof(MPI.Comm) == 4 else ctypes.c_void_p
    ctypes.CDLL(MPI.__file__).MPI_Abort(kind.from_address(MPI._addressof(comm)), code)


class ExitHandler:
    """How this process leaves MPI: once per process, after the last World."""

    def __init__(self) -> None:
        self.code = 0
        self.cause = ""
        self.survivors: MPI.Intracomm | None = None
        """after the loss of a rank"""
        self.status: Any = None
        """that the program exits with, as far as it is known here"""
        self._prepared = False

    def prepare(self, finalize: bool, comm: Any) -> None:
        """Collective over ``comm``, with a limit; the first call counts.

        `finalize`: MPI was initialized here.
        """
        if not self._prepared:
            self._prepared = True
            # atexit isn't told the status, which ranks that wait for this one end by
            vars(sys)["exit"] = partial(self._exit, sys.exit)
            atexit.register(self._leave, comm.Dup().plain, finalize)

    def _exit(self, plain: Callable[[Any], NoReturn], status: Any = None) -> NoReturn:
        self.status = status
        plain(status)

    def _leave(self, comm: "MPI.Comm", finalize: bool) -> None:
        from mpi4py import MPI

        if is_fork():
            self._leave_fork(finalize)
            return
        if MPI.Is_finalized():
            return
        exit_after_failure(self.code)
        with deadline.user_call(f"{deadline.END_PREFIX}program"):
            uncaught_here = getattr(sys, "last_value", None)
            code = self.code or uncaught.code(uncaught_here or SystemExit(self.status))
            deadline.announce(deadline.EXITED - (code & 255))
        # Waiting here, not in MPI_Finalize, costs no core and can be given up.
        limit = LEAVE_S if self.code else float("inf")
        stuck = bytearray([any(thread.name == PROGRESS for thread in threading.enumerate())])
        try:
            every = comm.Iallreduce(MPI.IN_PLACE, [stuck, MPI.BYTE], MPI.BOR)
            Deadline(limit).wait(every.Test, lambda: "other ranks still run")
        except WaitTimeoutError as late:
            host = MPI.Get_processor_name()
            text = f"mpigossip: rank {comm.rank} on {host} ended by {self.cause}; {late}"
            os.write(2, f"{text}: stopping the job\n".encode(errors="replace"))
            abort(comm, self.code)
        if stuck[0]:
            # a thread was given up in a call of MPI: MPI_Finalize, collective, would hang or crash
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if finalize or self.code:
            # mpi4py would keep the interpreter's lock, which the thread of `uncaught.exit_now`
            # needs
            ctypes.CDLL(MPI.__file__).MPI_Finalize()

    def _leave_fork(self, finalize: bool) -> None:
        """End a fork without MPI; the rank goes on in its own process.

        If mpi4py initialized MPI, it finalizes MPI when the interpreter ends. That would log the
        rank off the launcher, so the process ends here.
        """
        if not finalize:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(uncaught.code(getattr(sys, "last_value", None) or SystemExit(self.status)))


exit_handler = ExitHandler()


def exit_after_failure(code: int) -> None:
    """After a loss: ends this process here, as MPI_Finalize may never return; else nothing."""
    if exit_handler.survivors is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # together, as far as possible: who goes first is one more rank that is lost to the others
    with contextlib.suppress(Exception):
        request = exit_handler.survivors.Ibarrier()
        Deadline(LEAVE_S).wait(request.Test, lambda: "other ranks still run")
    os._exit(code)


def report_unused(nodes: int) -> None:
    """Report at exit that nodes exchanged nothing; what exchanges unregisters it."""
    if not exit_handler.code and not is_fork():
        text = f"{nodes} nodes exchanged nothing, so each has a model of its own; write "
        print_note(f"{text}optimizer = mpigossip.Gossip(world, model, optimizer)")


def prints_shared_messages() -> bool:
    """Whether this process prints messages that all ranks have: the first rank that lives."""
    if exit_handler.survivors is not None:
        return exit_handler.survivors.rank == 0
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return all(rank == 0 for rank, _, _ in launcher_ranks(os.environ)[:1])
    return mpi.COMM_WORLD.rank == 0


def libraries() -> list[str]:
    """Paths of the shared libraries loaded here, in alphabetical order (Linux; elsewhere none)."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})
