"""Choice of a core for the progress thread: a core near the network card, if there are enough."""

from __future__ import annotations

import zlib
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpigossip.config.host import allowed_cores

if TYPE_CHECKING:
    from mpi4py import MPI

SYSFS = Path("/sys")
"""Folder in which Linux describes the hardware."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""File with an identifier that is equal for all processes of a host until it is restarted."""


def fingerprint(cores: Set[int], boot: Path = BOOT) -> int:
    """Return a hash by which processes of one host with equal ``cores`` recognize each other.

    If the file ``boot`` can't be read, processes of different hosts with equal cores get the same
    hash, too.

    :param cores: numbers of the cores that this process may use
    :param boot: file with the identifier of the host's last start; tests pass another file
    """
    try:
        machine = boot.read_text("utf-8")
    except OSError:
        machine = ""
    return zlib.crc32(f"{machine}{sorted(cores)}".encode())


def near_network(cores: Set[int], sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the cores near a network card, chosen from ``cores``.

    They are the ``cores`` in the NUMA nodes of RDMA cards or, if there are none, in the NUMA nodes
    of active network cards. If there are none either, for example because the system reports no
    NUMA nodes, all ``cores`` are returned.

    :param cores: numbers of cores to choose from
    :param sysfs: folder in which Linux describes the hardware; tests pass another folder
    """
    for cards in (sorted((sysfs / "class/infiniband").glob("*")), _network(sysfs)):
        nodes = {_read(card / "device/numa_node") for card in cards} - {"", "-1"}
        near = {
            core
            for node in nodes
            for core in _parse_list(_read(sysfs / f"devices/system/node/node{node}/cpulist"))
        }
        if near & cores:
            return frozenset(near & cores)
    return frozenset(cores)


def for_messages(
    cores: Set[int], threads: int, sharing: int, index: int, sysfs: Path = SYSFS
) -> frozenset[int]:
    """Return the core of the progress thread of one of ``sharing`` processes, as a set.

    The processes get the cores near the network card, from the last one on. If there are too few
    cores for one more thread per process, or fewer such cores than processes, the set is empty,
    because the operating system then places the thread better.

    :param cores: cores that the processes share
    :param threads: number of threads that compute, per process
    :param sharing: number of processes that share ``cores``
    :param index: index of this process among those that share ``cores``, from 0
    :param sysfs: folder in which Linux describes the hardware; tests pass another folder
    """
    near = sorted(near_network(cores, sysfs))
    if len(cores) < sharing * (threads + 1) or len(near) < sharing:
        return frozenset()
    return frozenset({near[-1 - index]})


def pick_communication_core(
    comm: MPI.Comm, threads: int, node_position: tuple[int, int] = (0, 1)
) -> frozenset[int]:
    """Return the core of this rank's progress thread, as a set that may be empty; collective.

    :param comm: communicator of ranks that each have a progress thread
    :param threads: number of threads that compute, per rank
    :param node_position: local rank and number of ranks of this rank's node, if ``comm`` is an
        inter-node communicator with one rank of each node
    """
    local_hash = np.array([fingerprint(allowed_cores())], np.int64)
    hashes = np.empty(comm.size, np.int64)
    comm.Allgather(local_hash, hashes)
    is_sharing = hashes == local_hash
    index = int(is_sharing[: comm.rank].sum())
    local_rank, ranks_per_node = node_position
    return for_messages(
        allowed_cores(),
        threads,
        int(is_sharing.sum()) * ranks_per_node,
        index * ranks_per_node + local_rank,
    )


def _network(sysfs: Path) -> list[Path]:
    """Return the folders in which Linux describes the active network cards."""
    cards = sorted((sysfs / "class/net").glob("*"))
    return [card for card in cards if _read(card / "operstate") == "up"]


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


def _parse_list(text: str) -> set[int]:
    """Return the numbers in a list such as "0-3,8"."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
