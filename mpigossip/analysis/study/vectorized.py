"""Simulated runs of several seeds in one process, their gradients in one vectorized call."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.engine.step import Record
from mpigossip.runs.lock import locked
from mpigossip.runs.printer import say
from mpigossip.runs.recorder import Recorder
from mpigossip.runs.run import Run
from mpigossip.runs.summary import describe
from mpigossip.store.hdf5 import replacing
from mpigossip.training.assemble import assemble
from mpigossip.training.together import Together

DIVERGED = "diverged.txt"
"""Beside the log of a run whose loss became no number: why it can't be finished."""


def seeded(job: Job, seed: int) -> Job:
    """The job of one seed, in a folder of its own below the job's."""
    if not job.node.vmap:
        raise JobError(
            ["node.vmap = false: seeds in one call are vectorized, to other bits than a run alone; "
             "say node.vmap=true, or run the seeds one by one"]
        )  # fmt: skip
    run = replace(job.run, seed=seed, output=str(job.run.folder / f"seed-{seed}"))
    return replace(job, run=run)


def simulate(job: Job, seeds: Sequence[int], world: World, n: int) -> list[dict[str, Any]]:
    """Train the job with each seed from its start; the summaries, empty where a loss was no number.

    What an earlier attempt left in the folders is begun anew: a batch is whole or not at all.
    """
    jobs = [seeded(job, seed) for seed in dict.fromkeys(seeds)]
    with ExitStack() as open_:
        for one in jobs:
            open_.enter_context(locked(one.run.folder, world))
            for name in ("log.h5", DIVERGED):
                (one.run.folder / name).unlink(missing_ok=True)
            shutil.rmtree(one.run.folder / "checkpoints", ignore_errors=True)
        runs = []
        for one in jobs:
            assembly = assemble(one, world, n)
            open_.callback(assembly.close)
            runs.append(Run(assembly, world, [Recorder(world, n)]))
        return _in_step(runs)


def _in_step(runs: Sequence[Run]) -> list[dict[str, Any]]:
    together = Together([run.trainer for run in runs])
    for run in runs:
        run.begin()
    while any(not run.finished for run in _left(runs, together)):
        for run, found in zip(runs, together.step(), strict=True):
            if isinstance(found, Record):
                run.took(found)
    summaries = []
    for run, ended in zip(runs, together.ended, strict=True):
        if ended is not None:
            for hook in run.hooks:
                hook.flush()
            with replacing(run.progress.folder / DIVERGED) as beside:
                beside.write_text(f"{ended}\n")
        summaries.append({} if ended else run.end())
        text = f"mpigossip: {ended}" if ended else describe(summaries[-1])
        say(f"{run.progress.folder}:\n{text}")
    return summaries


def _left(runs: Sequence[Run], together: Together) -> list[Run]:
    """The runs whose loss is a number."""
    return [run for run, end in zip(runs, together.ended, strict=True) if end is None]
