"""Who waits for whom, so that a wait that ends at its limit names the rank at fault.

A rank that waits for another may wait for one that waits itself. So whoever has waited for half of
its limit tells the others in one small message whom it waits for, and whoever waits, too, answers
with its own. At the limit the chain is followed to a rank of which nothing is heard: it computes,
is stopped, or can't be reached. Nothing is sent while no wait is long.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpigossip.cluster import deadline
from mpigossip.cluster.deadline import ALL, NOBODY, PAUSED

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 5
LISTEN_S = 0.5
"""Seconds of a wait after which it listens to what others tell: short waits cost nothing."""
TOLD_AS = np.dtype([("whom", np.int64), ("call", "S48"), ("steps", np.int64)])
TOLD = 64
"""Ranks that are told, at most, besides those that are waited for: the first ones."""


class Roll:
    """What one rank has heard of the others' waiting."""

    def __init__(self, comm: MPI.Comm, hosts: Sequence[str]):
        """``comm``: its own, of all ranks; ``hosts``: of its ranks."""
        self._comm, self._hosts = comm, hosts
        self._heard: dict[int, int] = {}
        """whom the others wait for, by rank"""
        self._calls: dict[int, tuple[str, str]] = {}
        """what they have called, if all ranks have to, and after how many steps"""
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []
        self._told = np.zeros(comm.size, np.int64)
        """messages sent to each rank so far"""
        self._taken = 0
        """messages taken in so far"""
        self._lock, self._telling = threading.Lock(), threading.Lock()

    def numbers(self, comm: MPI.Comm, ranks: Iterable[int]) -> list[int]:
        """The numbers here of ranks of another communicator; of those that are left."""
        theirs, ours = comm.Get_group(), self._comm.Get_group()
        found = theirs.Translate_ranks(list(ranks), ours)
        theirs.Free()
        ours.Free()
        return [rank for rank in found if rank >= 0]

    def wait(self, seconds: float, whom: Callable[[], Iterable[int]]) -> Wait:
        """A wait of at most so many seconds for ranks that ``whom`` gives; all, if empty."""
        return Wait(self, seconds, whom)

    def tell(self, ranks: Iterable[int], word: int) -> None:
        """Say whom this rank waits for, and in which call."""
        with self._telling:
            self._sent = [one for one in self._sent if not one[0].Test()]
            for rank in ranks:
                with contextlib.suppress(Exception):  # one that is lost
                    told = (word, deadline.call.encode(), deadline.steps)
                    value = np.array(told, TOLD_AS).reshape(1).view(np.uint8)
                    self._sent.append((self._comm.Isend(value, rank, TAG), value))
                    self._told[rank] += 1

    def listen(self) -> bool:
        """Take in what was told; whether anything was."""
        from mpi4py import MPI

        found = False
        if self._lock.acquire(blocking=False):
            with contextlib.suppress(Exception):
                status = MPI.Status()
                while self._comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                    value = np.empty(TOLD_AS.itemsize, np.uint8)
                    self._comm.Recv(value, status.source, TAG)
                    self._taken += 1
                    word, called, steps = value.view(TOLD_AS)[0]
                    self._heard[status.source] = int(word)
                    after = f" after {steps} steps" if called else ""
                    self._calls[status.source] = bytes(called).decode(), after
                    found = True
            self._lock.release()
        return found

    def tell_all(self, word: int) -> None:
        """The same to all ranks, as who waits for this one may not be known here; listens, too."""
        self.tell((rank for rank in range(self._comm.size) if rank != self._comm.rank), word)
        self.listen()

    def excused(self) -> bool:
        """Whether a rank is paused, as far as was heard."""
        self.listen()
        return PAUSED in self._heard.values()

    def others(self, more: Iterable[int]) -> set[int]:
        """Those who are told: ``more``, and the first ranks."""
        return {*range(min(TOLD, self._comm.size)), *more} - {self._comm.rank}

    def fault(self, awaited: Iterable[int]) -> str:
        """Who is at fault where these ranks don't come, as far as was heard; all, if empty."""
        meeting = set(range(self._comm.size)) - {self._comm.rank}
        silent: dict[int, list[int]] = {}
        for rank in set(awaited) or meeting:
            chain = [rank]
            while (after := self._heard.get(chain[-1], NOBODY)) >= 0 and after not in chain:
                chain.append(after)
            # in a meeting it has come, as this rank has; and nobody waits for himself
            if self._heard.get(chain[-1], NOBODY) == NOBODY and chain[-1] != self._comm.rank:
                silent.setdefault(chain[-1], []).extend(chain[-2:-1])
        words = [self._name(rank, before) for rank, before in sorted(silent.items())]
        if len(words) == self._comm.size - 1 > 1:
            return "nothing is heard of any other rank: is this host cut off?"
        more = f" and {len(words) - 4} more" if len(words) > 4 else ""
        found = [f"nothing is heard of {', '.join(words[:4])}{more}"] if words else []
        return "; ".join(found + self._elsewhere())

    def _elsewhere(self) -> list[str]:
        """A clause on ranks that wait in another call than this one."""
        calls: dict[str, list[int]] = {}
        for rank, (called, after) in sorted(self._calls.items()):
            if self._heard.get(rank, NOBODY) != NOBODY and called and called != deadline.call:
                calls.setdefault(called + after, []).append(rank)
        return [
            f"rank {ranks[0]} on {self._hosts[ranks[0]]}"
            + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
            + f" waits in {called}"
            for called, ranks in calls.items()
        ]

    def _name(self, rank: int, before: list[int]) -> str:
        waits = f", for which rank {before[0]} waits" if before else ""
        return f"rank {rank} on {self._hosts[rank]}{waits}"

    def last_words(self, mine: bytes, seconds: float) -> list[bytes] | None:
        """What all ranks end by, as short words by rank; None where some don't come in time.

        The only collective call on this communicator, and the last of a rank.
        """
        own = np.frombuffer(hashlib.md5(mine, usedforsecurity=False).digest(), np.uint8).copy()
        every = np.empty((self._comm.size, own.size), np.uint8)
        request = self._comm.Iallgather(own, every)
        self._sent.append((request, own))
        self._every = every  # MPI may write into it later
        until = time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > until:
                return None
            time.sleep(1e-3)
        return [word.tobytes() for word in every]

    def close(self, timeout_s: float) -> None:
        """Take in all that was told here, then free the communicator; collective.

        What comes later would be taken for a message of the next communicator, which gets the
        number of this one: with Open MPI all that is sent there then waits for ever.
        """
        from mpi4py import MPI

        coming = np.empty(1, np.int64)
        all_told = self._comm.Ireduce_scatter_block(self._told, coming, MPI.SUM)

        def taken_in() -> bool:
            self.listen()
            return all_told.Test() and self._taken == coming[0]

        deadline.Deadline(timeout_s).wait(taken_in, lambda: "not all ranks closed the world")
        self._comm.Free()


class Wait:
    """One wait of this rank."""

    def __init__(self, roll: Roll, seconds: float, whom: Callable[[], Iterable[int]]):
        self._roll, self._whom = roll, whom
        self._begin = time.monotonic()
        self._listens, self._tells = min(LISTEN_S, seconds / 4), seconds / 2
        self._told: set[int] = set()

    def look(self) -> None:
        """To be called now and then: listens once the wait is long, tells when half is over."""
        waited = time.monotonic() - self._begin
        if waited < self._listens:
            return
        asked = self._roll.listen()
        if not self._told and (asked or waited >= self._tells):
            awaited = sorted(self._whom())
            self._told = self._roll.others(awaited)
            self._roll.tell(self._told, awaited[0] if awaited else ALL)

    def over(self) -> None:
        """What was awaited has come: who was told so is told."""
        if self._told:
            self._roll.tell(self._told, NOBODY)

    def fault(self) -> str:
        """A clause on who is at fault; "" where it isn't known."""
        self._roll.listen()
        return self._roll.fault(self._whom())
