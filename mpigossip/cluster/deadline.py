"""Waiting with a limit: nothing in this package waits without one."""

import time
from collections.abc import Callable
from typing import Any


class LateError(TimeoutError):
    """Something awaited didn't come before its deadline; the message names what."""


class Deadline:
    """A point in time, `seconds` after it was made, until which one waits."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start = time.monotonic()

    def wait(self, predicate: Callable[[], Any], what: Callable[[], str]) -> float:
        """Polls until `predicate()` is true; returns the seconds waited.

        First it only yields the core, then it sleeps for 20 µs, growing to 1 ms: an answer that
        is near costs little latency, a far one little of the core that others compute on. At the
        deadline raises LateError with `what()`, which is called only then.
        """
        begin = time.monotonic()
        polls, pause = 0, 20e-6
        while not predicate():
            if time.monotonic() - self._start >= self.seconds:
                raise LateError(f"{what()} (waited {self.seconds:g} s)")
            polls += 1
            time.sleep(0 if polls <= 50 else pause)
            if polls > 50:
                pause = min(1e-3, 1.2 * pause)
        return time.monotonic() - begin
