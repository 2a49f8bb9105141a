"""Notifications between ranks, and waiting for MPI requests: every wait has a deadline."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, world_ranks
from mpigossip.cluster.process import check_process
from mpigossip.mixing.kernels.waiting import wait_for_requests

READY = 1
DONE = 2
REDUCED = 3
HALF = 4
ARRIVED = 11
FREE = 12
BEGUN = 13
"""Tags: an outbox is complete; it was read; a share of an average is written; a half of a pair's
average is written; a chunk is in an inbox buffer; the buffer may be written; a group of NCCL calls
has begun."""
AWAITED = {
    READY: "waiting for a neighbour's model",
    DONE: "waiting for a neighbour to have read the model",
    REDUCED: "global average",
    HALF: "waiting for a neighbour's half of the average",
    ARRIVED: "waiting for a neighbour's model",
    FREE: "waiting for a free buffer in a neighbour's inbox",
    BEGUN: "waiting for a neighbour's model",
}
"""What a wait for each of them is called in messages."""


class ProtocolError(RuntimeError):
    """A notification with an unexpected number: a fault of this program."""


class Notifications:
    """One-integer messages by tag, such as "the model of this round is ready".

    Between two ranks notifications of one tag arrive in the order sent; each carries a number,
    which is compared, so that a fault of the protocol is an error and never wrong numbers.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float):
        """``comm`` is duplicated (collective)."""
        self.comm = comm.Dup()
        self.timeout_s = timeout_s
        self.waited = 0.0
        self.per_round = 1
        """Numbers that a round has: error messages name the round."""
        self.first = 0
        """The round that number 0 is of."""
        self._reached: dict[int, int] = {}
        self._asked: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, ranks: Iterable[int], tag: int, number: int) -> None:
        check_process()
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        for rank in ranks:
            value = np.array([number], np.int64)
            self._sent.append((self.comm.Isend(value, rank, tag), value))

    def wait(self, ranks: Sequence[int], tag: int, number: int) -> None:
        """Wait for the notification of each rank.

        :raises WaitTimeoutError: with the name of a rank whose notification is missing
        """
        missing = [rank for rank in ranks if not self.arrived(rank, tag, number)]
        if missing:
            pending = {rank: self._asked[rank, tag][0] for rank in missing}
            self.waited += wait_all(
                pending,
                self.timeout_s,
                lambda rank: self.describe_late(rank, tag, number),
                comm=self.comm,
            )
            for rank in missing:
                self.arrived(rank, tag, number)

    def arrived(self, rank: int, tag: int, number: int) -> bool:
        """Return whether the rank's notification has arrived; doesn't wait."""
        check_process()
        if (rank, tag) not in self._asked:
            value = np.empty(1, np.int64)
            self._asked[rank, tag] = self.comm.Irecv(value, rank, tag), value
        request, value = self._asked[rank, tag]
        if not request.Test():
            return False
        del self._asked[rank, tag]
        if value[0] != number:
            raise ProtocolError(f"{AWAITED[tag]}: rank {rank} sent {value[0]}, not {number}")
        # who frees a buffer for round t is two rounds before it
        reached = number - 2 * self.per_round if tag == FREE else number
        self._reached[rank] = max(reached, self._reached.get(rank, reached))
        return True

    def pending(self) -> list[MPI.Request]:
        """Return the requests of what :meth:`arrived` was asked for and hasn't arrived."""
        return [request for request, _ in self._asked.values()]

    def describe_late(self, rank: int, tag: int, number: int) -> str:
        """Return the message for a notification that doesn't come."""
        last = self._reached.get(rank)
        each = self.per_round
        seen = "has not been heard of yet"
        if last is not None:
            seen = f"last reached round {self.first + last // each}"
        this = self.first + number // each
        return f"{AWAITED[tag]} (round {this}): {called(self.comm, rank)} {seen}"

    def close(self) -> None:
        """Wait until all sends are complete; collective."""
        pending = dict(enumerate(request for request, _ in self._sent))
        wait_all(pending, self.timeout_s, lambda _: "notifications", None)
        self._sent = []
        self.comm.Free()


def called(comm: MPI.Comm, rank: int) -> str:
    """Return the name of a rank of a communicator in messages: by its number in the world."""
    return f"rank {next(iter(world_ranks(comm, [rank])), rank)}"


keep_alive: list[Any] = []
"""Requests given up at a deadline, and buffers: MPI may still write into them."""


def ranks_of(keys: Iterable[Any]) -> set[int]:
    """The ranks of requests by rank, or by rank and more."""
    return {key[0] if isinstance(key, tuple) else key for key in keys}


def all_ranks(_: Iterable[Any]) -> tuple[int, ...]:
    """No rank in particular: a request that all ranks take part in."""
    return ()


def wait_all(
    pending: dict[Any, MPI.Request],
    timeout_s: float,
    describe_late: Callable[[Any], str],
    whom: Callable[[Iterable[Any]], Iterable[int]] | None = ranks_of,
    comm: MPI.Comm | None = None,
) -> float:
    """Wait for requests, whose keys name ranks; return the seconds waited.

    :param whom: function of the keys of open requests that returns the awaited ranks of ``comm``;
        None: all of them
    :param comm: communicator of these ranks; None: the world
    :raises WaitTimeoutError: at the deadline, with the name of one rank
    """
    began = time.perf_counter()

    def who() -> Iterable[int]:
        found = whom(pending) if whom else ()
        return found if comm is None else world_ranks(comm, found)

    awaited = None if whom is None else who

    def done() -> bool:
        for rank in [rank for rank, request in pending.items() if request.Test()]:
            del pending[rank]
        return not pending

    try:
        Deadline(timeout_s).wait(
            done,
            lambda: describe_late(min(pending)),
            lambda: wait_for_requests(pending.values()),
            awaited,
        )
    except BaseException:
        keep_alive.append(pending)
        raise
    return time.perf_counter() - began
