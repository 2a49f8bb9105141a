"""Tasks: loss and metrics of a training, by name or "package.module:factory".

A new task is a class with a `loss` and its line in `TASKS`; a user's own needs no line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpigossip import config
from mpigossip.config import BuilderSpec, JobError
from mpigossip.config.errors import Failure, UserError
from mpigossip.config.user_code import build_checked, describe_exception, import_object
from mpigossip.data.pytree import Nested, form, size
from mpigossip.models import loss_and_correct, scores

Metrics = Mapping[str, tuple[Any, Any]]
"""By name a sum and what it is divided by, numbers or tensors of one: both are added up over
batches, slots and nodes."""

TAKEN = frozenset(
    (
        "step",
        "at_step",
        "node",
        "epoch",
        "epochs",
        "seconds",
        "lr",
        "kind",
        "gradient_norm",
        "mixed_distance",
        "consensus_distance",
        "samples_per_second",
        "staleness",
        "bytes_sent",
        "compute_s",
        "node_s",
        "exchange_s",
        "idle_s",
        "finished",
        "steps",
        "nodes",
        "slots",
        "lost",
        "evaluations",
        "summary",
        "warnings",
        "metrics",
        "checkpoint",
        "digest",
    )
)
"""Names of columns and of lines of the summary that are no task's own."""
NAME = r"(?!local_|share_)[A-Za-z][A-Za-z0-9_.-]{0,31}"
"""The form of a metric's name; local_NAME and share_NAME are columns beside it."""


class Task(Protocol):
    """A job's task; the factory's options are the further keys of section `[task]`.

    It may have `units`, a mapping from "loss" and metrics' names; "1" where it is silent; and
    `told(data)`, which is called once with the data, before the first batch.
    """

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """The mean loss of a batch, to be differentiated, and metrics by name: (sum, count).

        ``batch``: as the data give it, on the model's device. Also called in evaluation, without
        gradients and with the model in `eval()`. A metric "loss" says with which weight the
        batch counts in the mean test loss; else that is its number of samples.
        """


class TaskError(Failure, RuntimeError):
    """A task that fails on a batch, in the middle of a run."""


class Classification:
    """Cross-entropy of scores (B, classes) against (B,) int64, and the share that is right."""

    units = {"loss": "nat"}

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """Batches are (inputs, targets); scores and targets may have a time axis before classes."""
        inputs, targets = batch
        loss, correct = loss_and_correct(scores(model(inputs)), targets)
        count = targets.numel()
        return loss, {"loss": (loss.detach().double() * count, count), "accuracy": (correct, count)}


class LanguageModel:
    """Cross-entropy of the next token, and the share of tokens that is right.

    Batches are (tokens, the tokens after them), or a mapping with `input_ids` (B, T), as
    tokenizers give it: there the labels are its `labels`, or the tokens themselves, shifted here
    by one; -100 doesn't count. The mapping's other tensors are the model's too.
    """

    units = {"loss": "nat", "nats_per_byte": "nat/byte"}
    IGNORED = -100

    def __init__(self) -> None:
        self._lengths: dict[torch.device, Tensor] = {}

    def prepare(self, data: Any) -> None:
        """Of packed text: the bytes of each token, by which losses compare between tokenizers."""
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None:
            self._lengths = {torch.device("cpu"): torch.from_numpy(tokenizer.lengths)}

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        if not isinstance(batch, Mapping):
            loss, metrics = Classification.loss(self, model, batch)  # type: ignore[arg-type]
            return loss, {**metrics, **self._per_byte(metrics["loss"][0], batch[1])}
        given = dict(batch)
        targets = given.pop("labels", given["input_ids"])[:, 1:]
        found = scores(model(**given))[:, :-1].flatten(0, -2).float()
        wanted = targets.flatten()
        counted = wanted != self.IGNORED
        count = counted.sum()
        loss = functional.cross_entropy(found, wanted, ignore_index=self.IGNORED)
        loss = loss.where(count > 0, 0.0)  # no token counts: 0/0
        right = ((found.detach().argmax(-1) == wanted) & counted).sum()
        return loss, {"loss": (loss.detach().double() * count, count), "accuracy": (right, count)}

    def _per_byte(self, nats: Tensor, targets: Tensor) -> Metrics:
        """The loss of these tokens by the bytes that they stand for, where those are known."""
        if not self._lengths:
            return {}
        if targets.device not in self._lengths:  # a copy per batch would wait for the GPU
            self._lengths[targets.device] = self._lengths[torch.device("cpu")].to(targets.device)
        return {"nats_per_byte": (nats, self._lengths[targets.device][targets].sum())}


def _problem(made_by: str, source: str, model: str) -> BuilderSpec:
    """A task of theory brings its functions and what they are functions of; an f_i is a sample."""
    brings = {
        "data.source": source,
        "model.name": model,
        "data.batch": 1,
        "data.partition": "sorted",
        "schedule.scale": "none",
    }
    only = ("data.source", "model.name")
    return BuilderSpec(f"mpigossip.training.problems:{made_by}", implies=brings, only=only)


TASKS: dict[str, BuilderSpec | Callable] = {
    "classification": Classification,
    "language-model": LanguageModel,
    "quadratics": _problem("Quadratics", "quadratics", "point"),
    "logistic": _problem("Logistic", "logistic", "point"),
    "factorization": _problem("Factorization", "factorization", "factors"),
}
"""Values of `task.name`; keyword-only parameters are the options of section `[task]`."""


