"""`mpigossip plan`: predict the time of a step and of an epoch on n nodes."""

from __future__ import annotations

import json
from pathlib import Path

from mpigossip.commands.arguments import (
    BYTES_A_SECOND,
    SECONDS,
    amount,
    command,
    numbers_of_nodes,
    quantity,
    settings,
    share,
    tell,
    times,
)

EXAMPLES = """
mpigossip plan jobs/cifar10-resnet20.toml --nodes 4,8,…,1024 \\
    --bandwidth 25GB/s --latency 5us
srun -N 4 mpigossip plan jobs/imagenet-resnet50.toml --nodes 4,16 --out p.png

The second measures compute and network of its nodes. Latency is a whole small
round's, bandwidth what a node sends and receives at once; alone, 10 µs and
100 Gbit/s are assumed. An ellipsis doubles on.
"""


def add(commands) -> None:
    """Add it to the parser."""
    summary = "predict step time, traffic and training time on n nodes per graph, cadence and wire"
    plan = command(commands, "plan", run, summary, EXAMPLES)
    plan.add_argument("job", type=Path, metavar="JOB.toml")
    settings(plan)
    plan.add_argument(
        "--nodes", required=True, type=numbers_of_nodes, metavar="N,N,…", help="numbers of nodes"
    )
    plan.add_argument("--epochs", type=amount, help="default: the job's run.epochs")
    time, rate = quantity(SECONDS), quantity(BYTES_A_SECOND)
    plan.add_argument("--compute", type=time, metavar="T", help="of a step, 80ms; unset: measured")
    plan.add_argument("--node", type=time, metavar="T", help="averaging inside the node")
    plan.add_argument("--latency", type=time, metavar="T", help="of a small round, such as 5us")
    plan.add_argument("--bandwidth", type=rate, metavar="B", help="such as 25GB/s or 200Gbit")
    plan.add_argument("--sum", type=rate, metavar="B", help="bytes added, 300GB/s")
    plan.add_argument("--coding", type=rate, metavar="B", help="bytes that wires code, 50GB/s")
    plan.add_argument("--jitter", type=share, metavar="P", help="deviation of computing, 5%%")
    plan.add_argument("--period", type=times, metavar="H", help="of an adaptive cadence")
    plan.add_argument("--seconds", type=amount, default=8.0, help="spent on measuring, about")
    plan.add_argument("--best", action="store_true", help="propose graph, method, H and wire")
    plan.add_argument("--save", type=Path, metavar="FILE", help="write it for clock.network")
    plan.add_argument("--out", type=Path, metavar="OUT.png", help="a picture")
    plan.add_argument("--json", action="store_true", help="every combination, as one object")


def run(options) -> None:
    """Measure on all ranks; print and draw on rank 0."""
    from mpigossip.analysis.dryrun import launched
    from mpigossip.analysis.machine import Given, examine
    from mpigossip.analysis.plan import as_json, table
    from mpigossip.analysis.plan.report import picture, text
    from mpigossip.cluster.ranks import Alone, world
    from mpigossip.config import JobError
    from mpigossip.training import assemble
    from mpigossip.training.costs import subject
    from mpigossip.training.shape import with_ranks

    with world() if (launched() or 1) > 1 else Alone() as ranks:
        with ranks.together(JobError):
            job = assemble.load(options.job, options.settings)
        ranks.arrange(job.node.ranks_per_node)
        if ranks.comm is not None:
            job = with_ranks(job, ranks.nodes.per_node)
        with ranks.together(JobError):
            what, note = subject(job)
        given = Given(
            options.compute, options.node, options.latency, options.bandwidth,
            options.sum, options.coding, options.jitter,
        )  # fmt: skip
        machine = examine(what, ranks, given, options.seconds)
        if ranks.rank != 0:
            return
        if options.save:
            machine.save(options.save)
        epochs = what.job.run.epochs if options.epochs is None else options.epochs
        if options.best:
            _best(options, what, machine)
            return
        rows = table(what, machine, options.nodes, epochs, options.period)
        if options.out:
            picture(what, rows, options.nodes, epochs, options.out)
        if options.json:
            tell(json.dumps(as_json(what, machine, rows, epochs)))
            return
        tell(text(what, machine, rows, options.nodes, epochs, note))
        if options.out:
            tell(options.out)


def _best(options, what, machine) -> None:
    """Print what is proposed for each number of nodes."""
    from mpigossip.analysis.plan.best import as_json, proposals, text

    each = {n: proposals(options.job, options.settings, what, machine, n) for n in options.nodes}
    if options.json:
        tell(json.dumps({n: as_json(*found) for n, found in each.items()}))
        return
    told = [text(options.job, options.settings, *found, n) for n, found in each.items()]
    tell("\n\n".join(told))
