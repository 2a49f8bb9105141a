"""A small process beside each rank, which says what the rank itself no longer can.

While MPI starts, a rank waits in C with the interpreter's lock: no thread of Python can look at the
clock. And a rank that is killed has no last word. So before MPI starts, each rank starts this file
as a program of its own (standard library only, no MPI, asleep but for events). It lays a file named
by the rank's number into a folder that the ranks share, and

* ends its rank where MPI hasn't started within the limit, or where another rank is gone by then,
  and names the ranks that never laid their file;
* says which rank ended without a word. Most launchers end the others then, whose witnesses compare
  when their ranks ended: that of the first one speaks, or another for it where it is gone, too.

The folder goes with the last witness.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

TOLD, ENDED = "told", "ended"
"""Files: the job's end has been explained; this and a rank's number: when it ended."""
ENTERED = "+"
"""Behind the name of a rank's file: it waits for MPI to start."""
FIRST_LOOK_S, LOOK_S = 0.5, 5.0
"""Seconds between two looks at the folder while MPI starts: at first, and at most."""
SETTLE_S = 0.1
"""Seconds that witnesses give each other to note when their ranks ended."""
PATIENCE_S = 1.0
"""Seconds that a witness leaves the word to the one that has to speak, which may be gone."""
GRACE_S = 3.0
"""Seconds that a rank has to end when it is told to, or says that it will."""
STALE_S = 3600.0
"""Age from which on a folder of another launch was left by witnesses that were killed, too."""
ENTERS, STARTED, LEAVES, ABORTS = b"e", b"s", b"l", b"a"
"""What a rank says."""


