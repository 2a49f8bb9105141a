"""Where a run stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpigossip.config import Job
from mpigossip.config.readable import note
from mpigossip.training.evaluate import Evaluation
from mpigossip.training.task import CLASSIFICATION, Objective


@dataclass
class Progress:
    """Where a run stands; what hooks are shown."""

    job: Job
    folder: Path
    nodes: int
    steps_per_epoch: int
    total_steps: int
    """0: not known"""
    samples_per_step: int
    """over all nodes; 0: not known"""
    objective: Objective = CLASSIFICATION
    """the task of a job"""
    text: str = ""
    """the job as it stands in the log"""
    about: Callable[[], Sequence[tuple[str, str]]] = tuple
    """what the first screen says, as (word, text)"""
    asked: int = 0
    """nodes that the run was started with; more than ``nodes`` after the loss of a rank"""
    first_step: int = 0
    shift: int = 0
    """steps that epochs are counted from, see Trainer"""
    seconds_before: float = 0.0
    """of the runs that this one continues"""
    began: float = field(default_factory=time.perf_counter)
    evaluation: Evaluation | None = None
    lost: list[str] = field(default_factory=list)
    """what was lost on the way, a line each"""
    warnings: list[str] = field(default_factory=list)
    """what else a user should know of at the end"""
    checkpoint: Path | None = None
    """the newest whole one, on rank 0"""
    lost_at: int = 0
    """steps done at the first loss since all nodes were there"""

    def warn(self, text: str) -> None:
        """Say something at once, and again in the summary; called on rank 0."""
        note(text)
        self.warnings.append(text)

    def epoch(self, step: int) -> float:
        """Epochs done at a step."""
        return (step - self.shift) / self.steps_per_epoch

    @property
    def seconds(self) -> float:
        """Since the run began, the time of the runs before included."""
        return self.seconds_before + time.perf_counter() - self.began
