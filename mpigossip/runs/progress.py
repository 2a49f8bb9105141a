"""Progress of a run, and its time by purpose, earlier attempts included."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config import Job
from mpigossip.config.readable import print_note
from mpigossip.engine.measurements import Record
from mpigossip.training.evaluate import Evaluation
from mpigossip.training.task import CLASSIFICATION, Objective


@dataclass
class Progress:
    """Progress of a run, as hooks see it."""

    job: Job
    folder: Path
    nodes: int
    """that are in the run now"""
    steps_per_epoch: int = 0
    """0: not known, as in custom loops; so with the next two"""
    total_steps: int = 0
    samples_per_step: int = 0
    """over all nodes"""
    objective: Objective = CLASSIFICATION
    """the task of a job"""
    text: str = ""
    """the job as it stands in the log"""
    about: Callable[[], Sequence[tuple[str, str]]] = tuple
    """what the first screen says, as (word, text)"""
    asked: int = 0
    """nodes that the run was started with; more than ``nodes`` after a rank failure"""
    first_step: int = 0
    shift: int = 0
    """steps that epochs are counted from, see Trainer"""
    seconds_before: float = 0.0
    """of the runs that this one continues"""
    began: float = field(default_factory=time.perf_counter)
    evaluation: Evaluation | None = None
    lost: list[str] = field(default_factory=list)
    """lost ranks, a line each"""
    warnings: list[str] = field(default_factory=list)
    """warnings that the summary repeats"""
    checkpoint: Path | None = None
    """the newest complete one, on rank 0"""
    lost_at: int = 0
    """steps done at the first rank failure since all nodes were there"""

    def warn(self, text: str) -> None:
        """Print the warning ``text`` at once, and again in the summary; called on rank 0."""
        print_note(text)
        self.warnings.append(text)

    def epoch(self, step: int) -> float:
        """Return the epochs done at ``step``."""
        return (step - self.shift) / self.steps_per_epoch

    @property
    def seconds(self) -> float:
        """Since the run began, the time of the runs before included."""
        return self.seconds_before + time.perf_counter() - self.began


SPENT = "spent/"
"""Prefix of the purposes' names in a checkpoint."""


@dataclass
class Tally:
    """Seconds by purpose, as in a step's record, and samples trained on in them."""

    spent: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    def add(self, record: Record, samples: int) -> None:
        for name, seconds in record.seconds.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        self.samples += samples

    def numbers(self) -> dict[str, float]:
        """Return the seconds for a checkpoint."""
        return {f"{SPENT}{name}": seconds for name, seconds in self.spent.items()}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Restore both from a checkpoint."""
        self.samples = int(numbers.get("samples", 0))
        spent = [name for name in numbers if name.startswith(SPENT)]
        self.spent = {name.removeprefix(SPENT): float(numbers[name]) for name in spent}


def shares(spent: Sequence[Mapping[str, float]], samples: int) -> dict[str, float]:
    """Return mean seconds over ranks and samples per second, for a summary."""
    names = dict.fromkeys(name for one in spent for name in one)
    means = {name: float(np.mean([one.get(name, 0.0) for one in spent])) for name in names}
    busy = sum(means.values())
    return means | {"samples_per_second": samples / busy if busy else 0.0}
