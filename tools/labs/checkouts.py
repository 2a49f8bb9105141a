"""Run a job in one checkout of the package, and store its result, for compare_checkouts.py.

OLD and NEW are the two checkouts that are compared.
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


class Wrong(Exception):
    """Error in the arguments of compare_checkouts.py, which the message describes."""


class Job(NamedTuple):
    """Job that is run in each checkout."""

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
    """Flags. A job with "forgets" is not resumed; to a job with "whole", no common settings are
    added."""

    @property
    def ranks(self) -> int:
        """The number of ranks under the launcher; 0 without a launcher."""
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
    """Digest at the end of a run that this checkout has resumed from OLD's last checkpoint but
    one."""
    figures: dict[str, str] = field(default_factory=dict)
    """Hash of each column of the log, by its name."""
    seconds: float = 0.0


class Failed(Exception):
    """Failure of a command, with its exit code and its last line of output."""

    def __init__(self, code: int, message: str):
        super().__init__(code, message)
        self.code = code
        self.message = message


class Checkout:
    """A checkout of the package, which runs commands with its own code."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        for needed in ("mpigossip/__main__.py", "jobs/digits.toml"):
            if not (self.folder / needed).is_file():
                raise Wrong(f"{folder}: not a checkout of mpigossip: {needed} is missing")
        words = [sys.executable, "-c", "import mpigossip; print(mpigossip.__file__)"]
        package = Path(self._ended(words).strip())
        if self.folder not in package.parents:
            raise Wrong(
                f"PYTHONPATH={folder} imports {package}: another package hides the checkout"
            )

    def commit(self) -> str | None:
        """Return the checked-out commit; None if there are local changes or no repository."""
        words = ["git", "-C", str(self.folder)]
        with contextlib.suppress(Failed, OSError):
            top = self._ended([*words, "rev-parse", "--show-toplevel"]).strip()
            changed = self._ended([*words, "status", "--porcelain", "mpigossip", "jobs"])
            if Path(top).resolve() == self.folder and not changed.strip():
                return self._ended([*words, "rev-parse", "HEAD"]).strip()
        return None

    def mpigossip(self, words: Sequence[str], ranks: int = 0) -> str:
        """Return the output of a command of mpigossip, run under the launcher if ``ranks`` > 0.

        :raises Failed: if the exit code is not 0, or the command exceeds its time limit
        """
        sections = self.folder / "mpigossip/config/sections.py"
        if "\n    density: " not in sections.read_text("utf-8"):
            # Older checkouts, such as e84dbb0, name this setting node.kept.
            words = [word.replace("node.density=", "node.kept=") for word in words]
        return self._ended([sys.executable, "-m", "mpigossip", *words], ranks)

    def _ended(self, words: Sequence[str], ranks: int = 0) -> str:
        made = Launch(ranks, [*words], Path("/"), {"PYTHONPATH": str(self.folder)})
        try:
            code = made.process.wait(LIMIT_S)
            out, err = made.output()
        except subprocess.TimeoutExpired:
            raise Failed(1, f"no end within {LIMIT_S} s") from None
        finally:
            made.close()
        if code:
            lines = (out + err).strip().splitlines() or ["nothing"]
            telling = [line for line in lines if re.match(r"mpigossip: |\w*Error\b", line)]
            raise Failed(code, (telling or lines)[-1])
        return out


