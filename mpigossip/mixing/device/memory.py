"""Memory that MPI may access: allocations on a GPU, and pinned memory of the host.

Torch's caching allocator divides large allocations into tensors, and an MPI window can't be opened
safely over a part of an allocation. Windows therefore use separate allocations by CuPy. Messages
use them if CuPy is installed: with torch's option ``expandable_segments``, other processes cannot
map torch's memory, so UCX copies messages between GPUs of a host through the processor. NCCL uses
torch's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.cluster.process import libraries
from mpigossip.config import JobError
from mpigossip.config.errors import Failure
from mpigossip.config.readable import print_note_once

if TYPE_CHECKING:
    from mpi4py import MPI

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with options of torch's allocator."""
UNIT = 2 << 20
"""Sizes of allocations are rounded up to a multiple of this number of bytes, because cudaMalloc
places smaller ones together in a shared block."""
PORTABLE = 1
"""Flag cudaHostRegisterPortable: memory is pinned for the contexts of all devices."""
ALREADY = 712
"""Error cudaErrorHostMemoryAlreadyRegistered, which occurs because UCX registers the memory of
windows itself."""


class TransportUnavailable(Failure, RuntimeError):
    """Error that a transport can't be used: memory can't be allocated or shared, or a test failed.

    The message says what failed, and usually what to do.
    """


