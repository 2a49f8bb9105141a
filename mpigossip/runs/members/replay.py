"""`mpigossip replay`: repeat rounds of a training in this process, bitwise."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import Job, JobError
from mpigossip.config.readable import pluralize, print_note
from mpigossip.engine.measurements import StepMetrics
from mpigossip.members.live import correct_for_age, digest, read_model, rounds_late
from mpigossip.members.pace import peer_weight
from mpigossip.members.parts import parts_of
from mpigossip.members.place import KEEP, Place, record_name
from mpigossip.members.records import Closed, End, RecordStore, Round, Start, Version
from mpigossip.runs.members.join import JOB, LOOP, about, job_there, none_there, plan_of
from mpigossip.runs.members.member import Member
from mpigossip.runs.members.ranks import for_ranks
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.log_reading import FORK
from mpigossip.training.assemble import assemble

BITS = ("mpigossip", "torch", "processor", "machine", "threads", "ranks")
"""Keys of the facts in `Start.about` on which the bits of a model may depend."""
PROGRESS_ROUNDS = 100
"""Smallest number of rounds for which a replay reports its progress, after each tenth of them."""


class ReplayMismatch(Exception):
    """Error of a repeated round whose model has another digest than the record contains."""


def matches(version: Round, state: NodeState, slots: int) -> bool:
    """Return whether a model has the digests that the record of its round contains.

    :param version: record of the round
    :param state: the whole model
    :param slots: number of slots of the member that trained the round
    """
    parts = parts_of(state, version.shards, slots) if version.shards else [state]
    return [digest(part) for part in parts] == [shard.digest for shard in version.files]


class ReplayLog:
    """Records of all places of a training, and the models that a replay still needs."""

    done_text = "equal"
    """Adjective for rounds that were repeated, in messages about the progress."""

    def __init__(self, place: Place, slots: int = 1, ranks: int = 1):
        """Read all records.

        :param place: `Place` that reads the folder without joining
        :param slots: number of slots of each member
        :param ranks: number of ranks of this program, for messages
        """
        self.place = place
        self.slots = slots
        self._ranks = ranks
        self.stored = 0
        """Number of models that were read from the folder."""
        self.starts: dict[int, Start] = {}
        """First record of each place."""
        self.rounds: dict[Version, Round | None] = {}
        """Record of each round; None: it is missing or unusable. A first record of a place that is
        missing or unusable is its round 0 here.
        """
        self.models: dict[Version, Any] = {}
        """Models that are inputs of rounds which have not been repeated yet: each is a `NodeState`,
        or files of it if several ranks have parts of it (`mpigossip.optim.sharded_member`)."""
        for number in place.numbers("places"):
            for index in range(place.refresh(number).next):
                # Records before the last one may be missing, so don't treat them as listed.
                record = place.record(number, index)
                if isinstance(record, Start):
                    self.starts[number] = record
                elif not isinstance(record, Closed):
                    usable = record if isinstance(record, Round) else None
                    self.rounds[Version(number, index)] = usable
        end = place.ended()
        self.end: tuple[Version, ...] = end.versions if isinstance(end, End) else ()

    def check_complete(self) -> None:
        """Check that each chunk was trained in exactly one round, if the training has ended.

        On a network file system, a stale listing may lack rounds, or whole places.

        :raises StoreError: if a chunk was trained in several rounds, or if the training has ended
            and a chunk is missing
        """
        chunks = self.place.plan.chunks
        rounds: dict[int, list[Version]] = {chunk: [] for chunk in range(chunks)}
        for version, record in self.rounds.items():
            for chunk in range(record.chunk, record.chunk + record.chunks) if record else ():
                rounds.setdefault(chunk, []).append(version)
        trained = sum(map(bool, rounds.values()))
        twice = [chunk for chunk, versions in rounds.items() if len(versions) > 1]
        if twice:
            names = ", ".join(record_name(*version) for version in rounds[twice[0]])
            raise StoreError(
                f"{self.place.disk.root}: chunk {twice[0]} was trained more than once, in {names}: "
                "use a copy of the folder without the wrong record"
            )
        if trained == chunks:
            return
        # Record 0 of a chain trains no chunk and may be missing: its place may have ended before
        # its first round.
        for version, record in self.rounds.items():
            if record is None and version.round:
                self.round(version)
        missing = [chunk for chunk, versions in rounds.items() if not versions]
        if not self.end:
            self.place.report(
                f"the training has not ended: {trained} of {chunks} chunks are trained"
            )
            return
        numbers = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise StoreError(
            f"{self.place.disk.root}: the training has ended, but the records of {len(missing)} of "
            f"its {chunks} chunks are missing in chain/ on this host (chunks {numbers}): wait "
            "until the host lists them, or copy them to chain/, and replay again"
        )

    def round(self, version: Version) -> Round:
        """Return the record of a round.

        :raises StoreError: if the record is missing or unusable
        """
        record = self.rounds.get(version)
        if record is None:
            raise StoreError(
                f"{record_name(*version)} is missing or damaged: rounds that "
                "depend on it can't be repeated; choose other rounds by --place and --rounds"
            )
        return record

    def inputs(self, version: Version) -> tuple[Version, ...]:
        """Return the versions of the models on which a round depends.

        The first round of a place depends on the models with which the place started. Any other
        round depends on the model of the previous round of the same place. If the place averaged
        with a peer, the round also depends on the peer's model, and on the place's own model of the
        same age.
        """
        if version.round == 1:
            if version.place not in self.starts:
                self.round(Version(version.place, 0))
            return self.starts[version.place].inputs
        earlier = [Version(version.place, r) for r in range(1, version.round)][-KEEP:]
        began = [self.round(own_version).began for own_version in earlier]
        peers = self.round(version).peer[:1]
        return (
            earlier[-1],
            *(v for p in peers for v in (p, earlier[-1 - rounds_late(began, self.round(p).began)])),
        )

    def choose(self, wanted: Iterable[Version]) -> list[Version]:
        """Return the rounds to repeat, in an order in which each follows its dependencies.

        They are the wanted rounds, and the rounds on which they depend. If the model of a round
        that is not wanted is still stored, it is read instead of repeated.

        :param wanted: rounds whose models the replay compares with their records
        :raises StoreError: if a record that is needed is missing or unusable
        """
        repeated = set[Version]()
        wanted = set(wanted)
        open_ = [*wanted]
        while open_:
            version = open_.pop()
            if version in repeated or version in self.models:
                continue
            state = None if version in wanted else read_model(self.place, self.round(version))
            if state is not None:
                self.models[version] = state
            else:
                repeated.add(version)
                open_ += self.inputs(version)
        self.stored = len(self.models)
        self.uses = Counter(
            dependency for version in repeated for dependency in self.inputs(version)
        )
        self.uses.update(version for version in self.end if version in repeated)
        return sorted(repeated, key=lambda version: (self.round(version).age, version))

    def repeating(self, wanted: Iterable[Version]) -> Iterator[Version]:
        """Iterate over the rounds that :meth:`choose` returns, and print the progress."""
        order = self.order = self.choose(wanted := set(wanted))
        more = len(order) - len(wanted)
        tell = self.place.report
        depend = f" and {pluralize(more, 'round')} that they depend on" if more else ""
        tell(f"repeating {pluralize(len(wanted), 'round')}{depend}")
        for index, version in enumerate(order):
            if len(order) >= PROGRESS_ROUNDS and index % (len(order) // 10) == 0 < index:
                tell(f"{index} of {len(order)} rounds are {self.done_text}")
            yield version

    def take_inputs(self, version: Version) -> tuple[list[NodeState], NodeState | None, int]:
        """Return the inputs of a round, and release models that no later round needs.

        :return: the place's model of the previous round, or for a first round the models that it
            started with; the peer's model, corrected for its age, or None if there was no peer; and
            the progress before the round, in chunks
        :raises StoreError: if the round depends on a later one
        """
        models, late_by, progress = self.take_models(version)
        if late_by is None:
            return models, None, progress
        return models[:1], correct_for_age(models[1], models[0], models[2], late_by), progress

    def take_models(self, version: Version) -> tuple[list[Any], int | None, int]:
        """Return the models of :meth:`inputs`, and release models that no later round needs.

        :return: the models; the number of rounds by which the peer's model, which is the second one
            then, is late, or None if there was no peer; and the progress before the round
        :raises StoreError: if the round depends on a later one
        """
        inputs = self.inputs(version)
        if missing := [dependency for dependency in inputs if dependency not in self.models]:
            raise StoreError(
                f"{record_name(*version)} depends on {record_name(*missing[0])}, which is later: "
                "one of these two records is wrong; replace the wrong file by an intact copy"
            )
        models = [self.models[dependency] for dependency in inputs]
        for dependency in inputs:
            self.uses[dependency] -= 1
            if not self.uses[dependency]:
                del self.models[dependency]
        first = version.round == 1
        progress = max(
            (self.round(dependency).progress for dependency in inputs[: None if first else 1]),
            default=0,
        )
        if first or len(models) == 1:
            return models, None, progress
        return models, inputs[0].round - inputs[2].round, progress

    def describe(self, version: Version, exchange: ReplayExchange) -> None:
        """Set the weight and the numbers of chunks in an exchange, by the records of a place.

        :param version: round that is repeated
        :param exchange: exchange of this round
        """
        record = self.round(version)
        exchange.chunks = record.chunks
        exchange.chunks_before = version.round - 1
        if self.place.plan.longest > 1:
            before = [self.rounds.get(Version(version.place, r)) for r in range(1, version.round)]
            exchange.chunks_before = sum(earlier.chunks if earlier else 1 for earlier in before)
        if record.peer and version.round > 1:
            own = self.steps(Version(version.place, version.round - 1))
            exchange.peer_weight = peer_weight(own, self.steps(record.peer[0]))

    def steps(self, version: Version) -> int:
        """Return the length of a round in any unit that all rounds share: here, in chunks."""
        return self.round(version).chunks

    def check(self, version: Version, state: Any, equal: bool | None = None) -> None:
        """Compare a repeated model with its record, and keep the model if later rounds need it.

        :param version: the round
        :param state: the model after the round
        :param equal: whether the model has the digests of the record; None: they are compared
        :raises ReplayMismatch: if the digest of the model differs from the record
        """
        if equal is None:
            equal = matches(self.round(version), state, self.slots)
        if not equal:
            raise ReplayMismatch(
                f"round {version.round} of place {version.place} gives another model than "
                f"its record {record_name(*version)} contains: the data, the code or a record may "
                f"have changed{self._unlike(version.place)}"
            )
        if self.uses[version]:
            self.models[version] = state

    def _unlike(self, place: int) -> str:
        """Return a clause on how this process differs from the process that trained a place.

        Such a difference, for example in the version of torch, may explain another digest. If there
        is none, return "".
        """
        start = self.starts.get(place)
        facts = about((), (), []) | {"ranks": str(self._ranks)}
        was = {"ranks": "1"} | start.about if start else {}
        unlike = [
            f"{key} {was[key]}, here {facts[key]}"
            for key in BITS
            if key in was and was[key] != facts[key]
        ]
        return (
            f"; the record was made with {', '.join(unlike)}: use the same environment as then"
            if unlike
            else ""
        )

    def summary(self) -> str:
        """Return a summary of the rounds that were repeated."""
        order = self.order
        rounds = pluralize(len(order), "round")
        places = len({version.place for version in order})
        summary = f"{rounds} of {pluralize(places, 'place')} repeated: every digest is equal"
        if self.stored:
            summary += f"\nstarted from {pluralize(self.stored, 'model')} that models/ still has"
        if self.end and set(order).issuperset(self.end):
            sha = hashlib.sha256()
            for version in self.end:
                model = self.models[version]
                whole = isinstance(model, NodeState)
                for piece in [model.parameters] if whole else model.parameter_pieces():
                    sha.update(piece.tobytes())
            summary += f"\ndigest {sha.hexdigest()}"
        return summary


class ReplayExchange:
    """Exchange of one round that is repeated according to its record."""

    sent: NodeState
    """Model that the member published, after the round."""
    chunks = 1
    """Number of chunks in the round."""
    chunks_before = 0
    """Number of chunks that the place has trained in earlier rounds."""
    peer_weight = 0.5
    """Weight of the peer's model, see `pace.peer_weight`."""

    def __init__(self, peer: NodeState | None, chunk: int, progress: int, place: int):
        """Prepare the inputs of the round.

        :param peer: the peer's model, corrected for its age; None: no peer
        :param chunk: first chunk that the round trains
        :param progress: progress before the round, in chunks
        :param place: number of the place whose round it is
        """
        self.place = place
        self._peer = peer
        self._next = (chunk, progress)

    def chunk(self) -> tuple[int, int] | None:
        """Return the chunk of the round and the progress before it; None from the second call."""
        chunk = self._next
        self._next = None
        return chunk

    def send(self, state: NodeState) -> int:
        """Keep ``state``, which a member would publish, in `sent`; return its size in bytes."""
        self.sent = state
        return sum(array.nbytes for array in state.stored().values())

    def receive(self) -> NodeState | None:
        """Return the peer's model; None from the second call."""
        peer = self._peer
        self._peer = None
        return peer


