"""Waits with a time limit, which all waits of this package have, and the status of this rank."""

import contextlib
import ctypes
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

from mpigossip.config.errors import FAILED, Failure

SPIN_S = 50e-6
"""Seconds of polling without a sleep: to put a thread to sleep and wake it takes about as long."""
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
"""Status of a rank inside :func:`announce_end`: it has ended a loop or closes its world."""
EXITED = -5
"""Status of a rank that exits with code 0; with exit code c, its status is EXITED − c."""
STEP_CALL = "step()"
"""Name of the call that makes a step."""
END_PREFIX = "the end of its "
"""Beginning of the names of calls that end a loop, a world or the program."""
TERM_S = 20.0
"""Seconds after SIGTERM at which a wait ends: schedulers kill a process after about 30 seconds."""
monitor: Any = None
"""The `WaitMonitor` of the open world; None if no world of several ranks is open."""


def world_ranks(comm: "MPI.Comm", ranks: Iterable[int]) -> list[int]:
    """Translate ranks of a communicator into ranks of the open world, as error messages name them.

    If no world of several ranks is open, the ranks are returned unchanged.

    :param comm: communicator of some ranks of the world
    :param ranks: ranks in ``comm``
    """
    return list(ranks) if monitor is None else monitor.world_ranks(comm, ranks)


pause_depth = 0
"""Number of nested :func:`paused` blocks that this rank is in."""
current_call = ""
"""Name of the collective call of the user's program that this rank is in, or "" outside of one."""
steps_done = 0
"""Number of steps that this rank has made."""
order = 0
"""Number of the current call among this rank's calls; 0 if ranks may make it in another order."""
ordered_calls = 0
"""Number of ordered calls that this rank has made since its world was opened."""
status = WAITING
"""Status that this rank sends while it waits: WAITING, or CLOSING inside :func:`announce_end`."""
sigterm_time = math.inf
"""Time of a SIGTERM after which the ranks have not yet agreed on a step to stop at, else inf."""


def announce(new_status: int) -> None:
    """Send ``new_status`` to all other ranks, if a world of several ranks is open."""
    if monitor is not None:
        monitor.announce(new_status)


def answer(own_status: int) -> None:
    """Send ``own_status`` to the ranks that have asked for it, because they wait for this rank."""
    if monitor is not None:
        monitor.answer(own_status)


class user_call:
    """Context of a call of the user's program that all ranks have to make.

    If a wait inside it reaches its time limit, the errors of this rank and of the others name the
    call.
    """

    def __init__(self, name: str, ordered: bool = True):
        """Prepare the context; it may be entered several times, one after the other.

        :param name: name of the call with its parentheses, such as "step()"
        :param ordered: whether all ranks make this call at the same position among their ordered
            calls. If two ranks wait in different ordered calls of the same number, their waits can
            never end
        """
        self._name = name
        self._ordered = ordered
        self._before = ("", 0)
        self._counted = False

    def __enter__(self) -> None:
        global current_call, order, ordered_calls
        counts = self._ordered and not current_call
        self._before = current_call, order
        self._counted = counts
        ordered_calls += counts
        current_call = self._name
        order = ordered_calls if counts else 0

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        global current_call, order, ordered_calls
        current_call, order = self._before
        # A program may catch the error and repeat the call. If only this rank has raised the error,
        # a second number would put it ahead of the other ranks.
        if kind is not None and self._counted:
            ordered_calls -= 1
        self._counted = False


