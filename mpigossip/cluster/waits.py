"""Names of the ranks at fault, for a wait that ends at its limit or can't end.

A rank that has waited for a second sends one small message, with its status and the call that it is
in, to some of the ranks that it waits for. A rank that receives such a message while it waits
itself answers with its own. Calls that all ranks have to make are numbered by each rank: ranks that
wait in different calls of the same number will never meet, and a rank that has come to the end of a
loop doesn't come back. Both end the wait early. After half of the limit, the first ranks of the
world are informed as well; at the limit those are named that are awaited and of which nothing is
heard: they compute, are stopped, or can't be reached. As long as no wait is long, nothing is sent,
not even at the end; only a rank that exits while its world is open announces that to all ranks.

An interrupt (Ctrl-C) may arrive between any two instructions. A message is therefore received into
memory of the `Roll` and recorded by steps that can be repeated, and a message whose sending was
interrupted is followed by another one when the world closes.
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
from mpigossip.cluster.deadline import (
    CLOSING,
    END_PREFIX,
    EXITED,
    PAUSED,
    REPORTING,
    STEP_CALL,
    WAITING,
    WORKING,
)
from mpigossip.config.readable import abbreviate

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 5
RECEIVE_AFTER_S = 0.5
"""Seconds of a wait after which it listens to what others tell: short waits cost nothing."""
ASK_S = 1.0
"""Seconds after which a wait informs ranks that it waits for; each further time twice as long."""
ASKED = 16
"""Largest number of ranks that are informed so early."""
STATUS_DTYPE = np.dtype(
    [
        ("word", np.int64),
        ("call", "S48"),
        ("steps", np.int64),
        ("order", np.int64),
        ("rank", np.int64),
        ("number", np.int64),
    ]
)
"""A message: status, call, steps, number of the call, sender, number of the message (from 1)."""
DEPARTURE_GRACE_S = 10.0
"""Seconds in which what a rank has sent before it left comes to those that wait for it."""
MAX_RECIPIENTS = 64
"""Ranks that are told, at most, besides those that are awaited: the first ones."""


class WaitMonitor:
    """What one rank has heard of the others' waiting."""

    def __init__(self, comm: MPI.Comm, hosts: Sequence[str], ordered: bool = True):
        """``ordered``: all ranks make the same calls, so that their numbers can be compared."""
        self._comm = comm
        self._hosts = hosts
        self._ordered = ordered
        self._heard: dict[int, int] = {}
        """what the others do, by rank"""
        self._calls: dict[int, tuple[str, int, float]] = {}
        """what they have called, if all ranks have to, after how many steps; when it was heard"""
        self._orders: dict[int, int] = {}
        """the numbers of these calls"""
        self._sent: list[_Sent] = []
        self._interrupted: set[_Sent] = set()
        """messages of which it isn't known whether they were sent; MPI may read them"""
        self._told = np.zeros(comm.size, np.int64)
        """number of the last message sent to each rank"""
        self._taken = np.zeros(comm.size, np.int64)
        """number of the last message taken in from each rank"""
        self._arrived = np.zeros(1, STATUS_DTYPE)
        """the message being taken in; its number is 0 if there is none"""
        # `with` leaves no moment at which an interrupt could leave a lock held. A signal's handler
        # may listen, too, so that this lock can be taken again by the same thread.
        self._lock = threading.RLock()
        self._telling = threading.Lock()
        self._process = os.getpid()

    def world_ranks(self, comm: MPI.Comm, ranks: Iterable[int]) -> list[int]:
        """The numbers here of ranks of another communicator; of those that are left."""
        theirs = comm.Get_group()
        ours = self._comm.Get_group()
        found = theirs.Translate_ranks(list(ranks), ours)
        theirs.Free()
        ours.Free()
        return [rank for rank in found if rank >= 0]

    def start_wait(self, seconds: float, whom: Callable[[], Iterable[int]]) -> Wait:
        return Wait(self, seconds, whom)

    def send_status(self, ranks: Iterable[int], word: int) -> None:
        """Say what this rank does, and in which call; in a pause a thread's waits don't end it."""
        if os.getpid() != self._process:  # a fork: what it says would be taken for this rank's word
            return
        with self._telling:  # the pause may end, and be told to have ended, before that
            if deadline.pause_depth and word in (WAITING, WORKING):
                word = PAUSED
            started = [one for one in self._sent if one.request is not None]
            self._interrupted |= {*self._sent} - {*started}
            self._sent = [one for one in started if not one.request.Test()]
            for rank in ranks:
                self._send(rank, word)

    def _send(self, rank: int, word: int) -> None:
        """Send one message; :meth:`close` finds one that was interrupted by its missing request."""
        sent = _Sent(rank)
        self._sent.append(sent)
        self._told[rank] += 1
        told = (word, deadline.current_call.encode(), deadline.steps_done, deadline.order)
        value = np.array((*told, self._comm.rank, self._told[rank]), STATUS_DTYPE)
        sent.value = value.reshape(1).view(np.uint8)
        try:
            sent.request = self._comm.Isend(sent.value, rank, TAG)
        except Exception:  # noqa: BLE001 - the rank was lost
            self._told[rank] -= 1
            self._sent.remove(sent)

    def receive_status(self) -> set[int]:
        """Take in all messages that have arrived; return the ranks that wait and have sent one."""
        from mpi4py import MPI

        waiting: set[int] = set()
        if os.getpid() != self._process:  # a fork would take messages from its parent
            return waiting
        with self._lock, contextlib.suppress(Exception):
            self._take_in(waiting)  # left by an interrupt
            while self._comm.Iprobe(MPI.ANY_SOURCE, TAG):
                self._comm.Recv(self._arrived.view(np.uint8), MPI.ANY_SOURCE, TAG)
                self._take_in(waiting)
        return waiting

    def _take_in(self, waiting: set[int]) -> None:
        """Record the message that has arrived, if any; this can be repeated after an interrupt."""
        word, called, steps, order, rank, number = self._arrived[0].tolist()
        if number == 0:
            return
        call = called.decode()
        last_call, last_steps, heard = self._calls.get(rank, ("", 0, 0.0))
        last = self._heard.get(rank), last_call, last_steps, self._orders.get(rank)
        if last != (word, call, steps, order):
            heard = time.monotonic()
        # A rank repeats its message as long as its wait lasts. `DEPARTURE_GRACE_S` counts from the
        # first one.
        self._calls[rank] = call, steps, heard
        self._orders[rank] = order
        self._heard[rank] = word
        self._taken[rank] = number
        if word in (WAITING, CLOSING):
            waiting.add(rank)
        self._arrived["number"] = 0

    def announce(self, word: int) -> None:
        """The same to all ranks, as who waits for this one may not be known here; listens, too."""
        self.send_status((rank for rank in range(self._comm.size) if rank != self._comm.rank), word)
        self.receive_status()

    def claim_report(self) -> bool:
        """Whether no other rank has said why the job ends; this one does then, and tells them."""
        self.receive_status()
        if REPORTING in self._heard.values():
            return False
        self.announce(REPORTING)
        return True

    def poll_paused(self) -> bool:
        """Return whether a rank is paused, as far as was heard."""
        self.receive_status()
        return self.has_paused()

    def has_paused(self) -> bool:
        """The same of what was taken in already."""
        return PAUSED in self._heard.values()

    def departed_code(self, whom: Callable[[], Iterable[int]]) -> int | None:
        """The exit code of a rank that is awaited in vain, as it has left; None where none is.

        0 where it isn't known, and for a rank that waits in another call. One that closes comes to
        what others close, and one that has made more steps than this rank has taken part in this
        step.
        """
        every = list(self._heard.items())  # at once: another thread may listen
        left = {rank: word for rank, word in every if word <= CLOSING or self._misses(rank, word)}
        awaited = {*whom()} if left else ()
        for rank, word in left.items():
            _, steps, heard = self._calls[rank]
            comes = word == CLOSING and deadline.current_call.startswith(END_PREFIX)
            comes |= deadline.current_call == STEP_CALL and steps > deadline.steps_done
            late = time.monotonic() - heard >= DEPARTURE_GRACE_S
            if late and not comes and (rank in awaited or not awaited):
                return max(0, EXITED - word)
        return None

    def _misses(self, rank: int, word: int) -> bool:
        """Return whether ``rank`` waits in another call than this rank, where both should be one.

        A rank that is in a call of another number is ahead or behind, which is no fault.
        """
        differs = self._calls[rank][
            0
        ] != deadline.current_call and not deadline.current_call.startswith(END_PREFIX)
        order = self._orders[rank] if self._ordered else 0
        return word == WAITING and differs and order > 0 and order == deadline.order

    def asked(self, awaited: Iterable[int]) -> set[int]:
        """Return the ranks to inform of a wait early: of ``awaited`` (empty: all) the next ones.

        Ranks that wait in two calls border on each other somewhere, so that each needs to inform
        only its next ones.
        """
        ranks = {*awaited} or {*range(self._comm.size)}
        distance = {(rank - self._comm.rank) % self._comm.size: rank for rank in ranks}
        return {distance[key] for key in sorted(distance)[: ASKED + 1]} - {self._comm.rank}

    def recipients(self, more: Iterable[int]) -> set[int]:
        """Those who are told: ``more``, and the first ranks."""
        return {*range(min(MAX_RECIPIENTS, self._comm.size)), *more} - {self._comm.rank}

    def describe_fault(self, awaited: Iterable[int]) -> str:
        """Return the ranks at fault where these don't come, as far as was heard; all, if empty."""
        given = sorted({*awaited} or range(self._comm.size))
        ranks = [rank for rank in given if rank != self._comm.rank]
        silent = [rank for rank in ranks if self._heard.get(rank, WORKING) == WORKING]
        if len(silent) == self._comm.size - 1 > 1:
            return "nothing is heard of any other rank: is this host cut off?"
        names = [f"rank {rank} on {self._hosts[rank]}" for rank in silent or ranks]
        found = [f"nothing is heard of {abbreviate(names)}"] if silent else []
        elsewhere = self.describe_other_calls()
        if not silent and not elsewhere and ranks:
            found = [f"waited for {abbreviate(names)}, which wait themselves"]
        return "; ".join(found + elsewhere)

    def describe_other_calls(self) -> list[str]:
        """A clause on ranks that wait in another call than this one, or have left."""
        calls: dict[str, list[int]] = {}
        for rank, (called, steps, _) in sorted(self._calls.items()):
            if (
                self._heard.get(rank, WORKING) != WORKING
                and called
                and called != deadline.current_call
            ):
                does = f"{'has come to' if called.startswith(END_PREFIX) else 'waits in'} {called}"
                does += f" after {steps} steps" if steps else ""
                calls.setdefault(does, []).append(rank)
        return [
            f"{abbreviate([f'rank {rank} on {self._hosts[rank]}' for rank in ranks], 1)} {does}"
            for does, ranks in calls.items()
        ]

    def gather_error_keys(self, mine: bytes, seconds: float) -> list[bytes] | None:
        """Return what all ranks end by, as short words by rank; None where some don't come in time.

        The only collective call on this communicator, and the last of a rank.
        """
        own = np.frombuffer(hashlib.md5(mine, usedforsecurity=False).digest(), np.uint8).copy()
        every = np.empty((self._comm.size, own.size), np.uint8)
        request = self._comm.Iallgather(own, every)
        self._every = request, own, every  # MPI may read and write them later
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

        self.send_status([], CLOSING)  # collects what was interrupted
        # a message with a higher number than the one that was interrupted
        self.send_status({one.rank for one in self._interrupted}, CLOSING)
        coming = np.empty(1, np.int64)
        all_told = self._comm.Ireduce_scatter_block(self._told, coming, MPI.SUM)

        def taken_in() -> bool:
            self.receive_status()
            return all_told.Test() and self._taken.sum() == coming[0]

        deadline.Deadline(timeout_s).wait(taken_in, lambda: "not all ranks closed the world")
        self._comm.Free()


