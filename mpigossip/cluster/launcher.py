"""Environment variables of launchers, which are compared with MPI and hidden from frameworks."""

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from mpigossip.config.errors import UserError

# Launchers set the rank and the number of processes for each process. Both variables must be set:
# SLURM_PROCID (0) and SLURM_NTASKS are also set in the batch script itself, where a plain command
# correctly runs alone; only srun sets SLURM_STEP_NUM_TASKS.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray PALS, srun --mpi=pmi2
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),  # flux run
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # jsrun
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


class LaunchError(UserError):
    """Error that MPI is missing, or that its world differs from the processes of the launcher.

    Each process detects this independently. `rank` is the rank that the launcher assigned to it, so
    that a program can print the message only if `rank` is 0. `short` is one line that the other
    ranks print, because the output of rank 0 can be lost: a launcher may end rank 0 when another
    rank fails, or write each rank's output to another file. If it is "", they print nothing.
    """

    def __init__(self, message: str, rank: int = 0, short: str = ""):
        super().__init__(message)
        self.rank = rank
        self.short = short


def launcher_ranks(env: Mapping[str, str]) -> list[tuple[int, int, str]]:
    """Return this process's rank and the number of ranks, as each launcher has set them in ``env``.

    :param env: environment variables
    :return: for each launcher that has set both: the rank, the number of ranks, and the name of the
        variable with that number
    """
    return [
        (int(env[rank]), int(env[count]), count)
        for rank, count in LAUNCHERS
        if env.get(rank, "").isdigit() and env.get(count, "").isdigit()
    ]


LOAD_MODULE = "on a cluster, load the module of the MPI with which mpi4py was built"
WITHOUT_MPI = "`mpigossip simulate`, `plan` and `job` need no MPI"


def no_mpi(error: Exception, env: Mapping[str, str] = os.environ) -> LaunchError:
    """Return the error that reports that mpi4py could not load MPI.

    :param error: exception of the import of mpi4py
    :param env: environment variables
    """
    reason = ": ".join(str(error).splitlines()[:2])  # of a list of libraries, show only the first
    if "too short" in reason or "invalid ELF" in reason:
        reason += ", a linker script: name the library file that it refers to, such as libmpi.so.12"
    if library := env.get("MPI4PY_LIBMPI", ""):
        return LaunchError(
            f"MPI can't be loaded ({reason}) with MPI4PY_LIBMPI={library}: {LOAD_MODULE}, and name "
            "a file that exists, or `unset MPI4PY_LIBMPI`; elsewhere, `unset MPI4PY_LIBMPI; pip "
            "install mpich`. If the file exists, its name may "
            "not be the one that mpi4py's wheel loads, libmpi.so.12 (Debian's MPICH has "
            "libmpich.so.12): `pip install --no-binary mpi4py mpi4py`, or make a link and search "
            f"its folder, `ln -s {library} DIR/libmpi.so.12; "
            "export LD_LIBRARY_PATH=DIR MPI4PY_LIBMPI=DIR/"
            f"libmpi.so.12`. {WITHOUT_MPI}"
        )
    return LaunchError(
        f"MPI can't be loaded ({reason}): {LOAD_MODULE}; elsewhere, `pip install mpich`, or name "
        f"the library: MPI4PY_LIBMPI=/path/to/libmpi.so.12. {WITHOUT_MPI}"
    )


def check_launcher(size: int, library: str, env: Mapping[str, str]) -> None:
    """Check that MPI joins the ranks that a launcher started.

    A process that was started by the launcher of another MPI gets a world of size 1 without any
    error. Launchers can be nested: mpirun starts its daemons by srun, one per host. The check
    therefore passes if the number of ranks of one launcher is MPI's.

    :param size: size of MPI's world
    :param library: version string of the MPI library
    :param env: environment variables
    :raises LaunchError: if a launcher started several ranks, but the size of MPI's world is 1
    """
    launched = launcher_ranks(env)
    if size > 1 or not launched or any(number == size for _, number, _ in launched):
        return
    rank, number, variable = launched[0]
    text = f"{number} ranks were started ({variable}={number}), but MPI ({_name(library)}) sees "
    raise LaunchError(f"{text}a world of 1: {MISMATCH}", rank, _short(rank, number, library))


