"""Messages between waiting ranks, which find the rank at fault if a wait cannot end in time.

A rank that has waited for a second sends one small message, with its status and the call that it is
in, to some of the ranks that it waits for. A rank that receives such a message while it waits
itself answers with its own. Each rank numbers the calls that all ranks have to make. Ranks that
wait in different calls of the same number will never meet, and a rank that has reached the end of a
loop does not return to it: in both cases, the wait ends early. After half of its time limit, a rank
also informs the first ranks of the world. At the limit, the error names the awaited ranks that have
sent nothing since their last wait: they are computing, stopped or unreachable.

As long as no wait and no pause is long, no message is sent, not even when a world closes or a rank
exits: a rank that exits answers the ranks that wait for it, until all ranks exit. A rank sends at
most `MAX_AWAITED` messages each time its wait has doubled, and once `MAX_RECIPIENTS`, so that the
number of messages of a job grows in proportion to its number of ranks. Only a long pause and the
report of an error are announced to all ranks. While the pause of one rank is announced, no other
rank announces its own (:class:`Pause`).

An interrupt (Ctrl-C) may arrive between any two instructions. A message is therefore received into
memory of the `WaitMonitor`, and recorded by operations that can be repeated. If the sending of a
message was interrupted, another message follows it when the world closes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpigossip.cluster.deadline import (
    CLOSING,
    END_PREFIX,
    EXITED,
    PAUSED,
    REPORTING,
    STEP_CALL,
    WAITING,
    WORKING,
    Deadline,
    this_rank,
)
from mpigossip.config.readable import abbreviate

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 5
RECEIVE_AFTER_S = 0.5
"""Seconds that a wait lasts before it looks for messages, so that short waits cost nothing."""
INFORM_S = 1.0
"""Seconds of waiting before the awaited ranks are informed; this doubles after each time."""
MAX_AWAITED = 16
"""Number of awaited ranks that are informed at a time; one more, if this rank is not awaited."""
STATUS_DTYPE = np.dtype(
    [
        ("status", np.int64),
        ("call", "S48"),
        ("steps", np.int64),
        ("order", np.int64),
        ("rank", np.int64),
        ("number", np.int64),
    ]
)
"""Format of a message, which holds the ``status`` of the sending rank.

``call`` is the name of the call that the rank is in, ``steps`` its number of steps, ``order`` the
number of the call, ``rank`` the sender, and ``number`` the number of the message among those from
the sender to the receiver, from 1.
"""
DEPARTURE_GRACE_S = 10.0
"""Seconds after which a departed rank counts as gone: its last messages have arrived by then."""
MAX_RECIPIENTS = 64
"""Largest number of ranks, counted from rank 0, that are informed besides the awaited ones."""
ANNOUNCE_AFTER_S = 0.05
"""Shortest time, in seconds, after which a pause is announced: short pauses send no message."""
POLLS = 5
"""Number of times that messages are received before a pause is announced."""
POLL_AGAIN_S = 2e-3
"""Seconds between two of these times."""
SPREAD_S = 0.2
"""Longest additional delay of an announcement, in seconds (:func:`spread_delay`)."""


class Report(NamedTuple):
    """State of another rank, as its last message described it."""

    status: int
    """Status, as the module `deadline` defines it."""
    call: str
    """Name of the collective call of the user's program that the rank is in; "" outside of one."""
    steps: int
    """Number of steps that the rank has made."""
    order: int
    """Number of the call among the rank's calls; 0 for a call without a number."""
    since: float = 0.0
    """Time, by `time.monotonic`, at which a message with this content arrived first."""

    @property
    def ends(self) -> bool:
        """True if the rank ends a loop, its world or the program."""
        return self.call.startswith(END_PREFIX)


def waits_elsewhere(own: Report, other: Report) -> bool:
    """Return whether the other rank waits in a different call that has the same number.

    Ranks should be in the same call if the numbers of their calls are equal. A rank in a call of
    another number is only ahead of this rank or behind it, which is not a fault. The result is
    False while this rank ends a loop, its world or the program.

    :param own: state of this rank
    :param other: last report of the other rank
    """
    same_number = own.order == other.order > 0
    return other.status == WAITING and same_number and other.call != own.call and not own.ends


