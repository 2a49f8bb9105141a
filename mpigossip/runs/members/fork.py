"""`mpigossip replay --fork` and `--blame`: repeat a training of members with one thing changed."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mpigossip import config
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import Job, JobError
from mpigossip.config.readable import aligned, pluralize, print_note
from mpigossip.members.live import digest, write_checkpoint
from mpigossip.members.place import BEHIND, FOLDERS, Place, record_name
from mpigossip.members.records import End, Record, RecordStore, Version
from mpigossip.runs.members.fork_logs import ForkLogs
from mpigossip.runs.members.fork_schedule import (
    Change,
    ForkSchedule,
    recorded_turns,
    rescaled_turns,
)
from mpigossip.runs.members.join import FORMAT, JOB, plan_of
from mpigossip.runs.members.member import Member
from mpigossip.runs.members.ranks import for_ranks
from mpigossip.runs.members.replay import ReplayLog, repeat_round, training_in
from mpigossip.runs.start_and_resume import differing
from mpigossip.runs.summary import number
from mpigossip.store import checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.log_reading import FORK
from mpigossip.store.manifest import Number
from mpigossip.training.assemble import Assembly, assemble, load
from mpigossip.training.evaluate import Evaluation, evaluate
from mpigossip.training.rules import check_member

CHANGEABLE = ("cadence.period", "graph", "algorithm", "local", "schedule")
"""Setting and sections that a fork may change."""
UNCHANGEABLE = ("algorithm.name", "algorithm.style", "algorithm.accumulate", "local.name")
"""Settings of these sections on which the state of the optimizer or the batches depend."""


NO_CHANGE = Change()


class Periods(NamedTuple):
    """Numbers H of steps per round, before and after the cut of a fork."""

    recorded: int
    fork: int


class ForkMember(Member):
    """Training of a member in a fork that changes the number of steps per round."""

    def __init__(self, assembly: Assembly, recorded_steps: int):
        """Prepare the engine of a job.

        :param assembly: trainer and engine of the changed job
        :param recorded_steps: number of steps of a recorded chunk
        """
        super().__init__(assembly)
        self.recorded_steps = recorded_steps
        self.chunks: Sequence[Sequence[int]] = ()
        """Steps of each chunk of the fork."""

    def train(self, exchange: Any, after: Any = lambda record, chunk: None) -> None:
        """Train chunks as `Member.train` does, but count progress in recorded chunks."""
        self.exchange = exchange
        while (chunk_and_progress := exchange.chunk()) is not None:
            chunk, progress = chunk_and_progress
            steps = self.chunks[chunk]
            ahead = max(progress * self.recorded_steps - steps[0], 0)
            for step in steps:
                self.data_step = step
                after(self.trainer.step(step, step + ahead), chunk)


class ForkLog(ReplayLog):
    """Records of a training up to a cut, and the rounds of a fork after it, without models.

    A round belongs to the past, which the fork does not change, if its age (`Round.age`) is at most
    the cut. The models on which such a round depends are older, so that they belong to the past,
    too.
    """

    done_text = "repeated"

    def __init__(
        self,
        place: Place,
        cut: int,
        change: Change = NO_CHANGE,
        periods: Periods | None = None,
        is_changed: bool = True,
        slots: int = 1,
    ):
        """Read the records and build the schedule of the fork.

        :param place: `Place` that reads the folder without joining
        :param cut: largest age of a round that stays as it is
        :param change: settings on which the schedule depends
        :param periods: numbers of steps per round, if the fork changes this number; None: it does
            not
        :param is_changed: whether the fork changes anything, so that models after the cut may
            differ from the records
        :param slots: number of slots of each member
        :raises JobError: if the training has not ended or has no rounds after the cut, if the place
            to leave out has no round after the cut, or if no other place has trained
        :raises StoreError: if a record is missing or unusable
        """
        super().__init__(place, slots)
        root = place.disk.root
        if not self.end:
            raise JobError(
                f'the training in "{root}" has not ended, but --fork and --blame compare final '
                f"models: run `mpigossip join {root}` until all chunks are trained"
            )
        self.check_complete()
        self.is_changed = is_changed
        self.periods = periods
        self.chunks: Sequence[Sequence[int]] = ()
        rounds = {v: record for v, record in self.rounds.items() if record is not None}
        for version in rounds:
            self.inputs(version)
        self.length = max(record.age for record in rounds.values())
        """Largest age of a recorded round."""
        later = [record for record in rounds.values() if record.age > cut]
        if not later:
            unit = "round" if place.plan.longest == 1 else "chunk"
            raise JobError(
                f'--fork {cut}: the longest chain of rounds of "{root}" has '
                f"{pluralize(self.length, unit)}; give a smaller number"
            )
        if change.without is not None and change.without not in {r.place for r in later}:
            raise JobError(
                f'--without {change.without}: this place of "{root}" has no round after round '
                f"{cut}; `mpigossip report {root}` lists the places"
            )
        past = [version for version, record in rounds.items() if record.age <= cut]
        unassigned: list[int] = []
        progress = None
        if periods is None:
            turns = recorded_turns(later)
        else:
            began = {
                record.place: self._began(record.version)
                for record in reversed(sorted(later, key=lambda record: record.round))
            }
            turns, self.chunks, unassigned = rescaled_turns(
                {record.version: record for record in later},
                began,
                *periods,
                place.plan.chunks * periods.recorded,
            )
            progress = [(max(steps) + 1) // periods.recorded for steps in self.chunks]
        try:
            schedule = ForkSchedule(
                rounds, self.starts, past, turns, unassigned, self.end, change, progress
            )
        except ValueError:
            raise JobError(
                f"--without {change.without}: no other place has trained, so there is no "
                "model without this place; omit --without"
            ) from None
        self.rounds = dict(schedule.rounds)
        self.starts = schedule.starts
        self.end = schedule.end
        self.later = self.rounds.keys() - set(past)
        """Rounds after the cut."""

    def _began(self, version: Version) -> int:
        """Return the time at which a recorded round began: the age of the model it started from."""
        inputs = self.inputs(version)
        first = inputs if version.round == 1 else inputs[:1]
        return max((self.round(dependency).age for dependency in first), default=0)

    def steps(self, version: Version) -> int:
        """Return the length of a round, in any unit that all rounds share.

        The unit is a step if the fork changes the number of steps per round, otherwise a chunk.
        """
        chunks = self.round(version).chunks
        if self.periods is None:
            return chunks
        return chunks * (self.periods.fork if version in self.later else self.periods.recorded)

    def check(self, version: Version, state: NodeState, equal: bool | None = None) -> None:
        """Compare a model with its record; if the fork changes the round, complete the record."""
        if version not in self.later or not self.is_changed:
            super().check(version, state, equal)
            return
        index = int(state.numbers["index"])
        # A fork stores no models, so its record names no files of ranks either.
        sha = digest(state)
        record = replace(self.round(version), digest=sha, step=index, claim="", shards=())
        self.rounds[version] = record
        if self.uses[version]:
            self.models[version] = state

    def run(self, member: Any, recorded: Any, logs: ForkLogs | None = None) -> list[NodeState]:
        """Repeat the rounds after the cut, and older rounds if necessary; return the last models.

        :param member: `Member` of the fork's job, which trains the rounds after the cut
        :param recorded: `Member` of the recorded job, which trains older rounds
        :param logs: logs to which the steps after the cut are written; None: they are not written
        :raises ReplayMismatch: if the model of an unchanged round differs from its record
        """
        for version in self.repeating({*self.later, *self.end}):
            if version in self.later:
                after = [logs.after(version)] if logs else []
                state = repeat_round(self, version, member, *after)
            else:
                state = repeat_round(self, version, recorded)
            self.check(version, state)
        return [self.models[version] for version in self.end]


class Setting:
    """Assemblies and members of a recorded job, and of the same job with changed settings."""

    def __init__(self, disk: RecordStore, job: Job | None, settings: Sequence[str], world):
        """Assemble the jobs.

        :param disk: folder of the training
        :param job: your own copy of the job; None: code that the job in the folder names is not
            imported
        :param settings: settings that the fork changes, as "section.key=value"
        :param world: world of the single process
        :raises JobError: if a setting can't be changed in a fork
        """
        recorded = for_ranks(training_in(disk, job), world)
        self.job = changed_job(recorded, settings)
        first = assemble(recorded, world, 1)
        self.assemblies = [first]
        self.recorded = self.member = Member(first)
        self.plan = plan_of(first)
        self.behind = BEHIND * self.plan.longest
        """Largest difference in age between two models that the fork averages, if it has no past.
        """
        self.periods: Periods | None = None
        self.graph: str | None = None
        self.changes = [
            text.replace(", in the folder ", ", in the training ")
            for text in differing(self.job, recorded)
        ]
        """A text with both values for each setting that the fork changes."""
        self.is_changed = self.job != recorded
        if self.is_changed:
            second = assemble(self.job, world, 1)
            self.assemblies.append(second)
            period = Periods(self.recorded.steps, Member(second).steps)
            longest = plan_of(second).longest
            self.behind = BEHIND * longest
            has_unequal_rounds = self.plan.longest > 1 and longest == 1
            if period.fork == period.recorded and not has_unequal_rounds:
                self.member = Member(second)
            else:
                self.periods = period
                self.member = ForkMember(second, period.recorded)
            if self.job.graph.name != recorded.graph.name:
                self.graph = self.job.graph.name

    def log(self, disk: RecordStore, cut: int, without: int | None = None) -> ForkLog:
        """Return the :class:`ForkLog` of a fork with these jobs.

        :param disk: folder of the recorded training
        :param cut: largest age of a round that stays as it is
        :param without: place that the fork leaves out; None: no place is left out
        """
        # Places may be farther apart at the cut than the fork allows. If they were then never
        # averaged, their ages would stay as different as they are, since each advances by 1.
        behind = max(self.behind, BEHIND * self.plan.longest) if cut else self.behind
        log = ForkLog(
            Place(disk, self.plan, report=print_note),
            cut,
            Change(without, self.graph, self.job.run.seed, behind),
            self.periods,
            self.is_changed or without is not None,
            self.assemblies[0].engine.group.slots,
        )
        if isinstance(self.member, ForkMember):
            self.member.chunks = log.chunks
        return log

    def final(self, states: Sequence[NodeState]) -> Evaluation:
        """Evaluate the average of ``states`` on the test data."""
        self.member.begin(states)
        loader = self.member.assembly.loader
        return evaluate(self.member.trainer.replicas, self.member.trainer.mixer, loader)

    def logs(self, folder: Path, run: Path, log: ForkLog) -> ForkLogs:
        """Begin the logs of a fork.

        :param folder: folder of the fork
        :param run: folder of the training
        :param log: records of the fork, from :meth:`log`
        """
        unit = 1 if self.periods else self.recorded.steps
        past = log.rounds.keys() - log.later
        return ForkLogs(
            folder, run, self.member, log, past, lambda version: unit * log.steps(version)
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of the recorded training."""
        return self.plan.chunks * self.recorded.steps

    def close(self) -> None:
        """Free the memory of both jobs."""
        for assembly in self.assemblies:
            assembly.close()


