"""Arithmetic of forward and backward: float32, bfloat16, or float16 with a scaled loss.

Parameters, gradients' sums, optimizer state and what travels stay float32 in all three.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpigossip.groups.base import Group

FIRST_SCALE = 2.0**16
PATIENCE = 2000
"""Steps without an overflow after which a node's loss scale is doubled."""


def resolved(setting: str, device: str) -> str:
    """The arithmetic that `node.precision` asks for; "auto" is bf16 on GPUs that have it."""
    if setting != "auto":
        return setting
    on_gpu = device.startswith("cuda")
    return "bf16" if on_gpu and torch.cuda.is_bf16_supported(False) else "fp32"


def without_tf32() -> None:
    """Full float32 in products and convolutions, by the newer setting where torch has it.

    Since torch 2.9 the older one warns, and raises where both have been used.
    """
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        for place in (matmul, cudnn.conv, cudnn.rnn):
            place.fp32_precision = "ieee"
    else:
        matmul.allow_tf32 = cudnn.allow_tf32 = False


class Precision:
    """Arithmetic of replicas; ``name`` is "fp32", "bf16" or "fp16".

    float16 holds nothing below 6e-8 or above 65504: each node scales its loss. Where any slot's
    gradient overflowed, the whole node (all its slots) skips its local step, joins the round as
    always, and halves its scale; after PATIENCE clean steps it doubles. Scales are powers of two,
    so that they round nothing (Micikevicius et al., ICLR 2018).
    """

    def __init__(self, name: str, devices: Sequence[str], rows: int):
        """``devices``: one a slot; ``rows``: nodes that live here.

        With "fp32" TensorFloat-32 is switched off, which torch leaves on for convolutions.
        """
        self.name = name
        self._scales = name == "fp16"
        self._kind = "cuda" if devices[0].startswith("cuda") else "cpu"
        if self._kind == "cuda" and name == "fp32":
            without_tf32()
        self.scales = [torch.full((rows, 1), FIRST_SCALE, device=device) for device in devices]
        """per slot (rows, 1), at a fixed address for captured graphs"""
        self._values = [FIRST_SCALE] * rows
        self._clean = [0] * rows

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context of a forward pass."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self._kind, dtype)

    def scaled(self, loss: torch.Tensor, row: int, slot: int) -> torch.Tensor:
        """The loss that is differentiated."""
        return loss * self.scales[slot][row, 0] if self._scales else loss

    def numbers(self, row: int) -> dict[str, float]:
        """A node's scale and clean steps so far, for its checkpoint."""
        if not self._scales:
            return {}
        return {"loss_scale": self._values[row], "clean_steps": self._clean[row]}

    def restore(self, row: int, numbers: dict) -> None:
        """Go on where :meth:`numbers` stood; from a run without a scale, at the first one."""
        if self._scales and "loss_scale" in numbers:
            self._set(row, numbers["loss_scale"], int(numbers["clean_steps"]))

    def _set(self, row: int, scale: float, clean: int) -> None:
        self._values[row] = scale
        self._clean[row] = clean
        for scales in self.scales:
            scales[row].fill_(scale)

    def unscale(
        self, g: Sequence[torch.Tensor], group: Group, mean: Callable | None = None
    ) -> tuple[int, ...]:
        """Take the loss scale out of the averaged gradients, the shards (rows, p) of a node.

        Returns the rows whose gradient overflowed; it is zero there. ``mean``: the average over
        nodes of float64 arrays (rows, 1), where all nodes are to skip the step if one does.
        """
        if not self._scales:
            return ()

        def count_wrong(shard: int) -> torch.Tensor:
            wrong = torch.isfinite(g[shard]).logical_not().sum(1, keepdim=True)
            return wrong.double().cpu()

        wrong = group.sum_scalars(group.on_shards(count_wrong))
        overflowed = wrong[:, 0] > 0
        if mean is not None:
            overflowed |= mean(wrong)[0] > 0

        def divide(shard: int) -> None:
            for row, bad in enumerate(overflowed.tolist()):
                # not 0 · g: that would keep what isn't finite
                _ = g[shard][row].zero_() if bad else g[shard][row].mul_(1 / self._values[row])

        group.on_shards(divide)
        for row, bad in enumerate(overflowed.tolist()):
            self._adapt(row, bad)
        return tuple(row for row, bad in enumerate(overflowed.tolist()) if bad)

    def _adapt(self, row: int, overflowed: bool) -> None:
        scale = self._values[row]
        clean = self._clean[row] + 1
        if overflowed:
            self._set(row, max(scale / 2, 2.0**-14), 0)
        elif clean == PATIENCE:
            self._set(row, min(scale * 2, 2.0**24), 0)
        else:
            self._clean[row] = clean


def arranged(module: nn.Module, setting: str, device: str) -> nn.Module:
    """The module, its weights channels last where ``node.channels_last`` means it.

    "auto": models with two-dimensional convolutions on NVIDIA's GPUs. The weights decide: inputs
    follow at the first convolution. cuDNN then tries its algorithms for every new shape, unless
    torch is asked for deterministic ones.
    """
    on_gpu = device.startswith("cuda")
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return module
    if setting == "never" or (setting == "auto" and (not on_gpu or torch.version.hip)):
        return module
    if on_gpu:
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    return module.to(memory_format=torch.channels_last)
