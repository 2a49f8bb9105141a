"""Neighbours on other hosts: a message is put into their inbox, flushed, then a token is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.messages import Courier, Tokens

ARRIVED, FREE = 11, 12
CUT = 1 << 30
"""Bytes of one Put: longer messages are cut, as many MPIs count elements in 32 bits."""


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
        timeout_s: float,
    ):
        """Collective. ``places``: in-neighbours at most; ``outbox``: room for an own message."""
        self.nbytes, self.places = nbytes, places
        self._others_places = comm.allgather(places)
        room = nbytes * (2 * places + (1 if outbox else 0))
        self._window = MPI.Win.Allocate(max(room, 8), 1, comm=comm)
        self._window.Lock_all()
        self.memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)[:room]
        self.outbox = self.memory[2 * places * nbytes :] if outbox else None
        self._tokens = Tokens(comm, timeout_s)
        self.comm = self._tokens.comm
        self.courier = Courier(self.comm, threaded=threaded, poll=poll, timeout_s=timeout_s)

    def inbox(self, count: int, place: int) -> torch.Tensor:
        """The message in place ``place`` of the ``count``-th round, uint8 (nbytes,)."""
        at = ((count % 2) * self.places + place) * self.nbytes
        return self.memory[at : at + self.nbytes]

    def push(self, message: torch.Tensor, targets: Sequence[tuple[int, int]], count: int) -> None:
        """Put the message into ``(rank, place)`` of each target; runs in the courier."""
        ranks = [rank for rank, _ in targets]
        if count >= 2:
            self._tokens.wait(ranks, FREE, count, "waiting for room in a neighbour's inbox")
        for rank, place in targets:
            base = ((count % 2) * self._others_places[rank] + place) * self.nbytes
            for at in range(0, self.nbytes, CUT):
                part = message[at : at + CUT].numpy()
                self._window.Put([part, MPI.BYTE], rank, [base + at, part.size, MPI.BYTE])
        for rank in ranks:
            self._window.Flush(rank)
            self._tokens.send([rank], ARRIVED, count)

    def await_arrived(self, sources: Sequence[int], count: int) -> None:
        """Wait for the messages of the ``count``-th round; runs in the courier."""
        self._tokens.wait(sources, ARRIVED, count, "waiting for a neighbour's model")
        self._window.Sync()

    def free(self, writers: Sequence[int], count: int) -> None:
        """Tell the writers of round ``count`` that their places are free; runs in the courier."""
        self._tokens.send(writers, FREE, count)

    def take_in_free(self, targets: Sequence[int], count: int) -> None:
        """Receive the free tokens of a round that will not be run."""
        self._tokens.wait(targets, FREE, count, "closing the exchange")

    def close(self) -> None:
        """End the courier, free window and communicator; collective."""
        self.courier.close()
        self.memory = self.outbox = None
        self._tokens.close()
        self._window.Unlock_all()
        self._window.Free()
