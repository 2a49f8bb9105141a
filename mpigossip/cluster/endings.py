"""How a process with an open world ends: one table of causes and states of the other ranks.

A process asks the other ranks for their state twice: in the exception hook, if an exception was not
caught, and at the exit of the interpreter. Each time, :data:`ACTIONS` contains its next action. Two
processes are not in the table, because they use MPI no longer: a fork, and a rank that has survived
the failure of another one, which exits without `MPI_Finalize`.
"""

import enum
from collections.abc import Sequence

from mpigossip.config.errors import Failure


class Cause(enum.Enum):
    """Cause of the end of a rank."""

    EXIT = "the program has ended or called sys.exit(), and no exception has left its world"
    ERROR = "an exception that leaves no exchange open: a user error, an interrupt or a bug"
    FAILURE = "a Failure, such as a wait at its time limit, after which exchanges may be open"

    @classmethod
    def of(cls, error: BaseException) -> "Cause":
        """Return the cause if ``error`` is not caught."""
        return cls.FAILURE if isinstance(error, Failure) else cls.ERROR


class Others(enum.Enum):
    """State of the other ranks."""

    SAME_ERROR = "all ranks end by the same exception"
    ERRORS = "all ranks end by exceptions, which differ"
    RUNNING = "some ranks continue, or wait for this rank"
    EXITING = "all ranks exit"
    STUCK = "all ranks exit, and a thread of some rank does not return from a call of MPI"

    @classmethod
    def of(cls, error_keys: Sequence[bytes] | None) -> "Others":
        """Return the state of ranks that end by an exception.

        :param error_keys: key of each rank's exception; None if some rank has not ended
        """
        if error_keys is None:
            return cls.RUNNING
        return cls.SAME_ERROR if len({*error_keys}) == 1 else cls.ERRORS


class Action(enum.Enum):
    """Last action of a rank."""

    FINALIZE = "exit, and call MPI_Finalize together with the other ranks"
    EXIT_NOW = "exit without MPI_Finalize, which would hang"
    ABORT = "end all ranks by MPI_Abort"


ACTIONS = {
    # in the exception hook
    (Cause.ERROR, Others.SAME_ERROR): Action.FINALIZE,
    (Cause.ERROR, Others.ERRORS): Action.FINALIZE,
    (Cause.ERROR, Others.RUNNING): Action.ABORT,
    (Cause.FAILURE, Others.SAME_ERROR): Action.ABORT,
    (Cause.FAILURE, Others.ERRORS): Action.ABORT,
    (Cause.FAILURE, Others.RUNNING): Action.ABORT,
    # at the exit of the interpreter, which waits without a limit if there was no error
    (Cause.EXIT, Others.EXITING): Action.FINALIZE,
    (Cause.EXIT, Others.STUCK): Action.EXIT_NOW,
    (Cause.ERROR, Others.EXITING): Action.FINALIZE,
    (Cause.ERROR, Others.STUCK): Action.EXIT_NOW,
}
"""Action of a rank for each cause of its end and each state of the others."""
