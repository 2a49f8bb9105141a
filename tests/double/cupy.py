"""The parts of CuPy that the package uses: private memory and raw kernels."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.double import cuda, fails, tensors
from tests.double.cuda import current_device
from tests.mixing.kernels import on_cpu


class CUDARuntimeError(RuntimeError):
    """Error of the CUDA runtime."""


class Memory:
    """Separate allocation."""

    def __init__(self, size: int):
        if fails("allocation"):
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        tensors.context.made = True
        self.tensor = torch.zeros(size, dtype=torch.uint8)


class Array:
    """The part of cupy.ndarray that is passed to torch."""

    def __init__(self, shape, dtype, memory):
        self.tensor = memory.tensor[: shape[0]]

    def fill(self, value) -> None:
        self.tensor.fill_(value)


class RawKernel:
    """Kernel compiled for this processor; its launch reports what it reads and writes."""

    def __init__(self, source: str, name: str):
        (self.run,) = on_cpu.compiled([source], Path(os.environ["MPIGOSSIP_DOUBLE_FOLDER"]))

    def __call__(self, grid, block, values) -> None:
        for value in values:
            if value.dtype == np.uint64 and tensors.pointers[int(value)].double != current_device():
                raise CUDARuntimeError("cudaErrorInvalidResourceHandle: memory of another device")
        self.run(grid, block, values)


def install() -> None:
    """Let `import cupy` import this, unless the environment says that it isn't installed."""
    original = torch.from_dlpack

    def from_dlpack(given):
        if isinstance(given, Array):
            return tensors.OnDevice(given.tensor, current_device())
        if isinstance(given, tensors.OnDevice):
            return tensors.OnDevice(tensors.plain(given), tensors.index_of(given))
        return original(given)

    torch.from_dlpack = from_dlpack
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        deviceSynchronize=cuda.synchronize,
        runtimeGetVersion=lambda: 13000,
        deviceGetPCIBusId=lambda index: f"0000:{index:02x}:00.0",
    )
    driver = SimpleNamespace(
        runtime=runtime,
        Memory=Memory,
        Device=lambda index: nullcontext(),
        MemoryPointer=lambda memory, offset: memory,
        Stream=SimpleNamespace(from_external=lambda pointer: nullcontext()),
    )
    cupy = SimpleNamespace(cuda=driver, ndarray=Array, uint8=np.uint8, RawKernel=RawKernel)
    there = "MPIGOSSIP_DOUBLE_NO_CUPY" not in os.environ
    sys.modules |= {"cupy": cupy, "cupy.cuda": driver} if there else {"cupy": None}
