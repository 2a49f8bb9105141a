"""Neighbours on other hosts: a message is put into their inbox, flushed, then a token is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.mixing.notifications import Signals, Tokens

ARRIVED, FREE = 11, 12
CUT = 1 << 30
"""Bytes of one Put: longer messages are cut, as many MPIs count elements in 32 bits."""
FLIGHT = 1 << 18
"""Bytes of the smallest put of several that fly at once, sixteen at most."""


class PushWindow:
    """A double-buffered inbox in window memory, and the pushes into the neighbours' inboxes.

    The message of round t from the k-th in-neighbour lies in place k of half ``t mod 2``
    (t counted from the first round). The reader of round t frees the place for the writer of
    round t + 2. A token follows only after ``Win.Flush``: a completed Put says nothing about
    the target. Contract: :class:`mpigossip.mixing.stream.Route`.
    """

    def __init__(
        self, comm: MPI.Intracomm, sizes: Sequence[int], places: int, timeout_s: float, *,
        outbox: bool,
    ):  # fmt: skip
        """Collective. ``sizes``: bytes of each area of a message, which lie one behind the other.

        ``places``: in-neighbours at most; ``outbox``: room for an own message.
        """
        self.nbytes, self.places = sum(sizes), places
        self._begins = [sum(sizes[:area]) for area in range(len(sizes))]
        self._others_places = comm.allgather(places)
        room = self.nbytes * (2 * places + (1 if outbox else 0))
        self._window = open_window(MPI.Win.Allocate, max(room, 8), comm)
        self.memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)[:room]
        *rooms, rest = self.memory.split(
            [self.nbytes] * 2 * places + [room - 2 * places * self.nbytes]
        )
        self.outbox = rest if outbox else None
        self._rooms = [room.split(list(sizes)) for room in rooms]
        self.signals = Signals(Tokens(comm, timeout_s), ARRIVED, FREE)

    def inbox(self, count: int, place: int, area: int = 0) -> torch.Tensor:
        """An area of the message in place ``place`` of the ``count``-th round, uint8."""
        return self._rooms[(count % 2) * self.places + place][area]

    def put(
        self, areas: Sequence[torch.Tensor], span: slice, targets: Sequence[tuple[int, int]],
        number: int,
    ) -> list[MPI.Request]:  # fmt: skip
        """Begin to put a stretch of every area of the message into each target, (rank, place).

        The requests returned say when the message's memory has been read; :meth:`sent` completes.
        All of it at once: what is held back waits for answers that queue behind the other side's
        own message, which took 1.5 times as long at 35 Mbit/s.
        """
        half = self.signals.round(number) % 2
        step = min(CUT, max(FLIGHT, (span.stop - span.start) // 16))
        flying, arrays = [], [area.numpy() for area in areas]
        for rank, place in targets:
            base = (half * self._others_places[rank] + place) * self.nbytes
            for begin, array in zip(self._begins, arrays, strict=True):
                for at in range(span.start, min(span.stop, array.size), step):
                    part = array[at : min(at + step, span.stop)]
                    there = [base + begin + at, part.size, MPI.BYTE]
                    flying.append(self._window.Rput([part, MPI.BYTE], rank, there))
        return flying

    def sent(self, targets: Sequence[tuple[int, int]], number: int) -> None:
        """Flush to each target, then tell it."""
        for rank, _ in targets:
            self._window.Flush(rank)
            self.signals.tell([rank], number)

    def sync(self, number: int) -> None:
        """Let what has arrived be seen by reads of the memory."""
        self._window.Sync()

    def close(self) -> None:
        """Free window and communicator; collective. The communication thread has ended."""
        self.memory = self.outbox = None
        self._rooms = []
        close_window(self._window, self.signals.comm)
        self.signals.close()
