"""Whether a GPU sees what a network card wrote before its token came; where not, it is flushed.

A card writes past the processor: on some platforms a kernel that is begun after the token still
finds old bytes, until the host has the writes flushed (CUDA 11.3 on; what AMD's has is unknown).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from mpigossip.mixing.device.memory import MemoryRefused, current

OPTIONS, ORDERING = 117, 118
"""cudaDevAttrGPUDirectRDMAFlushWritesOptions and cudaDevAttrGPUDirectRDMAWritesOrdering."""
BY_HOST = 1
"""The option of a flush that the host asks for."""
CURRENT, TO_OWNER = 0, 100
"""Target and scope of a flush: the current device, for its own work."""


@cache
def ordered(device: torch.device) -> bool:
    """Whether writes are seen by the device's later work as they are; MemoryRefused: never."""
    if device.type == "cpu" or torch.version.hip:
        return True
    import cupy

    runtime = cupy.cuda.runtime
    try:
        ordering, options = (
            runtime.deviceGetAttribute(which, device.index) for which in (ORDERING, OPTIONS)
        )
    except runtime.CUDARuntimeError:  # a driver that doesn't know the question
        return True
    if ordering or options & BY_HOST:
        return ordering > 0
    raise MemoryRefused(
        f"{device} doesn't order what a network card writes, and the host can't have it flushed"
    )


def arrived_whole(device: torch.device) -> None:
    """After a token came: what it announced is seen by work that the device is given from now on.

    Raises MemoryRefused where a flush fails.
    """
    if ordered(device):
        return
    with current(device):
        code = driver().cuFlushGPUDirectRDMAWrites(CURRENT, TO_OWNER)
    if code:
        raise MemoryRefused(f"cuFlushGPUDirectRDMAWrites on {device} failed with code {code}")


@cache
def driver() -> Any:
    """The library that CUDA's calls end in."""
    return ctypes.CDLL("libcuda.so.1")
