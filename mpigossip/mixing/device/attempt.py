"""Calls of MPI that may fail, hang or crash on one rank: an answer that all ranks agree on."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.agreement import limited
from mpigossip.cluster.deadline import Deadline, LateError
from mpigossip.mixing.notifications import abandoned
from mpigossip.mixing.progress_thread import ProgressThread

FAILED = 29
"""Tag of a message to all other ranks: it failed here."""
GRACE_S = 1.0
"""Seconds that a rank has to fail by itself, once it was told of another that did."""


def attempt(
    comm: MPI.Intracomm, work: Callable[[], object], now: Callable[[], str], limit_s: float,
    device: torch.device, holds: Any = (),
) -> str:  # fmt: skip
    """Do the work on all ranks, each in a thread; return what went wrong on any, "" for nothing.

    Collective over ``comm``, which the work must not use; the same text on all ranks. It goes wrong
    by a RuntimeError or a LateError, or takes longer than ``limit_s``: ``now`` says what it does. A
    rank tells the others at once, as their calls may wait for it for ever. Their threads are given
    up, and with them what the work ``holds``.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    thread = ProgressThread(comm, timeout_s=limit_s, device=str(device))
    waits, wrong = False, ""

    def over() -> bool:
        return future.done() or comm.Iprobe(MPI.ANY_SOURCE, FAILED)

    try:
        future = thread.submit(work)
        Deadline(limit_s).wait(over, lambda: f"{now()} doesn't return")
        waits = not wait([future], GRACE_S).done
        error = LateError("another rank failed") if waits else future.exception()
        if error is not None:
            waits = isinstance(error, LateError)
            raise error
    except (LateError, RuntimeError) as error:
        wrong = str(error)
    tells = [comm.isend(None, rank, FAILED) for rank in others if wrong and not waits]
    # ranks that waited are here long before one that hung; that one says more
    found = limited(comm, 2 * limit_s).allgather((waits, wrong))
    for rank, (late, text) in enumerate(found):
        if text and not late and rank != comm.rank:
            comm.recv(None, rank, FAILED)
    MPI.Request.waitall(tells)
    reasons = [(late, text) for late, text in found if text]
    if reasons:
        abandoned.append((thread, holds))
    else:
        thread.close()
    return min(reasons, key=lambda reason: reason[0])[1] if reasons else ""


def create(memory: Any, comm: MPI.Intracomm) -> MPI.Win:
    """Create a window of bytes over this memory, locked for all; collective, without a limit."""
    window = MPI.Win.Create(memory, 1, comm=comm)
    window.Lock_all()
    return window


@contextlib.contextmanager
def told_if_killed(text: str) -> Iterator[None]:
    """Inside, a shell waits beside this process and prints the text when that ends.

    A launcher only names the signal.
    """
    command = ["sh", "-c", 'read over || echo "$0" >&2', text]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            shell = subprocess.Popen(command, stdin=subprocess.PIPE)
            stack.callback(shell.communicate, b"\n")
        yield
