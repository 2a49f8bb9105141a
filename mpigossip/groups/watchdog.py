"""Watchdog for collectives on GPUs: the host doesn't wait for them, so a thread checks them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mpigossip.groups.base import GroupError

EVERY_S = 0.5
"""Seconds between two checks."""
GRACE_S = 10.0
"""Seconds in which the training thread may raise the failure itself, unless it hangs too."""


class Watchdog:
    """A thread that ends the job if a collective fails or isn't done in time."""

    def __init__(self, timeout_s: float, remedy: str, end: Callable[[str], None] | None = None):
        """``end``: called at last; None: :func:`end_job`."""
        self.timeout_s, self._remedy, self._end = timeout_s, remedy, end or end_job
        self._calls: deque[tuple[str, float, Sequence[tuple[str, Any]]]] = deque()
        self._failure = ""
        self._stop, self._noticed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpigossip-watchdog", daemon=True)

    def start(self) -> None:
        """Start to check."""
        self._thread.start()

    def track(self, call: str, works: Sequence[tuple[str, Any]]) -> None:
        """Watch a collective that was begun: device and torch's work of each slot."""
        self._calls.append((call, time.monotonic(), works))

    def check(self) -> None:
        """Raise GroupError if a failure was found."""
        if self._failure:
            self._noticed.set()
            raise GroupError(self._failure)

    def look(self, now: float) -> str:
        """Return the failure at this time (monotonic, seconds), or an empty string."""
        while self._calls:
            call, began, works = self._calls[0]
            open_on = []
            for device, work in works:
                try:
                    if not work.is_completed():
                        open_on.append(device)
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    return f"{device} was lost during {call}: {reason}; {self._remedy}"
            if open_on:
                if now - began <= self.timeout_s:
                    return ""
                where = ", ".join(sorted({*open_on}))
                limit = f"{self.timeout_s:g} s (node.timeout_s)"
                return f"{call} is not done on {where} after {limit}; {self._remedy}"
            self._calls.popleft()
        return ""

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._failure = self.look(time.monotonic())
            if self._failure:
                # the vector is invalid: nobody may go on and save it
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
