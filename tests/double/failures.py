"""What is to go wrong: MPIGOSSIP_DOUBLE_FAILS="capture,pin:2,put@1".

That fails every capture, the second pin, and puts on rank 1 of the launcher's.
"""

from __future__ import annotations

import os
from collections import Counter

_calls: Counter[str] = Counter()
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def forget() -> None:
    """Count calls anew."""
    _calls.clear()


def fails(what: str) -> bool:
    """Whether this call of its kind is to fail."""
    _calls[what] += 1
    here = {os.environ[name] for name in RANKS if name in os.environ}
    for item in os.environ.get("MPIGOSSIP_DOUBLE_FAILS", "").split(","):
        call, _, rank = item.partition("@")
        name, _, which = call.partition(":")
        if name == what and (not which or int(which) == _calls[what]) and {rank} <= here | {""}:
            return True
    return False
