"""`mpigossip join`: one member of a training that others join and leave, from its folder."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mpigossip
from mpigossip import algorithms, config
from mpigossip.cluster.ranks import Alone
from mpigossip.config import Job, JobError, Part
from mpigossip.config.readable import note
from mpigossip.engine.measurements import Record
from mpigossip.mixing.base import Kind
from mpigossip.mixing.members.disk import Disk
from mpigossip.mixing.members.live import POLL_S, Leaving, Live
from mpigossip.mixing.members.place import FOLDERS, LEASES, Behind, Fenced, Place, Plan
from mpigossip.mixing.members.records import Round
from mpigossip.runs.members.member import Member, steps_of_round
from mpigossip.runs.printer import Printer
from mpigossip.runs.progress import Progress
from mpigossip.runs.recorder import Recorder
from mpigossip.runs.stopper import Stopper, end_of_allocation
from mpigossip.store import checkpoint
from mpigossip.store.manifest import Number
from mpigossip.training.assemble import Assembly, assemble, load, make_bare, make_cadence
from mpigossip.training.evaluate import evaluate

FORMAT = "mpigossip members 1"
OWN = {"run.output", "run.name", "data.workers", "data.cache", "node.timeout_s"}
"""Settings in which members may differ; [checkpoint] and [log], too."""


def join(
    folder: Path,
    job: Job | None = None,
    *,
    shared: bool = False,
    lease_s: float | None = None,
    poll_s: float = POLL_S,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train as one member until every chunk is trained, or until asked to stop; the summary.

    ``shared``: other users' files are taken. ``lease_s`` in place of the job's, ``stop``: whether
    to leave. Raises JobError for user errors.
    """
    disk = Disk(folder, shared)
    if job is not None:
        _check_fit(job)  # before there is a folder
    job = _job_of(folder, job, disk)
    _check_fit(job)
    with Alone() as world:
        assembly = assemble(job, world, 1)
        end = end_of_allocation(job.checkpoint.wall_clock_s)
        try:
            with Stopper(world, folder, end) as stopper:
                plan = plan_of(assembly, lease_s)
                place = Place(disk, plan, tell=note)
                live = Live(place, lambda: stop() or stopper.due() or disk.exists("STOP"), poll_s)
                return _train(live, Member(assembly), folder, world)
        finally:
            assembly.close()


def _train(live: Live, member: Member, folder: Path, world: Alone) -> dict[str, Any]:
    place, promises, about = live.place, 1, _about(member)
    places: list[int] = []
    try:
        while not place.ended():
            try:
                member.begin(live.begin(promises, about))
                places.append(place.number)
                with _Watched(member, live, folder, world) as after:
                    member.train(live, after)
            except Fenced:
                promises = min(2 * promises, LEASES)
                note(f"place {place.number} was silent for too long and was closed; joining anew")
            except Behind:
                note(f"place {place.number} fell behind the others; joining anew")
                live.leave()
            except BaseException:
                live.leave()
                raise
    except Leaving:
        return {"finished": False, "places": places}
    finally:
        live.close()
    return _result(live, member, folder) | {"finished": True, "places": places}


class _Watched:
    """A place's log and lines on the terminal; asks after each step whether to leave."""

    def __init__(self, member: Member, live: Live, folder: Path, world: Alone):
        """The log is logs/000007/log.h5 in the training's folder."""
        self.member, self.live = member, live
        assembly, group = member.assembly, member.engine.group
        job = assembly.job
        self.progress = Progress(
            job=job, folder=folder / "logs" / f"{live.place.number:06d}", nodes=1, asked=1,
            steps_per_epoch=assembly.steps_per_epoch, total_steps=0,
            samples_per_step=group.slots * job.data.batch * job.algorithm.accumulate,
            objective=assembly.trainer.replicas.objective, text=config.dump(job),
            about=lambda: [("place", f"{live.place.number} of {folder}: "
                            f"{live.place.plan.chunks:,} chunks of {member.steps} steps")],
        )  # fmt: skip
        self.hooks = [Recorder(world), Printer(world)]

    def __enter__(self) -> Callable[[Record, int], None]:
        for hook in self.hooks:
            hook.start(self.progress, self.member.assembly)
        return self.after

    def after(self, record: Record, chunk: int) -> None:
        """Log a step; raises Leaving."""
        place, peer = self.live.place, self.live.place.peer
        record = replace(record, index=self.member.done - 1)
        record.figures |= {
            "chunk": chunk,
            "round": place.round,
            "time": time.time(),
            "peer": peer.place if peer else float("nan"),
        }
        record.staleness = [float(place.age - peer.age) if peer else float("nan")]
        for hook in self.hooks:
            hook.step(self.progress, record)
        if self.member.done % self.progress.job.log.flush_steps == 0:
            self.hooks[0].flush()
        if self.live.stopping():
            raise Leaving

    def __exit__(self, *_) -> None:
        self.hooks[0].flush()


