"""Core of the progress thread: one that is left over, near the network card."""

from __future__ import annotations

import os
import zlib
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

SYSFS = Path("/sys")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def allowed() -> frozenset[int]:
    """The cores that this process may use; none where the system doesn't tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def fingerprint(cores: Set[int], boot: Path = BOOT) -> int:
    """A number that is the same for processes of one machine that share these cores."""
    try:
        machine = boot.read_text("utf-8")
    except OSError:
        machine = ""
    return zlib.crc32(f"{machine}{sorted(cores)}".encode())


def near_network(cores: Set[int], sysfs: Path = SYSFS) -> frozenset[int]:
    """Those of these cores on the memory node of an RDMA card, or of a network card in use.

    All of them where the system doesn't tell, or has none there.
    """
    for cards in (sorted((sysfs / "class/infiniband").glob("*")), _network(sysfs)):
        nodes = {_read(card / "device/numa_node") for card in cards} - {"", "-1"}
        near = {
            core
            for node in nodes
            for core in _listed(_read(sysfs / f"devices/system/node/node{node}/cpulist"))
        }
        if near & cores:
            return frozenset(near & cores)
    return frozenset(cores)


def for_messages(
    cores: Set[int], threads: int, sharing: int, place: int, sysfs: Path = SYSFS
) -> frozenset[int]:
    """The core of the communication thread of the ``place``-th of ``sharing`` processes.

    Each computes on ``threads`` threads of ``cores``. None where no core is left over for every
    process: then the scheduler knows better.
    """
    near = sorted(near_network(cores, sysfs))
    if len(cores) < sharing * (threads + 1) or len(near) < sharing:
        return frozenset()
    return frozenset({near[-1 - place]})


def pick_communication_core(
    comm: MPI.Comm, threads: int, beside: tuple[int, int] = (0, 1)
) -> frozenset[int]:
    """The core of this rank's communication thread, of a rank with so many threads; collective.

    ``beside``: this rank's place among the ranks of its node, and their number, where ``comm`` has
    one rank of each.
    """
    mine = np.array([fingerprint(allowed())], np.int64)
    everyone = np.empty(comm.size, np.int64)
    comm.Allgather(mine, everyone)
    same = everyone == mine
    place = int(same[: comm.rank].sum())
    mine_of, each = beside
    return for_messages(allowed(), threads, int(same.sum()) * each, place * each + mine_of)


def _network(sysfs: Path) -> list[Path]:
    found = sorted((sysfs / "class/net").glob("*"))
    return [card for card in found if _read(card / "operstate") == "up"]


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


def _listed(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
