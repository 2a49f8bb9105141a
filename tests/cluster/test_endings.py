"""cluster/endings.py: the table of what a rank does at its end."""

from mpigossip.cluster.endings import ACTIONS, Action, Cause, Others
from mpigossip.config import JobError
from mpigossip.config.errors import Failure
from tests.cases import on_each


@on_each(
    "error, keys, action",
    [
        (JobError("x"), [b"a", b"a"], Action.FINALIZE),
        (ValueError("x"), [b"a", b"b"], Action.FINALIZE),
        (KeyboardInterrupt(), None, Action.ABORT),
        (Failure("x"), [b"a", b"a"], Action.ABORT),
        (Failure("x"), [b"a", b"b"], Action.ABORT),
        (Failure("x"), None, Action.ABORT),
    ],
)
def test_an_exception_that_is_not_caught_has_one_action(error, keys, action):
    assert ACTIONS[Cause.of(error), Others.of(keys)] is action


def test_mpi_is_finalized_unless_a_call_of_it_hangs_or_a_rank_runs():
    for (cause, others), action in ACTIONS.items():
        if others in (Others.STUCK, Others.RUNNING) or cause is Cause.FAILURE:
            assert action is not Action.FINALIZE
        else:
            assert action is Action.FINALIZE
