"""Gradients that are written to flat memory by the first backward pass of a step."""

from functools import partial

import torch
from torch import nn

from mpigossip.engine.vector import ParameterLayout

LARGE = 1 << 18
"""Smallest number of elements of a parameter whose gradient a hook writes. For smaller parameters,
calling a hook takes longer than adding the gradient to zeros."""


class FlatGradients:
    """Gradients of one replica, which are views of a row of flat memory.

    Autograd adds to a gradient that exists. If the row were set to zero before each step, its
    memory would be written and read once more than necessary. Instead, a large parameter has the
    gradient None before the first backward pass of a step, and a hook copies the gradient that
    autograd creates to the row. Further passes of the step add to the row. The result is bitwise
    identical to gradients that are added to zeros.
    """

    def __init__(self, module: nn.Module, layout: ParameterLayout, row: torch.Tensor):
        """Register the hooks of large parameters.

        :param module: replica whose gradients are views of ``row``
        :param layout: layout of its parameters
        :param row: the gradients (P,)
        """
        parameters = dict(module.named_parameters())
        self._large: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._others: list[torch.Tensor] = []
        """Ranges of the row that contain no large gradient; some may be empty."""
        begin = 0
        for name, view in zip(layout.names, layout.views(row), strict=True):
            if view.numel() < LARGE:
                continue
            offset = view.storage_offset() - row.storage_offset()
            self._others.append(row[begin:offset])
            begin = offset + view.numel()
            parameter = parameters[name]
            parameter.register_post_accumulate_grad_hook(partial(_write, view))
            self._large.append((parameter, view))
        self._others.append(row[begin:])

    def begin(self) -> None:
        """Prepare the first backward pass of a step: discard the gradients of the last step."""
        for part in self._others:
            if part.numel():
                part.zero_()
        for parameter, _ in self._large:
            parameter.grad = None

    def complete(self) -> None:
        """Set large gradients to zero that the first backward pass of a step has not written."""
        for parameter, view in self._large:
            if parameter.grad is None:
                parameter.grad = view.zero_()


@torch.no_grad()
def _write(view: torch.Tensor, parameter: nn.Parameter) -> None:
    """Copy a gradient that autograd has created to the parameter's view of the row."""
    gradient = parameter.grad
    if gradient is view or gradient is None:
        return
    if gradient.layout == torch.strided:
        torch.add(gradient, 0, out=view)  # 0 + (-0.0) is 0.0, as if it were added to zeros
    else:
        view.zero_().add_(gradient)
    parameter.grad = view