def changed_job(job: Job, settings: Sequence[str]) -> Job:
    """Return ``job`` with some settings replaced.

    :param job: the recorded job
    :param settings: new settings, as "section.key=value"
    :raises JobError: if a fork can't change one of these settings
    """
    if not settings:
        return job
    changed = load(config.as_dict(job), settings)
    problems = differing(changed, job, CHANGEABLE)
    problems += [
        text for text in differing(changed, job) if text.partition(" = ")[0] in UNCHANGEABLE
    ]
    if problems:
        raise JobError(
            f"{problems[0]}: a fork can't change this setting; it can change "
            f"{', '.join(CHANGEABLE)}, except {', '.join(UNCHANGEABLE)}"
        )
    if changed.cadence.options.get("period") == "auto" != job.cadence.options.get("period"):
        raise JobError(
            'cadence.period = "auto": a fork does not measure the speed of members; give a number '
            "of steps"
        )
    check_member(changed)
    return changed


def fork(
    folder: Path,
    cut: int,
    to: Path,
    settings: Sequence[str] = (),
    without: int | None = None,
    job: Job | None = None,
) -> str:
    """Repeat a training up to a round and continue with one thing changed; return a summary.

    :param folder: folder of the training, which has ended
    :param cut: number of rounds that stay as they are, counted like `Round.age`; 0: none
    :param to: new folder for records, checkpoint, logs and job of the fork
    :param settings: settings that the fork changes, as "section.key=value"
    :param without: place whose models are left out after the cut; None: no place
    :param job: your own copy of the job; None: code that the job in the folder names is not
        imported
    :raises ReplayMismatch: if the model of an unchanged round differs from its record
    :raises StoreError: if a record or model that is needed is missing or unusable
    :raises JobError: if the fork is impossible, or the new folder exists
    """
    if to.exists():
        raise JobError(f'--to "{to}" exists; pass a folder that does not exist yet')
    disk = RecordStore(folder, shared=True)
    with SingleProcess() as world:
        setting = Setting(disk, job, settings, world)
        try:
            log = setting.log(disk, cut, without)
            with new_folder(to) as temporary:
                logs = setting.logs(temporary, folder, log)
                states = log.run(setting.member, setting.recorded, logs)
                evaluation = setting.final(states)
                result = evaluation.averaged
                recorded = recorded_result(folder, setting)
                sha = hashlib.sha256()
                for state in states:
                    sha.update(state.parameters.tobytes())
                about = {
                    "run": str(folder),
                    "fork": cut,
                    "settings": [*settings],
                    "without": without,
                    "result": {name: float(value) for name, value in result.items()},
                    "result_of_run": recorded and {n: float(v) for n, v in recorded.result.items()},
                    "digest": sha.hexdigest(),
                }
                path = to / write(temporary, setting, log, states, about).relative_to(temporary)
                stored = {"checkpoint": str(path), "digest": sha.hexdigest()}
                logs.end(evaluation, stored, setting.total_steps)
        finally:
            setting.close()
    unit = "round" if setting.plan.longest == 1 else "chunk"
    left_out = [] if without is None else [f"place {without} is left out"]
    changes = [*setting.changes, *left_out]
    later = pluralize(len(log.later), "round")
    lines = [
        f"{to}: {later} after {unit} {cut} of {log.length} of {folder}",
        f"changed: {'; '.join(changes) or 'nothing'}",
        f"`mpigossip log plot {folder} {to}` draws the metrics of both",
        "",
        f"  {'':<12}{'fork':<12}training",
    ]
    for name, value in result.items():
        other = number(recorded.result[name]) if recorded else "no checkpoint"
        lines.append(f"  {name:<12}{number(value):<12}{other}")
    lines.append(f"  {'digest':<12}{sha.hexdigest()}")
    if recorded and not changes and sha.hexdigest() == recorded.digest:
        lines.append("the digest equals the training's")
    return "\n".join(lines)


