"""`mpigossip simulate`: the same job with n nodes in this process, without MPI."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpigossip.commands.arguments import command, dry_run, settings
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
    simulate.add_argument("--nodes", type=int, required=True, metavar="N")
    simulate.add_argument(
        "--seeds", type=seeds, metavar="0,1,…",
        help="several values of run.seed in one vectorized call (with node.vmap=true), each in a "
        "folder of its own below run.output: from the start, whole or not at all",
    )  # fmt: skip
    dry_run(simulate)
    settings(simulate)


def seeds(text: str) -> list[int]:
    """Whole numbers with commas between."""
    if not all(word.strip().isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f'"{text}": needs whole numbers with commas, as 0,1,2')
    return [int(word) for word in text.split(",")]


def run(options) -> int:
    """Train to the end, or to a stop."""
    from mpigossip.analysis.dryrun import describe
    from mpigossip.cluster.ranks import Alone
    from mpigossip.config import JobError
    from mpigossip.runs import launch
    from mpigossip.training import assemble

    if options.nodes < 1:
        raise JobError([f"--nodes {options.nodes}: at least 1 node is needed"])
    job = assemble.load(options.job, options.settings)
    if not any(setting.strip().startswith("run.output") for setting in options.settings):
        # a real run of the same job has the folder's plain name
        job = assemble.with_output(job, f"{job.run.folder}-simulated")
    if options.dry_run:
        print(describe(job, options.nodes))
        return OK
    with Alone() as alone:
        if options.seeds:
            from mpigossip.analysis.study import vectorized

            vectorized.simulate(job, options.seeds, alone, options.nodes)
            return OK
        return exit_code(launch.train(job, alone, options.nodes), alone)