def repeat(script: ReplayLog, wanted: Iterable[Version], member: Any) -> str:
    """Repeat rounds, and the rounds on which they depend; return a summary.

    :param script: records of the training
    :param wanted: rounds to repeat
    :param member: `Member` that trains them
    :raises ReplayMismatch: if a model differs from its record
    :raises StoreError: if a record that is needed is missing or unusable
    """
    for version in script.repeating(wanted):
        script.check(version, repeat_round(script, version, member))
    return script.summary()


def repeat_round(
    script: ReplayLog, version: Version, member: Any, *after: Callable[[StepMetrics, int], None]
) -> NodeState:
    """Repeat one round whose inputs are known; return the model after it.

    :param script: records of the training
    :param version: the round
    :param member: `Member` that trains it
    :param after: at most one function, which is called after each step, as by `Member.train`
    """
    models, peer, progress = script.take_inputs(version)
    exchange = ReplayExchange(peer, script.round(version).chunk, progress, version.place)
    script.describe(version, exchange)
    if version.round == 1:
        member.begin(models)
    else:
        member.resume(models[0], version.round - 1, exchange)
    member.train(exchange, *after)
    return exchange.sent


def audit(script: ReplayLog, fraction: float, member: Any, chance: random.Random) -> str:
    """Repeat a random sample of the rounds, each from its stored inputs; return a summary.

    The audit detects a wrong record only if its own round is drawn, because later rounds are
    repeated from the wrong model. If one of n rounds is wrong and m are drawn, the probability of
    detection is m/n.

    :param script: records of the training
    :param fraction: fraction of the rounds that are repeated, greater than 0 and at most 1; at
        least one round is repeated
    :param member: `Member` that trains them
    :param chance: generator that draws the rounds
    :raises ReplayMismatch: if a model differs from its record; if several do, the message names the
        oldest one
    :raises JobError: if the training did not keep all models, or has no rounds
    :raises StoreError: if the model of an input is missing or damaged
    """
    root = script.place.disk.root
    if script.place.plan.keep_every != 1:
        raise JobError(
            f"members.keep_every = {script.place.plan.keep_every}: an audit repeats rounds from "
            f'stored models, but the members of "{root}" removed most of them; begin a training '
            "with members.keep_every = 1, or repeat this one by `mpigossip replay` without --audit"
        )
    rounds = [version for version, record in script.rounds.items() if record is not None]
    if not rounds:
        raise JobError(f'"{root}" has no rounds yet: audit it after members have trained')
    drawn = chance.sample(sorted(rounds), max(1, round(fraction * len(rounds))))
    drawn.sort(key=lambda version: (script.round(version).age, version))
    for version in drawn:
        script.models.clear()
        order = script.choose([version])
        if len(order) > 1:
            raise StoreError(
                f"{root}/models: the model of {record_name(*order[0])}, an input of "
                f"{record_name(*version)}, is missing or damaged; copy it back, or repeat the "
                "training by `mpigossip replay` without --audit"
            )
        script.check(version, repeat_round(script, version, member))
    return (
        f"{len(drawn)} of {pluralize(len(rounds), 'round')} drawn and repeated from stored models: "
        "every digest is equal"
    )


