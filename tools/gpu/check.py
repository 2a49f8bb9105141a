"""The measurements of gpu_check.sh: each figure beside its limit, both measured in this run.

Every check runs in processes of its own under a time limit of its own, so that one that fails or
hangs says so in its row and leaves the others alone. Correctness comes first. The table is printed
last, whatever happens, put on top of tools/gpu/GPU_RESULTS.md (`--out`) and beside it as JSON.
`--rehearse` runs what it can on the CPU at small sizes, `--double` on the double of a GPU that the
tests have, to see that it runs; their figures say nothing about GPUs.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from launch import NotRun, at_ease_in_a_container, ended, launched_by
from ranks import Place

TOTAL_S = 570
"""Seconds after which nothing new is begun and what runs is ended: ten minutes with the rest."""
FIRST_S = 120
"""Seconds that torch may take to find the GPU."""
NO_GPU = 3
RANKS = Path(__file__).resolve().with_name("ranks.py")
ONE = RANKS.with_name("single.py")
STRESS = RANKS.with_name("stress.py")
RESULTS = RANKS.with_name("GPU_RESULTS.md")
NEEDED = (
    "numpy",
    "cattrs",
    "h5py",
    "matplotlib",
    "networkx",
    "PIL",
    "rich",
    "safetensors",
    "scipy",
)
"""Modules of the package itself; pytest, mpi4py and cupy are asked for where they are needed."""


class Row(NamedTuple):
    """A line of the table; ``good`` is None where there is no bar."""

    check: str
    measured: str
    limit: str
    good: bool | None


def main() -> int:
    """Run all, print the table last; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at small sizes")
    parser.add_argument("--double", action="store_true", help="on the tests' double of a GPU")
    parser.add_argument("--only", default="", help="rows whose text has this word")
    parser.add_argument("--out", type=Path, help="file that the table is put on top of")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    at_ease_in_a_container()
    with tempfile.TemporaryDirectory() as folder:
        if options.double:
            from tests.double.__main__ import environment

            os.environ.update(environment(Path(folder)))
        rehearsed = options.rehearse or options.double
        return run(Place("cpu" if options.rehearse else "cuda:0", rehearsed), options)


def run(place: Place, options: argparse.Namespace) -> int:
    """All rows, or those asked for; the exit code."""
    ends, rows = time.monotonic() + TOTAL_S, []
    checks = [check for check in CHECKS if options.only in check[0]]
    try:
        device, there = machine(place)
    except (NotRun, RuntimeError) as error:
        device, there = str(error), False
    if not there:
        print(f"no GPU was found: {device}; nothing was tested or measured")
        return NO_GPU
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        device += f"; {sys.executable} lacks {', '.join(lacking)}"
        print(f"{sys.executable} lacks {', '.join(lacking)}: what needs them fails")
    try:
        all_rows(place, rows, ends, checks)
    except KeyboardInterrupt:
        print("ended from outside")
    rows += [Row(c, "not run: ended before", limit, None) for c, limit, *_ in checks[len(rows) :]]
    text = table(rows, device)
    out = options.out or (None if place.rehearsed else RESULTS)
    if out is not None:
        with contextlib.suppress(OSError):
            put_on_top(text, out)
            found = {"device": device, "rows": [row._asdict() for row in rows]}
            out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + text, flush=True)
    return 1 if any(row.good is False for row in rows) else 0


def machine(place: Place) -> tuple[str, bool]:
    """Device and versions in a line, or the reason why there is no GPU to use."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch", False
    return tuple(result_of([sys.executable, str(ONE), "device", "0"], place, FIRST_S))


def all_rows(place: Place, rows: list[Row], ends: float, checks: list | None = None) -> None:
    """Run every check in turn, as long as there is time."""
    for check, limit, seconds, measure in CHECKS if checks is None else checks:
        left = ends - time.monotonic()
        print(f"== {check}", flush=True)
        began = time.monotonic()
        try:
            if left < 15:
                raise NotRun(f"the {TOTAL_S} s were over")
            rows.append(Row(check, *measure(place, min(left, seconds), limit)))
        except NotRun as reason:
            rows.append(Row(check, f"not run: {reason}", limit, None))
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            what = f"failed: {type(error).__name__}: {said[0]}".replace("|", "/")
            rows.append(Row(check, what, limit, False))
        if place.rehearsed:  # sizes are small and nothing is a GPU: only what failed is told
            rows[-1] = rows[-1]._replace(good=judged(rows[-1]))
        print(f"   {rows[-1].measured}   ({time.monotonic() - began:.0f} s)", flush=True)


def judged(row: Row) -> bool | None:
    """What a rehearsal says of a row: no rate reaches or misses a bar in it."""
    return row.good if row.limit in EXACT or row.measured.startswith("failed") else None


def table(rows: list[Row], device: str) -> str:
    """Markdown, with date and device."""
    words = {True: "yes", False: "NO", None: "-"}
    lines = [f"## {datetime.date.today()}, {device}", ""]
    lines += ["| check | measured | limit | good |", "|---|---|---|---|"]
    lines += [f"| {r.check} | {r.measured} | {r.limit} | {words[r.good]} |" for r in rows]
    return "\n".join(lines)


def put_on_top(text: str, path: Path) -> None:
    """Write the table below the file's heading, above the older ones."""
    heading = "# Results of gpu_check.sh\n"
    old = path.read_text().removeprefix(heading).strip("\n") if path.exists() else ""
    beside = path.with_suffix(".new")
    beside.write_text(f"{heading}\n{text}\n" + (f"\n{old}\n" if old else ""))
    beside.replace(path)


