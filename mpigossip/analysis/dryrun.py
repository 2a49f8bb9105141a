"""Description of a job that is not run: all settings, and the traffic and memory of a step."""

import os
import textwrap
from collections.abc import Sequence

from mpigossip import config
from mpigossip.cluster.local_devices import local_rank
from mpigossip.config import Job, JobError
from mpigossip.config.readable import format_bytes, pluralize
from mpigossip.mixing.base import ExchangeKind, bytes_per_exchange
from mpigossip.training import assemble, costs, shape

NODES = 8
"""Number of nodes that is assumed if neither `--nodes` nor a launcher gives a number."""


def describe(job: Job, nodes: int | None) -> str:
    """Return the job with all defaults as TOML, with comments on traffic and memory of a step.

    :param job: the job
    :param nodes: number of nodes; None: the number of nodes that the ranks of the launcher form, or
        `NODES` without a launcher
    :raises JobError: if the job cannot run on this number of nodes
    :raises StoreError: if its data can't be read
    """
    ranks = launched()
    job = shape.with_ranks(job, local_rank()[1]) if ranks else job
    requested = job.node.ranks_per_node
    per = requested if isinstance(requested, int) else 1
    n = nodes or (ranks // per if ranks else NODES)
    problems = [m for m in assemble.mistakes(job, n) if not m.startswith("node.devices")]
    if problems:
        raise JobError(problems)
    what, note = costs.subject(job)
    planned = costs.exchanges(what, n)
    steps = what.steps_per_epoch(n)
    nodes_and_slots = f"{pluralize(n, 'node')} x {pluralize(what.slots, 'slot')}"
    lines = [
        config.dump(job),
        *_row(f"planned for {nodes_and_slots}", f"; {note}" if note else ""),
        *_row(
            "model",
            f"{what.flat.count:,} parameters, {format_bytes(4 * what.flat.count)} in float32",
        ),
        *_row("graph", str(planned.parts.graph)),
        *_row(
            "step",
            f"{what.per_step} samples per node, {n * what.per_step} in all; "
            f"{steps} steps per epoch",
        ),
        *_rates(job, n, what.per_step, steps),
        *_traffic(job, planned, what),
        *_memory(costs.memory(what, planned), what.slots * (job.node.devices,)),
    ]
    return "\n".join(lines)


def _row(label: str, words: str) -> list[str]:
    """Return a TOML comment that begins with a label, as lines wrapped at 80 characters."""
    return textwrap.wrap(
        f"# {label:13}{words}",
        80,
        subsequent_indent=f"#{'':14}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def launched() -> int | None:
    """Return the number of ranks that a launcher has started; None without a launcher.

    The number is read from environment variables, because MPI is not started.
    """
    from mpigossip.cluster.launcher import launcher_ranks

    return next((ranks for _, ranks, _ in launcher_ranks(os.environ)), None)


def _rates(job: Job, n: int, per_step: int, steps: int) -> list[str]:
    """Return lines on the learning rates of the run; [] if the run has no step.

    The schedule covers all epochs, also if `run.steps` ends the run earlier.

    :param job: the job
    :param n: number of nodes
    :param per_step: samples per node and step
    :param steps: number of steps per epoch
    """
    from mpigossip.training.schedule import full_rate, schedule

    total = job.run.epochs * steps
    made = total if job.run.steps is None else min(total, job.run.steps)
    if not made:
        return []
    rate = schedule(job.schedule, steps, total, n * per_step)
    peak = max(rate(k) for k in {*range(0, made, max(1, made // 1000)), made - 1})
    return [
        *_row("rate", f"first {rate(0):.4g}, largest {peak:.4g}, last {rate(made - 1):.4g}"),
        *_row("", full_rate(job.schedule, n * per_step)[1]),
    ]


def _traffic(job: Job, planned: costs.Exchanges, what: costs.Subject) -> list[str]:
    """Return lines on the bytes per step: of an average step, and of a float32 ring all-reduce."""
    ring = bytes_per_exchange(planned.parts.graph, ExchangeKind.GLOBAL, 0, 0, 4 * what.flat.size)
    average = planned.bytes_per_step
    ratio = f"{average / ring:.2f} x" if ring else "against"
    vectors = pluralize(planned.parts.method.vectors, "vector")
    return _row(
        "traffic",
        f"{format_bytes(average)} per node and step between nodes ({vectors}, {job.node.wire}); "
        f"{ratio} the {format_bytes(ring)} of a ring all-reduce in float32",
    )


def _memory(parts: dict[str, int], devices: Sequence[str]) -> list[str]:
    """Return lines on the memory of a node by purpose.

    Activations, batches and libraries are not included.

    :param parts: bytes of a node by purpose
    :param devices: kinds of all slots of the node, as `node.devices` names them
    """
    listed = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
    total = costs.describe_memory(parts, devices)
    return _row("memory", f"{total}: {listed}; activations and batches are not included")
