"""Starting what gpu_check.py measures in processes of their own, under MPI where it takes ranks."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


class NotRun(Exception):
    """Why a row has no figure."""


def ended(command: list[str], seconds: float) -> subprocess.CompletedProcess:
    """A finished command; one that takes longer than its share is ended with its children."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        raise NotRun(f"{seconds:.0f} s were not enough") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launched_by() -> list[str]:
    """The launcher: MPIGOSSIP_MPIEXEC, or the mpiexec beside python3, its packages, or on PATH."""
    if given := os.environ.get("MPIGOSSIP_MPIEXEC"):
        return shlex.split(given)
    # `pip install --target FOLDER` puts programs into FOLDER/bin
    folders = [Path(sys.executable).parent, *(Path(place) / "bin" for place in sys.path)]
    beside = [str(folder / "mpiexec") for folder in folders if (folder / "mpiexec").exists()]
    found = beside[0] if beside else shutil.which("mpiexec")
    return [found] if found else []


def at_ease_in_a_container() -> None:
    """Settings by which both MPIs start as root, oversubscribed, with their own library."""
    os.environ |= {
        "HYDRA_LAUNCHER": "fork",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for launcher in launched_by()[:1]:
        os.environ["MPIGOSSIP_MPIEXEC"] = launcher
        tree = Path(shutil.which(launcher) or launcher).parent.parent
        for name in ("libmpi.so.40", "libmpi.so.12"):
            if tree != Path("/usr") and (tree / "lib" / name).exists():
                os.environ["MPI4PY_LIBMPI"] = str(tree / "lib" / name)
