"""CUDA, CuPy and NCCL on the CPU's memory: the package's GPU branches run where there is no GPU.

Work is done at once, so numbers are always right; what would be wrong on a GPU is found by a
happens-before checker (`checker`) over all streams and the host. `environment()` is what a process
needs to begin with the double in CUDA's place.
"""

import os


def active() -> bool:
    """Whether this process stands on the double."""
    return "MPIGOSSIP_DOUBLE_GUARD" in os.environ