def _result(live: Live, member: Member, folder: Path) -> dict[str, Any]:
    """The average at the end, tested; who linked the end writes it as a checkpoint."""
    end, path = live.place.ended(), checkpoint.latest(folder)
    if path is None and end.place == live.place.number:
        path = write_checkpoint(folder, live, member, end.versions)
    if path is None:
        return {"ended by place": end.place}
    nodes = range(checkpoint.read_manifest(path).n)
    member.begin([checkpoint.read_node(path, node) for node in nodes])
    trainer = member.trainer
    found = evaluate(trainer.replicas, trainer.mixer, member.assembly.loader).averaged
    return found | {"checkpoint": str(path), "digest": checkpoint.digest(path)}


def write_checkpoint(folder: Path, live: Live, member: Member, versions) -> Path:
    """Versions as a checkpoint, a node each: what `checkpoint export` averages."""
    records = [live.place.record(one.place, one.round) for one in versions]
    _, states = live.readable([one for one in records if isinstance(one, Round)], len(records))
    steps = live.place.plan.chunks * member.steps
    temporary, entries = checkpoint.begin(folder, steps), []
    for node, state in enumerate(states):
        local = min(steps, int(state.numbers["local_steps"]))
        numbers: dict[str, Number] = {"index": steps, "bytes_sent": 0, "local_steps": local}
        entries.append(checkpoint.write_node(temporary, node, replace(state, numbers=numbers)))
    n, slots = len(states), member.engine.group.slots
    meta: dict[str, Number] = {"nodes": n, "asked": n, "slots": slots, "lost": "", "lost_at": 0,
            "steps_per_epoch": member.assembly.steps_per_epoch}  # fmt: skip
    job = config.dump(member.assembly.job)
    return checkpoint.commit(temporary, folder, steps, entries, job, meta)


