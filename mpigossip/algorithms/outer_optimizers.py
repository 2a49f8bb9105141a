"""Torch optimizers as outer optimizers: their state as arrays that an algorithm can keep.

An outer step applies an optimizer to x₀, the model after the last outer step, with the gradient Δ =
x₀ − x, where x is the average of the nodes' models (Douillard et al. 2023). The arrays x₀ and Δ are
shards or fragments of flat parameters, not parameters of the model. An optimizer can therefore be
used only if it treats each element by itself, as SGD and AdamW do; Muon, for example, needs whole
matrices.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from mpigossip.config import JobError
from mpigossip.config.user_code import (
    build_checked,
    describe_exception,
    import_object,
    is_user_code,
)

EXAMPLE = '{ name = "SGD", lr = 0.7 }'
"""Example of the setting `algorithm.outer`, for error messages."""
STEP = "step"
"""Key of torch's optimizers for the number of steps; it is 0 before the first one."""


class OuterOptimizer:
    """Optimizer that steps on flat arrays, and whose state consists of arrays of the same shape.

    torch's optimizers keep tensors with the shape of a parameter, and numbers. Each number is kept
    as an array that contains it in each element, so that fragments, which make their outer steps at
    different times, have numbers of their own.
    """

    def __init__(self, setting: Mapping[str, Any]):
        """Find out which state the optimizer has, by three steps on two elements.

        :param setting: "name", the name of a class in torch.optim or "module:function" of the
            user's code, which is called with a list of tensors; all other keys are its options
        :raises JobError: if the optimizer can't be created with these options or can't step, if it
            does not treat each element by itself, or if arrays can't hold its whole state
        """
        self._make = _factory(setting)
        name = setting["name"]
        try:
            both, state = self._probe([1.0, -0.3])
            separate = [self._probe([g])[0] for g in (1.0, -0.3)]
        except JobError:
            raise
        except Exception as error:
            raise JobError(
                f'algorithm.outer: "{name}" can\'t make an outer step: '
                f"{describe_exception(error)}; choose another optimizer, such as "
                'algorithm.outer = {name = "SGD", lr = 0.7}'
            ) from error
        if both != [pair[0] + pair[1] for pair in zip(*separate, strict=True)]:
            raise JobError(
                f'algorithm.outer: "{name}" does not treat each element of a parameter by itself, '
                "but an outer step is applied to shards and fragments of the model: choose another "
                'optimizer, such as algorithm.outer = {name = "SGD", lr = 0.7}'
            )
        self._kinds = {
            key: _number_kind(value)
            for key, value in state.items()
            if value is not None and value is not False
        }
        fields = list(self._kinds)
        if not all(key.isidentifier() and not key.startswith("_") for key in fields):
            raise JobError(
                f'algorithm.outer: "{name}" has a state with the names '
                f"{', '.join(map(str, fields))}, which can't be names of arrays in a checkpoint: "
                'choose another optimizer, such as algorithm.outer = {name = "SGD", lr = 0.7}'
            )
        self._type: Any = namedtuple("OuterState", fields)  # type: ignore[misc]
        if STEP not in self._kinds and not self._starts_at_zero():
            raise JobError(
                f'algorithm.outer: "{name}" with these options treats its first step differently, '
                f'but its state does not contain "{STEP}", the number of steps: '
                "remove the option dampening, or choose another optimizer, such as algorithm.outer "
                '= {name = "SGD", lr = 0.7}'
            )

    def init(self, x: torch.Tensor) -> Any:
        """Return the state before the first step: a NamedTuple of zeros shaped like x."""
        return self._type(*(torch.zeros_like(x) for _ in self._kinds))

    def step(self, x0: torch.Tensor, change: torch.Tensor, state: Any) -> None:
        """Make a step in place: x₀ and the state change.

        The optimizer is created for this step, so that it has no other state.

        :param x0: parameters, (rows, elements)
        :param change: gradient, shaped like x₀
        :param state: result of :meth:`init`, changed by earlier steps
        """
        if not x0.numel():
            return
        parameter = x0.detach()
        parameter.grad = change
        optimizer = self._make([parameter])
        arrays = state._asdict()
        if STEP not in arrays or float(arrays[STEP].flatten()[0]) > 0:
            optimizer.state[parameter] = {
                key: array if kind is None else kind(array.flatten()[0])
                for (key, array), kind in zip(arrays.items(), self._kinds.values(), strict=True)
            }
        optimizer.step()
        after = optimizer.state[parameter]
        for key, array in arrays.items():
            if torch.is_tensor(after[key]) and after[key].shape == array.shape:
                array.copy_(after[key])
            else:
                array.fill_(float(after[key]))

    def _probe(self, gradient: list[float]) -> tuple[list[list[float]], Mapping[str, Any]]:
        """Return the parameter after each of three steps from 0, and the state of the optimizer.

        :param gradient: gradient of each element in the first step; it is multiplied by −0.5 in the
            second step, and by 2 in the third
        """
        with torch.device("cpu"):
            x = torch.zeros(1, len(gradient), dtype=torch.float32)
            optimizer = self._make([x])
            values = []
            for scale in (1.0, -0.5, 2.0):
                x.grad = torch.tensor([gradient], dtype=torch.float32) * scale
                optimizer.step()
                values.append(x[0].tolist())
        return values, optimizer.state[x]

    def _starts_at_zero(self) -> bool:
        """Return whether a first step without a state equals a step with a state of zeros."""
        with torch.device("cpu"):
            x = torch.zeros(1, 1, dtype=torch.float32)
            self.step(x, torch.ones_like(x), self.init(x))
        return x[0].tolist() == self._probe([1.0])[0][0]