class RecordedResult(NamedTuple):
    """Result of a recorded training."""

    result: dict[str, float]
    """Test loss and test metrics of the average of the last models."""
    digest: str
    """Digest of the checkpoint."""


def recorded_result(folder: Path, setting: Setting) -> RecordedResult | None:
    """Evaluate the checkpoint of a training; return None if the folder has no checkpoint.

    :param folder: folder of the training
    :param setting: jobs of the training and of the fork, which have the same test data
    :raises StoreError: if the checkpoint is damaged
    """
    path = checkpoint.latest(folder)
    if path is None:
        return None
    manifest = checkpoint.read_manifest(path)
    states = [checkpoint.read_node(path, node, manifest) for node in range(manifest.n)]
    return RecordedResult(setting.final(states).averaged, checkpoint.digest(path))


def blame(folder: Path, cut: int = 0, job: Job | None = None) -> str:
    """Rank the places of a training by the final loss that results if each is left out.

    The training is repeated once as it was recorded, and once without each place. Other places then
    train the chunks of the place that is left out.

    :param folder: folder of the training, which has ended
    :param cut: number of rounds that stay as they are; 0: none
    :param job: your own copy of the job; None: code that the job in the folder names is not
        imported
    :return: a table with the place first that raises the final loss most
    :raises ReplayMismatch: if the model of an unchanged round differs from its record
    :raises StoreError: if a record or model that is needed is missing or unusable
    :raises JobError: if the training can't be repeated, or if fewer than two places have rounds
        after the cut
    """
    disk = RecordStore(folder, shared=True)
    with SingleProcess() as world:
        setting = Setting(disk, job, (), world)
        try:
            loss, losses = blamed(setting, disk, cut)
        finally:
            setting.close()
    rows = [
        [str(place), f"{without:.6g}", f"{loss - without:+.6g}"]
        for place, without in sorted(losses.items(), key=lambda item: item[1])
    ]
    table = aligned([["place", "loss without it", "raises the loss by"], *rows])
    return f"loss of the average of the last models: {loss:.6g}\n\n{table}"


