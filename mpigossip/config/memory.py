"""Checks that arrays fit into the memory of this host, before they are allocated."""

import os

from mpigossip.config.errors import JobError
from mpigossip.config.readable import format_bytes


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
