"""What the package uses of CuPy: private memory and its handles, raw kernels, NCCL."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from tests.double import cuda, kernels, links, tensors
from tests.double.checker import checker
from tests.double.failures import fails


class CUDARuntimeError(RuntimeError):
    """An error of the runtime."""


exported: dict[int, str] = {}
"""address of private memory -> the file that it lies in"""
mapped: dict[int, torch.Tensor] = {}
"""address -> a neighbour's memory, mapped"""


class Memory:
    """An allocation that another process can map: a file in shared memory."""

    def __init__(self, size: int):
        """``size``: bytes, on the current device."""
        self.ptr = 0
        if fails("allocation"):
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        handle, self.path = tempfile.mkstemp(dir="/dev/shm", prefix="mpigossip-double-")
        os.close(handle)
        self.tensor = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        self.ptr = self.tensor.data_ptr()
        exported[self.ptr] = self.path

    def __del__(self):
        """Its name goes; the memory lives as long as it is mapped."""
        if exported.pop(self.ptr, None):
            Path(self.path).unlink()


class UnownedMemory:
    """Memory that something else has mapped."""

    def __init__(self, ptr, size, owner, device_id=-1):
        """``ptr``: from ipcOpenMemHandle."""
        self.tensor, self.ptr = mapped[ptr][:size], ptr


class Array:
    """cupy.ndarray, as far as it is handed on to torch."""

    def __init__(self, shape, dtype, memptr):
        """Bytes at a place."""
        self.memory = memptr.memory
        self.tensor = self.memory.tensor[: shape[0]]

    def fill(self, value) -> None:
        """On the current stream."""
        self.tensor.fill_(value)


def from_dlpack(array: Array) -> torch.Tensor:
    """A tensor of the current device over the same memory, which it keeps alive."""
    made = tensors.OnDevice(array.tensor, cuda.current_device())
    made.double_keeps = array.memory
    return made


def _handle(pointer: int) -> bytes:
    if fails("ipc"):
        raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")
    return exported[pointer].encode()


def _open(handle: bytes) -> int:
    path = handle.decode()
    memory = torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8)
    memory = memory.clone() if fails("peer") else memory  # as if peers didn't see each other
    mapped[memory.data_ptr()] = memory
    return memory.data_ptr()


class RawKernel:
    """A kernel compiled for this processor; what it reads and writes is told."""

    def __init__(self, source: str, name: str):
        """``source``: as :func:`mpigossip.mixing.kernels.elementwise.source` writes it."""
        self.run, self.takes = kernels.compiled(source, name), kernels.parameters(source, name)

    def __call__(self, grid, block, values) -> None:
        """On the current stream."""
        self.run(grid, block, values)
        rows, named = grid[1], dict(zip((name for _, name in self.takes), values, strict=True))
        read, written = [], []
        for kind, name in self.takes:
            if not kind.endswith("*"):
                continue
            half, step = "short" in kind, int(named[f"{name}_row"])
            small = re.search(rf"\b{name}\[0\]", self.run.source)
            width = 1 if small else int(named["width"])
            if tensors.device_at(int(named[name])) != cuda.current_device():
                raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: {name} is elsewhere")
            one = at(int(named[name]), torch.int16 if half else torch.float32, rows, width, step)
            (read if kind.startswith("const") else written).append(one)
        cuda.told("a kernel", cuda.current_device(), read, written)


def at(address: int, dtype: torch.dtype, rows: int, width: int, step: int) -> torch.Tensor:
    """The memory at an address, of the storage that it belongs to."""
    size = ((rows - 1) * step + width) * dtype.itemsize
    raw = (ctypes.c_char * size).from_address(address)
    flat = torch.frombuffer(raw, dtype=dtype)
    return Piece(flat.as_strided((rows, width), (step, 1)), tensors.base_of(address))


class Piece:
    """A view that knows which allocation it is part of."""

    def __init__(self, view: torch.Tensor, base: int):
        """``base``: the allocation's address."""
        self.view, self.base = view, base

    def __getattr__(self, name):
        return getattr(self.view, name)

    def untyped_storage(self):
        """Its address only."""
        return SimpleNamespace(data_ptr=lambda: self.base)


