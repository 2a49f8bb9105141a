"""Tokens, the exact average by messages, the communication thread; every wait has a deadline."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.ranks import Deadline
from mpigossip.mixing.base import combine
from mpigossip.mixing.waiting import Bell, rest

SCATTER, GATHER, IDLE = 21, 22, 23
LEAVE_S = 1.0
"""Seconds that the communication thread has at the end of a program that didn't close it."""
PIECE = 1 << 18
"""Elements of a chunk in the exact average: n of them are in memory at once."""


class ProtocolError(RuntimeError):
    """A token of another round arrived than the one awaited: a fault of this program."""


class Tokens:
    """One-integer messages that say "this round is ready" or "free again", by tag.

    Between two ranks the tokens of one tag arrive in the order sent; each carries its round,
    which is compared, so that a fault of the protocol is an error and never wrong numbers.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float):
        """``comm`` is duplicated (collective)."""
        self.comm, self.timeout_s = comm.Dup(), timeout_s
        self.waited = 0.0
        self.pieces = 1
        """By how many a round's number is multiplied in a token: messages name the round."""
        self._reached: dict[int, int] = {}
        self._asked: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, ranks: Iterable[int], tag: int, t: int) -> None:
        """Tell each rank that round t is done in the sense of ``tag``; returns at once."""
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        for rank in ranks:
            value = np.array([t], np.int64)
            self._sent.append((self.comm.Isend(value, rank, tag), value))

    def wait(self, ranks: Sequence[int], tag: int, t: int, what: str) -> None:
        """Wait for the token of round t from each rank; LateError names who is missing."""
        missing = [rank for rank in ranks if not self.arrived(rank, tag, t, what)]
        if missing:
            pending = {rank: self._asked[rank, tag][0] for rank in missing}
            self.waited += wait_all(pending, self.timeout_s, lambda rank: self.late(rank, t, what))
            for rank in missing:
                self.arrived(rank, tag, t, what)

    def arrived(self, rank: int, tag: int, t: int, what: str) -> bool:
        """Whether the token of round t has come from the rank; doesn't wait."""
        if (rank, tag) not in self._asked:
            value = np.empty(1, np.int64)
            self._asked[rank, tag] = self.comm.Irecv(value, rank, tag), value
        request, value = self._asked[rank, tag]
        if not request.Test():
            return False
        del self._asked[rank, tag]
        self._check(rank, t, value[0], what)
        return True

    def awaited(self) -> list[MPI.Request]:
        """The requests of what :meth:`arrived` was asked for and hasn't come."""
        return [request for request, _ in self._asked.values()]

    def _check(self, rank: int, t: int, value: int, what: str) -> None:
        if value != t:
            raise ProtocolError(f"{what}: rank {rank} answered for token {value}, not {t}")
        self._reached[rank] = t

    def late(self, rank: int, t: int, what: str) -> str:
        """What to say when the token of round t doesn't come."""
        last = self._reached.get(rank)
        seen = (
            "has not been heard of yet"
            if last is None
            else f"last reached round {last // self.pieces}"
        )
        return f"{what} (round {t // self.pieces}): rank {rank} {seen}"

    def close(self) -> None:
        """Wait until what was sent has left; collective."""
        wait_all(dict(enumerate(r for r, _ in self._sent)), self.timeout_s, lambda _: "tokens")
        self._sent = []
        self.comm.Free()


_abandoned: list[dict] = []
"""Requests given up at a deadline: MPI may still write into their buffers, which they hold."""


def wait_all(
    pending: dict[Any, MPI.Request], timeout_s: float, late: Callable[[Any], str]
) -> float:
    """Wait for requests by rank, seconds waited returned; at the deadline LateError names one."""
    began = time.perf_counter()

    def done() -> bool:
        for rank in [rank for rank, request in pending.items() if request.Test()]:
            del pending[rank]
        return not pending

    try:
        Deadline(timeout_s).wait(done, lambda: late(min(pending)), lambda: rest(pending.values()))
    except BaseException:
        _abandoned.append(pending)
        raise
    return time.perf_counter() - began


