"""What the optimizer of a user's loop has where its run has a folder; frameworks' callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

import torch

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.errors import STOPPED
from mpigossip.engine.step import Engine
from mpigossip.optim.loop.run import LoopRun
from mpigossip.optim.loop.survive import Survival
from mpigossip.optim.node import Node
from mpigossip.optim.wrapper import LIGHTNING, Wrapper


class WithFolder(Wrapper):
    """Log, checkpoints and stopping of an optimizer that was given ``run``."""

    _world: World
    _node: Node
    _run: LoopRun | None
    _survival: Survival | None

    def _laid_out(self) -> Engine:
        """The engine, where it is to go on from."""
        raise NotImplementedError

    def log(self, *said: int | Mapping[str, Any], **figures: Any) -> None:
        """Figures of this node's step, by name: columns of the log beside the engine's own.

        ``said``: the step's number, from 0, else it is the last one (before any, the first); and
        tables of figures. "loss", "lr" and "gradient_norm" fill the columns of a job's; "samples",
        those of the step, give the speed. A step is written when the next begins, and by save().
        """
        self._own_run("log").log(*said, figures)

    def keep(self, **things: Any) -> None:
        """Before :meth:`resume`: what checkpoints hold, too, by ``state_dict`` or ``get_state``."""
        self._own_run("keep").keeps |= things

    def save(self) -> None:
        """A checkpoint of the present step, written while the loop goes on. Collective."""
        run, _ = self._own_run("save"), self._laid_out()
        with self._node.engine.clock.uncounted(), torch.no_grad(), self._node.noticed():
            run.save(self._node)

    def resume(self) -> int:
        """Go on from the folder's newest checkpoint; steps made so far, 0 without one. Collective.

        To the bit with as many nodes: model, optimizer, method, torch's random numbers, and what
        :meth:`keep` was given. With another number from the exact average; says what was dropped.
        """
        run, _ = self._own_run("resume"), self._laid_out()
        step = run.resume(self._node)
        if self._survival is not None:
            self._survival.keep(anew=True)
        return step

    @property
    def stopping(self) -> bool:
        """Whether to stop, on all ranks from the same step on: then call :meth:`exit`.

        After SIGTERM, SIGUSR1, SIGUSR2, ``touch RUN/STOP``, or before the allocation ends.
        """
        return self._own_run("stopping").stopping

    def listen(self) -> None:
        """Take the signals again that :attr:`stopping` answers, after somebody else has."""
        self._own_run("listen").listen()

    def exit(self) -> NoReturn:
        """Save, and leave with the exit code on which batch scripts queue a job again."""
        self._own_run("exit").stopped = True
        self._world.close()
        raise SystemExit(STOPPED)

    def exit_if_stopping(self, save: Callable[..., object] | None = None, *given: Any) -> None:
        """After a step: where :attr:`stopping`, ``save(*given)``, if there is one, and exit."""
        if self.stopping:
            if save is not None:
                save(*given)
            self.exit()

    @staticmethod
    def callback(framework: ModuleType) -> Any:
        """For ``callbacks=`` of the trainer of ``transformers`` or ``lightning``: stops it, exits.

        Where :attr:`stopping`, the trainer saves as it does, transformers' after the step, and
        Lightning's after the pass; then comes :meth:`exit`.
        """
        return callback(framework)

    def _own_run(self, call: str) -> LoopRun:
        if self._run is None:
            raise JobError([f'{call}: needs the folder of a run: give Gossip run="runs/mine"'])
        return self._run


def callback(framework: ModuleType) -> Any:
    """One for its trainer; the optimizer is found there. JobError for other frameworks."""
    name = getattr(framework, "__name__", str(framework)).partition(".")[0]
    if name == "transformers":
        return _of_transformers(framework)
    if name in LIGHTNING:
        return _of_lightning(framework)
    raise JobError(
        [f"callback({name}): of transformers, lightning or pytorch_lightning; in a loop of one's "
         "own call optimizer.exit_if_stopping() after each step"]
    )  # fmt: skip


def _ours(optimizer: Any) -> Any:
    """The optimizer that a framework has wrapped."""
    while not hasattr(optimizer, "exit_if_stopping"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise JobError(
                [f"callback: the trainer's optimizer is {type(optimizer).__name__}; give it "
                 'mpigossip.Gossip(…, run="runs/mine")']
            )  # fmt: skip
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
            # Lightning answers SIGTERM by itself, on the rank that gets it alone
            _ours(trainer.optimizers[0]).listen()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if _ours(trainer.optimizers[0]).stopping:
                trainer.should_stop = True

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            _ours(trainer.optimizers[0]).exit_if_stopping()

    return Stops()
