"""Start of MPI, watched by a thread that names missing ranks and ends this rank if MPI hangs.

MPI_Init waits for all ranks without a time limit. It is called through ctypes, which releases the
interpreter's lock. Until MPI runs, each rank keeps a file HOST/RANK.PROCESS (PROCESS is its process
ID) in a folder that the ranks share. A rank lists the files of its own host repeatedly, but the
files of all hosts only from the time limit on: otherwise, n ranks would list n² files each time.
Ranks that fail later are reported by the launcher.
"""

import atexit
import contextlib
import ctypes
import os
import select
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

from mpigossip.config.errors import FAILED
from mpigossip.config.readable import abbreviate

ENTERED = "+"
"""Suffix of the file name of a rank that waits for MPI to start."""
CHECK_S = 0.5
"""Seconds between two checks of the other ranks."""
REPORTED = "said"
"""Name of the file that a rank creates before it reports why the job ends; only one rank can."""
FAULT = "all ranks wait for it, so the network between them may be at fault"
STALE_S = 3600.0
"""Age in seconds from which on a folder of another launch counts as left behind by killed ranks."""


class StartedRank(NamedTuple):
    """A rank whose file exists."""

    process: int
    """Process ID."""
    host: str
    """Name of the host."""
    has_entered: bool
    """True if the rank has called MPI_Init."""


class RankStart:
    """Watch over the start of this rank, from before MPI is loaded until :meth:`over` is called."""

    def __init__(self, folder: Path, rank: int, size: int, timeout_s: float):
        """Create this rank's file and start the thread that watches the other ranks.

        :param folder: folder of the ranks' files, as an absolute path
        :param rank: rank according to the launcher
        :param size: number of ranks according to the launcher
        :param timeout_s: seconds after which this rank ends if MPI has not started
        """
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._folder = folder
        self._host = os.uname().nodename
        self._process = os.getpid()
        self._file = folder / self._host / f"{rank}.{self._process}"
        self._began = time.monotonic()
        self._entered = float("inf")
        self._all_started = False
        self._watched: dict[int, tuple[int, int]] = {}
        """Rank and process ID of this host's ranks, by the descriptor that reports their exit."""
        self._over = threading.Event()
        if rank == 0:
            for other in folder.parent.glob(folder.name.partition("-")[0] + "-*"):
                with contextlib.suppress(OSError):
                    if other != folder and time.time() - other.stat().st_mtime > STALE_S:
                        shutil.rmtree(other, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            self._file.touch()
        atexit.register(self.over)
        threading.Thread(target=self._watch, daemon=True).start()

    def init(self) -> None:
        """Start MPI, and wait until all ranks have done so."""
        from mpi4py import MPI

        self._entered = time.monotonic()
        file = self._file.with_name(self._file.name + ENTERED)
        with contextlib.suppress(OSError):
            self._file.rename(file)
            self._file = file
        provided = ctypes.c_int()
        library = ctypes.CDLL(MPI.__file__)
        library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # mpi4py's own initialization does the same
            comm.Set_errhandler(MPI.ERRORS_RETURN)

    def over(self) -> None:
        """End the watch, because MPI runs or this rank exits, and remove the file of this rank.

        The last rank of a host removes the folder of the host, and the last of all ranks removes
        the shared folder.
        """
        self._over.set()
        if os.getpid() != self._process:  # In a fork, keep the file: it shows that the parent runs.
            return
        with contextlib.suppress(OSError):
            self._file.unlink()
            self._file.parent.rmdir()  # raises an error unless this is the last rank of the host
            # `scandir` reads the folder as far as needed; other hosts may have thousands of ranks.
            with os.scandir(self._folder) as entries:
                is_last = all(entry.name == REPORTED for entry in entries)
            if is_last:
                shutil.rmtree(self._folder)

    def _watch(self) -> None:
        while not self._over.is_set():
            # Detect an exit without delay, because MPICH's launcher soon kills the other ranks.
            ended = select.select([*self._watched], [], [], CHECK_S)[0]
            if ended and not self._over.is_set():
                rank, process = self._watched[ended[0]]
                reason = f"rank {rank} of {self._size} on {self._host} (process {process}) ended"
                self._end(f"{reason} before MPI had started")
            self._watch_local_ranks()
            if time.monotonic() - self._began >= self._timeout_s and not self._over.is_set():
                self._check_limit()
        for descriptor in self._watched:
            os.close(descriptor)

    def _check_limit(self) -> None:
        """End this rank if ranks are missing, or if it has been in MPI_Init for the time limit.

        This is called after the time limit has passed since the creation of this object. Before
        MPI_Init, a rank on a busy host may load modules for long. If no rank is missing, this time
        does not count, because the rank does not wait for others.
        """
        missing = ""
        if not self._all_started:
            missing = self._describe_missing()
            self._all_started = not missing
        is_late = bool(missing) or time.monotonic() - self._entered >= self._timeout_s
        if is_late and not self._over.is_set():
            late = self._describe_late()
            reason = f"MPI has not started within {self._timeout_s:g} s (node.timeout_s)"
            self._end(f"{reason}: {'; '.join(filter(None, [late, missing])) or FAULT}")

    def _end(self, reason: str) -> None:
        """End this process, after printing ``reason`` unless another rank has printed one."""
        try:
            (self._folder / REPORTED).touch(exist_ok=False)
            reports = True
        except OSError as error:  # if the file can't be created, each rank reports
            reports = not isinstance(error, FileExistsError)
        if reports:
            with contextlib.suppress(OSError):
                os.write(2, f"mpigossip: {reason}; ending the job\n".encode(errors="replace"))
        self.over()
        os._exit(FAILED)

    def _started_ranks(self) -> dict[int, StartedRank]:
        """Return an entry for each rank of any host whose file exists, by rank."""
        ranks: dict[int, StartedRank] = {}
        with contextlib.suppress(OSError):
            for host_folder in self._folder.iterdir():
                ranks |= _ranks_in(host_folder)
        return ranks

    def _watch_local_ranks(self) -> None:
        """Open a descriptor that reports the exit, for each rank that runs on this host.

        This works on Linux only.
        """
        for rank, started in _ranks_in(self._file.parent).items():
            if (rank, started.process) not in self._watched.values():
                with contextlib.suppress(OSError, AttributeError):
                    self._watched[os.pidfd_open(started.process)] = rank, started.process

    def _describe_missing(self) -> str:
        started = self._started_ranks()
        missing = [f"rank {rank}" for rank in range(self._size) if rank not in started]
        names = f"{abbreviate(missing, 8)} (according to {self._folder}, if all hosts share it)"
        return f"{len(missing)} of {self._size} ranks have not started: {names}" if missing else ""

    def _describe_late(self) -> str:
        late = {
            rank: started
            for rank, started in sorted(self._started_ranks().items())
            if not started.has_entered
        }
        names = abbreviate([f"rank {rank} on {started.host}" for rank, started in late.items()], 8)
        text = f"{len(late)} of {self._size} ranks have started but not called MPI_Init: {names}"
        return text if late else ""


def _ranks_in(host_folder: Path) -> dict[int, StartedRank]:
    """Return the ranks that have a file in ``host_folder``, by rank; {} if it is not a folder."""
    ranks: dict[int, StartedRank] = {}
    with contextlib.suppress(OSError):
        for file in host_folder.iterdir():
            rank, _, process = file.name.removesuffix(ENTERED).partition(".")
            if rank.isdigit() and process.isdigit():
                entered = file.name.endswith(ENTERED)
                ranks[int(rank)] = StartedRank(int(process), host_folder.name, entered)
    return ranks
