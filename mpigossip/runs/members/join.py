"""`mpigossip join`: training of one member, in a folder that all members of the training share."""

import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import mpigossip
from mpigossip import config
from mpigossip.cluster.local_devices import slots_of
from mpigossip.cluster.world import SingleProcess, World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import UserError
from mpigossip.config.readable import pluralize, print_note, three_digits
from mpigossip.engine.measurements import StepMetrics
from mpigossip.members.folder_rate import describe_slow_folder, seconds_per_round
from mpigossip.members.live import POLL_S, FolderExchange, StopRequested, layout
from mpigossip.members.outages import FolderUnreachable
from mpigossip.members.place import (
    FOLDERS,
    ROUNDS_PER_LEASE,
    Place,
    TrainingPlan,
    record_name,
)
from mpigossip.members.records import NO_LINKS, RecordStore, Round
from mpigossip.runs.members.member import Member, steps_of_round
from mpigossip.runs.members.ranks import SeveralRanks, for_ranks, world_of
from mpigossip.runs.printer import Printer
from mpigossip.runs.progress import Progress
from mpigossip.runs.recorder import Recorder
from mpigossip.runs.start_and_resume import differing
from mpigossip.runs.stopper import Stopper, end_of_allocation
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.manifest import Number
from mpigossip.training import shape
from mpigossip.training.assemble import Assembly, assemble, load
from mpigossip.training.evaluate import Evaluation, evaluate
from mpigossip.training.rules import check_member

FORMAT = "mpigossip members 2"
"""Name and version of the file format of a folder that a job begins."""
LOOP_FORMAT = "mpigossip members 3"
"""Name and version of the format of a folder that a program begins: members may write models in
several files, which programs of earlier versions can't read, so that they would train their chunks
again."""
JOB = "job.toml"
"""Name of the file with the job that all members share."""
LOOP = "loop.toml"
"""Name of the file that is used instead of `job.toml` if members are programs with a training
loop."""
OWN = {
    "checkpoint",
    "log",
    "run.output",
    "run.name",
    "data.workers",
    "data.cache",
    "node.timeout_s",
}
"""Sections and settings of a job in which members may differ."""
SLOTS = {"node.devices", "node.ranks_per_node"}
"""Settings that may differ if the number and kind of a member's slots are equal."""
FILES = ("graph.name", "graph.placement")
"""Settings that may name a file as "file:PATH", which is read but never imported."""
OWN_COPY = "to run that code, pass your own copy: `mpigossip {command} {folder} JOB.toml`"


