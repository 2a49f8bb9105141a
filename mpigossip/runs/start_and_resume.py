"""Start and resume of jobs, from a job file or run directory to the summary."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from mpigossip import config
from mpigossip.algorithms import BUILDERS
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.choices import spec_of
from mpigossip.config.errors import UserError
from mpigossip.config.readable import print_note
from mpigossip.members.place import FOLDERS
from mpigossip.runs.job import JobNode
from mpigossip.runs.job import train as training
from mpigossip.runs.lock import locked
from mpigossip.runs.node import closing
from mpigossip.runs.printer import print_line
from mpigossip.runs.run import nodes_requested
from mpigossip.runs.snapshot_and_restore import read_manifest
from mpigossip.runs.survive import prepare
from mpigossip.store import checkpoint
from mpigossip.store.checkpoint import Manifest
from mpigossip.training.assemble import assemble, load
from mpigossip.training.rules import period_problem


def run(job: Job, world: World, n: int, resume: Path | None) -> dict[str, Any]:
    """Build the node of this process and train a job on n nodes; collective under MPI.

    :param job: the job
    :param world: ranks of the run
    :param n: number of nodes
    :param resume: checkpoint to continue from; None: start from step 0
    :return: the summary on rank 0, elsewhere {}
    :raises UserError: on all ranks, if the job has user errors, or if the checkpoint is damaged or
        does not fit the job
    """
    world.timeout_s = job.node.timeout_s
    prepare(job, world)
    node = JobNode(assemble(job, world, n), world)
    with closing(node, world):
        return training(node, resume)


def train(job: Job, world: World, n: int | None = None) -> dict[str, Any]:
    """Train a job from the start, or from the newest checkpoint of its run directory.

    :param job: the job
    :param world: ranks of the run
    :param n: number of nodes; None: the number of nodes that the ranks of ``world`` form
    :return: the summary on rank 0, elsewhere {}
    :raises UserError: if the job has user errors, if its run directory contains a run of another
        job or with another number of nodes, or if the checkpoint is damaged
    """
    if message := period_problem(job):
        raise JobError(message)
    n = n or _nodes(job, world)
    with locked(job.run.folder, world):
        path = newest(job.run.folder, world)
        if path is not None:
            manifest = read_manifest(path, world)
            with world.raise_together(UserError):
                _check_is_job(manifest, path)
                _check_same_job(job, n, manifest)
        return run(job, world, n, path)


def _nodes(job: Job, world: World) -> int:
    """Group the ranks into nodes, and return the number of nodes; collective.

    :param job: the job
    :param world: ranks of the run
    :raises JobError: on all ranks, if the ranks can't be divided into nodes
    """
    world.timeout_s = job.node.timeout_s
    world.group_into_nodes(job.node.ranks_per_node)
    return world.nodes.count


def newest(folder: Path, world: World) -> Path | None:
    """Return the newest complete checkpoint of a run directory; collective.

    Rank 0 selects it, because the files may differ on other hosts. If newer checkpoints are
    damaged, rank 0 reports and renames them.

    :param folder: the run directory
    :param world: ranks of the run
    :return: folder of the checkpoint; None if there is none
    :raises JobError: if all checkpoints are damaged, or if the folder contains a training of
        members
    """
    newest_path = None
    checkpoints = folder / "checkpoints"
    with world.raise_together(UserError):
        if world.rank == 0:
            if all((folder / name).is_dir() for name in FOLDERS):
                raise JobError(
                    f'"{folder}" holds a training of members: continue it with `mpigossip join '
                    f"{folder}` (in a program, mpigossip.join), or choose another folder "
                    "(run.output of a job, run=… of Gossip)"
                )
            newest_path, damaged = checkpoint.newest(folder)
            if newest_path is None and (damaged or any(checkpoints.glob("step-*.damaged*"))):
                raise JobError(
                    [
                        *damaged.values(),
                        f'"{checkpoints}" holds checkpoints, but none of them is complete: copy a '
                        "complete one to it, or start from step 0 after "
                        f"`mv {quote(str(checkpoints))} {quote(f'{checkpoints}.damaged')}`",
                    ]
                )
            for path, problem in damaged.items():
                new_name = checkpoint.rename_damaged(path).name
                print_line(
                    f"{problem}. The run continues from {newest_path}; the damaged checkpoint was "
                    f"renamed to {new_name}"
                )
    return world.broadcast(newest_path)


def resume(folder: Path, overrides: Sequence[str], world: World, n: int | None) -> dict[str, Any]:
    """Resume the run in a run directory from its newest complete checkpoint.

    :param folder: the run directory
    :param overrides: settings "section.key=value" that replace settings of the run's job
    :param world: ranks of the run
    :param n: number of nodes; None: with MPI, the number of nodes that the ranks form; without MPI,
        the number of nodes of the checkpoint
    :return: the summary on rank 0, elsewhere {}
    :raises UserError: if the folder has no run that can be resumed, or if overrides are invalid
    """
    with world.raise_together(UserError):
        if not folder.is_dir():
            raise JobError(
                f'"{folder}" is not a run directory: there is no such folder; give the folder that '
                "a job names as run.output"
            )
    with locked(folder, world):
        path = newest(folder, world)
        with world.raise_together(UserError):
            if path is None:
                raise JobError(
                    f'no complete checkpoint in "{folder}"; start the run with '
                    "`mpigossip train JOB.toml`"
                )
        manifest = read_manifest(path, world)
        with world.raise_together(UserError):
            _check_is_job(manifest, path)
            job = load(manifest.job, overrides)
            if message := period_problem(job):
                raise JobError(message)
            renames = any(setting.strip().startswith("run.output") for setting in overrides)
            if renames and job.run.folder.resolve() != folder.resolve():
                raise JobError(
                    f'run.output: a run continues in its own folder, "{folder}"; to keep it '
                    "unchanged, copy the folder and resume the copy"
                )
            # The folder may have been moved after the checkpoint was written.
            job = replace(job, run=replace(job.run, output=str(folder)))
            if world.rank == 0 and (note := _kept_cadence(job, load(manifest.job))):
                print_note(note)
        if world.comm is not None:
            n = n or _nodes(job, world)
        return run(job, world, n or manifest.n, path)


def _kept_cadence(job: Job, before: Job) -> str:
    """Return a note if a run keeps its cadence, but its new algorithm implies another one.

    A job stores all names, also those that its algorithm implied when it was started. The result is
    "" if the algorithm or the cadence is as it should be.

    :param job: the job with the settings of the resume
    :param before: the job as the run directory contains it
    """
    name = job.algorithm.name
    spec = spec_of(BUILDERS, name)
    implied = spec.implies.get("cadence.name") if spec else None
    kept = job.cadence.name
    if implied in (None, kept) or name == before.algorithm.name or kept != before.cadence.name:
        return ""
    return (
        f'algorithm.name = "{name}": this run keeps its cadence.name = "{kept}", but a new job '
        f'would have "{implied}"; to change it, add cadence.name={implied}'
    )


def _check_is_job(manifest: Manifest, path: Path) -> None:
    """Raise JobError if a custom loop wrote the checkpoint ``path`` with this manifest."""
    if manifest.meta.get("door") == "loop":
        raise JobError(
            f'"{path.parents[1]}" holds the run of a custom training loop: start that program '
            "again, which continues by optimizer.resume() (`mpigossip checkpoint show` prints its "
            "name)"
        )


def _check_same_job(job: Job, n: int, manifest: Manifest) -> None:
    """Check that a run directory contains a run of this job with this number of nodes.

    If nodes have failed since the last start of that run, ``n`` is compared with their number then.

    :param job: the job
    :param n: number of nodes
    :param manifest: manifest of the newest checkpoint in the run directory of the job
    :raises JobError: if the run belongs to another job, or has another number of nodes
    """
    if n != nodes_requested(manifest):
        raise JobError(
            f'run.output: "{job.run.folder}" holds a run of {nodes_requested(manifest)} nodes, '
            f"not of {n}; name another folder with run.output=…, or change the number of nodes by "
            f"`mpigossip resume {job.run.folder}` on {n} ranks (simulated: with --simulate "
            f"--nodes {n})"
        )
    # `resume` replaces the pattern in run.output by the name of the folder, so the values differ
    # although the folder is the same.
    if differences := differing(job, load(manifest.job), {"run.output"}):
        folder = job.run.folder
        raise JobError(
            f'run.output: "{folder}" holds a run of another job ({"; ".join(differences[:4])}); '
            f"name another folder with run.output=…, or continue it by `mpigossip resume "
            f"{folder} section.key=value`"
        )


def differing(job: Job, other: Job, excluded: Collection[str] = ()) -> list[str]:
    """Return a text with both values for each setting in which two jobs differ.

    :param job: the job
    :param other: the job in the run directory
    :param excluded: names of sections and settings that are not compared
    """
    now = config.as_dict(job)
    before = config.as_dict(other)
    return [
        f"{section}.{key} = {now[section].get(key)!r}, in the folder {before[section].get(key)!r}"
        for section in now
        if section not in excluded
        for key in {**now[section], **before[section]}
        if f"{section}.{key}" not in excluded and now[section].get(key) != before[section].get(key)
    ]
