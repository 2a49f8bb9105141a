"""`mpigossip doctor` with a fault staged: `mpirun -n 2 python FILE FAULT [words of doctor]`.

| fault | what is done |
|---|---|
| window | no rank can open a window |
| link | what rank 1 puts takes 0.2 s |
| stop | rank 1 stops in the test of puts |
| early | rank 1 stops before the ranks meet |
| folder | no write ends |
| killed | rank 1 is killed in the training |
| none | nothing |
"""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

from mpi4py import MPI

from mpigossip.analysis import doctor, selftest, trials
from mpigossip.cli import main


class Slow:
    """A window whose flushes take a while on rank 1."""

    def __init__(self, window):
        self._window = window

    def __getattr__(self, name):
        return getattr(self._window, name)

    def Flush(self, rank):
        ends = time.monotonic() + 0.2 * MPI.COMM_WORLD.rank
        while time.monotonic() < ends:  # the link is slow, not its host: what others put goes on
            MPI.COMM_WORLD.Iprobe()
        self._window.Flush(rank)


def no_window(*_, **__):
    raise RuntimeError("MPI_ERR_WIN: invalid window")


def stop(*_, **__):
    """As a rank does on a host that hangs; SIGKILL still ends it."""
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def before(module, name, first):
    original = getattr(module, name)
    setattr(module, name, lambda *given: (first(), original(*given))[1])


fault, *words = sys.argv[1:]
known = vars(MPI) | {"Win": MPI.Win}
if fault == "window":
    selftest.MPI = SimpleNamespace(**known | {"Win": SimpleNamespace(Allocate=no_window)})
elif fault == "link":
    slow = SimpleNamespace(
        Allocate=lambda *args, **options: Slow(MPI.Win.Allocate(*args, **options))
    )
    selftest.MPI = SimpleNamespace(**known | {"Win": slow})
elif fault == "stop":
    before(selftest, "puts", stop)
elif fault == "early":
    before(doctor, "_local", stop)
elif fault == "folder":
    before(doctor, "disk", threading.Event().wait)
elif fault == "killed":
    before(trials, "compared", kill)
sys.exit(main(["doctor", *words]))
