"""End of a process with an open world: a table of its next action.

The action depends on the cause of the end and on the state of the other ranks. A process determines
both at two points: in the exception hook (`MPIWorld._uncaught`), if an exception was not
caught, and at the exit of the interpreter (`ExitHandler._leave` in `process`). At each point, it
looks up its next action in :data:`ACTIONS`. The table does not apply to a fork, nor to the exit of
a rank that has survived the failure of another rank. Both exit without `MPI_Finalize`. Nor does it
apply to an uncaught exception in a thread other than the main thread, which aborts the job.
"""

import enum
from collections.abc import Sequence

from mpigossip.config.errors import Failure


class Cause(enum.Enum):
    """Cause of the end of a rank."""

    EXIT = "the program has ended or called sys.exit, and no error has left its world"
    ERROR = (
        "an exception that is not a Failure: a user error, an interrupt or a bug; at the exit, any "
        "error that has left the world, such as sys.exit(1) in it, or a Failure that was caught"
    )
    FAILURE = "a Failure, such as a wait at its time limit, after which exchanges may be open"

    @classmethod
    def of(cls, error: BaseException) -> "Cause":
        """Return the cause of the end of a rank that does not catch ``error``."""
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
        """Return the state of the other ranks if this rank ends by an exception.

        :param error_keys: key of each rank's exception, which is equal for equal exceptions; None
            if some rank has not ended by an exception
        """
        if error_keys is None:
            return cls.RUNNING
        return cls.SAME_ERROR if len({*error_keys}) == 1 else cls.ERRORS


class Action(enum.Enum):
    """Next action of a rank that ends.

    If the action in the exception hook is FINALIZE, the exit handler looks up another action.
    """

    FINALIZE = "exit, and call MPI_Finalize together with the other ranks"
    SKIP_FINALIZE = "exit without MPI_Finalize, which would hang"
    ABORT = "end all ranks by MPI_Abort"


ACTIONS = {
    # In the exception hook. ERROR with RUNNING occurs at the exit, too: if an error has left the
    # world without reaching the hook, such as sys.exit(1), and other ranks still run after
    # `process.LEAVE_S` seconds.
    (Cause.ERROR, Others.SAME_ERROR): Action.FINALIZE,
    (Cause.ERROR, Others.ERRORS): Action.FINALIZE,
    (Cause.ERROR, Others.RUNNING): Action.ABORT,
    (Cause.FAILURE, Others.SAME_ERROR): Action.ABORT,
    (Cause.FAILURE, Others.ERRORS): Action.ABORT,
    (Cause.FAILURE, Others.RUNNING): Action.ABORT,
    # At the exit of the interpreter. EXIT with RUNNING does not occur, because a rank without an
    # error waits without a limit until all ranks exit. FAILURE does not occur: a Failure that the
    # hook handles aborts the job, and one that the program catches, as `mpigossip train` does, is
    # an ERROR. Its open exchanges may prevent the end of MPI_Finalize, so after an error, a
    # watchdog ends the process after `exception_reports.EXIT_LIMIT_S` seconds.
    (Cause.EXIT, Others.EXITING): Action.FINALIZE,
    (Cause.EXIT, Others.STUCK): Action.SKIP_FINALIZE,
    (Cause.ERROR, Others.EXITING): Action.FINALIZE,
    (Cause.ERROR, Others.STUCK): Action.SKIP_FINALIZE,
}
"""Action of a rank for each cause of its end and each state of the other ranks that can occur."""
