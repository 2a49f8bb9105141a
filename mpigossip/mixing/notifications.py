"""Tokens between ranks, and waiting for requests: every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, numbers
from mpigossip.mixing.kernels.waiting import rest


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

    def count_in_pieces(self, pieces: int) -> None:
        """From now on a round has so many numbers, one a piece."""
        self.pieces = pieces

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
            self.waited += wait_all(
                pending, self.timeout_s, lambda rank: self.late(rank, t, what), comm=self.comm
            )
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
        return f"{what} (round {t // self.pieces}): {called(self.comm, rank)} {seen}"

    def close(self) -> None:
        """Wait until what was sent has left; collective."""
        wait_all(
            dict(enumerate(r for r, _ in self._sent)), self.timeout_s, lambda _: "tokens", None
        )
        self._sent = []
        self.comm.Free()


ARRIVING, ROOM = "waiting for a neighbour's model", "waiting for room in a neighbour's inbox"


class Signals:
    """What the ends of a route tell each other: that a piece is there, that its place is free.

    Pieces are numbered through all rounds: ``number = round · pieces + piece``.
    """

    def __init__(self, tokens: Tokens, there: int, free: int | None = None):
        """``there``, ``free``: tags; no ``free``: what is sent needs no place at its readers."""
        self._tokens, self._there, self._free = tokens, there, free
        self.comm, self.timeout_s = tokens.comm, tokens.timeout_s
        self.count_in_pieces, self.awaited = tokens.count_in_pieces, tokens.awaited
        self.late, self.close = tokens.late, tokens.close

    def round(self, number: int) -> int:
        """The round of the piece that has this number."""
        return number // self._tokens.pieces

    def room(self, rank: int, count: int) -> bool:
        """Whether the place of the ``count``-th round at this rank is free."""
        if self._free is None or count < 2:
            return True
        return self._tokens.arrived(rank, self._free, count * self._tokens.pieces, ROOM)

    def tell(self, ranks: Iterable[int], number: int) -> None:
        """The piece of this number is there."""
        self._tokens.send(ranks, self._there, number)

    def arrived(self, rank: int, number: int) -> bool:
        """Whether the piece of this number is there; the route's ``sync`` before it is read."""
        return self._tokens.arrived(rank, self._there, number, ARRIVING)

    def free(self, writers: Iterable[int], count: int) -> None:
        """Tell the writers of round ``count`` that their places are free; no job is under way."""
        self._tokens.send(writers, self._free, count * self._tokens.pieces)

    def take_in_free(self, targets: Sequence[int], count: int) -> None:
        """Receive the free tokens of a round that will not be run."""
        number = count * self._tokens.pieces
        self._tokens.wait(targets, self._free, number, "closing the exchange")


def called(comm: MPI.Comm, rank: int) -> str:
    """What messages call a rank of a communicator: by its number in the world."""
    return f"rank {next(iter(numbers(comm, [rank])), rank)}"


_abandoned: list[dict] = []
"""Requests given up at a deadline: MPI may still write into their buffers, which they hold."""


def ranks_of(keys: Iterable[Any]) -> set[int]:
    """The ranks of requests by rank, or by rank and more."""
    return {key[0] if isinstance(key, tuple) else key for key in keys}


def everybody(_: Iterable[Any]) -> tuple[int, ...]:
    """No rank in particular: a request that all ranks take part in."""
    return ()


def wait_all(
    pending: dict[Any, MPI.Request],
    timeout_s: float,
    late: Callable[[Any], str],
    whom: Callable[[Iterable[Any]], Iterable[int]] | None = ranks_of,
    comm: MPI.Comm | None = None,
) -> float:
    """Wait for requests by rank, seconds waited returned; at the deadline LateError names one.

    ``whom``: the ranks of ``comm`` (unset: the world) that are awaited, by the keys of requests
    that are open.
    """
    began = time.perf_counter()

    def who() -> Iterable[int]:
        found = whom(pending) if whom else ()
        return found if comm is None else numbers(comm, found)

    awaited = None if whom is None else who

    def done() -> bool:
        for rank in [rank for rank, request in pending.items() if request.Test()]:
            del pending[rank]
        return not pending

    try:
        Deadline(timeout_s).wait(
            done, lambda: late(min(pending)), lambda: rest(pending.values()), awaited
        )
    except BaseException:
        _abandoned.append(pending)
        raise
    return time.perf_counter() - began
