"""Progress of a run, and the seconds that it has spent on each purpose.

A run that was interrupted and resumed has several attempts. Times are sums over all attempts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config import Job
from mpigossip.config.readable import print_note
from mpigossip.engine.measurements import StepMetrics
from mpigossip.training.evaluate import Evaluation
from mpigossip.training.task import CLASSIFICATION, Objective


@dataclass
class Progress:
    """Progress of a run, which hooks receive in each call."""

    job: Job
    folder: Path
    nodes: int
    """Number of nodes that are in the run now."""
    steps_per_epoch: int = 0
    """Number of steps per epoch; 0 if it is not known, as in custom loops."""
    total_steps: int = 0
    """Number of steps of the whole run; 0 if it is not known."""
    samples_per_step: int = 0
    """Number of samples in a step of all nodes; 0 if it is not known."""
    objective: Objective = CLASSIFICATION
    """Task of the job."""
    text: str = ""
    """The job as the log stores it."""
    about: Callable[[], Sequence[tuple[str, str]]] = tuple
    """Function that returns the overview at the start of the run, as pairs (label, text)."""
    asked: int = 0
    """Number of nodes with which this attempt began; larger than ``nodes`` after a rank failure."""
    first_step: int = 0
    """Number of the step at which this attempt began."""
    shift: int = 0
    """Number of the step from which epochs are counted."""
    seconds_before: float = 0.0
    """Seconds that the earlier attempts at this run took."""
    began: float = field(default_factory=time.perf_counter)
    """Time by `time.perf_counter` at which this attempt began."""
    evaluation: Evaluation | None = None
    """Result of the last evaluation; None before the first one."""
    lost: list[str] = field(default_factory=list)
    """Description of each failed rank: its number, its host and the step of its failure."""
    warnings: list[str] = field(default_factory=list)
    """Warnings that the summary repeats."""
    checkpoint: Path | None = None
    """Newest complete checkpoint, on rank 0."""
    lost_at: int = 0
    """Number of steps that were done when the first rank failed."""

    def warn(self, text: str) -> None:
        """Print the warning ``text`` now, and again with the summary; called on rank 0 only."""
        print_note(text)
        self.warnings.append(text)

    def epoch(self, step: int) -> float:
        """Return the number of epochs, with fractions, that are done after ``step`` steps.

        The number of steps per epoch must be known.
        """
        return (step - self.shift) / self.steps_per_epoch

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including earlier attempts."""
        return self.seconds_before + time.perf_counter() - self.began


SPENT = "spent/"
"""Prefix of the keys under which a checkpoint contains the seconds of each purpose."""


@dataclass
class Tally:
    """Sums over the steps of a rank: seconds by purpose, and trained samples.

    The purposes are the keys of `StepMetrics.seconds`, such as "compute_s" and "exchange_s".
    """

    spent: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    def add(self, record: StepMetrics, samples: int) -> None:
        for name, seconds in record.seconds.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        self.samples += samples

    def numbers(self) -> dict[str, float]:
        """Return the seconds by purpose, with the names that they have in a checkpoint."""
        return {f"{SPENT}{name}": seconds for name, seconds in self.spent.items()}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Restore seconds and samples from ``numbers``, the counters of a checkpoint."""
        self.samples = int(numbers.get("samples", 0))
        spent = [name for name in numbers if name.startswith(SPENT)]
        self.spent = {name.removeprefix(SPENT): float(numbers[name]) for name in spent}


def shares(spent: Sequence[Mapping[str, float]], samples: int) -> dict[str, float]:
    """Return the mean over ranks of the seconds of each purpose, and the rate of training.

    The rate has the key "samples_per_second": it is ``samples`` divided by the sum of these means,
    or 0 if the sum is 0.

    :param spent: for each rank, its seconds by purpose
    :param samples: number of samples that all ranks together have trained
    """
    names = dict.fromkeys(name for rank in spent for name in rank)
    means = {name: float(np.mean([rank.get(name, 0.0) for rank in spent])) for name in names}
    busy = sum(means.values())
    return means | {"samples_per_second": samples / busy if busy else 0.0}
