"""CUDA, CuPy and NCCL on the CPU's memory: the package's GPU branches run where there is no GPU."""

import os
from collections import Counter

calls: Counter[str] = Counter()


def active() -> bool:
    """Return whether this process uses the double."""
    return "MPIGOSSIP_DOUBLE" in os.environ


def fails(what: str) -> bool:
    """Return whether this call has to fail, by MPIGOSSIP_DOUBLE_FAILS="capture,pin:2,put@1".

    With this value, every capture fails, the second pin, and puts on the launcher's rank 1.
    """
    calls[what] += 1
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", ""))
    asked = os.environ.get("MPIGOSSIP_DOUBLE_FAILS", "").split(",")
    here = {one.removesuffix(f"@{rank}") for one in asked}
    return what in here or f"{what}:{calls[what]}" in here
