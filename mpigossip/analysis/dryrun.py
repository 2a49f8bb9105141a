"""What a job would do: the resolved job, traffic and memory per step, without MPI or GPU."""

from __future__ import annotations

import os

import torch

from mpigossip import config
from mpigossip.config import Job, JobError
from mpigossip.mixing.base import Kind, Layout, traffic
from mpigossip.store import StoreError
from mpigossip.training import models, setup
from mpigossip.training.data import SyntheticSource, source
from mpigossip.training.flat import flatten
from mpigossip.training.progress import size
from mpigossip.training.state import leaves

NODES = 8
"""Planned for, where neither `--nodes` nor a launcher says how many."""
STEPS = 240
"""Steps over which traffic is averaged: whole periods of all usual graphs and cadences."""


def describe(job: Job, nodes: int | None) -> str:
    """The job with all defaults, then what a step of it moves and holds. Raises JobError."""
    n = nodes or _launched() or NODES
    found = [m for m in setup.mistakes(job, n) if not m.startswith("node.devices")]
    if found:
        raise JobError(found)
    data, note = _source(job)
    module = setup.make_model(job, data)
    slots = len(setup.slots_of(job.node.devices))
    flat = flatten(
        module,
        slots if job.node.shard else 1,
        None if job.algorithm.decay_all else models.decayed(module),
    )
    graph = setup.make_graph(job, n)
    method = setup.make_algorithms(job, flat, graph)[0]
    per_step = slots * job.data.batch * job.algorithm.accumulate
    steps = len(data.train_labels) // n // per_step
    lines = [
        config.dump(job),
        f"# planned for {n} nodes x {slots} slots" + (f"; {note}" if note else ""),
        f"# model        {flat.count:,} parameters, {size(4 * flat.count)} in float32",
        f"# graph        {graph}",
        f"# step         {per_step} samples a node, {n * per_step} in all; {steps} steps an epoch",
        *_rates(job, n, per_step, steps),
        *_traffic(job, graph, method, flat, n),
        *_memory(graph, method, flat, slots),
    ]
    return "\n".join(lines)


def _launched() -> int | None:
    """The number of processes that a launcher's environment tells."""
    from mpigossip.cluster.launcher import LAUNCHERS

    sizes = [os.environ.get(count, "") for _, count in LAUNCHERS]
    return next((int(value) for value in sizes if value.isdigit()), None)


def _source(job: Job):
    """The job's data, or where they aren't here, a stand-in of data.shape and data.classes."""
    try:
        return source(job.data, job.run.seed), ""
    except (JobError, StoreError):
        section = job.data
        stand_in = SyntheticSource(
            tuple(section.shape), section.classes, section.samples, section.test_samples, 0
        )
        return stand_in, (
            f'"{section.source}" is not here: {section.samples:,} samples of shape '
            f"{tuple(section.shape)} in {section.classes} classes assumed (data.samples, "
            "data.shape, data.classes)"
        )


def _rates(job: Job, n: int, per_step: int, steps: int) -> list[str]:
    from mpigossip.training.schedule import schedule

    total = job.run.epochs * steps
    if not total:
        return []
    rate = schedule(job.schedule, steps, total, n * per_step)
    peak = max(rate(k) for k in range(0, total, max(1, total // 1000)))
    return [
        f"# rate         {rate(0):.4g} at first, {peak:.4g} at most, {rate(total - 1):.4g} at last"
    ]


def _traffic(job: Job, graph, method, flat, n: int) -> list[str]:
    """Bytes of an average step, beside what all-reduce would send."""
    layout = Layout(flat.widths, method.vectors, method.scalars, wire=setup.make_wire(job))
    cadence = setup.make_cadence(job, method, graph, STEPS)
    state, clock, total = cadence.init(), 0, 0
    for step in range(STEPS):
        kind = cadence.kind(state, step)
        for _ in range(method.rounds):
            sent = layout.sent_bytes
            total += traffic(graph, kind, clock, 0, sent, layout.raw_bytes)
            clock += kind is Kind.GOSSIP
    average, ring = total / STEPS, 2 * (n - 1) * 4 * flat.size / n
    ratio = f"{average / ring:.2f} x" if ring else "against"
    return [
        f"# traffic      {size(average)} a node and step between nodes ({method.vectors} "
        f"vector{'s' * (method.vectors > 1)}, {job.node.wire}); {ratio} the {size(ring)} of a "
        "ring all-reduce"
    ]


def _memory(graph, method, flat, slots: int) -> list[str]:
    """Bytes of a node by purpose; activations, batches and libraries are not counted."""
    model = 4 * flat.size
    state = method.init(torch.empty(1, flat.size, device="meta"))
    held = sum(array.numel() * array.element_size() for _, array in leaves(state))
    inbox = 0 if "always-global" in method.needs else 2 * graph.degree
    parts = {
        "replicas": slots * model,
        "gradients": slots * model,
        "algorithm state": held,
        "outbox": method.vectors * model,
        "inbox (at most)": max(inbox, 1) * method.vectors * model,
        "snapshot for checkpoints": model + held,
    }
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items())
    return [
        f"# memory       {size(sum(parts.values()))} a node: {listed}; activations and batches "
        "come on top"
    ]
