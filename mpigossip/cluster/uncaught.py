"""Uncaught exceptions: one report per job, no traceback for user errors."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpigossip.config.errors import FAILED, WRONG, Failure, UserError
from mpigossip.config.user_code import user_frame

if TYPE_CHECKING:
    from mpigossip.cluster.launcher import LaunchError
    from mpigossip.cluster.waits import WaitMonitor

INTERRUPTED = 130
ALL_S = 1.0
"""Seconds within which the others end by the same exception, if all do."""
TURN_S = 0.05
"""Between two ranks that end by exceptions of their own: the first one's word ends the job."""
END_S = 30
"""Seconds after which an exit that hangs in MPI is cut short."""


def code(error: BaseException | None) -> int:
    """Return the exit code of the process, should nobody catch this."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Failure):
        return error.code
    return WRONG if isinstance(error, UserError) else FAILED


def format_error(error: BaseException, rank: str = "", every: str = "", where: str = "") -> str:
    """A paragraph for what its reader can mend or can't help, and where; else the traceback.

    ``rank``, ``every``: who it is that says so, if not all do so; and who they all are.
    ``where``: behind the word exception.
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
    """Return what is equal in exceptions that are alike on all ranks: type and line, no values."""
    words = type(error).__name__
    if not isinstance(error, KeyboardInterrupt | Failure):  # those come wherever a rank is
        last = traceback.extract_tb(error.__traceback__)[-1:]
        words += "".join(f"{frame.filename}:{frame.lineno}" for frame in last)
    return words.encode()


def errors_of_all_ranks(roll: WaitMonitor, error: BaseException) -> list[bytes] | None:
    """By rank, what :func:`kind` of exception ends it; None where some go on, or wait."""
    with contextlib.suppress(ValueError):  # a second Ctrl-C would leave the others alone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # a rank was lost: MPI says so, or nothing
        return roll.gather_error_keys(error_key(error), ALL_S)
    return None


def write_stderr(text: str) -> None:
    """One write, so that the lines of several ranks don't mix."""
    os.write(2, (text + "\n").encode(errors="replace"))


def takes_turn(rank: int) -> None:
    """Let lower ranks speak first, who end the job then."""
    time.sleep(TURN_S * min(rank, 20))


def exit_now(number: int) -> None:
    """End this process by the exit code, from within an exception hook."""
    sys.stdout.flush()
    watch = threading.Timer(END_S, os._exit, (number,))
    watch.daemon = True  # it runs on until MPI is finalized, which open exchanges may prevent
    watch.start()
    raise SystemExit(number)


def once(error: LaunchError) -> Callable:
    """An exception hook for a launch that went wrong, as each process finds: rank 0 says it."""
    before = sys.excepthook

    def hook(kind, found, trace):
        if found is not error:
            before(kind, found, trace)
            return
        if error.rank == 0:
            write_stderr(format_error(error))
        else:
            time.sleep(5 * ALL_S)  # launchers end all at the first that fails
        raise SystemExit(WRONG)

    return hook
