"""Memory of this host: what doesn't fit is rejected before it is allocated."""

import os

from mpigossip.config.errors import JobError
from mpigossip.config.readable import format_bytes


def host_memory() -> int:
    """Return the bytes of memory that this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(needed: int, settings: str) -> None:
    """Raise JobError if ``needed`` bytes are more than the memory of this host.

    :param settings: names of the settings that decide the number of bytes
    """
    memory = host_memory()
    if needed > memory:
        raise JobError(
            f"not enough memory: {settings} need {format_bytes(needed)}, and this host has "
            f"{format_bytes(memory)}; make {settings} smaller"
        )