def training_in(disk: RecordStore, job: Job | None) -> Job:
    """Return the job of the training in a folder, to repeat it.

    :param disk: the folder
    :param job: your own copy of the job; None: code that the job in the folder names is not
        imported
    :raises JobError: if the folder holds no training of a job, another job, or a fork, or if its
        job names code that ``job`` does not name
    """
    if disk.exists(FORK):
        raise JobError(
            f'"{disk.root}" is a fork: repeat it by the same `mpigossip replay --fork` with another'
            f" folder after --to, which gives the same digest (its arguments are in {FORK})"
        )
    if disk.exists(LOOP):
        raise JobError(
            f'"{disk.root}" holds the training of a program (see {LOOP}), and `mpigossip replay`, '
            "its forks, blame and audits cover jobs only: start that program with "
            "mpigossip.join(…, replay=True), which repeats the training as it was recorded"
        )
    if not disk.exists(JOB):
        raise JobError(none_there(disk))
    return job_there(disk, job, command="replay")


def wanted_of(
    script: ReplayLog, place: int | None, rounds: tuple[int, int] | None
) -> list[Version]:
    """Return the requested rounds.

    If all rounds are requested, none may be missing: see :meth:`ReplayLog.check_complete`.

    :param script: records of the training
    :param place: number of a place; None: all places
    :param rounds: first and last round; None: all rounds
    :raises JobError: if there are no such rounds
    :raises StoreError: if all rounds are requested, and records are missing
    """
    low, high = rounds or (1, 1 << 60)
    versions = [
        version
        for version in script.rounds
        if place in (None, version.place) and low <= version.round <= high
    ]
    if not versions:
        numbers = [version.round for version in script.rounds if place in (None, version.place)]
        limit = f"at most {max(numbers)} rounds" if numbers else "no rounds"
        who = "they have" if place is None else f"place {place} has"
        raise JobError(
            f'"{script.place.disk.root}" has {len(script.starts)} places, numbered from 0; {who} '
            f"{limit}; choose other rounds by --place and --rounds"
        )
    if place is None and rounds is None:
        script.check_complete()
        # Every chunk is in a usable record, so the unusable ones are not needed.
        return [version for version in versions if script.rounds[version] is not None]
    return versions


