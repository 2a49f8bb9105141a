"""Early end of a run: by a signal, by the file STOP, or before the end of the allocation."""

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mpigossip.cluster import deadline
from mpigossip.cluster.world import Agreement, World
from mpigossip.config.readable import format_duration, print_note, print_note_once
from mpigossip.runs.hooks import Hook

END_TIMES = ("MPIGOSSIP_END_TIME", "SLURM_JOB_END_TIME")
"""Environment variables with the time, in seconds since 1970, at which the scheduler ends the batch
job. Slurm sets the second one; batch scripts of `mpigossip job` set the first one for every
scheduler."""
RESERVED_FRACTION = 0.05
MIN_RESERVED_S = 5.0
MAX_RESERVED_S = 120.0


def end_of_allocation(wall_clock_s: float, env: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds from now within which the run must end; None if there is no limit.

    The limit is the end of the scheduler's allocation, or ``wall_clock_s`` if this is earlier.

    :param wall_clock_s: seconds from now, as the setting `checkpoint.wall_clock_s`; 0: no limit
    :param env: environment variables, among them those in `END_TIMES`
    """
    ends = [float(env[name]) - time.time() for name in END_TIMES if env.get(name, "").isdigit()]
    # A time in the past belongs to another allocation: `describe_past_end` reports it.
    ends = [end for end in ends if end > 0]
    if wall_clock_s:
        ends.append(wall_clock_s)
    return min(ends, default=None)


def describe_past_end(env: Mapping[str, str] = os.environ) -> str:
    """Return a note on a variable in `END_TIMES` whose time has passed; "" if there is none.

    :param env: environment variables
    """
    for name in END_TIMES:
        if env.get(name, "").isdigit() and (age_s := time.time() - float(env[name])) >= 0:
            return (
                f"{name}={env[name]} was {format_duration(age_s)} ago, and is ignored: without "
                "another time limit, the run does not stop before the end of its allocation; set "
                "it to that end, in seconds since 1970, or unset it"
            )
    return ""


class Reserve:
    """Object that decides when to stop, so that enough time is left for a checkpoint.

    The reserved time is the sum of three terms:

    * 5 % of the time that was available at the start, but at least 5 s and at most 2 min;
    * twice the longest time between two steps so far, which includes evaluations and checkpoints;
    * the mean time of the steps that are done until all ranks have agreed to stop.
    """

    def __init__(self, end: float | None, lag: int = 0, now=time.monotonic):
        """Start the clock.

        :param end: seconds from now until the time limit; None: no limit
        :param lag: number of steps from the decision of one rank to the agreement of all
        :param now: function that returns the present time in seconds. It should be monotonic,
            because a jump of the wall clock would look like a long step
        """
        self._end = None if end is None else now() + end
        self._lag = lag
        self._now = now
        self._first = 0.0
        self._last: float | None = None
        self._longest = 0.0
        self._steps = 0
        self._minimum_s = min(max(RESERVED_FRACTION * (end or 0.0), MIN_RESERVED_S), MAX_RESERVED_S)

    def over(self) -> bool:
        """Return whether the run has to stop now; to be called once after each step."""
        now = self._now()
        if self._end is None:
            return False
        if self._last is None:
            self._first = now
        else:
            self._longest = max(self._longest, now - self._last)
            self._steps += 1
        self._last = now
        return now + self.reserve >= self._end

    @property
    def reserve(self) -> float:
        """Seconds before the time limit that are reserved for stopping, as the class describes."""
        spent = (self._last or 0.0) - self._first
        mean = spent / self._steps if self._steps else 0.0
        return self._minimum_s + 2 * self._longest + self._lag * mean


class Stopper(Hook):
    """Hook that ends the run early: on a signal, on the file RUN/STOP, or before a time limit.

    The signals are SIGTERM, SIGUSR1 and SIGUSR2. The run also ends if the launcher's process that
    started a rank has exited, because the launcher could no longer end that rank. The ranks agree
    by a non-blocking reduction, which is started after one step and read ``lag`` steps later, so
    that no step waits for it. This object is a context manager: it handles the signals inside its
    block, and then restores the former handlers.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    LAG = 4

    def __init__(self, world: World, folder: Path, end: float | None = None, lag: int = LAG):
        """Prepare the agreement of the ranks; on rank 0, report an end time that has passed.

        :param world: ranks of the run; rank 0 looks for the file STOP
        :param folder: the run directory
        :param end: seconds from now until the process must have exited; None: no limit
        :param lag: number of calls of :meth:`wants_stop` between the start of an agreement and its
            result
        """
        self._lag = lag
        self._world = world
        self._file = folder / "STOP"
        self._clock = Reserve(end, lag=2 * lag)
        self._is_due = False
        self._looked_at = float("-inf")
        self._launcher = os.getppid()
        self._warnings = list[str]()
        self._pending: Agreement | None = None
        if world.rank == 0 and (note := describe_past_end()):
            print_note_once(note)

    def __enter__(self) -> Self:
        self._before = self.listen()
        return self

    def listen(self) -> dict[int, Any]:
        """Handle the signals, if this is the main thread; return the former handlers.

        In another thread, the result is empty.
        """
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._request_stop) for number in self.SIGNALS}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request_stop(self, number, frame) -> None:
        self._is_due = True
        if number == signal.SIGTERM:
            deadline.this_rank.sigterm_time = time.monotonic()

    def due(self) -> bool:
        """Return whether this rank has a reason to stop.

        The reasons are a signal, a time limit of which only the reserved time is left, and those
        that :meth:`wants_stop` has noticed: the file STOP, and the exit of the launcher's process.
        """
        self._is_due = self._clock.over() or self._is_due
        return self._is_due

    def wants_stop(self, done: int) -> bool:
        """Return whether all ranks have agreed to stop after ``done`` steps.

        After every ``lag`` steps, this call reads the result of the last agreement. If the result
        is negative, the call starts the next agreement; otherwise, rank 0 removes the file STOP.
        After all other steps, the call returns False.
        """
        if not self.due() and self._world.size > 1 and os.getppid() != self._launcher:
            self._is_due = True
            self._warnings.append(
                "stopped because the launcher's process has exited: resume the run"
            )
        if done % self._lag:
            return False
        agreed = self._pending
        self._pending = None
        if agreed is not None and agreed.read():
            # Waits must not end early because of the signal: saving may take long.
            deadline.this_rank.sigterm_time = math.inf
            if self._world.rank == 0:
                self.remove_stop_file()
            return True
        now = time.monotonic()
        if self._world.rank == 0 and now - self._looked_at > 1.0:
            # os.access is used because exists() would raise an error of the disk.
            self._looked_at, self._is_due = now, self._is_due or os.access(self._file, os.F_OK)
        self._pending = self._world.start_agree(int(self._is_due))
        return False

    def remove_stop_file(self) -> None:
        """Remove the file STOP, so that the next run does not end at once."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:  # STOP may be a folder, or another user may own it.
            text = f"{self._file} can't be removed: {error.strerror}; remove it by hand"
            print_note(f"{text}, or the next run stops at once")

    def start(self, progress, assembly) -> None:
        """Discard an agreement from before a rank failure, which will never be complete."""
        self._pending = None
        self._warnings = progress.warnings

    def stop(self, progress, summary: dict[str, Any]) -> None:
        if self._pending is not None:
            self._pending.read()
        # The file STOP may have been created after the last agreement. It must not stop the next
        # run.
        if self._world.rank == 0 and summary.get("finished"):
            self.remove_stop_file()
