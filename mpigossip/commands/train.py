"""`mpigossip train`: a job on all ranks of the launcher; alone, on one node."""

from __future__ import annotations

from pathlib import Path

from mpigossip.cluster.world import World
from mpigossip.commands.arguments import command, dry_run, many, settings, tell
from mpigossip.config.errors import OK, STOPPED, Mistake

EXAMPLES = """
mpirun -n 4 mpigossip train jobs/digits.toml node.devices=cpu:2
mpigossip train jobs/imagenet-resnet50.toml --dry-run --nodes 32
"""


def add(commands) -> None:
    """Add it to the parser."""
    train = command(commands, "train", run, "train a job on all ranks of the launcher", EXAMPLES)
    train.add_argument("job", type=Path, metavar="JOB.toml")
    dry_run(train)
    train.add_argument("--nodes", type=many, help="with --dry-run: nodes to plan for")
    settings(train)


def run(options) -> int:
    """Train to the end, or to a stop."""
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
    limit = begin(options.job, options.settings)
    from mpigossip.cluster.ranks import world
    from mpigossip.runs import launch
    from mpigossip.training import assemble

    with world(limit) as ranks:
        with ranks.together(Mistake):
            job = assemble.load(options.job, options.settings)
        return exit_code(launch.train(job, ranks), ranks)


def begin(job: Path | dict, settings: list[str], folder: Path | None = None) -> float:
    """Begin as a rank, before torch and MPI are imported; seconds that MPI has to start."""
    from mpigossip import config
    from mpigossip.cluster import process

    try:
        found = config.load(job, settings)
    except config.JobError:  # told once all ranks are there
        return process.begin(folder)
    return process.begin(folder or found.run.folder, found.node.timeout_s)


def exit_code(summary: dict, world: World) -> int:
    """The exit code that a summary means, the same on every rank."""
    return STOPPED if world.agree(int(bool(summary) and not summary["finished"])) else OK
