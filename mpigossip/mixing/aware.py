"""Does this MPI read and write GPU memory? Asked in three ways, then proven by a put."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch
from mpi4py import MPI

from mpigossip.cluster.libraries import loaded
from mpigossip.mixing.memory import MemoryRefused, private

PROBE = 1 << 16
"""Bytes of the proof's put: above the size that libraries send along with the envelope."""


def asked(comm: MPI.Intracomm, environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """What the library says of itself, by the way of asking; nothing here touches a GPU."""
    return {
        "mpi_memory_alloc_kinds": _info_says(comm),
        "MPIX_Query_cuda_support": _library_says(),
        "MPICH_GPU_SUPPORT_ENABLED": environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1",
    }


def _info_says(comm: MPI.Intracomm) -> bool:
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return any(kind.split(":")[0] in ("cuda", "rocm") for kind in kinds.split(","))


def _library_says() -> bool:
    for path in loaded():
        if "/libmpi" not in path:
            continue
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support"):
            if hasattr(library, name) and getattr(library, name)() == 1:
                return True
        answer = ctypes.c_int(0)
        if hasattr(library, "MPIX_GPU_query_support"):
            for kind in (0, 2):  # MPIX_GPU_SUPPORT_CUDA, MPIX_GPU_SUPPORT_HIP
                if library.MPIX_GPU_query_support(kind, ctypes.byref(answer)) == 0 and answer:
                    return True
    return False


def proven(comm: MPI.Intracomm, device: torch.device) -> tuple[bool, str]:
    """Whether windows on GPU memory work on all ranks, and why (not); collective.

    A library that says no anywhere is believed: a put into a GPU's memory would kill the process.
    One that says yes has to deliver a put from GPU to GPU.
    """
    said = asked(comm)
    names = [name for name, yes in said.items() if yes]
    if not all(comm.allgather(bool(names))):
        return False, f"this MPI doesn't say that it is GPU-aware ({', '.join(said)})"
    try:
        error = "" if _put_arrives(comm, device) else "a put into GPU memory gave wrong data"
    except (MPI.Exception, RuntimeError) as wrong:
        error = f"a put into GPU memory failed: {wrong}"
    wrong_somewhere = next((text for text in comm.allgather(error) if text), None)
    if wrong_somewhere:
        return False, f"{' and '.join(names)} says GPU-aware, but {wrong_somewhere}"
    return True, f"{' and '.join(names)} says GPU-aware, and a put into GPU memory arrived"


def _put_arrives(comm: MPI.Intracomm, device: torch.device) -> bool:
    """Every rank puts a pattern of its own into its right neighbour's device memory."""
    refused = ""
    try:
        memory = private(2 * PROBE, device)
    except MemoryRefused as error:
        refused = str(error)
    if any(comm.allgather(refused)):
        raise MemoryRefused(refused or "another rank has no memory for the proof")
    source, inbox = memory[:PROBE], memory[PROBE:]
    source.fill_(comm.rank % 251 + 1)
    synchronize(device)
    window = MPI.Win.Create(raw(memory), 1, comm=comm)
    try:
        window.Lock_all()
        right = (comm.rank + 1) % comm.size
        window.Put([raw(source), MPI.BYTE], right, [PROBE, PROBE, MPI.BYTE])
        window.Flush(right)
        comm.Barrier()
        window.Sync()
        expected = (comm.rank - 1) % comm.size % 251 + 1
        arrived = bool((inbox.cpu() == expected).all())
        window.Unlock_all()
    finally:
        window.Free()
    return arrived


def raw(memory: torch.Tensor) -> MPI.buffer:
    """The bytes of an array as a buffer for MPI calls, wherever they lie."""
    return MPI.buffer.fromaddress(memory.data_ptr(), memory.numel() * memory.element_size())


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
