"""Blocking collective MPI calls with a limit; MPI's own wait without one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, WaitTimeoutError, world_ranks
from mpigossip.cluster.process import TIMEOUT_S, check_process

PAGE = 4096
"""Bytes: each rank's shared memory begins on a page, so that whole cache lines are written."""
LEAST_S = 10.0
"""Seconds that a call has at least: to open windows takes longer than an exchange."""


@contextlib.contextmanager
def bounded_call(comm: MPI.Comm, call: str, timeout_s: float) -> Iterator[None]:
    """One blocking call, after a barrier that names the ranks of ``comm`` that don't come to it.

    They may take twice the limit, as rank 0 may have a longer piece of work of its own. A call
    that doesn't return can't be left: a thread names it, which ends the job.
    """
    check_process()
    limit = max(timeout_s, LEAST_S)
    others = {*range(comm.size)} - {comm.rank}
    Deadline(2 * limit).wait(
        comm.Ibarrier().Test,
        lambda: f"not all ranks came to {call}",
        awaited_ranks=lambda: world_ranks(comm, others),
    )

    def late() -> None:
        raise WaitTimeoutError(f"{call} doesn't return (waited {limit:g} s)")

    watch = threading.Timer(min(limit, threading.TIMEOUT_MAX), late)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


class TimeoutComm(MPI.Intracomm):
    """The same communicator; blocking calls on it, and on those made from it, are `joined`."""

    timeout_s = TIMEOUT_S
    plain: Any

    @classmethod
    def of(cls, comm: Any, timeout_s: float) -> TimeoutComm:
        """``comm`` is not duplicated."""
        made = cls(comm)
        made.plain = getattr(comm, "plain", comm)
        made.timeout_s = timeout_s
        return made


def _with_limit(name: str) -> Callable[..., Any]:
    def call(self: TimeoutComm, *args: Any, **kwargs: Any) -> Any:
        with bounded_call(self, f"MPI's {name}", self.timeout_s):
            made = getattr(self.plain, name)(*args, **kwargs)
        return TimeoutComm.of(made, self.timeout_s) if isinstance(made, MPI.Intracomm) else made

    return call


BLOCKING = "Allgather", "allgather", "allreduce", "Barrier", "bcast", "Dup", "gather", "Split"
for name in (*BLOCKING, "Split_type"):
    setattr(TimeoutComm, name, _with_limit(name))


def open_window(make: Callable[..., MPI.Win], memory: Any, comm: Any) -> MPI.Win:
    """A window of bytes, locked for all: of so many (``Win.Allocate``), or in this memory."""
    with bounded_call(comm, f"MPI's Win.{make.__name__}", getattr(comm, "timeout_s", TIMEOUT_S)):
        window = make(memory, 1, comm=comm)
        window.Lock_all()
    return window


def round_up_to_pages(nbytes: int) -> int:
    """As many bytes as fill whole pages."""
    return -(-nbytes // PAGE) * PAGE


def open_shared(comm: Any, nbytes: int) -> tuple[MPI.Win, list[MPI.buffer]]:
    """A window of so many bytes a rank, and the memory of all ranks; collective on a host."""
    window = open_window(MPI.Win.Allocate_shared, round_up_to_pages(nbytes), comm)
    return window, [window.Shared_query(rank)[0] for rank in range(comm.size)]


def close_window(window: MPI.Win, comm: MPI.Comm) -> None:
    """Free it when all ranks have come, without a limit: one may have work left at the end."""
    with bounded_call(comm, "MPI's Win.Free", float("inf")):
        window.Unlock_all()
        window.Free()