def blamed(setting: Setting, disk: RecordStore, cut: int) -> tuple[float, dict[int, float]]:
    """Return the final loss of a training, and for each place the final loss if it is left out.

    :param setting: jobs of the training, without a change
    :param disk: folder of the training
    :param cut: number of rounds that stay as they are; 0: none
    :raises JobError: if fewer than two places have rounds after the cut
    """
    log = setting.log(disk, cut)
    places = sorted({version.place for version in log.later})
    if len(places) < 2:
        raise JobError(
            f"--blame: only place {places[0]} has rounds after round {cut}, so no training "
            "without it can be compared; give a smaller number after --fork, or a training of "
            "several places"
        )
    loss = setting.final(log.run(setting.member, setting.recorded)).loss
    losses = {}
    for place in places:
        log = setting.log(disk, cut, place)
        losses[place] = setting.final(log.run(setting.member, setting.recorded)).loss
    return loss, losses


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Return a context manager that creates a folder, which gets its name when the context ends.

    After an exception, the folder is removed.

    :param to: path of the new folder
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(f".{to.name}-{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write(
    folder: Path, setting: Setting, log: ForkLog, states: Sequence[NodeState], about: dict[str, Any]
) -> Path:
    """Write job, arguments, records and checkpoint of a fork; return the path of the checkpoint.

    :param folder: folder of the fork
    :param setting: jobs of the fork
    :param log: all records of the fork
    :param states: models whose average is the result
    :param about: arguments of the command, by which the fork can be repeated, and its result
    """
    disk = RecordStore(folder)
    disk.begin(FOLDERS)
    text = config.dump(setting.job)
    head = (log.place.disk.read(JOB, listed=True) or b"").decode().partition("\n")[0]
    assert head.startswith(f"# {FORMAT}")
    (folder / JOB).write_text(f"{head}\n{text}", encoding="utf-8")
    (folder / FORK).write_text(json.dumps(about, indent=1), encoding="utf-8")
    for name, record in _records(log):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(record.encode())
    n = len(states)
    facts: dict[str, Number] = {
        "nodes": n,
        "asked": n,
        "lost": "",
        "lost_at": 0,
        "slots": setting.member.engine.group.slots,
        "steps_per_epoch": setting.member.assembly.steps_per_epoch,
    }
    return write_checkpoint(disk, folder, setting.total_steps, [*states], text, facts)


def _records(log: ForkLog) -> Iterable[tuple[str, Record]]:
    """Iterate over pairs (file name, record) of a fork; the names are relative to its folder."""
    for place, start in log.starts.items():
        yield f"places/{place:06d}", Record(place=place)
        yield record_name(place, 0), start
    for version in log.rounds:
        yield record_name(*version), log.round(version)
    yield "END", End(place=log.end[0].place, versions=log.end)
