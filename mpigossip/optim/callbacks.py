"""Callbacks of trainers, which save, stop and exit when all ranks have agreed to stop."""

from types import ModuleType
from typing import Any

from mpigossip.config import JobError

LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
"""Names of the packages of Lightning."""


def make_callback(framework: ModuleType) -> Any:
    """Return a callback for the trainer of a framework, as `Gossip.callback` describes.

    :param framework: the module ``transformers``, ``lightning`` or ``pytorch_lightning``
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


def _ours(optimizer: Any) -> Any:
    """Return the Gossip optimizer that a framework has wrapped.

    :raises JobError: if there is no Gossip inside
    """
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
