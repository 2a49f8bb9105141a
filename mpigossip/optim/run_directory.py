"""Methods of an optimizer with a run directory: log, checkpoints, stopping and callbacks."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from mpigossip.cluster import deadline
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.errors import STOPPED, UserError
from mpigossip.config.readable import pluralize
from mpigossip.engine.step import Engine
from mpigossip.optim.base import LIGHTNING, Wrapper
from mpigossip.optim.node import LoopNode
from mpigossip.runs.lock import locked
from mpigossip.runs.run import Run
from mpigossip.runs.snapshot_and_restore import read_manifest
from mpigossip.runs.start_and_resume import newest
from mpigossip.runs.survive import Survival
from mpigossip.store import checkpoint
from mpigossip.store.log import COLUMNS

MEASURED = COLUMNS.keys() - {"loss", "lr", "gradient_norm"} | {"step", "node"}
MEASURED |= {"steps", "evaluations", "summary"}
"""Names that a metric of a program can't have: columns that are measured, and groups of the log."""


def open_run(world: World, job: Job) -> Run:
    """Lock the run directory and return its run; collective.

    :param world: all ranks
    :param job: the job; its `run.folder` is the run directory
    :raises JobError: if the run directory belongs to a run of a job
    """
    folder = job.run.folder
    world.resources.enter_context(locked(folder, world, "run"))
    path = newest(folder, world)
    manifest = None if path is None else read_manifest(path, world)
    with world.raise_together(UserError):
        if manifest is not None and manifest.meta.get("door") != "loop":
            raise JobError(
                f'run: "{folder}" contains the run of a job: continue it by `mpigossip resume '
                f"{folder}`, or choose another folder"
            )
    return Run(world, job, path, world.resources)


def open_log(run: Run) -> None:
    """Open the log, unless it is open.

    :raises JobError: if there is a checkpoint, and the program has neither called resume() nor
        loaded a state of its own that is at least as new
    """
    if run.newest is not None:
        manifest = read_manifest(run.newest, run.world)
        with run.world.raise_together(UserError):
            _check_loaded(run, run.newest, manifest)
        run.newest = None
    run.begin()


