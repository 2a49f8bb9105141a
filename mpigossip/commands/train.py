"""`mpigossip train`, `resume` and `simulate`: start or resume a job, with or without MPI."""

from __future__ import annotations

from pathlib import Path

from mpigossip.cluster.world import World
from mpigossip.commands.arguments import command, dry_run, many, settings, tell
from mpigossip.config.errors import OK, STOPPED, Mistake

TRAIN = """
mpirun -n 4 mpigossip train jobs/digits.toml node.devices=cpu:2
mpigossip train jobs/imagenet-resnet50.toml --dry-run --nodes 32
"""
RESUME = """
mpirun -n 4 mpigossip resume runs/digits run.epochs=40
mpigossip resume runs/digits run.epochs=40 --simulate --nodes 6
"""
SIMULATE = "mpigossip simulate jobs/digits.toml --nodes 16 run.name=sixteen"


def add(commands) -> None:
    """Add them to the parser."""
    train = command(commands, "train", _train, "train a job on all ranks of the launcher", TRAIN)
    train.add_argument("job", type=Path, metavar="JOB.toml")
    dry_run(train)
    train.add_argument("--nodes", type=many, help="with --dry-run: nodes to plan for")
    settings(train)
    summary = "go on with a run from its last checkpoint"
    resume = command(commands, "resume", _resume, summary, RESUME)
    resume.add_argument("folder", type=Path, metavar="RUN_DIR")
    resume.add_argument("--simulate", action="store_true", help="nodes in this process, no MPI")
    resume.add_argument(
        "--nodes", type=many, metavar="N", help="with --simulate; default: as many as before"
    )
    settings(resume)
    summary = "the same job with n nodes in this process, without MPI"
    simulate = command(commands, "simulate", _simulate, summary, SIMULATE)
    simulate.add_argument("job", type=Path, metavar="JOB.toml")
    simulate.add_argument("--nodes", type=many, required=True, metavar="N")
    dry_run(simulate)
    settings(simulate)


def _train(options) -> int:
    from mpigossip.config import JobError

    if options.nodes is not None and not options.dry_run:
        raise JobError(
            [f"--nodes {options.nodes} goes with --dry-run: how many nodes train is said to the "
             f"launcher (mpirun -n {options.nodes} mpigossip train …), or to "
             f"`mpigossip simulate {options.job} --nodes {options.nodes}`"]
        )  # fmt: skip
    if options.dry_run:
        from mpigossip.analysis.dryrun import describe
        from mpigossip.training import assemble

        tell(describe(assemble.load(options.job, options.settings), options.nodes))
        return OK
    limit = _begin(options.job, options.settings)
    from mpigossip.cluster.ranks import world
    from mpigossip.runs import launch
    from mpigossip.training import assemble

    with world(limit) as ranks:
        with ranks.together(Mistake):
            job = assemble.load(options.job, options.settings)
        return _exit_code(launch.train(job, ranks), ranks)


def _resume(options) -> int:
    from mpigossip.config import JobError

    if options.nodes is not None and not options.simulate:
        raise JobError(
            [f"--nodes {options.nodes}: resume takes the launcher's ranks as nodes, or with "
             "--simulate a number from 1 on"]
        )  # fmt: skip
    if options.simulate:
        from mpigossip.cluster.ranks import Alone
        from mpigossip.runs import launch

        with Alone() as alone:
            found = launch.resume(options.folder, options.settings, alone, options.nodes)
            return _exit_code(found, alone)
    folder = options.folder if options.folder.is_dir() else None
    limit = _begin(_job_of(options.folder), options.settings, folder)
    from mpigossip.cluster.ranks import world
    from mpigossip.runs import launch

    with world(limit) as ranks:
        return _exit_code(launch.resume(options.folder, options.settings, ranks, None), ranks)


def _simulate(options) -> int:
    from mpigossip.analysis.dryrun import describe
    from mpigossip.cluster.ranks import Alone
    from mpigossip.runs import launch
    from mpigossip.training import assemble

    job = assemble.load(options.job, options.settings)
    if not any(setting.strip().startswith("run.output") for setting in options.settings):
        # a real run of the same job has the folder's plain name
        job = assemble.with_output(job, f"{job.run.folder}-simulated")
    if options.dry_run:
        tell(describe(job, options.nodes))
        return OK
    with Alone() as alone:
        return _exit_code(launch.train(job, alone, options.nodes), alone)


def _job_of(folder: Path) -> dict:
    """The job of the newest checkpoint; where it can't be read, all ranks will say so together."""
    from mpigossip.config import JobError
    from mpigossip.config.reading import read
    from mpigossip.store import StoreError, checkpoint

    try:
        newest = checkpoint.latest(folder)
        return read(checkpoint.read_manifest(newest).job) if newest else {}
    except (StoreError, JobError, OSError):
        return {}


def _begin(job: Path | dict, settings: list[str], folder: Path | None = None) -> float:
    """Begin as a rank, before torch and MPI are imported; seconds that MPI has to start."""
    from mpigossip import config
    from mpigossip.cluster import process

    try:
        found = config.load(job, settings)
    except config.JobError:  # told once all ranks are there
        return process.begin(folder)
    return process.begin(folder or found.run.folder, found.node.timeout_s)


def _exit_code(summary: dict, world: World) -> int:
    """The exit code that a summary means, the same on every rank."""
    return STOPPED if world.agree(int(bool(summary) and not summary["finished"])) else OK
