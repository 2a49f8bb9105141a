"""The measurements of gpu_check.sh: each figure beside its limit, both measured in this run.

The table is printed last and put on top of tools/GPU_RESULTS.md (`--out`). `--rehearse` runs what
it can on the CPU at small sizes, to see that it runs; its figures say nothing about GPUs.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gpu_launch import NotRun, at_ease_in_a_container, ended, launched_by
from gpu_ranks import Place, median_seconds

TOTAL_S = 570
"""Seconds after which nothing new is begun and what runs is ended: ten minutes with the rest."""
NO_GPU = 3
RANKS = Path(__file__).resolve().with_name("gpu_ranks.py")
EXCHANGE_S = 50
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
    parser.add_argument("--out", type=Path, help="file that the table is put on top of")
    options = parser.parse_args()
    missing = None if options.rehearse else no_gpu()
    if missing:
        print(f"no GPU was found: {missing}; nothing was tested or measured")
        return NO_GPU
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"{sys.executable} lacks {', '.join(lacking)}: install mpigossip's requirements")
        return 1
    at_ease_in_a_container()
    place = Place("cpu" if options.rehearse else "cuda:0", options.rehearse)
    rows = all_rows(place)
    text = table(rows, place)
    out = options.out or (None if options.rehearse else RESULTS)
    if out is not None:
        put_on_top(text, out)
    print("\n" + text, flush=True)
    return 1 if any(row.good is False for row in rows) else 0


def no_gpu() -> str | None:
    """Why there is no GPU to use; None where there is one."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees none"
    return None


def all_rows(place: Place) -> list[Row]:
    """Run every check in turn, as long as there is time."""
    ends = time.monotonic() + TOTAL_S
    rows = []
    for check, limit, seconds, measure in CHECKS:
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
            rows.append(Row(check, f"failed: {type(error).__name__}: {said[0]}", limit, False))
        print(f"   {rows[-1].measured}   ({time.monotonic() - began:.0f} s)", flush=True)
    return rows


def table(rows: list[Row], place: Place) -> str:
    """Markdown, with date and device."""
    words = {True: "yes", False: "NO", None: "-"}
    lines = [f"## {datetime.date.today()}, {machine(place)}", ""]
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


def machine(place: Place) -> str:
    """Device and versions, in a line."""
    import torch

    if place.rehearsed:
        return f"REHEARSAL on a CPU, torch {torch.__version__}: the figures mean nothing"
    name = torch.cuda.get_device_name(0)
    count = torch.cuda.device_count()
    driver = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    cupy = "CuPy " + metadata.version(found) if (found := cupy_wheel()) else "no CuPy"
    python = f"Python {platform.python_version()}"
    return f"{count} x {name}, torch {torch.__version__}, {driver}, {cupy}, {python}"


def cupy_wheel() -> str | None:
    """The name under which CuPy is installed."""
    names = [dist.metadata["Name"] or "" for dist in metadata.distributions()]
    return next((name for name in names if name.startswith("cupy")), None)


# -- tests ---------------------------------------------------------------------------------------


