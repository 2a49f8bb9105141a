"""Convolutions as GPUs like them: weights channels last, algorithms chosen by trying them."""

from __future__ import annotations

from torch import are_deterministic_algorithms_enabled as deterministic
from torch import backends, channels_last, nn, version


def arranged(module: nn.Module, setting: str, device: str) -> nn.Module:
    """The module, its weights channels last where ``node.channels_last`` means it.

    "auto": models with two-dimensional convolutions on NVIDIA's GPUs. The weights decide: inputs
    follow at the first convolution. cuDNN then tries its algorithms for every new shape, unless
    torch is asked for deterministic ones.
    """
    on_gpu = device.startswith("cuda")
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return module
    if setting == "never" or (setting == "auto" and (not on_gpu or version.hip)):
        return module
    if on_gpu:
        backends.cudnn.benchmark = not deterministic()
    return module.to(memory_format=channels_last)