class _Sent:
    """A message, with the memory that MPI reads; without a request, it may not have been sent."""

    def __init__(self, rank: int):
        self.rank = rank
        self.value: np.ndarray | None = None
        self.request: MPI.Request | None = None


class Wait:
    """One wait of this rank."""

    def __init__(self, roll: WaitMonitor, seconds: float, whom: Callable[[], Iterable[int]]):
        self._roll = roll
        self._whom = whom
        self._begin = time.monotonic()
        self._listens = min(RECEIVE_AFTER_S, seconds / 4)
        self._tells = seconds / 2
        self._asks = min(ASK_S, seconds / 2)
        self._told: set[int] = set()

    def poll(self) -> int | None:
        """To be called now and then: listens once the wait is long, and informs other ranks.

        A rank that waits and informs this one is answered once. Returns what :meth:`Roll.left`
        does.
        """
        waited = time.monotonic() - self._begin
        if waited < self._listens:
            return None
        to = self._roll.receive_status() - self._told
        if waited >= self._asks:
            self._asks *= 2
            to |= self._roll.asked(self._whom())
        if waited >= self._tells:
            self._tells = float("inf")
            to |= self._roll.recipients(self._whom())
        if to:
            self._told |= to
            self._roll.send_status(to, deadline.status)
        return self._roll.departed_code(self._whom)

    def finish(self) -> None:
        if self._told:
            self._roll.send_status(self._told, WORKING)

    def describe_fault(self, departed_code: int | None = None) -> str:
        """A clause on who is at fault; "" where it isn't known. ``left``: see :meth:`look`."""
        self._roll.receive_status()
        if departed_code is None:
            return self._roll.describe_fault(self._whom())
        fix = "all ranks have to leave a loop after the same step: `if world.agree(done): break`"
        return "; ".join([*self._roll.describe_other_calls(), fix])
