"""Run the checks of gpu_check.sh, and print a table with the result and the limit of each.

Each check is a function of measures.py or several.py, or a selection of tests. It runs in its own
processes with its own time limit. If a check fails or hangs, its row says so, and the others are
not affected. Checks of the correctness of an exchange come first. Checks that need several GPUs
come last, and are not run if there is only one. Most limits of rates are measured in the same run.

At the end, the table is printed, inserted at the top of GPU_RESULTS.md (in the folder of `--out`),
and written next to it as JSON. `--from N` continues with row N. To test the checks themselves,
`--rehearse` runs them on the CPU at small sizes, and `--double` runs them on the CPU emulation of
CUDA that the tests use. Such results say nothing about GPUs, and are written only with `--out`.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from measures import Place

from tests.launch import Launch, found_launcher

TOTAL_S = 570
SEVERAL_S = 900
"""Time limits of all checks together, in seconds.

After TOTAL_S seconds, or TOTAL_S + SEVERAL_S if there are several GPUs, the running check is
stopped, and no other check begins.
"""
FIRST_S = 120
"""Seconds within which torch has to find the GPU."""
NO_GPU = 3
"""Exit code if there is no GPU."""
MEASURES = Path(__file__).resolve().with_name("measures.py")
SEVERAL = MEASURES.with_name("several.py")
RESULTS = MEASURES.with_name("GPU_RESULTS.md")
NEEDED = ("numpy", "h5py", "matplotlib", "networkx", "PIL", "rich", "safetensors", "scipy")
"""Modules that all checks need. Only some checks need pytest, mpi4py or cupy, and test for them."""


class NotRun(Exception):
    """Exception for a check that has no result; the message is the reason."""


class Check(NamedTuple):
    """Check that gives one row of the table."""

    title: str
    limit: str
    """Text of the limit that the measurement has to reach."""
    seconds: float
    """Time limit of the check in seconds."""
    measure: str
    """Words that name a function of measures.py, or of several.py if several GPUs are needed, and
    its arguments; "tests": the tests with the marker "gpu"."""
    ranks: int = 0
    """Number of MPI ranks; 0: one process without MPI."""
    gpus: int = 1
    """Number of GPUs that the check needs."""


class Row(NamedTuple):
    """Row of the table; ``good`` is None if there is no limit to compare the measurement with."""

    check: str
    """Title of the check."""
    measured: str
    """Result as text; "not run: " or "failed: " and the reason if there is none."""
    limit: str
    good: bool | None


BITS = "bitwise identical to the CPU"
EQUAL = "equal for both transports"
NONE = "no wrong values"
NO_BAR = "no limit"
SLOWER = "<= 5 % longer than without the exchange, under MPS"
CHECKS = [
    Check("weighted sums of numbers, some of them denormal", BITS, 60, "weighted_sums"),
    Check("exchange while streams sleep at random: two ranks, fastest transport", NONE, 60,
          "stress auto", 2),
    Check("exchange while streams sleep at random: two ranks, host memory", NONE, 60,
          "stress host", 2),
    Check("exchange while streams sleep at random: three ranks, windows of GPU memory", NONE, 60,
          "stress windows", 3),
    Check("exchange while streams sleep at random: four ranks, messages of GPU memory", NONE, 60,
          "stress messages", 4),
    Check("exchange while streams sleep at random, with one wait removed", "error detected", 60,
          "mutant", 2),
    Check("NCCL calls of a node with one rank", BITS, 40, "nccl"),
    Check("digests of two ranks that exchange GPU memory, or copies in host memory", EQUAL, 60,
          "digests", 2),
    Check("digests of four ranks that exchange GPU memory, or copies in host memory", EQUAL, 60,
          "digests", 4),
    Check("weighted sum of two 400 MB shards", ">= 85 % of device copy bandwidth", 40,
          "sum_bandwidth"),
    Check("exchange of 400 MB between two ranks on one GPU", ">= 70 % of device copy bandwidth",
          60, "exchange auto 0.7 copy", 2),
    Check("exchange of 400 MB between two ranks through host memory, in chunks",
          ">= 80 % of MPI's put of host memory", 60, "exchange host 0.8 put", 2),
    Check("step of ResNet-50, bf16, batch 256, on two ranks, with a message sent ahead", SLOWER,
          100, "overlap", 2),
    Check("step of ResNet-50, bf16, batch 256, eager, relative to plain torch", "<= 1.05 x", 60,
          "beside_torch"),
    Check("parameters after a custom loop with autocast and GradScaler",
          "equal to plain torch within 1e-5", 40, "grad_scaler"),
    Check("job that is resumed from its checkpoint", "exit code 0", 90, "resume_job"),
    Check("parameters after FSDP2 in a node of one rank", "equal to a run on the CPU within 1e-4",
          60, "fsdp", 1),
    Check("step of ResNet-50, bf16, batch 256, eager", NO_BAR, 45, "step eager"),
    Check("step of ResNet-50, bf16, batch 256, in CUDA graphs", NO_BAR, 45, "step graphs"),
    Check("step of ResNet-50, bf16, batch 256, in CUDA graphs, channels last", NO_BAR, 45,
          "step channels_last"),
    Check("tests with the marker gpu", "all pass", 200, "tests"),
    Check("step of ResNet-50, bf16, batch 256, compiled", NO_BAR, 100, "step compile"),
    Check("copies of patterns between all pairs of GPUs", NONE, 60, "copies", gpus=2),
    Check("transports between two ranks with half of the GPUs each", "not through host memory",
          120, "transports", 2, 2),
    Check("first GLOBAL round of a new mixer during reduce-scatters, 200 times", NONE, 150,
          "first_rounds auto", 2, 2),
    Check("first GLOBAL round of a new mixer during reduce-scatters, by NCCL", NONE, 200,
          "first_rounds nccl", 2, 2),
    Check("training in which a kernel fails on one GPU", "error names the GPU within 30 s", 60,
          "failing_kernel", gpus=2),
    Check("images per second of ResNet-50, bf16, batch 256 per GPU, and of DDP", NO_BAR, 240,
          "beside_ddp", gpus=2),
]  # fmt: skip


def main() -> int:
    """Run all checks, print the table at the end, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at small sizes")
    parser.add_argument("--double", action="store_true", help="on the tests' emulation of GPUs")
    parser.add_argument("--gpus", type=int, help="number of GPUs to use, from the first one")
    parser.add_argument("--only", default="", help="rows whose title contains this text")
    parser.add_argument(
        "--from",
        type=int,
        default=1,
        metavar="N",
        dest="first",
        help="continue with the N-th row of the table",
    )
    where = "folder of GPU_RESULTS.md, to which the table is added (default: tools/gpu)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=where)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.gpus and not options.double:
        # A scheduler sets this variable to the GPUs of the batch job.
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = given.split(",") if given else map(str, range(options.gpus))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*every][: options.gpus])
    with tempfile.TemporaryDirectory() as folder:
        if options.double:
            from tests.double.__main__ import environment

            os.environ.update(environment(Path(folder), options.gpus or 8))
        rehearsed = options.rehearse or options.double
        return run(Place("cpu" if options.rehearse else "cuda:0", rehearsed), options)


