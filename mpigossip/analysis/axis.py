"""What panels are drawn against: steps or epochs, and the time of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpigossip.analysis.compared import LoggedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLOCKS = ((2 * 3600, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))
"""From so many seconds on: what a unit is, and its name."""


@dataclass(frozen=True)
class Axis:
    """What a panel is drawn against: a label, and for a run the place of each of some steps."""

    label: str
    at: Callable[[LoggedRun, np.ndarray], np.ndarray]

    def dress(self, axes: Axes, runs: Sequence[LoggedRun]) -> None:
        """Label and limits; the axis begins at 0."""
        axes.set_xlabel(self.label)
        end = max(float(self.at(run, np.array([run.last]))[0]) for run in runs)
        axes.set_xlim(0, 1.02 * end or 1)


def steps(runs: Sequence[LoggedRun]) -> Axis:
    """The step, or the epoch if a step isn't the same part of it in all runs."""
    lengths = {run.epoch_steps for run in runs}
    if len(lengths) > 1 and all(lengths):
        return Axis("epoch", lambda run, at: at / run.epoch_steps)
    (length,) = lengths if len(lengths) == 1 else (0.0,)
    label = f"step  (epoch = {length:.6g} steps)" if length else "step"
    return Axis(label, lambda run, at: np.asarray(at, float))


def clock(runs: Sequence[LoggedRun]) -> Axis:
    """The time of training, in a unit that fits the longest run.

    Virtual time where all runs have it: here they may have been simulated one after the other.
    """
    virtual = all(run.has_virtual_time for run in runs)
    of = LoggedRun.virtual_seconds if virtual else LoggedRun.seconds
    longest = max(float(of(run, np.array([run.last]))[0]) for run in runs)
    unit, word = next((unit, word) for least, unit, word in CLOCKS if longest >= least)
    label = f"time of training ({word}; evaluations and checkpoints left out)"
    if virtual:
        label = f"virtual time of training ({word}; by the job's [clock])"
    return Axis(label, lambda run, at: of(run, at) / unit)
