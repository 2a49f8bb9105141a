"""Neighbours on other hosts: a message is put into their inbox, flushed, then a token is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.cluster.cores import own_core
from mpigossip.mixing.courier import Courier
from mpigossip.mixing.tokens import Tokens

ARRIVED, FREE = 11, 12
ARRIVING, ROOM = "waiting for a neighbour's model", "waiting for room in a neighbour's inbox"
CUT = 1 << 30
"""Bytes of one Put: longer messages are cut, as many MPIs count elements in 32 bits."""
FLIGHT = 1 << 18
"""Bytes of the smallest put of several that fly at once, sixteen at most."""


class PushWindow:
    """A double-buffered inbox in window memory, and the pushes into the neighbours' inboxes.

    The message of round t from the k-th in-neighbour lies in place k of half ``t mod 2``
    (t counted from the first round). The reader of round t frees the place for the writer of
    round t + 2. A token follows only after ``Win.Flush``: a completed Put says nothing about
    the target.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        nbytes: int,
        places: int,
        *,
        outbox: bool,
        threaded: bool,
        poll: bool,
        computing: int,
        timeout_s: float,
        beside: tuple[int, int] = (0, 1),
    ):
        """Collective. ``places``: in-neighbours at most; ``outbox``: room for an own message.

        ``poll``: messages come from other hosts; ``computing``: threads that compute here.
        ``beside``: this rank's place among those of its node, and their number.
        """
        self.nbytes, self.places = nbytes, places
        self._others_places = comm.allgather(places)
        room = nbytes * (2 * places + (1 if outbox else 0))
        self._window = MPI.Win.Allocate(max(room, 8), 1, comm=comm)
        self._window.Lock_all()
        self.memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)[:room]
        self.outbox = self.memory[2 * places * nbytes :] if outbox else None
        self._rooms = [
            self.memory[at : at + nbytes] for at in range(0, 2 * places * nbytes, max(nbytes, 1))
        ]
        self._tokens = Tokens(comm, timeout_s)
        self.comm, self.timeout_s = self._tokens.comm, timeout_s
        cores = own_core(self.comm, computing, beside) if poll else frozenset()
        self.courier = Courier(
            self.comm, threaded=threaded, poll=poll, timeout_s=timeout_s, cores=cores
        )

    def inbox(self, count: int, place: int) -> torch.Tensor:
        """The message in place ``place`` of the ``count``-th round, uint8 (nbytes,)."""
        return self._rooms[(count % 2) * self.places + place]

    def count_in_pieces(self, pieces: int) -> None:
        """From now on a round has so many numbers, one a piece."""
        self._tokens.pieces = pieces

    def room(self, rank: int, count: int) -> bool:
        """Whether the place of the ``count``-th round at this rank is free."""
        number = count * self._tokens.pieces
        return count < 2 or self._tokens.arrived(rank, FREE, number, ROOM)

    def await_room(self, ranks: Sequence[int], count: int) -> None:
        """Wait until the places of the ``count``-th round are free; runs in the courier."""
        if count >= 2:
            self._tokens.wait(ranks, FREE, count * self._tokens.pieces, ROOM)

    def put_at_once(
        self, message: torch.Tensor, span: slice, targets: Sequence[tuple[int, int]], count: int
    ) -> list[MPI.Request]:
        """Begin to put a stretch of the message into ``(rank, place)`` of each target.

        The requests returned say when the message's memory has been read; :meth:`sent` completes.
        All of it at once: what is held back waits for answers that queue behind the other side's
        own message, which took 1.5 times as long at 35 Mbit/s.
        """
        step = min(CUT, max(FLIGHT, (span.stop - span.start) // 16))
        flying, memory = [], message.numpy()
        for rank, place in targets:
            base = self._base(rank, count, place)
            for at in range(span.start, span.stop, step):
                part = memory[at : min(at + step, span.stop)]
                there = [base + at, part.size, MPI.BYTE]
                flying.append(self._window.Rput([part, MPI.BYTE], rank, there))
        return flying

    def sent(self, ranks: Sequence[int], number: int) -> None:
        """Flush to each rank, then tell it."""
        for rank in ranks:
            self._flush(rank)
            self._tokens.send([rank], ARRIVED, number)

    def _flush(self, rank: int) -> None:
        self._window.Flush(rank)

    def _base(self, rank: int, count: int, place: int) -> int:
        return ((count % 2) * self._others_places[rank] + place) * self.nbytes

    def arrived(self, rank: int, number: int) -> bool:
        """Whether what has this number is in the inbox; :meth:`sync` before it is read."""
        return self._tokens.arrived(rank, ARRIVED, number, ARRIVING)

    def awaited(self) -> list[MPI.Request]:
        """The requests of what :meth:`arrived` was asked for and isn't there."""
        return self._tokens.awaited()

    def late(self, rank: int, number: int, what: str) -> str:
        """What to say when it doesn't arrive, or there is no room."""
        return self._tokens.late(rank, number, what)

    def sync(self) -> None:
        """Let what has arrived be seen by reads of the memory."""
        self._window.Sync()

    def free(self, writers: Sequence[int], count: int) -> None:
        """Tell the writers of round ``count`` that their places are free; no job is under way."""
        self._tokens.send(writers, FREE, count * self._tokens.pieces)

    def take_in_free(self, targets: Sequence[int], count: int) -> None:
        """Receive the free tokens of a round that will not be run."""
        self._tokens.wait(targets, FREE, count * self._tokens.pieces, "closing the exchange")

    def close(self) -> None:
        """End the courier, free window and communicator; collective."""
        self.courier.close()
        self.memory = self.outbox = None
        self._rooms = []
        self._tokens.close()
        self._window.Unlock_all()
        self._window.Free()
