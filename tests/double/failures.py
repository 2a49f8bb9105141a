"""What is to go wrong: MPIGOSSIP_DOUBLE_FAILS="capture,pin:2" fails captures and the 2nd pin."""

from __future__ import annotations

import os
from collections import Counter

_calls: Counter[str] = Counter()


def forget() -> None:
    """Count calls anew."""
    _calls.clear()


def fails(what: str) -> bool:
    """Whether this call of its kind is to fail."""
    _calls[what] += 1
    for item in os.environ.get("MPIGOSSIP_DOUBLE_FAILS", "").split(","):
        name, _, which = item.partition(":")
        if name == what and (not which or int(which) == _calls[what]):
            return True
    return False
