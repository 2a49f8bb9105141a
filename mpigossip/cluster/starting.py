"""Start of MPI, watched by a thread that names ranks which don't come, and ends this one then.

MPI_Init waits for all ranks, without a limit. It is called through ctypes, which frees the
interpreter's lock. Each rank lays a file, named by its number, into a folder that the ranks share,
until MPI runs. A rank that is lost later is the launcher's to report.
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

from mpigossip.config.errors import FAILED
from mpigossip.config.readable import abbreviate

ENTERED = "+"
"""Behind the name of a rank's file: it waits for MPI to start."""
LOOK_S = 0.5
"""Seconds between two looks at the other ranks."""
SAID = "said"
"""The file of the rank that says why the job ends: who makes it speaks."""
FAULT = "all ranks wait for it, so the network between them may be at fault"
STALE_S = 3600.0
"""Age from which on a folder of another launch was left by ranks that were killed."""


class Start:
    """This rank's start, from before MPI is loaded; `over` when MPI runs."""

    def __init__(self, folder: Path, rank: int, size: int, timeout_s: float):
        """``folder``: where the ranks' files lie, absolute."""
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._folder = folder
        self._host = os.uname().nodename
        self._process = os.getpid()
        self._file = folder / f"{rank}.{self._process}.{self._host}"
        self._began = time.monotonic()
        self._entered = float("inf")
        self._living: dict[int, tuple[int, int]] = {}
        """rank and process of this host's ranks, by the files that tell of their ends"""
        self._over = threading.Event()
        if rank == 0:
            for other in folder.parent.glob(folder.name.partition("-")[0] + "-*"):
                with contextlib.suppress(OSError):
                    if other != folder and time.time() - other.stat().st_mtime > STALE_S:
                        shutil.rmtree(other, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._file.touch()
        atexit.register(self.over)
        threading.Thread(target=self._watch, daemon=True).start()

    def init(self) -> None:
        """Start MPI; waits for all ranks."""
        from mpi4py import MPI

        self._entered = time.monotonic()
        file = self._file.with_name(self._file.name + ENTERED)
        with contextlib.suppress(OSError):
            self._file.rename(file)
            self._file = file
        provided = ctypes.c_int()
        library = ctypes.CDLL(MPI.__file__)
        library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py's own start does
            comm.Set_errhandler(MPI.ERRORS_RETURN)

    def over(self) -> None:
        """MPI runs on all ranks, or this one leaves: its file goes, the folder with the last."""
        self._over.set()
        if os.getpid() != self._process:  # the file of a fork's parent says that the parent lives
            return
        with contextlib.suppress(OSError):
            self._file.unlink()
            if all(file.name == SAID for file in self._folder.iterdir()):
                shutil.rmtree(self._folder)

    def _watch(self) -> None:
        while not self._over.is_set():
            # looks at once: MPICH's launcher kills the others a moment later
            ended = select.select([*self._living], [], [], LOOK_S)[0]
            if ended and not self._over.is_set():
                rank, process = self._living[ended[0]]
                why = f"rank {rank} of {self._size} on {self._host} (process {process}) ended"
                self._end(f"{why} before MPI had started")
            self._meet()
            missing = self._missing()
            # what a rank loads before it enters may take long on a busy machine, and is not waiting
            waits = time.monotonic() - (self._began if missing else self._entered)
            if waits >= self._timeout_s and not self._over.is_set():
                why = f"MPI has not started within {self._timeout_s:g} s (node.timeout_s)"
                self._end(f"{why}: {'; '.join(filter(None, [self._late(), missing])) or FAULT}")
        for descriptor in self._living:
            os.close(descriptor)

    def _end(self, why: str) -> None:
        """End this rank; says why unless another has."""
        try:
            (self._folder / SAID).touch(exist_ok=False)
            speaks = True
        except OSError as error:  # where it can't be made, each speaks
            speaks = not isinstance(error, FileExistsError)
        if speaks:
            with contextlib.suppress(OSError):
                os.write(2, f"mpigossip: {why}; ending the job\n".encode(errors="replace"))
        self.over()
        os._exit(FAILED)

    def _begun(self) -> dict[int, str]:
        """The rest of their files' names, by rank."""
        with contextlib.suppress(OSError):
            names = (file.name.partition(".") for file in self._folder.iterdir())
            return {int(rank): rest for rank, _, rest in names if rank.isdigit()}
        return {}

    def _meet(self) -> None:
        """Look out for the ends of this host's ranks (Linux); of earlier launches none lives."""
        for rank, rest in self._begun().items():
            process, _, host = rest.removesuffix(ENTERED).partition(".")
            if host == self._host and (rank, int(process)) not in self._living.values():
                with contextlib.suppress(OSError, AttributeError):
                    self._living[os.pidfd_open(int(process))] = rank, int(process)

    def _missing(self) -> str:
        begun = self._begun()
        names = [str(rank) for rank in range(self._size) if rank not in begun]
        which = f"{abbreviate(names, 8)} (in {self._folder}, as far as hosts share it)"
        return f"nothing is seen of {len(names)} of {self._size} ranks: {which}" if names else ""

    def _late(self) -> str:
        late = {r: rest for r, rest in sorted(self._begun().items()) if not rest.endswith(ENTERED)}
        names = abbreviate(
            [f"{rank} on {rest.partition('.')[2]}" for rank, rest in late.items()], 8
        )
        which = f"{len(late)} of {self._size} ranks have begun but not come so far: {names}"
        return which if late else ""