def check_alone(size: int, env: Mapping[str, str], child: tuple[int, ...]) -> None:
    """Reject a process that was started with others, but without a launcher of MPI.

    torchrun and similar programs start such processes, and set RANK and WORLD_SIZE. Each process
    would get a world of size 1 and train its own model. A process that a launcher of MPI has
    started as its only rank is accepted.

    :param size: size of MPI's world
    :param env: environment variables
    :param child: identity of this process in `multiprocessing`, counted from 1, if it was started
        by ``torch.multiprocessing.spawn`` for example; otherwise empty
    :raises LaunchError: if the process was started by torchrun or a similar program together with
        others, or by `multiprocessing`
    """
    if size > 1 or any(number == 1 for _, number, _ in launcher_ranks(env)):
        return
    count = env.get("WORLD_SIZE", "")
    if count.isdigit() and int(count) > 1:
        rank = env.get("RANK", "")
        raise LaunchError(
            f"torchrun, or a similar launcher, started {count} processes (WORLD_SIZE={count}), "
            "but MPI's world has only one rank in each of them, so each would train alone: "
            f"start the program with MPI's launcher, `mpiexec -n {count} python PROGRAM` or `srun "
            f"-n {count} python PROGRAM`. To train one node only, unset WORLD_SIZE",
            int(rank) if rank.isdigit() else 0,
        )
    if child:
        raise LaunchError(
            "this process was started by multiprocessing (torch.multiprocessing.spawn?), which "
            "does not add it to MPI's world, so it would train alone: start one process per "
            "node with MPI's launcher, `mpiexec -n 4 python PROGRAM` or `srun -n 4 python "
            "PROGRAM`, and call the function in each; for one node on purpose: mpiexec -n 1",
            child[-1] - 1,
        )


def check_library(library: str, env: Mapping[str, str]) -> None:
    """Check, before MPI starts, that this MPI library works with the launcher of this process.

    An MPICH without PMIx aborts in MPI_Init under Open MPI's launcher and `srun --mpi=pmix`. An
    Open MPI would get a world of size 1 under MPICH's launcher.

    :param library: version string of the MPI library
    :param env: environment variables
    :raises LaunchError: if the library cannot join the ranks of the launcher
    """
    launched = launcher_ranks(env)
    mpich = library.startswith("MPICH Version") and "pmix" not in library.lower()
    if mpich and "PMIX_RANK" in env and "PMI_RANK" not in env:
        launcher_name = "a launcher with PMIx"
    elif library.startswith("Open MPI") and "HYDI_CONTROL_FD" in env and "PMIX_RANK" not in env:
        launcher_name = "MPICH's launcher"
    else:
        return
    if not launched or (launched[0][1] == 1 and not mpich):
        return
    rank, number, variable = launched[0]
    starter = "Open MPI's launcher" if variable.startswith("OMPI") else launcher_name
    text = f"{number} ranks were started by {starter} ({variable}={number}), but MPI is"
    short = _short(rank, number, library) if number > 1 else ""
    raise LaunchError(f"{text} {_name(library)}: {MISMATCH}", rank, short)


PLUGINS = (  # The option for Cray MPICH is untested, as the pages say.
    "`srun --mpi=pmi2` for MPICH, `srun --mpi=pmix` for Open MPI or `srun --mpi=cray_shasta` for "
    "Cray MPICH"
)
MISMATCH = (  # the remedy in several messages
    f"the launcher and MPI do not match. With Slurm, use {PLUGINS}; otherwise start with the "
    "mpiexec of this MPI, or point mpi4py at the launcher's library "
    "(MPI4PY_LIBMPI=/path/to/libmpi.so.12). For one rank on purpose: mpiexec -n 1"
)


