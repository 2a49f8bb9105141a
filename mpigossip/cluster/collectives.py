"""Blocking collective MPI calls with a time limit, which MPI itself doesn't have, and windows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigossip.cluster.deadline import (
    Deadline,
    WaitTimeoutError,
    start_watchdog,
    world_ranks,
)
from mpigossip.cluster.process import TIMEOUT_S, check_process, exit_handler
from mpigossip.cluster.waits import INFORM_S

PAGE = 4096
"""Size of a page of memory in bytes.

The shared memory of each rank starts at a page, so that no cache line belongs to two ranks.
"""
MINIMUM_S = 10.0
"""Smallest time limit of a blocking call, in seconds.

A user who shortens the time limit of exchanges does not expect that it applies to the opening of a
window, too, which takes longer.
"""


@contextlib.contextmanager
def bounded_call(comm: MPI.Comm, call: str, timeout_s: float) -> Iterator[None]:
    """Return a context manager for one blocking call on ``comm``, preceded by a barrier.

    The barrier waits for twice the time limit, because rank 0 may have more to do before the call
    than other ranks; its error names the ranks that have not arrived.

    A blocking call cannot be interrupted. If it does not return within `INFORM_S`, a thread waits
    for its end in place of the rank, and exchanges status messages with the other ranks. If it does
    not return within the time limit, the thread raises an error, which ends the job. The error
    names the call, and the ranks from which no message has arrived: they are stopped or
    unreachable, or compute after their part of the call. No rank is named if MPI provides less than
    THREAD_MULTIPLE.

    :param comm: communicator of the call
    :param call: name of the call in messages
    :param timeout_s: time limit in seconds; at least `MINIMUM_S` is used
    :raises WaitTimeoutError: if a rank does not arrive at the barrier within twice the time limit,
        or can never arrive
    :raises JobError: if this process is a fork of the process that MPI belongs to
    """
    check_process()
    limit = max(timeout_s, MINIMUM_S)
    others = {*range(comm.size)} - {comm.rank}

    def awaited_ranks() -> list[int]:
        return world_ranks(comm, others)

    Deadline(2 * limit).wait(
        comm.Ibarrier().Test,
        lambda: f"not all ranks have reached {call}",
        awaited_ranks=awaited_ranks,
    )
    deadline = Deadline(limit)
    returned = threading.Event()

    def late() -> None:
        raise WaitTimeoutError(f"{call} doesn't return (waited {limit:g} s)")

    def wait() -> None:
        # All ranks have begun the call. A rank whose part is done may have left its loop or exited.
        try:
            deadline.wait(
                returned.is_set,
                lambda: f"{call} doesn't return",
                awaited_ranks=awaited_ranks if others else None,
                departures=False,
            )
        except MPI.Exception:  # A rank has failed. The call ends with an error, too, or is late.
            if not returned.wait(min(limit, threading.TIMEOUT_MAX)):
                late()

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        watchdog = start_watchdog(min(INFORM_S, limit / 2), wait)
    else:
        watchdog = start_watchdog(limit, late)
    try:
        yield
    finally:
        returned.set()
        watchdog.cancel()
        watchdog.join()  # it must not call MPI when MPI or the communicator has ended


class TimeoutComm(MPI.Intracomm):
    """Communicator of mpi4py on which some calls have a time limit (:func:`bounded_call`).

    They are the calls in `BLOCKING` and `Split_type`. A communicator that such a call returns has
    the same time limit. Other calls, such as `Allreduce`, have none.
    """

    timeout_s = TIMEOUT_S
    """Time limit of these calls, in seconds."""
    plain: Any
    """Communicator of mpi4py with the same handle, whose calls have no time limit."""

    @classmethod
    def of(cls, comm: Any, timeout_s: float) -> TimeoutComm:
        """Return ``comm`` as a TimeoutComm without duplicating it.

        :param comm: communicator of mpi4py, or a TimeoutComm
        :param timeout_s: time limit of the calls that this class limits, in seconds
        """
        wrapped = cls(comm)
        wrapped.plain = getattr(comm, "plain", comm)
        wrapped.timeout_s = timeout_s
        return wrapped


def _with_limit(name: str) -> Callable[..., Any]:
    """Return a method that calls the method ``name`` of mpi4py's communicator with a time limit."""

    def call(self: TimeoutComm, *args: Any, **kwargs: Any) -> Any:
        with bounded_call(self, f"MPI's {name}", self.timeout_s):
            result = getattr(self.plain, name)(*args, **kwargs)
        return (
            TimeoutComm.of(result, self.timeout_s) if isinstance(result, MPI.Intracomm) else result
        )

    return call


