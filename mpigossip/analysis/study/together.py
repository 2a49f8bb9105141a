"""Runs of a study with all seeds of a point in one process, vectorized: faster, not to the bit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from mpigossip.analysis.study.running import Found, Key, Runner


class TogetherRunner(Runner):
    """A `Runner` of points; what a point lacks a seed of is done anew with all of them."""

    def __init__(self, *arguments, **options):
        """As `Runner`."""
        super().__init__(*arguments, **options)
        self._groups: dict[Key, list[Key]] = {}

    def settings(self, key: Key) -> list[str]:
        """The run's, vectorized."""
        return [*super().settings(key), "node.vmap=true"]

    def fill(self, wanted: Sequence[Key]) -> dict[Key, Found]:
        """As `Runner`, by points: a run stands for all seeds of its point that are wanted."""
        points: dict[tuple, list[Key]] = {}
        for key in wanted:
            points.setdefault(key[:2], []).append(key)
        self._groups = {keys[0]: keys for keys in points.values()}
        return super().fill(wanted)

    def _do(self, keys: Sequence[Key]) -> list[str]:
        lacking = {key[:2] for key in keys}
        return super()._do([first for first in self._groups if first[:2] in lacking])

    def _start(self, key: Key) -> subprocess.Popen:
        place = self.place(key)
        seeds = ",".join(str(seed) for _, _, seed in self._groups[key])
        words = ["--nodes", str(key[0].nodes), "--seeds", seeds, *self.settings(key)]
        return self._simulated(place, [*words, f"run.output={place.parent}"])
