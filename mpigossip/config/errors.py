"""Exceptions and exit codes: user errors, and failures of a run."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable

from mpigossip.config.readable import printable

OK = 0
FAILED = 1
WRONG = 2
STOPPED = 75
"""Exit codes: done; a run that can't go on (`Failure`); a mistake of the user (`UserError`), or a
check that found something; stopped before the end with a checkpoint (EX_TEMPFAIL). The batch
scripts under jobs/ queue a job again on the last."""


class UserError(ValueError):
    """A user error: the message names value, limit and remedy."""

    rank: int | None = None
    """Rank of this process by the launcher, where each process finds the error by itself."""


class Failure(Exception):
    """A run that can't continue; the message has what happened, and where."""

    code = FAILED  # what the process exits with


class NonFiniteError(Failure, ArithmeticError):
    """A loss, message or state with NaN or infinite values; the message names step and node."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def output_error(error: OSError | None = None) -> str:
    """Return why standard output can't be written (a full disk behind it); "" where it can.

    ``error``: what a write has raised. From then on what is printed goes nowhere, so that nothing
    fails again, at exit neither. A closed pipe is no failure: who read it has enough.
    """
    try:
        if error is not None and error.errno in FULL and error.filename is None:
            raise error
        sys.stdout.flush()
    except OSError as failed:
        with contextlib.suppress(OSError, ValueError):  # no file behind it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        broken = isinstance(failed, BrokenPipeError)
        return "" if broken else failed.strerror or str(failed)
    return ""


class JobError(UserError):
    """Mistakes in a job, all of them: `messages` holds one sentence or paragraph for each."""

    messages: tuple[str, ...]

    def __init__(self, messages: Iterable[str]) -> None:
        messages = (messages,) if isinstance(messages, str) else messages
        self.messages = tuple(map(printable, messages))
        super().__init__(self.messages)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return self.messages[0]
        return "\n".join(f"- {message}" for message in self.messages)