def device_context(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which ``device`` is current, as MPI libraries and CuPy require."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def check_default_device(call: str) -> None:
    """Check that new tensors have memory, because messages and metrics need it.

    :param call: public call that is checked, for the message
    :raises JobError: if torch's default device is "meta"
    """
    # This takes a fifth of the time of torch.get_default_device().
    if torch.empty(0).is_meta:
        raise JobError(
            f'{call}: torch\'s default device is "meta", on which tensors have no values; call '
            'torch.set_default_device("cpu") first, or build models inside '
            '`with torch.device("meta"):`'
        )


def ordinary(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory by torch, as a tensor uint8 (nbytes,).

    :param nbytes: number of bytes
    :param device: device of the memory
    :raises TransportUnavailable: if there is not enough GPU memory
    """
    try:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise TransportUnavailable(
            f"allocating {nbytes >> 20} MiB for messages on {device} failed: {error}; use "
            "a smaller batch (data.batch of a job)"
        ) from error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return memory


def empty_cache(devices: Sequence[torch.device]) -> None:
    """Return the GPU memory that torch keeps for later tensors, so that MPI and CuPy can use it."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()


def private(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory by a separate cudaMalloc, as a tensor uint8 (nbytes,).

    On the CPU, PyTorch allocates the tensor.

    :param nbytes: number of bytes, which is rounded up to a multiple of `UNIT`
    :param device: device of the memory
    :raises TransportUnavailable: if the allocation fails or CuPy is missing
    """
    if device.type == "cpu":
        return ordinary(nbytes, device)
    cupy = _cupy(device)
    allocated = -(-max(nbytes, 1) // UNIT) * UNIT
    try:
        with device_context(device), cupy.cuda.Device(device.index):
            memory = cupy.cuda.Memory(allocated)
            array = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            array.fill(0)
            cupy.cuda.runtime.deviceSynchronize()
            return torch.from_dlpack(array)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise TransportUnavailable(
            f"cudaMalloc of {allocated >> 20} MiB on {device} failed: {error}; torch's cache "
            "may hold the remaining memory; use a smaller batch (data.batch of a job)"
        ) from error


def message_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory for MPI messages, as a tensor uint8 (nbytes,).

    On a GPU, the memory is a separate cudaMalloc, or memory of torch if CuPy is missing.

    :param nbytes: number of bytes
    :param device: device of the memory
    :raises TransportUnavailable: if the allocation fails
    """
    if device.type == "cpu":
        return ordinary(nbytes, device)
    try:
        _cupy(device)
    except TransportUnavailable:
        options = (os.environ.get(name, "") for name in ALLOCATOR)
        if any("expandable_segments:True" in text for text in options):
            print_note_once(
                "messages between GPUs of one host are slow: CuPy is missing, and other processes "
                "cannot map memory that torch allocates with expandable_segments; "
                "pip install 'mpigossip[gpu]', or remove the option from PYTORCH_CUDA_ALLOC_CONF"
            )
        return ordinary(nbytes, device)
    return private(nbytes, device)


def create(memory: Any, comm: MPI.Intracomm) -> MPI.Win:
    """Create a window of bytes over ``memory``, locked for all ranks; collective.

    The call may hang, so it is usually made in a thread that can be abandoned. If MPI provides less
    than THREAD_MULTIPLE, there is no such thread, and a time limit ends the job instead.

    :param memory: buffer of the bytes, as `exact_average.raw` returns it
    :param comm: communicator of the ranks that open the window
    """
    from mpi4py import MPI

    from mpigossip.cluster.collectives import open_window

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return open_window(MPI.Win.Create, memory, comm)
    window = MPI.Win.Create(memory, 1, comm=comm)
    window.Lock_all()
    return window


def agreed(
    comm: MPI.Comm,
    make: Callable[[], Any],
    failures: tuple[type[Exception], ...] = (TransportUnavailable,),
) -> Any:
    """Call ``make`` on all ranks and return its result; collective.

    :param comm: communicator of the ranks
    :param make: function to call
    :param failures: exceptions of ``make`` that count as a failure; others are raised at once
    :raises TransportUnavailable: on all ranks, if ``make`` fails on one. The error has the
        message of a failed rank; a rank that only reached a time limit is chosen last
    """
    result: Any = None
    failure: tuple[bool, str] | None = None
    try:
        result = make()
    except failures as error:
        failure = isinstance(error, WaitTimeoutError), str(error)
    if reasons := [*filter(None, comm.allgather(failure))]:
        raise TransportUnavailable(min(reasons)[1])
    return result


def pages(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (address, bytes) of whole memory pages that contain the given ranges.

    Ranges that touch are merged, because a page can't be locked twice, and a copy must not begin in
    one locked range and end in another.
    """
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if merged and begin <= sum(merged[-1]):
            begin = merged[-1][0]
            end = max(end, sum(merged.pop()))
        merged.append((begin, end - begin))
    return merged


def pin(memory: Sequence[torch.Tensor], device: torch.device) -> Callable[[], None]:
    """Lock host memory that another library has allocated, so that GPUs copy at full speed.

    Return a function that unlocks it. Without locked memory, copies are only slower.

    :param memory: arrays in host memory
    :param device: GPU that copies from and to them; on the CPU, nothing is locked
    :raises TransportUnavailable: if locking fails
    """
    if device.type == "cpu":
        return lambda: None
    runtime: Any = torch.cuda.cudart()
    locked: list[int] = []

    def undo() -> None:
        while locked:
            if int(runtime.cudaHostUnregister(locked.pop())):
                _forget_error()

    for address, nbytes in pages([(m.data_ptr(), m.numel()) for m in memory if m.numel()]):
        with device_context(device):
            code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
        if code == ALREADY and all(
            m.is_pinned() for m in memory if address <= m.data_ptr() < address + nbytes
        ):
            _forget_error()
            continue
        if code:
            _forget_error()
            undo()
            raise TransportUnavailable(
                f"cudaHostRegister of {nbytes:,} bytes for {device} failed with code {code}: "
                "copies go through pageable memory and are slower; `ulimit -l unlimited` may help"
            )
        locked.append(address)
    return undo


def _forget_error() -> None:
    """Clear the error of a failed call, which torch's next kernel would otherwise raise."""
    for path in libraries():
        name = path.rpartition("/")[2]
        if name.startswith("libcudart"):
            ctypes.CDLL(path).cudaGetLastError()
        elif name.startswith("libamdhip64"):
            ctypes.CDLL(path).hipGetLastError()


def _cupy(device: torch.device) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise TransportUnavailable(
            f"windows over memory of {device} need CuPy, which can't be imported ({error}): "
            "pip install 'mpigossip[gpu]' (on AMD a ROCm build of CuPy); the other transports do "
            "not need it"
        ) from error
    return cupy


OPTIONS = 117
ORDERING = 118
"""Values of CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS and …_WRITES_ORDERING."""
BY_HOST = 1
"""Bit of the first attribute that is set if the host can request a flush."""
CURRENT = 0
TO_OWNER = 100
"""Arguments of a flush: its target is the current device, and only work of this device must see the
data."""


@cache
def rdma_writes_ordered(device: torch.device) -> bool:
    """Return whether work that is launched later sees the writes of a network card without a flush.

    :raises TransportUnavailable: if it may not see them, and a flush is not possible
    """
    if device.type == "cpu" or torch.version.hip:
        return True
    answer = ctypes.c_int()
    values = []
    for attribute in (ORDERING, OPTIONS):
        if driver().cuDeviceGetAttribute(ctypes.byref(answer), attribute, device.index):
            return True  # the driver does not know this attribute
        values.append(answer.value)
    ordering, options = values
    if ordering or options & BY_HOST:
        return ordering > 0
    raise TransportUnavailable(
        f"{device} doesn't order the writes of a network card, and the host can't flush them: "
        'set node.exchange = "host"'
    )


def flush_rdma_writes(device: torch.device) -> None:
    """Make received data visible to work that is launched on the device from now on.

    A network card writes to GPU memory without the processor. On some platforms, a kernel that is
    launched after the notification still reads old bytes until the host flushes the writes (from
    CUDA 11.3 on; whether AMD has an equivalent is unknown).

    :raises TransportUnavailable: if a flush fails
    """
    if rdma_writes_ordered(device):
        return
    with device_context(device):
        code = driver().cuFlushGPUDirectRDMAWrites(CURRENT, TO_OWNER)
    if code:
        raise TransportUnavailable(
            f"cuFlushGPUDirectRDMAWrites on {device} failed with code {code}: set "
            'node.exchange = "host"'
        )


@cache
def driver() -> Any:
    """Return the CUDA driver library; it raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")
