"""Models on torch's meta device, to count parameters before memory is allocated."""

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from mpigossip.config import JobError
from mpigossip.config.readable import format_bytes

MAX_TENSORS = 1 << 13
"""Largest number of parameter tensors of a built-in model; "gpt" has up to 12 per layer."""
MAX_PARAMETERS = 10**12
"""Largest number of parameters of a built-in model."""
TRIED_PARAMETERS = 1 << 25
TRIED_ELEMENTS = 1 << 18
TRIED_TOKENS = 1 << 10
"""Largest number of parameters of a model, and of elements or tokens of a sample, for which the
model is tested even if nothing is trained. The parameters of larger models are only counted.
"""
INITIALIZERS = frozenset(name for name in vars(nn.init) if name.endswith("_") and name[0] != "_")
"""Names of functions of torch.nn.init; the tensor methods that they call have the same names."""


class _Uninitialized(TorchFunctionMode):
    """Mode of torch in which tensors on the meta device are not initialized.

    Some initializations would make torch import its compiler, which takes long.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        on_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta
        if on_meta and getattr(func, "__name__", "") in INITIALIZERS:
            return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Return a context manager in which this thread creates tensors on torch's meta device.

    Such tensors have no values and take no memory.
    """
    with torch.device("meta"), _Uninitialized():
        yield


@contextlib.contextmanager
def limited(described: str, parameters: float, tensors: float, remedy: str) -> Iterator[None]:
    """Return a context manager that limits the parameters that this thread gives to modules.

    A parameter of two modules counts twice. The parameters of lazy modules do not count.

    :param described: description of the model, with the settings that determine its size
    :param parameters: largest number of elements of all parameters together
    :param tensors: largest number of parameter tensors
    :param remedy: remedy in the message
    :raises JobError: as soon as all these parameters together exceed a limit
    """
    thread = threading.get_ident()
    elements = 0
    count = 0

    def add(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal elements, count
        if parameter is None or threading.get_ident() != thread:
            return
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
            # The shape of an uninitialized parameter is unknown.
            return
        count += 1
        elements += parameter.numel()
        if count > tensors:
            raise JobError(
                f"{described} has more parameter tensors than the limit of {tensors:,}; {remedy}"
            )
        if elements > parameters:
            raise JobError(
                f"{described} has {elements:,} parameters or more ({format_bytes(4 * elements)} in "
                f"float32), but the limit is {parameters:,}; {remedy}"
            )

    handle = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


def is_small(module: nn.Module, shape: tuple[int, ...], tokens: bool) -> bool:
    """Return whether a model is small enough to be built and tested by commands that train nothing.

    A model with lazy modules counts as small, because its size is known only after it is applied to
    a sample.

    :param module: the model
    :param shape: shape of a sample
    :param tokens: whether the elements of a sample are tokens
    """
    parameters = [*module.parameters()]
    if any(
        isinstance(parameter, nn.parameter.UninitializedTensorMixin) for parameter in parameters
    ):
        return True
    size = sum(parameter.numel() for parameter in parameters)
    return size <= TRIED_PARAMETERS and math.prod(shape) <= (
        TRIED_TOKENS if tokens else TRIED_ELEMENTS
    )
