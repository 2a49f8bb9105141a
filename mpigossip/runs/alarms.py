"""Warnings of a run about slow nodes (stragglers), diverging nodes, and the state of the cadence.

Rank 0 computes the warnings from the rows that it has gathered for the log, so that they need no
further messages between ranks.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpigossip.config import LogSection
from mpigossip.runs.summary import SPLIT

Rows = Mapping[str, np.ndarray]
"""Columns of the log by name; each array has the shape (consecutive steps, nodes)."""

SMALL_DISTANCE = 1e-3
"""Consensus distance below which its growth is ignored."""


class Straggler:
    """Warning about each node that has computed much longer than the other nodes for some time."""

    def __init__(self, times: float, seconds: float, hosts: Sequence[str] = ()):
        """Prepare the warning.

        :param times: a node is slow if its computation time per step is more than ``times`` times
            the median of all nodes; 0: never warn
        :param seconds: time in seconds for which a node has to be slow before the warning
        :param hosts: name of the host of each node; if the hosts differ, the warning names the host
        """
        self._times = times
        self._seconds = seconds
        self._hosts = hosts
        self._slow_s: np.ndarray | None = None
        self._warned: set[int] = set()

    def see(self, first: int, rows: Rows) -> list[str]:
        """Return a warning for each node that has been slow for long enough.

        A node is reported once, and again only if it was not slow in the rows of a call in between.

        :param first: number of the first step in ``rows``
        :param rows: columns of the log for these steps
        """
        compute = rows["compute_s"]
        # Idle steps of a node do not count: they have no computation and no loss.
        worked = ~np.isnan(rows["loss"])
        # A program may log no loss. Then all steps count.
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
            f"{self._slow_s[node]:.0f} s; the nodes of a synchronous run wait for it (possible "
            "causes: heat, another job, a slow data disk)"
        )


class Divergence:
    """Warning that the consensus distance has grown by a large factor within some steps."""

    def __init__(self, times: float, steps: int):
        """Prepare the warning.

        Growth is measured from the smallest distance of the last steps, but from `SMALL_DISTANCE`
        if that is larger.

        :param times: factor of growth above which there is a warning; 0: never warn
        :param steps: number of steps over which the growth is measured
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
    """Warning about the state of the cadence, printed once until the cadence withdraws it."""

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
    """Return the objects that watch the rows of the log and return the warnings of a run.

    :param section: section `[log]` of the job, with the limits above which there is a warning
    :param hosts: name of the host of each node
    :param cadence: function that returns the present warning of the cadence; "" if there is none
    """
    return [
        Straggler(section.straggler_times, section.straggler_s, hosts),
        Divergence(section.diverging_times, section.diverging_steps),
        CadenceWarning(cadence),
    ]