def _check_loaded(run: Run, path: Path, manifest: checkpoint.Manifest) -> None:
    """Raise JobError unless the program has loaded a state that is at least as new as ``path``."""
    step = run.node.engine.index
    n = run.node.mixer.n
    if step < manifest.step or manifest.n != n:
        loaded = f"a state of step {step} was loaded" if step else "nothing was loaded"
        raise JobError(
            f'run: "{run.folder}" contains a run with {path.name} as its newest checkpoint, '
            f"of {pluralize(manifest.n, 'node')}, and {loaded}: call optimizer.resume() to "
            "continue from there, or choose another folder"
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


class RunDirectoryMixin(Wrapper):
    """Log, checkpoints and stopping of an optimizer that was given ``run``."""

    _world: World
    _node: LoopNode
    _run: Run | None
    _survival: Survival | None

    def _ready_engine(self) -> Engine:
        """Return the engine, laid out and with any loaded state restored."""
        raise NotImplementedError

    def log(self, *step_and_metrics: int | Mapping[str, Any], **figures: Any) -> None:
        """Add metrics of this node's step to the log; a step is written when the next one begins.

        :param step_and_metrics: number of the step, counted from 0, and dicts of metrics; without a
            number, the metrics belong to the last step, or to the first step if there is none yet
        :param figures: numbers or tensors of one number by name, each a column of the log; "loss",
            "lr" and "gradient_norm" have the meaning that they have in a job, and "samples" of the
            step yield the speed
        :raises JobError: if the step has been written, or if the log measures a metric itself
        """
        run = self._own_run("log")
        for value in step_and_metrics:
            figures = {**value, **figures} if isinstance(value, Mapping) else figures
        step = next((k for k in step_and_metrics if not isinstance(k, Mapping)), None)
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

    def keep(self, **things: Any) -> None:
        """Add objects to checkpoints; call it before :meth:`resume`.

        :param things: objects by name, either with ``state_dict`` and ``load_state_dict``, or torch
            generators (``get_state`` and ``set_state``)
        :raises JobError: if a name is invalid, or an object has neither pair of methods
        """
        self._own_run("keep")
        pairs = ("state_dict", "load_state_dict"), ("get_state", "set_state")
        for name, thing in things.items():
            if not name.isprintable():
                raise JobError(
                    f"keep: the name {name!r} has unprintable characters: choose another name"
                )
            if "/" in name or name.startswith("#") or not name.strip("."):
                raise JobError(
                    f"keep: the name {name!r} can't be part of a path in a checkpoint: choose a "
                    'name without "/" that does not begin with "#", such as scheduler=…'
                )
            if not any(all(hasattr(thing, method) for method in pair) for pair in pairs):
                raise JobError(
                    f"keep: {name} is a {type(thing).__name__}: pass an object with state_dict() "
                    "and load_state_dict(), or with get_state() and set_state()"
                )
        self._node.keeps |= things

    def save(self) -> None:
        """Write a checkpoint of the current step in the background; collective."""
        run = self._own_run("save")
        _ = self._ready_engine()
        with (
            deadline.user_call("save()"),
            self._node.engine.clock.uncounted(),
            torch.no_grad(),
            self._node.catch_failure(),
        ):
            open_log(run)
            self._node.check_not_paused("save()")
            run.save()

    def resume(self) -> int:
        """Continue from the newest checkpoint; return the number of steps made, or 0; collective.

        With the same number of nodes, the run continues bitwise identically: model, optimizer,
        algorithm, torch's random numbers, and the objects given to :meth:`keep`. With another
        number, it continues from the exact average, and reports the state that is dropped.

        :raises JobError: after the first step, or after save() or log()
        """
        run = self._own_run("resume")
        _ = self._ready_engine()
        if run.begun:
            raise JobError("call resume() before the first step, and before save() and log()")
        if run.newest is not None:
            self._node.restart_exchanges()
        step = run.resume()
        if self._survival is not None:
            self._survival.keep(reset=True)
        return step

    @property
    def stopping(self) -> bool:
        """True once all ranks have agreed, at the same step, to stop: call :meth:`exit` then.

        The reason is SIGTERM, SIGUSR1, SIGUSR2, ``touch RUN/STOP``, or the end of the allocation.
        """
        return self._own_run("stopping").stopping

    def handle_signals(self) -> None:
        """Install the signal handlers again, after other code has replaced them."""
        self._own_run("handle_signals").stopper.listen()

    def exit(self) -> NoReturn:
        """Save a checkpoint and exit with code 75, for which batch scripts requeue; collective."""
        run = self._own_run("exit")
        self._node.check_not_paused("exit()")
        run.stopped = True
        self._world.close()
        raise SystemExit(STOPPED)

    def exit_if_stopping(self, save: Callable[..., object] | None = None, *arguments: Any) -> None:
        """If :attr:`stopping`, call ``save(*arguments)``, unless it is None, and :meth:`exit`.

        :param save: function that saves the state of the program; None: nothing to save
        :param arguments: arguments of ``save``
        """
        if self.stopping:
            if save is not None:
                save(*arguments)
            self.exit()

    @staticmethod
    def callback(framework: ModuleType) -> Any:
        """Return a callback for a trainer that saves, stops and exits if :attr:`stopping`.

        :param framework: the module ``transformers``, whose trainer stops after the step, or
            ``lightning`` or ``pytorch_lightning``, whose trainer stops after the epoch
        :raises JobError: for other frameworks
        """
        name = getattr(framework, "__name__", str(framework)).partition(".")[0]
        if name == "transformers":
            return _of_transformers(framework)
        if name in LIGHTNING:
            return _of_lightning(framework)
        raise JobError(
            f"callback({name}): pass the module transformers, lightning or pytorch_lightning; in a "
            "custom loop, call optimizer.exit_if_stopping() after each step"
        )

    def _own_run(self, call: str) -> Run:
        if self._run is None:
            raise JobError(f'{call}: needs a run directory: pass Gossip(…, run="runs/mine")')
        return self._run


def _ours(optimizer: Any) -> Any:
    """Return the Gossip optimizer that a framework has wrapped."""
    while not hasattr(optimizer, "exit_if_stopping"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise JobError(
                f"callback: the trainer's optimizer is {type(optimizer).__name__}: pass it "
                'mpigossip.Gossip(…, run="runs/mine")'
            )
        optimizer = inner
    return optimizer


def _of_transformers(framework: Any) -> Any:
    class Stops(framework.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if _ours(more["optimizer"]).stopping:
                control.should_save = control.should_training_stop = True

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            _ours(more["optimizer"]).exit_if_stopping()

    return Stops()


def _of_lightning(framework: Any) -> Any:
    framework = getattr(framework, "pytorch", framework)

    class Stops(framework.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            # Lightning handles SIGTERM itself, and only on the rank that receives it.
            _ours(trainer.optimizers[0]).handle_signals()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if _ours(trainer.optimizers[0]).stopping:
                trainer.should_stop = True

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            _ours(trainer.optimizers[0]).exit_if_stopping()

    return Stops()
