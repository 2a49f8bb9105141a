"""Waits with a time limit, and the state of this rank that other ranks receive while they wait.

A wait that polls uses a :class:`Deadline`, and :func:`judge_wait` decides when it ends with an
error. A blocking call, which cannot poll, is limited by :func:`start_watchdog`. Some waits at the
end of a loop, a world or a program have no time limit, because other ranks may still compute.
"""

import contextlib
import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

from mpigossip.config.errors import FAILED, Failure

SPIN_S = 50e-6
"""Seconds of polling without a sleep, which are about the time that a thread needs to fall asleep
and wake up."""
SHORTEST_S = 20e-6
"""Seconds of the first sleep between two polls."""
LONGEST_S = 1e-3
"""Seconds of the longest sleep between two polls."""
PR_SET_TIMERSLACK = 29
"""Number of the option of Linux's ``prctl`` that sets how late a sleep may end."""
SWITCH_S = 1e-4
"""Longest switch interval, in seconds, after which a thread has to release the interpreter.

Several threads take turns in a round of gossip. With Python's default of 5 ms, one thread that
computes in Python makes a round 2 to 8 times as long.
"""


WAITING = -1
"""Status of a rank that waits for other ranks."""
WORKING = -2
"""Status of a rank that does not wait."""
PAUSED = -3
"""Status of a rank inside :func:`paused`, which works for longer than the others may expect."""
REPORTING = 1
"""Status of the rank that reports why the job ends."""
CLOSING = -4
"""Status of a rank inside :func:`announce_end`, which has ended a loop or closes its world."""
EXITED = -5
"""Status of a rank that exits with code 0; with exit code c, its status is EXITED − c."""
STEP_CALL = "step()"
"""Name of the call that makes a step."""
END_PREFIX = "the end of its "
"""Beginning of the names of calls that end a loop, a world or the program."""
TERM_S = 20.0
"""Seconds after SIGTERM at which a wait ends: schedulers kill a process after about 30 seconds."""


@dataclass
class RankState:
    """State of this rank, which it sends to ranks that wait for it."""

    status: int = WAITING
    """Status that this rank sends while it waits: WAITING, or inside `announce_end` its status."""
    call: str = ""
    """Name of the collective call of the user's program that this rank is in; "" outside of one."""
    steps: int = 0
    """Number of steps, or of rounds of an `Averager`, that this rank has made."""
    order: int = 0
    """Number of the current call among this rank's ordered calls, from 1.

    It is 0 outside of a call, and in a call that ranks may order differently.
    """
    ordered_calls: int = 0
    """Number of ordered calls that this rank has made since its world was opened."""
    pause_depth: int = 0
    """Number of nested `paused` blocks that this rank is in."""
    pause: Any = None
    """`waits.Pause` of the outermost of these blocks; None if there is none, or no monitor."""
    sigterm_time: float = math.inf
    """Time of a SIGTERM, by `time.monotonic`, until the ranks agree on a step to stop at; otherwise
    infinity."""
    monitor: Any = None
    """`WaitMonitor` of the open world; None if no world of several ranks is open."""


this_rank = RankState()
"""State of this rank; a process belongs to one rank."""


def world_ranks(comm: "MPI.Comm", ranks: Iterable[int]) -> list[int]:
    """Translate ranks of a communicator into ranks of the open world, as error messages name them.

    Ranks that have failed are left out. If no world of several ranks is open, the ranks are
    returned unchanged.

    :param comm: communicator of some ranks of the world
    :param ranks: ranks in ``comm``
    """
    monitor = this_rank.monitor
    return list(ranks) if monitor is None else monitor.world_ranks(comm, ranks)


def announce(new_status: int) -> None:
    """Send ``new_status`` to all other ranks, if a world of several ranks is open."""
    if this_rank.monitor is not None:
        this_rank.monitor.announce(new_status)