def plan_of(assembly: Assembly, lease_s: float | None = None) -> Plan:
    """Chunks of all passes together, and how many of them a member claims at once."""
    section = assembly.job.members
    chunks = -(-assembly.total_steps // steps_of_round(assembly))
    block = max(1, min(section.claim_rounds, chunks // 64))
    return Plan(chunks, block, section.lease_s if lease_s is None else lease_s)


def _about(member: Member) -> dict[str, str]:
    """What a member's bits depend on, for its first record."""
    flat = member.engine.vector.flat
    layout = hashlib.sha256(repr((flat.names, flat.shapes)).encode()).hexdigest()[:16]
    return {
        "format": FORMAT, "mpigossip": mpigossip.__version__, "torch": torch.__version__,
        "layout": layout, "host": platform.node(), "pid": str(os.getpid()),
        "processor": torch.backends.cpu.get_cpu_capability(), "machine": platform.machine(),
        "threads": str(torch.get_num_threads()), "devices": ",".join(member.engine.group.devices),
    }  # fmt: skip


# -- the folder and its job ---------------------------------------------------------------------


def _job_of(folder: Path, job: Job | None, disk: Disk) -> Job:
    """The job of the training in a folder, which begins with ``job`` where there is none."""
    if not (folder / "job.toml").exists():
        _begin(folder, job, disk)
    about = folder.stat()
    if not disk.shared and (about.st_mode & 0o022 or about.st_uid != os.getuid()):
        raise JobError([f'others may write to "{folder}" and put anything into the average: '
                        f"`chmod go-w {folder}`, or give --shared"])  # fmt: skip
    there = job_there(disk, trusted=job is not None)
    if job is None:
        return there
    mine, theirs = (
        {f"{section}.{key}": value for section, table in config.as_dict(one).items()
         for key, value in table.items() if section not in ("checkpoint", "log")}
        for one in (job, there)
    )  # fmt: skip
    names = sorted({*mine, *theirs} - OWN)
    wrong = [f"{one} = {mine.get(one)!r}, there {theirs.get(one)!r}"
             for one in names if mine.get(one) != theirs.get(one)]  # fmt: skip
    if wrong:
        raise JobError([f'"{folder}" holds the training of another job ({"; ".join(wrong[:4])}); '
                        "leave JOB.toml out to join it, or name another folder"])  # fmt: skip
    return job


def _begin(folder: Path, job: Job | None, disk: Disk) -> None:
    if job is None:
        raise JobError([f'"{folder}" holds no training yet; begin one: `mpigossip join {folder} '
                        "JOB.toml`"])  # fmt: skip
    names = set(disk.names(""))
    if names - {*FOLDERS, "STOP"} and "job.toml" not in names:  # another may have begun it now
        raise JobError([f'"{folder}" is a folder of something else; name a new one'])
    for name in FOLDERS:
        disk.make(name)
    try:
        disk.publish("job.toml", config.dump(job).encode())
    except OSError as error:
        raise JobError([f'"{folder}" takes no hard links ({error.strerror}), which members need; '
                        "choose a folder on another file system"]) from None  # fmt: skip


def job_there(disk: Disk, trusted: bool = False) -> Job:
    """The job that stands in the folder; only ``trusted`` does it import code that it names."""
    text = (disk.read("job.toml") or b"").decode(errors="replace") + "\n"
    tables = config.as_dict(config.load(text))
    named = [
        f'{section}.{key} = "{value}"'
        for section, table in tables.items()
        for key, value in table.items()
        if isinstance(value, str) and ":" in value
        and not value.startswith(("file:", "cpu:", "cuda:"))
    ]  # fmt: skip
    if named and not trusted:
        raise JobError([f"{disk.root}/job.toml imports {', '.join(named)}: to run that code give "
                        f"your own copy: `mpigossip join {disk.root} JOB.toml`"])  # fmt: skip
    return load(text)


def _check_fit(job: Job) -> None:
    if found := unfit(job):
        raise JobError(found)


def unfit(job: Job) -> list[str]:
    """What keeps a job from being trained by members that come and go."""
    found, goes = [], [name for name in algorithms.BUILDERS if _goes(name)]
    if not _goes(job.algorithm.name):
        found.append(f'algorithm.name = "{job.algorithm.name}" needs more than one model of one '
                     f"other member in a round; those that go are {', '.join(goes)}")  # fmt: skip
    else:
        method = make_bare(job)
        if method.ahead:
            found.append('algorithm.style = "awc" sends the model before the last step; members '
                         'need algorithm.style = "atc"')  # fmt: skip
        cadence = make_cadence(job, method)
        if cadence.kinds - {Kind.LOCAL, Kind.GOSSIP} or not cadence.turns.plain or cadence.own:
            found.append(f'cadence.name = "{job.cadence.name}": members average with one other '
                         'every H steps: cadence.name = "every", cadence.period = H')  # fmt: skip
    wanted = {"node.wire": ("fp32",), "node.mixer": ("synchronous",),
              "graph.name": ("one-peer-exponential", "random-matching")}  # fmt: skip
    for name, values in wanted.items():
        section, _, key = name.partition(".")
        if (given := getattr(getattr(job, section), key)) not in values:
            found.append(f'{name} = "{given}": members need "{values[0]}"')
    if job.node.precision == "fp16":
        found.append('node.precision = "fp16": members have no common loss scale; take "bf16"')
    return found


def _goes(name: str) -> bool:
    """Return whether a method averages one model with one neighbour after its local steps."""
    brings = Part.of(algorithms.BUILDERS, name).brings
    if brings.get("cadence.name", "every") not in ("every", "always"):
        return False
    try:
        made = algorithms.build(name, None, {}, 0)
    except (TypeError, ValueError):
        return False
    plain = made.vectors == 1 and not (made.scalars or made.ahead) and made.alone is not None
    return plain and made.needs <= {"row-stochastic", "never-global", "cadence:every"}
