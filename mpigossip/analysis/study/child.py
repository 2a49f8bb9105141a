"""`python -m mpigossip.analysis.study.child STUDY …`: a command that ends where its study ends.

STUDY is the process id of who starts it: a study that is killed leaves no runs behind, which would
go on writing where the next call does. On Linux; elsewhere they end by themselves.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """SIGTERM for this process when the thread that started it ends, or has ended already."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("mpigossip", run_name="__main__")
