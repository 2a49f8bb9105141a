"""Run a command that reads untrusted files in a child process, which may crash.

The HDF5 library believes what a file says of itself where its checksums agree: some damaged or
forged files crash it, whatever is looked at before. Then the user gets a line, not a signal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from mpigossip.cluster.deadline import prctl
from mpigossip.cluster.launcher import places
from mpigossip.config.errors import FAILED
from mpigossip.config.readable import note

READERS = ("resume", "simulate", "data", "log", "report", "checkpoint")
"""Commands that read what others may have made."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL)
HANDED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
PR_SET_PDEATHSIG = 1


def reads(words: Sequence[str]) -> bool:
    """Return whether this command needs it; never a rank among others."""
    waits = hasattr(signal, "sigwaitinfo")  # not on macOS
    return waits and any(word in READERS for word in words[:1]) and not places(os.environ)


def spared(words: Sequence[str]) -> int | None:
    """None in the process that is to run the command; in the one that waits, its exit code."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGCHLD})
    pid = os.fork()
    if not pid:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    while (got := signal.sigwaitinfo({*HANDED_ON, signal.SIGCHLD})).si_signo in HANDED_ON or (
        not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    ):
        if got.si_signo in HANDED_ON and got.si_code <= 0:  # a terminal's reach both
            os.kill(pid, got.si_signo)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if -code in CRASHES:
        what = " ".join(words[:3])
        note(
            f"`{what}` crashed ({signal.Signals(-code).name}), as the HDF5 library does on some "
            "damaged or forged files; use another copy of what it reads"
        )
        return FAILED
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    return code
