"""Run one job in one checkout of the package, and store the result, for compare_checkouts.py.

OLD and NEW are the two checkouts that compare_checkouts.py compares.
"""

import contextlib
import csv
import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import h5py
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.launch import Launch, launcher  # noqa: E402

LIMIT_S = 300
"""Time limit of one command in seconds."""
REFUSED = 2
"""Exit code of `mpigossip` after a user error."""
TIMES = re.compile(r".*(_s|seconds?)")
"""Regular expression for names of columns of a log that contain times, which always differ."""


class ArgumentError(Exception):
    """Error in the arguments of compare_checkouts.py."""


class Job(NamedTuple):
    """Row of the table in compare_checkouts.txt: one job, which both checkouts run."""

    name: str
    how: str
    """Kind of the job: "simulate", "ranks" or "read".

    "simulate" trains in one process, "ranks" trains under the launcher, and "read" reads a file
    that OLD has written.
    """
    of: str
    """Number of nodes as text; for "read", the name of the job whose run is read."""
    settings: tuple[str, ...]
    """Settings of a training; for "read", the arguments of the command."""
    marks: frozenset[str] = frozenset()
    """Flags: "forgets" (the job is not resumed) and "whole" (the job does not get the common
    settings)."""

    @property
    def ranks(self) -> int:
        """Number of ranks that the launcher starts; 0: the job runs without a launcher."""
        return int(self.of) if self.how == "ranks" else 0


@dataclass
class Result:
    """Result of a job in one checkout."""

    command: str
    code: int = 0
    message: str = ""
    """Message of a command that failed."""
    digest: str = ""
    onward: str = ""
    """Digest of the run of OLD after this checkout has resumed it from its second last checkpoint;
    "": the job is not resumed."""
    figures: dict[str, str] = field(default_factory=dict)
    """Hash of each column of the log, by its name."""
    seconds: float = 0.0


class CommandFailed(Exception):
    """Error with the exit code and the error message of a command that failed."""

    def __init__(self, code: int, message: str):
        super().__init__(code, message)
        self.code = code
        self.message = message