def _factory(setting: Mapping[str, Any]) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    """Return the function that creates an optimizer of a list of tensors.

    :param setting: as in `OuterOptimizer`
    :raises JobError: if the setting names no optimizer; the returned function also raises it if the
        optimizer can't be created
    """
    options = {key: value for key, value in setting.items() if key != "name"}
    name = setting.get("name")
    if not isinstance(name, str):
        raise JobError(
            f'algorithm.outer = {dict(setting)}: needs the key "name", the name of an optimizer: '
            f"write {EXAMPLE}"
        )
    if is_user_code(name):
        make = import_object("algorithm.outer", name, "(parameters, …) that returns an Optimizer")
    else:
        make = getattr(torch.optim, name, None)
        if not (inspect.isclass(make) and issubclass(make, torch.optim.Optimizer)):
            raise JobError(
                f'algorithm.outer: "{name}" is no optimizer of torch.optim: write {EXAMPLE}, or '
                '"module:function" for a function of your own'
            )
    kind = torch.optim.Optimizer
    return lambda tensors: build_checked(
        "algorithm.outer", name, kind, partial(make, tensors), **options
    )


def _number_kind(value: Any) -> Callable[[torch.Tensor], Any] | None:
    """Return the function that converts a tensor to a number like ``value``, an entry of a state.

    Return None if ``value`` is an array instead of a number.
    """
    if torch.is_tensor(value) and value.numel() > 1:
        return None
    if torch.is_tensor(value):
        dtype = value.dtype
        return lambda number: torch.tensor(float(number), dtype=dtype, device="cpu")
    return lambda number: type(value)(float(number))


def setting_of(outer: Any, parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Return the setting `algorithm.outer` of an optimizer that a program passes to `Gossip`.

    :param outer: an optimizer of the model's parameters, whose settings are read now; the class of
        an optimizer; a `functools.partial` of one with keyword arguments only; or the setting
        itself, which is not checked here
    :param parameters: parameters of the model that are trained
    :raises JobError: if ``outer`` is of another type, if its parameter groups have different
        settings, if it lacks a trained parameter of the model, or if a learning-rate scheduler
        belongs to it
    """
    if isinstance(outer, Mapping):
        return dict(outer)
    if isinstance(outer, partial) and not outer.args:
        return {"name": _name(outer.func)} | outer.keywords
    if inspect.isclass(outer) and issubclass(outer, torch.optim.Optimizer):
        return {"name": _name(outer)}
    if not isinstance(outer, torch.optim.Optimizer):
        raise JobError(
            f"outer = {outer!r}: pass an optimizer of the model's parameters, such as "
            "torch.optim.SGD(model.parameters(), lr=0.7), or functools.partial(torch.optim.SGD, "
            "lr=0.7)"
        )
    first, *others = ({k: v for k, v in g.items() if k != "params"} for g in outer.param_groups)
    if any(group != first for group in others):
        raise JobError(
            "outer: the parameter groups of the optimizer have different settings, but an outer "
            "step treats all parameters alike: use one group"
        )
    has = {id(p) for group in outer.param_groups for p in group["params"]}
    if missing := sum(id(p) not in has for p in parameters):
        raise JobError(
            f"outer: {missing} trained parameters of the model are not in the optimizer: create it "
            "with model.parameters()"
        )
    if hasattr(outer.step, "_wrapped_by_lr_sched"):
        raise JobError(
            "outer: a learning-rate scheduler belongs to the optimizer, but its settings are read "
            "once, when Gossip is created: remove the scheduler"
        )
    options = {}
    for key, parameter in inspect.signature(type(outer)).parameters.items():
        value = first.get(key, parameter.default)
        if key != "params" and value is not None and value != parameter.default:
            options[key] = float(value) if torch.is_tensor(value) else value
    return {"name": _name(type(outer))} | options


def _name(kind: Any) -> str:
    name = getattr(kind, "__name__", str(kind))
    if getattr(torch.optim, name, None) is kind:
        return name
    return f"{kind.__module__}:{name}"
