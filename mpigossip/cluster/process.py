"""This process from before MPI starts to how it leaves: its witness, an end without hanging."""

import atexit
import contextlib
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mpigossip.cluster.deadline import Deadline, LateError, prctl
from mpigossip.cluster.launcher import job_id, places
from mpigossip.cluster.lost_ranks import Witness

if TYPE_CHECKING:
    from mpi4py import MPI

TIMEOUT_S = 300.0  # seconds; the default of `node.timeout_s`
LEAVE_S = 10.0  # seconds that a rank with a bad exit code waits for the others to end too

PR_SET_PDEATHSIG = 1

_witness: Witness | None = None


def end_with(parent: int) -> None:
    """SIGTERM for this process when the thread that started it ends, or has ended. On Linux."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)


def begin(folder: Path | None = None, timeout_s: float = TIMEOUT_S) -> float:
    """Before MPI is imported: from now on it has ``timeout_s`` to start; the limit, returned.

    ``folder``: the run's, in which ranks see each other before MPI joins them; a temporary one
    where there is none. A process that no launcher started with others needs nothing of this.
    """
    global _witness
    told = places(os.environ)
    if _witness is None and told and told[0][1] > 1:
        rank, size, _ = told[0]
        _witness = Witness(_shared(folder), rank, size, timeout_s)
        atexit.register(_witness.leaves)
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


def enters() -> None:
    """MPI is started next: waiting for the other ranks begins."""
    if _witness is not None:
        _witness.enters()


def started() -> None:
    """MPI runs, and all ranks have met."""
    if _witness is not None:
        _witness.started()


def speaks_last() -> bool:
    """This rank says why the job ends: no witness says so of those that the launcher ends then.

    False where another rank of this host, or of this folder, has said so before.
    """
    return _witness is None or _witness.speak()


class Ending:
    """How this process leaves MPI: once per process, after the last World."""

    def __init__(self) -> None:
        self.code = 0
        self.cause = ""
        self.survivors: MPI.Intracomm | None = None
        """after the loss of a rank"""
        self._prepared = False

    def prepare(self, finalize: bool) -> None:
        """Collective; the first call counts. `finalize`: MPI was initialized here."""
        from mpi4py import MPI

        if not self._prepared:
            self._prepared = True
            atexit.register(self._leave, MPI.COMM_WORLD.Dup(), finalize)

    def _leave(self, comm: "MPI.Comm", finalize: bool) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        leave(self.code)
        # Waiting here, not in MPI_Finalize, costs no core and can be given up.
        limit = LEAVE_S if self.code else float("inf")
        try:
            Deadline(limit).wait(comm.Ibarrier().Test, lambda: "other ranks still run")
        except LateError as late:
            host = MPI.Get_processor_name()
            text = f"mpigossip: rank {comm.rank} on {host} ended by {self.cause}; {late}"
            os.write(2, f"{text}: stopping the job\n".encode(errors="replace"))
            sys.stdout.flush()
            speaks_last()
            comm.Abort(self.code)
        if finalize:
            MPI.Finalize()


ending = Ending()


def leave(code: int) -> None:
    """After a loss: ends this process here, as MPI_Finalize may never return; else nothing."""
    if ending.survivors is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # together, as far as possible: who goes first is one more rank that is lost to the others
    with contextlib.suppress(Exception):
        request = ending.survivors.Ibarrier()
        Deadline(LEAVE_S).wait(request.Test, lambda: "other ranks still run")
    if _witness is not None:
        _witness.leaves()
    os._exit(code)


def speaks() -> bool:
    """Whether this process prints messages that all ranks have: the first rank that lives."""
    if ending.survivors is not None:
        return ending.survivors.rank == 0
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return all(rank == 0 for rank, _, _ in places(os.environ)[:1])
    return mpi.COMM_WORLD.rank == 0