def departed_code(own: Report, other: Report, now: float) -> int | None:
    """Return the exit code of a rank that will never come to this rank's call; None otherwise.

    Such a rank has departed, or it waits in another call. The result is None until
    `DEPARTURE_GRACE_S` seconds after its report, because messages that it sent before may still
    arrive. The code is 0 if it is not known, and for a rank that waits in another call.

    Two kinds of ranks do not count: a rank that ends its loop or world, while this rank does so,
    too, because both then take part in the same collective calls; and, during a step, a rank with
    more steps than this rank, because it has already taken part.

    :param own: state of this rank
    :param other: last report of the other rank
    :param now: current time, by `time.monotonic`, from which the age of the report is computed
    """
    if other.status > CLOSING and not waits_elsewhere(own, other):
        return None
    ends_too = other.status == CLOSING and own.ends
    has_taken_part = own.call == STEP_CALL and other.steps > own.steps
    if ends_too or has_taken_part or now - other.since < DEPARTURE_GRACE_S:
        return None
    return max(0, EXITED - other.status)


class WaitMonitor:
    """Statuses of all ranks of a world: it sends the status of this rank and keeps the others."""

    def __init__(
        self, comm: MPI.Comm, hosts: Sequence[str], ordered: bool = True, threaded: bool = True
    ):
        """Create a monitor that knows no rank's status yet; this sends no message.

        :param comm: communicator of the world, used by this object only
        :param hosts: host name of each rank
        :param ordered: whether all ranks make the same calls, so that the numbers of their calls
            can be compared
        :param threaded: whether several threads may call MPI at the same time
        """
        self.threaded = threaded
        self._comm = comm
        self._hosts = hosts
        self._ordered = ordered
        self._reports: dict[int, Report] = {}
        """State of each rank from which a message was received, by rank."""
        self._sent: list[_SentMessage] = []
        self._interrupted: set[_SentMessage] = set()
        """Messages that may or may not have been sent; they are kept because MPI may read them."""
        self._sent_numbers = np.zeros(comm.size, np.int64)
        """Number of the last message sent to each rank."""
        self._received_numbers = np.zeros(comm.size, np.int64)
        """Number of the last message recorded from each rank."""
        self._answered: set[int] = set()
        """Ranks that :meth:`answer` has informed."""
        self._arrived = np.zeros(1, STATUS_DTYPE)
        """Message that is being recorded; its number is 0 if there is none."""
        # Both locks are only taken by `with`, so that an interrupt cannot leave one locked. This
        # one is reentrant, because the handler of a signal may receive messages, too.
        self._lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._process = os.getpid()

    def world_ranks(self, comm: MPI.Comm, ranks: Iterable[int]) -> list[int]:
        """Translate ranks of ``comm`` into ranks of this world, without those that have failed."""
        their_group = comm.Get_group()
        own_group = self._comm.Get_group()
        translated = their_group.Translate_ranks(list(ranks), own_group)
        their_group.Free()
        own_group.Free()
        return [rank for rank in translated if rank >= 0]

    def start_wait(self, seconds: float, awaited_ranks: Callable[[], Iterable[int]]) -> Wait:
        """Return a new :class:`Wait` with the same arguments."""
        return Wait(self, seconds, awaited_ranks)

    def new_pause(self) -> Pause:
        """Return a pause of this rank that has not begun yet."""
        return Pause(self)

    @property
    def size(self) -> int:
        """Number of ranks of the world."""
        return self._comm.size

    def send_status(self, ranks: Iterable[int], status: int) -> None:
        """Send the status of this rank and its current call to ``ranks``.

        While a pause is announced, a wait in another thread does not change the status PAUSED.

        :param ranks: ranks of this world to send to
        :param status: status to send, as the module `deadline` defines it
        """
        # The status of a fork would look like the status of this rank.
        if os.getpid() != self._process:
            return
        with self._send_lock:  # otherwise the end of the pause could be announced before this
            announced = this_rank.pause is not None and this_rank.pause.announced
            if announced and status in (WAITING, WORKING):
                status = PAUSED
            started = [sent for sent in self._sent if sent.request is not None]
            self._interrupted |= {*self._sent} - {*started}
            self._sent = [sent for sent in started if not sent.is_complete()]
            for rank in ranks:
                self._send(rank, status)

    def _send(self, rank: int, status: int) -> None:
        """Send one message to ``rank``.

        If this is interrupted, :meth:`close` recognizes the message by its missing request.
        """
        sent = _SentMessage(rank)
        self._sent.append(sent)
        self._sent_numbers[rank] += 1
        fields = (status, this_rank.call.encode(), this_rank.steps, this_rank.order)
        value = np.array((*fields, self._comm.rank, self._sent_numbers[rank]), STATUS_DTYPE)
        sent.value = value.reshape(1).view(np.uint8)
        try:
            sent.request = self._comm.Isend(sent.value, rank, TAG)
        except Exception:  # noqa: BLE001 - the rank has failed
            self._sent_numbers[rank] -= 1
            self._sent.remove(sent)

    def receive_status(self) -> set[int]:
        """Receive all messages that have arrived; return their senders that wait or close."""
        from mpi4py import MPI

        waiting: set[int] = set()
        if os.getpid() != self._process:  # a fork, which would receive messages of its parent
            return waiting
        with self._lock, contextlib.suppress(Exception):
            self._record_message(waiting)  # a message whose recording was interrupted
            while self._comm.Iprobe(MPI.ANY_SOURCE, TAG):
                self._comm.Recv(self._arrived.view(np.uint8), MPI.ANY_SOURCE, TAG)
                self._record_message(waiting)
        return waiting

    def _record_message(self, waiting: set[int]) -> None:
        """Record the message that has arrived, if any; this can be repeated after an interrupt.

        :param waiting: set to which the sender is added if it waits or closes
        """
        status, called, steps, order, rank, number = self._arrived[0].tolist()
        if number == 0:
            return
        report = Report(status, called.decode(), steps, order, time.monotonic())
        last = self._reports.get(rank)
        # A rank repeats its message as long as its wait lasts. `DEPARTURE_GRACE_S` is counted from
        # the first of these messages.
        if last is None or last[:-1] != report[:-1]:
            self._reports[rank] = report
        self._received_numbers[rank] = number
        if status in (WAITING, CLOSING):
            waiting.add(rank)
        self._arrived["number"] = 0

    def announce(self, status: int) -> None:
        """Send ``status`` to all other ranks, which may wait for this one, and receive messages."""
        self.send_status(
            (rank for rank in range(self._comm.size) if rank != self._comm.rank), status
        )
        self.receive_status()

    def answer(self, status: int) -> None:
        """Send the status to the ranks that have requested it by a message.

        Each call answers the ranks from which a message with the status WAITING or CLOSING has just
        arrived. A rank whose last message arrived earlier and has the status WAITING is answered in
        one call only.
        """
        asking = self.receive_status()
        still_waiting = {
            rank for rank, report in list(self._reports.items()) if report.status == WAITING
        }
        recipients = asking | (still_waiting - self._answered)
        self._answered |= recipients
        if recipients:
            self.send_status(recipients, status)

    def claim_report(self) -> bool:
        """Return whether no other rank is known to report why the job ends.

        If so, announce that this rank reports it.
        """
        self.receive_status()
        if self._has_status(REPORTING):
            return False
        self.announce(REPORTING)
        return True

    def poll_paused(self) -> bool:
        """Receive messages, then return whether any other rank is known to be paused."""
        self.receive_status()
        return self.has_paused()

    def has_paused(self) -> bool:
        """Return whether any other rank is known to be paused, without receiving messages."""
        return self._has_status(PAUSED)

    def _has_status(self, status: int) -> bool:
        # copied by `list`, because another thread may receive messages
        return any(report.status == status for report in list(self._reports.values()))

    def departed_code(self, awaited_ranks: Callable[[], Iterable[int]]) -> int | None:
        """Return the exit code of an awaited rank that will never come; None if there is none.

        The code is 0 if it is not known; see the function :func:`departed_code`.

        :param awaited_ranks: function that returns the awaited ranks; no rank stands for all ranks
        """
        order = this_rank.order if self._ordered else 0
        own = Report(this_rank.status, this_rank.call, this_rank.steps, order)
        now = time.monotonic()
        codes = {
            rank: code
            for rank, report in list(self._reports.items())  # another thread may receive
            if (code := departed_code(own, report, now)) is not None
        }
        awaited = {*awaited_ranks()} if codes else set()
        return next((code for rank, code in codes.items() if rank in awaited or not awaited), None)

    def next_awaited(self, awaited: Iterable[int]) -> set[int]:
        """Return the awaited ranks that follow this rank cyclically, at most `MAX_AWAITED` of them.

        These ranks are informed of a wait first. This suffices: if the ranks wait in two calls,
        then some rank of one call is followed by a rank of the other.

        :param awaited: ranks of this world that the wait needs; if empty, all ranks
        """
        own = self._comm.rank
        others = ({*awaited} or {*range(self._comm.size)}) - {own}
        following = sorted(others, key=lambda rank: (rank - own) % self._comm.size)
        return {*following[:MAX_AWAITED]}

    def recipients(self, extra: Iterable[int]) -> set[int]:
        """Return the ranks to inform of a wait: those in ``extra`` and the world's first ranks."""
        return {*range(min(MAX_RECIPIENTS, self._comm.size)), *extra} - {self._comm.rank}

    def describe_fault(self, awaited: Iterable[int]) -> str:
        """Return a text about the awaited ranks at fault, and about ranks in other calls.

        :param awaited: ranks of this world that the wait needs; if empty, all ranks
        """
        sorted_ranks = sorted({*awaited} or range(self._comm.size))
        ranks = [rank for rank in sorted_ranks if rank != self._comm.rank]
        silent = [
            rank
            for rank in ranks
            if rank not in self._reports or self._reports[rank].status == WORKING
        ]
        if len(silent) == self._comm.size - 1 > 1:
            return "no message has arrived from any other rank: check the network of this host"
        names = [f"rank {rank} on {self._hosts[rank]}" for rank in silent or ranks]
        clauses = [f"no message has arrived from {abbreviate(names)}"] if silent else []
        other_calls = self.describe_other_calls()
        if not silent and not other_calls and ranks:
            clauses = [f"waited for {abbreviate(names)}, which are waiting, too"]
        return "; ".join(clauses + other_calls)

    def describe_other_calls(self) -> list[str]:
        """Return a clause for each set of ranks that wait in another call, or have departed."""
        calls: dict[str, list[int]] = {}
        for rank, report in sorted(self._reports.items()):
            if report.status != WORKING and report.call and report.call != this_rank.call:
                text = f"{'has reached' if report.ends else 'waits in'} {report.call}"
                text += f" after {report.steps} steps" if report.steps else ""
                calls.setdefault(text, []).append(rank)
        return [
            f"{abbreviate([f'rank {rank} on {self._hosts[rank]}' for rank in ranks], 1)} {text}"
            for text, ranks in calls.items()
        ]

    def gather_error_keys(self, own_key: bytes, seconds: float) -> list[bytes] | None:
        """Return a hash of each rank's key, in rank order; None if some rank sends none in time.

        A key identifies the exception that ends a rank. Only this call and :meth:`close` are
        collective on this communicator, and a rank that makes this call is about to exit.

        :param own_key: key of this rank
        :param seconds: seconds to wait for the keys of the other ranks
        """
        digest = np.frombuffer(
            hashlib.md5(own_key, usedforsecurity=False).digest(), np.uint8
        ).copy()
        digests = np.empty((self._comm.size, digest.size), np.uint8)
        request = self._comm.Iallgather(digest, digests)
        self._gathered_keys = request, digest, digests  # MPI may read and write them later
        until = time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > until:
                return None
            time.sleep(1e-3)
        return [row.tobytes() for row in digests]

    def close(self, timeout_s: float) -> None:
        """Receive all messages sent to this rank, then free the communicator; collective.

        The next communicator gets the context ID of the freed one. A message that arrived later
        would be matched by that communicator; with Open MPI, all of its messages would then hang.
        A pause of this rank ends.

        :param timeout_s: time limit in seconds
        :raises WaitTimeoutError: if not all messages have arrived within the time limit
        """
        from mpi4py import MPI

        if this_rank.pause is not None:  # its thread must not use a communicator that is free
            this_rank.pause.end()
        self.send_status([], CLOSING)  # adds interrupted messages to `_interrupted`
        # Receivers record the number of the last message. If the interrupted message was not sent,
        # this one, which has a higher number, makes up for it.
        self.send_status({message.rank for message in self._interrupted}, CLOSING)
        expected = np.empty(1, np.int64)
        request = self._comm.Ireduce_scatter_block(self._sent_numbers, expected, MPI.SUM)

        def all_received() -> bool:
            self.receive_status()
            return request.Test() and self._received_numbers.sum() == expected[0]

        Deadline(timeout_s).wait(all_received, lambda: "not all ranks closed the world")
        self._comm.Free()


