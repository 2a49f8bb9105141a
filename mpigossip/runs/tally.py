"""What a run has spent its time on, the lives before included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpigossip.engine.measurements import Record

SPENT = "spent/"
"""Before the names of what seconds went to, in a checkpoint."""


@dataclass
class Tally:
    """Seconds by what they went to, as in a step's record, and samples trained on in them."""

    spent: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    def add(self, record: Record, samples: int) -> None:
        """A step more."""
        for name, seconds in record.seconds.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        self.samples += samples

    def numbers(self) -> dict[str, float]:
        """For a checkpoint."""
        return {f"{SPENT}{name}": seconds for name, seconds in self.spent.items()}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.samples = int(numbers.get("samples", 0))
        spent = [name for name in numbers if name.startswith(SPENT)]
        self.spent = {name.removeprefix(SPENT): float(numbers[name]) for name in spent}


def shares(spent: Sequence[Mapping[str, float]], samples: int) -> dict[str, float]:
    """Mean seconds over ranks, and the speed in them, for a summary."""
    names = dict.fromkeys(name for one in spent for name in one)
    means = {name: float(np.mean([one.get(name, 0.0) for one in spent])) for name in names}
    busy = sum(means.values())
    return means | {"samples_per_second": samples / busy if busy else 0.0}