def run(place: Place, options: argparse.Namespace) -> int:
    """Run all checks, or the chosen ones, and print and write the table.

    :param place: device and size of the measurements
    :param options: options of the command line
    :return: exit code: 1 if a result is not good, NO_GPU if no GPU was found, otherwise 0
    """
    try:
        gpus, device = result_of([sys.executable, str(MEASURES), "device", "0"], place, FIRST_S)
    except (NotRun, RuntimeError) as error:
        gpus = 0
        device = str(error)
    if not gpus:
        print(f"no GPU was found: {device}; nothing was tested or measured")
        return NO_GPU
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        device += f"; {sys.executable} lacks {', '.join(lacking)}"
        print(f"{sys.executable} lacks {', '.join(lacking)}: checks that need them will fail")
    ends = time.monotonic() + TOTAL_S + SEVERAL_S * (gpus > 1)
    checks = [check for check in CHECKS[options.first - 1 :] if options.only in check.title]
    rows: list[Row] = []
    try:
        run_checks(place, rows, ends, checks, gpus)
    except KeyboardInterrupt:
        print("a signal stopped the checks")
    stopped = "not run: a signal stopped the checks before"
    rows += [Row(c.title, stopped, c.limit, None) for c in checks[len(rows) :]]
    text = table(rows, device)
    out = RESULTS if options.out is None else options.out / RESULTS.name
    if options.out is not None or not place.rehearsed:
        with contextlib.suppress(OSError):
            out.parent.mkdir(parents=True, exist_ok=True)
            insert_table(text, out)
            results = {"device": device, "gpus": gpus, "rows": [row._asdict() for row in rows]}
            out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + text, flush=True)
    return 1 if any(row.good is False for row in rows) else 0


def run_checks(
    place: Place, rows: list[Row], ends: float, checks: list[Check], gpus: int = 1
) -> None:
    """Run the checks one after the other, and append their rows.

    :param place: device and size of the measurements
    :param rows: list to which rows are appended
    :param ends: end of the time limit of all checks, by the monotonic clock, in seconds; in its
        last 15 s, no check begins
    :param checks: the checks
    :param gpus: number of GPUs
    """
    for check in checks:
        print(f"== {check.title}", flush=True)
        began = time.monotonic()
        try:
            if ends - began < 15:
                raise NotRun(
                    "less than 15 s of the time limit of all checks are left; continue by --from"
                )
            if check.gpus > gpus:
                raise NotRun(f"needs {check.gpus} GPUs or more, but there are {gpus}")
            result, good = run_check(check, place, min(ends - began, check.seconds))
        except NotRun as reason:
            result = f"not run: {reason}"
            good = None
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            result = f"failed: {type(error).__name__}: {first}".replace("|", "/")
            good = False
        rows.append(Row(check.title, result, check.limit, good))
        print(f"   {result}   ({time.monotonic() - began:.0f} s)", flush=True)


