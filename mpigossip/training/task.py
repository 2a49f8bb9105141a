"""Tasks, which define the loss and metrics of a training.

A task has a name, or is custom code "package.module:factory". To add a task to this package, write
a class with a method `loss` and add a line to `TASKS`.
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
"""Metrics by name. Each metric is a pair of a sum and a count, by which the sum is divided. Both
are numbers or tensors of shape (), and are summed over batches, slots and nodes.
"""

RESERVED = frozenset(
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
"""Names that a metric must not have, because they are columns of the log or in the summary."""
NAME = r"(?!local_|share_)[A-Za-z][A-Za-z0-9_.-]{0,31}"
"""Regular expression that the name of a metric must match. It excludes local_NAME and share_NAME,
which are further columns of the log.
"""


class Task(Protocol):
    """Protocol of a task.

    The keyword-only parameters of its factory are the options of section `[task]`. A task may have
    an attribute `units`, which maps "loss" and names of metrics to their units. The unit of a name
    that is not listed is "1". It may also have a method `prepare(data)`, which is called once with
    the data, before the first batch.
    """

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a batch, to be differentiated, and its metrics.

        Evaluations call this method, too, without gradients and with the model in `eval()`.

        :param model: the model, or a function with the same parameters
        :param batch: one batch as the data return it, on the device of the model
        :return: the loss, a float tensor of shape (), and the metrics by name, each as (sum,
            count). If there is a metric "loss", the mean test loss is computed from its sums and
            counts; otherwise, each batch is weighted by its number of samples
        """


class TaskError(Failure, RuntimeError):
    """Error of a task that fails on a batch, or returns an invalid result."""


class Classification:
    """Task with cross-entropy and accuracy of scores (B, classes) for targets (B,) int64."""

    units = {"loss": "nat"}

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """Return the loss and the accuracy of a batch (inputs, targets).

        Scores and targets may have a time dimension before the classes.
        """
        inputs, targets = batch
        loss, correct = loss_and_correct(scores(model(inputs)), targets)
        count = targets.numel()
        return loss, {"loss": (loss.detach().double() * count, count), "accuracy": (correct, count)}


