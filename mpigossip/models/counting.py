"""Models on torch's meta device: their parameters are counted before memory is allocated."""

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
"""Largest number of parameter tensors of a built-in model; GPT has 12 for each layer."""
MAX_PARAMETERS = 10**12
"""Largest number of parameters of a built-in model."""
TRIED_PARAMETERS = 1 << 25
TRIED_ELEMENTS = 1 << 18
TRIED_TOKENS = 1 << 10
"""Largest number of parameters of a model, and of elements or tokens of a sample, for which the
model is tested even if nothing is trained. A larger one is only counted.
"""
INITIALIZERS = frozenset(name for name in vars(nn.init) if name.endswith("_") and name[0] != "_")
"""Names of the functions of torch.nn.init and of the tensor methods that they call."""


class _Uninitialized(TorchFunctionMode):
    """Mode that skips the initialization of meta tensors.

    Part of the initialization would make torch import its compiler.
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
    """Create the tensors of this thread on the meta device, without values or memory."""
    with torch.device("meta"), _Uninitialized():
        yield


@contextlib.contextmanager
def limited(described: str, parameters: float, tensors: float, remedy: str) -> Iterator[None]:
    """Raise JobError as soon as the modules made by this thread have too many parameters.

    :param described: description of the model, with the settings that determine its size
    :param parameters: largest number of elements of all parameters together
    :param tensors: largest number of parameters
    :param remedy: what to do about a model that is too large
    """
    thread = threading.get_ident()
    elements = 0
    count = 0

    def add(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal elements, count
        if parameter is None or threading.get_ident() != thread:
            return
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
            return  # has no shape yet
        count += 1
        elements += parameter.numel()
        if count > tensors:
            raise JobError(f"{described} has more than {tensors:,} parameter tensors; {remedy}")
        if elements > parameters:
            raise JobError(
                f"{described} has {elements:,} parameters or more ({format_bytes(4 * elements)} in "
                f"float32), and at most {parameters:,} are possible; {remedy}"
            )

    handle = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        handle.remove()


def is_small(module: nn.Module, shape: tuple[int, ...], tokens: bool) -> bool:
    """Return whether a model may be built and tried on a sample even if nothing is trained.

    The size of a model with lazy modules is not known before it has seen a sample.
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
