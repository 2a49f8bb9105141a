"""Reports of exceptions that a program has not caught.

If ranks end by the same exception, only one of them reports it. A report contains a traceback,
unless the exception is a user error, a failure of the run (`Failure`) or an interrupt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpigossip.cluster.deadline import start_watchdog
from mpigossip.config.errors import FAILED, WRONG, Failure, UserError
from mpigossip.config.user_code import user_frame

if TYPE_CHECKING:
    from mpigossip.cluster.launcher import LaunchError
    from mpigossip.cluster.waits import WaitMonitor

INTERRUPTED = 130
"""Exit code after an interrupt, by the convention of shells."""
GATHER_ERRORS_S = 1.0
"""Seconds to wait for the other ranks to end by an exception, too."""
REPORT_INTERVAL_S = 0.05
"""Seconds between two ranks' reports of different exceptions: the first report ends the job."""
EXIT_LIMIT_S = 30
"""Seconds after which a process ends although a call of MPI hangs during its exit."""


def code(error: BaseException | None) -> int:
    """Return the exit code with which the process ends if ``error`` is not caught."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Failure):
        return error.code
    return WRONG if isinstance(error, UserError) else FAILED


def format_error(error: BaseException, rank: str = "", every: str = "", where: str = "") -> str:
    """Format an exception for the user.

    A user error, a run failure or an interrupt becomes its message, without a traceback. For the
    first two, the line of the user's code follows if it is known. Any other exception becomes a
    traceback.

    :param error: the exception
    :param rank: name of the reporting rank; "": all ranks report the same
    :param every: name of all ranks, used in a traceback if ``rank`` is ""
    :param where: text after the word "exception" that says where it occurred, such as " in thread
        NAME"
    """
    if isinstance(error, KeyboardInterrupt | UserError | Failure):
        frame = None if isinstance(error, KeyboardInterrupt) else user_frame(error)
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{error}"
        text = "; ".join([text, *getattr(error, "__notes__", ())])
        text += f" ({Path(frame.filename).name}, line {frame.lineno})" if frame else ""
        return ": ".join(filter(None, ["mpigossip", rank, text]))
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"mpigossip: {rank or every} stopped the job by an exception{where}:\n{trace}"


def error_key(error: BaseException) -> bytes:
    """Return a key of type, file and line, equal on ranks that end by the same exception.

    For an interrupt or a run failure, the key consists of the type alone.
    """
    key = type(error).__name__
    # Ranks may raise an interrupt or a failure at different lines for the same reason.
    if not isinstance(error, KeyboardInterrupt | Failure):
        last = traceback.extract_tb(error.__traceback__)[-1:]
        key += "".join(f"{frame.filename}:{frame.lineno}" for frame in last)
    return key.encode()


def errors_of_all_ranks(monitor: WaitMonitor, error: BaseException) -> list[bytes] | None:
    """Return a hash of the :func:`error_key` of each rank, in rank order; collective.

    The result is None if some ranks continue or wait, or if a rank has failed. This rank ignores
    interrupts from now on.

    :param monitor: wait monitor of the world
    :param error: uncaught exception of this rank
    """
    with contextlib.suppress(ValueError):  # a second Ctrl-C would end only this rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # after a rank failure, MPI may raise an error
        return monitor.gather_error_keys(error_key(error), GATHER_ERRORS_S)
    return None


def write_stderr(text: str) -> None:
    """Write ``text`` to stderr in one call, so that lines of several ranks are not interleaved."""
    os.write(2, (text + "\n").encode(errors="replace"))


def wait_turn(rank: int) -> None:
    """Wait for a time that grows with the rank, up to one second from rank 20 on.

    The first rank that reports its exception ends the job, so the lowest rank should report first.
    """
    time.sleep(REPORT_INTERVAL_S * min(rank, 20))


def exit_with_watchdog(number: int) -> None:
    """Raise SystemExit with exit code ``number``; called from an exception hook.

    If the exit of the process then takes longer than `EXIT_LIMIT_S`, a watchdog ends the process.
    """
    sys.stdout.flush()
    # This watchdog is never cancelled, because open exchanges may prevent the end of MPI_Finalize.
    start_watchdog(EXIT_LIMIT_S, os._exit, number)
    raise SystemExit(number)


def once(error: LaunchError) -> Callable:
    """Return an exception hook that reports a failed launch on rank 0, and briefly on other ranks.

    Without this hook, each process would report the failure with its traceback, because each
    process detects it. The hook ends the process with exit code `WRONG`; on ranks other than 0, it
    prints the error's short line, if it has one, and waits.

    :param error: error of the launch; the previous hook handles other exceptions
    """
    before = sys.excepthook

    def hook(kind, caught, trace):
        if caught is not error:
            before(kind, caught, trace)
            return
        if error.rank == 0:
            write_stderr(format_error(error))
        else:
            if error.short:
                write_stderr(error.short)
            time.sleep(5 * GATHER_ERRORS_S)  # launchers end all ranks when the first one fails
        raise SystemExit(WRONG)

    return hook
