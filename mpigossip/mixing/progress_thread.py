"""The progress thread: it can be given up at a deadline, as a call of MPI may never return."""

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.agreement import with_timeout
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError, any_rank_paused
from mpigossip.cluster.process import PROGRESS, check_process, is_fork
from mpigossip.mixing.kernels.waiting import Bell, wait_for_requests
from mpigossip.mixing.notifications import keep_alive

IDLE = 23
"""Tag of a message from a rank to itself."""
FAILED = 29
"""Tag of a message to all other ranks: `attempt` failed here."""
GRACE_S = 1.0
"""Seconds that a rank has to fail by itself, once it was told of another that did."""
LEAVE_S = 1.0
"""Seconds that the progress thread has at the end of a program that didn't close it."""


class ProgressThread:
    """The progress thread: runs jobs in order, keeps MPI moving, and can be given up.

    Under an MPI below THREAD_MULTIPLE, or without ``threaded``, a job runs where it is submitted.
    With ``poll`` the idle thread enters MPI now and then, as one-sided messages over plain
    networks move only while their target is inside MPI.
    """

    POLL_S = 0.001

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        timeout_s: float,
        threaded: bool = True,
        poll: bool = False,
        cores: frozenset[int] = frozenset(),
        device: str = "cpu",
    ):
        """Start the thread, if any; it is a daemon, so a stuck MPI call can't hold the exit.

        ``cores``: where it runs; none: where the scheduler likes. ``device``: a GPU that is to be
        current in it before anything else, as MPI libraries look for a context.
        """
        self._cores = cores
        self._device = device
        self.threaded = threaded = threaded and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._comm = comm
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.busy = 0.0
        """seconds that jobs took so far, their waiting for other nodes included"""
        self._seen = 0.0
        """when the thread was last outside MPI in a job, by `time.perf_counter`"""
        self._bell = Bell()
        # a message from itself, sent when the thread closes: looking for it keeps MPI moving
        mine = np.empty(1, np.uint8), comm.rank, IDLE
        self._never = [comm.Irecv(*mine)] if threaded and poll else []
        self._thread = threading.Thread(target=self._work, name=PROGRESS, daemon=True)
        if threaded:
            self._thread.start()
            # before MPI is finalized, should nobody close it
            atexit.register(self._leave)

    def submit(self, work: Callable[[], object]) -> Future:
        """Queue a job; without a thread it is done when this returns, and its error raised."""
        check_process()
        future: Future = Future()
        if self.threaded:
            self._jobs.put((work, future))
            self._bell.ring()
        else:
            self._run(work, future)
            future.result()
        return future

    def _run(self, work: Callable[[], object], future: Future) -> None:
        """Do a job; after one that failed, none is done: whoever waits next learns why."""
        began = time.perf_counter()
        try:
            if self._failure is None:
                work()
        except BaseException as error:  # noqa: BLE001 - handed over to who waits
            self._failure = error
        self.busy += time.perf_counter() - began
        if self._failure is None:
            future.set_result(None)
        else:
            future.set_exception(self._failure)

    def wait(self, future: Future, what: str) -> float:
        """Wait until the job is done, seconds returned; raise what it raised.

        WaitTimeoutError where the thread itself doesn't come back from MPI.
        """
        began = time.perf_counter()
        # the job's own waits are shorter: they name the late rank, this names only the round
        limit = min(self._timeout_s * 2.5 + 5, threading.TIMEOUT_MAX)
        since = began
        while True:
            try:
                error = future.exception(min(limit, max(self._timeout_s / 4, 0.05)))
                break
            except TimeoutError:
                since = time.perf_counter() if any_rank_paused() else max(since, self._seen)
                if time.perf_counter() - since >= limit:
                    text = f"{what}: MPI does not return from a call (waited {limit:g} s)"
                    raise WaitTimeoutError(text) from None
        if error is not None:
            raise error
        return time.perf_counter() - began

    def _work(self) -> None:
        if self._device.startswith("cuda"):
            try:
                torch.cuda.set_device(self._device)
                # before torch 2.8 it makes no context in a thread whose device is 0 from the start
                torch.cuda.mem_get_info(self._device)
            except RuntimeError as error:  # for who waits for the first job
                self._failure = error
        if self._cores:
            with contextlib.suppress(OSError):  # a core was taken away meanwhile
                os.sched_setaffinity(0, self._cores)
        while (job := self._next()) is not None:  # waits for the main thread to submit one
            self._run(*job)  # waits for neighbours: their free buffers, then their chunks

    def _next(self) -> tuple[Callable[[], object], Future] | None:
        """The next job, None at the end; meanwhile MPI is entered every POLL_S, if it must be."""
        pause = 0.0
        while self._never:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=pause)
            if MPI.Is_finalized():  # the user's program ended without closing the world
                return None
            nap = self.POLL_S
            pause = 0.0 if self.rest(spin=0, shortest=nap, longest=nap) else nap
            self._never[0].Test()
        return self._jobs.get()

    def rest(self, requests: Iterable[MPI.Request] = (), **pauses: Any) -> bool:
        """Until a request is complete, or a job is there, or a while is over; whether it could."""
        if self.threaded and threading.current_thread() is not self._thread:
            return wait_for_requests(requests, need=1, **pauses)
        self._seen = time.perf_counter()
        rested = wait_for_requests(
            [*requests, *self._never], need=1, wake=self._bell.wake, **pauses
        )
        self._bell.heard()
        return rested

    def _leave(self, limit: float = LEAVE_S) -> None:
        if is_fork():  # which has no such thread, and its parent's pipe
            return
        self._jobs.put(None)
        self._bell.ring()
        self._thread.join(min(limit, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """End the thread after the jobs in its queue."""
        if self.threaded and self._thread.is_alive():
            self._leave(self._timeout_s)
            if self._thread.is_alive():  # stuck in MPI: what it holds is left to it
                return
            atexit.unregister(self._leave)
            for request in self._never:
                self._comm.Send(np.empty(1, np.uint8), self._comm.rank, IDLE)
                request.Wait()
        self._bell.close()


def run_on_all_ranks(
    comm: MPI.Intracomm,
    work: Callable[[], object],
    now: Callable[[], str],
    limit_s: float,
    device: torch.device,
    holds: Any = (),
) -> str:
    """Do the work on all ranks, each in a thread; return what went wrong on any, "" for nothing.

    Collective over ``comm``, which the work must not use; the same text on all ranks. It goes wrong
    by an exception, or takes longer than ``limit_s``: ``now`` says what it does. A rank tells the
    others at once, as their calls may wait for it for ever. Their threads are given up, and with
    them what the work ``holds``.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    thread = ProgressThread(comm, timeout_s=limit_s, device=str(device))
    waits = False
    wrong = ""

    def over() -> bool:
        return future.done() or comm.Iprobe(MPI.ANY_SOURCE, FAILED)

    try:
        future = thread.submit(work)
        Deadline(limit_s).wait(over, lambda: f"{now()} doesn't return")
        waits = not wait([future], GRACE_S).done
        error = WaitTimeoutError("another rank failed") if waits else future.exception()
        if error is not None:
            waits = isinstance(error, WaitTimeoutError)
            raise error
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are told
        wrong = str(error) or type(error).__name__
    tells = [comm.isend(None, rank, FAILED) for rank in others if wrong and not waits]
    # ranks that waited are here long before one that hung; that one says more
    found = with_timeout(comm, 2 * limit_s).allgather((waits, wrong))
    for rank, (late, text) in enumerate(found):
        if text and not late and rank != comm.rank:
            comm.recv(None, rank, FAILED)
    MPI.Request.waitall(tells)
    reasons = [(late, text) for late, text in found if text]
    if reasons:
        keep_alive.append((thread, holds))
    else:
        thread.close()
    return min(reasons, key=lambda reason: reason[0])[1] if reasons else ""