def _short(rank: int, number: int, library: str) -> str:
    """Return the line that each rank other than 0 prints if MPI does not join the ranks.

    :param rank: this process's rank, as the launcher has set it
    :param number: number of ranks that the launcher started
    :param library: version string of the MPI library
    """
    return (
        f"rank {rank} of {number} on {platform.node()}: MPI ({_name(library)}) does not join the "
        f"ranks; with Slurm, use {PLUGINS}; rank 0 prints the complete message"
    )


def _name(library: str) -> str:
    """Return the name and the version from an MPI library's version string."""
    return " ".join(library.strip("\0").partition("\n")[0].partition(",")[0].split())[:60]


def job_id(env: Mapping[str, str]) -> str:
    """Return an identifier that is equal on all ranks of this launch; "" if the launcher sets none.

    :param env: environment variables
    """
    for names in (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("FLUX_JOB_ID",)):
        if all(name in env for name in names):
            words = [*(env[name] for name in names), env.get("SLURM_RESTART_COUNT", "0")]
            return re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(words))[-60:]
    for _, name, words in _ancestors():
        if name == "hydra_pmi_proxy" and "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1].replace(":", "-")
    return env.get("PBS_JOBID", "")


def _ancestors() -> Iterator[tuple[int, str, list[str]]]:
    """Yield process ID, name and command line of each ancestor of this process, the parent first.

    On systems other than Linux, nothing is yielded.
    """
    process = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 1:
            folder = Path(f"/proc/{process}")
            rest = (folder / "stat").read_text().partition(" (")[2].rpartition(") ")
            # The kernel truncates names to 15 characters, but not the command line.
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            yield process, Path(words[0]).name, words
            process = int(rest[2].split()[1])


STARTERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun"}
"""Names of the programs that start the ranks of a job."""


def terminal_of_launcher() -> str | None:
    """Return the terminal that this rank's launcher writes to; None if it writes to none.

    A rank's own output is a pipe to its launcher. If the launcher runs on another host, its
    terminal is not known, and the result is None, too.
    """
    for process, name, _ in _ancestors():
        if name in STARTERS:
            with contextlib.suppress(OSError):
                output = str(Path(f"/proc/{process}/fd/1").readlink())
                return output if output.startswith(("/dev/pts/", "/dev/tty")) else None
    return None


FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
"""Modules of the frameworks that `MISREAD` misleads."""
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables set by torchrun, and by wrappers of srun and mpirun that imitate it."""
# Keep FLUX_JOB_SIZE, because no other variable tells how many ranks of a host share its GPUs.
RANK_VARIABLES = [name for pair in LAUNCHERS for name in pair if name != "FLUX_JOB_SIZE"]
MISREAD = (*TORCH, *RANK_VARIABLES, "SLURM_NTASKS", "SLURM_NPROCS")
"""Variables that mislead frameworks.

From these, Accelerate and the Trainer conclude that torch.distributed has to join all ranks, which
fails or silently sums all gradients. Lightning takes Slurm's tasks for its own processes. Variables
with the local rank on a host or a description of the allocation are kept.
"""


def hide(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Remove the variables in `MISREAD` from the environment if a framework is imported.

    A framework has to treat each rank as a separate program. MPI and this package have read the
    variables before.

    :param environ: environment variables, which are changed
    :return: names and values of the removed variables, for :func:`restore`
    """
    if not any(name in sys.modules for name in FRAMEWORKS):
        return {}
    return {name: environ.pop(name) for name in MISREAD if name in environ}


def restore(hidden: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Restore the variables that :func:`hide` has removed, unless they have been set again."""
    for name, value in hidden.items():
        environ.setdefault(name, value)
