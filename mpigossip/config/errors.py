"""Exceptions and exit codes for user errors and for failures of a run."""

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
"""Exit codes. OK: success. FAILED: the run cannot continue (`Failure`). WRONG: a user error
(`UserError`), or a check that found problems. STOPPED: the run stopped before its end and wrote a
checkpoint (EX_TEMPFAIL); the batch scripts in jobs/ then submit the job again."""


class UserError(ValueError):
    """Error that the user can correct; its message names the value, the limit and a remedy."""

    rank: int | None = None
    """Rank that the launcher gave to this process, set if each process detects the error on its
    own; otherwise None."""


class Failure(Exception):
    """Failure after which a run cannot continue; its message names the cause."""

    code = FAILED
    """Exit code of the process."""


class NonFiniteError(Failure, ArithmeticError):
    """Failure due to NaN or infinity in a loss, message or state; its message names the node."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of the operating system if a disk is full, over quota or broken, or if a file is
too large."""


def output_error(error: OSError | None = None) -> str:
    """Return the reason why standard output cannot be written, or "" if it can be written.

    After an error, standard output is redirected to the null device, so that no later write fails,
    not even at exit. A closed pipe is not an error, because its reader needs no more output.

    :param error: exception of an earlier write, which counts if it has a number in `FULL` and names
        no file; None: only try to flush standard output
    """
    try:
        if error is not None and error.errno in FULL and error.filename is None:
            raise error
        sys.stdout.flush()
    except OSError as failed:
        with contextlib.suppress(OSError, ValueError):  # stdout may have no file descriptor
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, sys.stdout.fileno())
            os.close(null_device)
        is_broken_pipe = isinstance(failed, BrokenPipeError)
        return "" if is_broken_pipe else failed.strerror or str(failed)
    return ""


class JobError(UserError):
    """User error in a job or command, which can report several problems at once."""

    messages: tuple[str, ...]
    """Sentence or paragraph for each problem."""

    def __init__(self, messages: Iterable[str]) -> None:
        messages = (messages,) if isinstance(messages, str) else messages
        self.messages = tuple(map(printable, messages))
        super().__init__(self.messages)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return self.messages[0]
        return "\n".join(f"- {message}" for message in self.messages)
