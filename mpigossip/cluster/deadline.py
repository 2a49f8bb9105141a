"""Waiting with a limit: nothing in this package waits without one."""

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
"""Seconds of asking again at once: to be put to sleep and woken takes about as long."""
SHORTEST_S = 20e-6
LONGEST_S = 1e-3
"""Seconds of the first sleep between two looks, and of the last."""
PR_SET_TIMERSLACK = 29
SWITCH_S = 1e-4
"""Seconds after which a thread that computes in Python lets others go on, at most: a round has
several hand-overs, and with Python's 5 ms one busy thread makes it 2 - 8 times as long."""


WAITING = -1
WORKING = -2
PAUSED = -3
"""What a rank does: it waits; it doesn't; it works on purpose."""
REPORTING = 1
"""It says why the job ends."""
CLOSING = -4
EXITED = -5
"""It makes no further calls: it closes what it opened; it exits (EXITS less its exit code)."""
STEP_CALL = "step()"
END_PREFIX = "the end of its "
TERM_S = 20.0
"""Seconds after SIGTERM from which a wait ends: schedulers kill after about 30."""
monitor: Any = None
"""What the ranks tell each other about their waits, a `Roll`, while a world of several is open."""


def world_ranks(comm: "MPI.Comm", ranks: Iterable[int]) -> list[int]:
    """Return the world's numbers of these ranks of one of its communicators, for messages.

    Their own numbers where no world of several ranks is open.
    """
    return list(ranks) if monitor is None else monitor.world_ranks(comm, ranks)


pause_depth = 0
"""Blocks of :func:`paused` around what this rank does now."""
current_call = ""
steps_done = 0
"""What of a user's program this rank is in, that all ranks have to call, and steps that it made."""
order = 0
"""Number of this call among those of this rank; 0 if ranks may make it in another order."""
ordered_calls = 0
"""Calls with such a number that this rank has made since its world was opened."""
status = WAITING
"""What a rank that waits tells those that wait for it: WAITS, or CLOSES inside :func:`ends`."""
sigterm_time = math.inf
"""When SIGTERM came, where a run is to stop at a step that all ranks agree on and hasn't yet."""


def announce(word: int) -> None:
    """Tell all ranks of an open world."""
    if monitor is not None:
        monitor.announce(word)


class user_call:
    """Inside, waits that end at their limit name the call, to this rank and to the others."""

    def __init__(self, name: str, ordered: bool = True):
        """Prepare the block; it may be entered several times, one after the other.

        :param name: with brackets, as "step()"
        :param ordered: all ranks make this call at the same place among their other ordered calls,
            so that a wait in another call of the same number can't end
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
        # A program may catch the error, which perhaps this rank alone has raised, and call again.
        if kind is not None and self._counted:
            ordered_calls -= 1
        self._counted = False


def calling_unless(name: str, ordered: bool) -> contextlib.AbstractContextManager[None]:
    """Return :class:`calling`, unless this rank is in a call already, which tells more."""
    return contextlib.nullcontext() if current_call else user_call(name, ordered)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, this rank works on purpose: waits for it, and for who waits for it, have no limit."""
    global pause_depth
    entered = False
    try:
        pause_depth = pause_depth + 1
        entered = True
        if pause_depth == 1:
            announce(PAUSED)
        yield
    finally:  # also after an interrupt in `tell`: otherwise the others would wait without a limit
        pause_depth -= entered
        if not pause_depth:
            announce(WORKING)


def any_rank_paused() -> bool:
    """Return whether some rank is paused, as far as was heard."""
    return monitor is not None and monitor.poll_paused()


class PauseExtension:
    """Of a wait at its limit: a rank that is paused leaves it a whole limit more, when it ends."""

    def __init__(self) -> None:
        self._paused = False

    def extends(self) -> bool:
        """Return whether some rank is paused, or was when this was last asked."""
        before = self._paused
        self._paused = any_rank_paused()
        return before or self._paused


@contextlib.contextmanager
def announce_end(made: int, word: int = CLOSING, what: str = "loop") -> Iterator[None]:
    """A block at the end of a loop of so many steps, or of a world.

    Nothing is announced: a rank that waits for this one in vain asks it, and is told ``word``.
    """
    global steps_done, status
    before = status
    steps_done = made
    try:
        status = word
        with user_call(END_PREFIX + what, ordered=word == CLOSING):
            yield
    finally:
        status = before


class WaitTimeoutError(Failure, TimeoutError):
    """Something awaited didn't come before its deadline; the message names what."""

    def __init__(self, message: str, code: int = 0):
        """``code``: the exit code of a rank that has left, if that is why."""
        super().__init__(message)
        self.code = code or FAILED


class Deadline:
    """A point in time, `seconds` after it was made, until which one waits."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Count the seconds from now on."""
        self._start = time.monotonic()

    def wait(
        self,
        predicate: Callable[[], Any],
        what: Callable[[], str],
        rest: Callable[[], bool] = lambda: False,
        awaited_ranks: Callable[[], Iterable[int]] | None = None,
    ) -> float:
        """Poll until ``predicate()`` is true; return the seconds waited.

        It first polls without a pause, then sleeps for 20 µs, growing to 1 ms: an answer that comes
        soon has little latency, and one that comes late leaves the core to others.

        :param what: function that describes the wait; it is called at the deadline only
        :param rest: function that may sleep in place of this one, and returns whether it did
        :param awaited_ranks: function that returns the awaited ranks of the world, none for all.
            The other ranks are then informed of the wait, and the message names the rank at fault
            (`waits`)
        :raises WaitTimeoutError: at the deadline
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
            raise  # this rank ends, and must not look as if it worked
        except BaseException:  # such as an interrupt, which may be caught
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
        """Ask until ``predicate`` is true; ``wait``: a `waits.Wait`, or None."""
        pause = SHORTEST_S
        patience = PauseExtension()
        while not predicate():
            now = time.monotonic()
            if now - self._start >= self.seconds and patience.extends():
                self._start = now
            left = wait.poll() if wait is not None else None  # listens
            if wait is not None and monitor is not None and monitor.has_paused():
                self._start = now  # a whole limit, too, where the pause ends before this one
            stopped = (
                wait is not None
                and now - max(begin, sigterm_time) >= TERM_S
                and not any_rank_paused()
            )
            over = now - self._start >= self.seconds
            if over or stopped or left is not None:
                told = f", in {current_call}, which all ranks have to call" if current_call else ""
                faults = [
                    wait.describe_fault(left) if wait is not None else "",
                    "SIGTERM came" * stopped,
                ]
                told = "; ".join(filter(None, [what() + told, *faults]))
                waited = self.seconds if over else round(now - begin, 1)
                raise WaitTimeoutError(f"{told} (waited {waited:g} s)", left or 0)
            if not rest() and now - begin >= SPIN_S:
                time.sleep(pause)
                pause = min(LONGEST_S, 1.2 * pause)


def sharp_timers() -> Callable[[], None]:
    """Let short sleeps of this thread, and of those that it starts, end when they should.

    Linux lets a sleep last up to 50 µs longer than asked for; elsewhere nothing is done for that.
    No thread may keep the interpreter for longer than `SWITCH_S`. Returns a function that restores
    the interpreter's switch interval, unless somebody else has set it since.
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
    """Set an attribute of this thread or process that Linux has; elsewhere nothing is done."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
