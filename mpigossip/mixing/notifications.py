"""Notifications between ranks, and waits for MPI requests; each wait has a deadline."""

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
"""Tags of notifications. READY: an outbox is complete. DONE: an outbox was read. REDUCED: the
sender has written its chunk of an average. HALF: the sender has written its half of a pair's
average. ARRIVED: a chunk is in an inbox buffer. FREE: an inbox buffer may be overwritten. BEGUN:
the sender has begun a group of NCCL calls."""
AWAITED = {
    READY: "waiting for a neighbour's model",
    DONE: "waiting until a neighbour has read the model",
    REDUCED: "global average",
    HALF: "waiting for a neighbour's half of the average",
    ARRIVED: "waiting for a neighbour's model",
    FREE: "waiting for a free buffer in a neighbour's inbox",
    BEGUN: "waiting for a neighbour's model",
}
"""Description of the wait for a notification, by its tag, for error messages."""


class ProtocolError(RuntimeError):
    """Error that a notification has an unexpected number, which is a bug of this package."""


class Notifications:
    """Messages of one integer between ranks, such as "the model of this round is ready".

    Notifications of one rank with the same tag arrive in the order in which they were sent. Each
    carries a number, which is compared with the expected one, so that a violation of the protocol
    raises an error instead of producing wrong results.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float):
        """Duplicate the communicator; collective.

        :param comm: communicator of the ranks that notify each other
        :param timeout_s: time limit of each wait, in seconds
        """
        self.comm = comm.Dup()
        self.timeout_s = timeout_s
        self.waited = 0.0
        self.per_round = 1
        """Number of notifications with one tag that a rank gets from another per round. Error
        messages compute the round from it."""
        self.first = 0
        """Number of the graph's round to which notification number 0 belongs, for error
        messages."""
        self._reached: dict[int, int] = {}
        self._receives: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, ranks: Iterable[int], tag: int, number: int) -> None:
        check_process()
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        for rank in ranks:
            value = np.array([number], np.int64)
            self._sent.append((self.comm.Isend(value, rank, tag), value))

    def wait(self, ranks: Sequence[int], tag: int, number: int) -> None:
        """Wait for one notification from each of ``ranks``.

        :param ranks: ranks that send it
        :param tag: tag of the notification
        :param number: number that it must carry
        :raises ProtocolError: if it carries another number
        :raises WaitTimeoutError: if the time limit is reached; it names a rank whose notification
            is missing
        """
        missing = [rank for rank in ranks if not self.arrived(rank, tag, number)]
        if missing:
            pending = {rank: self._receives[rank, tag][0] for rank in missing}
            self.waited += wait_all(
                pending,
                self.timeout_s,
                lambda rank: self.describe_late(rank, tag, number),
                comm=self.comm,
            )
            for rank in missing:
                self.arrived(rank, tag, number)

    def arrived(self, rank: int, tag: int, number: int) -> bool:
        """Return whether the notification of ``rank`` has arrived, without waiting.

        :param rank: rank that sends it
        :param tag: tag of the notification
        :param number: number that it must carry
        :raises ProtocolError: if it carries another number
        """
        check_process()
        if (rank, tag) not in self._receives:
            value = np.empty(1, np.int64)
            self._receives[rank, tag] = self.comm.Irecv(value, rank, tag), value
        request, value = self._receives[rank, tag]
        if not request.Test():
            return False
        del self._receives[rank, tag]
        if value[0] != number:
            raise ProtocolError(
                f"{AWAITED[tag]}: rank {rank} sent {value[0]} instead of {number}; "
                "this is a bug of mpigossip: report it"
            )
        # a rank that frees the buffer of round t has only reached round t − 2
        reached = number - 2 * self.per_round if tag == FREE else number
        self._reached[rank] = max(reached, self._reached.get(rank, reached))
        return True

    def pending(self) -> list[MPI.Request]:
        """Return the receive requests of notifications that have not arrived yet."""
        return [request for request, _ in self._receives.values()]

    def describe_late(self, rank: int, tag: int, number: int) -> str:
        """Return the error message for a notification that does not arrive in time.

        :param rank: rank that should have sent it
        :param tag: tag of the notification
        :param number: number of the notification, from which the round is computed
        """
        last = self._reached.get(rank)
        per_round = self.per_round
        progress = "has sent nothing yet"
        if last is not None:
            progress = f"last reached round {self.first + last // per_round}"
        t = self.first + number // per_round
        return f"{AWAITED[tag]} (round {t}): {called(self.comm, rank)} {progress}"

    def close(self) -> None:
        """Wait until all sends are complete, then free the communicator; collective.

        :raises WaitTimeoutError: if a rank does not receive within the time limit
        """
        pending = dict(enumerate(request for request, _ in self._sent))
        wait_all(pending, self.timeout_s, lambda _: "notifications", None)
        self._sent = []
        self.comm.Free()


def called(comm: MPI.Comm, rank: int) -> str:
    """Return the name of a rank of ``comm`` for error messages, with its number in the world."""
    return f"rank {next(iter(world_ranks(comm, [rank])), rank)}"


keep_alive: list[Any] = []
"""Requests that were abandoned at a deadline, and buffers to which MPI may still write."""


def ranks_of(keys: Iterable[Any]) -> set[int]:
    """Return the ranks in the keys of requests; a key is a rank, or a tuple that begins with it."""
    return {key[0] if isinstance(key, tuple) else key for key in keys}


def all_ranks(_: Iterable[Any]) -> tuple[int, ...]:
    """Return an empty tuple, which stands for all ranks, for a request in which all take part."""
    return ()


def wait_all(
    pending: dict[Any, MPI.Request],
    timeout_s: float,
    describe_late: Callable[[Any], str],
    awaited_ranks: Callable[[Iterable[Any]], Iterable[int]] | None = ranks_of,
    comm: MPI.Comm | None = None,
) -> float:
    """Wait for all requests; return the seconds waited.

    If the wait fails, the requests that are not complete are kept alive, because MPI may still
    write to their buffers.

    :param pending: requests by key; completed ones are removed
    :param timeout_s: time limit in seconds
    :param describe_late: function that is called with a key and returns the error message
    :param awaited_ranks: function that is called with the keys of open requests and returns the
        awaited ranks of ``comm``; if it returns none, these are all ranks. None: no rank is
        informed of the wait, and the error message names none
    :param comm: communicator of these ranks; None: the world
    :raises WaitTimeoutError: if the time limit is reached, or if an awaited rank can never send;
        its message is for the smallest key
    """
    began = time.perf_counter()

    def world_ranks_awaited() -> Iterable[int]:
        ranks = awaited_ranks(pending) if awaited_ranks else ()
        return ranks if comm is None else world_ranks(comm, ranks)

    awaited_in_world = None if awaited_ranks is None else world_ranks_awaited

    def done() -> bool:
        for rank in [rank for rank, request in pending.items() if request.Test()]:
            del pending[rank]
        return not pending

    try:
        Deadline(timeout_s).wait(
            done,
            lambda: describe_late(min(pending)),
            lambda: wait_for_requests(pending.values()),
            awaited_in_world,
        )
    except BaseException:
        keep_alive.append(pending)
        raise
    return time.perf_counter() - began