def run_check(check: Check, place: Place, seconds: float) -> tuple[str, bool | None]:
    """Run a check in its own processes.

    :param check: the check
    :param place: device and size of the measurement
    :param seconds: time limit
    :return: the result as text, and whether it is good; None: the check has no limit
    :raises NotRun: if a program that the check needs is missing, or if the time limit is reached
    :raises RuntimeError: if the check ends without a result
    """
    if check.measure == "tests":
        return run_gpu_tests(place, seconds)
    head = []
    if check.ranks:
        if not found_launcher() or importlib.util.find_spec("mpi4py") is None:
            raise NotRun("needs mpi4py and an mpiexec; MPIGOSSIP_MPIEXEC can name its path")
        head = [*found_launcher(), "-n", str(check.ranks)]
    name, *words = check.measure.split()
    script = SEVERAL if check.gpus > 1 else MEASURES
    command = [*head, sys.executable, str(script), name, str(seconds), *words]
    return tuple(result_of(command, place, seconds))


def result_of(command: list[str], place: Place, seconds: float):
    """Run a command, and return the value that it prints as JSON in a line "RESULT …".

    :param command: words of the command, without "--rehearse"
    :param place: device and size of the measurement
    :param seconds: time limit
    :raises NotRun: if the command takes longer than ``seconds``
    :raises RuntimeError: if the command ends without such a line; the message contains its error
    """
    done = run_command(command + (["--rehearse"] if place.rehearsed else []), seconds)
    results = re.findall(r"^RESULT (.*)", done.stdout, re.MULTILINE)
    # The result counts even if the process failed afterwards.
    if results:
        return json.loads(results[-1])
    print(done.stdout[-3000:], done.stderr[-5000:])
    last = re.findall(r"^(?:\w+\.)*\w*(?:Error|Refused|Exception|exit)\b.*", done.stderr, re.M)
    why = last[-1][:300] if last else "no error message"
    raise RuntimeError(f"the check ended with code {done.returncode}: {why}")


def run_command(command: list[str], seconds: float):
    """Run a command; return its exit code and output as a CompletedProcess.

    :raises NotRun: if it takes longer than ``seconds``; its output until then is printed
    """
    run = Launch(0, command)
    try:
        code = run.process.wait(seconds)
        return subprocess.CompletedProcess(command, code, *run.output())
    except subprocess.TimeoutExpired:
        print(*(text[-3000:] for text in run.output()))
        raise NotRun(f"{seconds:.0f} s were not enough") from None
    finally:
        run.close()


def run_gpu_tests(place: Place, seconds: float) -> tuple[str, bool]:
    """Run the tests with the marker "gpu" in a separate process; in a rehearsal, collect them only.

    :return: last line of pytest's output, and whether all tests pass
    :raises NotRun: if pytest is not installed, or if the tests take longer than ``seconds``
    """
    if importlib.util.find_spec("pytest") is None:
        raise NotRun("pytest is not installed; install it by pip")
    files = ["tests/test_gpu.py", "tests/groups/test_groups.py", "tests/data/test_sources.py"]
    # The options in pyproject.toml need plug-ins that may be missing here, so drop them.
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning", "--maxfail=20"]
    # In a rehearsal, the tests are only collected: tests/double runs them on the emulation.
    command += ["--collect-only"] if place.rehearsed else []
    done = run_command(command, seconds)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    tail = done.stdout.strip().splitlines()[-1:] or ["no output"]
    return tail[0].strip("= "), done.returncode == 0


def table(rows: list[Row], device: str) -> str:
    """Return the table in Markdown, with date and device."""
    words = {True: "yes", False: "NO", None: "-"}
    lines = [f"## {datetime.date.today()}, {device}", ""]
    lines += ["| # | check | measured | limit | good |", "|---|---|---|---|---|"]
    number = {check.title: k for k, check in enumerate(CHECKS, 1)}
    lines += [
        f"| {number.get(r.check, '')} | {r.check} | {r.measured} | {r.limit} | {words[r.good]} |"
        for r in rows
    ]
    return "\n".join(lines)


def insert_table(text: str, path: Path) -> None:
    """Insert a table below the file's heading, above older tables.

    :param text: the table in Markdown
    :param path: file, which need not exist
    """
    heading = "# Results of gpu_check.sh\n"
    old = path.read_text().removeprefix(heading).strip("\n") if path.exists() else ""
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{heading}\n{text}\n" + (f"\n{old}\n" if old else ""))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
