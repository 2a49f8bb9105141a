"""Step of AdamW on flat arrays: by its formula, or by torch's fused kernel on GPUs.

The kernel rounds in another order, so that its results differ in the last bits from the formula. A
simulation and ranks are bitwise identical nevertheless, if the result of an element does not depend
on its position. Both properties are checked on the device before the first step. The kernel has not
been run on a GPU.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw as torch_adamw

TOLERANCE = 1e-6
"""Largest difference between kernel and formula that is accepted, relative or absolute."""
TRIAL_LENGTHS = (5, 1021, 70_000)
"""Lengths of the arrays that are tried. The kernel divides arrays into chunks of 65,536 elements,
and loads four elements at once if an array is aligned."""
TRIAL_LR = 0.01


class AdamW(NamedTuple):
    """Parameters of AdamW, as in `local.adamw`."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    """λ, decoupled weight decay."""
    decayed: int
    """Number of elements, counted from the first, that take the decay."""


def by_formula(
    adamw: AdamW,
    x: torch.Tensor,
    g: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    index: int,
    lr: float,
    out: torch.Tensor,
) -> None:
    """Write the parameters after a step to ``out``, and update the running means in place.

    :param adamw: parameters of AdamW
    :param x: parameters, (rows, columns)
    :param g: gradients, shaped like x; they are overwritten
    :param first: running mean of gradients, shaped like x
    :param second: running mean of squared gradients, shaped like x
    :param index: number of steps that have been made before
    :param lr: learning rate
    :param out: array for the result, which may be x
    """
    t = index + 1
    first.lerp_(g, 1 - adamw.beta1)
    second.mul_(adamw.beta2).addcmul_(g, g, value=1 - adamw.beta2)
    d = torch.div(second, 1 - adamw.beta2**t, out=g).sqrt_().add_(adamw.eps)
    torch.div(first, d, out=d).div_(1 - adamw.beta1**t)
    if adamw.decay:
        d[:, : adamw.decayed].add_(x[:, : adamw.decayed], alpha=adamw.decay)
    torch.add(x, d, alpha=-lr, out=out)


def by_kernel(
    adamw: AdamW,
    x: torch.Tensor,
    g: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    index: int,
    lr: float,
    out: torch.Tensor,
) -> None:
    """Make the step of :func:`by_formula` by torch's fused kernel, within rounding.

    The host waits for nothing, and the gradients do not change.
    """
    if out is not x:
        out.copy_(x)
    boundary = min(adamw.decayed, x.shape[1]) if adamw.decay else 0
    for columns, decay in ((slice(0, boundary), adamw.decay), (slice(boundary, None), 0.0)):
        if not x[:, columns].numel():
            continue
        # A row of columns is contiguous, but several rows are not.
        rows = [[row[columns] for row in array] for array in (out, g, first, second)]
        # On the device, because a number of the host would have to be copied to it.
        steps = [torch.full((), float(index), device=x.device) for _ in x]
        torch_adamw(
            *rows,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=adamw.beta1,
            beta2=adamw.beta2,
            lr=lr,
            weight_decay=decay,
            eps=adamw.eps,
            maximize=False,
        )


@cache
def usable(device: torch.device) -> bool:
    """Return whether the kernel may replace the formula on this device.

    The formula always stays on CPUs. If the kernel is not right on a GPU, a warning is issued.
    """
    if device.type != "cuda":
        return False
    try:
        problem = "" if is_right(device) else "it differs from the formula, or depends on positions"
    except Exception as error:  # noqa: BLE001 - after any error, the formula is used
        reason = str(error).splitlines()[0] if str(error) else ""
        problem = f"{type(error).__name__}: {reason}"
    if problem:
        warnings.warn(
            f"local.fused = true: torch's fused AdamW is not used on {device}: {problem}; ten "
            "operations replace it (local.fused = false does so without this warning)",
            stacklevel=2,
        )
    return not problem


def is_right(device: torch.device) -> bool:
    """Return whether the kernel is close to the formula, and independent of positions.

    Each row alone, and a part of its elements that begins between two groups of four elements, must
    get the bits that they get in two whole rows.
    """
    draw = torch.Generator().manual_seed(0)
    for length in TRIAL_LENGTHS:
        adamw = AdamW(0.9, 0.999, 1e-8, 0.1, length // 3)
        arrays = [torch.randn(2, length, generator=draw) for _ in range(4)]
        arrays[3].square_()
        for index in (0, 1000):
            x, g, first, second = [array.clone() for array in arrays]
            by_formula(adamw, x, g, first, second, index, TRIAL_LR, x)
            there = [array.to(device, copy=True) for array in arrays]
            _step_in_place(adamw, there, index)
            for got, wanted in zip((there[0], *there[2:]), (x, first, second), strict=True):
                if not torch.allclose(got.cpu(), wanted, rtol=TOLERANCE, atol=TOLERANCE):
                    return False
            if not _independent(adamw, arrays, there, index):
                return False
    return True


def _independent(
    adamw: AdamW, arrays: Sequence[torch.Tensor], result: Sequence[torch.Tensor], index: int
) -> bool:
    """Return whether parts of arrays get the results that they get in whole arrays.

    :param adamw: parameters of AdamW
    :param arrays: parameters, gradients and running means before the step, on the CPU
    :param result: the same arrays after the step of whole arrays, on a device
    :param index: number of steps that have been made before
    """
    length = arrays[0].shape[1]
    for rows in (slice(0, 1), slice(1, 2)):
        for begin in (0, length // 2 | 1):
            copies = [array.to(result[0].device, copy=True) for array in arrays]
            part = [array[rows, begin:] for array in copies]
            shifted = adamw._replace(decayed=max(0, adamw.decayed - begin))
            _step_in_place(shifted, part, index)
            pairs = zip(part, result, strict=True)
            if not all(torch.equal(p, whole[rows, begin:]) for p, whole in pairs):
                return False
    return True


def _step_in_place(adamw: AdamW, arrays: Sequence[torch.Tensor], index: int) -> None:
    """Make a step by the kernel; ``arrays``: parameters, gradients, and the two running means."""
    x, g, first, second = arrays
    by_kernel(adamw, x, g, first, second, index, TRIAL_LR, x)