def average(comm: MPI.Comm, own: torch.Tensor, out: torch.Tensor, timeout_s: float) -> float:
    """``out = (Σ_j own_j) / n`` over the ranks of ``comm``, in rank order; seconds waited.

    ``own`` and ``out`` are contiguous CPU arrays (p,) of equal dtype. Piece by piece a
    reduce-scatter (rank r sums chunk r in rank order) and an all-gather: each rank sends
    2(n−1)/n of the vector, and all ranks hold the same bits.
    """
    rank, n = comm.rank, comm.size
    waited = 0.0
    scratch = torch.empty(n, max(1, min(PIECE, -(-own.numel() // n))), dtype=own.dtype)
    for begin in range(0, own.numel(), n * scratch.shape[1]):
        piece = slice(begin, begin + n * scratch.shape[1])
        mine, whole = own[piece].chunk(n), out[piece].chunk(n)
        # chunk() may give fewer than n parts: the ranks behind them have nothing to sum
        peers = [j for j in range(n) if j != rank]
        width = mine[rank].numel() if rank < len(mine) else 0
        received = {j: comm.Irecv(scratch[j, :width].numpy(), j, SCATTER) for j in peers if width}
        sent = {j: comm.Isend(mine[j].numpy(), j, SCATTER) for j in peers if j < len(mine)}
        waited += _settle(received, sent, timeout_s)
        if width:
            terms = [mine[rank] if j == rank else scratch[j, :width] for j in range(n)]
            rows = [term.unsqueeze(0) for term in terms]
            combine([1 / n] * n, rows, whole[rank].unsqueeze(0))
        received = {j: comm.Irecv(whole[j].numpy(), j, GATHER) for j in peers if j < len(whole)}
        sent = {j: comm.Isend(whole[rank].numpy(), j, GATHER) for j in peers if width}
        waited += _settle(received, sent, timeout_s)
    return waited


def mean(comm: MPI.Comm, x: torch.Tensor, timeout_s: float) -> torch.Tensor:
    """Exact average over ranks of x (1, p), summed in rank order: (p,), equal bits."""
    own = x[0].contiguous().cpu()
    out = torch.empty_like(own)
    average(comm, own, out, timeout_s)
    return out.to(x.device)


def mean_scalars(comm: MPI.Comm, values: torch.Tensor, timeout_s: float) -> torch.Tensor:
    """Average over ranks of small float64 values (1, k), in rank order: (k,)."""
    own, n = values.contiguous().cpu(), comm.size
    rows = torch.empty(n, own.shape[1], dtype=own.dtype)
    request = comm.Iallgather(own.numpy(), rows.numpy())
    wait_all({0: request}, timeout_s, lambda _: "average of scalars: a rank is late")
    return combine([1 / n] * n, list(rows.split(1)), torch.empty_like(own))[0]


def gather(comm: MPI.Comm, own: torch.Tensor, timeout_s: float) -> tuple[torch.Tensor, float]:
    """All ranks' encoded messages, uint8 (n, bytes) by rank, and the seconds waited."""
    everyone = torch.empty(comm.size, own.numel(), dtype=torch.uint8)
    everyone[comm.rank].copy_(own)
    peers = [j for j in range(comm.size) if j != comm.rank]
    received = {j: comm.Irecv(everyone[j].numpy(), j, GATHER) for j in peers}
    sent = {j: comm.Isend(own.numpy(), j, GATHER) for j in peers}
    return everyone, _settle(received, sent, timeout_s)


def _settle(received: dict, sent: dict, timeout_s: float) -> float:
    say = "global average: rank {} doesn't answer".format
    return wait_all(received, timeout_s, say) + wait_all(sent, timeout_s, say)


class Courier:
    """The communication thread: runs jobs in order, keeps MPI moving, and can be given up.

    Without ``threaded`` a job runs where it is submitted (an MPI below THREAD_MULTIPLE).
    With ``poll`` the idle thread enters MPI now and then, as one-sided messages over plain
    networks move only while their target is inside MPI.
    """

    POLL_S = 0.001

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        threaded: bool,
        poll: bool,
        timeout_s: float,
        cores: frozenset[int] = frozenset(),
    ):
        """Start the thread, if any; it is a daemon, so a stuck MPI call can't hold the exit.

        ``cores``: where it runs; none: where the scheduler likes.
        """
        self._cores = cores
        self.threaded, self._comm, self._timeout_s = threaded, comm, timeout_s
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.busy = 0.0
        """seconds that jobs took so far, their waiting for other nodes included"""
        self._bell = Bell()
        self._never = [self._to_come()] if threaded and poll else []
        self._thread = threading.Thread(target=self._work, name="mpigossip-courier", daemon=True)
        if threaded:
            self._thread.start()
            # before MPI is finalized, should nobody close it
            atexit.register(self._leave)

    def _to_come(self) -> MPI.Request:
        """A message from itself, sent when the courier closes: looking for it keeps MPI moving."""
        return self._comm.Irecv(np.empty(1, np.uint8), self._comm.rank, IDLE)

    def submit(self, work: Callable[[], object]) -> Job:
        """Queue a job; without a thread it runs now."""
        ticket = Job(work)
        if self.threaded:
            self._jobs.put(ticket)
            self.wake()
        else:
            self._run(ticket)
            self.wait(ticket, "a message")
        return ticket

    def _run(self, ticket: Job) -> None:
        """Do a job; after one that failed, none is done: whoever waits next learns why."""
        if self._failure is None:
            began = time.perf_counter()
            ticket.run()
            self.busy += time.perf_counter() - began
            self._failure = ticket.error
        else:
            ticket.error = self._failure
            ticket.done.set()

    def wait(self, ticket: Job, what: str) -> float:
        """Wait until the job is done, seconds returned; raise what it raised.

        LateError where the thread itself doesn't come back from MPI.
        """
        began = time.perf_counter()
        # the job's own waits are shorter: they name the late rank, this names only the round
        if not ticket.done.wait(self._timeout_s * 2.5 + 5):
            Deadline(0).wait(lambda: False, lambda: f"{what}: MPI does not return from a call")
        if ticket.error is not None:
            raise ticket.error
        return time.perf_counter() - began

    def _work(self) -> None:
        if self._cores:
            with contextlib.suppress(OSError):  # a core was taken away meanwhile
                os.sched_setaffinity(0, self._cores)
        while (ticket := self._next()) is not None:
            self._run(ticket)

    def _next(self) -> Job | None:
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
        """Until one of the requests is complete, or :meth:`wake`, or a while; whether it could."""
        if self.threaded and threading.current_thread() is not self._thread:
            return rest(requests, need=1, **pauses)
        rested = rest([*requests, *self._never], need=1, wake=self._bell.wake, **pauses)
        self._bell.heard()
        return rested

    def wake(self) -> None:
        """There is something to do for who rests."""
        self._bell.ring()

    def _leave(self, limit: float = LEAVE_S) -> None:
        self._jobs.put(None)
        self.wake()
        self._thread.join(limit)

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


class Job:
    """Something to do, whether it is done, and the exception that it raised."""

    def __init__(self, work: Callable[[], object]):
        """``work`` takes nothing and returns nothing."""
        self._work, self.done = work, threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it; an exception is kept for whoever waits."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            self.error = error
        self.done.set()
