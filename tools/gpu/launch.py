"""Starting what check.py measures in processes of their own, under MPI where it takes ranks."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class NotRun(Exception):
    """Why a row has no figure."""


def ended(command: list[str], seconds: float) -> subprocess.CompletedProcess:
    """A finished command; one that takes longer than its share is ended with its children."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
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
        print(said[0][-2000:], said[1][-3000:])
        raise NotRun(f"{seconds:.0f} s were not enough")
    return subprocess.CompletedProcess(command, process.returncode, *said)


def _end(process: subprocess.Popen) -> None:
    """End a command and what is left of its session: launchers give ranks groups of their own."""
    if process.poll() is None:
        process.terminate()  # a launcher ends its ranks itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session(leader: int) -> list[int]:
    """Living processes of the session that this one began."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # behind the name, which may hold anything: state, parent, group, session
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                found.append(int(folder.name))
    return found


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
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    for launcher in launched_by()[:1]:
        os.environ["MPIGOSSIP_MPIEXEC"] = launcher
        tree = Path(shutil.which(launcher) or launcher).parent.parent
        for name in ("libmpi.so.40", "libmpi.so.12"):
            if tree != Path("/usr") and (tree / "lib" / name).exists():
                os.environ["MPI4PY_LIBMPI"] = str(tree / "lib" / name)
