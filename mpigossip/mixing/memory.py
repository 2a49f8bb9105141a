"""Memory that MPI and other processes may reach: private on a GPU, mapped from a neighbour, pinned.

Torch's caching allocator hands out pieces of larger blocks, which can't be exported or given to
MPI safely; these are allocations of their own. Untested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MemoryRefused(RuntimeError):
    """Memory that can't be had or shared: device, call and remedy are named."""


def private(nbytes: int, device: torch.device) -> torch.Tensor:
    """An allocation of its own (cudaMalloc) as uint8 (nbytes,); zeros on the CPU."""
    if device.type == "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8)
    cupy = _cupy(device)
    try:
        with cupy.cuda.Device(device.index):
            memory = cupy.cuda.Memory(max(nbytes, 1))
            array = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            array.fill(0)
            cupy.cuda.runtime.deviceSynchronize()
            return torch.from_dlpack(array)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryRefused(
            f"cudaMalloc of {nbytes >> 20} MiB for windows on {device} failed: {error}; torch may "
            "hold the rest in its cache (a smaller data.batch leaves more)"
        ) from error


def handles(memory: Sequence[torch.Tensor]) -> list[bytes]:
    """What another process of this host opens these private allocations with."""
    found = []
    for array in memory:
        cupy = _cupy(array.device)
        with cupy.cuda.Device(array.device.index):
            found.append(cupy.cuda.runtime.ipcGetMemHandle(array.data_ptr()))
    return found


class Mapped:
    """A neighbour's private allocations, mapped into this process; ``arrays``: one a slot."""

    def __init__(self, given: Sequence[bytes], nbytes: int, devices: Sequence[torch.device]):
        """``devices``: where this process's slots are. Raises MemoryRefused."""
        self.arrays: list[torch.Tensor] = []
        self._open: list[tuple[int, int]] = []
        try:
            for handle, device in zip(given, devices, strict=True):
                cupy = _cupy(device)
                with cupy.cuda.Device(device.index):
                    pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle)
                    self._open.append((pointer, device.index))
                    memory = cupy.cuda.UnownedMemory(pointer, nbytes, self)
                    array = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
                    self.arrays.append(torch.from_dlpack(array))
        except RuntimeError as error:  # CUDARuntimeError is one
            self.close()
            raise MemoryRefused(
                f"cudaIpcOpenMemHandle of a neighbour's memory for {device} failed: {error}; ranks "
                "of one host need to see each other's GPUs (CUDA_VISIBLE_DEVICES) and processes"
            ) from error

    def close(self) -> None:
        """Unmap; the arrays must not be used any more."""
        self.arrays = []
        for pointer, index in self._open:
            cupy = _cupy(torch.device("cuda", index))
            with cupy.cuda.Device(index):
                cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._open = []


def pin(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Lock host memory that something else has allocated, so that GPUs copy at full speed.

    Returns what undoes it. Raises MemoryRefused; without locked memory copies are only slower.
    """
    if device.type == "cpu" or not memory.numel():
        return lambda: None
    runtime: Any = torch.cuda.cudart()
    pointer, portable = memory.data_ptr(), 1
    code = int(runtime.cudaHostRegister(pointer, memory.numel(), portable))
    if code:
        raise MemoryRefused(
            f"cudaHostRegister of {memory.numel() >> 20} MiB for {device} failed with code {code}: "
            "copies go through pageable memory and are slower; `ulimit -l unlimited` may help"
        )
    return lambda: runtime.cudaHostUnregister(pointer)


def _cupy(device: torch.device) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MemoryRefused(
            f"memory of {device} is shared through CuPy, which can't be imported ({error}); "
            "pip install 'mpigossip[cuda]', or go through host memory: node.gpu_window = \"host\""
        ) from error
    return cupy