class _SentMessage:
    """A message and the memory that MPI reads; if it has no request, it may not have been sent."""

    def __init__(self, rank: int):
        self.rank = rank
        self.value: np.ndarray | None = None
        self.request: MPI.Request | None = None

    def is_complete(self) -> bool:
        """Return whether MPI no longer needs the memory, also because the receiver has failed."""
        try:
            return self.request is None or self.request.Test()
        except Exception:  # noqa: BLE001 - the receiver has failed; the next MPI call reports it
            return True


class Pause:
    """A pause of this rank (`deadline.paused`), and the thread that announces it to all ranks.

    The other ranks need not know of every pause. While any rank is paused, no wait ends at its
    limit (`Deadline.wait`), so that it is enough if one long pause is known to all. The thread
    therefore announces nothing at first. After `ANNOUNCE_AFTER_S` and a random delay, it
    looks for a pause that another rank has announced; if there is none, it announces its own, and
    later the end of it. Otherwise, it looks again after the next delay, until its pause ends.

    If all n ranks pause at the same time, they send O(n) messages together instead of 2n(n − 1). If
    the pause of the announcing rank ends, no pause is announced for at most the longest delay. A
    wait that receives statuses all the time does not end in this gap, because the end of a pause
    starts its time limit again. A wait that receives them only at its limit (`PauseExtension`) may
    end if it reaches the limit in this gap.

    If MPI may not be called by several threads, each pause is announced at its beginning.
    """

    def __init__(self, monitor: WaitMonitor):
        self._monitor = monitor
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.announced = False
        """True between the announcements of the beginning and of the end."""

    def begin(self) -> None:
        """Start the thread; announce the pause if threads may not call MPI."""
        if self._monitor.threaded:
            self._thread = threading.Thread(target=self._run, name="mpigossip-pause", daemon=True)
            self._thread.start()
        else:
            self._announce()

    def end(self) -> None:
        """End the pause, and announce its end if it was announced; later calls have no effect."""
        self._ended.set()
        if self._thread is None:
            self._announce_end()
        elif self._thread.ident is not None:  # otherwise, an interrupt came before its start
            self._thread.join()

    def _announce(self) -> None:
        self.announced = True
        self._monitor.announce(PAUSED)

    def _announce_end(self) -> None:
        if self.announced:
            self.announced = False
            self._monitor.announce(WORKING)

    def _run(self) -> None:
        # A program that ends inside the pause must not be in a call of MPI during MPI_Finalize.
        program = threading.main_thread()
        while program.is_alive():
            if self._ended.wait(ANNOUNCE_AFTER_S + spread_delay(self._monitor.size)):
                break
            if not self._knows_of_another():
                self._announce()
                self._ended.wait()
        self._announce_end()

    def _knows_of_another(self) -> bool:
        """Return whether another rank has announced a pause."""
        # While no thread of a rank is in MPI, messages do not proceed. The first call of MPI after
        # a while may only let MPI notice that one is there (seen with MPICH 5.0.2).
        return any(
            self._monitor.poll_paused() or self._ended.wait(POLL_AGAIN_S) for _ in range(POLLS)
        )


