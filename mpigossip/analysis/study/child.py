"""`python -m mpigossip.analysis.study.child STUDY …`: a command that ends where its study ends.

STUDY is the process id of who starts it: a study that is killed leaves no runs behind, which would
go on writing where the next call does. On Linux; elsewhere they end by themselves.
"""

import runpy
import sys

from mpigossip.cluster.process import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("mpigossip", run_name="__main__")