def calling_unless(name: str, ordered: bool) -> contextlib.AbstractContextManager[None]:
    """Return a :class:`user_call`, or a context without effect if this rank is in a call already.

    The outer call tells a user more, because it is the one in the program.

    :param name: as of :class:`user_call`
    :param ordered: as of :class:`user_call`
    """
    return contextlib.nullcontext() if current_call else user_call(name, ordered)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Suspend the time limits of other ranks inside this block.

    A rank uses this for long work that the others have to wait for.
    Waits for this rank, and waits for ranks that wait for it, do not end at their limit meanwhile.
    """
    global pause_depth
    entered = False
    try:
        pause_depth = pause_depth + 1
        entered = True
        if pause_depth == 1:
            announce(PAUSED)
        yield
    finally:  # also after an interrupt in `announce`, or the others would wait without a limit
        pause_depth -= entered
        if not pause_depth:
            announce(WORKING)


def any_rank_paused() -> bool:
    """Return whether any rank is paused, according to the messages received so far."""
    return monitor is not None and monitor.poll_paused()


class PauseExtension:
    """Extension of a wait at its limit: after a pause of a rank, a whole limit starts again."""

    def __init__(self) -> None:
        self._paused = False

    def extends(self) -> bool:
        """Return whether any rank is paused, or was at the last call of this method."""
        before = self._paused
        self._paused = any_rank_paused()
        return before or self._paused


@contextlib.contextmanager
def announce_end(step_count: int, end_status: int = CLOSING, what: str = "loop") -> Iterator[None]:
    """Mark this block as the end of a loop, or of a world.

    No message is sent. A rank that waits for this one sends its own status when its wait is long;
    this rank answers with ``end_status``.

    :param step_count: number of steps that this rank has made
    :param end_status: status of this rank while it waits inside the block
    :param what: name of the thing that ends, which follows `END_PREFIX` in the name of the call
    """
    global steps_done, status
    before = status
    steps_done = step_count
    try:
        status = end_status
        with user_call(END_PREFIX + what, ordered=end_status == CLOSING):
            yield
    finally:
        status = before


class WaitTimeoutError(Failure, TimeoutError):
    """Error of a wait that reached its time limit; the message names the awaited event."""

    def __init__(self, message: str, code: int = 0):
        """Store the message and the exit code of this process.

        :param message: text of the error
        :param code: exit code of the rank whose departure ended the wait; 0: use `FAILED`
        """
        super().__init__(message)
        self.code = code or FAILED


class Deadline:
    """Time at which a wait ends with an error, ``seconds`` after the creation of this object."""

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
    ) -> float:
        """Poll until ``predicate()`` is true; return the seconds waited.

        The wait first polls without a sleep. Between later polls it sleeps for 20 µs, growing to
        1 ms. A short wait therefore has little latency, and a long one leaves the core to others.

        :param predicate: function that is polled; the wait ends when its result is true
        :param what: function that describes the wait; it is called at the deadline only
        :param rest: function that may sleep instead of this method, and returns whether it did
        :param awaited_ranks: function that returns the awaited ranks of the world; none stands for
            all. Other ranks are then informed of a long wait, and the error names the rank at
            fault (`waits`). None: no rank is informed or named
        :raises WaitTimeoutError: at the deadline; earlier, if an awaited rank has departed or waits
            in another call, or `TERM_S` seconds after SIGTERM
        """
        begin = time.monotonic()
        wait = (
            monitor.start_wait(self.seconds, awaited_ranks)
            if monitor is not None and awaited_ranks is not None
            else None
        )
        try:
            self._poll(predicate, what, rest, wait, begin)
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
    ) -> None:
        """Poll until ``predicate()`` is true.

        :param wait: `waits.Wait` to poll as well, or None
        :param begin: time at which the wait began, by `time.monotonic`
        """
        pause = SHORTEST_S
        extension = PauseExtension()
        while not predicate():
            now = time.monotonic()
            if now - self._start >= self.seconds and extension.extends():
                self._start = now
            departed_code = wait.poll() if wait is not None else None  # receives statuses
            if wait is not None and monitor is not None and monitor.has_paused():
                self._start = now  # a whole limit is left, too, if the pause ends before this limit
            stopped = (
                wait is not None
                and now - max(begin, sigterm_time) >= TERM_S
                and not any_rank_paused()
            )
            is_over = now - self._start >= self.seconds
            if is_over or stopped or departed_code is not None:
                message = (
                    f", in {current_call}, which all ranks have to call" if current_call else ""
                )
                faults = [
                    wait.describe_fault(departed_code) if wait is not None else "",
                    "SIGTERM was received" * stopped,
                ]
                message = "; ".join(filter(None, [what() + message, *faults]))
                waited = self.seconds if is_over else round(now - begin, 1)
                raise WaitTimeoutError(f"{message} (waited {waited:g} s)", departed_code or 0)
            if not rest() and now - begin >= SPIN_S:
                time.sleep(pause)
                pause = min(LONGEST_S, 1.2 * pause)


def sharp_timers() -> Callable[[], None]:
    """Let short sleeps of this thread, and of the threads that it starts, end on time.

    By default, Linux lets a sleep last up to 50 µs longer than requested. This is changed on Linux
    only. The interpreter's switch interval is reduced to `SWITCH_S`, if it is longer.

    :return: function that restores the switch interval, unless other code has changed it since
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
    """Set an attribute of this thread or process by Linux's ``prctl``; elsewhere do nothing.

    :param option: number of the attribute, a constant PR_SET_…
    :param value: new value of the attribute
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