BLOCKING = "Allgather", "allgather", "allreduce", "Barrier", "bcast", "Dup", "gather", "Split"
for name in (*BLOCKING, "Split_type"):
    setattr(TimeoutComm, name, _with_limit(name))


open_windows: list[MPI.Win] = []
"""Windows of this process that have not been closed yet, in the order in which they were added."""


def open_window(
    make: Callable[..., MPI.Win], memory: Any, comm: Any, hints: dict[str, str] | None = None
) -> MPI.Win:
    """Open an MPI window and start passive access to the memory of all ranks; collective.

    :param make: constructor such as ``MPI.Win.Allocate``
    :param memory: first argument of ``make``: number of bytes to allocate, or existing memory
    :param comm: communicator of the window; without an attribute ``timeout_s``, `TIMEOUT_S` is the
        time limit
    :param hints: keys and values of the window's ``MPI_Info``, of which an MPI ignores unknown
        ones; None: no hints
    :raises WaitTimeoutError: if not all ranks of ``comm`` call this in time (:func:`bounded_call`)
    """
    info = MPI.Info.Create() if hints else MPI.INFO_NULL
    for key, value in (hints or {}).items():
        info.Set(key, value)
    try:
        limit = getattr(comm, "timeout_s", TIMEOUT_S)
        with bounded_call(comm, f"MPI's Win.{make.__name__}", limit):
            window = make(memory, 1, info, comm)
            window.Lock_all()
    finally:
        if hints:
            info.Free()
    open_windows.append(window)
    return window


def round_up_to_pages(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of the page size."""
    return -(-nbytes // PAGE) * PAGE


def open_shared(comm: Any, nbytes: int) -> tuple[MPI.Win, list[MPI.buffer]]:
    """Open a window of shared memory; collective over ``comm``.

    :param comm: communicator of ranks of one host
    :param nbytes: number of bytes that this rank contributes, which is rounded up to whole pages
    :return: the window, and the memory of each rank of ``comm``, in rank order
    :raises WaitTimeoutError: if not all ranks of ``comm`` call this in time
    """
    window = open_window(MPI.Win.Allocate_shared, round_up_to_pages(nbytes), comm)
    return window, [window.Shared_query(rank)[0] for rank in range(comm.size)]


def close_window(window: MPI.Win, comm: MPI.Comm) -> None:
    """Wait until all ranks have called this, then free ``window``; collective over ``comm``.

    The wait has no time limit, because another rank may compute for long before it closes its
    windows.

    :raises WaitTimeoutError: if a rank can never call this, for example because it exits
    """
    with bounded_call(comm, "MPI's Win.Free", float("inf")):
        _free(window)


def register_windows(windows: Iterable[MPI.Win]) -> None:
    """Add windows that :func:`open_window` has not opened to `open_windows`, each only once."""
    for window in windows:
        if not any(other is window for other in open_windows):
            open_windows.append(window)


def _free(window: MPI.Win) -> None:
    """End the passive access to ``window`` and free it; collective."""
    open_windows[:] = [other for other in open_windows if other is not window]
    window.Unlock_all()
    window.Free()


def free_open_windows(comm: MPI.Comm) -> None:
    """Free the windows that an exception has left open on all ranks; collective over ``comm``.

    If ranks of several hosts have an open window, MPICH's ``MPI_Finalize`` fails with "fabricclose
    failed". If the ranks have different numbers of open windows, freeing them could hang, so they
    stay open.
    """
    counts = np.array([len(open_windows), -len(open_windows)])
    comm.Allreduce(MPI.IN_PLACE, counts, MPI.MIN)
    if counts[0] == -counts[1]:
        for window in list(open_windows):
            _free(window)


exit_handler.before_finalize.append(free_open_windows)
