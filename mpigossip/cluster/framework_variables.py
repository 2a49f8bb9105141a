"""Keeping the launcher's variables from frameworks, to which each rank is a program of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from mpigossip.cluster.launcher import LAUNCHERS

FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What torchrun sets, and wrappers of srun and mpirun that imitate it."""
MISREAD = (*TORCH, *(name for pair in LAUNCHERS for name in pair), "SLURM_NTASKS", "SLURM_NPROCS")
"""From these, Accelerate and the Trainer conclude that torch.distributed is to join all ranks,
which fails, or sums all gradients in silence; Lightning, that Slurm's tasks are its own. What says
which of a host's ranks this is stays, and so does all that tells of the allocation."""


def hide(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Take them away, once MPI runs, where a framework has been imported; those of torch's, named.

    MPI and this package have read theirs by then.
    """
    if not any(name in sys.modules for name in FRAMEWORKS):
        return []
    taken = [name for name in MISREAD if environ.pop(name, None) is not None]
    return [name for name in taken if name in TORCH]
