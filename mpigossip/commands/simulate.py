"""`mpigossip simulate`: the same job with n nodes in this process, without MPI."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, dry_run, many, settings, tell
from mpigossip.commands.train import exit_code
from mpigossip.config.errors import OK

EXAMPLES = "mpigossip simulate jobs/digits.toml --nodes 16 run.name=sixteen"


def add(commands) -> None:
    """Add it to the parser."""
    simulate = command(
        commands, "simulate", run,
        "the same job with n nodes in this process, without MPI", EXAMPLES,
    )  # fmt: skip
    simulate.add_argument("job", type=Path, metavar="JOB.toml")
    simulate.add_argument("--nodes", type=many, required=True, metavar="N")
    dry_run(simulate)
    settings(simulate)


def run(options) -> int:
    """Train to the end, or to a stop."""
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
        return exit_code(launch.train(job, alone, options.nodes), alone)
