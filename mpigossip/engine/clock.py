"""Where the seconds of a step go."""

from __future__ import annotations

import time

from mpigossip.mixing.base import Mixer


class Clock:
    """Seconds of a step by what they went to; waiting for other nodes is told apart as idle."""

    def __init__(self, mixer: Mixer):
        """Start the first lap."""
        self.seconds = {"compute_s": 0.0, "node_s": 0.0, "exchange_s": 0.0, "idle_s": 0.0}
        self._mixer, self._waited = mixer, mixer.waited
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap."""
        at, waited = time.perf_counter(), self._mixer.waited
        idle = min(waited - self._waited, at - self._at)
        self.seconds[name] += at - self._at - idle
        self.seconds["idle_s"] += idle
        self._at, self._waited = at, waited

    def skip(self) -> None:
        """The time since the last lap is none of the step's."""
        self._at, self._waited = time.perf_counter(), self._mixer.waited