class LanguageModel:
    """Task with the cross-entropy of the next token, and the fraction of correct predictions.

    A batch is either (tokens, next tokens), (B, T) each, or a mapping with `input_ids` (B, T), as
    tokenizers return it. The labels of a mapping are its `labels`, or `input_ids` if it has no
    labels. This class shifts these labels by one position and ignores the label -100. All tensors
    of the mapping except `labels` are passed to the model.
    """

    units = {"loss": "nat", "nats_per_byte": "nat/byte"}
    IGNORED = -100
    """Label of tokens that the loss leaves out, the default of torch's cross-entropy."""

    def __init__(self) -> None:
        self._lengths: dict[torch.device, Tensor] = {}

    def prepare(self, data: Any) -> None:
        """Store the number of bytes per token if the data are a packed text.

        The loss per byte can then be computed, by which different tokenizers can be compared.
        """
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None:
            self._lengths = {torch.device("cpu"): torch.from_numpy(tokenizer.lengths)}

    def loss(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """Return the mean loss per token in nats, and the metrics of a batch.

        Tokens of a mapping whose label is -100 do not count; if no token counts, the loss is 0. The
        metrics are "loss", "accuracy" and, for pairs (tokens, next tokens) of a packed text,
        "nats_per_byte".
        """
        if not isinstance(batch, Mapping):
            loss, metrics = Classification.loss(self, model, batch)  # type: ignore[arg-type]
            return loss, {**metrics, **self._per_byte(metrics["loss"][0], batch[1])}
        arguments = dict(batch)
        targets = arguments.pop("labels", arguments["input_ids"])[:, 1:]
        outputs = scores(model(**arguments))[:, :-1].flatten(0, -2).float()
        labels = targets.flatten()
        counted = labels != self.IGNORED
        count = counted.sum()
        loss = functional.cross_entropy(outputs, labels, ignore_index=self.IGNORED)
        # Without any counted token, the loss is 0/0.
        loss = loss.where(count > 0, 0.0)
        correct = ((outputs.detach().argmax(-1) == labels) & counted).sum()
        return loss, {"loss": (loss.detach().double() * count, count), "accuracy": (correct, count)}

    def _per_byte(self, nats: Tensor, targets: Tensor) -> Metrics:
        """Return the metric with the loss per byte; {} if the bytes per token are not known.

        :param nats: sum of the losses of all tokens
        :param targets: the tokens to be predicted, int64
        """
        if not self._lengths:
            return {}
        # Copy the lengths to a device once, because each copy waits for the GPU.
        if targets.device not in self._lengths:
            self._lengths[targets.device] = self._lengths[torch.device("cpu")].to(targets.device)
        return {"nats_per_byte": (nats, self._lengths[targets.device][targets].sum())}


def _problem(made_by: str, source: str, model: str) -> BuilderSpec:
    """Return the spec of a theory task, which implies settings of other sections.

    These are its data, its model, a batch of one sample, a partition that gives each node the
    samples of its own function, and a learning rate that is not scaled. A sample is the function
    f_i of a node.

    :param made_by: name of the class in :mod:`mpigossip.training.problems`
    :param source: implied value of `data.source`
    :param model: implied value of `model.name`
    """
    implied = {
        "data.source": source,
        "model.name": model,
        "data.batch": 1,
        "data.partition": "sorted",
        "schedule.scale": "none",
    }
    only = ("data.source", "model.name")
    return BuilderSpec(f"mpigossip.training.problems:{made_by}", implies=implied, only=only)


TASKS: dict[str, BuilderSpec | Callable] = {
    "classification": Classification,
    "language-model": LanguageModel,
    "quadratics": _problem("Quadratics", "quadratics", "point"),
    "logistic": _problem("Logistic", "logistic", "point"),
    "factorization": _problem("Factorization", "factorization", "factors"),
}
"""Task for each value of `task.name`. Its keyword-only parameters are the options of section
`[task]`.
"""


class Objective:
    """Task of a job, with the names of the metrics that it has returned for a first batch."""

    def __init__(self, task: Task, name: str = "classification", metrics: tuple[str, ...] = ()):
        """Store a task, its name and its metrics.

        :param task: task that computes loss and metrics
        :param name: value of `task.name`, for messages
        :param metrics: names of the metrics, without "loss"
        """
        self.task = task
        self.name = name
        self.metrics = metrics
        self.width = 1 + 2 * len(metrics)
        """Number of values that :meth:`figures` returns."""

    def unit(self, name: str) -> str:
        """Return the unit of the loss or of a metric; "1" if the task does not name it."""
        return dict(getattr(self.task, "units", {})).get(name, "1")

    def __call__(self, model: Callable, batch: Nested) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics of the task on a batch.

        :param model: the model, or a function with the same parameters
        :param batch: batch on the device of the model
        :raises TaskError: if the task raises an exception other than Failure and UserError, which
            are raised unchanged; or if a custom task returns an invalid loss, invalid metrics, or
            other metrics than for the first batch
        """
        try:
            loss, metrics = self.task.loss(model, batch)
            if self.name in TASKS:
                return loss, metrics
            problem = _describe_invalid(loss, metrics)
        except (Failure, UserError):
            raise
        except Exception as error:
            raise TaskError(
                self._with_setting(f"{describe_exception(error)}, on a batch of {form(batch)}")
            ) from error
        if not problem and self.metrics and metrics.keys() - {"loss"} != set(self.metrics):
            problem = (
                f"returned the metrics {', '.join(metrics) or 'none'} for a batch of "
                f"{form(batch)}, but {', '.join(self.metrics)} for the first batch; return all "
                "of them for each batch, with the count 0 if there is nothing to count"
            )
        if problem:
            raise TaskError(self._with_setting(problem))
        return loss, metrics

    def figures(self, loss: Tensor, metrics: Metrics, accumulate: int) -> Tensor:
        """Return loss and metrics of a part of a batch as one tensor, float64 (width,).

        The first value is the loss divided by ``accumulate``, the number of parts of a batch, so
        that the sum over parts is the mean loss. The other values are the sum and the count of each
        metric, in the order of ``self.metrics``. The tensor is on the device of ``loss``.

        :param loss: mean loss of the part, a scalar
        :param metrics: its metrics by name
        :param accumulate: number of parts of a batch
        """
        counts = [_double(value, loss) for name in self.metrics for value in metrics[name]]
        return torch.stack([_double(loss, loss) / accumulate, *counts])

    def tested(self, model: Callable, batch: Nested) -> Tensor:
        """Return the sum and count of the loss and of each metric on a test batch.

        The result is float64 (1 + metrics, 2) on the CPU.
        """
        loss, metrics = self(model, batch)
        samples = size(batch)
        pairs = [metrics.get("loss", (loss.detach().double() * samples, samples))]
        pairs += [metrics[name] for name in self.metrics]
        return torch.tensor([[float(a), float(b)] for a, b in pairs], dtype=torch.float64)

    def prepare(self, data: Any) -> Objective:
        """Call ``prepare(data)`` of the task, if it has such a method; return this object."""
        if callable(getattr(self.task, "prepare", None)):
            self.task.prepare(data)  # type: ignore[attr-defined]
        return self

    def probe(self, model: nn.Module, batch: Nested) -> Objective:
        """Call the task on a first batch; return a copy of this object that knows its metrics.

        The task is called as in an evaluation. The state of the CPU's random number generator is
        preserved.

        :param model: model that is trained
        :param batch: batch on the device of the model
        :raises JobError: if the task fails, if the result of a custom task is invalid, or if the
            name of a metric is reserved or invalid
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
            if name in RESERVED:
                raise JobError(
                    self._with_setting(
                        f'its metric "{name}" has a name that the log or the summary of each run '
                        "uses; choose another name for the metric"
                    )
                )
            if re.fullmatch(NAME, name) is None:
                raise JobError(
                    self._with_setting(
                        f'its metric "{name}" has an invalid name: it must begin with a letter, '
                        "but not with local_ or share_, and consist of at most 32 letters, "
                        "digits, _ . and -"
                    )
                )
        return Objective(self.task, self.name, names)

    def _with_setting(self, text: str) -> str:
        """Return a message that begins with the setting `task.name`."""
        return f'task.name = "{self.name}": {text}'


def make(section: config.TaskSection) -> Objective:
    """Return the task that section `[task]` names, without calling it on a batch.

    :param section: section `[task]`
    :raises JobError: if a custom task can't be imported or made, or has no method ``loss``
    """
    if section.name in TASKS:
        return Objective(BuilderSpec.of(TASKS, section.name)(**section.options), section.name)
    factory = import_object("task.name", section.name, "(**options) that returns a task")
    task = build_checked("task.name", section.name, object, factory, **section.options)
    if not callable(getattr(task, "loss", None)):
        raise JobError(
            f'task.name = "{section.name}" returned {type(task).__name__}; return an object '
            "with the method loss(model, batch) -> (loss, {name: (sum, count)})"
        )
    return Objective(task, section.name)


def _describe_invalid(loss: Any, metrics: Any) -> str:
    """Return a description of what is wrong with the result of a task, or ""."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        what = form(loss) if isinstance(loss, Tensor) else type(loss).__name__
        return f"its loss is {what}; it must be the mean, a float tensor of shape ()"
    if not isinstance(metrics, Mapping):
        return (
            f"its metrics are a {type(metrics).__name__}; they must be a mapping, "
            "{name: (sum, count)}"
        )
    for name, pair in metrics.items():
        if not isinstance(name, str):
            return f"the name of its metric {name!r} is not a string; use a string"
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_number, pair))):
            what = form(pair)
            return f'its metric "{name}" is {what}; it must be two numbers, (sum, count)'
    return ""


def _number(value: Any) -> bool:
    """Return whether a value is a real number, or a real tensor of shape ()."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _double(value: Any, reference: Tensor) -> Tensor:
    """Return a value as float64 on the device of ``reference``, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(reference.device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=reference.device)


CLASSIFICATION = Objective(Classification(), metrics=("accuracy",))
"""Default task of :class:`~mpigossip.runs.progress.Progress`."""