def spread_delay(n: int) -> float:
    """Return a random delay from 0 to `SPREAD_S` seconds, of which few are short.

    If n ranks draw a delay at the same time, one of them draws 0 on average, and the number of
    delays below d is about n ** (d / SPREAD_S). Only a few ranks thus announce a pause before the
    first announcement has arrived. Such delays suppress the feedback of receivers of a multicast
    (J. Nonnenmacher and E. Biersack, "Optimal multicast feedback", INFOCOM 1998).

    :param n: number of ranks, at least 2
    """
    # The generators of the program keep their states.
    uniform = 1.0 - random.SystemRandom().random()
    return SPREAD_S * max(0.0, 1.0 + math.log(uniform) / math.log(n))


class Wait:
    """One wait of this rank for other ranks; `Deadline.wait` polls it."""

    def __init__(
        self, monitor: WaitMonitor, seconds: float, awaited_ranks: Callable[[], Iterable[int]]
    ):
        """Start the wait.

        :param monitor: monitor of the world
        :param seconds: time limit of the wait
        :param awaited_ranks: function that returns the awaited ranks; no rank stands for all ranks
        """
        self._monitor = monitor
        self._awaited_ranks = awaited_ranks
        self._begin = time.monotonic()
        self._receive_after = min(RECEIVE_AFTER_S, seconds / 4)
        self._inform_first_after = seconds / 2
        self._inform_awaited_after = min(INFORM_S, seconds / 2)
        self._informed: set[int] = set()

    def poll(self) -> int | None:
        """Receive messages once the wait is long, and inform other ranks of it.

        The next awaited ranks are informed after `INFORM_S`, or half of the time limit if that is
        less, and again each time the waited time has doubled. The first ranks of the world are
        informed once, after half of the time limit. If a message arrives from a rank that waits
        itself, this rank answers once.

        :return: result of :meth:`WaitMonitor.departed_code`; None while the wait is short
        """
        waited = time.monotonic() - self._begin
        if waited < self._receive_after:
            return None
        recipients = self._monitor.receive_status() - self._informed
        if waited >= self._inform_awaited_after:
            self._inform_awaited_after *= 2
            recipients |= self._monitor.next_awaited(self._awaited_ranks())
        if waited >= self._inform_first_after:
            self._inform_first_after = float("inf")
            recipients |= self._monitor.recipients(self._awaited_ranks())
        if recipients:
            self._informed |= recipients
            self._monitor.send_status(recipients, this_rank.status)
        return self._monitor.departed_code(self._awaited_ranks)

    def is_paused(self) -> bool:
        """Return whether any other rank is known to be paused, without receiving messages."""
        return self._monitor.has_paused()

    def finish(self) -> None:
        """Inform the ranks to which this wait was reported that this rank no longer waits."""
        if self._informed:
            self._monitor.send_status(self._informed, WORKING)

    def describe_fault(self, departed_code: int | None = None) -> str:
        """Return a text about the rank at fault, or "" if it is not known.

        :param departed_code: last result of :meth:`poll`; None: no awaited rank has departed
        """
        self._monitor.receive_status()
        if departed_code is None:
            return self._monitor.describe_fault(self._awaited_ranks())
        fix = "all ranks have to leave a loop after the same step: `if world.agree(done): break`"
        return "; ".join([*self._monitor.describe_other_calls(), fix])
