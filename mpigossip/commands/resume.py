"""`mpigossip resume`: go on with a run from its last checkpoint, also with other nodes."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, many, settings
from mpigossip.commands.train import begin, exit_code

EXAMPLES = """
mpirun -n 4 mpigossip resume runs/digits run.epochs=40
mpigossip resume runs/digits run.epochs=40 --simulate --nodes 6
"""


def add(commands) -> None:
    """Add it to the parser."""
    resume = command(commands, "resume", run, "go on with a run from its last checkpoint", EXAMPLES)
    resume.add_argument("folder", type=Path, metavar="RUN_DIR")
    resume.add_argument("--simulate", action="store_true", help="nodes in this process, no MPI")
    resume.add_argument(
        "--nodes", type=many, metavar="N", help="with --simulate; default: as many as before"
    )
    settings(resume)


def run(options) -> int:
    """Train on, to the end or to a stop."""
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
            return exit_code(found, alone)
    folder = options.folder if options.folder.is_dir() else None
    limit = begin(_job_of(options.folder), options.settings, folder)
    from mpigossip.cluster.ranks import world
    from mpigossip.runs import launch

    with world(limit) as ranks:
        return exit_code(launch.resume(options.folder, options.settings, ranks, None), ranks)


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