def result_of(command: list[str], place: Place, seconds: float):
    """What a process says in its line RESULT; RuntimeError with its own words where it fails."""
    done = ended(command + (["--rehearse"] if place.rehearsed else []), seconds)
    found = re.findall(r"^RESULT (.*)", done.stdout, re.MULTILINE)
    if found:  # also where the end that came after it went wrong
        return json.loads(found[-1])
    print(done.stdout[-3000:], done.stderr[-5000:])
    last = re.findall(r"^(?:\w+\.)*\w*(?:Error|Refused|Exception|exit)\b.*", done.stderr, re.M)
    why = last[-1][:300] if last else "it said nothing of why"
    raise RuntimeError(f"ended with code {done.returncode}: {why}")


# -- tests ---------------------------------------------------------------------------------------


def tests(place: Place, seconds: float, limit: str):
    """The tests marked gpu, in a process of their own."""
    if importlib.util.find_spec("pytest") is None:
        raise NotRun("pytest isn't installed")
    files = ["tests/test_gpu.py", "tests/groups/test_groups.py", "tests/data/test_sources.py"]
    # the settings name plug-ins that may be lacking here
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning", "--maxfail=20"]
    command += ["--collect-only"] if place.rehearsed else []  # tests/double runs them there
    done = ended(command, seconds)
    tail = done.stdout.strip().splitlines()[-1:] or ["no output"]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    return tail[0].strip("= "), limit, done.returncode == 0


# -- what ranks measure together -----------------------------------------------------------------


def on_ranks(name: str, n: int, place: Place, seconds: float, script: Path = RANKS):
    """Rank 0's result of a function in RANKED on n ranks that share the GPU."""
    launcher = launched_by()
    if not launcher or importlib.util.find_spec("mpi4py") is None:
        raise NotRun("needs mpi4py and an mpiexec (MPIGOSSIP_MPIEXEC names one)")
    command = [*launcher, "-n", str(n), sys.executable, str(script), name, str(seconds)]
    return result_of(command, place, seconds)


def alone(name: str):
    """A measurement of single.py."""

    def measure(place: Place, seconds: float, limit: str):
        said, good = result_of([sys.executable, str(ONE), name, str(seconds)], place, seconds)
        return said, limit, good

    return measure


# -- rows ----------------------------------------------------------------------------------------


def accuracy(n: int):
    """The measurement of n ranks' difference from the CPU."""

    def measure(place: Place, seconds: float, limit: str):
        name, value, compared, cases = on_ranks("accuracy", n, place, seconds)
        said = f"{value:.1e} at worst ({name}), {compared} of {cases} compared in time"
        good = value <= 1e-5 if compared == cases or value > 1e-5 else None
        return said, limit, good

    return measure


def mps() -> tuple[bool | None, str]:
    """What a rate of two processes below its bar counts as, and why; above it is good anyway.

    Without MPS they take turns on the GPU: what one waits is no exchange's doing.
    """
    serves = shutil.which("pgrep") and ended(["pgrep", "-f", "nvidia-cuda-mps"], 10).stdout
    return (False, "under MPS") if serves else (None, "no MPS, so no bar")


def exchange(memory: str, bar: float, limited_by: str):
    """The measurement of a round by one way against the copy that bounds it."""

    def measure(place: Place, seconds: float, limit: str):
        found = on_ranks(f"exchange-{memory}", 2, place, seconds)
        route, _, why = found["route"].partition(" ")
        if memory == "auto" and route == "host":
            raise NotRun(f"neither CUDA IPC nor a GPU-aware MPI {why}")
        # the sum reads two vectors and writes one where the copy reads and writes one
        work = 1.5 if limited_by == "copy" else 1.0
        share = work * found[limited_by] / found["round"]
        size, took, (fair, how) = found["bytes"] / 1e6, found["round"] * 1e3, mps()
        said = f"{share:.0%} ({route}, {size:.0f} MB in {took:.1f} ms; {how})"
        return said, limit, share >= bar or fair

    return measure