def tests(place: Place, seconds: float, limit: str):
    """The tests marked gpu, in a process of their own."""
    if importlib.util.find_spec("pytest") is None:
        raise NotRun("pytest isn't installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_gpu.py",
        "tests/test_groups.py",
        "tests/test_data.py",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--collect-only"] if place.rehearsed else []
    done = ended(command, seconds)
    tail = done.stdout.strip().splitlines()[-1:] or ["no output"]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    return tail[0].strip("= "), limit, done.returncode == 0


# -- what ranks measure together -----------------------------------------------------------------


def on_ranks(name: str, n: int, place: Place, seconds: float):
    """Rank 0's result of a function in RANKED on n ranks that share the GPU."""
    launcher = launched_by()
    if not launcher or importlib.util.find_spec("mpi4py") is None:
        raise NotRun("needs mpi4py and an mpiexec (MPIGOSSIP_MPIEXEC names one)")
    command = [*launcher, "-n", str(n), sys.executable, str(RANKS), name, str(seconds)]
    done = ended(command + (["--rehearse"] if place.rehearsed else []), seconds)
    found = re.findall(r"RESULT (.*)", done.stdout)
    if done.returncode or not found:
        print(done.stdout[-3000:], done.stderr[-3000:])
        raise RuntimeError(f"{n} ranks ended with code {done.returncode}")
    return json.loads(found[0])


# -- rows ----------------------------------------------------------------------------------------


def accuracy(n: int):
    """The measurement of n ranks' difference from the CPU."""

    def measure(place: Place, seconds: float, limit: str):
        name, value, compared, cases = on_ranks("accuracy", n, place, seconds)
        said = f"{value:.1e} at worst ({name}), {compared} of {cases} compared in time"
        good = value <= 1e-5 if compared == cases or value > 1e-5 else None
        return said, limit, good

    return measure


def combining(place: Place, seconds: float, limit: str):
    """Bytes moved by the sum against bytes moved by a copy."""
    import torch

    from mpigossip.mixing import fused
    from mpigossip.mixing.base import combine

    width = place.size(100 << 20, 1 << 18)
    one, two = (torch.ones(1, width, device=place.device) for _ in range(2))
    out = torch.empty_like(one)

    def timed(work):
        return median_seconds(lambda: (work(), place.synchronize()), 9)

    copy, total = timed(lambda: out.copy_(one)), timed(lambda: combine([0.5, 0.5], [one, two], out))
    share = (3 * 4 * width / total) / (2 * 4 * width / copy)
    how = "fused" if fused._cupy() is not None and not place.rehearsed else "torch, without CuPy"
    said = f"{share:.0%} of {8 * width / copy / 1e9:.0f} GB/s ({how})"
    return said, limit, share >= 0.85


@cache
def exchanges(place: Place) -> dict:
    """Both ways are measured in one run."""
    return on_ranks("exchange", 2, place, EXCHANGE_S)


def exchange(memory: str, bar: float, limited_by: str):
    """The measurement of a round by one way against the copy that bounds it."""

    def measure(place: Place, seconds: float, limit: str):
        found = exchanges(place)
        route, _, why = found[f"{memory} route"].partition(" ")
        if memory == "auto" and route == "host":
            raise NotRun(f"neither CUDA IPC nor a GPU-aware MPI {why}")
        # the sum reads two vectors and writes one where the copy reads and writes one
        work = 1.5 if limited_by == "copy" else 1.0
        share = work * found[limited_by] / found[memory]
        said = f"{share:.0%} ({route}, {found[memory] * 1e3:.1f} ms)"
        return said, limit, share >= bar

    return measure


def overlap(place: Place, seconds: float, limit: str):
    """What an exchange ahead adds to a step."""
    found = on_ranks("overlap", 2, place, seconds)
    without, with_it = found["identity"], found["one-peer-exponential"]
    more = with_it / without - 1
    return f"{more:+.1%} ({without * 1e3:.0f} ms without)", limit, more <= 0.05


def replicas_of(place: Place, model: str, batch: int, slots: int, graphs: str):
    """A run of one node whose slots share the GPU."""
    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import setup

    devices = f"cpu:{slots}" if place.rehearsed else "cuda:" + ",".join("0" * slots)
    settings = [f"data.batch={batch}", f"data.samples={batch * slots * 4}", "data.source=synthetic"]
    settings += [f"node.devices={devices}", "log.consensus_every=0"]
    settings += [] if place.rehearsed else [f"node.cuda_graphs={graphs}"]
    return setup.assemble(setup.load({"model": {"name": model}}, settings), Alone(), 1)


def launching(place: Place, seconds: float, limit: str):
    """Host time to begin the passes of eight slots."""
    if place.rehearsed:
        raise NotRun("a CPU has no graphs")
    assembly = replicas_of(place, "resnet20", 16, 8, "always")
    assembly.trainer.step()
    batches = assembly.loader.step(1)
    captured = assembly.trainer.replicas._captured
    taken = median_seconds(lambda: captured.launch(batches), 20, place.synchronize)
    assembly.close()
    return f"{taken * 1e3:.2f} ms", limit, taken <= 2e-3


def graphs(place: Place, seconds: float, limit: str):
    """Step time of a captured and of an eager ResNet-20."""
    times = {}
    for how in ("never", "always"):
        assembly = replicas_of(place, "resnet20", place.size(128, 4), 1, how)
        step = assembly.trainer.step
        times[how] = median_seconds(lambda s=step: (s(), place.synchronize()), place.size(20, 2))
        assembly.close()
    speed = times["never"] / times["always"]
    said = f"{speed:.2f} x ({times['never'] * 1e3:.1f} ms eager, {times['always'] * 1e3:.1f} ms)"
    return said, limit, None


def from_jpegs(place: Place, seconds: float, limit: str):
    """ResNet-50 on random crops of JPEGs from an HDF5 pack: images/s, waiting for data."""
    from mpigossip.cluster.ranks import Alone
    from mpigossip.store.packing import pack
    from mpigossip.training import setup

    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(Path(folder) / "images", place.size(1024, 48))
        packed = pack(Path(folder) / "images", Path(folder) / "images.h5")
        batch, side = place.size(256, 4), place.size(224, 32)
        settings = [f"data.source={packed}", f"data.batch={batch}", "data.augment=resized-crop"]
        settings += [f"data.image_size={side}", f"data.workers={max(1, (os.cpu_count() or 2) - 1)}"]
        settings += [f"node.devices={place.device if not place.rehearsed else 'cpu:1'}"]
        settings += ["log.consensus_every=0", "node.precision=auto"]
        made = setup.load({"model": {"name": "resnet50"}}, settings)
        assembly = setup.assemble(made, Alone(), 1)
        waited, batches = [0.0], assembly.trainer.settings.batches

        def fetch(step):
            began = time.perf_counter()
            found = batches(step)
            waited[0] += time.perf_counter() - began
            return found

        assembly.trainer.settings.batches = fetch
        for _ in range(2):
            assembly.trainer.step()
        place.synchronize()
        waited[0], began, steps = 0.0, time.perf_counter(), 0
        while steps < place.size(30, 2) and time.perf_counter() - began < seconds / 2:
            assembly.trainer.step()
            steps += 1
        place.synchronize()
        took = time.perf_counter() - began
        assembly.close()
    said = f"{steps * batch / took:.0f} images/s, {waited[0] / took:.0%} waiting for data"
    return f"{said} ({os.cpu_count()} cores)", limit, None


def write_jpegs(folder: Path, count: int) -> None:
    """Images of 320 x 256 pixels that compress as photographs do, in four classes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, images in (("train", count), ("test", 8)):
        for k in range(images):
            small = draw.integers(0, 256, (32, 40, 3), dtype=np.uint8)
            place = folder / split / f"class{k % 4}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(small).resize((320, 256)).save(place / f"{k}.jpg", quality=90)


CHECKS = [
    ("tests marked gpu", "all pass", 120, tests),
    ("every algorithm, mlp and LeNet, L = 1 and 2, 2 ranks on the GPU against the CPU, 20 steps",
     "1e-5 relative", 80, accuracy(2)),
    ("the same with 4 ranks", "1e-5 relative", 100, accuracy(4)),
    ("combine of two 400 MB shards", ">= 85 % of device copy bandwidth", 20, combining),
    ("exchange of 400 MB between two ranks on the GPU", ">= 70 % of device copy bandwidth",
     EXCHANGE_S, exchange("auto", 0.70, "copy")),
    ("the same through host memory in pieces", ">= 80 % of the pinned copy rate", EXCHANGE_S,
     exchange("host", 0.80, "pinned")),
    ("ResNet-50, bf16, batch 256, two ranks on the GPU: step with an exchange ahead",
     "<= 5 % slower than without", 100, overlap),
    ("host time to launch a step of 8 slots' graphs", "<= 2 ms", 25, launching),
    ("CUDA graph against eager, ResNet-20, batch 128", "no bar", 25, graphs),
    ("ResNet-50 at 224 x 224 from an HDF5 pack of JPEGs", "no bar", 50, from_jpegs),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
