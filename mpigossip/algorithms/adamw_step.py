"""Step of AdamW on flat arrays: by its formula, or by torch's fused kernel on GPUs.

The kernel rounds in another order, so that its results differ in the last bits from the formula. A
simulation and ranks are bitwise identical nevertheless, if the result of an element does not depend
on its position, and if all ranks use the kernel or all use the formula. Before the first step, each
rank therefore tries the kernel on its devices, and all ranks agree. The kernel has not been run on
a GPU.
"""

import hashlib
import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw as torch_adamw

from mpigossip.cluster.world import World

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
        steps = [torch.full((), float(index), dtype=torch.float32, device=x.device) for _ in x]
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


class Trial(NamedTuple):
    """Result of a trial of the kernel on one device."""

    device: str
    problem: str
    """Reason why the kernel can't be used on the device; "": it can."""
    digest: str
    """SHA-256 of the kernel's results; "": they are not right, or there are none."""


def all_use_kernel(world: World, devices: Sequence[str]) -> bool:
    """Return whether all ranks can use the kernel, with equal results; collective over ``world``.

    If a rank can't, or if results differ, all ranks use the formula, and rank 0 issues a warning
    with the reason. If all devices are CPUs, there is no warning, because they always use it.

    :param world: all ranks of the run
    :param devices: devices of this rank's slots
    """
    trials = [trial(torch.device(device)) for device in devices]
    trials_by_rank = world.broadcast(world.gather(trials))
    problem = reason_against(trials_by_rank)
    on_gpus = any(not result.device.startswith("cpu") for one in trials_by_rank for result in one)
    if problem and on_gpus and world.rank == 0:
        warnings.warn(
            f"local.fused = true: torch's fused AdamW is not used: {problem}; ten operations "
            "replace it on all ranks (local.fused = false does so without this warning)",
            stacklevel=2,
        )
    return not problem


def reason_against(trials_by_rank: Sequence[Sequence[Trial]]) -> str:
    """Return the reason why not all ranks can use the kernel, or "" if they can.

    :param trials_by_rank: trials of each rank's devices
    """
    first = trials_by_rank[0][0]
    for rank, trials in enumerate(trials_by_rank):
        for result in trials:
            if result.problem:
                return f"on {result.device} of rank {rank}, {result.problem}"
            if result.digest != first.digest:
                return (
                    f"{result.device} of rank {rank} computes other bits than {first.device} of "
                    "rank 0"
                )
    return ""


@cache
def trial(device: torch.device) -> Trial:
    """Try the kernel on a device."""
    if device.type != "cuda":
        return Trial(str(device), "the formula is always used", "")
    digest = ""
    try:
        digest = digest_if_right(device)
        problem = "" if digest else "it differs from the formula, or depends on positions"
    except Exception as error:  # noqa: BLE001 - after any error, the formula is used
        reason = str(error).splitlines()[0] if str(error) else ""
        problem = f"it fails ({type(error).__name__}: {reason})"
    return Trial(str(device), problem, digest)


def digest_if_right(device: torch.device) -> str:
    """Return a digest of the kernel's results on a device; "" if the kernel must not be used.

    The kernel must be close to the formula, and independent of positions: each row alone, and a
    part of its elements that begins between two groups of four, must get the bits that they get in
    two whole rows.
    """
    draw = torch.Generator().manual_seed(0)
    hashed = hashlib.sha256()
    for length in TRIAL_LENGTHS:
        adamw = AdamW(0.9, 0.999, 1e-8, 0.1, length // 3)
        arrays = [torch.randn(2, length, generator=draw, dtype=torch.float32) for _ in range(4)]
        arrays[3].square_()
        for index in (0, 1000):
            x, g, first, second = [array.clone() for array in arrays]
            by_formula(adamw, x, g, first, second, index, TRIAL_LR, x)
            there = [array.to(device, copy=True) for array in arrays]
            _step_in_place(adamw, there, index)
            for got, wanted in zip((there[0], *there[2:]), (x, first, second), strict=True):
                result = got.cpu()
                if not torch.allclose(result, wanted, rtol=TOLERANCE, atol=TOLERANCE):
                    return ""
                hashed.update(result.numpy().tobytes())
            if not _independent(adamw, arrays, there, index):
                return ""
    return hashed.hexdigest()


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
