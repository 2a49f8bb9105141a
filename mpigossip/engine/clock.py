"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpigossip.mixing.base import Mixer


class Clock:
    """Seconds of a step by what they went to; waiting for other nodes is told apart as idle."""

    def __init__(self, mixer: Mixer):
        """``mixer``: knows how long it has waited."""
        self._mixer, self.counting = mixer, False
        self.seconds: dict[str, float] = {}
        self._at = self._waited = 0.0

    def begin(self) -> None:
        """Time from now on is the next step's, unless that is counted already."""
        if self.counting:
            return
        self.seconds = {"compute_s": 0.0, "node_s": 0.0, "exchange_s": 0.0, "idle_s": 0.0}
        self.counting = True
        self.skip()

    def lap(self, name: str) -> None:
        """Book the time since the last lap."""
        at, waited = time.perf_counter(), self._mixer.wait_seconds
        idle = min(waited - self._waited, at - self._at)
        self.seconds[name] += at - self._at - idle
        self.seconds["idle_s"] += idle
        self._at, self._waited = at, waited

    def skip(self) -> None:
        """The time since the last lap is none of the step's."""
        self._at, self._waited = time.perf_counter(), self._mixer.wait_seconds

    def end(self) -> dict[str, float]:
        """The seconds of the step, which is over."""
        self.counting = False
        return self.seconds

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is done inside is none of a step's time."""
        if self.counting:
            self.lap("compute_s")
        yield
        self.skip()
