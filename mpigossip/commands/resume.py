"""`mpigossip resume`: go on with a run from its last checkpoint, also with other nodes."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.parts import command, settings
from mpigossip.commands.train import exit_code

EXAMPLES = """
mpirun -n 4 mpigossip resume runs/digits run.epochs=40
mpigossip resume runs/digits run.epochs=40 --simulate
"""


def add(commands) -> None:
    """Add it to the parser."""
    resume = command(commands, "resume", run, "go on with a run from its last checkpoint", EXAMPLES)
    resume.add_argument("folder", type=Path, metavar="RUN_DIR")
    resume.add_argument("--simulate", action="store_true", help="nodes in this process, no MPI")
    settings(resume)


def run(options) -> int:
    """Train on, to the end or to a stop."""
    from mpigossip.cluster.ranks import Alone, world
    from mpigossip.runs import launch

    if options.simulate:
        with Alone() as alone:
            return exit_code(launch.resume(options.folder, options.settings, alone, None), alone)
    with world() as ranks:
        return exit_code(launch.resume(options.folder, options.settings, ranks, ranks.size), ranks)
