"""Does this MPI read and write GPU memory? Asked in three ways, then proven by a put."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch
from mpi4py import MPI

from mpigossip.cluster.libraries import loaded
from mpigossip.mixing.averages import raw
from mpigossip.mixing.courier import Courier
from mpigossip.mixing.device.memory import MemoryRefused, current, private
from mpigossip.mixing.tokens import wait_all

PROBE = 1 << 16
"""Bytes of the proof's messages: above the size that libraries send along with the envelope."""
PROOF_S = 60.0
"""Seconds that each wait of the proof may take."""


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


def proven(
    comm: MPI.Intracomm, device: torch.device, timeout_s: float = PROOF_S
) -> tuple[bool, str]:
    """Whether MPI moves GPU memory on all ranks, and why (not); collective.

    A library that says no anywhere is believed: a put into a GPU's memory would kill the process.
    One that says yes has to deliver a put and a message from GPU to GPU. Raises LateError where
    it doesn't come back.
    """
    said = asked(comm)
    names = [name for name, yes in said.items() if yes]
    if not all(comm.allgather(bool(names))):
        return False, f"this MPI doesn't say that it is GPU-aware ({', '.join(said)})"
    try:
        error = "" if arrives(comm, device, timeout_s) else "a put into GPU memory gave wrong data"
    except (MPI.Exception, RuntimeError) as wrong:
        error = f"a put into GPU memory failed: {wrong}"
    wrong_somewhere = next((text for text in comm.allgather(error) if text), None)
    if wrong_somewhere:
        return False, f"{' and '.join(names)} says GPU-aware, but {wrong_somewhere}"
    return True, f"{' and '.join(names)} says GPU-aware, and a put into GPU memory arrived"


def arrives(comm: MPI.Intracomm, device: torch.device, timeout_s: float) -> bool:
    """Whether what every rank puts and sends to its right neighbour's device memory comes whole.

    Runs in a thread of its own, given up after a while, as a flush that hangs never returns.
    """
    refused = ""
    try:
        memory = private(3 * PROBE, device)
    except MemoryRefused as error:
        refused = str(error)
    if any(comm.allgather(refused)):
        raise MemoryRefused(refused or "another rank has no memory for the proof")
    found: list[bool] = []
    threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    courier = Courier(comm, threaded=threaded, poll=False, timeout_s=timeout_s)

    def work() -> None:
        with current(device):
            found.append(_put_and_sent(comm, memory, device, timeout_s))

    try:
        courier.wait(courier.submit(work), "the proof that this MPI moves GPU memory")
    finally:
        courier.close()
    return found[0]


def _put_and_sent(
    comm: MPI.Intracomm, memory: torch.Tensor, device: torch.device, timeout_s: float
) -> bool:
    source, inbox, letter = memory.split(PROBE)
    source.fill_(comm.rank % 251 + 1)
    synchronize(device)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def late(rank: int) -> str:
        return f"proof that this MPI moves GPU memory: rank {rank} doesn't answer"

    window = MPI.Win.Create(raw(memory), 1, comm=comm)
    window.Lock_all()
    window.Put([raw(source), MPI.BYTE], right, [PROBE, PROBE, MPI.BYTE])
    window.Flush(right)
    received = {left: comm.Irecv([raw(letter), MPI.BYTE], left)}
    sent = {right: comm.Isend([raw(source), MPI.BYTE], right)}
    wait_all(received, timeout_s, late, comm=comm)
    wait_all(sent, timeout_s, late, comm=comm)
    wait_all({right: comm.Ibarrier()}, timeout_s, late, comm=comm)
    window.Sync()
    expected = left % 251 + 1
    arrived = bool((inbox.cpu() == expected).all() and (letter.cpu() == expected).all())
    # not after an error: freeing is collective, and the others may not come
    window.Unlock_all()
    window.Free()
    return arrived


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
