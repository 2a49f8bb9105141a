"""Warnings from the log of a run: stragglers, divergence, and warnings of the cadence.

They use rows of the log that are gathered on rank 0 anyway, so they need no messages.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpigossip.config import LogSection
from mpigossip.runs.summary import SPLIT

Rows = Mapping[str, np.ndarray]
"""Columns of the log for consecutive steps: arrays (steps, nodes)."""

SMALL_DISTANCE = 1e-3
"""Consensus distance below which its growth is ignored."""


class Straggler:
    """Warning that a node computes ``times`` longer than the median, for ``seconds``."""

    def __init__(self, times: float, seconds: float, hosts: Sequence[str] = ()):
        """Prepare the warning.

        :param times: ratio to the median above which a node is slow; 0: never warn
        :param seconds: time for which a node has to be slow
        :param hosts: host of each node, which the warning names if they differ
        """
        self._times = times
        self._seconds = seconds
        self._hosts = hosts
        self._slow_s: np.ndarray | None = None
        self._warned: set[int] = set()

    def see(self, first: int, rows: Rows) -> list[str]:
        """Return warnings about the steps from ``first`` on, one each time a node becomes slow."""
        compute = rows["compute_s"]
        # Idle steps of a node do not count: they have no computation and no loss.
        worked = ~np.isnan(rows["loss"])
        # a program may log no loss; then all steps count
        worked |= ~worked.any(axis=1, keepdims=True) & ~np.isnan(compute)
        mean = np.where(worked, compute, 0.0).sum(axis=0) / np.maximum(worked.sum(axis=0), 1)
        awake = np.sort(mean[worked.any(axis=0)])
        if len(awake) < 2 or not self._times:
            return []
        # This is the lower median: of two nodes, the faster one is the reference.
        median = awake[(len(awake) - 1) // 2]
        slow = mean > self._times * median
        spent = sum(rows[name].sum(axis=0) for name in SPLIT if name in rows)
        before = np.zeros(len(mean)) if self._slow_s is None else self._slow_s
        self._slow_s = np.where(slow, before + spent, 0.0)
        self._warned &= set(np.flatnonzero(slow).tolist())
        late = set(np.flatnonzero(slow & (self._slow_s >= self._seconds)).tolist())
        lines = [
            self._line(node, first + len(compute), mean, median) for node in late - self._warned
        ]
        self._warned |= late
        return sorted(lines)

    def _line(self, node: int, step: int, mean: np.ndarray, median: float) -> str:
        host = f" on {self._hosts[node]}" if len(set(self._hosts)) > 1 else ""
        return (
            f"node {node}{host} is a straggler at step {step}: {mean[node]:.3g} s of compute "
            f"per step, {mean[node] / median:.1f} x the median of {len(mean)} nodes, for "
            f"{self._slow_s[node]:.0f} s; all nodes wait for it (possible causes: heat, another "
            "job, a slow data disk)"
        )


class Divergence:
    """Warning that the consensus distance has grown ``times``-fold within ``steps`` steps."""

    def __init__(self, times: float, steps: int):
        """Prepare the warning; distances below `SMALL_DISTANCE` count as `SMALL_DISTANCE`.

        :param times: factor of growth; 0: never warn
        :param steps: number of steps within which it is reached
        """
        self._times = times
        self._steps = steps
        self._recent: deque[tuple[int, float]] = deque()
        self._warned = False

    def see(self, first: int, rows: Rows) -> list[str]:
        lines = []
        values = rows["consensus_distance"].max(axis=1)
        measured = ~np.isnan(values) if self._times else np.zeros(len(values), bool)
        for index in np.flatnonzero(measured):
            step = first + int(index)
            value = float(values[index])
            while self._recent and self._recent[0][0] < step - self._steps:
                self._recent.popleft()
            before, minimum = min(
                ((then, max(earlier, SMALL_DISTANCE)) for then, earlier in self._recent),
                key=lambda pair: pair[1],
                default=(step, float("inf")),
            )
            grown = value > self._times * minimum
            if grown and not self._warned:
                lines.append(
                    f"the nodes diverge: consensus distance {value:.2e} at step {step}, "
                    f"{value / minimum:.0f} x the value of step {before}; use a smaller "
                    "schedule.lr, a denser graph, or a cadence that averages more often"
                )
            self._warned = grown
            self._recent.append((step, value))
        return lines


class CadenceWarning:
    """Warning of the cadence about its state, printed once until the cadence has none."""

    def __init__(self, message: Callable[[], str]):
        self._message = message
        self._warned = False

    def see(self, first: int, rows: Rows) -> list[str]:
        message = self._message()
        warned = self._warned
        self._warned = bool(message)
        return [f"{message} (step {first + len(rows['loss'])})"] if message and not warned else []


def watchers(
    section: LogSection, hosts: Sequence[str] = (), cadence: Callable[[], str] = lambda: ""
) -> list[Straggler | Divergence | CadenceWarning]:
    """Return the warnings that section `[log]` asks for, and the warning of the cadence."""
    return [
        Straggler(section.straggler_times, section.straggler_s, hosts),
        Divergence(section.diverging_times, section.diverging_steps),
        CadenceWarning(cadence),
    ]
