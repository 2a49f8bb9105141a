"""What ends a program of this package: mistakes of the user, failures of a run, and exit codes."""

OK, FAILED, WRONG, STOPPED = 0, 1, 2, 75
"""Exit codes: done; a run that can't go on (`Failure`); a mistake of the user (`Mistake`), or a
check that found something; stopped before the end with a checkpoint (EX_TEMPFAIL). The batch
scripts under jobs/ queue a job again on the last."""


class Mistake(ValueError):
    """Something that the user has to mend: the message names value, limit and remedy."""

    rank: int | None = None
    """Where each process finds it by itself: the launcher's number of this one."""


class Failure(Exception):
    """A run that can't go on; the message says what happened, and where."""
