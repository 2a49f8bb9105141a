"""Looks after NCCL: an error between calls, a lost device or a hang is named before the deadline.

The host doesn't wait for collectives, so what goes wrong in one shows where the host waits for
something else, or never. A thread looks at the communicators and at events behind each call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpigossip.groups.base import GroupError

EVERY_S = 0.5
"""Seconds between two looks."""
GRACE_S = 10.0
"""Seconds in which the training thread may raise the failure itself, unless it hangs too."""


@dataclass
class Call:
    """A collective on its way: events before and behind it, one a device."""

    name: str
    began: float
    before: Sequence[Any]
    behind: Sequence[Any]


class Watchdog:
    """A thread that ends the job where collectives don't; :meth:`check` raises what it found."""

    def __init__(
        self,
        comms: Sequence[Any],
        devices: Sequence[str],
        timeout_s: float,
        remedy: str,
        end: Callable[[str], None] | None = None,
    ):
        """``end``: what is done at last; None: :func:`end_job`."""
        self._comms, self._devices, self.timeout_s = comms, devices, timeout_s
        self._remedy, self._end = remedy, end or end_job
        # streams keep the order: of what is on its way the first and the last call tell all
        self._first: Call | None = None
        self._last: Call | None = None
        self._lock = threading.Lock()
        self._failure = ""
        self._stop, self._noticed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpigossip-nccl", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def track(self, name: str, before: Sequence[Any], behind: Sequence[Any]) -> None:
        """A collective was begun; events on each device before and behind it."""
        call = Call(name, time.monotonic(), before, behind)
        with self._lock:
            if self._first is None:
                self._first = call
            else:
                self._last = call

    def check(self) -> None:
        """Raise GroupError where something was found."""
        if self._failure:
            self._noticed.set()
            raise GroupError(self._failure)

    def look(self, now: float) -> str:
        """What is wrong at this time (monotonic, seconds); "" where nothing is."""
        for comm, device in zip(self._comms, self._devices, strict=True):
            try:
                comm.check_async_error()
            except (RuntimeError, KeyError) as error:  # KeyError: CuPy has no name for the code
                return f"NCCL on {device} failed between two calls: {error}; {self._remedy}"
        while (call := self._first) is not None:
            open_on = []
            for device, event in zip(self._devices, call.behind, strict=True):
                try:
                    if not event.query():
                        open_on.append(device)
                except RuntimeError as error:
                    said = str(error).splitlines()[0]
                    return f"{device} was lost during NCCL {call.name}: {said}; {self._remedy}"
            if open_on:
                late = now - call.began > self.timeout_s
                return self._late(call, open_on) if late else ""
            with self._lock:
                self._first, self._last = self._last, None
        return ""

    def _late(self, call: Call, open_on: list[str]) -> str:
        pairs = zip(self._devices, call.before, strict=True)
        stuck = [device for device, event in pairs if not event.query()]
        what = (
            f"{', '.join(stuck)} still computes what comes before it"
            if stuck
            else f"{', '.join(open_on)} has begun and doesn't finish it"
        )
        return (
            f"NCCL {call.name} over {', '.join(self._devices)} is not done after "
            f"{self.timeout_s:g} s (node.timeout_s): {what}; {self._remedy}"
        )

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._failure = self.look(time.monotonic())
            if self._failure:
                # its memory holds no valid numbers: nobody may go on and save them
                if not self._noticed.wait(GRACE_S) and not self._stop.is_set():
                    self._end(self._failure)
                return

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * EVERY_S)


def end_job(text: str) -> None:
    """End the job from a thread: the hook of an open world aborts all ranks, else this process."""
    try:
        raise GroupError(text)
    except GroupError as error:
        args = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(args))
    sys.stderr.flush()
    os._exit(1)
