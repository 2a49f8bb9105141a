"""Run `mpigossip doctor` with a fault: `mpirun -n 2 python FILE FAULT [arguments of doctor]`.

| fault | effect |
|---|---|
| window | no rank can open a window |
| link | each put of rank 1 takes 0.2 s |
| stop | rank 1 stops in the test of puts |
| early | rank 1 stops before the first collective call |
| folder | writing never ends |
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
    """Window whose flushes take 0.2 s on rank 1."""

    def __init__(self, window):
        self._window = window

    def __getattr__(self, name):
        return getattr(self._window, name)

    def Flush(self, rank):
        ends = time.monotonic() + 0.2 * MPI.COMM_WORLD.rank
        while time.monotonic() < ends:  # only the link is slow: puts of other ranks continue
            MPI.COMM_WORLD.Iprobe()
        self._window.Flush(rank)


def no_window(*_, **__):
    raise RuntimeError("MPI_ERR_WIN: invalid window")


def stop(*_, **__):
    """Stop rank 1, as if its host hung; SIGKILL still ends it."""
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def before(module, name, first):
    original = getattr(module, name)
    setattr(module, name, lambda *arguments: (first(), original(*arguments))[1])


fault, *options = sys.argv[1:]
names = vars(MPI) | {"Win": MPI.Win}
if fault == "window":
    selftest.MPI = SimpleNamespace(**names | {"Win": SimpleNamespace(Allocate=no_window)})
elif fault == "link":
    slow = SimpleNamespace(
        Allocate=lambda *args, **options: Slow(MPI.Win.Allocate(*args, **options))
    )
    selftest.MPI = SimpleNamespace(**names | {"Win": slow})
elif fault == "stop":
    before(selftest, "puts", stop)
elif fault == "early":
    before(doctor, "_local", stop)
elif fault == "folder":
    before(doctor, "disk", threading.Event().wait)
elif fault == "killed":
    before(trials, "compared", kill)
sys.exit(main(["doctor", *options]))
