"""Thread that sends and receives while the main thread computes.

It can be abandoned at a deadline, because an MPI call may never return.
"""

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

from mpigossip.cluster.communicator import with_timeout
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError, any_rank_paused
from mpigossip.cluster.process import PROGRESS, check_process, is_fork
from mpigossip.mixing.kernels.waiting import Bell, wait_for_requests
from mpigossip.mixing.notifications import keep_alive

IDLE = 23
"""Tag of the message that a rank sends to itself when its thread closes."""
FAILED = 29
"""Tag of a message to all other ranks: :func:`run_on_all_ranks` has failed on this rank."""
GRACE_S = 1.0
"""Seconds for which a rank still waits for its own work after another rank has reported a failure:
it may fail by itself, for a reason that the error message should contain."""
LEAVE_S = 1.0
"""Seconds for which a program that ends waits for a progress thread that was not closed."""


class ProgressThread:
    """Thread that runs jobs one after the other; a job is a function that calls MPI.

    The thread can be abandoned if MPI does not return. If MPI provides less than THREAD_MULTIPLE,
    or ``threaded`` is False, there is no thread, and a job runs in the thread that submits it. If
    ``poll`` is True, the idle thread enters MPI periodically, because one-sided messages over plain
    networks make progress only while their target rank is inside MPI.
    """

    POLL_S = 0.001
    """Time between two entries of the idle thread into MPI, in seconds."""

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
        """Start the thread, if there is one.

        It is a daemon thread, so that a stuck MPI call can't block the exit of the program.

        :param comm: communicator on which the thread polls
        :param timeout_s: time limit of the waits of a job, in seconds
        :param threaded: whether to use a thread, if MPI allows it
        :param poll: whether the idle thread enters MPI periodically
        :param cores: cores on which the thread runs; empty: any
        :param device: device that is made current in the thread first, if it is a GPU, because MPI
            libraries look for a CUDA context
        """
        self._cores = cores
        self._device = device
        self.threaded = threaded = threaded and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._comm = comm
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.busy = 0.0
        """Seconds that jobs have taken so far, including their waits for other nodes."""
        self._seen = 0.0
        """Time, by `time.perf_counter`, at which a job in the thread was last outside MPI."""
        self._bell = Bell()
        # The rank sends this message to itself when the thread closes. Testing for it until then
        # makes MPI progress.
        message = np.empty(1, np.uint8), comm.rank, IDLE
        self._self_receives = [comm.Irecv(*message)] if threaded and poll else []
        self._thread = threading.Thread(target=self._work, name=PROGRESS, daemon=True)
        if threaded:
            self._thread.start()
            # ends the thread before MPI is finalized, if the program does not close it
            atexit.register(self._leave)

    def submit(self, work: Callable[[], object]) -> Future:
        """Queue a job for the thread; return the future of its end.

        If there is no thread, run the job now, and raise its error if it fails. After the first
        failure, no job is run.
        """
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
        """Run a job, unless an earlier job has failed.

        In both cases of a failure, the future gets the error of the job that failed first, so that
        all later waits raise it.
        """
        began = time.perf_counter()
        try:
            if self._failure is None:
                work()
        except BaseException as error:  # noqa: BLE001 - raised by `wait` in another thread
            self._failure = error
        self.busy += time.perf_counter() - began
        if self._failure is None:
            future.set_result(None)
        else:
            future.set_exception(self._failure)

    def wait(self, future: Future, what: str) -> float:
        """Wait until a job is done; return the seconds waited. If the job fails, raise its error.

        :param future: result of :meth:`submit`
        :param what: description of the job, which begins the error message
        :raises WaitTimeoutError: if the thread does not return from a call of MPI for more than
            twice the time limit
        """
        began = time.perf_counter()
        # The waits of the job itself are shorter and name the late rank; this one names only the
        # round.
        limit = min(self._timeout_s * 2.5 + 5, threading.TIMEOUT_MAX)
        since = began
        while True:
            try:
                error = future.exception(min(limit, max(self._timeout_s / 4, 0.05)))
                break
            except TimeoutError:
                since = time.perf_counter() if any_rank_paused() else max(since, self._seen)
                if time.perf_counter() - since >= limit:
                    text = (
                        f"{what}: MPI does not return from a call (waited {limit:g} s): check the "
                        "network and the other ranks, or increase timeout_s"
                    )
                    raise WaitTimeoutError(text) from None
        if error is not None:
            raise error
        return time.perf_counter() - began

    def _work(self) -> None:
        if self._device.startswith("cuda"):
            try:
                torch.cuda.set_device(self._device)
                # before torch 2.8, set_device(0) does not create a context in a new thread
                torch.cuda.mem_get_info(self._device)
            except RuntimeError as error:  # raised by the wait for the first job
                self._failure = error
        if self._cores:
            with contextlib.suppress(OSError):  # a core is no longer available
                os.sched_setaffinity(0, self._cores)
        while (job := self._next()) is not None:  # waits for the main thread to submit one
            self._run(*job)  # waits for neighbours: their free buffers, then their chunks

    def _next(self) -> tuple[Callable[[], object], Future] | None:
        """Wait for the next job and return it; return None if the thread has to end.

        If the thread polls, it enters MPI every `POLL_S` seconds meanwhile.
        """
        pause = 0.0
        while self._self_receives:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=pause)
            if MPI.Is_finalized():  # the user's program ended without closing the world
                return None
            nap = self.POLL_S
            pause = 0.0 if self.rest(spin=0, shortest=nap, longest=nap) else nap
            self._self_receives[0].Test()
        return self._jobs.get()

    def rest(self, requests: Iterable[MPI.Request] = (), **pauses: Any) -> bool:
        """Sleep until a request completes, a job is submitted or the longest sleep is over.

        Return True afterwards; if waiting in C is not possible, return False at once.

        :param requests: requests of MPI
        :param pauses: keyword arguments for :func:`wait_for_requests`, such as ``limit``
        """
        if self.threaded and threading.current_thread() is not self._thread:
            return wait_for_requests(requests, need=1, **pauses)
        self._seen = time.perf_counter()
        slept = wait_for_requests(
            [*requests, *self._self_receives], need=1, wake=self._bell.wake, **pauses
        )
        self._bell.clear()
        return slept

    def _leave(self, limit: float = LEAVE_S) -> None:
        if is_fork():  # a fork has no such thread, and shares the pipe of its parent
            return
        self._jobs.put(None)
        self._bell.ring()
        self._thread.join(min(limit, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """End the thread after the jobs in its queue.

        If it does not end within the time limit, it is abandoned with everything that it uses.
        """
        if self.threaded and self._thread.is_alive():
            self._leave(self._timeout_s)
            if self._thread.is_alive():  # it is stuck in MPI: keep everything that it uses
                return
            atexit.unregister(self._leave)
            for request in self._self_receives:
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
    """Run ``work`` in a thread on all ranks; return the error message of any rank, or "".

    It is collective, and returns the same message on all ranks. A rank that fails notifies the
    others at once, because their calls may wait for it without a time limit. After a failure, the
    threads are abandoned.

    :param comm: communicator of the ranks, which ``work`` must not use
    :param work: function that fails if it raises an exception or takes longer than ``limit_s``
    :param now: function that returns a description of the current call of ``work``, for the message
    :param limit_s: time limit in seconds
    :param device: device that is made current in the thread
    :param holds: objects that are kept alive after a failure, because MPI may still use them
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    thread = ProgressThread(comm, timeout_s=limit_s, device=str(device))
    waits = False
    problem = ""

    def is_over() -> bool:
        return future.done() or comm.Iprobe(MPI.ANY_SOURCE, FAILED)

    try:
        future = thread.submit(work)
        Deadline(limit_s).wait(is_over, lambda: f"{now()} doesn't return")
        waits = not wait([future], GRACE_S).done
        error = WaitTimeoutError("another rank failed") if waits else future.exception()
        if error is not None:
            waits = isinstance(error, WaitTimeoutError)
            raise error
    except Exception as error:  # noqa: BLE001 - the other ranks receive any error
        problem = str(error) or type(error).__name__
    requests = [comm.isend(None, rank, FAILED) for rank in others if problem and not waits]
    # Ranks that waited arrive here long before the rank that hung, whose message says more.
    results = with_timeout(comm, 2 * limit_s).allgather((waits, problem))
    for rank, (late, text) in enumerate(results):
        if text and not late and rank != comm.rank:
            comm.recv(None, rank, FAILED)
    MPI.Request.waitall(requests)
    reasons = [(late, text) for late, text in results if text]
    if reasons:
        keep_alive.append((thread, holds))
    else:
        thread.close()
    return min(reasons, key=lambda reason: reason[0])[1] if reasons else ""