def overlap(model: str):
    """What an exchange ahead adds to a step of two ranks on the GPU."""

    def measure(place: Place, seconds: float, limit: str):
        found = on_ranks(f"overlap-{model}", 2, place, seconds)
        without, with_it = found["identity"], found["one-peer-exponential"]
        more, (fair, how) = with_it / without - 1, mps()
        return f"{more:+.1%} ({without * 1e3:.0f} ms without; {how})", limit, more <= 0.05 or fair

    return measure


def stress(memory: str):
    """Wrong arrays in rounds between two ranks while streams sleep."""

    def measure(place: Place, seconds: float, limit: str):
        wrong, ran, way = on_ranks(f"stress-{memory}", 2, place, seconds, STRESS)
        return f"{wrong} wrong arrays in {ran} rounds ({way})", limit, wrong == 0 and ran > 0

    return measure


def mutant(place: Place, seconds: float, limit: str):
    """Whether the stress finds a wait that is left out."""
    said, caught = on_ranks("mutant", 2, place, seconds, STRESS)
    return said, limit, caught


def digests(n: int):
    """The parameters of n ranks by ipc and through host memory."""

    def measure(place: Place, seconds: float, limit: str):
        found = on_ranks("digests", n, place, seconds, STRESS)
        names = sorted({key.split()[0] for key in found})
        differ = [name for name in names if found[f"{name} auto"] != found[f"{name} host"]]
        first = ", ".join(f"{name} {found[f'{name} auto'][:8]}" for name in names)
        return (f"{', '.join(differ)} differ" if differ else first), limit, not differ

    return measure


BITS, YES, NO_BAR = "the CPU's bits", "as it should be", "no bar"
EXACT = (BITS, YES, "all pass", "1e-5 relative", "caught", "none wrong", "equal by both ways")
"""Limits that a rehearsal has to keep, too."""
STEPS = [
    (f"{label}, bf16, one rank: {how}", NO_BAR, 100 if how == "compile" else 45,
     alone(f"{model}-{how}"))
    for model, label in (("resnet50", "step of ResNet-50, batch 256"),
                         ("gpt", "step of a GPT of 12 x 768, 16 x 1024 tokens"))
    for how in ("eager", "graphs", "channels_last", "compile")
    if (model, how) != ("gpt", "channels_last")
]  # fmt: skip
CHECKS = [
    ("versions, topology, limits", NO_BAR, 30, alone("limits")),
    ("kernels, denormals among the numbers", BITS, 60, alone("kernels")),
    ("private memory through torch, CuPy and back", YES, 30, alone("memory")),
    ("locked memory, and a lock that fails", YES, 40, alone("pinned")),
    ("streams put to sleep, two ranks by ipc", "none wrong", 60, stress("auto")),
    ("streams put to sleep, two ranks through host memory", "none wrong", 60, stress("host")),
    ("the same by ipc without a wait", "caught", 60, mutant),
    ("a capture that fails", YES, 40, alone("capture")),
    ("every call of NCCL with one rank", BITS, 40, alone("nccl")),
    ("NCCL's watchdog on a long sleep", YES, 30, alone("watchdog")),
    ("fp16 that overflows in a replayed graph", YES, 40, alone("overflow")),
    ("digests of two ranks on the GPU, by ipc and through host memory", "equal by both ways", 60,
     digests(2)),
    ("the same with four ranks", "equal by both ways", 60, digests(4)),
    ("kernels under compute-sanitizer", YES, 60, alone("sanitized")),
    ("combine of two 400 MB shards", ">= 85 % of device copy bandwidth", 40, alone("combining")),
    ("send and receive of DmSGD, 400 MB", NO_BAR, 40, alone("one_pass")),
    ("exchange of 400 MB between two ranks on the GPU", ">= 70 % of device copy bandwidth",
     60, exchange("auto", 0.70, "copy")),
    ("the same through host memory in pieces", ">= 80 % of the pinned copy rate", 60,
     exchange("host", 0.80, "pinned")),
    ("ResNet-50, bf16, batch 256, two ranks on the GPU: step with an exchange ahead",
     "<= 5 % slower than without, under MPS", 100, overlap("resnet50")),
    ("the same of the GPT", "<= 5 % slower than without, under MPS", 60, overlap("gpt")),
    *[row for row in STEPS if "compile" not in row[0]],
    ("host time to launch a step of 8 slots' graphs", "<= 2 ms", 40, alone("launching")),
    ("every algorithm, mlp and LeNet, L = 1 and 2, 2 ranks on the GPU against the CPU, 20 steps",
     "1e-5 relative", 80, accuracy(2)),
    ("the same with 4 ranks", "1e-5 relative", 90, accuracy(4)),
    ("tests marked gpu", "all pass", 200, tests),
    *[row for row in STEPS if "compile" in row[0]],
    ("CUDA graph against eager, ResNet-20, batch 128", NO_BAR, 40, alone("graphs")),
    ("ResNet-50 at 224 x 224 from an HDF5 pack of JPEGs", NO_BAR, 60, alone("from_jpegs")),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
