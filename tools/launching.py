"""Starting programs, under MPI where they take ranks, and ending what takes too long."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

OUTER = ("SLURM_", "PMI_", "PMIX_", "PALS_", "FLUX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_")
"""Variables of a surrounding job, which would make ranks believe that they belong to it."""


class Late(Exception):
    """A command that took too long; what it said until then is in `args`."""


def launcher() -> list[str]:
    """MPIGOSSIP_MPIEXEC, or the mpiexec beside python3, its packages, or on PATH; or nothing."""
    if given := os.environ.get("MPIGOSSIP_MPIEXEC"):
        return shlex.split(given)
    # `pip install --target FOLDER` puts programs into FOLDER/bin
    folders = [Path(sys.executable).parent, *(Path(place) / "bin" for place in sys.path)]
    beside = [str(folder / "mpiexec") for folder in folders if (folder / "mpiexec").exists()]
    found = beside[0] if beside else shutil.which("mpiexec")
    return [found] if found else []


def at_ease() -> dict[str, str]:
    """Settings by which both MPIs start as root, oversubscribed, with their own library."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HYDRA_LAUNCHER": "fork",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",  # silences its warning at each window
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    for first in launcher()[:1]:
        tree = Path(shutil.which(first) or first).parent.parent
        for name in ("libmpi.so.40", "libmpi.so.12"):
            if tree != Path("/usr") and (tree / "lib" / name).exists():
                settings["MPI4PY_LIBMPI"] = str(tree / "lib" / name)
    return settings


def ended(
    command: Sequence[str],
    seconds: float,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """A finished command; Late where it takes longer, ended then with its children."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        said = []
        for file in (out, err):  # files: a child that outlives its parent would hold a pipe open
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    if late:
        raise Late(*said)
    return subprocess.CompletedProcess(command, process.returncode, *said)


def _end(process: subprocess.Popen) -> None:
    """End a command and what is left of its session: launchers give ranks groups of their own."""
    if process.poll() is None:
        process.terminate()  # a launcher ends its ranks itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # behind the name, which may hold anything: state, parent, group, session
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == process.pid:
                os.kill(int(folder.name), signal.SIGKILL)
    process.wait()
