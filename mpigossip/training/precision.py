"""Arithmetic of the forward and backward passes: float32, bfloat16, or scaled float16.

Parameters and gradients are stored in float32 in all three cases.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpigossip.cluster.world import World
from mpigossip.groups.base import Group

FIRST_SCALE = 2.0**16
"""Loss scale of a node at the start of a run."""
GROWTH_INTERVAL = 2000
"""Number of steps without an overflow after which the loss scale of a node is doubled."""


def agreed(setting: str, world: World, devices: Sequence[str]) -> str:
    """Return the arithmetic for `node.precision`: "fp32", "bf16" or "fp16"; collective over world.

    "auto" is bf16 if the slots of all ranks are GPUs that support it, otherwise fp32: if only some
    GPUs supported it, the nodes would round in different ways.

    :param setting: value of `node.precision`, which is the same on all ranks
    :param world: all ranks of the run
    :param devices: devices of this rank's slots
    """
    if setting != "auto":
        return setting
    unsupported = not all(supports_bf16(device) for device in devices)
    return "fp32" if world.agree(int(unsupported)) else "bf16"


def supports_bf16(device: str) -> bool:
    """Return whether a device is a GPU that computes with bfloat16 without emulation."""
    if not device.startswith("cuda"):
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(False)


def without_tf32() -> None:
    """Disable TensorFloat-32 in matrix products, convolutions and recurrent layers.

    torch warns about the older setting, ``allow_tf32``, and raises an error if both have been used.
    """
    cudnn = torch.backends.cudnn
    for backend in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
        backend.fp32_precision = "ieee"


class Precision:
    """Arithmetic of the replicas of a model: "fp32", "bf16" or "fp16".

    float16 can't represent magnitudes below 6e-8 or above 65504, so with "fp16", each node scales
    its loss. If the gradient of any slot overflows, all slots of the node skip the local step, take
    part in the round as usual, and halve the scale. After GROWTH_INTERVAL steps without an
    overflow, the scale is doubled. Scales are powers of two from 2⁻¹⁴ to 2²⁴, so scaling does not
    round (Micikevicius et al., ICLR 2018).
    """

    def __init__(self, name: str, devices: Sequence[str], rows: int):
        """Initialize the loss scales.

        If the name is "fp32" and the slots are GPUs, TensorFloat-32 is disabled in this process. By
        default, torch enables it for convolutions.

        :param name: "fp32", "bf16" or "fp16"
        :param devices: device of each slot
        :param rows: number of local nodes
        """
        self.name = name
        self._scales = name == "fp16"
        self._kind = "cuda" if devices[0].startswith("cuda") else "cpu"
        if self._kind == "cuda" and name == "fp32":
            without_tf32()
        self.scales = [
            torch.full((rows, 1), FIRST_SCALE, dtype=torch.float32, device=device)
            for device in devices
        ]
        """Loss scale of each node, as one tensor (rows, 1) per slot. The tensors keep their
        addresses, so that captured CUDA graphs can use them.
        """
        self._values = [FIRST_SCALE] * rows
        self._clean = [0] * rows

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context manager in which a forward pass has to run."""
        if self.name == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self._kind, dtype)

    def scaled(self, loss: torch.Tensor, row: int, slot: int) -> torch.Tensor:
        """Return the loss times the loss scale, whose gradient can be computed in float16.

        :param loss: loss of a batch, a scalar
        :param row: index of the local node
        :param slot: index of the slot
        """
        return loss * self.scales[slot][row, 0] if self._scales else loss

    def numbers(self, row: int) -> dict[str, float]:
        """Return, for a checkpoint, a node's loss scale and number of steps without an overflow.

        The keys are "loss_scale" and "clean_steps". Without loss scales, the result is {}.

        :param row: index of the local node
        """
        if not self._scales:
            return {}
        return {"loss_scale": self._values[row], "clean_steps": self._clean[row]}

    def restore(self, row: int, numbers: dict) -> None:
        """Restore the loss scale of a node from a checkpoint.

        :param row: index of the local node
        :param numbers: numbers of a checkpoint, which include the result of :meth:`numbers`; if
            they have no loss scale, the scale is kept
        """
        if self._scales and "loss_scale" in numbers:
            self._set(row, numbers["loss_scale"], int(numbers["clean_steps"]))

    def _set(self, row: int, scale: float, clean: int) -> None:
        """Set the loss scale of a node, and its number of steps since the scale last changed."""
        self._values[row] = scale
        self._clean[row] = clean
        for scales in self.scales:
            scales[row].fill_(scale)

    def unscale(
        self, g: Sequence[torch.Tensor], group: Group, mean: Callable | None = None
    ) -> tuple[int, ...]:
        """Divide the averaged gradients by the loss scale, and adapt the scale to overflows.

        Without loss scales, which only "fp16" has, do nothing and return ().

        :param g: shards of the gradient, one per slot, (rows, p) each
        :param group: slots of the node
        :param mean: function that averages float64 arrays (rows, 1) over nodes, if all nodes have
            to skip the step as soon as one of them does; None: each node skips the step alone
        :return: rows whose gradient overflowed and was set to zero
        """
        if not self._scales:
            return ()

        def count_invalid(shard: int) -> torch.Tensor:
            invalid = torch.isfinite(g[shard]).logical_not().sum(1, keepdim=True)
            return invalid.double().cpu()

        invalid = group.sum_scalars(group.on_shards(count_invalid))
        overflowed = invalid[:, 0] > 0
        if mean is not None:
            overflowed |= mean(invalid)[0] > 0

        def divide(shard: int) -> None:
            for row, has_overflowed in enumerate(overflowed.tolist()):
                # Multiplying by 0 would not remove NaN and infinite values.
                _ = (
                    g[shard][row].zero_()
                    if has_overflowed
                    else g[shard][row].mul_(1 / self._values[row])
                )

        group.on_shards(divide)
        for row, has_overflowed in enumerate(overflowed.tolist()):
            self._adapt(row, has_overflowed)
        return tuple(
            row for row, has_overflowed in enumerate(overflowed.tolist()) if has_overflowed
        )

    def _adapt(self, row: int, overflowed: bool) -> None:
        """Halve the loss scale of a node after an overflow, or double it after many steps without.

        It is doubled after GROWTH_INTERVAL consecutive steps without an overflow.

        :param row: index of the local node
        :param overflowed: whether its gradient overflowed in this step
        """
        scale = self._values[row]
        clean = self._clean[row] + 1
        if overflowed:
            self._set(row, max(scale / 2, 2.0**-14), 0)
        elif clean == GROWTH_INTERVAL:
            self._set(row, min(scale * 2, 2.0**24), 0)
        else:
            self._clean[row] = clean


def arranged(module: nn.Module, setting: str, device: str) -> nn.Module:
    """Return the module, with weights in channels-last format if `node.channels_last` says so.

    A model without two-dimensional convolutions is returned unchanged. For others, "auto" converts
    the weights if the slots are NVIDIA GPUs. Only weights have to be converted, because the first
    convolution converts its input. On GPUs, cuDNN then benchmarks its algorithms for each new
    shape, unless torch is set to deterministic algorithms.

    :param module: the model
    :param setting: value of `node.channels_last`
    :param device: device of the first slot
    """
    on_gpu = device.startswith("cuda")
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return module
    if setting == "never" or (setting == "auto" and (not on_gpu or torch.version.hip)):
        return module
    if on_gpu:
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    return module.to(memory_format=torch.channels_last)
