"""Whether launcher and MPI agree about the number of ranks, from environment variables alone."""

import os
from collections.abc import Mapping
from pathlib import Path

from mpigossip.config.errors import Mistake

# Launchers tell each process its rank and the number of processes. The pair counts, not one of
# them: SLURM_PROCID (0) and SLURM_NTASKS are also in the batch script's own environment, where a
# plain command is rightly alone; only srun sets SLURM_STEP_NUM_TASKS.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray PALS, srun --mpi=pmi2
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),  # flux run
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


class LaunchError(Mistake):
    """MPI is missing, or its world isn't what the launcher meant.

    Each process finds this by itself; `rank` is the launcher's number for it, so that a program
    can print the message once (where `rank` is 0).
    """

    def __init__(self, message: str, rank: int = 0):
        super().__init__(message)
        self.rank = rank


def places(env: Mapping[str, str]) -> list[tuple[int, int, str]]:
    """What launchers say: the rank of this process, the number of ranks, the variable's name."""
    return [
        (int(env[rank]), int(env[count]), count)
        for rank, count in LAUNCHERS
        if env.get(rank, "").isdigit() and env.get(count, "").isdigit()
    ]


def check_launcher(size: int, library: str, env: Mapping[str, str]) -> None:
    """Raises LaunchError where a launcher meant several ranks and MPI sees a world of one.

    A process started by another MPI's launcher is silently a world of size 1. Launchers can stand
    inside one another (mpirun starts its daemons by srun, one per host), so one variable that
    agrees with MPI is enough.
    """
    meant = places(env)
    if size > 1 or not meant or any(number == size for _, number, _ in meant):
        return
    rank, number, variable = meant[0]
    name = library.replace("\n", " ").split(",")[0].replace("\t", " ").strip("\0 ")[:60]
    raise LaunchError(
        f"{number} ranks were started ({variable}={number}), but MPI ({name}) sees a world of 1: "
        "launcher and MPI don't belong together. With Slurm use `srun --mpi=pmi2` for MPICH or "
        "`srun --mpi=pmix` for Open MPI; else start with the mpiexec of that same MPI, or point "
        "mpi4py at the launcher's library (MPI4PY_LIBMPI=/path/to/libmpi.so). For one rank on "
        "purpose: mpiexec -n 1",
        rank,
    )


STARTERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun"}


def terminal_of_launcher() -> str | None:
    """The terminal that the launcher of this rank writes to; None where that is a file or a pipe.

    A rank's own output is a pipe to its launcher, which may stand on another host: then None.
    """
    process = os.getppid()
    try:
        while process > 1:
            name, _, rest = (
                Path(f"/proc/{process}/stat").read_text().partition(" (")[2].rpartition(") ")
            )
            if name in STARTERS:
                output = str(Path(f"/proc/{process}/fd/1").readlink())
                return output if output.startswith(("/dev/pts/", "/dev/tty")) else None
            process = int(rest.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None
