"""`python -m mpigossip.studies.child PID …`: a command that ends when its study ends.

PID is the process id of the study: one that is killed leaves no runs behind, which would
go on writing where the next call does. On Linux; elsewhere they end by themselves.
"""

import runpy
import sys

from mpigossip.cluster.process import end_with
from mpigossip.config.errors import NotFinite

LOST = 3  # the exit code where the loss became no number

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    NotFinite.code = LOST
    runpy.run_module("mpigossip", run_name="__main__")