class Checkout:
    """A folder with the code of the package, and functions that run commands with this code.

    :raises ArgumentError: if the folder is not a checkout, or Python imports another package
    :raises CommandFailed: if Python can't import the package
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        for needed in ("mpigossip/__main__.py", "jobs/digits.toml"):
            if not (self.folder / needed).is_file():
                raise ArgumentError(
                    f"{folder} is not a checkout of mpigossip, because {needed} is missing: pass a "
                    "folder that contains mpigossip/ and jobs/"
                )
        words = [sys.executable, "-c", "import mpigossip; print(mpigossip.__file__)"]
        package = Path(self._run(words).strip())
        if self.folder not in package.parents:
            raise ArgumentError(
                f"with PYTHONPATH={folder}, Python imports {package}, and not the checkout: "
                "uninstall that package"
            )

    def commit(self) -> str | None:
        """Return the checked-out commit; None if mpigossip/ or jobs/ has local changes.

        The result is also None if the folder is not the top folder of a repository.
        """
        words = ["git", "-C", str(self.folder)]
        with contextlib.suppress(CommandFailed, OSError):
            top = self._run([*words, "rev-parse", "--show-toplevel"]).strip()
            changed = self._run([*words, "status", "--porcelain", "mpigossip", "jobs"])
            if Path(top).resolve() == self.folder and not changed.strip():
                return self._run([*words, "rev-parse", "HEAD"]).strip()
        return None

    def mpigossip(self, words: Sequence[str], ranks: int = 0) -> str:
        """Run a command of mpigossip, and return its standard output.

        :param words: words of the command after "mpigossip"
        :param ranks: number of ranks that the launcher starts; 0: run without a launcher
        :raises CommandFailed: if the exit code is not 0, or the command takes longer than LIMIT_S
        """
        sections = self.folder / "mpigossip/config/sections.py"
        if "\n    density: " not in sections.read_text("utf-8"):
            # Older checkouts, such as e84dbb0, name this setting node.kept.
            words = [word.replace("node.density=", "node.kept=") for word in words]
        return self._run([sys.executable, "-m", "mpigossip", *words], ranks)

    def _run(self, words: Sequence[str], ranks: int = 0) -> str:
        """Run a command with this checkout on PYTHONPATH, and return its standard output.

        :param words: words of the command
        :param ranks: number of ranks that the launcher starts; 0: run without a launcher
        :raises CommandFailed: if the exit code is not 0, or the command takes longer than LIMIT_S
        """
        process = Launch(ranks, [*words], Path("/"), {"PYTHONPATH": str(self.folder)})
        try:
            code = process.process.wait(LIMIT_S)
            out, err = process.output()
        except subprocess.TimeoutExpired:
            raise CommandFailed(1, f"the command did not end within {LIMIT_S} s") from None
        finally:
            process.close()
        if code:
            lines = (out + err).strip().splitlines() or ["the command printed nothing"]
            errors = [line for line in lines if re.match(r"mpigossip: |\w*Error\b", line)]
            raise CommandFailed(code, (errors or lines)[-1])
        return out


def run_job(checkout: Checkout, job: Job, folder: Path, old_run: Callable[[str], Path]) -> Result:
    """Run a job in a checkout, and return its result.

    :param checkout: the checkout
    :param job: the job
    :param folder: folder for the files of the job
    :param old_run: function that returns the path of OLD's run directory for the name of a job. The
        folder does not exist if OLD has failed
    """
    begin = time.monotonic()
    result = Result(command(job))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if job.how == "read":
            _read(checkout, job, folder, old_run(job.of), result)
        else:
            _train(checkout, job, folder, result)
            result.seconds = round(time.monotonic() - begin, 1)
            _resume(checkout, job, folder, old_run, result)
    except CommandFailed as error:
        result.code = error.code
        result.message = error.message
    except (OSError, KeyError, IndexError) as error:  # The run lacks a file or a key.
        result.code = 1
        result.message = f"{type(error).__name__}: {error}"
    result.seconds = result.seconds or round(time.monotonic() - begin, 1)
    return result


def command(job: Job) -> str:
    """Return the command line of a job for the output, with RUN for the run directory."""
    if job.how == "read":
        return shlex.join(["mpigossip", *job.settings])
    ranks = "" if job.how == "simulate" else f"mpiexec -n {job.of} "
    return ranks + shlex.join(["mpigossip", *_training(job, "RUN", Path("jobs"))])


def _training(job: Job, run: Path | str, jobs: Path) -> list[str]:
    """Return the words of the command that trains a job, after "mpigossip".

    :param job: the job
    :param run: its run directory
    :param jobs: folder with the job file digits.toml
    """
    words = [str(jobs / "digits.toml"), *job.settings, f"run.output={run}"]
    if job.how == "simulate":
        return ["simulate", *words, "--nodes", job.of]
    return ["train", *words]


def _train(checkout: Checkout, job: Job, folder: Path, result: Result) -> None:
    """Train a job in the folder ``folder / "run"``, and store its digest and hashes of its log.

    :param checkout: the checkout
    :param job: the job
    :param folder: folder for the files of the job
    :param result: result in which the values are stored
    :raises CommandFailed: if the command fails
    """
    run = folder / "run"
    words = _training(job, folder / "run", checkout.folder / "jobs")
    result.digest = digest(run, checkout.mpigossip(words, job.ranks))
    result.figures = hash_columns(run / "log.h5")


def _resume(
    checkout: Checkout, job: Job, folder: Path, old_run: Callable[[str], Path], result: Result
) -> None:
    """Resume OLD's run from its second last checkpoint in this checkout, and store the digest.

    :param checkout: the checkout
    :param job: the job
    :param folder: folder for the files of the job
    :param old_run: function that returns the path of OLD's run directory for the name of a job
    :param result: result in which the digest is stored
    :raises CommandFailed: if the command fails. The code is then 1, because code 2 would mean that
        the checkout rejects the job
    """
    run = old_run(job.name)
    if not run.is_dir() or "forgets" in job.marks:
        return
    half = copy_without_newest(run, folder / "half")
    options = [] if job.ranks else ["--simulate"]
    try:
        result.onward = digest(half, checkout.mpigossip(["resume", str(half), *options], job.ranks))
    except CommandFailed as error:
        raise CommandFailed(1, f"`resume` failed: {error.message}") from None


def copy_without_newest(run: Path, to: Path) -> Path:
    """Copy a run directory without its newest checkpoint; return the path of the copy.

    The copy is resumed from the checkpoint before the newest one.
    """
    newest = sorted((run / "checkpoints").iterdir())[-1].name
    shutil.copytree(run, to, ignore=shutil.ignore_patterns(newest))
    return to


def digest(run: Path, output: str) -> str:
    """Compare the digest that a run has printed with its newest checkpoint, and return it.

    :param run: the run directory
    :param output: standard output of the run
    :raises CommandFailed: if the run has printed no digest, or another digest than the SHA-256 of
        the parameters in the checkpoint
    """
    newest = sorted((run / "checkpoints").iterdir())[-1]
    sha = hashlib.sha256()
    for path in sorted(newest.glob("node-*.h5")):
        with h5py.File(path) as file:
            sha.update(file["parameters"][:].astype("<f4").tobytes())
    printed = re.search(r"^digest\s+([0-9a-f]{64})$", output, re.MULTILINE)
    if printed is None or printed[1] != sha.hexdigest():
        value = f"digest {printed[1][:8]}" if printed else "no digest"
        raise CommandFailed(
            1, f"the run printed {value}, but its checkpoint has {sha.hexdigest()[:8]}"
        )
    return printed[1]


def hash_columns(log: Path) -> dict[str, str]:
    """Return a hash of each column of a log by its name; columns of times are left out."""
    hashes = {}
    with h5py.File(log) as file:
        for group in ("steps", "evaluations"):
            for name, data in file[group].items():
                if not TIMES.fullmatch(name):
                    hashes[f"{group}/{name}"] = hashlib.sha256(data[:].tobytes()).hexdigest()[:16]
    return hashes


def _read(checkout: Checkout, job: Job, folder: Path, old_run: Path, result: Result) -> None:
    """Read OLD's run by a command of this checkout, and store hashes of the file that it writes.

    The columns of a CSV file and the tensors of a safetensors file are hashed. Any other file only
    has to exist and must not be empty.

    :param checkout: the checkout
    :param job: the job
    :param folder: folder for the files that the command writes
    :param old_run: OLD's run directory
    :param result: result in which the hashes are stored
    :raises CommandFailed: if the command fails, or if the file is missing or empty
    """
    words = [str(old_run) if word == "RUN" else word for word in job.settings]
    name = next((word for word in words if word.startswith("OUT")), None)
    checkout.mpigossip([str(folder / word) if word == name else word for word in words])
    if name is None:
        return
    path = folder / name
    if not path.is_file() or not path.stat().st_size:
        raise CommandFailed(1, f"the command did not write {path.name}, or wrote an empty file")
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            columns = zip(*csv.reader(file), strict=True)
            result.figures = {
                name: hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]
                for name, *values in columns
            }
    elif path.suffix == ".safetensors":
        tensors = load_file(path)
        sha = hashlib.sha256()
        for name in sorted(tensors):  # The order of tensors in the file varies.
            sha.update(name.encode() + tensors[name].tobytes())
        result.digest = sha.hexdigest()


# -- stored results of OLD ------------------------------------------------------------------------


class Store:
    """Folder that contains the results and the run directories of the checkout OLD."""

    def __init__(self, checkout: Checkout, folder: Path):
        self.checkout = checkout
        self.folder = folder
        self.known: set[str] = set()
        """Names of the jobs whose results were already stored."""

    def get(self, job: Job) -> Result:
        """Return the stored result of a job; if there is none, run the job and store its result.

        A result that was stored for another command is not used. The results of failed jobs and of
        jobs that only read are not stored.
        """
        folder = self.folder / job.name
        path = folder / "result.json"
        if path.exists() and (result := Result(**json.loads(path.read_text()))).command == command(
            job
        ):
            self.known.add(job.name)
            return result
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        result = run_job(self.checkout, job, folder, self.run)
        if job.how != "read" and not result.code:
            shutil.rmtree(folder / "half", ignore_errors=True)
            path.write_text(json.dumps(asdict(result)))
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return result

    def run(self, name: str) -> Path:
        """Return the path of the run directory of the job with this name."""
        return self.folder / name / "run"


def hash_environment() -> str:
    """Return a hash of the facts, apart from the checkout, on which the bits of results depend.

    The facts are the processor, the launcher, and the versions of Python and of four packages.
    """
    facts = [platform.machine(), platform.python_version(), launcher()]
    with contextlib.suppress(OSError):
        facts += re.findall(r"^model name.*", Path("/proc/cpuinfo").read_text(), re.M)[:1]
    facts += [version(name) for name in ("torch", "numpy", "mpi4py", "h5py")]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