class Objective:
    """A job's task, and what one batch has shown of it: the names of its metrics."""

    def __init__(self, task: Task, name: str = "classification", metrics: tuple[str, ...] = ()):
        """``metrics``: without "loss"."""
        self.task = task
        self.name = name
        self.metrics = metrics
        self.width = 1 + 2 * len(metrics)
        """of :meth:`figures`"""

    def unit(self, name: str) -> str:
        """The unit of the loss or a metric."""
        return dict(getattr(self.task, "units", {})).get(name, "1")

    def __call__(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """The task's loss and metrics; TaskError, which says where, for what they raise."""
        try:
            loss, metrics = self.task.loss(model, batch)
            if self.name in TASKS:
                return loss, metrics
            wrong = _wrong(loss, metrics)
        except (Failure, UserError):
            raise
        except Exception as error:
            raise TaskError(
                self._says(f"{describe_exception(error)}, on a batch of {form(batch)}")
            ) from error
        if not wrong and self.metrics and metrics.keys() - {"loss"} != set(self.metrics):
            wrong = (
                f"gave the metrics {', '.join(metrics) or 'none'} for a batch of {form(batch)}, "
                f"where the first gave {', '.join(self.metrics)}; give all of them each time, with "
                "the count 0 where there is nothing to count"
            )
        if wrong:
            raise TaskError(self._says(wrong))
        return loss, metrics

    def figures(self, loss: Tensor, metrics: Metrics, accumulate: int) -> Tensor:
        """A part's share of the mean loss, then sum and count of each metric: float64 (width,)."""
        found = [_double(one, loss) for name in self.metrics for one in metrics[name]]
        return torch.stack([_double(loss, loss) / accumulate, *found])

    def tested(self, model: Callable, batch: Nested) -> Tensor:
        """Sum and count of the loss and of each metric: float64 (1 + metrics, 2) on the CPU."""
        loss, metrics = self(model, batch)
        samples = size(batch)
        pairs = [metrics.get("loss", (loss.detach().double() * samples, samples))]
        pairs += [metrics[name] for name in self.metrics]
        return torch.tensor([[float(a), float(b)] for a, b in pairs], dtype=torch.float64)

    def prepare(self, data: Any) -> Objective:
        """Itself; the task knows the data, if it asks to."""
        if callable(getattr(self.task, "prepare", None)):
            self.task.prepare(data)  # type: ignore[attr-defined]
        return self

    def probe(self, model: nn.Module, batch: Nested) -> Objective:
        """The same with the names of its metrics, from a first batch, as evaluations call it.

        JobError for what isn't a task's answer. The generators of random numbers stay as they were.
        """
        training = model.training
        try:
            with torch.random.fork_rng(devices=()), torch.no_grad():
                _, metrics = self(model.eval(), batch)
        except TaskError as error:
            raise JobError(str(error)) from error
        finally:
            model.train(training)
        names = tuple(name for name in metrics if name != "loss")
        for name in names:
            if name in TAKEN:
                raise JobError(
                    self._says(
                        f'its metric "{name}" has the name of a column that '
                        "every log has; choose another name"
                    )
                )
            if re.fullmatch(NAME, name) is None:
                raise JobError(
                    self._says(
                        f'its metric "{name}" has a name that no column can have: letters, digits '
                        f"and "
                        "_ . - only, at most 32, not local_… or share_…"
                    )
                )
        return Objective(self.task, self.name, names)

    def _says(self, text: str) -> str:
        return f'task.name = "{self.name}": {text}'


def make(section: config.TaskSection) -> Objective:
    """The task that section `[task]` names, not tried yet. Raises JobError."""
    if section.name in TASKS:
        return Objective(BuilderSpec.of(TASKS, section.name)(**section.options), section.name)
    factory = import_object("task.name", section.name, "(**options) that returns a task")
    task = build_checked("task.name", section.name, object, factory, **section.options)
    if not callable(getattr(task, "loss", None)):
        raise JobError(
            f'task.name = "{section.name}" returned {type(task).__name__}; it should return '
            "something with loss(model, batch) -> (loss, {name: (sum, count)})"
        )
    return Objective(task, section.name)


def _wrong(loss: Any, metrics: Any) -> str:
    """Return the error in a task's result, or ""."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        what = form(loss) if isinstance(loss, Tensor) else type(loss).__name__
        return f"its loss is {what}; it has to be one number, a float tensor of shape (): the mean"
    if not isinstance(metrics, Mapping):
        return f"its metrics are a {type(metrics).__name__}, not {{name: (sum, count)}}"
    for name, pair in metrics.items():
        if not isinstance(name, str):
            return f"its metric {name!r} has no text for a name"
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_number, pair))):
            what = form(pair)
            return f'its metric "{name}" is {what}; it has to be two numbers, (sum, count)'
    return ""


def _number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _double(value: Any, beside: Tensor) -> Tensor:
    """As float64 on the device of another one; numbers too, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(beside.device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=beside.device)


CLASSIFICATION = Objective(Classification(), metrics=("accuracy",))
"""Default task of a run's progress."""
