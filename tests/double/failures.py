"""Calls that fail on the double."""

import contextlib
import os

AWARE = "MPICH_GPU_SUPPORT_ENABLED"
"""Variable by which MPICH reports support of GPU memory."""


@contextlib.contextmanager
def failing(what, aware=False):
    """Let these calls fail in this process; ``aware``: MPI reports support of GPU memory."""
    from tests import double

    double.calls.clear()
    variables = {"MPIGOSSIP_DOUBLE_FAILS": what} | ({AWARE: "1"} if aware else {})
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