def measured(checkout: Checkout, job: Job, folder: Path, old_run: Callable[[str], Path]) -> Result:
    """Run a job in a checkout, and return its result.

    :param checkout: the checkout
    :param job: the job
    :param folder: folder for the files
    :param old_run: function that maps the name of a job to the run directory that OLD has written;
        it does not exist if OLD has failed
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
    except Failed as failed:
        result.code = failed.code
        result.message = failed.message
    except (OSError, KeyError, IndexError) as error:  # The run lacks a file or a key.
        result.code = 1
        result.message = f"{type(error).__name__}: {error}"
    result.seconds = result.seconds or round(time.monotonic() - begin, 1)
    return result


def command(job: Job) -> str:
    """Return the command of a job as a user would type it; RUN stands for the run directory."""
    if job.how == "read":
        return shlex.join(["mpigossip", *job.settings])
    ranks = "" if job.how == "simulate" else f"mpiexec -n {job.of} "
    return ranks + shlex.join(["mpigossip", *_training(job, "RUN", Path("jobs"))])


def _training(job: Job, run: Path | str, jobs: Path) -> list[str]:
    words = [str(jobs / "digits.toml"), *job.settings, f"run.output={run}"]
    if job.how == "simulate":
        return ["simulate", *words, "--nodes", job.of]
    return ["train", *words]


def _train(checkout: Checkout, job: Job, folder: Path, result: Result) -> None:
    run = folder / "run"
    words = _training(job, folder / "run", checkout.folder / "jobs")
    result.digest = digest(run, checkout.mpigossip(words, job.ranks))
    result.figures = figures(run / "log.h5")


def _resume(
    checkout: Checkout, job: Job, folder: Path, old_run: Callable[[str], Path], result: Result
) -> None:
    """Resume the run of OLD from its last checkpoint but one, in this checkout.

    :raises Failed: if that fails. Its code is 1, because code 2 would mean that the checkout
        rejects the job
    """
    run = old_run(job.name)
    if not run.is_dir() or "forgets" in job.marks:
        return
    half = cut(run, folder / "half")
    way = [] if job.ranks else ["--simulate"]
    try:
        result.onward = digest(half, checkout.mpigossip(["resume", str(half), *way], job.ranks))
    except Failed as failed:
        raise Failed(1, f"resuming: {failed.message}") from None


def cut(run: Path, to: Path) -> Path:
    """Copy a run without its newest checkpoint, so that it can be resumed from the one before."""
    newest = sorted((run / "checkpoints").iterdir())[-1].name
    shutil.copytree(run, to, ignore=shutil.ignore_patterns(newest))
    return to


def digest(run: Path, output: str) -> str:
    """Return the digest that a run has printed, after a comparison with its checkpoint.

    :param run: the run directory
    :param output: output of the run
    :raises Failed: if no digest was printed, or if the checkpoint's files have another one
    """
    newest = sorted((run / "checkpoints").iterdir())[-1]
    sha = hashlib.sha256()
    for path in sorted(newest.glob("node-*.h5")):
        with h5py.File(path) as file:
            sha.update(file["parameters"][:].astype("<f4").tobytes())
    printed = re.search(r"^digest\s+([0-9a-f]{64})$", output, re.MULTILINE)
    if printed is None or printed[1] != sha.hexdigest():
        value = printed[1][:8] if printed else "nothing"
        raise Failed(1, f"digest printed: {value}, of the files: {sha.hexdigest()[:8]}")
    return printed[1]


def figures(log: Path) -> dict[str, str]:
    """Return a hash of each column of a log, by name, without columns that contain times."""
    hashes = {}
    with h5py.File(log) as file:
        for group in ("steps", "evaluations"):
            for name, data in file[group].items():
                if not TIMES.fullmatch(name):
                    hashes[f"{group}/{name}"] = hashlib.sha256(data[:].tobytes()).hexdigest()[:16]
    return hashes


def _read(checkout: Checkout, job: Job, folder: Path, old_run: Path, result: Result) -> None:
    """Read OLD's run by a command, and store what has to be equal in both checkouts.

    These are the columns of a CSV file or the tensors of a safetensors file. Any other file only
    has to exist and must not be empty.
    """
    words = [str(old_run) if word == "RUN" else word for word in job.settings]
    name = next((word for word in words if word.startswith("OUT")), None)
    checkout.mpigossip([str(folder / word) if word == name else word for word in words])
    if name is None:
        return
    made = folder / name
    if not made.is_file() or not made.stat().st_size:
        raise Failed(1, f"{made.name} wasn't written")
    if made.suffix == ".csv":
        with made.open(newline="") as file:
            columns = zip(*csv.reader(file), strict=True)
            result.figures = {
                name: hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]
                for name, *values in columns
            }
    elif made.suffix == ".safetensors":
        tensors = load_file(made)
        sha = hashlib.sha256()
        for name in sorted(tensors):  # The order of tensors in the file varies.
            sha.update(name.encode() + tensors[name].tobytes())
        result.digest = sha.hexdigest()


# -- OLD's results, kept --------------------------------------------------------------------------


class Store:
    """Folder with the results of a checkout, and with its runs."""

    def __init__(self, checkout: Checkout, folder: Path):
        self.checkout = checkout
        self.folder = folder
        self.known: set[str] = set()
        """Names of the jobs whose results were already stored."""

    def get(self, job: Job) -> Result:
        """Return the stored result of a job; run the job if there is none.

        Results are stored only if the job has succeeded.
        """
        place = self.folder / job.name
        kept = place / "result.json"
        if kept.exists() and (result := Result(**json.loads(kept.read_text()))).command == command(
            job
        ):
            self.known.add(job.name)
            return result
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        result = measured(self.checkout, job, place, self.run)
        if job.how != "read" and not result.code:
            shutil.rmtree(place / "half", ignore_errors=True)
            kept.write_text(json.dumps(asdict(result)))
        else:
            shutil.rmtree(place, ignore_errors=True)
        return result

    def run(self, name: str) -> Path:
        """Return the run directory of a job."""
        return self.folder / name / "run"


def surroundings() -> str:
    """Return a hash of all facts, except for the checkout, on which the bits of results depend.

    These are, for example, versions of packages and the processor.
    """
    facts = [platform.machine(), platform.python_version(), launcher()]
    with contextlib.suppress(OSError):
        facts += re.findall(r"^model name.*", Path("/proc/cpuinfo").read_text(), re.M)[:1]
    facts += [version(name) for name in ("torch", "numpy", "mpi4py", "h5py")]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
