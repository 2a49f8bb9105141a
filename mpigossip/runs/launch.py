"""Commands that train: start or resume a job, from its file or run directory to the summary."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from mpigossip import config
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import UserError
from mpigossip.mixing.members.place import FOLDERS
from mpigossip.runs.job import JobNode
from mpigossip.runs.job import train as training
from mpigossip.runs.lock import locked
from mpigossip.runs.node import closing
from mpigossip.runs.printer import print_line
from mpigossip.runs.run import nodes_requested
from mpigossip.runs.survive import prepare
from mpigossip.store import checkpoint
from mpigossip.store.checkpoint import Manifest
from mpigossip.training.assemble import assemble, load


def run(job: Job, world: World, n: int, resume: Path | None) -> dict[str, Any]:
    """Train the job on n nodes, from a checkpoint if one is given; return the summary on rank 0.

    Collective under MPI. JobError, on every rank, for user errors.
    """
    world.timeout_s = job.node.timeout_s
    prepare(job, world)
    node = JobNode(assemble(job, world, n), world)
    with closing(node, world):
        return training(node, resume)


def train(job: Job, world: World, n: int | None = None) -> dict[str, Any]:
    """Train a job from the start, or from the newest checkpoint of its run directory.

    ``n``: nodes, None for as many as the ranks make.
    """
    n = n or _nodes(job, world)
    with locked(job.run.folder, world):
        found = newest(job.run.folder, world)
        with world.raise_together(UserError):
            if found is not None:
                _same_job(job, n, found)
        return run(job, world, n, found)


def _nodes(job: Job, world: World) -> int:
    """Return how many nodes the ranks form; JobError on all of them where they can't."""
    world.timeout_s = job.node.timeout_s
    world.group_into_nodes(job.node.ranks_per_node)
    return world.nodes.count


def newest(folder: Path, world: World) -> Path | None:
    """Return the newest complete checkpoint as rank 0 sees it: ranks may see disks differently.

    Damaged ones that are newer are named and set aside. JobError where only such are left, and
    for a training of members.
    """
    found = None
    place = folder / "checkpoints"
    with world.raise_together(UserError):
        if world.rank == 0:
            if all((folder / one).is_dir() for one in FOLDERS):
                raise JobError(
                    f'"{folder}" holds a training of members: `mpigossip join {folder}` goes on '
                    "with it (programs: mpigossip.join); or name another folder"
                )
            found, damaged = checkpoint.newest(folder)
            if found is None and (damaged or any(place.glob("step-*.damaged*"))):
                raise JobError(
                    [
                        *damaged.values(),
                        f'"{place}" holds checkpoints, and none of them is '
                        "complete, so no run begins at step 0 there: copy a complete one to it, or "
                        f"begin anew after `mv {quote(str(place))} {quote(f'{place}.damaged')}`",
                    ]
                )
            for path, problem in damaged.items():
                aside = checkpoint.set_aside(path).name
                print_line(
                    f"{problem}. The run goes on from {found}, and keeps this one as {aside}"
                )
    return world.broadcast(found)


def resume(folder: Path, overrides: Sequence[str], world: World, n: int | None) -> dict[str, Any]:
    """Resume the run in a folder from its newest complete checkpoint.

    ``n``: nodes; None for as many as the ranks make, or without ranks as the checkpoint has.
    """
    with world.raise_together(UserError):
        if not folder.is_dir():
            raise JobError(f'"{folder}" is no run directory: there is no such folder')
    with locked(folder, world):
        found = newest(folder, world)
        with world.raise_together(UserError):
            if found is None:
                raise JobError(
                    f'no complete checkpoint in "{folder}"; start the run with '
                    "`mpigossip train JOB.toml`"
                )
            manifest = _of_a_job(found)
            job = load(manifest.job, overrides)
            asked = any(one.strip().startswith("run.output") for one in overrides)
            if asked and job.run.folder.resolve() != folder.resolve():
                raise JobError(
                    f'run.output: a run goes on in its own folder, "{folder}"; to keep it as it is '
                    "and go on elsewhere, copy the folder and resume the copy"
                )
            # the folder may have been moved since
            job = replace(job, run=replace(job.run, output=str(folder)))
        if world.comm is not None:
            n = n or _nodes(job, world)
        return run(job, world, n or manifest.n, found)


def _of_a_job(path: Path) -> Manifest:
    """Return the manifest; JobError where a custom loop wrote the checkpoint."""
    manifest = checkpoint.read_manifest(path)
    if manifest.meta.get("door") == "loop":
        raise JobError(
            f'"{path.parents[1]}" holds the run of a custom training loop: start that program '
            "again, its optimizer.resume() continues (`mpigossip checkpoint show` prints which)"
        )
    return manifest


def _same_job(job: Job, n: int, newest: Path) -> None:
    """JobError where another job, or one of other nodes, has begun the run directory.

    A run that has lost nodes since continues on as many as it was started with.
    """
    manifest = _of_a_job(newest)
    if n != nodes_requested(manifest):
        raise JobError(
            f'run.output: "{job.run.folder}" holds a run of {nodes_requested(manifest)} nodes, '
            f"here are "
            f"{n}; name another folder with run.output=…, or change the number by `mpigossip "
            f"resume {job.run.folder}` on {n} ranks (simulated: with --simulate --nodes {n})"
        )
    # `resume` has saved the folder in place of its pattern
    if found := differing(job, load(manifest.job), {"run.output"}):
        folder = job.run.folder
        raise JobError(
            f'run.output: "{folder}" holds a run of another job ({"; ".join(found[:4])}); '
            f"name another folder with run.output=…, or go on with it by `mpigossip resume "
            f"{folder} section.key=value`"
        )


def differing(job: Job, there: Job, apart: Collection[str] = ()) -> list[str]:
    """Return the settings in which jobs differ, but for some sections and settings, ``apart``."""
    now = config.as_dict(job)
    before = config.as_dict(there)
    return [
        f"{section}.{key} = {now[section].get(key)!r}, there {before[section].get(key)!r}"
        for section in now
        if section not in apart
        for key in {**now[section], **before[section]}
        if f"{section}.{key}" not in apart and now[section].get(key) != before[section].get(key)
    ]
