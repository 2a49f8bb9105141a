"""Advise members that train through a folder (`mpigossip plan --members`): H, files, waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from mpigossip.config import JobError
from mpigossip.config.readable import aligned, format_bytes
from mpigossip.mixing.members.place import KEEP, LEASES
from mpigossip.runs.members.join import check_fit
from mpigossip.training.costs import Subject, exchanges, memory

SHARE = 0.05
"""Of the time that reading models may take."""
ROUNDS = 10
"""Of each member, fewer of which average too seldom."""
RECORD = 600
"""Bytes of a record, about."""


@dataclass(frozen=True)
class Advice:
    """A training by so many members at once; bytes, seconds, and bytes a second of the folder."""

    members: int
    model: int
    """bytes of a published model, with its optimizer's state"""
    step_s: float
    rate: float
    """of all members together"""
    steps: int
    """of the whole training"""
    period: int
    """H of the job"""

    @property
    def read_s(self) -> float:
        """Seconds to read a model while all others read one too: M s / B."""
        return self.model * self.members / self.rate

    @property
    def share(self) -> float:
        """Share of a round that reading takes, at the job's H; writing is hidden."""
        return self.read_s / (self.period * self.step_s + self.read_s)

    @property
    def least(self) -> int:
        """The smallest H at which reading takes at most `SHARE`."""
        return max(1, ceil((1 / SHARE - 1) * self.read_s / self.step_s))

    @property
    def lease_s(self) -> float:
        """Five rounds at the job's H, or at the smallest H where that is larger."""
        return 5 * (max(self.period, self.least) * self.step_s + self.read_s)

    def files(self, period: int, claim_rounds: int) -> int:
        """Files in the folder at the end: records, claims, and what each member leaves."""
        chunks = -(-self.steps // period)
        return chunks + 2 * -(-chunks // claim_rounds) + (KEEP + 4) * self.members


def advise(what: Subject, members: int, step_s: float, rate: float, epochs: float) -> Advice:
    """Return the advice for a job; JobError for what can't be a sensible training."""
    check_fit(what.job)
    made = exchanges(what, 2)
    period = int(what.job.cadence.options.get("period", 1))
    steps = max(1, round(epochs * what.steps_per_epoch(1)))
    model = memory(what, made)["snapshot for checkpoints"]
    found = Advice(members, model, step_s, rate, steps, period)
    if found.least * members * ROUNDS > steps:
        raise JobError(
            f"{members:,} members that share {format_bytes(rate)}/s need H = {found.least:,} steps "
            f"between exchanges of {format_bytes(model)}, and the training has {steps:,} steps: "
            f"fewer "
            f"than {ROUNDS} rounds each; take at most {_most(found):,} members, or train longer"
        )
    return found


def _most(advice: Advice) -> int:
    """Members at which each has `ROUNDS` rounds at the smallest H: M² ≤ steps / (H₁ rounds)."""
    one = (1 / SHARE - 1) * advice.model / advice.rate / advice.step_s
    return max(1, int(min((advice.steps / (ROUNDS * one)) ** 0.5, advice.steps / ROUNDS)))


def text(what: Subject, every: Sequence[Advice]) -> str:
    """A table with a row for each number of members, and what it means."""
    section = what.job.members
    model = every[0].model
    head = ["members", "read", "at your H", "H for 5 %", "lease", "files", "disk"]
    rows = [
        [
            f"{one.members:,}",
            f"{one.read_s:.3g} s",
            f"{one.share:.1%}",
            f"{one.least:,}",
            f"{max(120, ceil(one.lease_s)):,} s",
            f"{one.files(one.period, section.claim_rounds):,}",
            format_bytes(KEEP * one.members * model + RECORD * -(-one.steps // one.period)),
        ]
        for one in every
    ]
    first = every[0]
    return "\n".join(
        [
            f"{format_bytes(model)} of model and state, {first.step_s:.3g} s a step, H = "
            f"{first.period:,} "
            "(cadence.period),",
            f"{format_bytes(first.rate)}/s of the folder for all members",
            "",
            aligned([head, *rows]),
            "",
            "read: seconds to read one model; at your H: its share of a round.",
            "Set cadence.period to H for 5 % or more, members.lease_s to the lease or more",
            f"(now {section.lease_s:g}). A dead member holds up the end for a lease, {LEASES} at "
            f"most.",
        ]
    )