def answer(own_status: int) -> None:
    """Send ``own_status`` to the ranks that have asked for it, because they wait for this rank."""
    if this_rank.monitor is not None:
        this_rank.monitor.answer(own_status)


class user_call:
    """Context manager for a call of the user's program that all ranks have to make.

    If a wait inside the call reaches its time limit, the errors of this rank and of the other ranks
    name the call.
    """

    def __init__(self, name: str, ordered: bool = True):
        """Prepare the context; it may be entered several times, one after the other.

        :param name: name of the call with its parentheses, such as "step()"
        :param ordered: whether all ranks make this call at the same position in their sequence of
            ordered calls. If two ranks wait in different calls at the same position, their waits
            can never end
        """
        self._name = name
        self._ordered = ordered
        self._before = ("", 0)
        self._counted = False

    def __enter__(self) -> None:
        counts = self._ordered and not this_rank.call
        self._before = this_rank.call, this_rank.order
        self._counted = counts
        this_rank.ordered_calls += counts
        this_rank.call = self._name
        this_rank.order = this_rank.ordered_calls if counts else 0

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        this_rank.call, this_rank.order = self._before
        # A program may catch the error and repeat the call. If only this rank has raised the error,
        # a second number would put it ahead of the other ranks.
        if kind is not None and self._counted:
            this_rank.ordered_calls -= 1
        self._counted = False


