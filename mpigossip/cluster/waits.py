"""Names of the ranks at fault, for a wait that ends at its limit.

Whoever has waited for half of its limit tells the others so in one small message, with the call
that it waits in; whoever waits, too, answers. At the limit those are named that are awaited and of
which nothing is heard: they compute, are stopped, or can't be reached. Ranks that close or leave
tell that, too. Nothing is sent while no wait is long.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpigossip.cluster import deadline
from mpigossip.cluster.deadline import CLOSES, END, EXITS, PAUSED, SPEAKS, STEP, WAITS, WORKS
from mpigossip.config.readable import few

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 5
LISTEN_S = 0.5
"""Seconds of a wait after which it listens to what others tell: short waits cost nothing."""
TOLD_AS = np.dtype([("word", np.int64), ("call", "S48"), ("steps", np.int64)])
LEFT_S = 10.0
"""Seconds in which what a rank has sent before it left comes to those that wait for it."""
TOLD = 64
"""Ranks that are told, at most, besides those that are awaited: the first ones."""


class Roll:
    """What one rank has heard of the others' waiting."""

    def __init__(self, comm: MPI.Comm, hosts: Sequence[str]):
        self._comm, self._hosts = comm, hosts
        self._heard: dict[int, int] = {}
        """what the others do, by rank"""
        self._calls: dict[int, tuple[str, int, float]] = {}
        """what they have called, if all ranks have to, after how many steps; when it was heard"""
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []
        self._told = np.zeros(comm.size, np.int64)
        """messages sent to each rank so far"""
        self._taken = 0
        """messages taken in so far"""
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._process = os.getpid()

    def numbers(self, comm: MPI.Comm, ranks: Iterable[int]) -> list[int]:
        """The numbers here of ranks of another communicator; of those that are left."""
        theirs, ours = comm.Get_group(), self._comm.Get_group()
        found = theirs.Translate_ranks(list(ranks), ours)
        theirs.Free()
        ours.Free()
        return [rank for rank in found if rank >= 0]

    def wait(self, seconds: float, whom: Callable[[], Iterable[int]]) -> Wait:
        return Wait(self, seconds, whom)

    def tell(self, ranks: Iterable[int], word: int) -> None:
        """Say what this rank does, and in which call; in a pause a thread's waits don't end it."""
        if os.getpid() != self._process:  # a fork: what it says would be taken for this rank's word
            return
        with self._telling:  # the pause may end, and be told to have ended, before that
            if deadline.pauses and word in (WAITS, WORKS):
                word = PAUSED
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
        # a fork would take messages from its parent
        if os.getpid() == self._process and self._lock.acquire(blocking=False):
            with contextlib.suppress(Exception):
                status = MPI.Status()
                while self._comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
                    value = np.empty(TOLD_AS.itemsize, np.uint8)
                    self._comm.Recv(value, status.source, TAG)
                    self._taken += 1
                    word, called, steps = value.view(TOLD_AS)[0]
                    told = bytes(called).decode(), int(steps), time.monotonic()
                    self._calls[status.source] = told
                    self._heard[status.source] = int(word)
                    found = True
            self._lock.release()
        return found

    def tell_all(self, word: int) -> None:
        """The same to all ranks, as who waits for this one may not be known here; listens, too."""
        self.tell((rank for rank in range(self._comm.size) if rank != self._comm.rank), word)
        self.listen()

    def speaks_first(self) -> bool:
        """Whether no other rank has said why the job ends; this one does then, and tells them."""
        self.listen()
        if SPEAKS in self._heard.values():
            return False
        self.tell_all(SPEAKS)
        return True

    def excused(self) -> bool:
        """Return whether a rank is paused, as far as was heard."""
        self.listen()
        return self.pausing()

    def pausing(self) -> bool:
        """The same of what was taken in already."""
        return PAUSED in self._heard.values()

    def left(self, whom: Callable[[], Iterable[int]]) -> int | None:
        """The exit code of a rank that is awaited in vain, as it has left; None where none is.

        0 where it isn't known. One that closes comes to what others close, and one that has made
        more steps than this rank has taken part in this step.
        """
        every = list(self._heard.items())  # at once: another thread may listen
        left = {rank: word for rank, word in every if word <= CLOSES}
        awaited = {*whom()} if left else ()
        for rank, word in left.items():
            _, steps, heard = self._calls[rank]
            comes = word == CLOSES and deadline.call.startswith(END)
            comes |= deadline.call == STEP and steps > deadline.steps
            late = time.monotonic() - heard >= LEFT_S
            if late and not comes and (rank in awaited or not awaited):
                return max(0, EXITS - word)
        return None

    def others(self, more: Iterable[int]) -> set[int]:
        """Those who are told: ``more``, and the first ranks."""
        return {*range(min(TOLD, self._comm.size)), *more} - {self._comm.rank}

    def fault(self, awaited: Iterable[int]) -> str:
        """Return the ranks at fault where these don't come, as far as was heard; all, if empty."""
        given = sorted({*awaited} or range(self._comm.size))
        ranks = [rank for rank in given if rank != self._comm.rank]
        silent = [rank for rank in ranks if self._heard.get(rank, WORKS) == WORKS]
        if len(silent) == self._comm.size - 1 > 1:
            return "nothing is heard of any other rank: is this host cut off?"
        names = [f"rank {rank} on {self._hosts[rank]}" for rank in silent or ranks]
        found = [f"nothing is heard of {few(names)}"] if silent else []
        elsewhere = self.elsewhere()
        if not silent and not elsewhere and ranks:
            found = [f"waited for {few(names)}, which wait themselves"]
        return "; ".join(found + elsewhere)

    def elsewhere(self) -> list[str]:
        """A clause on ranks that wait in another call than this one, or have left."""
        calls: dict[str, list[int]] = {}
        for rank, (called, steps, _) in sorted(self._calls.items()):
            if self._heard.get(rank, WORKS) != WORKS and called and called != deadline.call:
                does = f"{'has come to' if called.startswith(END) else 'waits in'} {called}"
                does += f" after {steps} steps" if steps else ""
                calls.setdefault(does, []).append(rank)
        return [
            f"{few([f'rank {rank} on {self._hosts[rank]}' for rank in ranks], 1)} {does}"
            for does, ranks in calls.items()
        ]

    def last_words(self, mine: bytes, seconds: float) -> list[bytes] | None:
        """Return what all ranks end by, as short words by rank; None where some don't come in time.

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

    def look(self) -> int | None:
        """To be called now and then: listens once the wait is long, tells when half is over.

        Returns what :meth:`Roll.left` does. A rank at its end has told all that it is.
        """
        waited = time.monotonic() - self._begin
        if waited < self._listens:
            return None
        asked = self._roll.listen()
        asked = (asked or waited >= self._tells) and not deadline.call.startswith(END)
        if asked and not self._told:
            self._told = self._roll.others(self._whom())
            self._roll.tell(self._told, WAITS)
        return self._roll.left(self._whom)

    def over(self) -> None:
        if self._told:
            self._roll.tell(self._told, WORKS)

    def fault(self, left: int | None = None) -> str:
        """A clause on who is at fault; "" where it isn't known. ``left``: see :meth:`look`."""
        self._roll.listen()
        if left is None:
            return self._roll.fault(self._whom())
        fix = "all ranks have to leave a loop after the same step: `if world.agree(done): break`"
        return "; ".join([*self._roll.elsewhere(), fix])