def replay(
    folder: Path,
    place: int | None = None,
    rounds: tuple[int, int] | None = None,
    job: Job | None = None,
    audit_fraction: float | None = None,
) -> str:
    """Repeat a training from its records and compare the models; return a summary.

    Rounds on which the requested rounds depend are repeated, too, unless their models are still
    stored.

    :param folder: folder of the training
    :param place: number of the place to repeat; None: all places
    :param rounds: first and last round to repeat; None: all rounds
    :param job: your own copy of the job; None: code that the job in the folder names is not
        imported
    :param audit_fraction: fraction of the rounds to draw and repeat, see :func:`audit`; None:
        rounds are not drawn, but chosen by ``place`` and ``rounds``
    :raises ReplayMismatch: if a model differs from its record
    :raises StoreError: if a record or model that is needed is missing or unusable
    :raises JobError: if there is no training in the folder, no such round, or another job
    """
    disk = RecordStore(folder, shared=True)
    with SingleProcess() as world:
        assembly = assemble(for_ranks(training_in(disk, job), world), world, 1)
        try:
            reader = Place(disk, plan_of(assembly), report=print_note)
            script = ReplayLog(reader, assembly.engine.group.slots)
            if audit_fraction is not None:
                # The members that are audited must not be able to predict the draw.
                return audit(script, audit_fraction, Member(assembly), random.SystemRandom())
            return repeat(script, wanted_of(script, place, rounds), Member(assembly))
        finally:
            assembly.close()
