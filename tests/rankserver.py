"""Program of each rank of a pool: receive a function, call it, and send back the result."""

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import traceback
from collections import deque
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from mpi4py import MPI

from tests import launch

KEPT = 200  # communicators of past calls; MPICH has about 2000
used: deque[MPI.Comm] = deque()


def main(address: str) -> None:
    # The pool asks silent ranks for their stacks before it kills them.
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    comm = MPI.COMM_WORLD
    calls: SimpleQueue[bytes] = SimpleQueue()
    with Client(address, "AF_UNIX", bytes.fromhex(os.environ["MPIGOSSIP_RANKS_KEY"])) as pool:
        pool.send((comm.rank, comm.size, os.getpid()))
        Thread(target=read, args=(pool, calls), daemon=True).start()
        while True:  # the pool kills its ranks when it has no more calls
            pool.send_bytes(answer(comm, calls.get()))


def read(pool: Connection, calls: SimpleQueue) -> None:
    """Pass calls on. If pytest dies, end the rank at once, whatever it is doing."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.put(pool.recv_bytes())
    # No other process remains that could clean up.
    maps = Path("/proc/self/maps").read_text()
    for path in launch.segments():
        if str(path) in maps:
            path.unlink(missing_ok=True)
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os._exit(1)


def answer(comm: MPI.Comm, call: bytes) -> bytes:
    """Return (True, value) or (False, traceback), pickled."""
    try:
        function, args, kwargs = pickle.loads(call)
        # Messages that a test does not receive stay in its own communicator. It is freed much
        # later: MPI gives the context of a freed communicator, with the message, to the next one.
        if len(used) == KEPT:
            used.popleft().Free()
        used.append(comm.Dup())
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # undo the setting of an earlier call
        value = pickle.dumps((True, function(used[-1], *args, **kwargs)))
    except BaseException:  # also SystemExit and pytest's Skipped: the test must see them
        return pickle.dumps((False, traceback.format_exc()))
    return value


if __name__ == "__main__":
    main(sys.argv[1])