class Witness:
    """The rank's side: starts the program, and tells it how far the rank is."""

    def __init__(self, folder: Path, rank: int, size: int, timeout_s: float):
        """``folder``: where the ranks' files lie, absolute."""
        import subprocess

        self.folder = folder
        told = {"folder": str(folder), "rank": rank, "size": size, "timeout_s": timeout_s}
        told |= {"host": os.uname().nodename, "pid": os.getpid()}
        # -I -S: nothing of the user's is imported. A session of its own: launchers end the groups
        # of their ranks. MPICH's launcher sees a rank's end by the end of its socket, and is gone
        # a moment later: the witness holds it open until it has spoken. No other file is handed on.
        socket = os.environ.get("PMI_FD", "")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[int(socket)] if socket.isdigit() else [],
        )
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self._library = _sigterm_exits() if default else None

    def enters(self) -> None:
        """The rank is about to start MPI, and has loaded what it needs."""
        self._say(ENTERS)

    def started(self) -> None:
        """MPI runs on all ranks."""
        if self._library is not None:
            self._library.signal(signal.SIGTERM, None)
            self._library = None
        self._say(STARTED)

    def leaves(self) -> None:
        """The rank ends by itself, and has said why if there was a reason."""
        self._say(LEAVES)

    def speak(self) -> bool:
        """This rank is about to end the job with a word of its own: no witness adds another.

        Whether it is the first to do so.

        Should MPI_Abort not return, as in Open MPI when several ranks call it after a loss, the
        witness ends this rank. A rank whose end made this one speak is noted first, and named.
        """
        time.sleep(SETTLE_S)
        first = claim(self.folder, spoken=time.time())
        _sigterm_exits()
        self._say(ABORTS)
        return first

    def _say(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # killed, as anything can be
            self._process.stdin.write(word)
            self._process.stdin.flush()


def _sigterm_exits() -> ctypes.CDLL:
    """Lets SIGTERM end a rank that waits in C by an exit code: no handler of Python's runs then.

    A rank that a signal ends counts as a success for Open MPI's launcher with fault tolerance. The
    handler is libc's `_exit`, so the code is SIGTERM's number.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], None
    library.signal(signal.SIGTERM, ctypes.cast(library._exit, ctypes.c_void_p))
    return library


def claim(folder: Path, spoken: float = 0.0, ended: float = 0.0) -> bool:
    """Whether nobody has explained this job's end, or a rank has, but after what ``ended`` then.

    ``spoken``: when a rank speaks for itself; others may have made it do so by ending before.
    """
    try:
        with (folder / TOLD).open("x") as file:
            file.write(repr(spoken))
    except FileExistsError:
        with contextlib.suppress(OSError, ValueError):  # being written
            return 0.0 < ended < float((folder / TOLD).read_text())
        return False
    except OSError:  # the disk is full, or the folder gone: better said twice than never
        pass
    return True


# -- the program ----------------------------------------------------------------------------------


class Watch:
    """The witness's side."""

    def __init__(self, folder: str, rank: int, size: int, timeout_s: float, host: str, pid: int):
        self.folder, self.rank, self.size = Path(folder), rank, size
        self.timeout_s, self.host, self.pid = timeout_s, host, pid
        self.began, self.pause = time.monotonic(), FIRST_LOOK_S
        self.starting, self.entered = True, float("inf")
        self.file = self.folder / f"{rank}.{pid}.{host}"
        self.ranks: dict[int, int] = {}
        """living ranks of this host, by the files that tell of their ends"""
        self.pids: dict[int, int] = {}
        """processes of ranks of this host, of those that have ended too"""
        self.dead: list[int] = []
        """those that have ended, in that order"""
        self.events = select.epoll() if hasattr(select, "epoll") else None
        if self.events is not None:
            self.events.register(0, select.EPOLLIN)

    def watch(self) -> None:
        """Until the rank has ended."""
        with contextlib.suppress(OSError):
            self.file.touch()
        self.look_out_for(self.rank, self.pid)
        if self.rank == 0:
            self.tidy()
        over = False
        while not over:
            over = self.gone(time.time()) if self.stirred() else self.hopeless()
        self.clear()

    def look_out_for(self, rank: int, pid: int) -> None:
        """Notice the end of a rank of this host, in order (Linux)."""
        if self.events is not None and rank not in self.pids:
            with contextlib.suppress(OSError):
                file = os.pidfd_open(pid)
                self.events.register(file, select.EPOLLIN)
                self.ranks[file], self.pids[rank] = rank, pid

    def meet(self) -> None:
        """Look out for all ranks of this host that have begun."""
        for rank, rest in self.begun().items():
            pid, _, host = rest.removesuffix(ENTERED).partition(".")
            if host == self.host and pid.isdigit():
                self.look_out_for(rank, int(pid))

    def begun(self) -> dict[int, str]:
        """The rest of their files' names, by rank."""
        with contextlib.suppress(OSError):
            names = (file.name.partition(".") for file in self.folder.iterdir())
            return {int(rank): rest for rank, _, rest in names if rank.isdigit()}
        return {}

    def stirred(self) -> bool:
        """Waits; whether the rank has said something, or ended. False: time to look around."""
        pause = self.pause if self.starting else None
        if self.events is None:
            return bool(select.select([0], [], [], pause)[0])
        found = [file for file, _ in self.events.poll(pause)]
        for file in found:
            if file != 0:
                self.dead.append(self.ranks.pop(file))
                os.close(file)
        return 0 in found or self.rank in self.dead

    def gone(self, now: float) -> bool:
        """Whether the rank has ended, or is about to; the line about it is written."""
        words = os.read(0, 16) if select.select([0], [], [], 0)[0] else b""
        if ABORTS in words:
            time.sleep(GRACE_S)
            self.end()
            return True
        if LEAVES in words:  # it has said why; while MPI starts, the others can't go on without it
            return not self.starting or claim(self.folder, spoken=now) or True
        if words:
            self.starting = STARTED not in words
            self.enter() if self.starting else self.meet()
            return False
        with contextlib.suppress(OSError):
            (self.folder / f"{ENDED}.{self.rank}").write_text(f"{now!r} {self.host}")
        missing = self.missing() if self.starting else ""
        if len(self.ranks) + len(self.dead) < self.size or self.dead not in ([], [self.rank]):
            time.sleep(SETTLE_S)
        before = self.before()
        if (before or self.was_later(now)) and self.is_told():
            return True
        if claim(self.folder, ended=now):
            rank = before[0] if before else self.rank
            name = f"rank {rank} of {self.size} on {self.host}"
            when = "before MPI had started" if self.starting else f"after {self.seconds():.0f} s"
            when += f", and {missing}" if missing else ""
            process = self.pids.get(rank, self.pid)
            self.say(f"{name} (process {process}) ended without a word (killed, or crashed) {when}")
        return True

    def enter(self) -> None:
        """The rank waits in MPI from now on; its file says so."""
        self.entered = time.monotonic()
        file = self.file.with_name(self.file.name + ENTERED)
        with contextlib.suppress(OSError):
            self.file.rename(file)
            self.file = file

    def before(self) -> list[int]:
        """Ranks that were seen to end before this one, without leaving as the end of a job does."""
        seen = self.dead[: self.dead.index(self.rank)] if self.rank in self.dead else self.dead
        noted = {file.suffix[1:] for file in self.folder.glob(f"{ENDED}.*")}
        begun = self.begun()  # who leaves takes its file along
        return [rank for rank in seen if rank in begun or str(rank) in noted]

    def was_later(self, now: float) -> bool:
        """Whether the clock says that a rank ended before whose end is not seen from here."""
        seen = {*self.dead, *self.ranks.values()}
        for file in self.folder.glob(f"{ENDED}.*"):
            with contextlib.suppress(OSError, ValueError):  # being written, or removed
                ended, host = file.read_text().split()
                if (host != self.host or int(file.suffix[1:]) not in seen) and float(ended) < now:
                    return True
        return False

    def is_told(self) -> bool:
        """Whether somebody explains this job's end within ``PATIENCE_S``."""
        until = time.monotonic() + PATIENCE_S
        while not (self.folder / TOLD).exists() and time.monotonic() < until:
            time.sleep(0.02)
        return (self.folder / TOLD).exists()

    def hopeless(self) -> bool:
        """Whether MPI can't start any more, or the job is over; then the rank is ended."""
        if not self.starting:
            return self.aborted()
        missing = self.missing()
        # what a rank loads before it enters may take long on a busy machine, and is not waiting;
        # its file is laid before that, as this one's
        since = self.began if missing else self.entered
        left = self.timeout_s - (time.monotonic() - since)
        self.pause = max(0.0, min(1.5 * self.pause, FIRST_LOOK_S if self.dead else LOOK_S, left))
        self.meet()
        if not (self.folder / TOLD).exists():
            if left > 0:
                return False
            if claim(self.folder):
                limit = f"within {self.timeout_s:g} s (node.timeout_s)"
                self.say(f"MPI has not started {limit}: {missing or self.late()}; ending the job")
        self.end()
        return True

    def aborted(self) -> bool:
        """Whether a rank of this host has ended the job by itself; then this one is ended, too.

        Launchers do that, but for Open MPI's with fault tolerance.
        """
        spoken = 0.0
        with contextlib.suppress(OSError, ValueError):
            spoken = float((self.folder / TOLD).read_text())
        if spoken:
            time.sleep(GRACE_S)
            self.end()
        return spoken > 0

    def missing(self) -> str:
        """A clause on the ranks that never laid their file; "" for none."""
        begun = self.begun()
        names = [str(rank) for rank in range(self.size) if rank not in begun]
        which = f"{_few(names)} (in {self.folder})"
        return f"nothing is seen of {len(names)} of {self.size} ranks: {which}" if names else ""

    def late(self) -> str:
        """A clause on the ranks that have begun and not come to where MPI starts."""
        late = {r: rest for r, rest in sorted(self.begun().items()) if not rest.endswith(ENTERED)}
        names = [f"{rank} on {rest.partition('.')[2]}" for rank, rest in late.items()]
        if names:
            return (
                f"{len(names)} of {self.size} ranks have begun but not come so far: {_few(names)}"
            )
        return f"all {self.size} ranks wait for it, so the network between them may be at fault"

    def end(self) -> None:
        """End the rank, if it still lives."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + GRACE_S
            if os.getppid() == self.pid:
                os.kill(self.pid, number)
            while os.getppid() == self.pid and time.monotonic() < until:
                time.sleep(0.02)

    def tidy(self) -> None:
        """Remove what launches before this one left in the run's folder, where all were killed."""
        for other in self.folder.parent.glob(self.folder.name.partition("-")[0] + "-*"):
            with contextlib.suppress(OSError):
                if other != self.folder and time.time() - other.stat().st_mtime > STALE_S:
                    for file in other.iterdir():
                        file.unlink()
                    other.rmdir()

    def clear(self) -> None:
        """Leave nothing in the folder; the last witness removes it."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)
            if not self.begun():
                for file in self.folder.iterdir():
                    file.unlink(missing_ok=True)
                self.folder.rmdir()

    def seconds(self) -> float:
        """Since the rank began."""
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        """One line, where the rank's own would go."""
        with contextlib.suppress(OSError):
            os.write(2, f"mpigossip: {text}\n".encode(errors="replace"))


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


if __name__ == "__main__":
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(one, signal.SIG_IGN)  # those are for the rank
    Watch(**json.loads(sys.argv[1])).watch()
