"""Run directory of a custom loop: its lock, metrics of the program, and checkpoints."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpigossip.cluster import deadline
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import UserError
from mpigossip.config.readable import pluralize
from mpigossip.optim.node import LoopNode
from mpigossip.runs.lock import locked
from mpigossip.runs.run import Run
from mpigossip.runs.snapshot_and_restore import read_manifest
from mpigossip.runs.start_and_resume import newest
from mpigossip.store import checkpoint
from mpigossip.store.log import COLUMNS

MEASURED = COLUMNS.keys() - {"loss", "lr", "gradient_norm"} | {"step", "node"}
MEASURED |= {"steps", "evaluations", "summary"}
"""Names that a metric of a program can't have: columns that are measured, and groups of the log."""


def open_run(world: World, job: Job) -> Run:
    """Lock the run directory and return its run; collective.

    :param world: all ranks
    :param job: the job; its `run.folder` is the run directory
    :raises JobError: if the run directory belongs to a run of a job or to a training of members, if
        another program uses it, or if all of its checkpoints are damaged
    """
    folder = job.run.folder
    world.resources.enter_context(locked(folder, world, "run"))
    path = newest(folder, world)
    manifest = None if path is None else read_manifest(path, world)
    with world.raise_together(UserError):
        if manifest is not None and manifest.meta.get("door") != "loop":
            raise JobError(
                f'run: "{folder}" contains the run of a job: continue it by `mpigossip resume '
                f"{folder}`, or pass another folder as run=…"
            )
    return Run(world, job, path, world.resources)


def open_log(run: Run) -> None:
    """Open the log, unless it is open; collective.

    :param run: the run
    :raises JobError: if there is a checkpoint, and the program has neither called resume() nor
        loaded a state of its own that is at least as new, with the same number of nodes
    """
    if run.newest is not None:
        manifest = read_manifest(run.newest, run.world)
        with run.world.raise_together(UserError):
            _check_loaded(run, run.newest, manifest)
        run.newest = None
    run.begin()


def _check_loaded(run: Run, path: Path, manifest: checkpoint.Manifest) -> None:
    """Raise JobError unless a state at least as new as ``path``, of equally many nodes, was loaded.

    Otherwise, let the run continue to count from the checkpoint.

    :param run: the run
    :param path: folder of the newest checkpoint
    :param manifest: manifest of this checkpoint
    """
    step = run.node.engine.index
    n = run.node.mixer.n
    if step < manifest.step or manifest.n != n:
        loaded = f"a state of step {step} was loaded" if step else "nothing was loaded"
        raise JobError(
            f'run: "{run.folder}" contains a run with {path.name} as its newest checkpoint, '
            f"of {pluralize(manifest.n, 'node')}, and {loaded}: call optimizer.resume() to "
            "continue from there, or pass another folder as run=…"
        )
    run.take_over(checkpoint.read_node(path, run.node.mixer.local_nodes[0], manifest).numbers)
    run.saved_at = step if step == manifest.step else None


def check_names(figures: Iterable[str], measured: Collection[str]) -> None:
    """Raise JobError for metrics with the name of a ``measured`` column, or an invalid name."""
    for name in figures:
        problem = "is measured already" if name in measured else ""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            problem = "is not a valid name of a column, which has letters, digits, _, . and -"
        if problem:
            raise JobError(f'log: "{name}" {problem}: choose another name for the metric')


def add_metrics(run: Run, step: int | None, figures: Mapping[str, Any]) -> None:
    """Add metrics to a step that is not written yet.

    :param run: the run
    :param step: number of the step, counted from 0; None: the last step, or the next one if there
        is none yet
    :param figures: numbers, or tensors of one number, by name
    :raises JobError: if the step has been written or is later than the next one, or if a name is
        invalid or the log measures the metric itself
    """
    done = run.node.engine.index if run.begun else None
    open_steps = [] if done is None else [done - 1] * (run.last is not None) + [done]
    index = step if step is not None else open_steps[0] if open_steps else None
    if index is not None and open_steps and index not in open_steps:
        raise JobError(
            f"log: step {index} is not open: optimizer.step() has made {done} steps, counted "
            f"from 0, and {' or '.join(map(str, open_steps))} can be logged; a step is written "
            "when the next one begins, and by save(): call log() before that"
        )
    check_names(figures, MEASURED)
    metrics = run.figures.setdefault(-1 if index is None else index, {})
    for name, value in figures.items():
        metrics[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)


def check_kept(things: Mapping[str, Any]) -> None:
    """Check objects that a program adds to its checkpoints.

    :param things: the objects by name
    :raises JobError: if a name is invalid, or an object has neither ``state_dict`` and
        ``load_state_dict`` nor ``get_state`` and ``set_state``
    """
    pairs = ("state_dict", "load_state_dict"), ("get_state", "set_state")
    for name, thing in things.items():
        if not name.isprintable():
            raise JobError(
                f"keep: the name {name!r} has unprintable characters: choose another name"
            )
        if "/" in name or name.startswith("#") or not name.strip("."):
            raise JobError(
                f"keep: the name {name!r} can't be part of a path in a checkpoint: choose a name, "
                'such as scheduler=…, that contains no "/", does not begin with "#", and contains '
                "other characters than dots"
            )
        if not any(all(hasattr(thing, method) for method in pair) for pair in pairs):
            raise JobError(
                f"keep: {name} is a {type(thing).__name__}: pass an object with state_dict() "
                "and load_state_dict(), or with get_state() and set_state()"
            )


def save(run: Run, node: LoopNode) -> None:
    """Write a checkpoint of the node's present step in the background; collective."""
    with (
        deadline.user_call("save()"),
        node.engine.clock.uncounted(),
        torch.no_grad(),
        node.catch_failure(),
    ):
        open_log(run)
        node.check_not_paused("save()")
        run.save()
