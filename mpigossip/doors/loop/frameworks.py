"""Stopping where a framework drives the loop: callbacks of its trainer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mpigossip.config import JobError
from mpigossip.doors.wrapper import LIGHTNING


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
