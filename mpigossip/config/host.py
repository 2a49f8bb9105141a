"""Cores and memory of this host, and checks that arrays fit before they are allocated."""

import os

from mpigossip.config.errors import JobError
from mpigossip.config.readable import format_bytes


def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may use; empty if the system does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def core_count() -> int:
    """Return the number of cores that this process may use, or of all cores if it is not known."""
    return len(allowed_cores()) or os.cpu_count() or 1


def host_memory() -> int:
    """Return the size of this host's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(needed: int, settings: str) -> None:
    """Raise an error if an allocation exceeds the memory of this host.

    :param needed: size of the allocation in bytes
    :param settings: names of the settings that determine this size
    :raises JobError: if ``needed`` is larger than the memory of this host
    """
    memory = host_memory()
    if needed > memory:
        raise JobError(
            f"not enough memory: {settings} require {format_bytes(needed)}, but this host has "
            f"{format_bytes(memory)}; make {settings} smaller"
        )