class Communicator(links.Place):
    """One slot's place among the GPUs of this process, or among processes."""

    @staticmethod
    def initAll(devices):
        """One a device."""
        if fails("initAll"):
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
        everyone: list = []
        for rank, device in enumerate(devices):
            made = object.__new__(Communicator)
            made.everyone, made.device, made.rank = everyone, device, rank
            everyone.append(made)
        return everyone

    def check_async_error(self) -> None:
        """What went wrong between two calls."""
        if fails("async"):
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited")

    def _ask(self, name, *arguments):
        if not _groups:
            raise RuntimeError(f"NCCL would wait for ever in {name}: outside of a group")
        if cuda.current_device() != self.device:
            raise RuntimeError(f"NCCL {name}: cuda:{self.device} isn't current")
        _group.append((name, self, arguments))

    def reduceScatter(self, *arguments):
        self._ask("reduceScatter", *arguments)

    def allGather(self, *arguments):
        self._ask("allGather", *arguments)

    def reduce(self, *arguments):
        self._ask("reduce", *arguments)

    def broadcast(self, *arguments):
        self._ask("broadcast", *arguments)

    def send(self, *arguments):
        self._ask("send", *arguments)

    def recv(self, *arguments):
        self._ask("recv", *arguments)

    def destroy(self):
        """Nothing is held."""

    abort = destroy


_group: list = []
_groups: list = []
"""of groups that are begun"""


def group_end() -> None:
    """Do what the group's calls ask for: rank by rank the same calls in the same order."""
    calls, _group[:], _groups[:] = list(_group), [], []
    if any(name in ("send", "recv") for name, _, _ in calls):
        links.swap(calls, lambda address, count: at(address, torch.uint8, 1, count, count))
        return
    by_rank = {comm.rank: [c for c in calls if c[1] is comm] for _, comm, _ in calls}
    if calls and len(by_rank) < len(calls[0][1].everyone):
        raise RuntimeError("NCCL would wait for ever: not all ranks of the communicator call")
    for together in zip(*(by_rank[r] for r in sorted(by_rank)), strict=True):
        if len({name for name, _, _ in together}) > 1:
            raise RuntimeError(f"NCCL would wait for ever: {[name for name, _, _ in together]}")
        _collective(together[0][0], [arguments for _, _, arguments in together])


def _collective(name: str, calls: list) -> None:
    many = len(calls)
    count, streams = calls[0][2], [cuda.by_address[arguments[-1]] for arguments in calls]

    def view(address, width):
        return at(address, torch.float32, 1, width, width)

    sent = {"reduceScatter": count * many, "allGather": count}.get(name, count)
    got = {"reduceScatter": count, "allGather": count * many}.get(name, count)
    sources, targets = [view(a[0], sent) for a in calls], [view(a[1], got) for a in calls]
    values = [source.view.clone() for source in sources]
    for mine, other in zip(streams, streams[1:], strict=False):  # it begins when all are there
        checker.know(other.name, checker.clock(mine.name))
    for mine in streams[:-1]:
        checker.know(mine.name, checker.clock(streams[-1].name))
    root = calls[0][-2] if name in ("broadcast", "reduce") else None
    if name == "allGather":
        result = [torch.cat(values, 1)] * many
    elif name == "broadcast":
        result = [values[root]] * many
    else:
        total = values[0].clone()
        for value in values[1:]:
            total += value
        result = list(total.chunk(many, 1)) if name == "reduceScatter" else [total] * many
    for slot, (target, value) in enumerate(zip(targets, result, strict=True)):
        writes = root is None or name == "broadcast" or slot == root
        if writes:
            target.view.copy_(value)
        cuda.told(f"NCCL {name}", streams[slot].device.index, [sources[slot]],
                  [target] * writes, stream=streams[slot])  # fmt: skip


def install() -> None:
    """Let `import cupy` find this."""
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, deviceSynchronize=cuda.synchronize,
        runtimeGetVersion=lambda: 13000, ipcGetMemHandle=_handle, ipcOpenMemHandle=_open,
        ipcCloseMemHandle=lambda pointer: mapped.pop(pointer, None),
        deviceGetAttribute=lambda which, index: int(which == 117),  # writes aren't ordered
        deviceGetPCIBusId=lambda index: f"0000:{index:02x}:00.0",
    )  # fmt: skip
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.__dict__.update(
        available=True, NcclCommunicator=Communicator, NCCL_FLOAT32=7, NCCL_SUM=0,
        NCCL_UINT8=1, get_unique_id=links.ticket,
        groupStart=lambda: _groups.append(True), groupEnd=group_end,
        get_build_version=lambda: 22800,
    )  # fmt: skip
    driver = ModuleType("cupy.cuda")
    driver.__dict__.update(
        runtime=runtime, nccl=nccl, Memory=Memory, UnownedMemory=UnownedMemory,
        Device=lambda index: nullcontext(),
        MemoryPointer=lambda memory, offset: SimpleNamespace(memory=memory),
        Stream=SimpleNamespace(from_external=lambda pointer: nullcontext()),
    )  # fmt: skip
    cupy = ModuleType("cupy")
    cupy.__dict__.update(
        cuda=driver, ndarray=Array, uint8=np.uint8, RawKernel=RawKernel, __version__="14.0"
    )
    sys.modules |= {"cupy": cupy, "cupy.cuda": driver, "cupy.cuda.nccl": nccl}
    torch.from_dlpack = from_dlpack