def calling_unless(name: str, ordered: bool) -> contextlib.AbstractContextManager[None]:
    """Return a :class:`user_call`, or a context without effect if this rank is in a call already.

    Errors should name the outer call, because this is the call that the user's program contains.

    :param name: as for :class:`user_call`
    :param ordered: as for :class:`user_call`
    """
    return contextlib.nullcontext() if this_rank.call else user_call(name, ordered)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Suspend the time limits of other ranks inside this block.

    A rank uses this for long work that the other ranks have to wait for. In the meantime, a wait
    for this rank does not end at its limit, nor does a wait for a rank that waits for this rank.

    A thread announces the pause to the other ranks after at most about 0.3 s, unless it has ended
    or another rank has announced a pause (see `waits.Pause`). The thread needs the interpreter for
    a moment at that time, and after the pause of the other rank has ended: the work must not
    contain a call of a C extension that holds the interpreter's lock for longer than the time limit
    of the other ranks. A time limit below 0.3 s may end before it is suspended.
    """
    entered = False
    try:
        this_rank.pause_depth = this_rank.pause_depth + 1
        entered = True
        if this_rank.pause_depth == 1 and this_rank.monitor is not None:
            this_rank.pause = this_rank.monitor.new_pause()
            this_rank.pause.begin()
        yield
    finally:  # also after an interrupt in `begin`, or the others would wait without a limit
        this_rank.pause_depth -= entered
        if not this_rank.pause_depth and this_rank.pause is not None:
            this_rank.pause.end()
            this_rank.pause = None


def any_rank_paused() -> bool:
    """Receive messages, then return whether any other rank is known to be paused."""
    return this_rank.monitor is not None and this_rank.monitor.poll_paused()


class PauseExtension:
    """Extension of a wait that has reached its time limit while a rank was paused.

    When the pause ends, the whole time limit starts again.
    """

    def __init__(self) -> None:
        self._paused = False

    def extends(self) -> bool:
        """Return whether another rank is paused now, or was so at the last call of this method."""
        before = self._paused
        self._paused = any_rank_paused()
        return before or self._paused


@contextlib.contextmanager
def announce_end(step_count: int, end_status: int = CLOSING, what: str = "loop") -> Iterator[None]:
    """Mark this block as the end of a loop, or of a world.

    No message is sent at once. A rank that waits for this rank for long sends its own status; this
    rank then answers with ``end_status``.

    :param step_count: number of steps that this rank has made
    :param end_status: status of this rank while it waits inside the block
    :param what: name of the thing that ends, such as "loop"; error messages name the call by
        `END_PREFIX` and this name
    """
    before = this_rank.status
    this_rank.steps = step_count
    try:
        this_rank.status = end_status
        with user_call(END_PREFIX + what, ordered=end_status == CLOSING):
            yield
    finally:
        this_rank.status = before


class WaitTimeoutError(Failure, TimeoutError):
    """Error of a wait that has reached its time limit, or that can never end.

    The message names the awaited event.
    """

    def __init__(self, message: str, code: int = 0):
        """Store the message, and the exit code with which this process has to end.

        :param message: text of the error
        :param code: exit code of the rank whose departure ended the wait; 0: this process ends with
            `FAILED`
        """
        super().__init__(message)
        self.code = code or FAILED


class Verdict(NamedTuple):
    """Reasons for which a wait ends with an error."""

    is_late: bool
    """True if the wait has reached its time limit."""
    is_terminated: bool
    """True if the wait has lasted for `TERM_S` seconds after a SIGTERM, or after a later pause."""
    departed_code: int | None
    """Exit code of an awaited rank that will never come; None if there is none."""


def judge_wait(
    elapsed: float, limit: float, since_sigterm: float, is_paused: bool, departed_code: int | None
) -> Verdict | None:
    """Return why a wait has to end now, or None if it continues; a pure function.

    :param elapsed: seconds since the time limit was started or, after a pause, restarted
    :param limit: time limit in seconds
    :param since_sigterm: seconds for which the wait has lasted since this process received SIGTERM,
        or since the end of a later pause; zero or negative: it has received none
    :param is_paused: whether another rank is paused; then neither the limit nor a SIGTERM ends the
        wait
    :param departed_code: exit code of an awaited rank that never takes part; None if there is none
    """
    is_late = not is_paused and elapsed >= limit
    is_terminated = not is_paused and since_sigterm >= TERM_S
    if is_late or is_terminated or departed_code is not None:
        return Verdict(is_late, is_terminated, departed_code)
    return None


def start_watchdog(seconds: float, action: Callable[..., object], *args: Any) -> threading.Timer:
    """Start a timer that calls ``action(*args)`` in another thread; return it, to be cancelled.

    Such a watchdog limits a call that this process cannot interrupt, such as a call of MPI. It does
    not prevent the exit of the process.

    :param seconds: seconds from now after which the timer makes the call
    :param action: function that is called as ``action(*args)``
    :param args: its arguments
    """
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), action, args)
    timer.daemon = True
    timer.start()
    return timer


class Deadline:
    """Time at which a wait ends with an error, ``seconds`` after the last start of the time limit.

    The creation of this object starts the time limit.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Start the time limit again from now on."""
        self._start = time.monotonic()

    def wait(
        self,
        predicate: Callable[[], Any],
        what: Callable[[], str],
        rest: Callable[[], bool] = lambda: False,
        awaited_ranks: Callable[[], Iterable[int]] | None = None,
        departures: bool = True,
    ) -> float:
        """Poll until ``predicate()`` is true; return the seconds waited.

        The wait first polls for 50 µs without a sleep. It then sleeps between polls, at first for
        20 µs and later for up to 1 ms. A short wait therefore has little latency, and a long one
        leaves the core to others. While another rank is paused, the deadline does not apply; the
        whole time limit starts again when the pause ends.

        :param predicate: function that is polled; the wait ends when its result is true
        :param what: function that returns the beginning of the error's message; it is called only
            if the wait ends with an error
        :param rest: function that may sleep instead of this method, and returns whether it did
        :param awaited_ranks: function that returns the ranks of the world that this wait needs; if
            it returns no rank, the wait needs all ranks. Other ranks are then informed of a long
            wait, and the error names the rank at fault (`waits`). If this parameter is None, no
            rank is informed or named, and only the deadline ends the wait
        :param departures: whether the wait ends early if an awaited rank has departed or waits in
            another call
        :raises WaitTimeoutError: at the deadline; earlier, if an awaited rank has departed or waits
            in another call, or `TERM_S` seconds after SIGTERM
        """
        begin = time.monotonic()
        monitor = this_rank.monitor
        wait = (
            monitor.start_wait(self.seconds, awaited_ranks)
            if monitor is not None and awaited_ranks is not None
            else None
        )
        try:
            self._poll(predicate, what, rest, wait, begin, departures)
        except WaitTimeoutError:
            raise  # this rank ends, so that its status must not become WORKING
        except BaseException:  # such as an interrupt, which the program may catch and continue
            if wait is not None:
                wait.finish()
            raise
        if wait is not None:
            wait.finish()
        return time.monotonic() - begin

    def _poll(
        self,
        predicate: Callable[[], Any],
        what: Callable[[], str],
        rest: Callable[[], bool],
        wait: Any,
        begin: float,
        departures: bool,
    ) -> None:
        """Poll until ``predicate()`` is true.

        The other parameters are parameters of :meth:`wait`.

        :param wait: `waits.Wait`, which is polled, too; None: only the predicate is polled
        :param begin: time at which the wait began, by `time.monotonic`
        :raises WaitTimeoutError: if :func:`judge_wait` ends the wait
        """
        pause = SHORTEST_S
        last_paused = begin
        extension = PauseExtension()
        while not predicate():
            now = time.monotonic()
            if now - self._start >= self.seconds and extension.extends():
                self._start = now
            is_paused = False
            departed_code = None
            since_sigterm = 0.0
            if wait is not None:
                code = wait.poll()  # receives statuses
                departed_code = code if departures else None
                is_paused = wait.is_paused()
                since_sigterm = now - max(begin, last_paused, this_rank.sigterm_time)
            if is_paused:
                self._start = now  # a whole limit is left, too, if the pause ends before this limit
                last_paused = now
            verdict = judge_wait(
                now - self._start, self.seconds, since_sigterm, is_paused, departed_code
            )
            if verdict is not None:
                raise self._error(verdict, what(), wait, now - begin)
            if not rest() and now - begin >= SPIN_S:
                time.sleep(pause)
                pause = min(LONGEST_S, 1.2 * pause)

    def _error(self, verdict: Verdict, what: str, wait: Any, waited: float) -> WaitTimeoutError:
        """Return the error with which a wait ends.

        :param verdict: reasons for which the wait ends
        :param what: beginning of the message
        :param wait: `waits.Wait`, which describes the fault of other ranks; None: the message
            describes no fault
        :param waited: seconds that the wait has lasted
        """
        call = f", in {this_rank.call}, which all ranks have to call" if this_rank.call else ""
        fault = "" if wait is None else wait.describe_fault(verdict.departed_code)
        signal = "SIGTERM was received" if verdict.is_terminated else ""
        message = "; ".join(filter(None, [what + call, fault, signal]))
        seconds = self.seconds if verdict.is_late else round(waited, 1)
        return WaitTimeoutError(f"{message} (waited {seconds:g} s)", verdict.departed_code or 0)


def sharp_timers() -> Callable[[], None]:
    """Let short sleeps of this thread, and of the threads that it starts, end on time.

    By default, Linux lets a sleep last up to 50 µs longer than requested; this function removes the
    delay. On all systems, it reduces the interpreter's switch interval to `SWITCH_S` if the
    interval is longer.

    :return: function that restores the interpreter's previous switch interval, unless other code
        has changed the interval in the meantime
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(SWITCH_S, before))
    ours = sys.getswitchinterval()
    prctl(PR_SET_TIMERSLACK, 1)

    def restore() -> None:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(before)

    return restore


def prctl(option: int, value: int) -> None:
    """Set an attribute of this thread or process by Linux's ``prctl``; do nothing on other systems.

    :param option: number of the attribute, a constant PR_SET_…
    :param value: new value of the attribute
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
