"""Does this MPI read and write GPU memory? Asked in three ways, then proven by a put."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence

import torch
from mpi4py import MPI

from mpigossip.cluster.process import libraries
from mpigossip.mixing.device import trial
from mpigossip.mixing.device.proof import PROOF_S, arrives

SEVERAL_GPUS = (1, 19)
"""UCX's first version that serves several GPUs in one process."""


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
    for path in libraries():
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


def ucx_version() -> tuple[int, ...]:
    """Of the UCX in this process, such as (1, 19, 0); empty where there is none."""
    for path in libraries():
        if path.rpartition("/")[2].startswith("libucp"):
            numbers = [ctypes.c_uint() for _ in range(3)]
            ctypes.CDLL(path).ucp_get_version(*map(ctypes.byref, numbers))
            return tuple(number.value for number in numbers)
    return ()


def proven(
    comm: MPI.Intracomm, devices: Sequence[torch.device], way: str = "windows",
    timeout_s: float = PROOF_S,
) -> tuple[bool, str]:  # fmt: skip
    """Return whether MPI moves memory of all slots' devices on all ranks, and why (not).

    Collective; the answer is that of all ranks. ``way``: puts ("windows") or "messages". A library
    that says no anywhere is believed: a put into a GPU's memory would kill the process. One that
    says yes has to do it in a process of its own, and then to deliver from every slot to the same
    slot of a neighbour.
    """
    said = asked(comm)
    names = [name for name, yes in said.items() if yes]
    if not all(comm.allgather(bool(names))):
        return False, f"this MPI doesn't say that it is GPU-aware ({', '.join(said)})"
    ucx = ucx_version()
    over = f" over UCX {'.'.join(map(str, ucx))}" if ucx else ""
    says = f"{' and '.join(names)} says GPU-aware{over}"
    many = len(set(devices))
    old = many > 1 and ucx and ucx[:2] < SEVERAL_GPUS
    refusal = f"that serves one GPU a process, here are {many}: 1.19 serves several" if old else ""
    note = ""
    if not (refused := _first(comm, refusal)):
        able, note = trial.tried(devices, timeout_s, way)
        refused = _first(comm, "" if able else note)
    refused = refused or arrives(comm, devices, timeout_s, way)
    if refused:
        return False, f"{says}, but {refused}"
    note = note and f" ({note})"
    what = "puts into" if way == "windows" else "messages to"
    return True, f"{says}, and {what} the memory of every slot arrived{note}"


def _first(comm: MPI.Intracomm, text: str) -> str:
    """The first rank's text that isn't empty; collective."""
    return next(filter(None, comm.allgather(text)), "")
