"""Advice for a training of members in a folder (`mpigossip plan --members`): H, lease, files."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from mpigossip.algorithms.cadence import period_of
from mpigossip.config import JobError
from mpigossip.config.readable import aligned, format_bytes, pluralize, three_digits
from mpigossip.members.place import KEEP, LEASES
from mpigossip.training.costs import Subject, exchanges, memory
from mpigossip.training.rules import check_member

SHARE = 0.05
"""Largest fraction of the training time that reading models may take."""
ROUNDS = 10
"""Smallest number of rounds of each member. With fewer rounds, models are averaged too rarely."""
RECORD = 600
"""Assumed size of a record in bytes."""


@dataclass(frozen=True)
class Advice:
    """Prediction for a training with a number of concurrent members: bytes, seconds, files."""

    members: int
    model: int
    """Bytes of a published model with its optimizer's state."""
    step_s: float
    """Seconds of a step without reading."""
    rate: float
    """Bytes per second of the folder, for all members together."""
    steps: int
    """Number of steps of the whole training."""
    period: int
    """Period H of the job."""
    keep_every: int = 0
    """`members.keep_every` of the job: number of rounds per model that is kept; 0: none is."""

    @property
    def read_s(self) -> float:
        """Seconds that a member needs to read a model while all other members read, too.

        For M members, models of s bytes and B bytes per second in all, this is M s / B.
        """
        return self.model * self.members / self.rate

    @property
    def share(self) -> float:
        """Fraction of the time of a round that reading a model takes, with the job's H.

        Writing does not count, because it overlaps with training.
        """
        return self.read_s / (self.period * self.step_s + self.read_s)

    @property
    def min_period(self) -> int:
        """Smallest H with which reading a model takes at most the fraction `SHARE` of a round."""
        return max(1, ceil((1 / SHARE - 1) * self.read_s / self.step_s))

    @property
    def lease_s(self) -> float:
        """Shortest sensible lease in seconds: five rounds with the job's H.

        If `min_period` is larger than the job's H, the rounds are counted with `min_period` steps.
        """
        return 5 * (max(self.period, self.min_period) * self.step_s + self.read_s)

    def files(self, period: int, claim_rounds: int) -> int:
        """Return the number of files at the end of the training.

        These are records, claims, and some files for each member.

        :param period: H, the number of steps in a round
        :param claim_rounds: number of rounds for which a member claims chunks at once
        """
        chunks = -(-self.steps // period)
        claims = 2 * -(-chunks // claim_rounds)
        return chunks + claims + (KEEP + 4) * self.members + self.kept(period)

    def kept(self, period: int) -> int:
        """Return the largest number of models that are never removed, if H is ``period``."""
        chunks = -(-self.steps // period)
        return chunks // self.keep_every if self.keep_every else 0

    @property
    def disk(self) -> int:
        """Number of bytes of models and records at the end, with the job's H."""
        models = KEEP * self.members + self.kept(self.period)
        return models * self.model + RECORD * -(-self.steps // self.period)


def advise(what: Subject, members: int, step_s: float, rate: float, epochs: float) -> Advice:
    """Return the advice for a job.

    :param what: the job and its sizes
    :param members: number of concurrent members
    :param step_s: seconds of a step
    :param rate: bytes per second of the folder, for all members together
    :param epochs: number of epochs
    :raises JobError: if members can't train the job, or if each would have fewer than `ROUNDS`
        rounds
    """
    check_member(what.job)
    traffic = exchanges(what, 2)
    period = period_of(what.job.cadence.options)
    steps = max(1, round(epochs * what.steps_per_epoch(1)))
    model = memory(what, traffic)["snapshot for checkpoints"]
    keep_every = what.job.members.keep_every
    advice = Advice(members, model, step_s, rate, steps, period, keep_every)
    if advice.min_period * members * ROUNDS > steps:
        raise JobError(
            f"{members:,} members that share {format_bytes(rate)}/s need H = {advice.min_period:,} "
            f"steps between exchanges of {format_bytes(model)}, but the training has {steps:,} "
            f"steps: fewer than {ROUNDS} rounds each; use at most {_max_members(advice):,} "
            "members, or train longer"
        )
    return advice


def _max_members(advice: Advice) -> int:
    """Return the largest number of members for which each member has at least `ROUNDS` rounds.

    The result is at least 1. The smallest H for M members is M H₁, where H₁ is the smallest H for
    one member. Each member then has steps / (H₁ M²) rounds.
    """
    minimum_per_member = (1 / SHARE - 1) * advice.model / advice.rate / advice.step_s
    return max(
        1, int(min((advice.steps / (ROUNDS * minimum_per_member)) ** 0.5, advice.steps / ROUNDS))
    )


def text(what: Subject, every: Sequence[Advice]) -> str:
    """Return the advice as text: a table with a row per number of members, and explanations."""
    section = what.job.members
    model = every[0].model
    head = ["members", "read", "at your H", "H for 5 %", "lease", "files", "disk"]
    rows = [
        [
            f"{advice.members:,}",
            f"{three_digits(advice.read_s)} s",
            f"{advice.share:.1%}",
            f"{advice.min_period:,}",
            f"{max(120, ceil(advice.lease_s)):,} s",
            f"{advice.files(advice.period, section.claim_rounds):,}",
            format_bytes(advice.disk),
        ]
        for advice in every
    ]
    first = every[0]
    kept = first.kept(first.period)
    keeps = [
        f"members.keep_every = {first.keep_every} keeps up to {pluralize(kept, 'model')}, "
        f"{format_bytes(kept * model)} of the disk."
    ]
    return "\n".join(
        [
            f"{format_bytes(model)} of model and state, {three_digits(first.step_s)} s per step, "
            f"H = {first.period:,} (cadence.period),",
            f"{format_bytes(first.rate)}/s of the folder for all members",
            "",
            aligned([head, *rows]),
            "",
            "read: seconds to read one model; at your H: their share of a round.",
            "Set cadence.period to H for 5 % or more, members.lease_s to the lease or more",
            f"(now {section.lease_s:g}). A dead member delays the end by one lease, at most by "
            f"{LEASES} leases.",
            *(keeps if first.keep_every else []),
        ]
    )