def join(
    folder: Path,
    job: Job | None = None,
    *,
    shared: bool = False,
    lease_s: float | None = None,
    poll_s: float = POLL_S,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train as one member until all chunks are trained, or until it is asked to stop.

    :param folder: folder of the training; if it contains no training yet, a new one begins
    :param job: the job, which must agree with the job in the folder, if the folder contains a
        training; None: the job in the folder, which then must not name code to import
    :param shared: whether files of other users are accepted
    :param lease_s: shortest silence, in seconds, after which other members close this one; None:
        `members.lease_s` of the job
    :param poll_s: seconds after which a member without work reads the folder again
    :param stop: function that returns whether the member has to leave; called after each step
    :return: summary with "finished", which is False if the member was asked to leave, and "places",
        the numbers of its places; after the end also the metrics and, once it is written, the
        checkpoint and its digest; otherwise "stop_file", which is True if the folder contains a
        file STOP. On ranks other than rank 0 of a member, it has the number of the "rank", too
    :raises JobError: if the user can correct the error, such as a job that members can't train
    :raises FolderUnreachable: if the file system fails for longer than a lease, or for ten seconds
        at the start
    """
    disk = RecordStore(folder, shared)
    own_job = job
    if job is None:
        job = job_of(folder, None, disk)
    with world_of(job) as world:
        own_job = None if own_job is None else shape.with_ranks(job, world.size)
        job = for_ranks(job, world)
        with world.raise_together(UserError):
            if own_job is not None and world.rank == 0 and disk.exists(JOB):
                job_of(folder, own_job, disk)
            check_member(job)
        assembly = assemble(job, world, 1)
        end = end_of_allocation(job.checkpoint.wall_clock_s)
        try:
            with world.raise_together(UserError):
                member = Member(assembly)
                flat = assembly.engine.vector.flat
                # A new training begins only now, after data and model were loaded without an error.
                if world.rank == 0:
                    job_of(folder, own_job, disk, parameters=layout(flat.names, flat.shapes))
            with Stopper(world, folder, end) as stopper:
                plan = plan_of(assembly, lease_s)
                if world.rank == 0 and (note := describe_unused_steps(assembly)):
                    print_note(note)
                live = FolderExchange(
                    Place(disk, plan, report=print_note),
                    lambda: stop() or stopper.due(),
                    poll_s,
                    SeveralRanks(world, member.part) if member.part else None,
                )
                summary = _train(live, member, folder, world)
                return summary | ({"rank": world.rank} if world.rank else {})
        finally:
            assembly.close()


def _train(live: FolderExchange, member: Member, folder: Path, world: World) -> dict[str, Any]:
    """Train until the end of the training or a stop, and return the summary.

    If other members have closed the place of this member, it joins again.

    :param live: exchange of this member
    :param member: the training of this member
    :param folder: folder of the training
    :param world: ranks of this member
    """
    place = live.place
    places = list[int]()
    flat = member.engine.vector.flat
    facts = about(flat.names, flat.shapes, member.engine.group.devices)
    watched = None
    folder_s = None
    try:
        while not live.ended():
            if live.stopping():
                raise StopRequested
            if folder_s is None:
                folder_s = live.decide(lambda: seconds_per_round(place.disk))
            with live.stay():
                member.begin(live.begin(facts))
                places.append(place.number)
                with _Watched(member, live, folder, world, folder_s) as watched:
                    member.train(live, watched.after)
    except StopRequested:
        stop_file = live.decide(lambda: place.disk.sees("STOP"))
        return {"finished": False, "places": places, "stop_file": stop_file}
    finally:
        live.close()
    evaluation, stored = _result(live, member, folder)
    if watched:
        watched.end(evaluation, stored)
    return evaluation.averaged | stored | {"finished": True, "places": places}


class _Watched:
    """Context manager for one stay of a member, with its log and terminal output.

    After each step, it checks whether the member has to leave.
    """

    def __init__(
        self,
        member: Member,
        live: FolderExchange,
        folder: Path,
        world: World,
        folder_s: float,
    ):
        """Prepare the log, such as logs/000007/log.h5 in the training's folder for place 7.

        :param member: the training of this member
        :param live: exchange of this member, which has a place
        :param folder: folder of the training
        :param world: ranks of this member; rank 0 writes log and output
        :param folder_s: result of :func:`~mpigossip.members.folder_rate.seconds_per_round`
        """
        self.folder_s = folder_s
        self.world = world
        self.member = member
        self.live = live
        assembly = member.assembly
        group = member.engine.group
        job = assembly.parts.job
        self.progress = Progress(
            job=job,
            folder=folder / "logs" / f"{live.place.number:06d}",
            nodes=1,
            asked=1,
            steps_per_epoch=assembly.steps_per_epoch,
            total_steps=0,
            samples_per_step=group.slots * job.data.batch * job.algorithm.accumulate,
            objective=assembly.trainer.replicas.objective,
            text=config.dump(job),
            about=lambda: [
                (
                    "place",
                    f"{live.place.number} of {folder}: "
                    f"{live.place.plan.chunks:,} chunks of {pluralize(member.steps, 'step')} "
                    "for all members together",
                )
            ],
        )
        # Don't create missing parents: they are missing only if the folder was unmounted.
        # Rank 0 writes alone, so that it can repeat what an error of the file system has prevented.
        self.recorder = Recorder(SingleProcess(), parents=False)
        self.printer = Printer(SingleProcess())
        # The lines on the terminal count the steps of all members.
        self.shown = replace(
            self.progress,
            first_step=live.place.progress * member.steps,
            total_steps=live.place.plan.chunks * member.steps,
        )

    def __enter__(self) -> Self:
        self.live.decide(self._start)
        return self

    def _start(self) -> None:
        self.live.place.disk.make("logs")
        self._retry(lambda: self.recorder.start(self.progress, self.member.assembly))
        self.printer.start(self.shown, self.member.assembly)

    def after(self, record: StepMetrics, chunk: int) -> None:
        """Log a step, then check whether to leave; collective.

        :param record: metrics of the step
        :param chunk: chunk that is trained
        :raises StopRequested: if the member was asked to leave
        :raises JobError: if a round takes longer than a fifth of the lease
        """
        records = self.world.gather(record)
        if records:
            self._log(_of_ranks(records), chunk)
        live = self.live
        # The second round has just ended.
        if live.place.round == 3 and not self.member.within:
            live.decide(self._check_round)
        if live.stopping():
            raise StopRequested

    def _check_round(self) -> None:
        """Check that five rounds fit into a lease, by the second round; hint if H is small."""
        place = self.live.place
        seconds = self.live.round_seconds()
        check_lease(place.plan.lease_s, seconds)
        if hint := describe_slow_folder(self.folder_s, seconds, self.member.steps * place.chunks):
            place.report(hint)

    def _log(self, record: StepMetrics, chunk: int) -> None:
        """Log a step.

        :param record: metrics of the step
        :param chunk: chunk that is trained
        """
        place = self.live.place
        peer = self.live.place.peer
        steps = self.member.steps
        # Number of steps done in the present round; 0 if the round has just ended.
        within = self.member.within
        # The engine has one model, and has computed its distance from itself, which is 0. The
        # distance from the average of all members is not known.
        record = replace(record, consensus_distance=float("nan"))
        record.metrics |= {
            "chunk": chunk,
            "round": place.round,
            "time": time.time(),
            "peer": peer.place if peer else float("nan"),
            "history": place.age * steps + within - 1,
        }
        record.staleness = [float(place.age - peer.age) if peer else float("nan")]
        self.recorder.step(self.progress, record)
        steps_done = min(place.progress * steps + within, self.shown.total_steps)
        self.printer.step(self.shown, replace(record, index=steps_done - 1))
        if self.member.done % self.progress.job.log.flush_steps == 0:
            self._retry(self.recorder.flush)

    def __exit__(self, *_) -> None:
        if self.world.rank:
            return
        over = self.live.place.disk.outages.given_up
        with suppress(*(FolderUnreachable, StoreError) if over else ()):
            self._retry(self.recorder.flush)
        self.printer.leave()

    def _retry(self, write: Callable[[], None]) -> None:
        """Write to the log; try again if that fails because of an outage of the file system.

        Rows that the first attempt has written are not written twice.
        """
        self.live.place.disk.outages.retry(write, self.progress.folder / "log.h5")

    def end(self, evaluation: Evaluation, stored: dict[str, Any]) -> None:
        """Write the evaluation of the final model and the summary to the log.

        :param evaluation: evaluation of the final model
        :param stored: path and digest of the checkpoint, for the summary
        """
        if self.world.rank:
            return
        place = self.live.place
        progress = self.progress
        recorder = self.recorder
        steps = place.plan.chunks * self.member.steps
        self._retry(lambda: recorder.evaluation(progress, steps, evaluation))
        summary = {
            "finished": True,
            "steps": steps,
            "epochs": progress.epoch(steps),
            "nodes": 1,
            "slots": self.member.engine.group.slots,
            "seconds": progress.seconds,
            "bytes_sent": float(self.member.engine.mixer.bytes_sent[0]),
            "metrics": " ".join(progress.objective.metrics),
            **evaluation.averaged,
            **stored,
        }
        self._retry(lambda: recorder.stop(progress, summary))


def _of_ranks(records: Sequence[StepMetrics]) -> StepMetrics:
    """Return the record of a member's step from the records of its ranks.

    Losses and metrics are averaged, and bytes are summed. Rank 0 provides all other values.
    """
    first = records[0]
    if len(records) == 1:
        return first
    sent = [sum(counts) for counts in zip(*(r.bytes_sent for r in records), strict=True)]
    return replace(
        first,
        loss=torch.stack([record.loss for record in records]).mean(0),
        metrics={k: np.mean([r.metrics[k] for r in records], 0) for k in first.metrics},
        bytes_sent=sent,
    )


def _result(
    live: FolderExchange, member: Member, folder: Path
) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluate the average of the models that the record END names.

    :param live: exchange of this member, after the end of the training
    :param member: the training of this member
    :param folder: folder of the training
    :return: the evaluation, and the path and digest of the checkpoint. They are missing if the
        member that published END has not written the checkpoint yet
    """
    job = member.assembly.parts.job
    steps = live.place.plan.chunks * member.steps
    facts: dict[str, Number] = {
        "slots": member.engine.group.slots,
        "steps_per_epoch": member.assembly.steps_per_epoch,
    }
    member.begin(result(live, folder, steps, config.dump(job), facts))
    evaluation = evaluate(member.trainer.replicas, member.trainer.mixer, member.assembly.loader)

    def of_checkpoint() -> dict[str, Any]:
        # Another member may have written the checkpoint during the evaluation.
        path = checkpoint.latest(folder)
        return {"checkpoint": str(path), "digest": checkpoint.digest(path)} if path else {}

    return evaluation, live.decide(lambda: live.place.disk.retry(of_checkpoint, "checkpoints"))


def result(
    live: FolderExchange, folder: Path, steps: int, job: str, facts: dict[str, Number]
) -> list[NodeState]:
    """Return the models that the record END names; if they have no checkpoint yet, write it first.

    The member that published END writes the checkpoint, which has one node for each model, so that
    `checkpoint export` can average them. If that member was killed, a member that starts after the
    end writes the checkpoint instead. If the checkpoint exists already, its models are returned.

    :param live: exchange of a member, after the end of the training
    :param folder: folder of the training
    :param steps: number of steps of the whole training
    :param job: text of the job, for the manifest of the checkpoint
    :param facts: further entries of the manifest
    """
    outcome = live.decide(lambda: _read_or_write(live, folder, steps, job, facts))
    if isinstance(outcome, Path):
        return live.read_checkpoint(outcome)
    return live.local_parts(outcome)


def _read_or_write(
    live: FolderExchange, folder: Path, steps: int, job: str, facts: dict[str, Number]
) -> Path | list[Round]:
    """Read the models that the record END names, and write the checkpoint, if necessary.

    The parameters are as for :func:`result`. Return the path of the checkpoint if it exists
    already; otherwise, return the versions that were read.
    """
    place = live.place
    disk = live.place.disk
    # Read the checkpoint if there is one: long after the end, the files in `models` may be gone.
    if (path := disk.retry(lambda: checkpoint.latest(folder), "checkpoints")) is not None:
        return path
    end = place.ended()
    records = [place.record(version.place, version.round, listed=True) for version in end.versions]
    rounds = [record for record in records if isinstance(record, Round)]
    read, states = live.readable(rounds, len(records))
    if len(read) < len(records):
        present = {record.version for record in read}
        missing = [record_name(*version) for version in end.versions if version not in present]
        place.report(
            f"{folder}: the final average has {len(read)} of {len(records)} models: "
            f"the model of {', '.join(missing)} was removed or is damaged; to average all of them, "
            "copy it back and start this member again"
        )
    if end.place == place.number or (place.number < 0 and _given_up(live, folder)):
        n = len(read)
        meta = {"nodes": n, "asked": n, "lost": "", "lost_at": 0, **facts}
        live.write_result(folder, steps, read, states, job, meta)
    return read


def _given_up(live: FolderExchange, folder: Path) -> bool:
    """Return whether this member has to write the final checkpoint in place of a killed member.

    The member that was to write the checkpoint counts as killed if its unfinished files do not
    change for a lease. If several members notice this at the same time, the member that publishes
    the next file END.k has to write the checkpoint.
    """

    def seen() -> list[tuple[str, int]]:
        """Return the names and sizes in bytes of the files in unfinished checkpoints."""
        sizes = []
        for name in live.place.disk.names("checkpoints"):
            # The writer may remove a folder or file at any time.
            with suppress(FileNotFoundError, NotADirectoryError):
                inside = list(os.scandir(folder / "checkpoints" / name))
                for file in inside if name.endswith(".writing") else ():
                    sizes.append((file.name, file.stat().st_size))
        return sorted(sizes)

    disk = live.place.disk
    names = disk.names("checkpoints")
    # Without unfinished files, the checkpoint was removed, or its writer has not begun yet.
    if not any(name.endswith(".writing") for name in names):
        return False
    claim = f"END.{sum(name.startswith('END.') for name in disk.names(''))}"
    live.place.report(
        f"{folder} has ended, but its checkpoint is incomplete: waiting for its writer"
    )
    before = disk.retry(seen, "checkpoints")
    since = time.monotonic()
    while time.monotonic() - since < live.place.plan.lease_s:
        if disk.retry(lambda: checkpoint.latest(folder), "checkpoints") or live.stopping():
            return False
        time.sleep(live.poll_s)
        if (now := disk.retry(seen, "checkpoints")) != before:
            before = now
            since = time.monotonic()
    return disk.publish(claim, secrets.token_bytes(8))


def plan_of(assembly: Assembly, lease_s: float | None = None) -> TrainingPlan:
    """Return the plan of a training, which all members share.

    :param assembly: the assembled job
    :param lease_s: lease in seconds; None: `members.lease_s` of the job
    """
    section = assembly.parts.job.members
    chunks = -(-assembly.total_steps // steps_of_round(assembly))
    longest = assembly.parts.cadence.longest_round
    # If members are unequal, a block is one round of the fastest. A slow member needs several
    # rounds for it, for which the others wait at the end.
    block = longest if longest > 1 else max(1, min(section.claim_rounds, chunks // 64))
    lease = section.lease_s if lease_s is None else lease_s
    return TrainingPlan(chunks, block, lease, section.keep_every, longest)


def describe_unused_steps(assembly: Assembly) -> str:
    """Return a note if `run.steps` exceeds the number of steps of all epochs; otherwise ""."""
    run = assembly.parts.job.run
    steps = run.epochs * assembly.steps_per_epoch
    if run.steps is None or run.steps <= steps:
        return ""
    return (
        f"run.steps = {run.steps:,}: has no effect, because run.epochs = {run.epochs} gives only "
        f"{steps:,} steps; run.steps can only shorten the training, so begin in another folder "
        f"with run.epochs={-(-run.steps // assembly.steps_per_epoch)}"
    )


def about(names: Sequence[str], shapes: Sequence, devices: Sequence[str]) -> dict[str, str]:
    """Return the facts on which the exact values of a member's model depend, as text by name.

    The facts "host" and "pid" only identify the process. The first record of the member's place
    contains all of them (`Start.about`).

    :param names: names of the model's parameters
    :param shapes: shapes of the parameters
    :param devices: devices of the member's slots, such as "cpu" or "cuda:0"
    """
    return {
        "format": FORMAT,
        "mpigossip": mpigossip.__version__,
        "torch": torch.__version__,
        "layout": layout(names, shapes),
        "host": platform.node(),
        "pid": str(os.getpid()),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "devices": ",".join(
            torch.cuda.get_device_name(device) if device.startswith("cuda") else device
            for device in devices
        ),
    }


def ranks_fact(ranks: int) -> dict[str, str]:
    """Return the number of ranks of a program as a fact for :func:`about`; empty for one rank.

    The exact values of a member's model depend on this number.
    """
    return {"ranks": str(ranks)} if ranks > 1 else {}


# -- the folder and its job ---------------------------------------------------------------------


def job_of(
    folder: Path,
    job: Job | None,
    disk: RecordStore,
    name: str = JOB,
    parameters: str = "",
    several_files: bool = False,
) -> Job:
    """Return the job of the training in a folder; if there is no training, begin one.

    :param folder: folder of the training
    :param job: this member's copy of the job; None: the copy in the folder
    :param disk: the same folder as a record store
    :param name: name of the file with the job. Its first line holds the file format, the version of
        PyTorch and the layout of the parameters, which all members share, too
    :param parameters: layout of the model's parameters; "": not known yet, so that it is not
        compared
    :param several_files: whether a program writes its models in several files
    :raises JobError: if neither ``job`` nor the folder gives a job, if the folder contains another
        training or unrelated files, or if other users may write to a folder that is not shared
    """
    facts = f"torch {torch.__version__.partition('+')[0]}, parameters {parameters}"
    earlier = f"# {FORMAT}, {facts}"
    head = f"# {LOOP_FORMAT}, {facts}" if name == LOOP else earlier
    if not disk.exists(name):
        _begin(folder, job, disk, name, head)
    about = disk.retry(folder.stat)
    if not disk.shared and (about.st_mode & 0o022 or about.st_uid != os.getuid()):
        raise JobError(
            f'other users may write to "{folder}", and so could change the averaged model: run '
            f"`chmod go-w {folder}`, or, if you trust these users, add --shared"
        )
    stored_job = job_there(disk, job, name)
    begun = (disk.read(name, listed=True) or b"").decode(errors="replace").partition("\n")[0]
    if several_files and begun.startswith(earlier):
        raise JobError(
            f'"{folder}" was begun by a program with an earlier version of mpigossip, which can\'t '
            "read models in several files: join without FSDP2 (DDP, or one process), or name "
            "another folder"
        )
    if not begun.startswith((head, earlier)):
        other = begun[2:] if begun.startswith("# ") else "its job names none"
        text = f'"{folder}" was begun with another version or model ({other}; here {head[2:]})'
        raise JobError(f"{text}: join with the same version and model, or name another folder")
    return job or stored_job


def _begin(folder: Path, job: Job | None, disk: RecordStore, name: str, head: str) -> None:
    """Begin a training: create the folders and publish the job.

    :param folder: folder of the training
    :param job: this member's copy of the job; None: an error is raised
    :param disk: the same folder as a record store
    :param name: name of the file with the job
    :param head: first line of this file
    :raises JobError: if ``job`` is None, if the folder is a file or contains something else, or if
        its file system has no hard links
    """
    if job is None:
        raise JobError(none_there(disk))
    if folder.is_file():
        raise JobError(
            f'"{folder}" is a file, but a training needs a folder: give the path of a folder'
        )
    if other := of_something_else(disk, name):
        raise JobError(other)
    disk.begin(FOLDERS)
    content = f"{head}\n{config.dump(job)}".encode()
    try:
        disk.publish_once(name, content)
    except OSError as error:
        if error.errno in NO_LINKS:
            raise JobError(
                f'"{folder}" is on a file system without hard links ({error.strerror}), '
                "which members need; choose a folder on another file system"
            ) from None
        disk.publish(name, content)


def none_there(disk: RecordStore) -> str:
    """Return the message of the error that a folder contains no job of a training."""
    if disk.exists(LOOP):
        return (
            f'"{disk.root}" holds the training of a program (see {LOOP}), not of a job: start that '
            "program, or call mpigossip.join(…, replay=True) in it to repeat the training"
        )
    none = (
        f'"{disk.root}" holds no training yet: begin one by `mpigossip join {disk.root} JOB.toml`'
    )
    return of_something_else(disk, JOB) or none


def of_something_else(disk: RecordStore, name: str) -> str:
    """Return an error message if a folder contains files that belong to no training, otherwise "".

    :param disk: the folder
    :param name: name of the file with the job. If the folder contains it, the result is "", because
        another member has begun the training in the meantime
    """
    names = set(disk.names(""))
    if name in names or names <= {*FOLDERS, "STOP"}:
        return ""
    return f'"{disk.root}" contains files that belong to no training of members; name a new folder'


def job_there(
    disk: RecordStore, own: Job | None = None, name: str = JOB, command: str = "join"
) -> Job:
    """Return the job in the folder of a training.

    Other users may have written that job. Code that it names is therefore imported only if this
    member's own copy of the job names it, too.

    :param disk: the folder
    :param own: this member's copy of the job; None: no code is imported
    :param name: name of the file with the job
    :param command: name of the command, for messages
    :raises JobError: if the job names other code, or differs from ``own`` in a setting that members
        have to share
    """
    text = (disk.read(name, listed=True) or b"").decode(errors="replace") + "\n"
    tables = config.as_dict(config.load(text))
    own_settings = config.as_dict(own) if own is not None else {}
    foreign = [
        f'{section}.{key} = "{value}"'
        for section, table in tables.items()
        for key, value in table.items()
        if isinstance(value, str)
        and ":" in value
        and not (f"{section}.{key}" in FILES and value.startswith("file:"))
        and not {section, f"{section}.{key}"} & {*OWN, "node.devices"}
        and own_settings.get(section, {}).get(key) != value
    ]
    if foreign:
        remedy = OWN_COPY.format(folder=disk.root, command=command)
        raise JobError(f"{disk.root}/{name} imports {', '.join(foreign)}: {remedy}")
    job = load(text)
    differences = differing(own, job, OWN | SLOTS) if own is not None else []
    if own is not None and (slots := _differing_slots(own, job)):
        differences.append(slots)
    if differences:
        raise JobError(
            f'"{disk.root}" holds the training of another job ({"; ".join(differences[:4])}); '
            f"to {command} this training, omit JOB.toml; otherwise, name another folder"
        )
    return job


def _differing_slots(own: Job, job: Job) -> str:
    """Return a text on the settings of slots, if this member's differ from the training's.

    Earlier versions of mpigossip reject a job with several ranks, and can't read the records of
    such a member. Members may therefore have several ranks only if the training began with such a
    job.

    :param own: this member's copy of the job
    :param job: the job in the folder
    :return: settings with both values, or "" if the slots agree
    """
    own_slots = slots_of(own.node.devices) * shape.ranks_of(own)
    slots = slots_of(job.node.devices) * shape.ranks_of(job)
    kinds = {device.partition(":")[0] for device in (*own_slots, *slots)}
    if job.node.ranks_per_node != 1 and len(own_slots) == len(slots) and len(kinds) == 1:
        return ""
    return "; ".join(
        f"{setting} = {here!r}, in the folder {there!r}"
        for setting in sorted(SLOTS)
        if (here := getattr(own.node, setting.partition(".")[2]))
        != (there := getattr(job.node, setting.partition(".")[2]))
    )


def check_lease(lease_s: float, round_s: float) -> None:
    """Check that a lease lasts at least five rounds.

    If it is shorter, other members may close the place of a member that is still working.

    :param lease_s: lease in seconds
    :param round_s: duration of a round in seconds
    :raises JobError: if the lease is too short
    """
    if lease_s < ROUNDS_PER_LEASE * round_s:
        raise JobError(
            f"members.lease_s = {lease_s:g}: must be at least five times the duration of a round, "
            f"which is {three_digits(round_s)} s here, because other members close the place of a "
            "member that is silent for longer than its lease: begin in another folder with "
            f"members.lease_s = {ROUNDS_PER_LEASE * round_s:.0f} (in a program, "
            f"lease_s={ROUNDS_PER_LEASE * round_s:.0f}), or with fewer steps per round"
        )
