"""CUDA, CuPy and NCCL on the CPU's memory: the package's GPU branches run where there is no GPU."""

import os
from collections import Counter

calls: Counter[str] = Counter()


def active() -> bool:
    """Whether this process stands on the double."""
    return "MPIGOSSIP_DOUBLE" in os.environ


def fails(what: str) -> bool:
    """Whether this call of its kind is to fail: MPIGOSSIP_DOUBLE_FAILS="capture,pin:2,put@1".

    That fails every capture, the second pin, and puts on rank 1 of the launcher's.
    """
    calls[what] += 1
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", ""))
    asked = os.environ.get("MPIGOSSIP_DOUBLE_FAILS", "").split(",")
    here = {one.removesuffix(f"@{rank}") for one in asked}
    return what in here or f"{what}:{calls[what]}" in here
